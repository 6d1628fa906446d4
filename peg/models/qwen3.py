"""Qwen3, dense (Qwen team 2025): Llama with a norm on every head of q and k. Matches transformers' Qwen3ForCausalLM."""

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
from peg.errors import CheckpointError
from peg.kernels.activation import silu_and_mul
from peg.kernels.attention import paged_attention
from peg.kernels.embedding import embed
from peg.kernels.heads import HeadRules
from peg.kernels.linear import Linear
from peg.kernels.norm import add_rms_norm_, rms_norm
from peg.models.comm import Communicator
from peg.models.heads import HeadShare, share_heads
from peg.models.inputs import LayerCache, StepInputs
from peg.models.layers import AttentionStep, Head, Mlp, begin_attention, load_o, load_qkv, rope_frequencies
from peg.plan import Full, KVGroup

_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Config:
    """What config.json says, by peg's names."""

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
    rope: RopeParameters
    forbidden_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's weights. `next_norm` stands in front of the next layer, or at the end of the model."""

    qkv: Linear
    rules: HeadRules
    o: Linear
    mlp_norm: Tensor
    mlp: Mlp
    next_norm: Tensor


@dataclass(frozen=True, slots=True)
class Qwen3:
    """One rank's shard of a dense Qwen3 model."""

    dtypes: ClassVar[tuple[str, ...]] = ("bfloat16", "float32", "float16")

    config: Qwen3Config
    heads: HeadShare
    embedding: Tensor
    first_id: int
    first_norm: Tensor
    layers: tuple[_Layer, ...]
    head: Head
    frequencies: Tensor

    @staticmethod
    def parse(config: Mapping[str, object]) -> Qwen3Config:
        """See `Family`."""
        fields = Fields(config)
        fields.expect("hidden_act", "silu")
        fields.expect("attention_bias", False)
        fields.expect("use_sliding_window", False)
        fields.expect("quantization_config")
        heads, layers = fields.integer("num_attention_heads"), fields.integer("num_hidden_layers")
        kv_heads = fields.integer("num_key_value_heads", default=heads)
        if heads % kv_heads:
            raise fields.error("num_key_value_heads", f"{heads} query heads must divide by it")
        if fields.strings("layer_types") not in (None, ("full_attention",) * layers):
            raise fields.error("layer_types", f"must be full_attention {layers} times, once for each layer")
        head_dim = fields.integer("head_dim", default=128)
        if head_dim % 2:
            raise fields.error("head_dim", "must be even")
        return Qwen3Config(
            vocab_size=fields.integer("vocab_size"),
            hidden_size=fields.integer("hidden_size"),
            mlp_size=fields.integer("intermediate_size"),
            num_layers=layers,
            query_heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            norm_eps=fields.number("rms_norm_eps"),
            max_positions=fields.integer("max_position_embeddings"),
            tied=fields.boolean("tie_word_embeddings", default=False),
            rope=read_rope(fields),
        )

    @staticmethod
    def manifest(config: Qwen3Config) -> Manifest:
        """See `Family`. Files of a tied model may carry a copy of the embedding as its head."""
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
            "mlp.gate_proj": (mlp, M),
            "mlp.up_proj": (mlp, M),
            "mlp.down_proj": (M, mlp),
        }
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (config.vocab_size, M), "model.norm": (M,)}
        for layer in range(config.num_layers):
            shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in in_layer.items()}
        specs = tuple(TensorSpec(f"{name}.weight", shape) for name, shape in shapes.items())
        head = TensorSpec(_HEAD, (config.vocab_size, M))
        return Manifest(specs, optional=(head,)) if config.tied else Manifest((*specs, head))

    @staticmethod
    def kv_groups(config: Qwen3Config, world_size: int) -> tuple[KVGroup, ...]:
        """See `Family`."""
        share = share_heads(config.query_heads, config.kv_heads, world_size)
        return (Full(tuple(range(config.num_layers)), share.kv_heads, config.head_dim),)

    @classmethod
    def load(cls, config: Qwen3Config, source: TensorSource) -> Self:
        """See `Family`."""
        heads = share_heads(config.query_heads, config.kv_heads, source.world_size, source.rank)
        embedding = source.shard("model.embed_tokens.weight", 0)
        if config.tied and source.has(_HEAD) and not torch.equal(source.shard(_HEAD, 0), embedding):
            raise CheckpointError(f"{_HEAD} differs from the embedding, but config.json: tie_word_embeddings is true")
        return cls(
            config=config,
            heads=heads,
            embedding=embedding,
            first_id=source.rank * shard_size(config.vocab_size, source.world_size),
            first_norm=source.whole("model.layers.0.input_layernorm.weight"),
            layers=tuple(_load_layer(config, source, heads, layer) for layer in range(config.num_layers)),
            head=Head.load(source, embedding if config.tied else None, config.vocab_size),
            frequencies=rope_frequencies(config.rope, config.head_dim).to(source.device),
        )

    def forward(self, inputs: StepInputs, caches: Sequence[LayerCache], comm: Communicator) -> Tensor:
        """See `Model`."""
        eps = self.config.norm_eps
        residual = embed(inputs.token_ids, self.embedding, self.first_id)
        comm.all_reduce_(residual)
        step = begin_attention(inputs, 0, caches[0], self.frequencies)
        hidden = rms_norm(residual, self.first_norm, eps)
        for layer, cache in zip(self.layers, caches, strict=True):
            hidden = self._attend(layer, hidden, cache, step)
            comm.all_reduce_(hidden)
            hidden = add_rms_norm_(hidden, residual, layer.mlp_norm, eps)
            hidden = layer.mlp.down(silu_and_mul(layer.mlp.gate_up(hidden)))
            comm.all_reduce_(hidden)
            hidden = add_rms_norm_(hidden, residual, layer.next_norm, eps)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Model`."""
        return self.head.logits(hidden)

    def _attend(self, layer: _Layer, hidden: Tensor, cache: LayerCache, step: AttentionStep) -> Tensor:
        """Store K and V of hidden [T, M]; return this rank's part of the attention's output [T, M]."""
        D = self.config.head_dim
        heads = layer.qkv(hidden).view(-1, self.heads.query_heads + 2 * self.heads.kv_heads, D)
        q = cache.write(heads, layer.rules, step.angles, step.slots)
        return layer.o(paged_attention(q, cache.k, cache.v, step.plan, D**-0.5).flatten(1))


def _load_layer(config: Qwen3Config, source: TensorSource, heads: HeadShare, layer: int) -> _Layer:
    name = f"model.layers.{layer}"
    last = layer == config.num_layers - 1
    return _Layer(
        qkv=load_qkv(source, f"{name}.self_attn", heads, config.head_dim),
        rules=HeadRules(
            heads.query_heads,
            rms_norm,
            source.whole(f"{name}.self_attn.q_norm.weight"),
            source.whole(f"{name}.self_attn.k_norm.weight"),
            config.norm_eps,
        ),
        o=load_o(source, f"{name}.self_attn", heads, config.head_dim),
        mlp_norm=source.whole(f"{name}.post_attention_layernorm.weight"),
        mlp=Mlp.load(source, f"{name}.mlp"),
        next_norm=source.whole("model.norm.weight" if last else f"model.layers.{layer + 1}.input_layernorm.weight"),
    )
