"""Golden files: written twice alike, read back, compared by `peg parity`, and refused for any other checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from peg.checkpoint.synth_config import SynthOptions
from peg.commands.synth import synth
from peg.config import EngineConfig
from peg.errors import CheckpointError, ConfigError
from peg.parity.golden import read_golden, write_golden
from peg.parity.session import Session, Wanted
from tools.golden import make_golden

ROOT = Path(__file__).resolve().parents[2]
SIZES = ("--dtype", "float32", "--prompts", "2", "--new-tokens", "3")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("synth") / "model"
    synth(SynthOptions(family="gemma4-e2b", window=16), directory)
    return directory


@pytest.fixture(scope="module")
def golden(checkpoint: Path) -> Path:
    make_golden(checkpoint, checkpoint.with_name("golden.json"), "float32", 2, 3)
    return checkpoint.with_name("golden.json")


def config(checkpoint: Path, dtype: str = "auto") -> EngineConfig:
    return EngineConfig(model="small", model_dir=checkpoint, dtype=dtype, kv_cache_memory_bytes=16 << 20)


def test_a_second_one_has_the_same_bytes(checkpoint: Path, golden: Path, tmp_path: Path) -> None:
    """The tool in a process of its own writes what this process wrote."""
    command = [sys.executable, *map(str, (ROOT / "tools/golden.py", checkpoint, tmp_path / "again.json", *SIZES))]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    assert (tmp_path / "again.json").read_bytes() == golden.read_bytes()


def test_what_was_read_is_what_was_written(golden: Path, tmp_path: Path) -> None:
    """64 likeliest tokens at each position, ids, digest and versions come back; writing them again gives the file."""
    found = read_golden(golden)
    assert [len(reading.greedy) for reading in found.readings] == [3, 3]
    assert all(len(entry.top) == 64 for reading in found.readings for entry in (*reading.scored, *reading.greedy))
    assert set(found.versions) == {"transformers", "torch", "python"}
    write_golden(tmp_path / "copy.json", found)
    assert (tmp_path / "copy.json").read_bytes() == golden.read_bytes()


async def test_peg_parity_takes_it(checkpoint: Path, golden: Path) -> None:
    """Its prompts and its dtype are used, and every gate passes."""
    session = Session(config(checkpoint), Wanted(reference=str(golden)))
    verdicts = [verdict async for verdict in session.verdicts()]
    assert not [fault for verdict in verdicts for fault in verdict.faults]
    assert [verdict.gate for verdict in verdicts][-2:] == [
        "one rank or the reference",
        "one rank or the reference, continued",
    ]
    assert session.info is not None
    assert session.info.dtype == "float32"


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_another_checkpoint_is_refused(checkpoint: Path, golden: Path, tmp_path: Path, file: str) -> None:
    """One byte of config.json or of the weights, and it is not the checkpoint that was read, whatever its name."""
    for path in checkpoint.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    changed = bytearray((tmp_path / file).read_bytes())
    if file == "config.json":
        changed += b"\n"
    else:
        changed[-1] ^= 1
    (tmp_path / file).write_bytes(changed)
    with pytest.raises(ConfigError, match=f"made from checkpoint {read_golden(golden).checkpoint}, this one is "):
        Session(config(tmp_path), Wanted(reference=str(golden)))


def test_another_dtype_is_refused(checkpoint: Path, golden: Path) -> None:
    """Numbers of fp32 say nothing about bf16."""
    with pytest.raises(ConfigError, match="made in float32, the ranks run in bfloat16: say --dtype float32"):
        Session(config(checkpoint, "bfloat16"), Wanted(reference=str(golden)))


@pytest.mark.parametrize(
    "change", [{"format": "peg-golden-0"}, {"readings": [{}]}, {"readings": 3}, {"versions": None}]
)
def test_what_is_no_golden_file_is_refused(golden: Path, tmp_path: Path, change: dict[str, object]) -> None:
    """Another format, or readings that are none, by the file's name."""
    value = json.loads(golden.read_text())
    (tmp_path / "other.json").write_text(json.dumps(value | change))
    with pytest.raises(CheckpointError, match=r"other\.json"):
        read_golden(tmp_path / "other.json")


async def test_a_wrong_number_fails(checkpoint: Path, golden: Path, tmp_path: Path) -> None:
    """One logprob of one position moved by 20 nats is seen."""
    found = read_golden(golden)
    first = found.readings[0]
    entry = replace(first.scored[5], top=((first.scored[5].top[0][0], 20.0), *first.scored[5].top[1:]))
    spoilt = replace(first, scored=(*first.scored[:5], entry, *first.scored[6:]))
    write_golden(tmp_path / "spoilt.json", replace(found, readings=(spoilt, *found.readings[1:])))
    session = Session(config(checkpoint), Wanted(reference=str(tmp_path / "spoilt.json")))
    failed = [verdict.gate async for verdict in session.verdicts() if not verdict.passed]
    assert failed == ["one rank or the reference"]
