"""The engine over a group that answers when told: steps in flight, publication, cancellation, failing closed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import peg.engine
from peg.config import EngineConfig
from peg.deadlines import Deadlines
from peg.engine import Engine
from peg.errors import EngineUnavailable, InvalidRequest
from peg.failure import Cause, CauseKind, EngineState, FailureCallback, Heartbeat
from peg.plan import (
    EngineInfo,
    FinishReason,
    Full,
    GroupCapacity,
    SamplingParams,
    SequenceRequest,
    Skipped,
    StepFailed,
    StepOutcome,
    StepPlan,
    StepResult,
)
from peg.process_end import ProcessEnd
from peg.sched.scheduler import Update
from peg.token_stream import Output, TokenStream

INFO = EngineInfo(
    architecture="Fake",
    world_size=1,
    devices=("cpu",),
    communicator="none",
    dtype="float32",
    vocab_size=1000,
    eos_token_ids=(2,),
    forbidden_token_ids=(),
    max_model_len=64,
    block_size=4,
    max_num_seqs=4,
    max_num_batched_tokens=32,
    groups=(GroupCapacity(Full((0,), 1, 8), 65),),
    parameters=1,
    weight_bytes=1,
    kv_bytes=1,
)


class ToldGroup:
    """A group whose steps end when the test says so. Plans are kept in `plans`, oldest first."""

    def __init__(
        self,
        config: EngineConfig,
        on_result: Callable[[StepOutcome], None],
        on_failure: FailureCallback,
        may_publish: Callable[[int], bool],
    ) -> None:
        self.on_result = on_result
        self.on_failure = on_failure
        self.plans: list[StepPlan] = []
        self.issued = 0
        self.calls: list[str] = []

    def start(self, deadline_s: float, phases_s: object = None) -> EngineInfo:
        return INFO

    def run(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self.issued += 1

    def answer(self, *token_ids: int) -> None:
        """End the oldest step; `token_ids` are what its sampling slices got."""
        plan = self.plans.pop(0)
        assert len(token_ids) == sum(piece.samples for piece in plan.slices)
        self.on_result(StepResult(plan.step, plan.epoch, token_ids))

    def heartbeats(self) -> tuple[Heartbeat, ...]:
        return ()

    def dead_rank(self) -> int | None:
        return None

    def poll(self) -> str | None:
        return None

    def poison(self, reason: str) -> None:
        self.calls.append("poison")

    def abort(self, reason: str, deadline_s: float) -> bool:
        self.calls.append("abort")
        return True

    def join(self, deadline_s: float) -> bool:
        return True

    def rebuild(self, epoch: int, deadline_s: float, back_s: float = 0.0) -> None:
        self.calls.append("rebuild")
        self.plans.clear()

    def close(self, deadline_s: float) -> bool:
        self.calls.append("close")
        return True


class RecordedEnd(ProcessEnd):
    """The process does not end in a test."""

    def __init__(self) -> None:
        self.codes: list[int] = []

    def arm(self, after_s: float) -> None:
        pass

    def disarm(self) -> None:
        pass

    def exit(self, code: int) -> None:
        self.codes.append(code)


@asynccontextmanager
async def running(monkeypatch: pytest.MonkeyPatch, on_failure: str = "exit") -> AsyncIterator[tuple[Engine, ToldGroup]]:
    monkeypatch.setattr(peg.engine, "RankGroup", ToldGroup)
    config = EngineConfig(model="fake", model_dir=Path("/nonexistent"), on_failure=on_failure)
    engine = Engine(config, Deadlines(step_cap_s=5, linger_s=0.1, exit_s=1.0), RecordedEnd())
    await engine.start()
    group = engine._group
    assert isinstance(group, ToldGroup)
    try:
        yield engine, group
    finally:
        await engine.close()


def request(name: str, prompt: tuple[int, ...] = (5, 6, 7), max_tokens: int = 8) -> SequenceRequest:
    return SequenceRequest(
        request_id=name, prompt_ids=prompt, sampling=SamplingParams(temperature=0), max_tokens=max_tokens
    )


async def settle() -> None:
    """Let the loop run what is due, results from other threads included."""
    for _ in range(5):
        await asyncio.sleep(0)


async def collect(stream: TokenStream) -> list[Output]:
    return [output async for output in stream]


async def test_two_steps_are_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step after a prefill is launched before the prefill is answered, and never a third."""
    async with running(monkeypatch) as (engine, group):
        engine.submit(request("a"))
        await settle()
        assert [plan.step for plan in group.plans] == [0, 1]
        assert group.plans[0].slices[0].token_ids == (5, 6, 7)
        assert group.plans[1].slices[0].token_ids is None
        group.answer(11)
        await settle()
        assert [plan.step for plan in group.plans] == [1, 2]


