"""What the engine runs: one sequence's tokens, how far they are planned and committed, and what it holds."""

from __future__ import annotations

from collections.abc import Callable

from peg.plan import NewRow, SequenceRequest, Slice
from peg.sched.tables import BlockTables

NO_ROW = -1
NO_STEP = -1


class Sequence:
    """One sequence on its way through the engine. Owned by the loop.

    `planned` counts the tokens that are stored once every issued step is done, `committed` those stored by the
    last committed one, `end` those it stores at most. `prompt_seen` is how much of the prompt was ever committed:
    what is recomputed after a preemption is not reported again. `last_step` is the last issued step that names the
    sequence.

    A `constrained` sequence is host-paced: `mask` says which tokens may come next, which takes the last token to know.
    It is None from the commit of a token until the host has made the next one, and so long the sequence waits.
    """

    __slots__ = (
        "committed",
        "constrained",
        "end",
        "feed",
        "finished",
        "last_step",
        "mask",
        "max_tokens",
        "outputs",
        "planned",
        "prompt_len",
        "prompt_seen",
        "request",
        "row",
        "seq_id",
        "stop_ids",
        "tables",
    )

    def __init__(
        self,
        seq_id: int,
        request: SequenceRequest,
        feed: Callable[[int], bool] | None,
        max_tokens: int,
        stop_ids: frozenset[int],
        tables: BlockTables,
    ) -> None:
        self.seq_id = seq_id
        self.request = request
        self.feed = feed
        self.max_tokens = max_tokens
        self.stop_ids = stop_ids
        self.tables = tables
        self.mask: bytes | None = None
        self.constrained = False
        self.prompt_len = len(request.prompt_ids)
        self.end = stored_at_most(self.prompt_len, max_tokens)
        self.outputs: list[int] = []
        self.planned = 0
        self.committed = 0
        self.prompt_seen = 0
        self.last_step = NO_STEP
        self.row = NO_ROW
        self.finished = False

    @property
    def known(self) -> int:
        """Tokens whose ids the host has."""
        return self.prompt_len + len(self.outputs)

    @property
    def waits_for_host(self) -> bool:
        """Whether its next step needs what the host does not have yet: the token sampled last, or the mask after it."""
        return self.constrained and (self.mask is None or self.planned >= self.known)

    def constrain(self, mask: bytes) -> None:
        """From here on only what a mask allows is sampled; this is the one for the first token."""
        self.mask = mask
        self.constrained = True

    def take(self, token: int) -> None:
        """A sampled token is committed."""
        self.outputs.append(token)
        self.mask = None

    def restart(self) -> None:
        """Without a row again: its committed tokens are its whole state, what was stored is computed again."""
        self.planned = self.committed = 0
        self.row = NO_ROW

    def new_row(self) -> NewRow:
        """What the ranks need to know of a sequence that takes a row."""
        request = self.request
        tables = tuple(tuple(table) for table in self.tables.tables)
        stop_ids = tuple(self.stop_ids) if request.sampling.min_tokens else ()
        outputs = tuple(self.outputs)
        return NewRow(self.row, self.seq_id, request.sampling, request.prompt_ids, outputs, tables, stop_ids)

    def slice(self, count: int) -> Slice:
        """The next `count` tokens. One that is not known yet is what the previous step, still out, samples."""
        start, known = self.planned, self.known
        stop = start + count
        samples = stop >= known and self.max_tokens > 0
        mask = self.mask if samples else None
        if start >= known:
            return Slice(self.seq_id, self.row, start, count, None, samples)
        ids = self._ids(start, stop)
        top = self.request.prompt_logprobs
        if top is None or min(stop, self.prompt_len) <= self.prompt_seen:
            return Slice(self.seq_id, self.row, start, count, ids, samples, mask=mask)
        targets = self.request.prompt_ids[start + 1 : stop + 1]
        return Slice(self.seq_id, self.row, start, count, ids, samples, targets, top, mask)

    def _ids(self, start: int, stop: int) -> tuple[int, ...]:
        prompt_len = self.prompt_len
        if stop <= prompt_len:
            return self.request.prompt_ids[start:stop]
        outputs = tuple(self.outputs[max(0, start - prompt_len) : stop - prompt_len])
        return self.request.prompt_ids[start:] + outputs if start < prompt_len else outputs


def stored_at_most(prompt_len: int, max_tokens: int) -> int:
    """How many tokens a sequence stores at most: the last one sampled is never an input."""
    return prompt_len + max(max_tokens, 1) - 1
