"""Gemma 3 (Gemma team 2025), its text part. Matches transformers' Gemma3ForCausalLM.

Norms stand before and behind attention and MLP; their weights are stored as w and mean 1 + w. Most layers attend
within a window, every sixth to all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from peg.checkpoint.fields import Fields
from peg.checkpoint.manifest import Manifest, TensorSpec
from peg.checkpoint.rope import RopeParameters, read_rope
from peg.checkpoint.source import TensorSource, shard_size
from peg.kernels.activation import gelu_tanh_and_mul
from peg.kernels.attention import paged_attention
from peg.kernels.embedding import embed
from peg.kernels.heads import HeadRules
from peg.kernels.linear import Linear
from peg.kernels.norm import rms_norm_add_rms_norm_, rms_norm_fp32
from peg.models.comm import Communicator
from peg.models.heads import HeadShare, share_heads
from peg.models.inputs import LayerCache, StepInputs
from peg.models.layers import AttentionStep, Head, Mlp, begin_attention, load_o, load_qkv, rope_frequencies
from peg.plan import Full, KVGroup, SlidingWindow

_KINDS = ("sliding_attention", "full_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Config:
    """What config.json says, by peg's names. `rope` has the parameters of each kind of layer."""

    vocab_size: int
    hidden_size: int
    mlp_size: int
    num_layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    tied: bool
    scale: float
    window: int
    layer_types: tuple[str, ...]
    rope: Mapping[str, RopeParameters]
    forbidden_token_ids: tuple[int, ...]

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of layer that there are: one KV group each, in this order."""
        return tuple(kind for kind in _KINDS if kind in self.layer_types)


@dataclass(frozen=True, slots=True)
class _Group:
    """What the layers of one kind share: how far they see and how they turn."""

    first_layer: int
    window: int | None
    frequencies: Tensor


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's weights. `next_norm` stands in front of the next layer, or at the end of the model."""

    group: int
    qkv: Linear
    rules: HeadRules
    o: Linear
    mlp: Mlp
    attention_norm: Tensor
    mlp_input_norm: Tensor
    mlp_norm: Tensor
    next_norm: Tensor