async def test_token_after_a_stop_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that stopped at step n publishes nothing of step n + 1, which was already running."""
    async with running(monkeypatch) as (engine, group):
        stream = engine.submit(request("a"))
        await settle()
        group.answer(2)
        group.answer(99)
        await settle()
        outputs = await collect(stream)
        assert [token for output in outputs for token in output.token_ids] == [2]
        assert stream.terminal is not None
        assert (stream.terminal.reason, stream.terminal.completion_tokens) == (FinishReason.STOP, 1)
        assert group.plans == []


async def test_matcher_ends_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop matcher is fed each committed token once and ends the sequence at the one it says."""

    class Third:
        def __init__(self) -> None:
            self.fed: list[int] = []

        def feed(self, token_id: int) -> bool:
            self.fed.append(token_id)
            return len(self.fed) == 3

    async with running(monkeypatch) as (engine, group):
        matcher = Third()
        stream = engine.submit(request("a"), matcher)
        await settle()
        for token in (21, 22, 23, 24):
            group.answer(token)
            await settle()
        assert [output.token_ids for output in await collect(stream)] == [(21, 22, 23)]
        assert matcher.fed == [21, 22, 23]


async def test_tokens_coalesce_for_a_slow_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that was away gets everything that came in between at once, and then the end."""
    async with running(monkeypatch) as (engine, group):
        stream = engine.submit(request("a", max_tokens=3))
        await settle()
        for token in (31, 32, 33):
            group.answer(token)
            await settle()
        assert stream.unread_tokens == 3
        assert [output.token_ids for output in await collect(stream)] == [(31, 32, 33)]


async def test_a_slow_reader_takes_so_much_at_a_time() -> None:
    """What a reader is behind by comes token by token, 64 at most at once; or by as many as it wakes for."""
    single, several = TokenStream(request("a"), bool), TokenStream(request("b"), bool)
    several.wake_tokens = 30
    for token in range(100):
        single.put(Update(0, (token,)))
        several.put(Update(1, (token,)))
    for stream in (single, several):
        stream.fail("that is all")
    read = [await single.read() for _ in range(3)]
    assert [len(outputs) for outputs in read] == [64, 36, 0]
    assert [output.token_ids for outputs in read for output in outputs] == [(token,) for token in range(100)]
    assert [len(output.token_ids) for output in await collect(several)] == [30, 30, 30, 10]


async def test_cancel_answers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled request has its terminal before the step that computes it comes back."""
    async with running(monkeypatch) as (engine, group):
        stream = engine.submit(request("a"))
        await settle()
        stream.cancel()
        await collect(stream)
        assert stream.terminal is not None
        assert stream.terminal.reason is FinishReason.CANCELLED
        assert not engine.cancel("a")
        group.answer(1)
        group.answer(1)
        await settle()
        assert group.plans == []
        assert engine.stats().scheduler.running == 0


async def test_submissions_of_one_pass_share_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that arrive together are planned together."""
    async with running(monkeypatch) as (engine, group):
        for name in "abc":
            engine.submit(request(name))
        await settle()
        assert [len(plan.slices) for plan in group.plans] == [3, 3]


async def test_same_id_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An id that is live cannot be taken again; once it has ended it can."""
    async with running(monkeypatch) as (engine, _):
        engine.submit(request("a"))
        with pytest.raises(InvalidRequest, match="already running"):
            engine.submit(request("a"))
        engine.cancel("a")
        engine.submit(request("a"))


