"""Gemma 4's config.json, read strictly: the published sizes, both spellings, and what peg cannot run."""

from __future__ import annotations

import math
from typing import Any

import pytest

from peg.checkpoint.manifest import Manifest
from peg.errors import CheckpointError, ConfigError
from peg.models.gemma4 import Gemma4
from peg.models.gemma4_config import parse_gemma4
from peg.plan import Full, Recurrent, SlidingWindow
from tools.geometries import GEMMA4_12B, GEMMA4_31B, GEMMA4_E2B

B31: dict[str, Any] = dict(GEMMA4_31B)
B12: dict[str, Any] = GEMMA4_12B | {"model_type": "gemma4_unified_text"}
E2B: dict[str, Any] = dict(GEMMA4_E2B)
E4B = E2B | {
    "hidden_size": 2560,
    "num_hidden_layers": 42,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 7,
    "num_key_value_heads": 2,
    "intermediate_size": 10240,
    "use_double_wide_mlp": False,
    "num_kv_shared_layers": 18,
}


def parameters(manifest: Manifest) -> int:
    return sum(math.prod(spec.shape) for spec in manifest.required)


@pytest.mark.parametrize(
    ("config", "expected"),
    [(B31, 30_697_345_340), (B12, 11_907_350_320), (E2B, 4_628_569_379), (E4B, 7_463_013_418)],
    ids=["31B", "12B", "E2B", "E4B"],
)
def test_the_manifest_has_the_published_parameters(config: dict[str, Any], expected: int) -> None:
    """The text parts of the four dense models, to the last parameter."""
    assert parameters(Gemma4.manifest(parse_gemma4(config))) == expected


def test_kv_groups_of_31b() -> None:
    """Bytes per token in bf16; at eight ranks the sliding heads are sharded and the global ones replicated."""
    config = parse_gemma4(B31)
    sliding, full = Gemma4.kv_groups(config, 1)
    assert isinstance(sliding, SlidingWindow)
    assert isinstance(full, Full)
    assert (sliding.window, len(sliding.layers), len(full.layers)) == (1024, 50, 10)
    assert (sliding.bytes_per_token(2), full.bytes_per_token(2)) == (819_200, 81_920)
    heads = {}
    for size in (4, 8, 32):
        groups = Gemma4.kv_groups(config, size)
        heads[size] = [(group.kv_heads, group.head_dim) for group in groups if not isinstance(group, Recurrent)]
    assert heads == {4: [(4, 256), (1, 512)], 8: [(2, 256), (1, 512)], 32: [(1, 256), (1, 512)]}
    for size in (3, 64):
        with pytest.raises(ConfigError, match=f"--tensor-parallel-size {size}: 32 query heads do not divide by {size}"):
            Gemma4.kv_groups(config, size)


@pytest.mark.parametrize(("config", "producers"), [(E2B, (13, 14)), (E4B, (22, 23))], ids=["E2B", "E4B"])
def test_shared_layers_read_the_last_of_their_kind(config: dict[str, Any], producers: tuple[int, int]) -> None:
    """Layers without K and V have none in the manifest or in a KV group, and read one of two producers."""
    parsed = parse_gemma4(config)
    shared = range(parsed.first_shared, parsed.num_layers)
    assert {parsed.owner(layer) for layer in shared} == set(producers)
    assert [parsed.owner(layer) for layer in range(parsed.first_shared)] == list(range(parsed.first_shared))
    manifest = Gemma4.manifest(parsed)
    names = {spec.name for spec in manifest.required}
    for layer in shared:
        assert f"model.layers.{layer}.self_attn.q_proj.weight" in names
        assert not {f"model.layers.{layer}.self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm")} & names
        assert manifest.canonical(f"model.language_model.layers.{layer}.self_attn.k_proj.weight") is None
    groups = Gemma4.kv_groups(parsed, 1)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(parsed.first_shared))


