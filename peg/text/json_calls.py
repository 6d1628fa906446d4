"""Tool calls written as JSON: `{"name": …, "arguments": {…}}`, one or a list."""

from __future__ import annotations

import json
from collections.abc import Callable

from peg.text.output_parser import OutputParser, Step


class JsonCalls(OutputParser):
    """JSON between `<tool_call>` and `</tool_call>`: Qwen3 and the many models trained like it.

    Arguments are handed on as the model wrote them; as text in a JSON string, they are unwrapped.
    """

    call_open = "<tool_call>"
    call_close = "</tool_call>"

    def _read_calls(self) -> Step[bool]:
        called = False
        while (yield from self._past(" \t\r\n[,]")) == "{" and (yield from self._read_call()):
            called, self._trail = True, ""
        return called

    def _knows(self, name: str) -> bool:
        """Whether `name` may be called; one that was not offered is the client's to refuse."""
        return True

    def _knows_key(self, key: str) -> bool:
        """Whether an object with this key may be a call."""
        return key != ""

    def _read_call(self) -> Step[bool]:
        """One object; false, with nothing emitted, where it is no call."""
        self._take(self._at + 1)
        name, begun = "", False
        early: list[str] = []  # arguments that stand before the name
        while (yield from self._past(" \t\r\n,")) == '"':
            key = yield from self._read_key()
            if key == "name":
                name = yield from self._read_string()
                if not self._knows(name):
                    return begun
            elif key in ("arguments", "parameters") and not begun:
                if name:
                    begun = True
                    self._begin_call(name)
                yield from self._read_arguments(self._argument if begun else early.append)
            elif self._knows_key(key):
                yield from self._read_value(_ignore)
            else:
                return begun
        if (yield from self._peek()) == "}":
            self._take(self._at + 1)
            if name and not begun:
                begun = True
                self._begin_call(name)
                self._argument("".join(early) or "{}")
        return begun

    def _read_key(self) -> Step[str]:
        """A key and its colon; empty where there is none."""
        key = yield from self._read_string()
        if (yield from self._past()) != ":":
            return ""
        self._take(self._at + 1)
        return key

    def _read_arguments(self, emit: Callable[[str], None]) -> Step[None]:
        if (yield from self._past()) == '"':
            emit((yield from self._read_string()))
        else:
            yield from self._read_value(emit)

    def _read_string(self) -> Step[str]:
        """The value of a JSON string; empty where none comes next or it is broken off."""
        pieces: list[str] = []
        if (yield from self._past()) == '"':
            yield from self._read_value(pieces.append)
        try:
            value = str(json.loads("".join(pieces) or '""', strict=False))
            value.encode()  # a lone surrogate, which no answer can carry, is a ValueError too
        except ValueError:
            return ""
        return value

    def _read_value(self, emit: Callable[[str], None]) -> Step[None]:
        """Hand on one JSON value as it is written."""
        yield from self._past()
        scan = _Scan()
        while not scan.done and (yield from self._peek()):
            emit(self._take(scan.run(self._text, self._at)))


class PlainJsonCalls(JsonCalls):
    """The same, and JSON without a mark where an output begins with it: SmolLM2, Llama 3.1.

    Without a mark only an object that names an offered tool is a call. Other JSON is content, and shown as soon as
    that is clear.
    """

    think_open = ""
    _marked = True  # reading between marks

    def _read_start(self) -> Step[str]:
        self._trail, self._marked = "", False
        begins = self._call_marks != () and (yield from self._past()) in ("{", "[")
        called = begins and (yield from self._read_calls())
        trail, self._trail, self._marked = self._trail, None, True
        if called:
            self._leftover(trail)
        else:
            self._content(trail)
        return (yield from super()._read_start())

    def _knows(self, name: str) -> bool:
        return super()._knows(name) if self._marked else name in self._tools

    def _knows_key(self, key: str) -> bool:
        return super()._knows_key(key) if self._marked else key in ("type", "id")


class _Scan:
    """Finds the end of one JSON value, however its text is cut. Strings aside, an angle bracket ends it too."""

    def __init__(self) -> None:
        self.done = False
        self._depth = 0
        self._quoted = False
        self._escaped = False

    def run(self, text: str, start: int) -> int:
        """Where the value ends from `start` on, or else the text."""
        for at in range(start, len(text)):
            self.done = self._ends_before(text[at])
            if self.done:
                return at
            self.done = self._ends_with(text[at])
            if self.done:
                return at + 1
        return len(text)

    def _ends_before(self, char: str) -> bool:
        return not self._quoted and (char == "<" or (self._depth == 0 and char in "}], \t\r\n:"))

    def _ends_with(self, char: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif self._quoted:
            self._escaped = char == "\\"
            self._quoted = char != '"'
        elif char == '"':
            self._quoted = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        else:
            return False  # a number or a word ends only before what follows
        return self._depth == 0 and not self._quoted


def _ignore(text: str) -> None:
    """A value that says nothing about the call."""
