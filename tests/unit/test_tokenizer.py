"""Text to ids: BOS once, special tokens, limits, and the loop that goes on meanwhile."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from peg.errors import CheckpointError, InvalidRequest
from peg.text.token_bytes import TokenBytes, byte_letters
from peg.text.tokenizer import Tokenizer
from tests.unit.small_tokenizers import byte_fallback, byte_level

SMOLLM = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>", "special": True}}
GEMMA = {"bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": True, "add_eos_token": False}
LETTERS = Tokenizer(byte_level(), SMOLLM)
PIECES = Tokenizer(byte_fallback(), GEMMA)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=40)


def saved(folder: Path, core: tokenizers.Tokenizer, config: object) -> Path:
    core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@given(TEXTS)
def test_text_comes_back(text: str) -> None:
    """What is encoded decodes to the same text, control characters, emoji and CJK included."""
    assert LETTERS.decode(LETTERS.encode(text)) == text
    assert PIECES.decode(PIECES.encode(text)) == text.replace("▁", " ")


@given(TEXTS)
def test_ids_are_those_of_encode(text: str) -> None:
    """The call that releases the interpreter lock gives the ids of the one that does not."""
    for mine, core in ((LETTERS, byte_level()), (PIECES, byte_fallback())):
        assert mine.encode(text) == core.encode(text, add_special_tokens=False).ids


def test_bos_exactly_once() -> None:
    """BOS is added where the tokenizer says so and asked to, and never before one that the text brings."""
    text = PIECES.encode("cat")
    assert PIECES.bos_token_id is not None
    once = [PIECES.bos_token_id, *text]
    assert PIECES.encode("cat", add_special_tokens=True) == once
    assert PIECES.encode("<bos>cat") == once
    assert PIECES.encode("<bos>cat", add_special_tokens=True) == once
    assert PIECES.encode("<bos><bos>cat") == [PIECES.bos_token_id, *once]


def test_a_tokenizer_without_bos_takes_none_away() -> None:
    """Where none is added, a text that begins with two BOS keeps both."""
    start = LETTERS.bos_token_id
    for add in (False, True):
        assert LETTERS.encode("<|im_start|><|im_start|>", add_special_tokens=add) == [start, start]


@pytest.mark.parametrize(("add_bos", "add_eos"), [(False, False), (True, False), (False, True), (True, True)])
def test_config_decides_what_is_added(*, add_bos: bool, add_eos: bool) -> None:
    """add_bos_token and add_eos_token overrule the post-processor of tokenizer.json."""
    config = GEMMA | {"add_bos_token": add_bos, "add_eos_token": add_eos}
    expected = [2] * add_bos + PIECES.encode("cat") + [1] * add_eos
    assert Tokenizer(byte_fallback(), config).encode("cat", add_special_tokens=True) == expected


def test_without_flags_the_post_processor_decides() -> None:
    """A config that is silent about BOS leaves tokenizer.json's own post-processor in place."""
    assert Tokenizer(byte_fallback(), {"bos_token": "<bos>"}).encode("cat", add_special_tokens=True)[0] == 2


def test_special_tokens_in_text_become_ids() -> None:
    """A rendered chat is tokenised with its turn marks as single ids."""
    ids = LETTERS.encode("<|im_start|>the cat<|im_end|>")
    assert (ids[0], ids[-1]) == (LETTERS.bos_token_id, LETTERS.eos_token_id)
    assert {ids[0], ids[-1]} == LETTERS.special_ids
    assert LETTERS.skipped_ids(keep=("<|im_end|>",)) == {ids[0]}


def test_digits_are_split_one_by_one() -> None:
    """The pre-tokenizer of the file is honoured: two digits stay two tokens though a merge exists."""
    assert [LETTERS.token_bytes(i) for i in LETTERS.encode("  12")] == [b"  ", b"1", b"2"]


def test_padding_and_truncation_are_off() -> None:
    """A tokenizer.json saved with truncation or padding does not shorten or fill a prompt."""
    core = byte_level()
    core.enable_truncation(2)
    core.enable_padding(length=9)
    for text in ("a", "END of it all"):
        assert Tokenizer(core).encode(text) == LETTERS.encode(text)


def test_lone_surrogates_are_refused() -> None:
    """A lone surrogate is the request's fault, and the message says where it stands."""
    with pytest.raises(InvalidRequest, match=r"U\+D800 at character 2"):
        LETTERS.encode("ab\ud800")
    with pytest.raises(InvalidRequest, match=r"U\+DFFF"):
        asyncio.run(LETTERS.encode_async("\udfff", context_tokens=9))


def test_text_that_cannot_fit_is_refused_before_tokenising() -> None:
    """A text of more bytes than the context can hold is refused, naming both; one byte less is tokenised."""
    limit = 3 * LETTERS.longest_token_bytes
    with pytest.raises(InvalidRequest, match=rf"{limit + 1} bytes.* {limit} ") as caught:
        asyncio.run(LETTERS.encode_async("x" * (limit + 1), context_tokens=3, param="prompt"))
    assert caught.value.param == "prompt"
    assert len(asyncio.run(LETTERS.encode_async("x" * limit, context_tokens=3))) == limit


