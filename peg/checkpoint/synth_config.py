"""config.json of small models of every family, in the spellings that files in the wild have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from peg.errors import ConfigError

TEXT_PREFIX = "model."
PREFIXES = (TEXT_PREFIX, "model.language_model.", "language_model.model.")
"""What the text part's tensors are called: alone, beside a vision tower, and beside one in older files."""

SPELLINGS = ("transformers", "hub")
"""Which fields config.json uses: those that `save_pretrained` writes today, or those of the published files."""

_Config = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class SynthOptions:
    """What to make. None: the family's own. `hidden_size` divides by 16, so that eight ranks share the heads."""

    family: str
    layers: int | None = None
    hidden_size: int = 64
    vocab_size: int | None = None
    window: int = 16
    prefix: str = TEXT_PREFIX
    spelling: str = SPELLINGS[0]
    dtype: str = "bfloat16"
    shards: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.family not in RECIPES:
            raise ConfigError(f"FAMILY {self.family}: must be one of {', '.join(RECIPES)}")
        recipe = RECIPES[self.family]
        if self.hidden_size < 16 or self.hidden_size % 16:
            raise ConfigError(f"--hidden-size {self.hidden_size}: must be a multiple of 16")
        if self.num_layers < recipe.least_layers:
            raise ConfigError(f"--layers {self.num_layers}: {self.family} has at least {recipe.least_layers}")
        if self.prefix != TEXT_PREFIX and recipe.multimodal_class is None:
            raise ConfigError(f"--prefix {self.prefix}: all files of {self.family} have {TEXT_PREFIX}")

    @property
    def num_layers(self) -> int:
        return RECIPES[self.family].layers if self.layers is None else self.layers

    @property
    def architecture(self) -> str:
        recipe = RECIPES[self.family]
        return recipe.text_class if self.prefix == TEXT_PREFIX else str(recipe.multimodal_class)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One family: its classes, how many layers, and the fields of its config that the options do not decide.

    `modalities` are the fields with the ids that stand for images and sound.
    """

    text_class: str
    multimodal_class: str | None = None
    layers: int = 2
    least_layers: int = 1
    tokens: str
    fields: Callable[[SynthOptions], _Config]
    modalities: tuple[str, ...] = ()
    vision: Mapping[str, object] = field(default_factory=dict)


def synth_config(options: SynthOptions, vocab_size: int, token_ids: Mapping[str, int]) -> _Config:
    """The whole config.json. `token_ids` are those of the tokenizer's roles: bos, eos, pad, image."""
    recipe, spelled_new = RECIPES[options.family], options.spelling == "transformers"
    text: _Config = {
        "hidden_size": options.hidden_size,
        "intermediate_size": 2 * options.hidden_size + 2,  # padded from four ranks on
        "num_hidden_layers": options.num_layers,
        "vocab_size": vocab_size,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": recipe.multimodal_class is not None,
        **{f"{role}_token_id": token_id for role, token_id in token_ids.items() if role != "image"},
        **recipe.fields(options),
    }
    if "hidden_size_per_layer_input" in text:
        text["vocab_size_per_layer_input"] = vocab_size
    top: _Config = {"architectures": [options.architecture]}
    top["dtype" if spelled_new else "torch_dtype"] = options.dtype
    if options.prefix == TEXT_PREFIX:
        return top | text
    outer: _Config = {
        "model_type": str(text["model_type"]).removesuffix("_text"),
        "tie_word_embeddings": text["tie_word_embeddings"],
        **dict.fromkeys(recipe.modalities, token_ids["image"]),
        "vision_config": dict(recipe.vision) or None,
    }
    return top | outer | {"text_config": text}


def _llama(options: SynthOptions) -> _Config:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    }
    fields: _Config = {
        "model_type": "llama",
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
    }
    if options.spelling == "hub":
        return fields | {"rope_theta": 5e5, "rope_scaling": scaling}
    return fields | {"head_dim": options.hidden_size // 8, "rope_parameters": scaling | {"rope_theta": 5e5}}


def _qwen3(options: SynthOptions) -> _Config:
    fields: _Config = {
        "model_type": "qwen3",
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
    }
    if options.spelling == "hub":
        return fields | {"rope_theta": 1e6, "rope_scaling": None}
    rope = {"rope_type": "default", "rope_theta": 1e6}
    return fields | {"rope_parameters": rope, "layer_types": ["full_attention"] * options.num_layers}


def _layer_types(layers: int) -> list[str]:
    return ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]


