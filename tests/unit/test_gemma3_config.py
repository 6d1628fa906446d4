"""Gemma 3's config.json, read strictly, in the spellings of its text-only and its multimodal files."""

from __future__ import annotations

import math
from typing import Any

import pytest

from peg.checkpoint.rope import RopeParameters
from peg.errors import CheckpointError
from peg.models.gemma3 import Gemma3
from peg.plan import Full, SlidingWindow

M270: dict[str, Any] = {
    "model_type": "gemma3_text",
    "attention_bias": False,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 640,
    "intermediate_size": 2048,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_local_base_freq": 10000.0,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "sliding_window": 512,
    "vocab_size": 262144,
}
B4: dict[str, Any] = {  # a multimodal file lists few fields of its text part
    "model_type": "gemma3",
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "image_token_index": 262144,
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"model_type": "siglip_vision_model"},
}


def test_text_only_file() -> None:
    """Gemma 3 270M: 268,098,176 parameters in 236 tensors, every sixth layer sees all."""
    config = Gemma3.parse(M270)
    specs = Gemma3.manifest(config).required
    assert (len(specs), sum(math.prod(spec.shape) for spec in specs)) == (236, 268_098_176)
    sliding, full = Gemma3.kv_groups(config, 4)
    assert full == Full((5, 11, 17), 1, 256)
    assert isinstance(sliding, SlidingWindow)
    assert (len(sliding.layers), sliding.window, sliding.kv_heads) == (15, 512, 1)
    assert config.scale == 256**-0.5
    assert config.rope == {"sliding_attention": RopeParameters(theta=1e4), "full_attention": RopeParameters(theta=1e6)}
    assert config.forbidden_token_ids == ()


def test_multimodal_file() -> None:
    """Gemma 3 4B: absent fields have the class's defaults, linear scaling is meant for full layers alone."""
    config = Gemma3.parse(B4)
    assert (config.query_heads, config.kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    assert (config.norm_eps, config.max_positions, config.tied) == (1e-6, 131072, True)
    assert config.rope["full_attention"] == RopeParameters(rope_type="linear", theta=1e6, factor=8.0)
    assert config.rope["sliding_attention"] == RopeParameters(theta=1e4)
    assert config.forbidden_token_ids == (255999, 256000, 262144)
    manifest = Gemma3.manifest(config)
    for name in ("language_model.model.norm.weight", "model.language_model.norm.weight", "model.norm.weight"):
        assert manifest.canonical(name) == "model.norm.weight"
    assert manifest.canonical("vision_tower.vision_model.head.probe") is None
    assert manifest.canonical("model.multi_modal_projector.mm_soft_emb_norm.weight") is None


def test_one_kind_of_layer_alone() -> None:
    """A model of sliding layers only has one KV group."""
    config = Gemma3.parse(M270 | {"layer_types": ["sliding_attention"] * 18})
    assert [type(group) for group in Gemma3.kv_groups(config, 1)] == [SlidingWindow]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_activation": "gelu"}, 'hidden_activation is "gelu"'),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is true"),
        ({"quantization_config": {}}, "quantization_config is {}"),
        ({"model_type": "gemma2"}, 'model_type is "gemma2"'),
        ({"layer_types": ["full_attention"] * 17}, "layer_types is .*for each of 18 layers"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, 'rope_type is "yarn"'),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3: 4 query heads must divide by it"),
        ({"sliding_window": None}, "sliding_window is missing"),
    ],
)
def test_what_peg_cannot_run_is_refused(change: dict[str, Any], message: str) -> None:
    """A field that changes the computation is refused by name and value."""
    with pytest.raises(CheckpointError, match=message):
        Gemma3.parse(M270 | change)


def test_half_precision_is_not_among_the_dtypes() -> None:
    """Gemma's activations overflow in float16."""
    assert Gemma3.dtypes == ("bfloat16", "float32")
