"""Qwen3's config.json, read strictly, and what follows from it without any weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from peg.checkpoint.source import Placement, TensorSource
from peg.errors import CheckpointError
from peg.models.qwen3 import Qwen3
from peg.plan import Full

M600: dict[str, Any] = {
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_sizes_of_600m() -> None:
    """596,049,920 parameters; q is wider than the hidden size; a copy of the tied head may be in the files."""
    manifest = Qwen3.manifest(Qwen3.parse(M600))
    assert sum(math.prod(spec.shape) for spec in manifest.required) == 596_049_920
    assert manifest.specs["model.layers.0.self_attn.q_proj.weight"].shape == (2048, 1024)
    assert [spec.name for spec in manifest.optional] == ["lm_head.weight"]
    assert Qwen3.kv_groups(Qwen3.parse(M600), 16) == (Full(tuple(range(28)), 1, 128),)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu"'),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"use_sliding_window": True}, "use_sliding_window is true"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is"),
        ({"layer_types": ["sliding_attention"] * 28}, "layer_types is .*must be full_attention 28 times"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 'rope_type is "yarn"'),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3: 16 query heads must divide by it"),
        ({"head_dim": 127}, "head_dim is 127: must be even"),
        ({"vocab_size": None}, "vocab_size is missing"),
    ],
)
def test_what_peg_cannot_run_is_refused(change: dict[str, Any], message: str) -> None:
    """A field that changes the computation is refused by name and value."""
    with pytest.raises(CheckpointError, match=message):
        Qwen3.parse(M600 | change)


class Ones(TensorSource):
    """Weights of ones, but for a head of its own."""

    def __init__(self, head: float) -> None:
        super().__init__(Placement(0, 1, torch.float32, torch.device("cpu")))
        specs = Qwen3.manifest(Qwen3.parse(SMALL)).specs
        self._tensors = {name: torch.ones(spec.shape) for name, spec in specs.items()}
        self._tensors["lm_head.weight"] *= head

    def has(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def _read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        return self._tensors[name].narrow(dim, start, stop - start)


SMALL = M600 | {"hidden_size": 8, "num_hidden_layers": 1, "head_dim": 2, "intermediate_size": 4, "vocab_size": 32}


def test_a_copy_of_the_tied_head_must_be_a_copy() -> None:
    """A file may carry lm_head.weight beside a tied embedding, as long as it is the same."""
    config = Qwen3.parse(SMALL)
    Qwen3.load(config, Ones(head=1.0))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from the embedding"):
        Qwen3.load(config, Ones(head=2.0))
