"""Reading a model's output as it grows: what is answer, what is reasoning, what is a tool call.

A parser is written as if the whole text were there: a generator that reads and emits. Where it needs more text it
yields, and the next `feed` resumes it there, so the events do not depend on how the text is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias, TypeVar

from peg.text.events import Arguments, Content, Event, Reasoning, ToolCall

_T = TypeVar("_T")
Step: TypeAlias = Generator[None, None, _T]
"""A piece of a parser; it yields to wait for more text."""

_SPACE = " \t\r\n"
_PUNCTUATION = " \t\r\n[],}"
_LONGEST_NAME = 256


class OutputParser:
    """Answer and reasoning between `<think>` and `</think>`; subclasses read a family's tool calls too.

    Owned by whoever feeds it; one per sequence. Line breaks next to a mark belong to the mark. What looks like a
    tool call and is none is content, to the letter. Once a call has begun it is told as far as the model wrote it.
    """

    think_open: ClassVar[str] = "<think>"  # empty: no reasoning; likewise call_open
    think_close: ClassVar[str] = "</think>"
    call_open: ClassVar[str] = ""
    call_close: ClassVar[str] = ""
    tokens: ClassVar[tuple[str, ...]] = ()
    """Special tokens that must be left in the text for this parser: `Tokenizer.skipped_ids(keep=…)`."""

    def __init__(self, *, prompt: str = "", tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """`prompt` is the rendered prompt, which may have opened the reasoning. Without `tools` no call is read."""
        self.calls = 0
        self._tools = {str(tool["function"]["name"]): tool["function"] for tool in tools}
        self._call_marks = (self.call_open,) if self.call_open and tools else ()
        self._openers = (self.think_open, *self._call_marks) if self.think_open else self._call_marks
        self._thinks_at_once = self.think_open != "" and prompt.rstrip().endswith(self.think_open)
        self._text = ""  # all that is not read yet, from _at on
        self._at = 0
        self._ended = False
        self._events: list[Event] = []
        self._kind: type[Content | Reasoning] = Content
        self._breaks = ""  # line breaks of that kind, which go with a mark if one follows
        self._after_mark = False
        self._trail: str | None = None  # what was read since a mark that may turn out to be content
        self._machine = self._read()
        next(self._machine)

    def feed(self, text: str) -> list[Event]:
        """What is certain after `text`."""
        self._text = self._text[self._at :] + text
        self._at = 0
        return self._resume()

    def finish(self) -> list[Event]:
        """The rest, once the output has ended."""
        self._ended = True
        return self._resume()

    def _resume(self) -> list[Event]:
        next(self._machine, None)
        events, self._events = self._events, []
        return events

    # --- the parser --------------------------------------------------------------------------------------

    def _read(self) -> Step[None]:
        """All of the output."""
        yield  # the constructor ends here
        mark = self.think_open if self._thinks_at_once else (yield from self._read_start())
        while mark:
            if mark == self.think_open:
                yield from self._read_reasoning()
            else:
                yield from self._read_marked_calls(self._content)
            mark = yield from self._until(self._openers, self._content)
        if self._breaks:
            self._emit(self._kind(self._breaks))

    def _read_start(self) -> Step[str]:
        """What comes before the first mark, and the mark; a family whose calls need no mark begins otherwise."""
        return (yield from self._until(self._openers, self._content))

    def _read_reasoning(self) -> Step[None]:
        """To the end of the reasoning. A tool call ends it too, a mere mention of its mark does not."""
        self._drop_breaks()
        while mark := (yield from self._until((self.think_close, *self._call_marks), self._reasoning)):
            if mark == self.think_close:
                self._drop_breaks()
                return
            if (yield from self._read_marked_calls(self._reasoning)):
                return

    def _read_marked_calls(self, otherwise: Callable[[str], None]) -> Step[bool]:
        """Calls up to the closing mark. Where there is none, all that was read goes to `otherwise`."""
        self._trail = self.call_open
        called = yield from self._read_calls()
        trail, self._trail = self._trail or "", None
        if not called:
            otherwise(trail)
            return False
        rest = [trail]
        yield from self._until((self.call_close,), rest.append)
        self._leftover("".join(rest))
        return True

    def _read_calls(self) -> Step[bool]:
        """What stands behind the opening mark; false where it is no call, so that none was begun."""
        raise NotImplementedError

    # --- reading -----------------------------------------------------------------------------------------

    def _peek(self) -> Step[str]:
        """The next character, not taken; nothing at the end of the output."""
        while self._at == len(self._text) and not self._ended:
            yield
        return self._text[self._at : self._at + 1]

    def _take(self, end: int) -> str:
        """Text up to `end`, an index into the text that is there."""
        taken = self._text[self._at : end]
        self._at = end
        if self._trail is not None:
            self._trail += taken
        return taken

    def _past(self, skipped: str = _SPACE) -> Step[str]:
        """The next character that is none of `skipped`, not taken; nothing at the end of the output."""
        while (char := (yield from self._peek())) and char in skipped:
            self._take(self._at + 1)
        return char

    def _expect(self, literal: str) -> Step[bool]:
        """Take exactly `literal`, if it comes next."""
        while len(self._text) - self._at < len(literal) and not self._ended:
            if not literal.startswith(self._text[self._at :]):
                return False
            yield
        if not self._text.startswith(literal, self._at):
            return False
        self._take(self._at + len(literal))
        return True

    def _until(self, marks: Sequence[str], emit: Callable[[str], None]) -> Step[str]:
        """Hand on text up to the first of `marks`, which is taken and returned; nothing at the end of the output."""
        while True:
            found = [(at, mark) for mark in marks if (at := self._text.find(mark, self._at)) >= 0]
            if found:
                at, mark = min(found)
                emit(self._take(at))
                self._take(at + len(mark))
                return mark
            emit(self._take(len(self._text) - (0 if self._ended else self._begun(marks))))
            if self._ended:
                return ""
            yield

    def _begun(self, marks: Sequence[str]) -> int:
        """Characters at the end of the text that one of `marks` begins with."""
        rest = self._text[self._at :]
        return max((size for mark in marks for size in range(len(mark)) if rest.endswith(mark[:size])), default=0)

    def _word(self, end: str) -> Step[str]:
        """A name without white space or angle brackets, up to `end`, which is taken; nothing where it is none."""
        while True:
            word, found, _ = self._text[self._at :].partition(end)
            if found or self._ended or (word and not _is_name(word)):
                break
            yield
        if not found or not _is_name(word):
            return ""
        self._take(self._at + len(word) + len(end))
        return word

    # --- emitting ----------------------------------------------------------------------------------------

    def _content(self, text: str) -> None:
        self._say(Content, text)

    def _reasoning(self, text: str) -> None:
        self._say(Reasoning, text)

    def _say(self, kind: type[Content | Reasoning], text: str) -> None:
        if self._after_mark:
            text = text.lstrip("\n")
        if not text:
            return
        self._after_mark = False
        self._kind = kind
        text = self._breaks + text
        body = text.rstrip("\n")
        self._breaks = text[len(body) :]
        if body:
            self._emit(kind(body))

    def _drop_breaks(self) -> None:
        """A mark has been read: the line breaks around it go with it."""
        self._breaks = ""
        self._after_mark = True

    def _begin_call(self, name: str) -> None:
        """From here on this is a call."""
        self._trail = None
        self._drop_breaks()
        self._emit(ToolCall(self.calls, name))
        self.calls += 1

    def _leftover(self, text: str) -> None:
        """What stood beside the calls: nothing that the model wrote goes unseen but its punctuation."""
        self._content(text.strip(_PUNCTUATION))

    def _argument(self, text: str) -> None:
        if text:
            self._emit(Arguments(self.calls - 1, text))

    def _emit(self, event: Event) -> None:
        """Add an event; text that continues the last one is joined to it."""
        match self._events[-1:], event:
            case [Content(before)], Content(text):
                self._events[-1] = Content(before + text)
            case [Reasoning(before)], Reasoning(text):
                self._events[-1] = Reasoning(before + text)
            case [Arguments(index, before)], Arguments(same, text) if index == same:
                self._events[-1] = Arguments(index, before + text)
            case _:
                self._events.append(event)


def _is_name(text: str) -> bool:
    return 0 < len(text) <= _LONGEST_NAME and not any(char.isspace() or char in "<>{}" for char in text)


def refuse_constant(constant: str) -> None:
    """For `json.loads`: NaN and the infinities, which Python would take, are not JSON."""
    raise ValueError(f"{constant} is not JSON")
