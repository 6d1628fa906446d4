"""Which sequence computes what in the next step, and what a finished step means. Pure decisions."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat

from peg.errors import InvalidRequest, QueueFull, RequestError
from peg.plan import (
    FinishReason,
    SequenceRequest,
    Skipped,
    StepFailed,
    StepOutcome,
    StepPlan,
    StepResult,
    Terminal,
    TokenLogprobs,
)
from peg.sched.draft import Draft
from peg.sched.flight import Flight, Issued
from peg.sched.ledger import Counters, Ledger
from peg.sched.limits import SchedulerLimits
from peg.sched.memory import GroupUsage, KVMemory
from peg.sched.rows import RowPool
from peg.sched.sequence import NO_STEP, Sequence, stored_at_most


@dataclass(frozen=True, slots=True)
class Update:
    """What one call brought for one sequence. `logprobs` has an entry a token; `prompt_logprobs` are in order."""

    seq_id: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    terminal: Terminal | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """A reading of the scheduler. `groups` has one entry per KV group."""

    running: int
    waiting: int
    steps_in_flight: int
    groups: tuple[GroupUsage, ...]
    counters: Counters


def _order(sequence: Sequence) -> int:
    """Who goes first and is preempted last: seq ids count arrivals."""
    return sequence.seq_id


class Scheduler:
    """Admits, plans, commits. Owned by the loop.

    `_running` and `_waiting` are kept in order; whoever runs comes before whoever waits. A plan may be made while
    the step before it is out, `limits.max_in_flight` in all.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._memory = KVMemory(limits.groups, limits.block_size)
        self._rows = RowPool(limits.max_num_seqs)
        self._flight = Flight(self._memory, self._rows)
        self._ledger = Ledger()
        self._running: list[Sequence] = []
        self._waiting: list[Sequence] = []
        self._next_seq_id = 0
        self._next_step = 0
        self._failures = 0
        self._draining = False  # somebody can only go on by preempting: nothing is issued until all steps landed

    # --- requests -----------------------------------------------------------------------------------------

    def admit(self, request: SequenceRequest, feed: Callable[[int], bool] | None = None) -> int:
        """Take a request into the queue; its sequence id. `feed` is a stop matcher's, called once a token.

        Raises InvalidRequest where it can never run, QueueFull where too many wait.
        """
        try:
            max_tokens = self._check(request)
        except RequestError:
            self._ledger.reject()
            raise
        own_stops = frozenset() if request.ignore_eos else self._limits.eos_token_ids
        stop_ids = own_stops | request.stop_token_ids if request.stop_token_ids else own_stops
        tables = self._memory.new_tables()
        sequence = Sequence(self._next_seq_id, request, feed, max_tokens, stop_ids, tables)
        self._next_seq_id += 1
        self._ledger.admit(sequence)
        insort(self._waiting, sequence, key=_order)
        return sequence.seq_id

    def _check(self, request: SequenceRequest) -> int:
        limits = self._limits
        max_tokens = limits.max_tokens(request)
        limits.check_ids(request)
        most = stored_at_most(len(request.prompt_ids), max_tokens)
        never = self._memory.why_never(most, limits.max_num_batched_tokens)
        if never is not None:
            raise InvalidRequest(f"the prompt and its {max_tokens} new tokens can never fit: {never}", "max_tokens")
        cap = limits.max_num_queued_reqs
        if cap is not None and len(self._waiting) >= cap + self._rows.free_rows:
            raise QueueFull(f"{len(self._waiting)} requests are waiting; at most {cap} may queue for a place")
        return max_tokens

    def cancel(self, seq_id: int) -> Update | None:
        """End a sequence at once with CANCELLED; None where it is unknown or has ended."""
        sequence = self._ledger.find(seq_id)
        return None if sequence is None else self._end(sequence, FinishReason.CANCELLED)

    def fail_all(self, message: str) -> list[Update]:
        """End every open sequence, running or waiting, with FAILED. Steps that are out may still be committed."""
        return [self._end(sequence, FinishReason.FAILED, message) for sequence in self._ledger.open]

    def stats(self) -> SchedulerStats:
        used_rows = self._limits.max_num_seqs - self._rows.free_rows
        return SchedulerStats(
            running=len(self._running),
            waiting=len(self._waiting),
            steps_in_flight=len(self._flight),
            groups=self._memory.usage(used_rows, self._limits.max_num_seqs),
            counters=self._ledger.counters(),
        )

    # --- plan ---------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step; None while nothing can be planned: idle, enough in flight, or waiting for a commit."""
        flying = len(self._flight)
        if flying >= self._limits.max_in_flight or (flying and self._draining):
            return None
        self._draining = False
        draft = Draft(self._next_step, self._limits.max_num_batched_tokens)
        prefilling, all_fit = self._plan_decode(draft)
        if self._plan_chunks(draft, prefilling) and all_fit:
            self._plan_waiting(draft)
        if not draft.sequences:
            return None
        self._next_step += 1
        plan = draft.plan(self._limits.epoch, self._rows.release(), self._failures)
        self._flight.issue(plan, draft.sequences)
        return plan

    def _plan_decode(self, draft: Draft) -> tuple[list[Sequence], bool]:
        """One token for everyone past its prefill, in order; the others, who get what is left, have room for one."""
        prefilling: list[Sequence] = []
        all_fit = True
        running = self._running
        place = 0
        while place < len(running) and draft.budget_tokens:
            sequence = running[place]
            place += 1
            if sequence.planned >= sequence.end or (sequence.request.host_paced and self._flight.names(sequence)):
                continue
            if sequence.planned >= sequence.tables.room and not self._make_room(sequence):
                all_fit = False
            elif sequence.planned < sequence.known - 1:
                prefilling.append(sequence)
            else:
                draft.add(sequence, 1)
        return prefilling, all_fit

    def _make_room(self, sequence: Sequence) -> bool:
        """Room for one more token, at the expense of the newest if need be, but only with nothing in flight."""
        while not self._memory.grow(sequence.tables, sequence.planned + 1):
            if self._flight:
                # A commit of its own may give something back; if it has none to wait for, somebody has to go.
                self._draining = self._draining or not self._flight.names(sequence)
                return False
            assert len(self._running) > 1, f"sequence {sequence.seq_id} does not fit alone"
            newest = self._running[-1]
            self._preempt(newest)
            if newest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._running.pop()
        self._ledger.preempt()
        self._flight.give_up(sequence, sequence.tables.take_all(), sequence.row)
        sequence.restart()
        insort(self._waiting, sequence, key=_order)

    def _plan_chunks(self, draft: Draft, prefilling: list[Sequence]) -> bool:
        """What is left of the budget, first come first served; false where a chunk was cut short by blocks."""
        for sequence in prefilling:
            if not draft.budget_tokens:
                return False
            count = min(draft.budget_tokens, sequence.known - sequence.planned)
            fits = self._memory.reach(sequence.tables, sequence.planned + count) - sequence.planned
            grown = self._memory.grow(sequence.tables, sequence.planned + fits)
            assert grown, f"sequence {sequence.seq_id} lost the room it was given"
            draft.add(sequence, fits)
            if fits < count:
                return False
        return True

    def _plan_waiting(self, draft: Draft) -> None:
        """Let in who waits, in order, while there are rows and blocks, and one spare block for each who runs."""
        while self._waiting and draft.budget_tokens and self._rows.free_rows:
            sequence = self._waiting[0]
            chunk = min(draft.budget_tokens, sequence.known)
            # Without the spare blocks whoever comes in would be preempted again by the next one who grows.
            spare = len(self._running) + 1 if self._running else 0
            if not self._memory.admit(sequence.tables, sequence.known, chunk, spare):
                return
            del self._waiting[0]
            sequence.row = self._rows.take()
            insort(self._running, sequence, key=_order)
            draft.admit(sequence)
            draft.add(sequence, chunk)

    # --- commit -------------------------------------------------------------------------------------------

    def commit(self, outcome: StepOutcome) -> list[Update]:
        """Take in what came back for the oldest step that is out: one update for each sequence with news.

        A step that failed costs its own sequences, and takes back the step issued behind it, which the ranks skip:
        their `Skipped`, when it comes, is no news.
        """
        assert outcome.epoch == self._limits.epoch, (outcome, self._limits.epoch)
        match outcome:
            case StepResult():
                return self._commit_result(outcome)
            case StepFailed():
                return self._fail_step(outcome)
            case Skipped():
                return []

    def _commit_result(self, result: StepResult) -> list[Update]:
        issued = self._flight.land(result.step)
        sampled = iter(zip(result.token_ids, result.logprobs or repeat(None), strict=False))
        scored = result.prompt_logprobs or repeat(())
        updates: list[Update] = []
        for piece, sequence, prompt_logprobs in zip(issued.plan.slices, issued.sequences, scored, strict=False):
            token = next(sampled) if piece.samples else None
            if sequence.finished:
                continue  # it ended while this step was out: its token is void
            fresh = self._store(sequence, piece.start, piece.count, prompt_logprobs)
            terminal = self._append(sequence, token[0]) if token is not None else self._scored_only(sequence)
            if terminal is not None:
                self._drop(sequence)
            if token is not None:
                updates.append(Update(sequence.seq_id, (token[0],), (token[1],), fresh, terminal))
            elif fresh or terminal is not None:
                updates.append(Update(sequence.seq_id, (), (), fresh, terminal))
        return updates

    def _store(
        self, sequence: Sequence, start: int, count: int, prompt_logprobs: tuple[TokenLogprobs, ...]
    ) -> tuple[TokenLogprobs, ...]:
        """Move the committed frontier; the prompt logprobs of positions that were not reported before."""
        stored = sequence.committed = start + count
        passed = self._memory.behind_window(sequence.tables, stored)
        if passed:
            self._flight.give_up(sequence, passed)
        seen = sequence.prompt_seen
        if seen >= sequence.prompt_len:
            return ()
        sequence.prompt_seen = max(seen, min(stored, sequence.prompt_len))
        self._ledger.commit(prompt_tokens=sequence.prompt_seen - seen, generated_tokens=0)
        return prompt_logprobs[max(0, seen - start) :]

    def _append(self, sequence: Sequence, token: int) -> Terminal | None:
        """One more token, and the terminal if it is the last."""
        sequence.outputs.append(token)
        self._ledger.commit(prompt_tokens=0, generated_tokens=1)
        if token in sequence.stop_ids:
            return self._ledger.close(sequence, FinishReason.STOP, stop_token_id=token)
        if sequence.feed is not None and sequence.feed(token):
            return self._ledger.close(sequence, FinishReason.STOP)
        if len(sequence.outputs) == sequence.max_tokens:
            return self._ledger.close(sequence, FinishReason.LENGTH)
        return None

    def _scored_only(self, sequence: Sequence) -> Terminal | None:
        if sequence.max_tokens == 0 and sequence.committed == sequence.prompt_len:
            return self._ledger.close(sequence, FinishReason.LENGTH)
        return None

    # --- endings ------------------------------------------------------------------------------------------

    def _fail_step(self, outcome: StepFailed) -> list[Update]:
        failed = self._flight.land(outcome.step)
        self._failures += 1
        skipped = self._flight.recall()
        for sequence in failed.sequences:
            sequence.last_step = NO_STEP
        if skipped is not None:
            self._take_back(skipped, failed.sequences)
        alive = [sequence for sequence in failed.sequences if not sequence.finished]
        return [self._end(sequence, FinishReason.FAILED, outcome.message) for sequence in alive]

    def _take_back(self, skipped: Issued, failed: list[Sequence]) -> None:
        """Who is in the skipped step and not in the failed one is again as it was when that step was planned."""
        new = {row.row for row in skipped.plan.new_rows}
        for piece, sequence in zip(skipped.plan.slices, skipped.sequences, strict=True):
            if sequence.finished or sequence in failed:
                continue
            sequence.last_step = NO_STEP
            if piece.row in new:
                self._running.remove(sequence)
                self._memory.give(sequence.tables.take_all())
                self._rows.give_unknown(piece.row)
                sequence.restart()
                insort(self._waiting, sequence, key=_order)
            else:
                sequence.planned = piece.start
                changes = [change for change in skipped.plan.table_changes if change.row == piece.row]
                self._memory.take_back(sequence.tables, changes)

    def _end(self, sequence: Sequence, reason: FinishReason, message: str | None = None) -> Update:
        terminal = self._ledger.close(sequence, reason, message)
        self._drop(sequence)
        return Update(sequence.seq_id, terminal=terminal)

    def _drop(self, sequence: Sequence) -> None:
        """A sequence that has its terminal leaves, and gives up what it holds."""
        queue = self._waiting if sequence.row < 0 else self._running
        del queue[bisect_left(queue, _order(sequence), key=_order)]
        if sequence.row >= 0:
            self._flight.give_up(sequence, sequence.tables.take_all(), sequence.row)
