"""`peg check` as a user runs it: what is told, where, and with which exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from peg.checkpoint.synth_config import RECIPES, SynthOptions
from peg.commands.check import check
from peg.commands.synth import synth
from peg.config import EngineConfig
from peg.errors import ConfigError
from peg.ranks.blueprint import draw_blueprint
from tests.unit.test_commands import peg
from tests.unit.test_gemma4_config import B31

KV = {1: (901_120, 81_920), 2: (450_560, 40_960), 4: (225_280, 20_480), 8: (122_880, 20_480)}
TOP = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4",
    "dtype": "bfloat16",
    "eos_token_id": [1, 106],
    "vision_config": {"model_type": "gemma4_vision", "hidden_size": 1152},
}


@pytest.fixture(scope="module")
def gemma4_31b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that holds config.json and nothing else."""
    directory = tmp_path_factory.mktemp("gemma-4-31b")
    (directory / "config.json").write_text(json.dumps(TOP | {"text_config": B31}))
    return directory


def refuse(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")


def run(directory: Path, *, as_json: bool, world_size: int = 1) -> None:
    config = EngineConfig(model="31B", model_dir=directory, dtype="bfloat16", tensor_parallel_size=world_size)
    check(config, as_json=as_json)


@pytest.mark.parametrize("world_size", KV)
def test_gemma4_31b(gemma4_31b: Path, world_size: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Parameters, weights and KV cache of 31B to the byte at 1, 2, 4 and 8 ranks; no weights and no room are told."""
    run(gemma4_31b, as_json=True, world_size=world_size)
    out, err = capsys.readouterr()
    plan: dict[str, Any] = json.loads(out, parse_constant=refuse)
    assert (plan["parameters"], plan["weight_bytes"]) == (30_697_345_340, 61_394_690_680)
    assert (plan["world_size"], [rank["rank"] for rank in plan["ranks"]]) == (world_size, list(range(world_size)))
    for rank in plan["ranks"]:
        assert rank["weight_bytes"] == rank_bytes(world_size)
        assert (rank["kv_bytes_per_token"], rank["kv_bytes_per_token_beyond_window"]) == KV[world_size]
    assert "no weights are here" in err
    assert "--kv-cache-memory" in err


def rank_bytes(world_size: int) -> int:
    """By hand: what every rank holds, and each rank's part of all else."""
    M, layers, full, vocab, width = 5376, 60, 10, 262_144, 21_504
    norms = layers * 4 * M + M + (layers - full) * 2 * 256 + full * 2 * 512 + layers
    sliding = (layers - full) * M * 256 * (32 + 16 + 16 + 32) // world_size
    query_and_out = full * M * 512 * 2 * 32 // world_size
    key = full * M * 512 * max(4 // world_size, 1)  # V is K; from eight ranks on two hold the same head
    return 2 * (norms + sliding + query_and_out + key + (layers * 3 * M * width + vocab * M) // world_size)


@pytest.mark.parametrize(("world_size", "remainder"), [(3, 2), (64, 32)])
def test_world_sizes_that_do_not_divide(gemma4_31b: Path, world_size: int, remainder: int) -> None:
    """Three ranks and sixty-four are refused with the arithmetic and the sizes that are legal."""
    with pytest.raises(ConfigError, match="32 query heads and 16 KV heads it can be 1, 2, 4, 8, 16, 32") as refusal:
        run(gemma4_31b, as_json=True, world_size=world_size)
    assert f"32 query heads do not divide by {world_size} (remainder {remainder})" in str(refusal.value)


def test_people_read_the_arithmetic(gemma4_31b: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --json each number stands behind the factors that make it."""
    run(gemma4_31b, as_json=False)
    told = capsys.readouterr().out
    assert "30,697,345,340 parameters · 2 bytes (bfloat16) = 61,394,690,680 bytes" in told
    assert "SlidingWindow 1024: K and V · 50 layers · 16 heads · 256 · 2 bytes = 819,200 bytes a token" in told
    assert "Full: K and V · 10 layers · 4 heads · 512 · 2 bytes = 81,920 bytes a token" in told


def test_the_exit_code_is_0_where_the_plan_exceeds_the_machine(gemma4_31b: Path) -> None:
    """As a command: one JSON object on standard output, and on standard error what is missing."""
    done = peg("check", gemma4_31b, "--json", "--tensor-parallel-size", "2")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout, parse_constant=refuse)["ranks"][1]["kv_bytes_per_token"] in (450_560, 901_120)
    assert "no weights are here" in done.stderr


@pytest.mark.parametrize("family", RECIPES)
def test_one_rank_holds_the_weights(family: str, tmp_path: Path) -> None:
    """On one rank the counted bytes are those of the files; several together hold that and what they replicate."""
    synth(SynthOptions(family=family), tmp_path / "model")
    one, eight = (
        draw_blueprint(
            EngineConfig(model=family, model_dir=tmp_path / "model", dtype="bfloat16", tensor_parallel_size=n)
        )
        for n in (1, 8)
    )
    stored = sum(path.stat().st_size for path in (tmp_path / "model").glob("*.safetensors"))
    assert 0 <= stored - one.rank_weight_bytes(0) < 20_000  # the header
    assert one.rank_weight_bytes(0) == 2 * one.parameters
    each = [eight.rank_weight_bytes(rank) for rank in range(8)]
    assert one.rank_weight_bytes(0) < sum(each) < 4 * one.rank_weight_bytes(0)
