"""Faults on a rank, over the group alone: all ranks come back in bounded time, and nothing is published."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from peg.errors import CommAborted, CommMismatch, InjectedFault, RankDiverged
from peg.failure import CauseKind, Fault, FaultKind, FaultPoint
from peg.plan import StepPlan
from peg.ranks.scope import Scope, failure_scope
from tests.unit.tiny_group import SOON_S, TinyGroup, rank_threads, tiny_group

STEPS = ("prefill", "chunk", "scored", "decode", "mixed")
BOUND_S = 1.0
KINDS = (FaultKind.RAISE, FaultKind.STALL)


def plans(tiny: TinyGroup, step: str) -> list[StepPlan]:
    """What to run before the fault, and the step that it is to strike, with one more in flight behind it."""
    before = tiny.prefill([5, 6, 7, 8])
    match step:
        case "prefill":
            struck = tiny.prefill([9, 10, 11], row=1)
        case "chunk":
            struck = tiny.prefill([9, 10, 11], row=1, samples=False)
        case "scored":
            plan = tiny.prefill([9, 10, 11], row=1)
            struck = replace(
                plan, slices=(msgspec.structs.replace(plan.slices[0], targets=(10, 11), prompt_logprobs=1),)
            )
        case "decode":
            struck = tiny.decode(4)
        case _:
            plan, decode = tiny.prefill([9, 10, 11], row=1), tiny.decode(4)
            tiny._step -= 1
            struck = replace(plan, slices=(*decode.slices, *plan.slices))
    behind = tiny.prefill([3, 4], row=2)
    return [before, struck, behind]


@pytest.mark.parametrize(("kind", "point", "rank", "step"), list(product(KINDS, FaultPoint, (0, 2), STEPS[::2])))
def test_fault_with_peers(kind: FaultKind, point: FaultPoint, rank: int, step: str, tmp_path: Path) -> None:
    """Three ranks: the first cause is right, an abort brings every rank back at once, and the step is lost."""
    with tiny_group(tmp_path, 3, enable_fault_injection=True) as tiny:
        before, struck, behind = plans(tiny, step)
        tiny.group.run(before)
        tiny.result()
        tiny.group.inject(Fault(kind, rank, 1, point))
        tiny.group.run(struck)
        tiny.group.run(behind)
        if kind is FaultKind.RAISE:
            cause = tiny.first_failure()
            assert (cause.kind, cause.rank, cause.step) == (CauseKind.RANK_RAISED, rank, struck.step)
            assert f"injected on rank {rank} {point} a collective" in cause.message
        else:
            time.sleep(0.05)
            assert tiny.failures == []
            beat = tiny.group.heartbeats()[rank]
            assert (beat.step, beat.phase) == (struck.step, "forward")
        began_s = time.monotonic()
        assert tiny.group.abort("a test", BOUND_S)
        while any(beat.phase != "idle" for beat in tiny.group.heartbeats()):
            assert time.monotonic() - began_s < BOUND_S
            time.sleep(0.001)
        assert tiny.outcomes.empty()
        assert tiny.group.dead_rank() is None
        assert tiny.group.join(SOON_S)
        assert time.monotonic() - began_s < BOUND_S + 0.5
    assert len(tiny.failures) == (kind is FaultKind.RAISE), "the abort that everyone feels is not news"


@pytest.mark.parametrize(("point", "step"), list(product(FaultPoint, STEPS[::2])))
def test_stall_without_peers(point: FaultPoint, step: str, tmp_path: Path) -> None:
    """One rank: a stall, too, ends with the abort."""
    with tiny_group(tmp_path, 1, enable_fault_injection=True) as tiny:
        before, struck, _ = plans(tiny, step)
        tiny.group.run(before)
        tiny.result()
        tiny.group.inject(Fault(FaultKind.STALL, 0, 1, point))
        tiny.group.run(struck)
        time.sleep(0.05)
        assert tiny.outcomes.empty()
        assert tiny.group.abort("a test", BOUND_S)
        assert tiny.group.join(BOUND_S)
    assert tiny.failures == []


def test_steps_are_counted_from_the_injection(tmp_path: Path) -> None:
    """after_steps = 3 strikes the third step that begins from now on, and only that one."""
    with tiny_group(tmp_path, 3, enable_fault_injection=True) as tiny:
        tiny.group.run(tiny.prefill([5, 6]))
        tiny.result()
        tiny.group.inject(Fault(FaultKind.RAISE, 2, 3))
        for start in (2, 3):
            tiny.group.run(tiny.decode(start))
            tiny.result()
        tiny.group.run(tiny.decode(4))
        assert (tiny.first_failure().step, tiny.failures[0].rank) == (3, 2)
        assert tiny.group.abort("a test", BOUND_S)


def test_faults_after_a_rebuild(tmp_path: Path) -> None:
    """A stall, an abort, a new epoch, five times over: each time the same tokens, and no thread more."""
    with tiny_group(tmp_path, 3, enable_fault_injection=True) as tiny:
        expected = tiny.generate([[5, 6, 7]], 3)[0]
        threads = sorted(rank_threads())
        for epoch in range(1, 6):
            tiny.group.inject(Fault(FaultKind.STALL, epoch % 3, 1, list(FaultPoint)[epoch % 3]))
            plan = tiny.prefill([5, 6, 7], row=3)
            tiny.group.run(replace(plan, step=3, epoch=epoch - 1))
            time.sleep(0.02)
            assert tiny.group.abort("a test", BOUND_S)
            tiny.group.rebuild(epoch, SOON_S)
            assert tiny.generate([[5, 6, 7]], 3, epoch=epoch)[0] == expected
        assert sorted(rank_threads()) == threads


@pytest.mark.parametrize("kind", [FaultKind.RAISE, FaultKind.SKIP, FaultKind.WRONG_DIGEST])
def test_a_fault_tells_when_it_strikes(kind: FaultKind, tmp_path: Path) -> None:
    """Once, with rank and step, on the clock that other processes of the machine have too."""
    with tiny_group(tmp_path, 3, enable_fault_injection=True) as tiny, capture_logs() as logs:
        tiny.group.inject(Fault(kind, 1, 2))
        tiny.group.run(tiny.prefill([5, 6]))
        tiny.result()
        before_s = time.monotonic()
        tiny.group.run(tiny.decode(2))
        found_s = tiny.first_failure().at_s
        (told,) = [entry for entry in logs if entry["event"] == "fault strikes"]
        assert (told["kind"], told["rank"], told["step"]) == (kind, 1, 1)
        assert before_s <= told["at_s"] <= found_s
        assert tiny.group.abort("a test", BOUND_S)


def test_a_plan_that_comes_after_the_rebuild_counts_for_nothing(tmp_path: Path) -> None:
    """The loop may have been held up with a plan of the old epoch: the new epoch's steps are counted without it."""
    with tiny_group(tmp_path, 3, enable_fault_injection=True) as tiny:
        late = replace(tiny.prefill([5, 6, 7]), step=3)
        assert tiny.group.abort("a test", BOUND_S)
        tiny.group.rebuild(1, SOON_S)
        tiny.group.run(late)
        tiny.group.inject(Fault(FaultKind.RAISE, 1))
        tiny.group.run(replace(late, step=0, epoch=1))
        assert tiny.first_failure().step == 0
        assert tiny.group.abort("a test", BOUND_S)