@dataclass(frozen=True, slots=True)
class Gemma3:
    """One rank's shard of a Gemma 3 model. In float16 its activations overflow."""

    dtypes: ClassVar[tuple[str, ...]] = ("bfloat16", "float32")

    config: Gemma3Config
    heads: HeadShare
    embedding: Tensor
    embedding_scale: float
    first_id: int
    groups: tuple[_Group, ...]
    first_norm: Tensor
    layers: tuple[_Layer, ...]
    head: Head

    @staticmethod
    def parse(config: Mapping[str, object]) -> Gemma3Config:
        """See `Family`. Files with a vision tower list few fields; the others have the class's defaults."""
        outer = Fields(config)
        fields = outer.section("text_config") or outer
        _refuse_what_peg_cannot_run(outer, fields)
        layers = fields.integer("num_hidden_layers")
        heads, kv_heads = (
            fields.integer("num_attention_heads", default=8),
            fields.integer("num_key_value_heads", default=4),
        )
        if heads % kv_heads:
            raise fields.error("num_key_value_heads", f"{heads} query heads must divide by it")
        tied = fields.boolean("tie_word_embeddings", default=True)
        outer.expect("tie_word_embeddings", tied)
        return Gemma3Config(
            vocab_size=(vocab_size := fields.integer("vocab_size", default=262208)),
            hidden_size=fields.integer("hidden_size"),
            mlp_size=fields.integer("intermediate_size"),
            num_layers=layers,
            query_heads=heads,
            kv_heads=kv_heads,
            head_dim=fields.integer("head_dim", default=256),
            norm_eps=fields.number("rms_norm_eps", default=1e-6),
            max_positions=fields.integer("max_position_embeddings", default=131072),
            tied=tied,
            scale=fields.number("query_pre_attn_scalar", default=256) ** -0.5,
            window=fields.integer("sliding_window"),
            layer_types=_layer_types(fields, layers),
            rope={
                "sliding_attention": read_rope(
                    fields, "sliding_attention", theta_field="rope_local_base_freq", scaled=False
                ),
                "full_attention": read_rope(fields, "full_attention", default_theta=1e6),
            },
            forbidden_token_ids=_image_ids(outer, vocab_size),
        )

    @staticmethod
    def manifest(config: Gemma3Config) -> Manifest:
        """See `Family`. Text parts of files with a vision tower have a prefix of their own, in two spellings."""
        M, D, mlp = config.hidden_size, config.head_dim, config.mlp_size
        in_layer = {
            "input_layernorm": (M,),
            "self_attn.q_proj": (config.query_heads * D, M),
            "self_attn.k_proj": (config.kv_heads * D, M),
            "self_attn.v_proj": (config.kv_heads * D, M),
            "self_attn.q_norm": (D,),
            "self_attn.k_norm": (D,),
            "self_attn.o_proj": (M, config.query_heads * D),
            "post_attention_layernorm": (M,),
            "pre_feedforward_layernorm": (M,),
            "mlp.gate_proj": (mlp, M),
            "mlp.up_proj": (mlp, M),
            "mlp.down_proj": (M, mlp),
            "post_feedforward_layernorm": (M,),
        }
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (config.vocab_size, M), "model.norm": (M,)}
        if not config.tied:
            shapes["lm_head"] = (config.vocab_size, M)
        for layer in range(config.num_layers):
            shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in in_layer.items()}
        towers = ("vision_tower.", "multi_modal_projector.")
        return Manifest(
            tuple(TensorSpec(f"{name}.weight", shape) for name, shape in shapes.items()),
            skipped_prefixes=(*towers, *(f"model.{tower}" for tower in towers)),
            renamed_prefixes=(
                ("language_model.model.", "model."),
                ("language_model.lm_head.", "lm_head."),
                ("model.language_model.", "model."),
            ),
            means=(),  # norms are stored as what is added to one
        )

    @staticmethod
    def kv_groups(config: Gemma3Config, world_size: int) -> tuple[KVGroup, ...]:
        """See `Family`."""
        kv_heads = share_heads(config.query_heads, config.kv_heads, world_size).kv_heads
        groups: list[KVGroup] = []
        for kind in config.kinds:
            layers = tuple(layer for layer, other in enumerate(config.layer_types) if other == kind)
            if kind == "full_attention":
                groups.append(Full(layers, kv_heads, config.head_dim))
            else:
                groups.append(SlidingWindow(layers, kv_heads, config.head_dim, config.window))
        return tuple(groups)

    @classmethod
    def load(cls, config: Gemma3Config, source: TensorSource) -> Self:
        """See `Family`."""
        heads = share_heads(config.query_heads, config.kv_heads, source.world_size, source.rank)
        embedding = source.shard("model.embed_tokens.weight", 0)
        groups = tuple(
            _Group(
                first_layer=config.layer_types.index(kind),
                window=config.window if kind == "sliding_attention" else None,
                frequencies=rope_frequencies(config.rope[kind], config.head_dim).to(source.device),
            )
            for kind in config.kinds
        )
        return cls(
            config=config,
            heads=heads,
            embedding=embedding,
            embedding_scale=float(torch.tensor(config.hidden_size**0.5).to(source.dtype)),
            first_id=source.rank * shard_size(config.vocab_size, source.world_size),
            groups=groups,
            first_norm=_norm(source, "model.layers.0.input_layernorm"),
            layers=tuple(_load_layer(config, source, heads, layer) for layer in range(config.num_layers)),
            head=Head.load(source, embedding if config.tied else None, config.vocab_size),
        )

    def forward(self, inputs: StepInputs, caches: Sequence[LayerCache], comm: Communicator) -> Tensor:
        """See `Model`."""
        eps = self.config.norm_eps
        residual = embed(inputs.token_ids, self.embedding, self.first_id)
        comm.all_reduce_(residual)
        residual.mul_(self.embedding_scale)
        steps = [
            begin_attention(inputs, index, caches[group.first_layer], group.frequencies, group.window)
            for index, group in enumerate(self.groups)
        ]
        hidden = rms_norm_fp32(residual, self.first_norm, eps)
        for layer, cache in zip(self.layers, caches, strict=True):
            hidden = self._attend(layer, hidden, cache, steps[layer.group])
            comm.all_reduce_(hidden)  # before the norm: the norm of a sum is not the sum of norms
            hidden = rms_norm_add_rms_norm_(hidden, residual, layer.attention_norm, layer.mlp_input_norm, eps)
            hidden = layer.mlp.down(gelu_tanh_and_mul(layer.mlp.gate_up(hidden)))
            comm.all_reduce_(hidden)
            hidden = rms_norm_add_rms_norm_(hidden, residual, layer.mlp_norm, layer.next_norm, eps)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Model`."""
        return self.head.logits(hidden)

    def _attend(self, layer: _Layer, hidden: Tensor, cache: LayerCache, step: AttentionStep) -> Tensor:
        """Store K and V of hidden [T, M]; return this rank's part of the attention's output [T, M]."""
        N = self.heads.query_heads + 2 * self.heads.kv_heads
        heads = layer.qkv(hidden).view(-1, N, self.config.head_dim)
        q = cache.write(heads, layer.rules, step.angles, step.slots)
        return layer.o(paged_attention(q, cache.k, cache.v, step.plan, self.config.scale).flatten(1))


def _refuse_what_peg_cannot_run(outer: Fields, fields: Fields) -> None:
    outer.expect("quantization_config")
    fields.expect("quantization_config")
    fields.expect("model_type", "gemma3_text")
    fields.expect("hidden_activation", "gelu_pytorch_tanh")
    fields.expect("attention_bias", False)
    fields.expect("attn_logit_softcapping")
    fields.expect("final_logit_softcapping")  # only one of the two classes would read it
    fields.expect("use_bidirectional_attention", False)


def _layer_types(fields: Fields, layers: int) -> tuple[str, ...]:
    pattern = fields.integer("sliding_window_pattern", default=6)
    named = fields.strings("layer_types")
    if named is None:
        return tuple("sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(layers))
    if len(named) != layers or not set(named) <= set(_KINDS):
        raise fields.error("layer_types", f"must be {' or '.join(_KINDS)} for each of {layers} layers")
    return named


def _image_ids(outer: Fields, vocab_size: int) -> tuple[int, ...]:
    """The ids that stand for images or mark them; only files with a vision tower have them."""
    ids = (
        *outer.token_ids("boi_token_index", "boi_token_id"),
        *outer.token_ids("eoi_token_index", "eoi_token_id"),
        *outer.token_ids("image_token_index", "image_token_id"),
    )
    return tuple(token_id for token_id in ids if token_id < vocab_size)


def _norm(source: TensorSource, name: str) -> Tensor:
    """1 + w, in fp32."""
    return 1 + source.whole(f"{name}.weight").float()


def _load_layer(config: Gemma3Config, source: TensorSource, heads: HeadShare, layer: int) -> _Layer:
    name = f"model.layers.{layer}"
    last = layer == config.num_layers - 1
    return _Layer(
        group=config.kinds.index(config.layer_types[layer]),
        qkv=load_qkv(source, f"{name}.self_attn", heads, config.head_dim),
        rules=HeadRules(
            heads.query_heads,
            rms_norm_fp32,
            _norm(source, f"{name}.self_attn.q_norm"),
            _norm(source, f"{name}.self_attn.k_norm"),
            config.norm_eps,
        ),
        o=load_o(source, f"{name}.self_attn", heads, config.head_dim),
        mlp=Mlp.load(source, f"{name}.mlp"),
        attention_norm=_norm(source, f"{name}.post_attention_layernorm"),
        mlp_input_norm=_norm(source, f"{name}.pre_feedforward_layernorm"),
        mlp_norm=_norm(source, f"{name}.post_feedforward_layernorm"),
        next_norm=_norm(source, "model.norm" if last else f"model.layers.{layer + 1}.input_layernorm"),
    )
