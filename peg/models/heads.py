"""Which attention heads a rank holds. Heads alone decide at which world sizes a model can run."""

from __future__ import annotations

from dataclasses import dataclass

from peg.errors import ConfigError


@dataclass(frozen=True, slots=True)
class HeadShare:
    """One rank's heads in one kind of layer: query heads from first_query on, KV heads from first_kv on."""

    query_heads: int
    kv_heads: int
    first_query: int
    first_kv: int


def share_heads(query_heads: int, kv_heads: int, world_size: int, rank: int = 0) -> HeadShare:
    """Share heads out over the ranks, in order.

    Query heads must divide. KV heads are sharded if they divide too; if instead the world size is a multiple of
    them, each is replicated on as many consecutive ranks, which then hold just the query heads that use it. Raises
    ConfigError otherwise.
    """
    if not _divide(query_heads, kv_heads, world_size):
        legal = [str(size) for size in range(1, query_heads + 1) if _divide(query_heads, kv_heads, size)]
        raise ConfigError(
            f"--tensor-parallel-size {world_size}: {_why_not(query_heads, kv_heads, world_size)}; "
            f"with {query_heads} query heads and {kv_heads} KV heads it can be {', '.join(legal)}"
        )
    local = query_heads // world_size
    if kv_heads % world_size == 0:
        share = kv_heads // world_size
        return HeadShare(local, share, rank * local, rank * share)
    return HeadShare(local, 1, rank * local, rank // (world_size // kv_heads))


def _divide(query_heads: int, kv_heads: int, world_size: int) -> bool:
    return query_heads % world_size == 0 and (kv_heads % world_size == 0 or world_size % kv_heads == 0)


def _why_not(query_heads: int, kv_heads: int, world_size: int) -> str:
    if query_heads % world_size:
        return f"{query_heads} query heads do not divide by {world_size} (remainder {query_heads % world_size})"
    return f"neither do {kv_heads} KV heads divide by {world_size} nor {world_size} by {kv_heads}"
