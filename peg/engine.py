"""The engine: requests in, tokens out. The first file to read.

A request becomes a sequence (`submit`), the scheduler plans steps over all sequences (`_turn`), the ranks run them on
their own threads, the last rank's ack wakes the loop, the scheduler commits what came back, and tokens go to the
stream that its request reads. Everything here runs on the loop and nothing of it waits for a device.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import structlog

from peg.config import EngineConfig
from peg.deadlines import Deadlines
from peg.errors import EngineUnavailable, InvalidRequest, PegError
from peg.failure import Cause, CauseKind, EngineState, Fault
from peg.masks import Grammar, MaskMaker
from peg.plan import (
    EngineInfo,
    FinishReason,
    SequenceRequest,
    Skipped,
    StepFailed,
    StepOutcome,
    StepPlan,
    Unread,
)
from peg.process_end import ProcessEnd
from peg.ranks.group import RankGroup
from peg.sched.limits import SchedulerLimits
from peg.sched.scheduler import Scheduler, SchedulerStats, Update
from peg.supervisor import EngineDoors, Supervisor
from peg.token_stream import TokenStream
from peg.vitals import Vitals

log = structlog.get_logger("peg.engine")

_REBUILD_POLL_S = 0.02


class StopMatcher(Protocol):
    """Decides from the text whether a sequence ends. Called on the loop, once for each committed token."""

    def feed(self, token_id: int) -> bool:
        """Take one more token; true if it completes a stop string."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A reading of the engine, for metrics, the status line and health."""

    info: EngineInfo
    state: EngineState
    epoch: int
    scheduler: SchedulerStats
    last_commit_age_s: float
    open_streams: int


@dataclass(slots=True)
class _Open:
    """What the engine keeps of the requests that have no terminal yet."""

    streams: dict[int, TokenStream] = field(default_factory=dict)
    seq_ids: dict[str, int] = field(default_factory=dict)

    def add(self, seq_id: int, stream: TokenStream) -> None:
        self.streams[seq_id] = stream
        self.seq_ids[stream.request_id] = seq_id

    def remove(self, seq_id: int) -> None:
        del self.seq_ids[self.streams.pop(seq_id).request_id]


