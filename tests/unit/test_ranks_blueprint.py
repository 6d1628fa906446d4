"""What is settled before a rank starts: dtype, limits, refusals, budgets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from peg.config import EngineConfig
from peg.errors import ConfigError
from peg.ranks import blueprint, machine
from peg.ranks.blueprint import Blueprint, draw_blueprint
from tests.unit.tiny_group import write_config


def draw(folder: Path, changes: dict[str, object] | None = None, **options: Any) -> Blueprint:
    write_config(folder, **(changes or {}))
    return draw_blueprint(EngineConfig(model="tiny", model_dir=folder, load_format="dummy", **options))


@pytest.mark.parametrize(
    ("declared", "asked", "instructions", "chosen"),
    [
        ("bfloat16", "auto", True, "bfloat16"),
        ("bfloat16", "auto", False, "float32"),
        ("bfloat16", "bfloat16", False, "bfloat16"),
        ("bfloat16", "float32", True, "float32"),
        ("float16", "auto", True, "float32"),
        ("float32", "auto", True, "float32"),
    ],
)
def test_dtype(
    declared: str, asked: str, instructions: bool, chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default the checkpoint's, fp32 on a CPU that has no instructions for it; what was asked for is done."""
    monkeypatch.setattr(blueprint, "has_bf16_instructions", lambda: instructions)
    assert draw(tmp_path, {"torch_dtype": declared}, dtype=asked).dtype == chosen


def test_defaults_on_a_cpu(tmp_path: Path) -> None:
    """16 sequences, 512 tokens a step, the model's own context."""
    drawn = draw(tmp_path)
    assert (drawn.max_num_seqs, drawn.max_num_batched_tokens, drawn.max_model_len) == (16, 512, 64)
    drawn = draw(tmp_path, max_num_seqs=2, max_num_batched_tokens=7, max_model_len=9)
    assert (drawn.max_num_seqs, drawn.max_num_batched_tokens, drawn.max_model_len) == (2, 7, 9)


def test_a_stated_budget_is_checked_before_weights_are_read(tmp_path: Path) -> None:
    """Drawing the blueprint already refuses --kv-cache-memory that holds no whole context."""
    with pytest.raises(ConfigError, match="--kv-cache-memory"):
        draw(tmp_path, kv_cache_memory_bytes=1000)


def test_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cores are those this process may use, shared out; the budget is a quarter of free memory, 4 GiB at most."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert [machine.cores_per_rank(ranks) for ranks in (1, 3, 8, 9)] == [8, 2, 1, 1]
    assert machine.free_memory_bytes() > 0
    for free, budget in ((1 << 30, 1 << 28), (1 << 40, 4 << 30)):
        monkeypatch.setattr(machine, "free_memory_bytes", lambda free=free: free)
        assert machine.kv_budget_bytes(1) == budget
        assert machine.kv_budget_bytes(4) == budget // 4
