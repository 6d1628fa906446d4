"""The scheduler: admits requests, plans steps, commits what came back. The only door of this zone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import repeat

import msgspec

from peg.errors import InvalidRequest, QueueFull, RequestError
from peg.plan import (
    FinishReason,
    SequenceRequest,
    StepPlan,
    StepResult,
    Terminal,
    TokenLogprobs,
)
from peg.sched.flight import Flight
from peg.sched.ledger import Counters, Ledger
from peg.sched.limits import SchedulerLimits
from peg.sched.memory import KVMemory
from peg.sched.planner import Planner
from peg.sched.queues import Queues
from peg.sched.rows import RowPool
from peg.sched.sequence import Sequence, stored_at_most


class Update(msgspec.Struct, frozen=True, gc=False):
    """What one call brought for one sequence. `logprobs` has one entry a token, or none at all."""

    seq_id: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    terminal: Terminal | None = None


@dataclass(frozen=True, slots=True)
class GroupUsage:
    """How much of one KV group is taken: in blocks, or in state rows where the group is recurrent."""

    used: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """A reading of the scheduler. `groups` has one entry for each KV group, in the model's order."""

    running: int
    waiting: int
    steps_in_flight: int
    groups: tuple[GroupUsage, ...]
    counters: Counters


class Scheduler:
    """Decides what runs, and what a step means once it is back. Pure decisions; owned by the loop."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._ledger = Ledger()
        self._next_seq_id = 0
        self._begin(limits)

    def _begin(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._memory = KVMemory(limits.groups, limits.block_size)
        self._rows = RowPool(limits.max_num_seqs)
        self._flight = Flight(self._memory, self._rows)
        self._queues = Queues()
        self._planner = Planner(limits, self._flight, self._queues, self._ledger)

    def begin_epoch(self, epoch: int) -> None:
        """Start again with empty pools and no step out, as the ranks do. Only after `fail_all`; the books go on."""
        assert not self._ledger.open, f"{len(self._ledger.open)} sequences have no terminal"
        self._ledger.failed_steps = 0
        self._begin(replace(self._limits, epoch=epoch))

    # --- requests -----------------------------------------------------------------------------------------

    def admit(
        self, request: SequenceRequest, feed: Callable[[int], bool] | None = None, mask: bytes | None = None
    ) -> int:
        """Take a request into the queue; its sequence id. `feed` is told each token, and true ends the sequence.

        With a `mask` only what it allows comes first, and after each token the sequence waits for the next (`allow`).
        Raises InvalidRequest where it can never run, QueueFull where too many wait.
        """
        try:
            max_tokens = self._check(request)
        except RequestError:
            self._ledger.reject()
            raise
        stop_ids = request.stop_token_ids if request.ignore_eos else request.stop_token_ids | self._limits.eos_token_ids
        sequence = Sequence(self._next_seq_id, request, feed, max_tokens, stop_ids, self._memory.new_tables())
        if mask is not None:
            sequence.constrain(mask)
        self._next_seq_id += 1
        self._ledger.admit(sequence)
        self._queues.wait(sequence)
        return sequence.seq_id

    def _check(self, request: SequenceRequest) -> int:
        limits = self._limits
        max_tokens = limits.max_tokens(request)
        limits.check_ids(request)
        limits.check_priority(request)
        prompt = len(request.prompt_ids)
        never = self._memory.why_never(stored_at_most(prompt, max_tokens), limits.max_num_batched_tokens)
        if never is not None:
            raise InvalidRequest(f"a prompt of {prompt} tokens and {max_tokens} new ones can never fit: {never}")
        self.check_room((prompt,))
        return max_tokens

    def check_room(self, prompt_lengths: tuple[int, ...]) -> None:
        """Raises QueueFull where too much would wait with prompts of these lengths, InvalidRequest where always.

        Those that a free row is there for do not count.
        """
        limits = self._limits
        if not limits.bounds_queue:
            return
        waiting = [sequence.known for sequence in self._queues.waiting]
        excess = limits.excess([*waiting, *prompt_lengths][self._rows.free_rows :])
        if excess is None:
            return
        if limits.excess(prompt_lengths[self._rows.num_rows :]) is not None:
            raise InvalidRequest(f"{len(prompt_lengths)} sequences in one request: {excess}")
        raise QueueFull(excess)

    def cancel(self, seq_id: int) -> Update | None:
        """End a sequence at once with CANCELLED; None where it is unknown or has ended."""
        return self.end(seq_id, FinishReason.CANCELLED)

    def allow(self, seq_id: int, mask: bytes) -> None:
        """What a constrained sequence may sample next. One that has ended needs nothing any more."""
        sequence = self._ledger.find(seq_id)
        if sequence is not None:
            assert sequence.constrained, f"sequence {seq_id} was admitted without a mask"
            assert sequence.mask is None, f"sequence {seq_id} has a mask"
            sequence.mask = mask

    def end(self, seq_id: int, reason: FinishReason, message: str | None = None) -> Update | None:
        """End a sequence at once, for a reason that no step brings; None where it is unknown or has ended."""
        sequence = self._ledger.find(seq_id)
        return None if sequence is None else self._end(sequence, reason, message)

    def fail_all(self, message: str) -> list[Update]:
        """End every open sequence, running or waiting, with FAILED. Steps that are out may still be committed."""
        return [self._end(sequence, FinishReason.FAILED, message) for sequence in self._ledger.open]

    def stats(self) -> SchedulerStats:
        rows = GroupUsage(self._rows.used_rows, self._rows.num_rows)
        return SchedulerStats(
            running=len(self._queues.running),
            waiting=len(self._queues.waiting),
            steps_in_flight=len(self._flight),
            groups=tuple(rows if usage is None else GroupUsage(*usage) for usage in self._memory.usage()),
            counters=self._ledger.counters(),
        )

    # --- steps --------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, issued with this call; None while there is nothing to plan, or a commit to wait for."""
        return self._planner.plan()

    def commit(self, result: StepResult) -> list[Update]:
        """Take in what the oldest step that is out has computed: one update for each sequence with news."""
        assert result.epoch == self._limits.epoch, (result.epoch, self._limits.epoch)
        issued = self._flight.land(result.step)
        self._ledger.step(issued.plan.num_tokens)
        sampled = zip(result.token_ids, result.logprobs or repeat(None), strict=False)
        scored = result.prompt_logprobs or repeat(())
        updates: list[Update] = []
        for piece, sequence, prompt_logprobs in zip(issued.plan.slices, issued.sequences, scored, strict=False):
            token, logprobs = next(sampled) if piece.samples else (None, None)
            if sequence.finished:
                continue  # it ended while this step was out: what came of it is void
            fresh = self._store(sequence, piece.start, piece.count, prompt_logprobs)
            terminal = self._append(sequence, token)
            if terminal is not None:
                self._leave(sequence)
            if token is not None:
                scores = () if logprobs is None else (logprobs,)
                updates.append(Update(sequence.seq_id, (token,), scores, fresh, terminal))
            elif fresh or terminal is not None:
                updates.append(Update(sequence.seq_id, (), (), fresh, terminal))
        assert next(sampled, None) is None, f"step {result.step}: more tokens than slices that sample"
        return updates

    def _store(
        self, sequence: Sequence, start: int, count: int, prompt_logprobs: tuple[TokenLogprobs, ...]
    ) -> tuple[TokenLogprobs, ...]:
        """Move the committed frontier; the prompt logprobs of positions that were not committed before."""
        sequence.committed = start + count
        self._flight.give_up_passed(sequence)
        seen = sequence.prompt_seen
        if seen == sequence.prompt_len:
            return ()
        sequence.prompt_seen = max(seen, min(start + count, sequence.prompt_len))
        self._ledger.prompt_tokens += sequence.prompt_seen - seen
        return prompt_logprobs[seen - start :] if seen > start else prompt_logprobs

    def _append(self, sequence: Sequence, token: int | None) -> Terminal | None:
        """Take in the sampled token, if there is one; the terminal, if the sequence ends here."""
        if token is not None:
            sequence.take(token)
            self._ledger.generated_tokens += 1
            if token in sequence.stop_ids:
                return self._ledger.close(sequence, FinishReason.STOP, stop_token_id=token)
            if sequence.feed is not None and sequence.feed(token):
                return self._ledger.close(sequence, FinishReason.STOP)
        if sequence.committed == sequence.end:
            return self._ledger.close(sequence, FinishReason.LENGTH)
        return None

    def fail_step(self, step: int, message: str) -> list[Update]:
        """The oldest step that is out failed, at the cost of its own sequences: they end with FAILED.

        What was issued behind it is taken back, for the ranks skip it. They count the rows and tables of the failed
        step as applied, those of a skipped one as not.
        """
        issued = self._flight.land(step)
        self._ledger.failed_steps += 1
        hit = [sequence for sequence in issued.sequences if not sequence.finished]
        updates = [self._end(sequence, FinishReason.FAILED, message) for sequence in hit]
        for sequence in self._flight.recall():
            self._queues.remove(sequence)
            sequence.restart()
            self._queues.wait(sequence)
        return updates

    def lose_step(self, step: int, message: str) -> list[Update]:
        """The oldest step that is out was done, but nobody can say what came of it: those it sampled for have FAILED.

        Whoever was only stored goes on.
        """
        issued = self._flight.land(step)
        updates: list[Update] = []
        for piece, sequence in zip(issued.plan.slices, issued.sequences, strict=False):
            if sequence.finished:
                continue
            if piece.samples or piece.targets:
                updates.append(self._end(sequence, FinishReason.FAILED, message))
            else:
                self._store(sequence, piece.start, piece.count, ())
        return updates

    # --- endings ------------------------------------------------------------------------------------------

    def _end(self, sequence: Sequence, reason: FinishReason, message: str | None = None) -> Update:
        terminal = self._ledger.close(sequence, reason, message)
        self._leave(sequence)
        return Update(sequence.seq_id, terminal=terminal)

    def _leave(self, sequence: Sequence) -> None:
        """Who has its terminal leaves the queues and gives up what it holds."""
        self._queues.remove(sequence)
        self._flight.give_up_all(sequence)
