"""The gates on numbers alone: what passes, what fails, and that nothing is compared before it is known to be finite."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from peg.parity.comparison import compare_continuations, compare_prompts
from peg.parity.gates import Verdict, drift, equal, near, near_continued
from peg.parity.lines import Lines
from peg.parity.reading import Reading
from peg.plan import TokenLogprobs

LINES = Lines(mean=0.1, p99=0.5, regret=1.0, drift_mean=0.05, drift_p99=0.25)
LOOSE = Lines(mean=99, p99=99, regret=1.0, drift_mean=99, drift_p99=99)
REST: Mapping[int, float] = {token: -10.0 - token for token in range(20, 30)}


def entry(top: Mapping[int, float], token: int | None = None, rest: Mapping[int, float] = REST) -> TokenLogprobs:
    """A position with these logprobs, and some unlikely tokens behind; the token is the best one unless said."""
    ordered = sorted((*top.items(), *rest.items()), key=lambda pair: -pair[1])
    chosen = ordered[0][0] if token is None else token
    return TokenLogprobs(chosen, dict(ordered)[chosen], 1, tuple(ordered))


def scored(*entries: TokenLogprobs) -> list[Reading]:
    return [Reading("prompt 0", tuple(range(len(entries) + 1)), entries)]


def picked(*entries: TokenLogprobs) -> list[Reading]:
    return [Reading("prompt 0", (1, 2), (entry({0: -0.5, 1: -1.5}),), entries)]


def faults(verdict: Verdict) -> str:
    assert verdict.passed == (not verdict.faults)
    return "\n".join(verdict.faults)


SAME = entry({0: -0.5, 1: -1.0})


def test_a_run_is_near_itself() -> None:
    """Equal numbers are zero apart, agree everywhere and pass every gate."""
    one = picked(SAME, SAME)
    for found, positions in ((compare_prompts(one, one), 1), (compare_continuations(one, one), 2)):
        assert (found.mean, found.p99, found.regret, found.flips) == (0, 0, 0, ())
        assert (found.agreed, found.positions) == (positions, positions)
    assert equal("gate", one, one).passed
    assert near("gate", one, one, LINES).passed
    assert near_continued("gate", one, one, LINES).passed
    assert drift("gate", (one[0], one[0]), (one[0], one[0]), LINES).passed


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", ["chosen", "listed", "generated"])
@pytest.mark.parametrize("side", [0, 1])
def test_what_is_not_finite_fails_before_anything_is_compared(bad: float, place: str, side: int) -> None:
    """A NaN or infinity, on either side, in a chosen or a listed logprob, fails every gate, and is named."""
    spoilt = TokenLogprobs(0, bad, 1, SAME.top) if place != "listed" else TokenLogprobs(0, -0.5, 1, ((0, bad),))
    runs: list[list[Reading]] = [
        picked(SAME, SAME),
        picked(SAME, spoilt) if place == "generated" else scored(SAME, spoilt),
    ]
    runs[0] = runs[0] if place == "generated" else scored(SAME, SAME)
    if side == 0:
        runs.reverse()
    told = f"{('first', 'second')[side]} run, prompt 0: logprob {bad} at "
    told += "generated token 1" if place == "generated" else "prompt token 2"
    for verdict in (
        equal("gate", runs[0], runs[1]),
        near("gate", runs[0], runs[1], LOOSE),
        near_continued("gate", runs[0], runs[1], LOOSE),
        drift("gate", (runs[0][0], runs[0][0]), (runs[1][0], runs[1][0]), LOOSE),
    ):
        assert told in faults(verdict)
        assert verdict.comparison is None


def test_equality_is_of_bits() -> None:
    """One last bit, or another id with the same numbers, is not the same."""
    nearly = entry({0: math.nextafter(-0.5, 0), 1: -1.0})
    assert "not the same bits: prompt 0" in faults(equal("gate", scored(SAME), scored(nearly)))
    other_id = TokenLogprobs(1, SAME.logprob, 1, SAME.top)
    assert "not the same bits" in faults(equal("gate", scored(SAME), scored(other_id)))


def test_tokens_that_swap_are_measured() -> None:
    """Two tokens that change places at (−0.1, −5) and (−5, −0.1) are 4.9 nats apart by every measure."""
    one, other = picked(entry({0: -0.1, 1: -5.0})), picked(entry({0: -5.0, 1: -0.1}))
    found = compare_continuations(one, other)
    assert sorted(found.differences)[-2:] == pytest.approx([4.9, 4.9])
    assert found.regret == pytest.approx(4.9)
    assert (found.positions, len(found.flips)) == (1, 1)
    assert found.flips[0].margins == pytest.approx((4.9, 4.9))
    assert "no tie" in faults(near_continued("gate", one, other, LOOSE))


def test_lists_without_a_common_token_are_far_apart() -> None:
    """What the other run did not list counts as far as its last entry, so that nothing shared is not no difference."""
    one = scored(entry({0: -0.1, 1: -3.0}, rest={2: -6.0}))
    other = scored(entry({10: -0.1, 11: -3.0}, rest={12: -6.0}))
    found = compare_prompts(one, other)
    assert sorted(found.differences) == pytest.approx([0, 0, 3, 3, 5.9, 5.9])
    assert found.regret == pytest.approx(5.9)
    assert found.agreed == 0


def test_regret_is_the_worse_of_both_ways() -> None:
    """One run all but ties the two tokens, the other does not: whichever stands first, the larger regret counts."""
    one, other = scored(entry({0: -0.1, 1: -0.2})), scored(entry({0: -3.0, 1: -0.1}))
    assert compare_prompts(one, other).regret == compare_prompts(other, one).regret == pytest.approx(2.9)


def test_a_target_outside_both_lists_is_compared() -> None:
    """The token that was asked for counts even where neither run finds it likely."""
    listed = tuple({0: -0.5, 1: -1.0}.items())
    one, other = (TokenLogprobs(7, logprob, 9, listed) for logprob in (-12.0, -15.0))
    assert sorted(compare_prompts(scored(one), scored(other)).differences) == [0, 0, 3]


def test_p99_is_the_hundredth_part() -> None:
    """Of 200 differences the largest two lie above the 99th percentile, whatever they are."""
    one = scored(*(entry({0: -1.0}, rest={}) for _ in range(200)))
    other = scored(
        *(entry({0: -1.0 - step / 1000}, rest={}) for step in range(198)), *(entry({0: -50.0}, rest={}),) * 2
    )
    found = compare_prompts(one, other)
    assert found.p99 == pytest.approx(0.197)
    assert found.mean == pytest.approx((sum(range(198)) / 1000 + 98) / 200)


@pytest.mark.parametrize(
    ("measure", "other", "told"),
    [
        ("mean", {0: -0.5, 1: -1.0, 2: -4.0}, "mean"),
        ("p99", {0: -0.5, 1: -1.9}, "p99"),
        ("regret", {0: -1.6, 1: -0.3}, "regret"),
    ],
)
def test_each_line_is_drawn(measure: str, other: Mapping[int, float], told: str) -> None:
    """Each of mean, p99 and regret fails alone where it alone is over its line, and passes on the line."""
    value = getattr(compare_prompts(scored(SAME), scored(entry(other))), measure)
    wide = {"mean": 99.0, "p99": 99.0, "regret": 99.0, "drift_mean": 0.0, "drift_p99": 0.0}
    over = near("gate", scored(SAME), scored(entry(other)), Lines(**wide | {measure: math.nextafter(value, 0)}))
    assert faults(over).startswith(f"{told} {value:.3g} is over")
    assert len(over.faults) == 1
    assert near("gate", scored(SAME), scored(entry(other)), Lines(**wide | {measure: value})).passed


@pytest.mark.parametrize(
    ("margins", "allowed"),
    [((0.9, 0.9), True), ((1.05, 0.9), False), ((0.9, 1.05), False), ((0.0, 0.0), True), ((6.0, 6.0), False)],
)
def test_a_flip_is_allowed_only_at_a_tie_in_both_runs(margins: tuple[float, float], *, allowed: bool) -> None:
    """0.9 nats in both runs pass; 1.05 in either fails, though the other run sees a tie; six are rejected."""
    one = picked(entry({0: -0.5, 1: -0.5 - margins[0]}, token=0))
    other = picked(entry({0: -0.5 - margins[1], 1: -0.5}, token=1))
    assert compare_continuations(one, other).flips[0].margins == pytest.approx(margins)
    assert compare_continuations(one, other).flips[0].is_tie(LINES.regret) is allowed
    assert ("no tie" in faults(near_continued("gate", one, other, LOOSE))) is not allowed


def test_a_flip_needs_both_picks_among_both_top_eights() -> None:
    """A pick that the other run has in ninth place is no tie, however small the margin."""
    close = {token: -2.0 - token / 100 for token in range(8)}
    one = picked(entry({8: -1.9, **close}))
    for place, is_tie in ((-2.065, True), (-2.075, False)):  # behind 7 others of the eight, and behind all of them
        other = picked(entry({8: place, 0: -1.95, **{token: close[token] for token in range(1, 8)}}))
        flip = compare_continuations(one, other).flips[0]
        assert max(flip.margins) < 0.2
        assert flip.mutual is is_tie
        assert ("not both among each other's top 8" in faults(near_continued("gate", one, other, LOOSE))) is not is_tie


def test_a_flip_is_measured_and_then_the_request_is_left() -> None:
    """The step where picks part counts in every measure; what follows it, in other texts, counts in none."""
    one = picked(SAME, entry({0: -0.6, 1: -0.7}), entry({3: -0.1}), entry({4: -0.1}))
    other = picked(SAME, entry({0: -0.7, 1: -0.6}), entry({5: -0.1}), entry({6: -0.1}))
    found = compare_continuations(one, other)
    assert (found.positions, len(found.flips)) == (2, 1)
    assert (found.flips[0].step, found.flips[0].token_ids) == (1, (0, 1))
    assert found.regret == pytest.approx(0.1)
    two = [*one, *picked(SAME, SAME, SAME, SAME)]
    assert compare_continuations(two, [*other, *picked(SAME, SAME, SAME, SAME)]).positions == 6


def test_drift_is_held_against_the_controls() -> None:
    """Up to the floor anything goes; beyond it, twice what the control drifts, and no more."""

    def pair(by: float) -> tuple[Reading, Reading]:
        return scored(entry({0: -1.0}, rest={}))[0], scored(entry({0: -1.0 - by}, rest={}))[0]

    assert drift("gate", pair(0.049), pair(0.0), LINES).passed
    assert not drift("gate", pair(0.051), pair(0.0), LINES).passed
    assert drift("gate", pair(0.59), pair(0.3), LINES).passed
    told = faults(drift("gate", pair(0.61), pair(0.3), LINES))
    assert "mean 0.61 is over 0.6: the control has 0.3" in told
    assert "p99 0.61 is over 0.6" in told


def test_runs_of_different_prompts_are_not_compared() -> None:
    """That is a bug of the caller's, and says so."""
    other = [Reading("prompt 1", (5, 6), (SAME,))]
    with pytest.raises(AssertionError, match="prompt 0 and prompt 1 are different prompts"):
        compare_prompts(scored(SAME), other)
