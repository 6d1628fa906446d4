"""The supervisor against scripted ranks: what it finds, in which order it closes, and that the first cause wins."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from peg.deadlines import Deadlines, StepClock
from peg.errors import RankError
from peg.failure import Cause, CauseKind, EngineState, Heartbeat
from peg.plan import Slice, StepPlan
from peg.process_end import ProcessEnd
from peg.supervisor import EngineDoors, Supervisor
from peg.watch import Watch

QUICK = Deadlines(
    start_s=30,
    step_cap_s=0.2,
    step_floor_s=0.05,
    step_factor=4,
    pickup_s=0.1,
    linger_s=0.1,
    exit_s=0.9,
    join_s=0.2,
    rebuild_s=0.3,
    rebuild_limit=2,
)


class RecordedEnd(ProcessEnd):
    """Records how the process would have ended."""

    def __init__(self) -> None:
        self.armed_s: list[float] = []
        self.codes: list[int] = []

    def arm(self, after_s: float) -> None:
        self.armed_s.append(after_s)

    def disarm(self) -> None:
        self.armed_s.clear()

    def exit(self, code: int) -> None:
        self.codes.append(code)


class ScriptedRanks:
    """Ranks that say what the test tells them, and record what is asked of them in order."""

    def __init__(self) -> None:
        self.beats: tuple[Heartbeat, ...] = (Heartbeat(0, "idle", -1, time.monotonic()),)
        self.dead: int | None = None
        self.error: str | None = None
        self.joins = True
        self.comes_back = True
        self.calls: list[str] = []

    def heartbeats(self) -> tuple[Heartbeat, ...]:
        return self.beats

    def dead_rank(self) -> int | None:
        return self.dead

    def poll(self) -> str | None:
        return self.error

    def poison(self, reason: str) -> None:
        self.calls.append("poison")

    def abort(self, reason: str, deadline_s: float) -> bool:
        self.calls.append("abort")
        return True

    def rebuild(self, epoch: int, deadline_s: float, back_s: float) -> None:
        self.calls.append("rebuild")
        if not self.comes_back:
            raise RankError("rank 1 did not come back")

    def join(self, deadline_s: float) -> bool:
        self.calls.append("join")
        return self.joins


class Rig:
    """A supervisor with scripted ranks and everything it calls recorded."""

    def __init__(self, *, rebuilds: bool = False) -> None:
        self.end = RecordedEnd()
        self.ranks = ScriptedRanks()
        self.broken: list[Cause] = []
        self.codes: list[int] = []
        self.ended = threading.Event()
        self.epochs: list[int] = []
        self.reopens = True
        doors = EngineDoors(self._on_broken, self._on_epoch, self._on_ended)
        self.supervisor = Supervisor(QUICK, self.end, doors, rebuilds=rebuilds)
        self.supervisor.start(self.ranks)

    def _on_broken(self, cause: Cause) -> None:
        self.ranks.calls.append("answer")
        self.broken.append(cause)
        self.supervisor.answered()

    def _on_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)
        if self.reopens:
            self.supervisor.reopen()

    def _on_ended(self, code: int) -> None:
        self.codes.append(code)
        self.ended.set()

    def finish(self) -> None:
        assert self.supervisor.release(5)


@pytest.fixture
def rig() -> object:
    made = Rig()
    yield made
    made.finish()


def step(number: int, tokens: int = 1) -> StepPlan:
    return StepPlan(number, 0, (Slice(0, 0, 0, tokens, tuple(range(tokens)), samples=True),))


def cause(message: str) -> Cause:
    return Cause(kind=CauseKind.RANK_RAISED, message=message)


def within(limit_s: float, reached: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if reached():
            return True
        time.sleep(0.005)
    return False


def test_first_cause_wins(rig: Rig) -> None:
    """Of many failures the first one is the cause, the others are kept beside it."""
    rig.supervisor.ready()
    rig.supervisor.fail(cause("first"))
    rig.supervisor.fail(cause("second"))
    assert rig.ended.wait(2)
    assert [str(found.message) for found in rig.broken] == ["first"]
    assert rig.supervisor.cause is rig.broken[0]
    assert [found.message for found in rig.supervisor.secondary] == ["second"]


def test_order_of_closing(rig: Rig) -> None:
    """Clients are answered first, then queues are poisoned, then communicators aborted, then threads joined."""
    rig.supervisor.ready()
    rig.supervisor.fail(cause("x"))
    assert rig.ended.wait(2)
    assert rig.ranks.calls == ["answer", "poison", "abort", "join"]
    assert rig.supervisor.state is EngineState.BROKEN
    assert rig.codes == [70]
    assert rig.end.armed_s[-1] == QUICK.exit_s + 1.0


def test_publish_gate_closes_with_the_first_failure(rig: Rig) -> None:
    """Results pass while READY or DRAINING and of this epoch, and none after a failure."""
    assert not rig.supervisor.may_publish(0)
    rig.supervisor.ready()
    assert rig.supervisor.may_publish(0)
    assert not rig.supervisor.may_publish(1)
    rig.supervisor.drain()
    assert rig.supervisor.may_publish(0)
    rig.supervisor.fail(cause("x"))
    assert not rig.supervisor.may_publish(0)


def test_thread_that_did_not_come_back_is_left_behind(rig: Rig) -> None:
    """Where a rank's thread does not end, the process is ended for it, with 70, within the bound."""
    rig.ranks.joins = False
    rig.supervisor.ready()
    started = time.monotonic()
    rig.supervisor.fail(cause("x"))
    assert within(2, lambda: rig.end.codes == [70])
    assert time.monotonic() - started <= QUICK.exit_s + 0.2


