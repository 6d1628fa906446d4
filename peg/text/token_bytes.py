"""What bytes a token stands for, by the decoder that tokenizer.json declares."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from peg.errors import CheckpointError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """One way to spell bytes in a vocabulary.

    `letters` maps characters to bytes where the vocabulary is byte-level, and is None otherwise: then tokens are
    text with `replacements` to be made, `<0xNN>` standing for one byte if `byte_fallback`. `stripped_spaces` is
    how many spaces at the very start of a text are the tokenizer's own.
    """

    letters: dict[str, int] | None = None
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    stripped_spaces: int = 0

    @classmethod
    def from_decoder(cls, decoder: dict[str, Any] | None) -> TokenBytes:
        """From the `decoder` of tokenizer.json: ByteLevel, or any of Replace, ByteFallback, Fuse and Strip.

        Raises CheckpointError for any other.
        """
        steps = _steps(decoder)
        kinds = [step.get("type") for step in steps]
        if kinds == ["ByteLevel"]:
            return cls(letters=byte_letters())
        replacements = []
        stripped_spaces = 0
        for step in steps:
            match step:
                case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
                    replacements.append((pattern, content))
                case {"type": "Strip", "content": " ", "start": int(start), "stop": 0}:
                    stripped_spaces += start
                case {"type": "ByteFallback" | "Fuse"}:
                    pass
                case _:
                    raise CheckpointError(f"tokenizer.json: decoder {step} is not supported")
        return cls(None, tuple(replacements), "ByteFallback" in kinds, stripped_spaces)

    def of(self, token: str | None, *, is_added: bool) -> bytes | None:
        """The bytes of one token of the vocabulary, None for None. Added tokens are never spelled in letters."""
        if token is None:
            return None
        if self.letters is not None:
            spelled = not is_added and all(char in self.letters for char in token)
            return bytes(self.letters[char] for char in token) if spelled else token.encode()
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for pattern, content in self.replacements:
            token = token.replace(pattern, content)
        return token.encode()


def byte_letters() -> dict[str, int]:
    """The letter that stands for each byte in a byte-level vocabulary.

    Printable Latin-1 bytes stand for themselves, the other 68 take the characters from U+0100 on, in order (GPT-2).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The decoder's steps, nested sequences flattened."""
    if decoder is None:
        raise CheckpointError("tokenizer.json: there is no decoder, so tokens cannot be turned into text")
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _steps(inner)]