def test_longest_token_counts_bytes() -> None:
    """The limit's factor is the longest token in bytes, not in characters, added tokens included."""
    assert LETTERS.longest_token_bytes == len("<|im_start|>")
    assert Tokenizer(byte_fallback()).longest_token_bytes == len("<0xNN>") - 1  # "<pad>", not the byte tokens


def test_long_text_leaves_the_loop_running() -> None:
    """The loop turns while a long text is tokenised: the longest pause is a fraction of the whole time."""

    async def longest_pause() -> tuple[float, float]:
        started = last = time.perf_counter()
        pauses = [0.0]
        work = asyncio.create_task(LETTERS.encode_async("the cat " * 200_000, context_tokens=10**6))
        while not work.done():
            await asyncio.sleep(0.001)
            pauses.append(time.perf_counter() - last)
            last = time.perf_counter()
        assert len(work.result()) > 400_000
        return max(pauses), last - started

    pause_s, whole_s = asyncio.run(longest_pause())
    assert pause_s < whole_s / 3


def test_token_bytes_are_true_bytes() -> None:
    """Half characters, byte tokens and spaces come out as the bytes they stand for."""
    byte_token = PIECES.token_id("<0xE4>")
    assert byte_token is not None
    assert PIECES.token_bytes(byte_token) == b"\xe4"
    assert [PIECES.token_bytes(i) for i in PIECES.encode(" the")] == [b" the"]
    assert b"".join(LETTERS.token_bytes(i) for i in range(256)) == bytes(range(256))
    assert TokenBytes.from_decoder({"type": "Fuse"}).of("<0xE4>", is_added=False) == b"<0xE4>"


def test_added_tokens_are_never_spelled_in_letters() -> None:
    """An added token whose characters are letters for other bytes still decodes to itself."""
    core = byte_level()
    core.add_tokens(["<é>"])
    tokenizer = Tokenizer(core)
    for text in ("<é>", "｜é｜"):
        assert len(tokenizer.encode(text)) == 1
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_named_tokens_are_special() -> None:
    """A token that the config names as EOS is skipped like the rest, however tokenizer.json flags it."""
    tokenizer = Tokenizer(byte_level(), {"eos_token": "<think>"})
    assert tokenizer.special_ids == LETTERS.special_ids | {tokenizer.eos_token_id}


def test_ids_without_a_token() -> None:
    """An id outside the vocabulary has no token, no bytes and no text."""
    for token_id in (-1, LETTERS.vocab_size, 10**9):
        assert not LETTERS.has(token_id)
        assert LETTERS.token_bytes(token_id) == b""
        assert LETTERS.token(token_id) is None
    assert LETTERS.has(0)
    assert LETTERS.has(LETTERS.vocab_size - 1)
    assert LETTERS.token(32) == "Ġ"


def test_byte_letters_are_the_ecosystems() -> None:
    """The letters for bytes are the 256 that tokenizers uses."""
    assert set(byte_letters()) == set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_letters().values()) == list(range(256))


@pytest.mark.parametrize(
    "decoder", [None, {"type": "WordPiece"}, {"type": "Sequence", "decoders": [{"type": "Metaspace"}]}]
)
def test_unknown_decoders_are_refused(decoder: dict[str, object] | None) -> None:
    """A decoder that nobody has compared is refused by name, not guessed."""
    with pytest.raises(CheckpointError, match="decoder"):
        TokenBytes.from_decoder(decoder)


def test_load_reads_both_files(tmp_path: Path) -> None:
    """A saved tokenizer comes back with its named tokens."""
    loaded = Tokenizer.load(saved(tmp_path, byte_fallback(), GEMMA))
    assert (loaded.bos_token_id, loaded.eos_token_id) == (2, 1)
    assert loaded.special_tokens == {"bos_token": "<bos>", "eos_token": "<eos>"}
    assert loaded.encode("the cat", add_special_tokens=True) == [2, *PIECES.encode("the cat")]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"bos_token": "<s>"}, "bos_token '<s>' is no token"),
        ({"bos_token": 7}, "bos_token must be text"),
        ({"add_bos_token": True}, "there is no bos_token"),
        ({"added_tokens_decoder": {"2": {"content": "<start>"}}}, "'<start>' with id 2 is '<bos>' there"),
        ([], "must be a JSON object"),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, config: object, message: str) -> None:
    """tokenizer_config.json that does not fit tokenizer.json is a fault of the checkpoint, named."""
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.load(saved(tmp_path, byte_fallback(), config))


@pytest.mark.parametrize("content", [None, "{", '{"model": 1}'])
def test_a_missing_or_broken_file_is_refused(tmp_path: Path, content: str | None) -> None:
    """No tokenizer.json, half of one and a wrong one are faults of the checkpoint that name the file."""
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