def test_process_that_does_not_end_is_ended(rig: Rig) -> None:
    """Where the main thread never closes the engine, the supervisor ends the process at its bound."""
    rig.supervisor.ready()
    rig.supervisor.fail(cause("x"))
    assert within(2, lambda: rig.end.codes == [70])


def test_step_over_its_deadline(rig: Rig) -> None:
    """A step that is picked up and never finishes breaks the engine, naming step, rank and phase."""
    rig.supervisor.ready()
    rig.ranks.beats = (Heartbeat(0, "idle", 7, time.monotonic()), Heartbeat(1, "forward", 7, time.monotonic()))
    rig.supervisor.clock.issued(step(7))
    assert rig.ended.wait(3)
    found = rig.broken[0]
    assert (found.kind, found.rank, found.step, found.phase) == (CauseKind.STEP_DEADLINE, 1, 7, "forward")


def test_step_that_nobody_picked_up(rig: Rig) -> None:
    """A rank that sits idle before an issued step is found sooner than the step's own deadline."""
    rig.supervisor.ready()
    rig.ranks.beats = (Heartbeat(0, "idle", 3, time.monotonic()),)
    rig.supervisor.clock.issued(step(4))
    assert rig.ended.wait(3)
    assert rig.broken[0].kind is CauseKind.PICKUP_DEADLINE


def test_dead_thread_and_comm_error(rig: Rig) -> None:
    """A thread that ended by itself is a cause; the communicator's error that follows is not the first."""
    rig.supervisor.ready()
    rig.ranks.dead = 2
    rig.ranks.error = "later"
    assert rig.ended.wait(2)
    assert (rig.broken[0].kind, rig.broken[0].rank) == (CauseKind.RANK_DIED, 2)


def test_comm_error(rig: Rig) -> None:
    """An asynchronous communicator error breaks the engine although no rank raised."""
    rig.supervisor.ready()
    rig.ranks.error = "link down"
    assert rig.ended.wait(2)
    assert (rig.broken[0].kind, rig.broken[0].message) == (CauseKind.COMM_ERROR, "link down")


def test_failure_of_its_own() -> None:
    """What the supervisor calls may raise: the process is ended rather than left unwatched."""
    rig = Rig()
    rig.supervisor.ready()
    rig.ranks.heartbeats = None  # type: ignore[assignment, method-assign]
    rig.supervisor.clock.issued(step(1))
    assert within(2, lambda: rig.end.codes == [70])
    assert rig.supervisor.cause is not None
    assert rig.supervisor.cause.kind is CauseKind.SUPERVISOR_FAILED
    rig.finish()


def test_step_clock_starts_when_the_step_before_is_committed() -> None:
    """The second step in flight does not age while the first one runs."""
    clock = StepClock(QUICK)
    clock.issued(step(1))
    clock.issued(step(2))
    time.sleep(0.05)
    clock.committed(1)
    oldest = clock.oldest()
    assert oldest is not None
    assert oldest.step == 2
    assert time.monotonic() - oldest.clock_s < 0.04


