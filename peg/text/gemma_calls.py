"""Tool calls as Gemma 4 writes them: `<|tool_call>call:NAME{key:value,…}<tool_call|>`."""

from __future__ import annotations

import json

from peg.text.output_parser import OutputParser, Step, refuse_constant

_QUOTE = '<|"|>'
_DEEPEST = 64


class GemmaCalls(OutputParser):
    """Gemma 4: keys are bare, strings stand between `<|"|>` unescaped; reasoning is the channel `thought`.

    Source: the chat template of the checkpoints, which writes earlier calls in the same way.
    """

    think_open = "<|channel>thought"
    think_close = "<channel|>"
    call_open = "<|tool_call>"
    call_close = "<tool_call|>"
    tokens = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", _QUOTE)

    def _read_calls(self) -> Step[bool]:
        if not (yield from self._expect("call:")):
            return False
        name = yield from self._word("{")
        if not name:
            return False
        self._begin_call(name)
        yield from self._read_inside("}", 0)
        return True

    def _read_inside(self, closer: str, depth: int) -> Step[bool]:
        """An object or a list from behind its opening bracket; false where it is broken off."""
        self._argument("{" if closer == "}" else "[")
        count = 0
        while (char := (yield from self._past(" \t\r\n,"))) != closer:
            if not char or depth == _DEEPEST:
                return False
            if count:
                self._argument(",")
            count += 1
            if closer == "}" and not (yield from self._read_key()):
                return False
            if not (yield from self._read_value(depth)):
                return False
        self._take(self._at + 1)
        self._argument(closer)
        return True

    def _read_key(self) -> Step[bool]:
        if (yield from self._expect(_QUOTE)):
            quoted: list[str] = []
            yield from self._until((_QUOTE,), quoted.append)
            key = "".join(quoted)
            ended = (yield from self._past()) == ":"
            if ended:
                self._take(self._at + 1)
        else:
            key = yield from self._word(":")
            ended = key != ""
        if ended:
            self._argument(json.dumps(key, ensure_ascii=False) + ":")
        return ended

    def _read_value(self, depth: int) -> Step[bool]:
        char = yield from self._past()
        if char in ("{", "["):
            self._take(self._at + 1)
            return (yield from self._read_inside("}" if char == "{" else "]", depth + 1))
        if (yield from self._expect(_QUOTE)):
            self._argument('"')
            if not (yield from self._until((_QUOTE,), self._string)):
                return False
            self._argument('"')
            return True
        bare = ""
        while (char := (yield from self._peek())) and char not in ",}]<":
            bare += self._take(self._at + 1)
        if not char or not bare.strip():  # a number at the end of the text may be half of one
            return False
        self._argument(_literal(bare.strip()))
        return True

    def _string(self, text: str) -> None:
        self._argument(json.dumps(text, ensure_ascii=False)[1:-1])


def _literal(text: str) -> str:
    """A bare value as JSON: as it is if it is JSON, `None` as null, anything else as a string."""
    if text == "None":
        return "null"
    try:
        json.loads(text, parse_constant=refuse_constant)
    except ValueError:
        return json.dumps(text, ensure_ascii=False)
    return text
