"""Which sequence computes what in the next step."""

from __future__ import annotations

from peg.plan import StepPlan
from peg.sched.draft import Draft
from peg.sched.flight import Flight
from peg.sched.ledger import Ledger
from peg.sched.limits import SchedulerLimits
from peg.sched.queues import Queues
from peg.sched.sequence import Sequence


class Planner:
    """Makes plans, one step ahead of what is committed. Owned by the loop.

    Who runs is served in order: one token for each that is past its prefill, then chunks of prefill from what is
    left of the budget, then whoever waits. Where blocks run short it plans what fits; only with nothing in flight
    does it preempt, the newest first, so the oldest always gets on.
    """

    def __init__(self, limits: SchedulerLimits, flight: Flight, queues: Queues, ledger: Ledger) -> None:
        self._limits = limits
        self._flight = flight
        self._memory = flight.memory
        self._rows = flight.rows
        self._queues = queues
        self._ledger = ledger
        self._next_step = 0
        self._landing = False  # someone can only get on by preempting: nothing is issued until all steps are back

    def plan(self) -> StepPlan | None:
        """The next step, issued; None while there is nothing to plan, enough in flight, or a commit to wait for."""
        flying = len(self._flight)
        if flying >= self._limits.max_in_flight or (flying and self._landing):
            return None
        self._landing = False
        draft = Draft(self._next_step, self._limits.max_num_batched_tokens)
        prefilling = self._serve_running(draft)
        self._serve_chunks(draft, prefilling)
        self._serve_waiting(draft)
        if not draft.sequences:
            return None
        self._next_step += 1
        plan = draft.plan(self._limits.epoch, self._rows.release(), self._ledger.failed_steps)
        self._flight.issue(plan, draft.sequences)
        return plan

    def _serve_running(self, draft: Draft) -> list[Sequence]:
        """One token for everyone who needs just one, and room for one for those in prefill, who are returned."""
        prefilling: list[Sequence] = []
        running = self._queues.running
        place = 0
        while place < len(running) and draft.budget_tokens:  # preempting shortens the list, behind `place`
            sequence = running[place]
            place += 1
            if sequence.planned >= sequence.end or sequence.waits_for_host:
                continue
            if sequence.planned >= sequence.tables.room and not self._make_room(sequence):
                continue
            if sequence.planned < sequence.known - 1:
                prefilling.append(sequence)
            else:
                draft.add(sequence, 1)
        return prefilling

    def _make_room(self, sequence: Sequence) -> bool:
        """Room for one more token; with nothing in flight, at the expense of the newest, itself perhaps."""
        while not self._memory.grow(sequence.tables, sequence.planned + 1):
            if self._flight:
                # A commit of its own may give something back. If it has none to wait for, someone has to go.
                self._landing = self._landing or not self._flight.names(sequence)
                return False
            newest = self._queues.running[-1]
            assert len(self._queues.running) > 1, f"sequence {sequence.seq_id} does not fit alone"
            self._preempt(newest)
            if newest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._ledger.preemptions += 1
        self._queues.remove(sequence)
        self._flight.give_up_all(sequence)
        sequence.restart()
        self._queues.wait(sequence)

    def _serve_chunks(self, draft: Draft, prefilling: list[Sequence]) -> None:
        """Chunks of prefill, as far as the budget goes, and the blocks: a chunk may be cut short."""
        for sequence in prefilling:
            stop = min(sequence.planned + draft.budget_tokens, sequence.known)
            fits = self._memory.reach(sequence.tables, stop)
            if fits > sequence.planned and self._memory.grow(sequence.tables, fits):
                draft.add(sequence, fits - sequence.planned)

    def _serve_waiting(self, draft: Draft) -> None:
        """Let in who waits, in order, while there are rows and blocks."""
        queues = self._queues
        while queues.waiting and draft.budget_tokens and self._rows.free_rows:
            sequence = queues.waiting[0]
            if sequence.waits_for_host:
                return  # it was preempted, and its mask will be here in a moment: nobody passes it for that
            chunk = min(draft.budget_tokens, sequence.known)
            # A spare block for each who runs: without it, who comes in is preempted by the next who grows.
            spare = len(queues.running) + 1 if queues.running else 0
            if not self._memory.admit(sequence.tables, sequence.known, chunk, spare):
                return
            queues.remove(sequence)
            sequence.row = self._rows.take()
            queues.run(sequence)
            draft.admit(sequence)
            draft.add(sequence, chunk)
