"""Stop strings against brute force over the whole text, and the engine against the server."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from peg.text.stops import OutputRules, StopCutter, StopSet
from peg.text.tokenizer import Tokenizer
from tests.unit.small_tokenizers import byte_fallback, byte_level

LETTERS = Tokenizer(byte_level())
PIECES = Tokenizer(byte_fallback())
ALPHABET = st.text("ab你😀", max_size=6)
IDS = st.lists(st.sampled_from([*"ab你😀".encode(), *LETTERS.encode("你好 the<|im_end|>")]), max_size=25)
STOPS = st.lists(st.text("ab你😀", min_size=1, max_size=5), max_size=4)


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Where the first stop starts and which it is, by looking everywhere."""
    found = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    return (min(found)[0], min(found)[2]) if found else None


def safe_part(text: str, stops: list[str]) -> str:
    """The text without the longest end that some stop begins with, by trying all ends."""
    ends = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    return text[: len(text) - max(ends, default=0)]


@given(st.lists(ALPHABET, max_size=12), STOPS, st.booleans())
@example(["xab", "c"], ["abcd", "abd"], False)
@example(["abcd"], ["bc", "abcd"], True)
def test_cutting_is_brute_force_at_every_cut(pieces: list[str], stops: list[str], include: bool) -> None:
    """After every piece what was shown is what a search over the whole text so far allows, and never less."""
    cutter = StopCutter(StopSet(stops), include_stop=include)
    shown = text = ""
    for piece in pieces:
        shown += cutter.feed(piece)
        text += piece
        if found := first_stop(text, stops):
            start, stop = found
            assert cutter.matched == stop
            assert shown == text[:start] + (stop if include else "")
            assert cutter.feed("ab") + cutter.finish() == ""
            return
        assert cutter.matched is None
        assert shown == safe_part(text, stops)
    assert shown + cutter.finish() == text


@given(IDS, STOPS, st.booleans(), st.integers(0, 5))
def test_engine_and_server_agree(ids: list[int], stops: list[str], include: bool, min_tokens: int) -> None:
    """The matcher says stop at the very token at which the text is cut, and both are the search over whole texts."""
    rules = OutputRules(LETTERS, stops=stops, include_stop=include, min_tokens=min_tokens)
    matcher, text = rules.matcher(), rules.text()
    plain = OutputRules(LETTERS).text()
    shown = whole = unsearched = ""
    for count, token_id in enumerate(ids, 1):
        stopped = matcher.feed(token_id) if matcher else False
        shown += text.feed(token_id)
        whole += plain.feed(token_id)
        if count <= min_tokens:
            unsearched = whole
        found = first_stop(whole[len(unsearched) :], stops)
        assert stopped == (text.matched is not None) == (found is not None)
        if found:
            assert text.matched == found[1]
            assert shown == unsearched + whole[len(unsearched) :][: found[0]] + (found[1] if include else "")
            assert text.finish() == ""
            return
    assert shown + text.finish() == whole + plain.finish()


def output(tokenizer: Tokenizer, ids: list[int], rules: OutputRules) -> tuple[list[str], str | None]:
    text = rules.text()
    return [*(text.feed(token_id) for token_id in ids), text.finish()], text.matched


@pytest.mark.parametrize("tokenizer", [LETTERS, PIECES], ids=["letters", "pieces"])
def test_a_stop_across_tokens(tokenizer: Tokenizer) -> None:
    """A stop that begins inside one token and ends inside another is never shown in part."""
    ids = tokenizer.encode("the cat tool")
    assert len(ids) > 2
    pieces, matched = output(tokenizer, ids, OutputRules(tokenizer, stops=["e ca"]))
    assert ("".join(pieces), matched) == ("th", "e ca")


def test_a_stop_across_halves_of_a_character() -> None:
    """A stop of multi-byte characters given byte by byte matches at the last byte, and not before."""
    ids = list("a你😀b".encode())
    matcher = OutputRules(LETTERS, stops=["你😀"]).matcher()
    assert matcher is not None
    assert [matcher.feed(token_id) for token_id in ids[:-1]] == [False] * 7 + [True]
    pieces, matched = output(LETTERS, ids, OutputRules(LETTERS, stops=["你😀"]))
    assert ("".join(pieces), matched) == ("a", "你😀")


def test_two_stops_in_one_token() -> None:
    """Of two stops complete in one step the one that starts first counts; of two that start together the shorter."""
    ids = LETTERS.encode(" cat")
    assert len(ids) == 1
    assert output(LETTERS, ids, OutputRules(LETTERS, stops=["t", "a", "at"])) == ([" c", ""], "a")
    assert output(LETTERS, ids, OutputRules(LETTERS, stops=["at", "cat", "a"])) == ([" ", ""], "cat")
    assert output(LETTERS, ids, OutputRules(LETTERS, stops=["at", "a"], include_stop=True)) == ([" ca", ""], "a")


def test_bytes_after_a_stop_are_gone() -> None:
    """Half a character that came in the same token as the end of the stop is not flushed."""
    token_id = LETTERS.token_id("ä½łå")  # the letters of 你 and of the first byte of 好
    assert token_id is not None
    assert LETTERS.token_bytes(token_id) == "你".encode() + b"\xe5"
    assert output(LETTERS, [token_id], OutputRules(LETTERS, stops=["你"])) == (["", ""], "你")


def test_a_stop_that_never_completes_is_flushed() -> None:
    """What was held back for a stop comes out when the sequence ends otherwise, half a character included."""
    pieces, matched = output(LETTERS, [*LETTERS.encode("the END"), 0xE4], OutputRules(LETTERS, stops=["END!"]))
    assert (pieces[-1], "".join(pieces), matched) == ("END�", "the END�", None)


def test_only_what_may_become_a_stop_is_held() -> None:
    """Text that no stop begins with is shown at once, however long the stops are."""
    cutter = StopCutter(StopSet(["\n\nHuman:", "</answer>"]))
    assert [cutter.feed(piece) for piece in ("Hello ", "<b>", "\n", "\nHum", "ble")] == [
        "Hello ",
        "<b>",
        "",
        "",
        "\n\nHumble",
    ]


def test_the_flush_is_not_searched() -> None:
    """The engine has ended the sequence before the last half character becomes U+FFFD, so it can end nothing."""
    rules = OutputRules(LETTERS, stops=["�"])
    matcher = rules.matcher()
    assert matcher is not None
    assert not matcher.feed(0xE4)
    assert output(LETTERS, [0xE4], rules) == (["", "�"], None)
    assert output(LETTERS, [0xE4, ord("a")], rules) == (["", "", ""], "�")


def test_stops_see_what_the_client_sees() -> None:
    """A special token that is skipped cannot complete a stop; one that is shown can."""
    ids = LETTERS.encode("cat<|im_end|>")
    hidden = OutputRules(LETTERS, stops=["t<|"], skipped=LETTERS.special_ids)
    assert output(LETTERS, ids, hidden)[1] is None
    assert output(LETTERS, ids, OutputRules(LETTERS, stops=["t<|"]))[1] == "t<|"


def test_without_stops_there_is_no_matcher() -> None:
    """A request without stop strings costs the engine nothing."""
    assert OutputRules(LETTERS).matcher() is None


def test_long_stops_cost_their_length_once() -> None:
    """A stop of 20,000 equal characters against as many: linear, where comparing all ends would take minutes."""
    cutter = StopCutter(StopSet(["a" * 20_000 + "b"]))
    shown = "".join(cutter.feed("a") for _ in range(30_000))
    assert (len(shown), cutter.feed("b"), cutter.matched is not None) == (10_000, "", True)
