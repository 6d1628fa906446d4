"""Which heads a rank holds, and at which world sizes a model can run at all."""

from __future__ import annotations

import pytest

from peg.errors import ConfigError
from peg.models.heads import HeadShare, share_heads

CASES = (  # query heads, KV heads, world sizes that can be: SmolLM2, Gemma 3 270M, Gemma 4 31B, odd ones
    (9, 3, (1, 3, 9)),
    (4, 1, (1, 2, 4)),
    (32, 4, (1, 2, 4, 8, 16, 32)),
    (12, 4, (1, 2, 4, 12)),
    (12, 6, (1, 2, 3, 6, 12)),
)


@pytest.mark.parametrize(("query_heads", "kv_heads", "legal"), CASES)
def test_every_query_head_meets_its_own_kv_head(query_heads: int, kv_heads: int, legal: tuple[int, ...]) -> None:
    """Over all ranks, query heads are held once, and each meets the KV head that it has in the whole model."""
    for world_size in range(1, 2 * query_heads):
        if world_size not in legal:
            with pytest.raises(ConfigError, match=f"--tensor-parallel-size {world_size}: .*it can be {legal[0]}, "):
                share_heads(query_heads, kv_heads, world_size)
            continue
        pairs = []
        for rank in range(world_size):
            share = share_heads(query_heads, kv_heads, world_size, rank)
            group = share.query_heads // share.kv_heads
            assert share.query_heads == group * share.kv_heads
            pairs += [(share.first_query + h, share.first_kv + h // group) for h in range(share.query_heads)]
        assert pairs == [(head, head // (query_heads // kv_heads)) for head in range(query_heads)]


def test_the_refusal_shows_the_arithmetic() -> None:
    """SmolLM2 over two ranks: the message names the nine query heads and the world sizes that are left."""
    with pytest.raises(ConfigError) as refused:
        share_heads(9, 3, 2)
    assert str(refused.value) == (
        "--tensor-parallel-size 2: 9 query heads do not divide by 2 (remainder 1); "
        "with 9 query heads and 3 KV heads it can be 1, 3, 9"
    )
    with pytest.raises(ConfigError, match="neither do 6 KV heads divide by 4 nor 4 by 6"):
        share_heads(12, 6, 4)


def test_replicas_are_consecutive_ranks() -> None:
    """Nine ranks over three KV heads: ranks 3 to 5 hold the second one."""
    assert [share_heads(9, 3, 9, rank).first_kv for rank in range(9)] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert share_heads(9, 3, 3, 2) == HeadShare(query_heads=3, kv_heads=1, first_query=6, first_kv=2)
