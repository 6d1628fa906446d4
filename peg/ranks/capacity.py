"""How many blocks each KV group's pool gets. Pure arithmetic, done before anything is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peg.errors import ConfigError
from peg.plan import GroupCapacity, KVGroup, Recurrent, SlidingWindow


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityRequest:
    """What the pools are for. `dtype_bytes` is the size of one number of K or V."""

    groups: Sequence[KVGroup]
    dtype_bytes: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int

    def block_bytes(self, group: KVGroup) -> int:
        """One block of all layers of a group."""
        assert not isinstance(group, Recurrent)
        return self.block_size * group.bytes_per_token(self.dtype_bytes)

    def blocks(self, group: KVGroup, tokens: int) -> int:
        """The blocks of a group that let every pool hold `tokens` tokens, block 0 included.

        No sequence ever holds more of a sliding group than its window and one chunk.
        """
        needed = -(-tokens // self.block_size)
        if isinstance(group, SlidingWindow):
            span = min(group.window + self.max_num_batched_tokens, self.max_model_len)
            needed = min(needed, self.max_num_seqs * (-(-span // self.block_size) + 1))
        return needed + 1

    def total_bytes(self, tokens: int) -> int:
        """All pools of one rank, if each is to hold `tokens` tokens."""
        return sum(self.blocks(group, tokens) * self.block_bytes(group) for group in self.groups)


def divide_budget(request: CapacityRequest, budget_bytes: int) -> tuple[GroupCapacity, ...]:
    """Give every pool room for the same number of tokens, as many as fit into `budget_bytes` of one rank.

    Raises ConfigError, with the arithmetic, where not even one sequence of the whole context fits.
    """
    block = request.block_size
    most = -(-request.max_model_len // block) * request.max_num_seqs
    least = -(-request.max_model_len // block)
    low, high = 0, most
    while low < high:  # the largest number of blocks of tokens that fits
        middle = (low + high + 1) // 2
        if request.total_bytes(middle * block) <= budget_bytes:
            low = middle
        else:
            high = middle - 1
    if low < least:
        needed = request.total_bytes(least * block)
        raise ConfigError(
            f"KV memory: {budget_bytes:,} bytes on each rank hold {low * block} tokens, "
            f"one sequence of --max-model-len {request.max_model_len} needs {needed:,} bytes: "
            f"raise --kv-cache-memory to {needed} or lower --max-model-len to {max(low * block, 1)}"
        )
    return tuple(GroupCapacity(group, request.blocks(group, low * block)) for group in request.groups)
