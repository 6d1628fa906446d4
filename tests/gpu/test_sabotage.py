"""What breaks silently on a card is seen by the gates that pass without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peg.checkpoint.synth_config import SynthOptions
from peg.commands.parity import parity
from peg.commands.synth import synth
from peg.config import EngineConfig
from peg.models import gemma4
from peg.parity.session import Wanted
from peg.ranks.nccl_comm import NcclComm
from tests.gpu.cards import needs_card, on_card
from tests.parity.sabotage import shift_heads, skip_reduction, spoil, swap_blocks

pytestmark = [pytest.mark.gpu, needs_card]

FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None] | None] = {
    "none": None,
    "a skipped reduction": lambda patch: skip_reduction(patch, 3, kind=NcclComm),
    "a NaN in a reduction": lambda patch: spoil(patch, 2, kind=NcclComm),
    "a shifted shard": lambda patch: shift_heads(patch, gemma4),
    "swapped blocks": swap_blocks,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("synth") / "model"
    synth(SynthOptions(family="gemma4-31b", dtype="bfloat16"), folder)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", FAULTS)
async def test_faults_are_seen(fault: str, dtype: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over two ranks the parity command passes without a fault, and fails with any of them."""
    options: dict[str, Any] = on_card(2) | {"kv_cache_memory_bytes": 64 << 20, "max_model_len": 1024}
    strike = FAULTS[fault]
    if strike is not None:
        strike(monkeypatch)
    config = EngineConfig(model="small", model_dir=model, dtype=dtype, **options)
    assert await parity(config, Wanted(prompts=4, new_tokens=12)) == (0 if strike is None else 1)
