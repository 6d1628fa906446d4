"""What a model's forward reads besides its weights: one step's tokens and where their K and V live."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from peg.kernels.heads import Angles, HeadRules


@dataclass(frozen=True, slots=True)
class GroupInputs:
    """One paged KV group in one step.

    slots int64 [T]: where each token's K and V go, block id times block size plus offset.
    tables int32 [S, W]: the block table of each slice's row; entries past its length, or behind the window, are
    not read.
    """

    slots: Tensor
    tables: Tensor


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step as the model sees it; everything lies on the rank's device, written by the rank's thread.

    token_ids int64 [T] and positions int64 [T], slice after slice.
    query_starts int32 [S + 1]: slice s is tokens query_starts[s] to query_starts[s + 1] - 1.
    context_lens int32 [S]: tokens of each sequence in the cache once this step's are written.
    groups: one entry per KV group, in the model's order.
    max_query, max_context: the largest slice and the largest context, host integers.
    query_lens, context_lens_host: the same lengths on the host, for the CPU's references.
    """

    token_ids: Tensor
    positions: Tensor
    query_starts: Tensor
    context_lens: Tensor
    groups: tuple[GroupInputs, ...]
    query_lens: tuple[int, ...]
    context_lens_host: tuple[int, ...]

    @property
    def max_query(self) -> int:
        return max(self.query_lens)

    @property
    def max_context(self) -> int:
        return max(self.context_lens_host)


class LayerCache(Protocol):
    """One layer's pool: k and v, model dtype [N, B, G, D]. Layers that share KV are handed the same object.

    `write` is the only way K and V get in: it takes a layer's heads [T, N, D] apart by `rules`, stores K and V at
    `slots` int64 [T], the step's `GroupInputs.slots` themselves, and then counts what it stored in the rank's digest.
    It returns Q [T, H, D], ready for attention. Whoever looks at k and v only reads them.
    """

    @property
    def k(self) -> Tensor: ...

    @property
    def v(self) -> Tensor: ...

    def write(self, heads: Tensor, rules: HeadRules, angles: Angles, slots: Tensor) -> Tensor: ...
