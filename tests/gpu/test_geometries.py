"""Layers as wide as the real ones, with random weights: ranks on one card say together what one rank says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from peg.checkpoint.synth_config import SynthOptions
from peg.commands.parity import parity
from peg.commands.synth import synth
from peg.config import EngineConfig
from peg.parity.session import Wanted
from tests.gpu.cards import needs_card, on_card
from tests.unit.test_gemma4_config import B12, B31, E2B

pytestmark = [pytest.mark.gpu, needs_card, pytest.mark.timeout(300)]

QWEN3_4B: Mapping[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 6,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "attention_bias": False,
    "tie_word_embeddings": True,
}
GEMMA4 = {"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "bos_token_id": 2, "eos_token_id": 1}
GEOMETRIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "31B": ("gemma4-31b", B31 | GEMMA4 | {"num_hidden_layers": 6}),
    "12B": ("gemma4-12b", B12 | GEMMA4 | {"num_hidden_layers": 6}),
    "E2B": (
        "gemma4-e2b",
        E2B
        | GEMMA4
        | {
            "num_hidden_layers": 10,
            "layer_types": E2B["layer_types"][:10],
            "num_kv_shared_layers": 5,
            "vocab_size_per_layer_input": 262144,
        },
    ),
    "Qwen3 4B": ("qwen3", {**QWEN3_4B, "architectures": ["Qwen3ForCausalLM"]}),
}


def make_model(name: str, folder: Path) -> Path:
    """The real config with few layers, beside a small model's tokenizer that knows as many tokens; no weights."""
    family, config = GEOMETRIES[name]
    synth(SynthOptions(family=family, layers=None), folder / "small")
    model = folder / "model"
    model.mkdir()
    for file in (folder / "small").iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, model)
    tokenizer = json.loads((model / "tokenizer.json").read_text("utf-8"))
    known = Tokenizer.from_file(str(model / "tokenizer.json")).get_vocab_size()
    tokenizer["model"]["vocab"] |= {f"word {token}": token for token in range(known, config["vocab_size"])}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    (model / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}), "utf-8")
    return model


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", GEOMETRIES)
async def test_parity_holds_at_real_widths(name: str, world_size: int, dtype: str, tmp_path: Path) -> None:
    """Every gate of the parity command passes; ids and digests of all ranks are compared in every step."""
    config = EngineConfig(
        model=name,
        model_dir=make_model(name, tmp_path),
        load_format="dummy",
        dtype=dtype,
        max_model_len=4096,
        max_num_batched_tokens=512,
        kv_cache_memory_bytes=2 << 30,
        **on_card(world_size),
    )
    assert await parity(config, Wanted(prompts=4, new_tokens=12)) == 0
