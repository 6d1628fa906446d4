"""Stop strings: where generated text ends, decided alike for the engine and for the client.

The engine asks `StopStrings` whether a token completes a stop, the server lets `OutputText` make and cut the text.
Both come from one `OutputRules`, and the first is nothing but the second with its text thrown away.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from peg.text.detokenizer import Detokenizer
from peg.text.tokenizer import Tokenizer


class StopSet:
    """Stop strings as one automaton: a state is the longest end of the text that some stop begins with.

    Immutable, so the choices of a request share it. Source: Aho and Corasick, "Efficient string matching", 1975.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        """No stop may be empty: that is the caller's to refuse."""
        assert all(stops), "an empty stop string"
        self._next: list[dict[str, int]] = [{}]
        self._shorter = [0]  # the state of the next shorter end of the text
        self.depth = [0]  # characters of the text that the state holds
        self.complete = [0]  # characters of the longest stop that ends here, 0 for none
        for stop in stops:
            self._add(stop)
        self._link()

    def __bool__(self) -> bool:
        return len(self.depth) > 1

    def step(self, state: int, char: str) -> int:
        """The state after one more character."""
        while (after := self._next[state].get(char)) is None and state:
            state = self._shorter[state]
        return after or 0

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._shorter.append(0)
                self.depth.append(self.depth[state] + 1)
                self.complete.append(0)
            state = self._next[state][char]
        self.complete[state] = len(stop)

    def _link(self) -> None:
        """Fill in the shorter ends, breadth first, so that each finds its own already there."""
        queue = deque([0])
        while queue:
            state = queue.popleft()
            for char, child in self._next[state].items():
                shorter = self.step(self._shorter[state], char) if state else 0
                self._shorter[child] = shorter
                self.complete[child] = self.complete[child] or self.complete[shorter]
                queue.append(child)


class StopCutter:
    """Lets through the text before the first stop, and never a piece that may become one.

    `matched` is the stop that ended the text: the one that starts first, and of two that start together the
    shorter, among those complete at the earliest `feed` that completes any.
    """

    def __init__(self, stops: StopSet, *, include_stop: bool = False) -> None:
        self.searches = bool(stops)
        self._stops = stops
        self._include_stop = include_stop
        self._state = 0
        self._held = ""
        self.matched: str | None = None

    def feed(self, piece: str) -> str:
        """The text that is safe to show after `piece`; nothing once a stop has matched."""
        if self.matched is not None:
            return ""
        if not self.searches:
            return piece
        text = self._held + piece
        first = (len(text), 0)
        for end, char in enumerate(piece, len(self._held) + 1):
            self._state = self._stops.step(self._state, char)
            if length := self._stops.complete[self._state]:
                first = min(first, (end - length, length))
        start, length = first
        if length:
            self.matched, self._held = text[start : start + length], ""
            return text[: start + length] if self._include_stop else text[:start]
        safe = len(text) - self._stops.depth[self._state]
        self._held = text[safe:]
        return text[:safe]

    def finish(self) -> str:
        """What was held back, for a text that ended without a stop."""
        held, self._held = self._held, ""
        return held


class OutputText:
    """Ids to the text that a client sees. Owned by whoever feeds it; one per sequence."""

    def __init__(self, detokenizer: Detokenizer, cutter: StopCutter, *, min_tokens: int = 0) -> None:
        """No stop is looked for in the text of the first `min_tokens` tokens."""
        self._detokenizer = detokenizer
        self._cutter = cutter
        self._unsearched = min_tokens

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, None so far."""
        return self._cutter.matched

    def feed(self, token_id: int) -> str:
        """The text that this token adds to what may be shown."""
        piece = self._detokenizer.feed(token_id)
        if not self._cutter.searches:
            return piece
        if self._unsearched > 0:
            self._unsearched -= 1
            return piece
        return self._cutter.feed(piece)

    def finish(self) -> str:
        """The rest, once the sequence has ended, whatever ended it; no stop can match any more."""
        tail = "" if self.matched is not None else self._detokenizer.finish()
        return self._cutter.finish() + tail


class StopStrings:
    """The engine's `StopMatcher` for stop strings. Called on the loop; one per sequence."""

    def __init__(self, text: OutputText) -> None:
        self._text = text

    def feed(self, token_id: int) -> bool:
        """Whether this token completes a stop string."""
        self._text.feed(token_id)
        return self._text.matched is not None


class OutputRules:
    """How a request's output becomes text: the same for all its choices, and for engine and server. Immutable."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        skipped: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._stops = StopSet(stops)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._skipped = skipped

    def text(self) -> OutputText:
        """A new, empty text."""
        detokenizer = Detokenizer(self._tokenizer, skipped=self._skipped)
        cutter = StopCutter(self._stops, include_stop=self._include_stop)
        return OutputText(detokenizer, cutter, min_tokens=self._min_tokens)

    def matcher(self) -> StopStrings | None:
        """A matcher for one sequence, None where there are no stop strings."""
        return StopStrings(self.text()) if self._stops else None
