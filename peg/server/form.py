"""How answers are written: the protocol of a form, and the envelope that all of them share."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from peg.plan import TokenLogprobs
from peg.server.generation import Choice, Finish
from peg.token_stream import Output

encode = msgspec.json.encode
_NOTHING: Mapping[str, object] = {}


class Usage(msgspec.Struct, frozen=True):
    """Tokens of an answer, summed over its choices. Each prompt counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


@dataclass(slots=True)
class Collected:
    """One choice of an answer that is not streamed."""

    choice: Choice
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    scores: list[TokenLogprobs | None] = field(default_factory=list)
    finish: Finish | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def ending(self) -> Finish:
        assert self.finish is not None, "a choice was followed to its end and did not finish"
        return self.finish


class Form(Protocol):
    """How one kind of answer is written. All but `whole` are whole events, or nothing."""

    envelope: Envelope

    def opening(self, choice: Choice) -> bytes:
        """What comes before a choice's first piece."""

    def piece(self, choice: Choice, text: str, output: Output, usage: Usage | None) -> bytes:
        """More text of a choice, and the tokens that came."""

    def closing(self, choice: Choice, text: str, finish: Finish, usage: Usage | None) -> bytes:
        """A choice's last event."""

    def whole(self, choices: Sequence[Collected], usage: Usage) -> bytes:
        """The document of an answer that is not streamed."""


class Envelope:
    """What is the same in every event of an answer: encoded once, so that an event costs its own text."""

    def __init__(self, answer_id: str, kind: str, model: str) -> None:
        self.id = answer_id
        self._created = int(time.time())
        self._model = model
        head = encode({"id": answer_id, "object": kind, "created": self._created, "model": model})
        self._start = b"data: " + head[:-1] + b',"choices":[{'
        self._usage_start = b"data: " + head[:-1] + b',"choices":[],"usage":'

    def event(self, choice: bytes, usage: Usage | None, beside: bytes = b"") -> bytes:
        """An event with one choice, given as the inside of its JSON object; `beside` stands after the choices."""
        if usage is None:
            return self._start + choice + b"}]" + beside + b"}\n\n"
        return self._start + choice + b"}]" + beside + b',"usage":' + encode(usage) + b"}\n\n"

    def usage_event(self, usage: Usage) -> bytes:
        """The event without a choice that tells the usage."""
        return self._usage_start + encode(usage) + b"}\n\n"

    def document(
        self, kind: str, choices: Sequence[object], usage: Usage, beside: Mapping[str, object] = _NOTHING
    ) -> bytes:
        """The whole answer, for one that is not streamed; `beside` is what it has beyond the usual."""
        return encode(
            {
                "id": self.id,
                "object": kind,
                "created": self._created,
                "model": self._model,
                "choices": choices,
                "usage": usage,
                "system_fingerprint": None,
                **beside,
            }
        )


class Frames(dict[int, tuple[bytes, bytes]]):
    """What stands around the text of a choice's events, by the choice's index: made once, then an event costs its text.

    `before` and `after` are of the inside of the choice's JSON object; `after` has a place for the index.
    """

    def __init__(self, envelope: Envelope, before: bytes, after: bytes) -> None:
        super().__init__()
        self._envelope = envelope
        self._mark = b"\x00"  # no JSON holds it
        self._choice = before + self._mark + after

    def __missing__(self, index: int) -> tuple[bytes, bytes]:
        before, _, after = self._envelope.event(self._choice % index, None).partition(self._mark)
        self[index] = before, after
        return before, after
