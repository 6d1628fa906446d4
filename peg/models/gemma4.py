"""Gemma 4, dense, its text part. Matches transformers' Gemma4ForCausalLM and the text of its multimodal classes.

Norms stand before and behind attention and MLP; every head of q, k and v has one too, so scores are not scaled. Full
layers have heads of their own size and, in the large models, use K's product for V. The small models add a vector per
layer and token to the stream (per-layer embeddings), and their last layers read the K and V of earlier ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from peg.checkpoint.manifest import Manifest, TensorSpec
from peg.checkpoint.source import TensorSource, shard_size
from peg.kernels.activation import gelu_tanh_and_mul
from peg.kernels.attention import paged_attention
from peg.kernels.embedding import embed
from peg.kernels.heads import HeadRules, turn_queries
from peg.kernels.linear import Linear, pack
from peg.kernels.norm import rms_norm_add_, rms_norm_add_rms_norm_, rms_norm_fp32
from peg.kernels.rope import proportional_frequencies
from peg.models.comm import Communicator
from peg.models.gemma4_config import AttentionKind, Gemma4Config, parse_gemma4, projections, tensor_shapes
from peg.models.heads import HeadShare, share_heads
from peg.models.inputs import LayerCache, StepInputs
from peg.models.layers import AttentionStep, Head, Mlp, begin_attention, load_o, load_qkv
from peg.plan import Full, KVGroup, SlidingWindow

_TOWERS = ("vision_tower.", "embed_vision.", "audio_tower.", "embed_audio.", "vision_embedder.")
_PREFIXES = ("model.", "model.language_model.")


@dataclass(frozen=True, slots=True)
class _Group:
    """What the layers of one KV group share."""

    first_layer: int
    heads: HeadShare
    kind: AttentionKind
    frequencies: Tensor


@dataclass(frozen=True, slots=True)
class _PerLayer:
    """How a layer takes in its per-layer embedding."""

    gate: Linear
    projection: Linear
    norm: Tensor


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's weights. `next_norm` stands in front of the next layer, or at the end of the model.

    `owner` is the layer whose cache it uses: its own, or one that it shares and only reads.
    """

    group: int
    owner: int
    qkv: Linear
    rules: HeadRules
    o: Linear
    mlp: Mlp
    attention_norm: Tensor
    mlp_input_norm: Tensor
    mlp_norm: Tensor
    per_layer: _PerLayer | None
    scalar: Tensor
    next_norm: Tensor


@dataclass(frozen=True, slots=True)
class _PerLayerEmbedding:
    """One rank's rows of the table of per-layer embeddings, and what adds the context to them."""

    table: Tensor
    first_id: int
    projection: Linear
    norm: Tensor


