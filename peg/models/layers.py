"""Blocks that families share: how their weights are sharded on the way in, and what is alike in every forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from peg.checkpoint.rope import RopeParameters
from peg.checkpoint.source import TensorSource, shard_size
from peg.kernels.attention import AttentionPlan, SliceLayout, plan_attention
from peg.kernels.heads import Angles
from peg.kernels.linear import Linear, pack
from peg.kernels.rope import default_frequencies, llama3_frequencies, rope_angles
from peg.models.heads import HeadShare
from peg.models.inputs import LayerCache, StepInputs

QKV = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True, slots=True)
class Mlp:
    """One rank's columns of a gated MLP: gate_up [2I, M], gate first; down [M, I], whose output is a partial sum."""

    gate_up: Linear
    down: Linear

    @classmethod
    def load(cls, source: TensorSource, prefix: str) -> Self:
        halves = (source.shard(f"{prefix}.gate_proj.weight", 0), source.shard(f"{prefix}.up_proj.weight", 0))
        return cls(pack(torch.cat(halves)), pack(source.shard(f"{prefix}.down_proj.weight", 1)))


@dataclass(frozen=True, slots=True)
class Head:
    """One rank's rows of the output projection; the last rows beyond `known` pad the vocabulary.

    With a `softcap` c every logit z becomes c · tanh(z / c), in fp32.
    """

    product: Linear
    known: int
    softcap: float | None = None

    @classmethod
    def load(cls, source: TensorSource, tied: Tensor | None, vocab_size: int, softcap: float | None = None) -> Self:
        """Take `tied`, this rank's rows of the embedding (which must stay readable one by one), or lm_head.weight."""
        product = pack(source.shard("lm_head.weight", 0) if tied is None else tied)
        share = shard_size(vocab_size, source.world_size)
        return cls(product, min(max(vocab_size - source.rank * share, 0), share), softcap)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits float32 [rows, V/R] of hidden [rows, M], the padding −inf."""
        logits = self.product(hidden).float()
        if self.softcap is not None:
            logits = logits.div_(self.softcap).tanh_().mul_(self.softcap)
        if self.known < logits.shape[1]:
            logits[:, self.known :] = float("-inf")
        return logits


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """What the layers of one KV group share in one step: angles of its tokens, where K and V go, what is attended."""

    angles: Angles
    slots: Tensor
    plan: AttentionPlan


def load_qkv(
    source: TensorSource, prefix: str, share: HeadShare, head_dim: int, names: tuple[str, ...] = QKV
) -> Linear:
    """Load this rank's heads of `names` as one weight: for all three [(H + 2G) · D, M]."""
    query = _rows(share.first_query, share.query_heads, head_dim)
    kv = _rows(share.first_kv, share.kv_heads, head_dim)
    rows = {name: query if name == "q_proj" else kv for name in names}
    return pack(torch.cat([source.part(f"{prefix}.{name}.weight", 0, *rows[name]) for name in names]))


def load_o(source: TensorSource, prefix: str, share: HeadShare, head_dim: int) -> Linear:
    """The columns of this rank's query heads [M, H · D]; the product is a partial sum."""
    return pack(source.part(f"{prefix}.o_proj.weight", 1, *_rows(share.first_query, share.query_heads, head_dim)))


def rope_frequencies(rope: RopeParameters, head_dim: int) -> Tensor:
    """Frequencies float32 [D/2] of the types default, linear and llama3."""
    frequencies = default_frequencies(head_dim, rope.theta, rope.factor if rope.rope_type == "linear" else 1.0)
    if rope.rope_type != "llama3":
        return frequencies
    context = rope.original_max_position_embeddings
    return llama3_frequencies(frequencies, rope.factor, rope.low_freq_factor, rope.high_freq_factor, context)


def begin_attention(
    inputs: StepInputs, group: int, cache: LayerCache, frequencies: Tensor, window: int | None = None
) -> AttentionStep:
    """Prepare a step for one KV group; `cache` is any of its layers'."""
    angles = rope_angles(inputs.positions, frequencies, cache.k.dtype)
    layout = SliceLayout(inputs.query_starts, inputs.context_lens, inputs.query_lens, inputs.context_lens_host)
    plan = plan_attention(layout, inputs.groups[group].tables, cache.k, window)
    return AttentionStep(angles, inputs.groups[group].slots, plan)


def _rows(first_head: int, heads: int, head_dim: int) -> tuple[int, int]:
    return first_head * head_dim, (first_head + heads) * head_dim
