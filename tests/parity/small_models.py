"""Small random checkpoints of every family and variant, as they exist in the wild."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3Config,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4TextConfig,
    Gemma4UnifiedConfig,
    Gemma4UnifiedTextConfig,
    LlamaConfig,
    Qwen3Config,
    SiglipVisionConfig,
)

from tests.parity.reference import save_random

WINDOW = 8
_COMMON: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_GEMMA4: dict[str, Any] = _COMMON | {
    "head_dim": 16,
    "global_head_dim": 32,
    "num_hidden_layers": 4,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "final_logit_softcapping": 5.0,
    "hidden_size_per_layer_input": 0,
}
_SMALL_GEMMA4: dict[str, Any] = _GEMMA4 | {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": 128,
}


def _llama(**changes: Any) -> Any:
    return LlamaConfig(**_COMMON | {"num_hidden_layers": 3, "rms_norm_eps": 1e-5, "num_key_value_heads": 2} | changes)


def _gemma3(**changes: Any) -> Any:
    sizes = _COMMON | _SLIDING | {"num_hidden_layers": 3, "num_key_value_heads": 1, "head_dim": 16}
    return Gemma3TextConfig(**sizes | {"query_pre_attn_scalar": 20} | changes)


def _gemma3_multimodal() -> Any:
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    text = _gemma3(num_key_value_heads=2, rope_parameters=rope)
    vision = SiglipVisionConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, image_size=28, patch_size=14
    )
    return Gemma3Config(
        text_config=text.to_dict(), vision_config=vision.to_dict(), boi_token_index=120, image_token_index=300
    )


def _gemma4_12b() -> Any:
    return _GEMMA4 | {"num_key_value_heads": 2, "num_global_key_value_heads": 1, "attention_k_eq_v": True}


CONFIGS: Mapping[str, Callable[[], Any]] = {
    "llama": lambda: _llama(tie_word_embeddings=True, num_key_value_heads=1),
    "llama, odd sizes, untied": lambda: _llama(
        num_key_value_heads=4, vocab_size=121, intermediate_size=50, head_dim=24
    ),
    "llama, linear rope": lambda: _llama(rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 5e4}),
    "llama, llama3 rope": lambda: _llama(
        rope_parameters={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
            "rope_theta": 1e4,
        }
    ),
    "qwen3": lambda: Qwen3Config(**_COMMON | {"num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 24}),
    "qwen3, tied": lambda: Qwen3Config(
        **_COMMON | {"num_hidden_layers": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    ),
    "gemma3": _gemma3,
    "gemma3, untied": lambda: _gemma3(tie_word_embeddings=False, num_key_value_heads=4, vocab_size=121),
    "gemma3, multimodal": _gemma3_multimodal,
    "gemma3, hub spelling": _gemma3_multimodal,
    "gemma4 12b": lambda: Gemma4UnifiedConfig(text_config=Gemma4UnifiedTextConfig(**_gemma4_12b()).to_dict()),
    "gemma4 12b, hub spelling": lambda: Gemma4Config(text_config=Gemma4TextConfig(**_gemma4_12b()).to_dict()),
    "gemma4 31b": lambda: Gemma4TextConfig(
        **_GEMMA4 | {"num_key_value_heads": 4, "num_global_key_value_heads": 2, "attention_k_eq_v": True}
    ),
    "gemma4 e2b": lambda: Gemma4TextConfig(**_SMALL_GEMMA4 | {"num_key_value_heads": 1, "use_double_wide_mlp": True}),
    "gemma4 e4b": lambda: Gemma4Config(
        text_config=Gemma4TextConfig(**_SMALL_GEMMA4 | {"num_key_value_heads": 2}).to_dict()
    ),
}


def make_checkpoint(variant: str, directory: Path) -> Path:
    """Save a random checkpoint, and change it where files in the wild are not as the reference saves them."""
    save_random(CONFIGS[variant](), directory)
    match variant:
        case "gemma3, multimodal":
            change_tensors(directory, lambda name: name.replace("language_model.model.", "model.language_model."))
        case "gemma3, hub spelling":
            edit_config(directory, _respell_gemma3)
        case "gemma4 12b, hub spelling":
            edit_config(directory, _respell_gemma4)
        case "gemma4 e2b":
            change_tensors(directory, str, _unused_kv())
    return directory


def edit_config(directory: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change config.json in place."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))


def change_tensors(
    directory: Path, rename: Callable[[str], str], added: Mapping[str, torch.Tensor] = MappingProxyType({})
) -> None:
    """Give every tensor another name, and add some."""
    path = directory / "model.safetensors"
    tensors = {rename(name): tensor for name, tensor in load_file(path).items()}
    save_file(tensors | dict(added), path, {"format": "pt"})


def _respell_gemma3(config: dict[str, Any]) -> None:
    """As the files of 2025 are: few fields, and rope in three of them."""
    text = config["text_config"]
    for name in ("rope_parameters", "layer_types", "_sliding_window_pattern", "rms_norm_eps", "hidden_activation"):
        del text[name]
    text |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    text["sliding_window_pattern"] = 2


def _respell_gemma4(config: dict[str, Any]) -> None:
    text = config["text_config"]
    del text["per_layer_config"]
    text |= {"global_head_dim": 32, "num_global_key_value_heads": 1}


def _unused_kv() -> Mapping[str, torch.Tensor]:
    """K and V of a layer that reads those of another: some files carry them."""
    names = ("k_proj.weight", "v_proj.weight", "k_norm.weight")
    return {f"model.layers.4.self_attn.{name}": torch.full((3,), float("nan")) for name in names}
