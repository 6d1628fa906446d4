"""Logprobs over a spread vocabulary: exact values, places and top lists, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from peg.errors import RankError
from peg.kernels.ordering import key_ids, key_logits, order_keys
from peg.models.comm import Communicator
from peg.plan import TokenLogprobs
from peg.ranks.logprobs import Scorer, read_logprobs
from tests.unit.rank_threads import on_ranks, shard


class Target(NamedTuple):
    token_id: int
    top: int


def told(
    scorer: Scorer, logits: Callable[[slice], Tensor], targets: list[Target], comm: Communicator
) -> list[TokenLogprobs]:
    tokens, tops = [target.token_id for target in targets], [target.top for target in targets]
    return read_logprobs(tokens, tops, scorer.score(logits, torch.tensor(tokens), max(tops), comm))


def score(logits: Tensor, targets: list[Target], world_size: int, chunk_rows: int | None = None) -> list[TokenLogprobs]:
    """What every rank agrees on."""

    def work(comm: Communicator) -> list[TokenLogprobs]:
        mine = shard(logits, world_size, comm.rank)
        scorer = Scorer(comm.rank * mine.shape[1], mine.shape[1])
        if chunk_rows is not None:
            scorer.at_once = chunk_rows
        return told(scorer, lambda part: mine[part], targets, comm)

    results = on_ranks(world_size, work)
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.mark.parametrize("world_size", [1, 2, 3, 9])
def test_logprobs_are_exact(world_size: int) -> None:
    """Values equal log_softmax in fp64, places and top lists a stable sort, also for rows full of ties."""
    rows, vocab, top = 40, 1003, 7
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, vocab, generator=generator) * 5
    logits[::2] = (logits[::2] * 2).round() / 2
    logits[1] = 0.0
    tokens = torch.randint(vocab, (rows,), generator=generator).tolist()
    wanted = [row % (top + 1) for row in range(rows)]
    targets = [Target(token, count) for token, count in zip(tokens, wanted, strict=True)]
    exact = logits.double().log_softmax(-1)
    order = logits.argsort(dim=-1, descending=True, stable=True)
    for row, result in enumerate(score(logits, targets, world_size, chunk_rows=7)):
        assert result.token_id == tokens[row]
        assert abs(result.logprob - float(exact[row, tokens[row]])) < 2e-6
        assert result.rank == order[row].tolist().index(tokens[row]) + 1
        assert [token for token, _ in result.top] == order[row, : wanted[row]].tolist()
        for token, logprob in result.top:
            assert abs(logprob - float(exact[row, token])) < 2e-6


def test_large_logits_do_not_overflow() -> None:
    """Logits in the hundreds keep exact differences."""
    (result,) = score(torch.tensor([[900.0, 899.0, -900.0]]), [Target(1, 3)], 3)
    assert abs(result.logprob + 1.3132617) < 1e-6
    assert result.rank == 2
    assert abs(result.top[2][1] + 1800.3132617) < 1e-4


@pytest.mark.parametrize("world_size", [1, 3])
def test_logits_that_are_not_finite_are_refused(world_size: int) -> None:
    """NaN anywhere in a row is an error on every rank, never a number."""
    logits = torch.zeros(3, 9)
    logits[1, 8] = float("nan")
    with pytest.raises(RankError, match="not finite"):
        score(logits, [Target(0, 2)] * 3, world_size)


def test_order_keys_keep_the_order_of_floats() -> None:
    """Keys order by logit, then by the lower id, and give both back."""
    values = torch.tensor([-float("inf"), -1e30, -1.0, -1e-40, 0.0, 1e-40, 1.0, 1e30, float("inf")])
    ids = torch.arange(9)
    keys = order_keys(values, ids)
    assert keys.tolist() == sorted(keys.tolist())
    assert torch.equal(key_logits(keys), values)
    assert torch.equal(key_ids(keys), ids)
    tied = order_keys(torch.full((3,), -2.5), torch.tensor([5, 0, 262_143]))
    assert tied.argmax() == 1


def memory_kib(field: str) -> int:
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1])


def test_memory_is_bounded_at_a_large_vocabulary() -> None:
    """Scoring 160 rows over 262,144 tokens, 160 MB of logits, takes under 200 MB at its peak: as for any more rows."""
    vocab, rows = 262_144, 160
    hidden = torch.randn(rows, 4, generator=torch.Generator().manual_seed(0))
    head = torch.randn(vocab, 4, generator=torch.Generator().manual_seed(1))
    scorer = Scorer(0, vocab)
    asked: list[int] = []

    def logits(part: slice) -> Tensor:
        asked.append(len(hidden[part]))
        return hidden[part] @ head.T

    Path("/proc/self/clear_refs").write_text("5", "ascii")  # begin a new high-water mark
    before_kib = memory_kib("VmRSS")
    (results,) = on_ranks(1, lambda comm: told(scorer, logits, [Target(row, 3) for row in range(rows)], comm))
    assert memory_kib("VmHWM") - before_kib < 200 * 1024
    assert max(asked) < rows // 4
    row = 151
    exact = (hidden[row].double() @ head.double().T).log_softmax(0)
    assert abs(results[row].logprob - float(exact[row])) < 1e-4
