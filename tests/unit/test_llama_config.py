"""Llama's config.json, read strictly, and what follows from it without any weights."""

from __future__ import annotations

import pytest

from peg.checkpoint.rope import RopeParameters
from peg.errors import CheckpointError
from peg.models.llama import Llama
from peg.models.registry import find_family
from peg.plan import Full

SMOLLM2: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}


def test_what_config_json_says() -> None:
    """Sizes are taken over, and an absent head_dim is the hidden size over the heads."""
    config = Llama.parse(SMOLLM2)
    assert (config.head_dim, config.query_heads, config.kv_heads, config.num_layers) == (64, 9, 3, 30)
    assert config.rope == RopeParameters(theta=100000.0)
    assert config.forbidden_token_ids == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu": peg supports only "silu"'),
        ({"attention_bias": True}, "attention_bias is true: peg supports only false"),
        ({"mlp_bias": True}, "mlp_bias is true: peg supports only false"),
        ({"rope_interleaved": True}, "rope_interleaved is true"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 'rope_type is "yarn"'),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2: 9 query heads must divide by it"),
        ({"hidden_size": 577}, "hidden_size 577 must divide by it"),
        ({"head_dim": 63}, "head_dim is 63: must be even"),
        ({"rms_norm_eps": None}, "rms_norm_eps is missing"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"vocab_size": "many"}, 'vocab_size is "many"'),
    ],
)
def test_what_peg_cannot_run_is_refused(change: dict[str, object], message: str) -> None:
    """A field that changes the computation is refused by name and value, and so is one that is missing."""
    with pytest.raises(CheckpointError, match=message):
        Llama.parse(SMOLLM2 | change)


def test_the_manifest_has_every_tensor() -> None:
    """SmolLM2 has 272 tensors and 134,515,008 parameters; an untied head is one tensor more."""
    specs = Llama.manifest(Llama.parse(SMOLLM2)).required
    assert len(specs) == 272
    shapes = {spec.name: spec.shape for spec in specs}
    assert shapes["model.layers.29.self_attn.k_proj.weight"] == (192, 576)
    assert (
        sum(
            rows * columns for rows, columns in (shape if len(shape) == 2 else (*shape, 1) for shape in shapes.values())
        )
        == 134515008
    )
    untied = Llama.manifest(Llama.parse(SMOLLM2 | {"tie_word_embeddings": False})).required
    assert {spec.name for spec in untied} - set(shapes) == {"lm_head.weight"}


@pytest.mark.parametrize(("world_size", "kv_heads"), [(1, 3), (3, 1), (9, 1)])
def test_kv_groups(world_size: int, kv_heads: int) -> None:
    """All layers cache alike; a rank holds its share of the KV heads, or one replica."""
    assert Llama.kv_groups(Llama.parse(SMOLLM2), world_size) == (Full(tuple(range(30)), kv_heads, 64),)


def test_an_unknown_architecture_is_refused_by_name() -> None:
    """The refusal names the architecture and those that peg runs."""
    assert find_family("LlamaForCausalLM") is Llama
    with pytest.raises(CheckpointError, match=r"architecture MambaForCausalLM: peg runs .*LlamaForCausalLM"):
        find_family("MambaForCausalLM")