async def test_failure_answers_everyone(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a rank's failure every stream, running or queued, ends FAILED with the cause, and none is admitted."""
    async with running(monkeypatch) as (engine, group):
        streams = [engine.submit(request(f"r{i}")) for i in range(6)]
        await settle()
        group.on_failure(Cause(kind=CauseKind.RANK_RAISED, rank=1, step=0, message="boom"))
        for stream in streams:
            await asyncio.wait_for(collect(stream), 2)
            assert stream.terminal is not None
            assert stream.terminal.reason is FinishReason.FAILED
            assert "boom" in str(stream.terminal.message)
        assert engine.state is EngineState.BROKEN
        with pytest.raises(EngineUnavailable, match="boom"):
            engine.submit(request("later"))
        assert await asyncio.wait_for(engine.ended(), 3) == 70
        assert group.calls[:2] == ["poison", "abort"]


async def test_nothing_is_published_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result that arrives after the failure is dropped; tokens committed before it are delivered."""
    async with running(monkeypatch) as (engine, group):
        stream = engine.submit(request("a"))
        await settle()
        group.answer(41)
        await settle()
        group.on_failure(Cause(kind=CauseKind.RANK_RAISED, message="boom"))
        group.answer(42)
        outputs = await asyncio.wait_for(collect(stream), 2)
        assert [output.token_ids for output in outputs] == [(41,)]
        assert stream.terminal is not None
        assert stream.terminal.completion_tokens == 1


async def test_bug_in_the_loop_breaks_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception of the loop's own code is a failure of the engine, with its traceback, not a silent stop."""
    async with running(monkeypatch) as (engine, group):
        stream = engine.submit(request("a"))
        await settle()
        group.on_result(StepResult(77, 0, (1,)))
        await asyncio.wait_for(collect(stream), 2)
        assert engine.cause is not None
        assert engine.cause.kind is CauseKind.LOOP_FAILED
        assert "AssertionError" in engine.cause.traceback


async def test_failed_step_costs_its_own_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request-scoped failure ends what was in the step; the next request is served."""
    async with running(monkeypatch) as (engine, group):
        lost = engine.submit(request("lost"))
        await settle()
        failed, behind = group.plans
        group.plans.clear()
        group.on_result(StepFailed(failed.step, failed.epoch, "no memory"))
        group.on_result(Skipped(behind.step, behind.epoch))
        await asyncio.wait_for(collect(lost), 2)
        assert lost.terminal is not None
        assert (lost.terminal.reason, lost.terminal.message) == (FinishReason.FAILED, "no memory")
        kept = engine.submit(request("kept", max_tokens=1))
        await settle()
        assert group.plans[0].failures_seen == 1
        group.answer(51)
        assert [output.token_ids for output in await asyncio.wait_for(collect(kept), 2)] == [(51,)]
        assert engine.state is EngineState.READY


async def test_drain_waits_and_then_fails_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """While draining nothing is admitted; what is open at the deadline gets FAILED, not silence."""
    async with running(monkeypatch) as (engine, _):
        stream = engine.submit(request("a"))
        await settle()
        draining = asyncio.create_task(engine.drain(0.1))
        await settle()
        with pytest.raises(EngineUnavailable, match="draining"):
            engine.submit(request("b"))
        await draining
        await asyncio.wait_for(collect(stream), 1)
        assert stream.terminal is not None
        assert stream.terminal.reason is FinishReason.FAILED
        await engine.close()
        assert await engine.ended() == 0
        assert engine.state is EngineState.STOPPED


async def test_rebuilt_engine_serves_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a rebuild pools are empty, plans carry the new epoch, late results of the old one are dropped."""
    async with running(monkeypatch, "rebuild") as (engine, group):
        lost = engine.submit(request("lost"))
        await settle()
        old = group.plans[0]
        group.on_failure(Cause(kind=CauseKind.RANK_RAISED, message="boom"))
        await asyncio.wait_for(collect(lost), 2)
        assert lost.terminal is not None
        assert "boom" in str(lost.terminal.message)
        await asyncio.wait_for(engine.admission(), 3)
        assert engine.state is EngineState.READY
        group.on_result(StepResult(old.step, old.epoch, (1,)))
        kept = engine.submit(request("kept", max_tokens=1))
        await settle()
        assert [(plan.epoch, plan.step) for plan in group.plans] == [(1, 0)]
        group.answer(9)
        assert [output.token_ids for output in await asyncio.wait_for(collect(kept), 2)] == [(9,)]
        assert engine.stats().scheduler.counters.finished[FinishReason.FAILED] == 1


async def test_admission_waits_from_the_moment_of_the_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks right after a failure, before the loop has heard of it, waits too: the first time and any later one."""
    async with running(monkeypatch, "rebuild") as (engine, group):
        for epoch in (1, 2):
            group.on_failure(Cause(kind=CauseKind.RANK_RAISED, message="boom"))
            await asyncio.wait_for(engine.admission(), 3)
            assert (engine.state, engine.epoch) == (EngineState.READY, epoch)


@pytest.mark.parametrize("on_failure", ["rebuild", "exit"])
async def test_drain_during_a_rebuild_comes_after_it(on_failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wish to end that comes while the engine is broken is kept until it is rebuilt, or over."""
    async with running(monkeypatch, on_failure) as (engine, group):
        group.on_failure(Cause(kind=CauseKind.RANK_RAISED, message="boom"))
        await asyncio.wait_for(engine.drain(1.0), 3)
        if on_failure == "rebuild":
            assert (engine.state, engine.cause) == (EngineState.DRAINING, None)
        else:
            assert await asyncio.wait_for(engine.ended(), 0.1) == 70


async def test_closing_with_a_step_out_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that is open when the engine is closed gets FAILED; its step may still come back."""
    async with running(monkeypatch) as (engine, group):
        stream = engine.submit(request("a"))
        await settle()
        await engine.close()
        group.answer(5)
        await settle()
        await collect(stream)
        assert stream.terminal is not None
        assert stream.terminal.reason is FinishReason.FAILED
        assert engine.cause is None


class TwoOrThree:
    """A grammar that lets id 2 (the end) or 3 come first, then anything, and is complete after `length` tokens."""

    first_mask = bytes([0b1100])

    def __init__(self, length: int, waits: threading.Event | None = None) -> None:
        self.fed: list[int] = []
        self.threads: set[str] = set()
        self._length = length
        self._waits = waits

    def advance(self, token_id: int) -> bytes | None:
        self.threads.add(threading.current_thread().name)
        if self._waits is not None:
            assert self._waits.wait(5)
        self.fed.append(token_id)
        if token_id == 99:
            raise InvalidRequest("99 is too much")
        return None if len(self.fed) == self._length else bytes([len(self.fed)])


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("not within a second")


async def test_a_constrained_sequence_has_its_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step has the mask that the token before it led to, made off the loop; where nothing can follow it stops."""
    async with running(monkeypatch) as (engine, group):
        grammar = TwoOrThree(3)
        stream = engine.submit(request("a"), grammar=grammar)
        await settle()
        for count in range(3):
            assert [plan.slices[0].mask for plan in group.plans] == [bytes([count]) if count else bytes([0b1100])]
            group.answer(21 + count)
            await until(lambda: bool(group.plans) or stream.terminal is not None)
        assert grammar.fed == [21, 22, 23]
        assert all(name.startswith("mask") for name in grammar.threads)
        assert [token for output in await collect(stream) for token in output.token_ids] == [21, 22, 23]
        assert stream.terminal is not None
        assert (stream.terminal.reason, stream.terminal.completion_tokens) == (FinishReason.STOP, 3)
        assert group.plans == []


async def test_a_slow_grammar_holds_up_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a mask is being made the neighbour has two steps in flight, one after the other, as if it were alone."""
    async with running(monkeypatch) as (engine, group):
        ready = threading.Event()
        slow = engine.submit(request("slow"), grammar=TwoOrThree(9, ready))
        quick = engine.submit(request("quick", max_tokens=20))
        await settle()
        group.answer(21, 31)
        for token in range(32, 42):
            await settle()
            assert [len(plan.slices) for plan in group.plans] == [1, 1]
            group.answer(token)
        assert (slow.published_tokens, quick.published_tokens) == (1, 10)
        ready.set()
        await until(lambda: engine._scheduler._ledger.open[0].mask is not None)
        group.answer(42)
        await settle()
        assert len(group.plans[-1].slices) == 2, "with its mask the slow one is in the next plan"


async def test_a_grammar_that_fails_costs_its_own_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sequence is FAILED with the grammar's words, everyone else goes on; a mask for one who left is dropped."""
    async with running(monkeypatch) as (engine, group):
        failing = engine.submit(request("failing"), grammar=TwoOrThree(9))
        ready = threading.Event()
        leaving = engine.submit(request("leaving"), grammar=TwoOrThree(9, ready))
        await settle()
        group.answer(99, 21)
        await until(lambda: failing.terminal is not None)
        assert failing.terminal is not None
        assert (failing.terminal.reason, failing.terminal.message) == (FinishReason.FAILED, "99 is too much")
        leaving.cancel()
        ready.set()
        other = engine.submit(request("other", max_tokens=1))
        await settle()
        group.answer(5)
        await until(lambda: other.terminal is not None)
        assert engine.state is EngineState.READY
        assert not engine._masks._grammars
