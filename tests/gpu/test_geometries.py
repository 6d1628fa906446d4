"""Layers as wide as the real ones, with random weights: ranks on one card say together what one rank says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from peg.commands.parity import parity
from peg.config import EngineConfig
from peg.parity.session import Wanted
from tests.gpu.cards import needs_card, on_card
from tools.geometries import GEMMA4_E2B, write_geometry

pytestmark = [pytest.mark.gpu, needs_card, pytest.mark.timeout(300)]

LAYERS: Mapping[str, Mapping[str, Any]] = {
    "gemma4-31b": {"num_hidden_layers": 6},
    "gemma4-12b": {"num_hidden_layers": 6},
    "gemma4-e2b": {
        "num_hidden_layers": 10,
        "layer_types": GEMMA4_E2B["layer_types"][:10],
        "num_kv_shared_layers": 5,
    },
    "qwen3-4b": {"num_hidden_layers": 6},
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", LAYERS)
async def test_parity_holds_at_real_widths(name: str, world_size: int, dtype: str, tmp_path: Path) -> None:
    """Every gate of the parity command passes; ids and digests of all ranks are compared in every step."""
    write_geometry(name, tmp_path / "model", **LAYERS[name])
    config = EngineConfig(
        model=name,
        model_dir=tmp_path / "model",
        load_format="dummy",
        dtype=dtype,
        max_model_len=4096,
        max_num_batched_tokens=512,
        kv_cache_memory_bytes=2 << 30,
        **on_card(world_size),
    )
    assert await parity(config, Wanted(prompts=4, new_tokens=12)) == 0