def test_both_spellings_of_the_global_heads_mean_the_same() -> None:
    """The hub's two fields and the reference's per_layer_config; without either, a head dim of 512."""
    spelled = {key: value for key, value in B31.items() if key not in ("global_head_dim", "num_global_key_value_heads")}
    full = [str(layer) for layer in range(5, 60, 6)]
    ours = parse_gemma4(
        spelled | {"per_layer_config": {layer: {"head_dim": 512, "num_key_value_heads": 4} for layer in full}}
    )
    assert ours == parse_gemma4(B31)
    assert parse_gemma4(spelled).kinds["full_attention"].head_dim == 512
    assert parse_gemma4(spelled).kinds["full_attention"].kv_heads == 16
    assert parse_gemma4(spelled | {"per_layer_config": {}}).kinds["full_attention"].head_dim == 256
    outer = {"text_config": B31, "tie_word_embeddings": True, "image_token_id": 258880, "boa_token_id": 256000}
    assert parse_gemma4(outer).forbidden_token_ids == (258880, 256000)
    assert parse_gemma4(B31).forbidden_token_ids == ()


def test_the_last_layer_is_a_full_one() -> None:
    """Where layer_types says otherwise, the reference makes it so, and so does peg."""
    parsed = parse_gemma4(B31 | {"num_hidden_layers": 8, "layer_types": ["sliding_attention"] * 8})
    assert parsed.layer_types == ("sliding_attention",) * 7 + ("full_attention",)


FULL_ROPE: dict[str, Any] = {"rope_type": "proportional", "rope_theta": 1e6}
LOCAL_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4}


def rope(full: dict[str, Any], sliding: dict[str, Any]) -> dict[str, Any]:
    return {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"enable_moe_block": True}, "enable_moe_block is true: peg cannot run mixtures of experts"),
        ({"use_bidirectional_attention": "all"}, 'use_bidirectional_attention is "all": peg supports only "vision"'),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "quantization_config is"),
        ({"hidden_activation": "silu"}, 'hidden_activation is "silu"'),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"model_type": "gemma4_assistant"}, 'model_type is "gemma4_assistant"'),
        ({"layer_types": ["full_attention"]}, "layer_types is .*for each of 60 layers"),
        ({"layer_types": ["linear_attention"] * 60}, "layer_types is"),
        ({"num_kv_shared_layers": 56}, "num_kv_shared_layers is 56: each kind of layer needs one"),
        (
            rope(FULL_ROPE | {"rope_type": "default"}, LOCAL_ROPE),
            'rope_type is "default": peg supports only proportional',
        ),
        (rope(FULL_ROPE | {"beta_fast": 1}, LOCAL_ROPE), "beta_fast is 1: not a parameter"),
        (
            rope(FULL_ROPE | {"partial_rotary_factor": 1.5}, LOCAL_ROPE),
            "partial_rotary_factor is 1.5: must be at most 1",
        ),
        (rope(FULL_ROPE, {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}), "sliding_attention must be of"),
        ({"per_layer_config": {"5": {"head_dim": 512}}}, "per_layer_config is .* mean the same"),
        ({"num_attention_heads": 20}, "num_attention_heads is 20: must divide by the 16 KV heads"),
        ({"sliding_window": None}, "sliding_window is missing"),
        ({"hidden_size": None}, "hidden_size is missing"),
    ],
)
def test_what_peg_cannot_run_is_refused(change: dict[str, Any], message: str) -> None:
    """A field that changes the computation is refused by name and value."""
    with pytest.raises(CheckpointError, match=message):
        parse_gemma4(B31 | change)


@pytest.mark.parametrize(
    ("per_layer", "message"),
    [
        ({"5": {"head_dim": 512}}, "layers of one kind must be alike"),
        ({"0": {"head_dim": 128}}, "layers of one kind must be alike"),
        ({"60": {"head_dim": 512}}, "per_layer_config.60 is .*there are 60 layers"),
        ({"5": {"head_dim": 512, "sliding_window": 7}}, "per_layer_config.5.sliding_window is 7"),
    ],
)
def test_layers_of_a_kind_must_be_alike(per_layer: dict[str, Any], message: str) -> None:
    """per_layer_config may set the full layers apart, all in the same way, and nothing else."""
    config = {key: value for key, value in B31.items() if key not in ("global_head_dim", "num_global_key_value_heads")}
    with pytest.raises(CheckpointError, match=message):
        parse_gemma4(config | {"per_layer_config": per_layer})


def test_half_precision_is_not_among_the_dtypes() -> None:
    """Gemma's activations overflow in float16."""
    assert Gemma4.dtypes == ("bfloat16", "float32")