class Engine:
    """One model over one group of ranks, for the life of a process. Owned by the loop."""

    def __init__(self, config: EngineConfig, deadlines: Deadlines | None = None, end: ProcessEnd | None = None) -> None:
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._open = _Open()
        self._masks = MaskMaker(self._turn_soon)
        self._idle = asyncio.Event()
        self._idle.set()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._turn_due = False
        limits = deadlines or Deadlines(
            step_cap_s=config.step_timeout_s, start_s=config.startup_timeout_s, rebuild_limit=config.rebuild_limit
        )
        doors = EngineDoors(
            answer_everyone=lambda cause: self._from_thread(self._answer_everyone, str(cause)),
            begin_epoch=lambda epoch: self._from_thread(self._begin_epoch, epoch),
            end=lambda code: self._from_thread(self._set_ended, code),
        )
        rebuilds = config.on_failure == "rebuild"
        self._supervisor = Supervisor(limits, end or ProcessEnd(), doors, rebuilds=rebuilds)
        self._group = RankGroup(
            config,
            on_result=lambda outcome: self._from_thread(self._turn, outcome),
            on_failure=self._supervisor.fail,
            may_publish=self._supervisor.may_publish,
        )

    # --- life -------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the threads, load the model, become READY.

        Raises UsageError where the checkpoint or the configuration is at fault, EngineUnavailable where a rank failed.
        """
        self._supervisor.start(self._group)
        try:
            limits = self._supervisor.deadlines
            self._info = await asyncio.to_thread(self._group.start, limits.start_s, limits.phases_s())
        except PegError:
            if self.cause is not None:
                raise EngineUnavailable(str(self.cause)) from None
            await self.close()
            raise
        priorities = self._config.scheduling_policy == "priority"
        self._scheduler = Scheduler(
            SchedulerLimits.of(
                self._info,
                self._config.max_num_queued_reqs,
                max_num_queued_tokens=self._config.max_num_queued_tokens,
                priorities=priorities,
            )
        )
        if not self._supervisor.ready():
            raise EngineUnavailable(str(self.cause))

    async def drain(self, deadline_s: float) -> None:
        """Admit nothing more, let what is open finish; at the deadline the rest gets FAILED.

        A rebuild under way ends first, within its own deadline: whoever asks for an end gets one.
        """
        while not self._supervisor.drain():
            await self._rebuild_over()
            if self.state is not EngineState.READY:
                return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), deadline_s)
        self._answer_everyone(f"the server shut down {deadline_s:g} s after it was asked to")

    async def close(self, deadline_s: float = 5.0) -> None:
        """Join every thread. What is still open gets FAILED; a second call does nothing."""
        self._answer_everyone("the engine was closed")
        self._masks.close()
        await asyncio.to_thread(self._group.close, deadline_s)
        await asyncio.to_thread(self._supervisor.release, deadline_s)
        self._set_ended(0 if self.cause is None else 70)

    async def ended(self) -> int:
        """The exit code, once the engine has stopped (0) or failed and wound up (70)."""
        return await asyncio.shield(self._ended)

    async def admission(self) -> None:
        """Under the policy rebuild, wait for a rebuild under way to end; return at once in any other state."""
        if self._config.on_failure == "rebuild":
            await self._rebuild_over()

    async def _rebuild_over(self) -> None:
        """Wait while the engine is broken or rebuilt. The supervisor's deadlines end either, in READY or for good."""
        # The state is the supervisor's: an event set here on its behalf would be late, and let a request slip through.
        while self.state in (EngineState.BROKEN, EngineState.REBUILDING) and not self._ended.done():  # noqa: ASYNC110
            await asyncio.sleep(_REBUILD_POLL_S)

    # --- what is true -----------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        """What the ranks told once loaded. Only after `start`."""
        return self._info

    @property
    def state(self) -> EngineState:
        return self._supervisor.state

    @property
    def cause(self) -> Cause | None:
        return self._supervisor.cause

    @property
    def epoch(self) -> int:
        return self._supervisor.epoch

    def vitals(self) -> Vitals:
        """What the supervisor knows, in every state; costs nothing that grows with the load."""
        return self._supervisor.vitals()

    def stats(self) -> EngineStats:
        """A reading of now; costs nothing that grows with the load. Only after `start`."""
        return EngineStats(
            info=self._info,
            state=self.state,
            epoch=self.epoch,
            scheduler=self._scheduler.stats(),
            last_commit_age_s=self._loop.time() - self._supervisor.clock.last_commit_s,
            open_streams=len(self._open.streams),
        )

    # --- requests ---------------------------------------------------------------------------------------

    def check_room(self, prompt_lengths: tuple[int, ...]) -> None:
        """Raises QueueFull where sequences with prompts of these lengths may not wait now, InvalidRequest where never.

        For those who want to know before they tokenise, or before the first of several is submitted.
        """
        self._scheduler.check_room(prompt_lengths)

    def submit(
        self, request: SequenceRequest, matcher: StopMatcher | None = None, grammar: Grammar | None = None
    ) -> TokenStream:
        """Admit a request, or refuse it: InvalidRequest, QueueFull, EngineUnavailable.

        With a `grammar` the sequence samples only what that allows, and ends with STOP where nothing can follow.
        """
        if self.state is not EngineState.READY:
            raise EngineUnavailable(f"the engine is {self.state}" + (f": {self.cause}" if self.cause else ""))
        if request.request_id in self._open.seq_ids:
            raise InvalidRequest(f"request_id {request.request_id!r} is already running", "request_id")
        feed, mask = None if matcher is None else matcher.feed, None if grammar is None else grammar.first_mask
        seq_id = self._scheduler.admit(request, feed, mask)
        if grammar is not None:
            self._masks.add(seq_id, grammar)
        stream = TokenStream(request, partial(self.cancel, request.request_id))
        self._open.add(seq_id, stream)
        self._idle.clear()
        self._turn_soon()
        return stream

    def cancel(self, request_id: str) -> bool:
        """End a live request with CANCELLED; false where there is none of that id."""
        seq_id = self._open.seq_ids.get(request_id)
        if seq_id is None:
            return False
        update = self._scheduler.cancel(seq_id)
        if update is not None:
            self._publish([update])
            self._turn_soon()
        return True

    def inject(self, fault: Fault) -> None:
        """Arm a fault on a rank; refused unless the engine was started with fault injection."""
        self._group.inject(fault)

    def fail(self, kind: CauseKind, message: str) -> bool:
        """An operator's wish: break the engine; false where it is broken already, or over."""
        if self.state in (EngineState.BROKEN, EngineState.REBUILDING, EngineState.STOPPED):
            return False
        self._supervisor.fail(Cause(kind=kind, message=message))
        return True

    # --- the step loop ----------------------------------------------------------------------------------

    def _turn_soon(self) -> None:
        """One turn for everything that is submitted in this pass of the loop."""
        if not self._turn_due:
            self._turn_due = True
            self._loop.call_soon(self._turn)

    def _turn(self, outcome: StepOutcome | None = None) -> None:
        """One turn of the step loop: take in what came back, launch what can run, then publish."""
        if outcome is None:
            self._turn_due = False
        if not self._supervisor.may_publish(self.epoch if outcome is None else outcome.epoch):
            return
        try:
            updates = [] if outcome is None else self._take_in(outcome)
            self._masks.advance(updates)
            updates += self._take_masks()
            while (plan := self._scheduler.plan()) is not None:
                self._supervisor.clock.issued(plan)
                self._group.run(plan)
                self._note_started(plan)
            self._publish(updates)
        except Exception as error:  # a bug of the loop's own must break the engine, not stop it silently
            self._supervisor.fail(
                Cause(kind=CauseKind.LOOP_FAILED, message=repr(error), traceback=traceback.format_exc())
            )

    def _note_started(self, plan: StepPlan) -> None:
        for new in plan.new_rows:
            stream = self._open.streams.get(new.seq_id)
            if stream is not None and stream.started_s is None:
                stream.started_s = time.monotonic()

    def _take_in(self, outcome: StepOutcome) -> list[Update]:
        self._supervisor.clock.committed(outcome.step)
        match outcome:
            case StepFailed():
                log.warning("step failed, the engine goes on", step=outcome.step, cause=outcome.message)
                return self._scheduler.fail_step(outcome.step, outcome.message)
            case Unread():
                log.warning("step not readable, the engine goes on", step=outcome.step, cause=outcome.message)
                return self._scheduler.lose_step(outcome.step, outcome.message)
            case Skipped():
                return []  # taken back when the step ahead of it failed
            case _:
                return self._scheduler.commit(outcome)

    def _take_masks(self) -> list[Update]:
        """The constrained sequences that know what may come next go on; where nothing may, they end here."""
        ended: list[Update | None] = []
        for made in self._masks.take():
            if made.mask is not None:
                self._scheduler.allow(made.seq_id, made.mask)
            else:
                reason = FinishReason.STOP if made.error is None else FinishReason.FAILED
                ended.append(self._scheduler.end(made.seq_id, reason, made.error))
        return [update for update in ended if update is not None]

    def _publish(self, updates: list[Update]) -> None:
        """Hand each sequence's tokens and terminal to its stream."""
        for update in updates:
            self._open.streams[update.seq_id].put(update)
            if update.terminal is not None:
                self._open.remove(update.seq_id)
                self._masks.remove(update.seq_id)
        if not self._open.streams:
            self._idle.set()

    # --- failing closed ---------------------------------------------------------------------------------

    def _answer_everyone(self, message: str) -> None:
        """Give every open request its FAILED terminal; the scheduler comes last, it may be what failed."""
        streams, self._open = self._open.streams, _Open()
        self._masks.clear()
        for stream in streams.values():
            stream.fail(message)
        self._idle.set()
        self._supervisor.answered()
        if streams:
            self._scheduler.fail_all(message)

    def _begin_epoch(self, epoch: int) -> None:
        """The ranks begin again with empty pools: so does the scheduler."""
        self._scheduler.begin_epoch(epoch)
        self._supervisor.reopen()

    def _set_ended(self, code: int) -> None:
        if not self._ended.done():
            self._ended.set_result(code)

    def _from_thread(self, callback: Callable[..., None], *args: object) -> None:
        """Crossing 2: run something on the loop. A loop that has closed waits for nothing any more."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *args)
