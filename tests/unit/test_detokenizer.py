"""Ids to text: however the ids are fed, the pieces joined are the whole text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peg.text.detokenizer import Detokenizer
from peg.text.tokenizer import Tokenizer
from tests.unit.small_tokenizers import byte_fallback, byte_level

LETTERS = Tokenizer(byte_level())
PIECES = Tokenizer(byte_fallback())
PREFIXED = Tokenizer(byte_fallback(prefix_space=True))
SHAPES = pytest.mark.parametrize("tokenizer", [LETTERS, PIECES, PREFIXED], ids=["letters", "pieces", "prefixed"])
IDS = st.lists(st.integers(0, max(LETTERS.vocab_size, PIECES.vocab_size) + 2), max_size=30)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)


def pieces_of(tokenizer: Tokenizer, ids: Sequence[int], skipped: frozenset[int] = frozenset()) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skipped=skipped)
    return [*(detokenizer.feed(token_id) for token_id in ids), detokenizer.finish()]


@given(IDS, st.booleans())
def test_joined_pieces_are_the_reference_decoding(ids: list[int], skip: bool) -> None:
    """For byte-level ids of any kind, joined pieces and whole decoding are what tokenizers itself decodes."""
    skipped = LETTERS.special_ids if skip else frozenset()
    reference = byte_level().decode(ids, skip_special_tokens=skip)
    assert "".join(pieces_of(LETTERS, ids, skipped)) == reference
    assert LETTERS.decode(ids, skipped=skipped) == reference


@given(IDS, st.booleans())
def test_joined_pieces_with_byte_fallback(ids: list[int], skip: bool) -> None:
    """Joined pieces are the whole decoding, and that of tokenizers wherever the bytes are valid UTF-8."""
    skipped = PIECES.special_ids if skip else frozenset()
    whole = PIECES.decode(ids, skipped=skipped)
    assert "".join(pieces_of(PIECES, ids, skipped)) == whole
    if "�" not in whole:
        assert whole == byte_fallback().decode(ids, skip_special_tokens=skip)


@SHAPES
@given(text=TEXTS)
def test_pieces_are_whole_characters(tokenizer: Tokenizer, text: str) -> None:
    """On the way through any text no piece ends inside a character, so none is ever taken back."""
    text = text.replace("▁", " ")
    pieces = pieces_of(tokenizer, tokenizer.encode(text))
    shown = "".join(pieces)
    assert shown.removeprefix(" " if tokenizer is PREFIXED and text else "") == text
    assert "�" in text or not any("�" in piece for piece in pieces)


@SHAPES
@given(prompt=TEXTS, text=TEXTS)
def test_text_continues_its_prompt(tokenizer: Tokenizer, prompt: str, text: str) -> None:
    """Prompt and output decoded apart, then joined, are the whole decoded at once: no space is lost or invented."""
    ids = tokenizer.encode("the" + prompt + " " + text)
    for cut in range(1, len(ids)):
        head = tokenizer.decode(ids[:cut])
        if not head.endswith("�") and head.strip():
            assert head + "".join(pieces_of(tokenizer, ids[cut:])) == tokenizer.decode(ids)


def test_the_first_token_keeps_its_space() -> None:
    """A word that continues a prompt begins with its space in every shape; the start of a whole text does not."""
    for tokenizer in (LETTERS, PIECES, PREFIXED):
        ids = tokenizer.encode("the cat")[-1:]
        assert pieces_of(tokenizer, ids) == [" cat", ""]
        assert tokenizer.decode(tokenizer.encode("the cat")) == "the cat"
    assert PREFIXED.decode(PREFIXED.encode("  cat")) == "  cat"
    assert PREFIXED.decode(PREFIXED.encode("<h1>")[-1:]) == "<h1>"


def test_prompt_tail_does_not_leak() -> None:
    """Half a character at the end of the prompt is not completed by the output: each side shows U+FFFD."""
    ids = list("你".encode())
    assert LETTERS.decode(ids[:2]) == "�"
    assert "".join(pieces_of(LETTERS, ids[2:])) == "�"


def test_characters_wait_until_they_are_whole() -> None:
    """Bytes of one character give nothing until the last; bad bytes do not hold up what follows."""
    assert pieces_of(LETTERS, list("😀".encode())) == ["", "", "", "😀", ""]
    assert pieces_of(LETTERS, [0xF0, 0x9F, ord("a")]) == ["", "", "�a", ""]
    assert pieces_of(LETTERS, [0x80, ord("a")]) == ["�", "a", ""]


def test_an_unfinished_character_is_flushed_at_the_end() -> None:
    """What remains of a last character is one U+FFFD, and comes with finish."""
    assert pieces_of(LETTERS, [ord("a"), 0xF0, 0x9F, 0x98]) == ["a", "", "", "", "�"]


def test_skipped_ids_give_no_text() -> None:
    """Special tokens are text unless they are skipped, each by its id."""
    ids = LETTERS.encode("<|im_start|>cat<|im_end|>")
    assert "".join(pieces_of(LETTERS, ids)) == "<|im_start|>cat<|im_end|>"
    assert "".join(pieces_of(LETTERS, ids, LETTERS.special_ids)) == "cat"
    assert "".join(pieces_of(LETTERS, ids, LETTERS.skipped_ids(["<|im_end|>"]))) == "cat<|im_end|>"
