"""Blocks that families share: how their weights are sharded on the way in, and what is alike in every forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from peg.checkpoint.rope import RopeParameters
from peg.checkpoint.source import TensorSource, shard_size
from peg.kernels.attention import AttentionPlan, SliceLayout, plan_attention
from peg.kernels.linear import Linear, PlainLinear, pack
from peg.kernels.rope import default_frequencies, llama3_frequencies
from peg.models.heads import HeadShare
from peg.models.inputs import LayerCache, StepInputs


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
    """One rank's rows of the output projection; the last rows beyond `known` pad the vocabulary."""

    product: Linear
    known: int

    @classmethod
    def tied(cls, source: TensorSource, embedding: Tensor, vocab_size: int) -> Self:
        """Share the embedding's rows, which must stay readable one by one."""
        return cls(PlainLinear(embedding), _known_ids(source, vocab_size))

    @classmethod
    def load(cls, source: TensorSource, name: str, vocab_size: int) -> Self:
        return cls(pack(source.shard(name, 0)), _known_ids(source, vocab_size))

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, M] to float32 [rows, V/R], the padding −inf."""  # noqa: D403
        logits = self.product(hidden).float()
        logits[:, self.known :] = float("-inf")
        return logits


def load_qkv(source: TensorSource, prefix: str, share: HeadShare, head_dim: int) -> Linear:
    """This rank's heads of q, k and v as one weight [(H + 2G) · D, M]."""
    query = _rows(share.first_query, share.query_heads, head_dim)
    kv = _rows(share.first_kv, share.kv_heads, head_dim)
    parts = (("q_proj", query), ("k_proj", kv), ("v_proj", kv))
    return pack(torch.cat([source.part(f"{prefix}.{name}.weight", 0, *rows) for name, rows in parts]))


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


def plan_group(inputs: StepInputs, group: int, cache: LayerCache, window: int | None = None) -> AttentionPlan:
    """The attention of one KV group in this step; `cache` is any of its layers'."""
    layout = SliceLayout(inputs.query_starts, inputs.context_lens, inputs.query_lens, inputs.context_lens_host)
    return plan_attention(layout, inputs.groups[group].tables, cache.k, window)


def _rows(first_head: int, heads: int, head_dim: int) -> tuple[int, int]:
    return first_head * head_dim, (first_head + heads) * head_dim


def _known_ids(source: TensorSource, vocab_size: int) -> int:
    share = shard_size(vocab_size, source.world_size)
    return min(max(vocab_size - source.rank * share, 0), share)
