"""A minute of random load with a fault every moment. `tools/soak.py` does the same for as long as it is told to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import tests.faults.soak
from tests.faults.faulty_engine import threads, write_model
from tests.faults.soak import LIMITS, SETTLED, Soaked, soak


def check(soaked: Soaked) -> None:
    """Everyone was answered once, in time, and nothing grew since the first rebuilds."""
    assert soaked.sent == sum(soaked.ends.values())
    assert (soaked.twice, soaked.hung) == (0, 0)
    assert len(soaked.footprints) > SETTLED
    first, last = soaked.footprints[SETTLED], soaked.footprints[-1]
    assert last.threads <= first.threads
    assert last.files <= first.files
    assert last.resident_bytes - first.resident_bytes < 16 << 20


async def test_a_soak_that_fails_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is not rebuilt is told, and no thread of it keeps the process from ending."""
    monkeypatch.setattr(tests.faults.soak, "LIMITS", replace(LIMITS, rebuild_limit=0))
    monkeypatch.setattr(tests.faults.soak, "HANG_S", 0.5)
    with pytest.raises(ExceptionGroup, check=lambda group: group.subgroup(TimeoutError) is not None):
        await soak(write_model(tmp_path), 1, 10.0)
    assert threads() == []


@pytest.mark.slow
async def test_a_minute_of_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Slow: a minute is what it takes to see growth. Requests sent = terminals, none twice, none hangs, flat memory."""
    soaked = await soak(write_model(tmp_path), 1, 60.0)
    with capsys.disabled():
        print(f"\nsoak: {soaked}")
    check(soaked)
