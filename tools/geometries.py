"""The shapes of published models, as config.json has them, and model directories of such a shape without weights."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from peg.checkpoint.synth_config import SynthOptions
from peg.commands.synth import synth

GEMMA4: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "vocab_size": 262144,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072,
    "hidden_activation": "gelu_pytorch_tanh",
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "hidden_size_per_layer_input": 0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    },
    "bos_token_id": 2,
    "eos_token_id": 1,
}
GEMMA4_31B: dict[str, Any] = {
    **GEMMA4,
    "hidden_size": 5376,
    "num_hidden_layers": 60,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "num_global_key_value_heads": 4,
    "attention_k_eq_v": True,
    "sliding_window": 1024,
    "intermediate_size": 21504,
    "use_bidirectional_attention": "vision",
    "expert_intermediate_size": None,
    "num_experts": None,
}
GEMMA4_12B: dict[str, Any] = {
    **GEMMA4_31B,
    "hidden_size": 3840,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 1,
    "intermediate_size": 15360,
}
GEMMA4_E2B: dict[str, Any] = {
    **GEMMA4,
    "hidden_size": 1536,
    "num_hidden_layers": 35,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "num_global_key_value_heads": None,
    "attention_k_eq_v": False,
    "sliding_window": 512,
    "intermediate_size": 6144,
    "use_double_wide_mlp": True,
    "num_kv_shared_layers": 20,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
}
QWEN3_4B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
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
GEOMETRIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "gemma4-31b": ("gemma4-31b", GEMMA4_31B),
    "gemma4-12b": ("gemma4-12b", GEMMA4_12B),
    "gemma4-e2b": ("gemma4-e2b", GEMMA4_E2B),
    "qwen3-4b": ("qwen3", QWEN3_4B),
}
"""Each with the family whose small tokenizer stands in for its own."""


def write_geometry(name: str, target: Path, **changed: Any) -> None:
    """Make the model directory `target`: the config of `name` with fields `changed`, to be run with made-up weights.

    The tokenizer is a small one that knows as many tokens as the vocabulary has, so that any of them may be used.
    """
    family, config = GEOMETRIES[name]
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder) / "small"
        synth(SynthOptions(family=family, layers=None), small)
        shutil.copytree(small, target, ignore=shutil.ignore_patterns("*.safetensors"))
    (target / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16", **changed}), "utf-8")
    tokenizer = json.loads((target / "tokenizer.json").read_text("utf-8"))
    known = Tokenizer.from_file(str(target / "tokenizer.json")).get_vocab_size()
    tokenizer["model"]["vocab"] |= {f"word {token}": token for token in range(known, config["vocab_size"])}
    (target / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