def _gemma3(options: SynthOptions) -> _Config:
    """Alone like the 270M and 1B files; beside a vision tower like the larger ones, whose full layers scale RoPE."""
    alone = options.prefix == TEXT_PREFIX
    fields: _Config = {
        "model_type": "gemma3_text",
        "num_attention_heads": 8,
        "num_key_value_heads": 1 if alone else 4,
        "head_dim": 16,
        "sliding_window": options.window,
        "query_pre_attn_scalar": 20,
    }
    linear = {} if alone else {"rope_type": "linear", "factor": 8.0}
    if options.spelling == "hub":
        old: _Config = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 2}
        return fields | old | {"rope_scaling": linear or None}
    return fields | {
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "layer_types": _layer_types(options.num_layers),
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "default", "rope_theta": 1e6} | linear,
        },
    }


def _gemma4(options: SynthOptions, kv_heads: int, global_kv_heads: int | None, **own: object) -> _Config:
    """`global_kv_heads` None: full layers have as many as the others, and a V of their own."""
    layer_types = [*_layer_types(options.num_layers)[:-1], "full_attention"]
    fields: _Config = {
        "model_type": "gemma4_text",
        "num_attention_heads": 8,
        "num_key_value_heads": kv_heads,
        "head_dim": 16,
        "attention_k_eq_v": global_kv_heads is not None,
        "sliding_window": options.window,
        "layer_types": layer_types,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "final_logit_softcapping": 5.0,
        "use_bidirectional_attention": None if global_kv_heads is None else "vision",
        "hidden_size_per_layer_input": 0,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        },
        **own,
    }
    if options.spelling == "hub":
        return fields | {"global_head_dim": 32, "num_global_key_value_heads": global_kv_heads}
    full = {"head_dim": 32} | ({"num_key_value_heads": global_kv_heads} if global_kv_heads else {})
    return fields | {
        "per_layer_config": {str(layer): full for layer, kind in enumerate(layer_types) if kind == "full_attention"}
    }


def _gemma4_small(options: SynthOptions, kv_heads: int, *, double_wide: bool) -> _Config:
    """Embeddings per layer; the second half of the layers reads the K and V of the first."""
    return _gemma4(
        options,
        kv_heads,
        None,
        hidden_size_per_layer_input=12,
        num_kv_shared_layers=options.num_layers // 2,
        use_double_wide_mlp=double_wide,
    )


_GEMMA4_IDS = ("boi_token_id", "eoi_token_id", "image_token_id", "boa_token_id", "eoa_token_index", "audio_token_id")
_SMALL_TOWER: Mapping[str, object] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 28,
    "patch_size": 14,
}


def _gemma4_recipe(name: str, layers: int, least_layers: int, fields: Callable[[SynthOptions], _Config]) -> Recipe:
    return Recipe(
        text_class=f"{name}ForCausalLM",
        multimodal_class=f"{name}ForConditionalGeneration",
        layers=layers,
        least_layers=least_layers,
        tokens="gemma4",
        fields=fields,
        modalities=(*_GEMMA4_IDS, "video_token_id"),
    )


RECIPES: Mapping[str, Recipe] = {
    "llama": Recipe(text_class="LlamaForCausalLM", tokens="llama3", fields=_llama),
    "qwen3": Recipe(text_class="Qwen3ForCausalLM", tokens="chatml", fields=_qwen3),
    "gemma3": Recipe(
        text_class="Gemma3ForCausalLM",
        multimodal_class="Gemma3ForConditionalGeneration",
        layers=4,
        least_layers=2,
        tokens="gemma3",
        fields=_gemma3,
        modalities=("boi_token_index", "eoi_token_index", "image_token_index"),
        vision=_SMALL_TOWER,
    ),
    "gemma4-12b": _gemma4_recipe(
        "Gemma4Unified", 4, 2, lambda options: _gemma4(options, 4, 1, model_type="gemma4_unified_text")
    ),
    "gemma4-31b": _gemma4_recipe("Gemma4", 4, 2, lambda options: _gemma4(options, 4, 2)),
    "gemma4-e2b": _gemma4_recipe("Gemma4", 6, 3, lambda options: _gemma4_small(options, 1, double_wide=True)),
    "gemma4-e4b": _gemma4_recipe("Gemma4", 6, 3, lambda options: _gemma4_small(options, 2, double_wide=False)),
}