SCOPES = [
    # decode, phase, world size, error, scope
    (False, "forward", 1, ValueError("x"), Scope.REQUEST),
    (False, "score", 1, MemoryError(), Scope.REQUEST),
    (False, "sample", 1, InjectedFault("x"), Scope.REQUEST),
    (False, "read", 1, ValueError("x"), Scope.REQUEST),
    (True, "read", 1, ValueError("x"), Scope.REQUEST),
    (True, "read", 3, MemoryError(), Scope.REQUEST),
    (True, "read", 3, CommAborted("x"), Scope.ENGINE),
    (False, "read", 1, SystemExit(), Scope.ENGINE),
    (False, "rows", 1, ValueError("x"), Scope.ENGINE),
    (False, "idle", 1, ValueError("x"), Scope.ENGINE),
    (True, "forward", 1, ValueError("x"), Scope.ENGINE),
    (False, "forward", 2, ValueError("x"), Scope.ENGINE),
    (False, "forward", 1, CommAborted("x"), Scope.ENGINE),
    (False, "forward", 1, CommMismatch("x"), Scope.ENGINE),
    (False, "forward", 1, RankDiverged("x"), Scope.ENGINE),
    (False, "forward", 1, KeyboardInterrupt(), Scope.ENGINE),
    (False, "forward", 1, SystemExit(), Scope.ENGINE),
]


@pytest.mark.parametrize(("decode", "phase", "world_size", "error", "scope"), SCOPES)
def test_scope(decode: bool, phase: str, world_size: int, error: BaseException, scope: Scope) -> None:
    """What is whose failure, as a table."""
    assert failure_scope(has_decode=decode, phase=phase, world_size=world_size, error=error) is scope