def test_step_deadline_adapts() -> None:
    """The first step of a shape has the cap; later ones a multiple of the slowest seen, never under the floor."""
    clock = StepClock(QUICK)
    clock.issued(step(1))
    shape = clock.oldest()
    assert shape is not None
    assert clock.limit_s(shape.shape) == QUICK.step_cap_s
    clock.committed(1)
    assert clock.limit_s(shape.shape) == QUICK.step_floor_s
    clock.issued(step(2))
    time.sleep(0.03)
    clock.committed(2)
    assert QUICK.step_floor_s < clock.limit_s(shape.shape) <= QUICK.step_cap_s


def test_nobody_is_late_while_the_process_stands_still() -> None:
    """Time in which not even the supervisor ran does not count; from then on the deadline runs as ever."""
    clock = StepClock(QUICK)
    clock.issued(step(7))
    watch, ranks = Watch(QUICK, clock), ScriptedRanks()
    ranks.beats = (Heartbeat(0, "forward", 7, time.monotonic()),)
    time.sleep(1.1)
    assert watch.look(EngineState.READY, ranks) is None
    assert within(0.3, lambda: watch.look(EngineState.READY, ranks) is not None)


@pytest.fixture
def rebuilding() -> object:
    made = Rig(rebuilds=True)
    made.supervisor.ready()
    yield made
    made.finish()


def test_rebuild_begins_a_new_epoch(rebuilding: Rig) -> None:
    """Under the policy rebuild the engine is READY again: a new epoch, no cause, the deadman put off again."""
    supervisor = rebuilding.supervisor
    supervisor.fail(cause("x"))
    assert within(2, lambda: len(supervisor.rebuilt) == 1)
    assert rebuilding.ranks.calls == ["answer", "poison", "abort", "rebuild"]
    assert (supervisor.state, supervisor.epoch, supervisor.cause) == (EngineState.READY, 1, None)
    assert supervisor.rebuilt[0].cause.message == "x"
    assert supervisor.may_publish(1)
    assert not supervisor.may_publish(0)
    assert within(2, lambda: rebuilding.end.armed_s[-1] == QUICK.deadman_s(starting=False))


def test_too_many_rebuilds_end_the_process(rebuilding: Rig) -> None:
    """Over the limit of rebuilds in the window, the policy is exit."""
    for message in ("1", "2"):
        rebuilding.supervisor.fail(cause(message))
        assert within(2, lambda: str(len(rebuilding.supervisor.rebuilt)) == message)  # noqa: B023 — called at once
    rebuilding.supervisor.fail(cause("3"))
    assert rebuilding.ended.wait(2)
    assert rebuilding.supervisor.cause is not None
    assert rebuilding.supervisor.cause.message == "3"


def test_rank_that_does_not_come_back_is_not_rebuilt(rebuilding: Rig) -> None:
    """Where a rank is not back at its queue in time the policy is exit, and the cause stays the first one."""
    rebuilding.ranks.comes_back = False
    rebuilding.supervisor.fail(cause("x"))
    assert rebuilding.ended.wait(3)
    assert rebuilding.supervisor.state is EngineState.BROKEN
    assert rebuilding.supervisor.cause is not None
    assert rebuilding.supervisor.cause.message == "x"


def test_loop_that_does_not_begin_the_epoch_is_not_waited_for(rebuilding: Rig) -> None:
    """Where the loop does not take part in a rebuild the policy is exit."""
    rebuilding.reopens = False
    rebuilding.supervisor.fail(cause("x"))
    assert rebuilding.ended.wait(3)
    assert rebuilding.supervisor.state is EngineState.BROKEN


@pytest.mark.parametrize("kind", [CauseKind.RANK_DIED, CauseKind.OPERATOR_STOP])
def test_causes_that_are_never_rebuilt(rebuilding: Rig, kind: CauseKind) -> None:
    """A dead thread and an operator's stop end the process whatever the policy."""
    rebuilding.supervisor.fail(Cause(kind=kind, message="x"))
    assert rebuilding.ended.wait(2)
    assert "rebuild" not in rebuilding.ranks.calls


def test_deadman_is_set_anew_as_soon_as_it_is_ready(rig: Rig) -> None:
    """What the start may take is far too long for a step: from READY on the deadman strikes after a step's time."""
    assert within(1, lambda: rig.end.armed_s[-1:] == [QUICK.deadman_s(starting=True)])
    rig.supervisor.ready()
    assert within(0.5, lambda: rig.end.armed_s[-1:] == [QUICK.deadman_s(starting=False)])
