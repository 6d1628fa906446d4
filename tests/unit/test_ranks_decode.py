"""Decode steps that are padded to a few sizes and read everything at fixed places: the same tokens, the same books."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from peg.plan import SamplingParams
from peg.ranks import decode
from peg.ranks.decode import Decoder, DecodeSizes
from peg.ranks.device import CpuDevice
from tests.unit.tiny_group import tiny_group

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [3], [9, 9, 9, 4, 4], [17, 30, 21], [40]]
PARAMS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1, seed=3),
    SamplingParams(temperature=0.7, seed=1, top_k=5, top_p=0.9),
    SamplingParams(temperature=1, seed=9, presence_penalty=1.0, logprobs=2),
    SamplingParams(temperature=1, seed=11),
]


class WorksAlone(CpuDevice):
    """The CPU as if it worked by itself."""

    launches = True


def generated(folder: Path, world_size: int, monkeypatch: pytest.MonkeyPatch | None, **options: Any) -> list[list[int]]:
    """Tokens of all prompts, with more of them than rows, so that rows are taken anew."""
    if monkeypatch is not None:
        devices = tuple(WorksAlone(world_size) for _ in range(world_size))
        monkeypatch.setattr("peg.ranks.group.open_devices", lambda _: devices)
    with tiny_group(folder, world_size, max_num_seqs=3, enforce_eager=True, **options) as tiny:
        one, _ = tiny.generate(PROMPTS, 13, PARAMS)
        two, _ = tiny.generate(PROMPTS[:3], 13, PARAMS[:2] + PARAMS[:1])
        assert tiny.failures == []
    return one + two


@pytest.mark.parametrize("world_size", [1, 3])
def test_padded_steps_sample_the_same_tokens(world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and sampled, filtered, ruled, scored rows, with two steps in flight and rows that change hands."""
    expected = generated(tmp_path, world_size, None)
    steps: list[bool] = []
    step = Decoder.step

    def counted(*arguments: Any, samples: bool) -> None:
        steps.append(samples)
        step(*arguments, samples=samples)

    monkeypatch.setattr(Decoder, "step", counted)
    assert generated(tmp_path, world_size, monkeypatch) == expected
    assert True in steps
    assert False in steps


def test_a_forgotten_table_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the blocks that a prefill filled a decode reads nobody's: the tokens differ."""
    expected = generated(tmp_path, 1, None)
    monkeypatch.setattr(Decoder, "_send_tables", lambda *_: None)
    assert generated(tmp_path, 1, monkeypatch) != expected


def test_sizes_that_steps_are_padded_to() -> None:
    """Small ones, larger ones further apart, and the most rows there can be."""
    assert DecodeSizes(1, 1, 4, 4, 50).batches == (1,)
    assert DecodeSizes(3, 1, 4, 4, 50).batches == (1, 2, 3)
    assert DecodeSizes(256, 1, 4, 4, 50).batches == decode._SIZES
    assert DecodeSizes(400, 1, 4, 4, 50).batches == (*decode._SIZES, 320, 384, 400)