@dataclass(frozen=True, slots=True)
class Gemma4:
    """One rank's shard of a Gemma 4 model. In float16 its activations overflow."""

    dtypes: ClassVar[tuple[str, ...]] = ("bfloat16", "float32")

    config: Gemma4Config
    embedding: Tensor
    first_id: int
    per_layer: _PerLayerEmbedding | None
    groups: tuple[_Group, ...]
    first_norm: Tensor
    layers: tuple[_Layer, ...]
    head: Head

    @staticmethod
    def parse(config: Mapping[str, object]) -> Gemma4Config:
        """See `Family`."""
        return parse_gemma4(config)

    @staticmethod
    def manifest(config: Gemma4Config) -> Manifest:
        """See `Family`. What files hold for layers without K and V of their own is skipped."""
        shared = [
            f"{prefix}layers.{layer}.self_attn.{name}."
            for prefix in _PREFIXES
            for layer in range(config.first_shared, config.num_layers)
            for name in ("k_proj", "v_proj", "k_norm", "v_norm")
        ]
        return Manifest(
            tuple(TensorSpec(name, shape) for name, shape in tensor_shapes(config)),
            skipped_prefixes=(*(f"model.{tower}" for tower in _TOWERS), *shared),
            renamed_prefixes=(("model.language_model.", "model."),),
            means=(("q_norm.weight", 1 / 16), ("norm.weight", 1.0), ("layer_scalar", 1.0)),  # q_norm scales the scores
        )

    @staticmethod
    def kv_groups(config: Gemma4Config, world_size: int) -> tuple[KVGroup, ...]:
        """See `Family`. Each kind of layer is sharded or replicated on its own."""
        groups: list[KVGroup] = []
        for name, layers in config.groups.items():
            kind = config.kinds[name]
            kv_heads = share_heads(config.query_heads, kind.kv_heads, world_size).kv_heads
            if kind.window is None:
                groups.append(Full(layers, kv_heads, kind.head_dim))
            else:
                groups.append(SlidingWindow(layers, kv_heads, kind.head_dim, kind.window))
        return tuple(groups)

    @classmethod
    def load(cls, config: Gemma4Config, source: TensorSource) -> Self:
        """See `Family`."""
        groups = tuple(_load_group(config, source, name) for name in config.groups)
        embedding = source.shard("model.embed_tokens.weight", 0)
        return cls(
            config=config,
            embedding=embedding,
            first_id=source.rank * shard_size(config.vocab_size, source.world_size),
            per_layer=_load_per_layer_embedding(config, source) if config.per_layer_size else None,
            groups=groups,
            first_norm=source.whole("model.layers.0.input_layernorm.weight"),
            layers=tuple(_load_layer(config, source, groups, layer) for layer in range(config.num_layers)),
            head=Head.load(source, embedding if config.tied else None, config.vocab_size, config.softcap),
        )

    def forward(self, inputs: StepInputs, caches: Sequence[LayerCache], comm: Communicator) -> Tensor:
        """See `Model`."""
        eps = self.config.norm_eps
        residual = embed(inputs.token_ids, self.embedding, self.first_id)
        comm.all_reduce_(residual)
        residual.mul_(_rounded_root(residual.shape[1], residual.dtype))
        added = self._per_layer_inputs(inputs.token_ids, residual, comm)
        steps = [
            begin_attention(inputs, index, caches[group.first_layer], group.frequencies, group.kind.window)
            for index, group in enumerate(self.groups)
        ]
        hidden = rms_norm_fp32(residual, self.first_norm, eps)
        for index, layer in enumerate(self.layers):
            hidden = self._attend(layer, hidden, caches[layer.owner], steps[layer.group])
            comm.all_reduce_(hidden)  # before the norm: the norm of a sum is not the sum of norms
            hidden = rms_norm_add_rms_norm_(hidden, residual, layer.attention_norm, layer.mlp_input_norm, eps)
            hidden = layer.mlp.down(gelu_tanh_and_mul(layer.mlp.gate_up(hidden)))
            comm.all_reduce_(hidden)
            norm = layer.mlp_norm
            if layer.per_layer is not None:
                rms_norm_add_(hidden, residual, norm, eps)
                gated = gelu_tanh_and_mul(torch.cat((layer.per_layer.gate(residual), added[:, index]), -1))
                hidden, norm = layer.per_layer.projection(gated), layer.per_layer.norm
            hidden = rms_norm_add_rms_norm_(hidden, residual, norm, layer.next_norm, eps, layer.scalar)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Model`."""
        return self.head.logits(hidden)

    def _attend(self, layer: _Layer, hidden: Tensor, cache: LayerCache, step: AttentionStep) -> Tensor:
        """Store K and V of hidden [T, M] where they are the layer's own; return this rank's part of the output."""
        product = layer.qkv(hidden)
        heads = product.view(len(product), -1, self.groups[layer.group].kind.head_dim)
        if layer.rules.k_norm is None:
            q = turn_queries(heads, layer.rules, step.angles)
        else:
            q = cache.write(heads, layer.rules, step.angles, step.slots)
        return layer.o(paged_attention(q, cache.k, cache.v, step.plan, 1.0).flatten(1))

    def _per_layer_inputs(self, token_ids: Tensor, embedded: Tensor, comm: Communicator) -> Tensor:
        """What each layer adds for each token [T, layers, P]; empty without per-layer embeddings."""
        if self.per_layer is None:
            return embedded.new_empty(0)
        shape = (-1, self.config.num_layers, self.config.per_layer_size)
        context = self.per_layer.projection(embedded).mul_(self.config.hidden_size**-0.5).view(shape)
        context = rms_norm_fp32(context, self.per_layer.norm, self.config.norm_eps)
        tokens = embed(token_ids, self.per_layer.table, self.per_layer.first_id)
        comm.all_reduce_(tokens)
        scale = _rounded_root(self.config.per_layer_size, tokens.dtype)
        return context.add_(tokens.mul_(scale).view(shape)).mul_(2**-0.5)


def _rounded_root(size: int, dtype: torch.dtype) -> float:
    """The square root as the dtype has it: in bf16 off by up to 0.2 %, and part of the model."""
    return float(torch.tensor(size**0.5).to(dtype))


def _load_group(config: Gemma4Config, source: TensorSource, name: str) -> _Group:
    kind = config.kinds[name]
    frequencies = proportional_frequencies(kind.head_dim, kind.theta, kind.rotated, kind.rope_factor)
    return _Group(
        first_layer=config.groups[name][0],
        heads=share_heads(config.query_heads, kind.kv_heads, source.world_size, source.rank),
        kind=kind,
        frequencies=frequencies.to(source.device),
    )


def _load_per_layer_embedding(config: Gemma4Config, source: TensorSource) -> _PerLayerEmbedding:
    return _PerLayerEmbedding(
        table=source.shard("model.embed_tokens_per_layer.weight", 0),
        first_id=source.rank * shard_size(config.per_layer_vocab_size, source.world_size),
        projection=pack(source.whole("model.per_layer_model_projection.weight")),
        norm=source.whole("model.per_layer_projection_norm.weight"),
    )


def _load_per_layer(source: TensorSource, name: str) -> _PerLayer:
    return _PerLayer(
        gate=pack(source.whole(f"{name}.per_layer_input_gate.weight")),
        projection=pack(source.whole(f"{name}.per_layer_projection.weight")),
        norm=source.whole(f"{name}.post_per_layer_input_norm.weight"),
    )


def _load_layer(config: Gemma4Config, source: TensorSource, groups: Sequence[_Group], layer: int) -> _Layer:
    name = f"model.layers.{layer}"
    index = list(config.groups).index(config.layer_types[layer])
    heads, head_dim = groups[index].heads, groups[index].kind.head_dim
    last = layer == config.num_layers - 1

    def norm(which: str) -> Tensor:
        return source.whole(f"{name}.{which}.weight")

    return _Layer(
        group=index,
        owner=config.owner(layer),
        qkv=load_qkv(source, f"{name}.self_attn", heads, head_dim, projections(config, layer)),
        rules=HeadRules(
            heads.query_heads,
            rms_norm_fp32,
            norm("self_attn.q_norm"),
            None if config.is_shared(layer) else norm("self_attn.k_norm"),
            config.norm_eps,
            norm_values=True,
        ),
        o=load_o(source, f"{name}.self_attn", heads, head_dim),
        mlp=Mlp.load(source, f"{name}.mlp"),
        attention_norm=norm("post_attention_layernorm"),
        mlp_input_norm=norm("pre_feedforward_layernorm"),
        mlp_norm=norm("post_feedforward_layernorm"),
        per_layer=_load_per_layer(source, name) if config.per_layer_size else None,
        scalar=source.whole(f"{name}.layer_scalar"),
        next_norm=source.whole("model.norm.weight" if last else f"model.layers.{layer + 1}.input_layernorm.weight"),
    )
