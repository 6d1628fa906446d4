"""What passes: equality, nearness within the lines, drift no worse than the control's. Finite first, always."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from peg.parity.comparison import Comparison, compare_continuations, compare_prompts
from peg.parity.lines import Lines
from peg.parity.reading import Reading


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one gate found. It passed where there are no faults; nothing was measured where numbers were not finite."""

    gate: str
    faults: tuple[str, ...]
    comparison: Comparison | None = None

    @property
    def passed(self) -> bool:
        return not self.faults


def equal(gate: str, one: Sequence[Reading], other: Sequence[Reading]) -> Verdict:
    """The same ids and the same numbers, to the last bit."""
    if faults := _not_finite(one, other):
        return Verdict(gate, faults)
    differing = [a.name for a, b in zip(one, other, strict=True) if a != b]
    faults = (f"not the same bits: {', '.join(differing)}",) if differing else ()
    return Verdict(gate, faults, compare_prompts(one, other))


def near(gate: str, one: Sequence[Reading], other: Sequence[Reading], lines: Lines) -> Verdict:
    """Over the prompts, within the lines."""
    if faults := _not_finite(one, other):
        return Verdict(gate, faults)
    found = compare_prompts(one, other)
    return Verdict(gate, tuple(_over(found, lines)), found)


def near_continued(gate: str, one: Sequence[Reading], other: Sequence[Reading], lines: Lines) -> Verdict:
    """Over what was generated, within the lines; where picks part, they part at a tie."""
    if faults := _not_finite(one, other):
        return Verdict(gate, faults)
    found = compare_continuations(one, other)
    return Verdict(gate, (*_over(found, lines), *_not_ties(found, lines.regret)), found)


def drift(gate: str, arm: tuple[Reading, Reading], control: tuple[Reading, Reading], lines: Lines) -> Verdict:
    """Two readings of one text, apart at most so many times as far as those of the control."""
    if faults := _not_finite(arm, control):
        return Verdict(gate, faults)
    found, allowed = compare_prompts(arm[:1], arm[1:]), compare_prompts(control[:1], control[1:])
    return Verdict(gate, tuple(_drifted(found, allowed, lines)), found)


def _not_finite(one: Sequence[Reading], other: Sequence[Reading]) -> tuple[str, ...]:
    """Before anything is compared: a maximum would pass over a NaN."""
    sides = (("first", one), ("second", other))
    return tuple(
        f"{side} run, {reading.name}: {fault}"
        for side, readings in sides
        for reading in readings
        if (fault := reading.not_finite()) is not None
    )


def _over(found: Comparison, lines: Lines) -> Iterator[str]:
    for name in ("mean", "p99", "regret"):
        value, line = getattr(found, name), getattr(lines, name)
        if not value <= line:
            yield f"{name} {value:.3g} is over {line:g}"


def _not_ties(found: Comparison, line: float) -> Iterator[str]:
    for flip in found.flips:
        if not flip.is_tie(line):
            yield (
                f"{flip.reading}, generated token {flip.step}: {flip.token_ids[0]} and {flip.token_ids[1]} are "
                f"no tie: margins {flip.margins[0]:.3g} and {flip.margins[1]:.3g}, line {line:g}"
                + ("" if flip.mutual else ", not both among each other's top 8")
            )


def _drifted(found: Comparison, allowed: Comparison, lines: Lines) -> Iterator[str]:
    for name in ("mean", "p99"):
        value, base = getattr(found, name), getattr(allowed, name)
        line = max(getattr(lines, f"drift_{name}"), lines.drift_ratio * base)
        if not value <= line:
            yield f"{name} {value:.3g} is over {line:.3g}: the control has {base:.3g}"
