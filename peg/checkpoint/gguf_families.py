"""What each GGUF architecture that peg imports becomes: its config.json, and where each tensor goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from peg.checkpoint.fields import Fields
from peg.checkpoint.gguf_file import GgufFile
from peg.errors import CheckpointError

_SHARED_FIELDS = (
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "vocab_size",
)
_SHARED_LAYER: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LLAMA_LAYER: Mapping[str, str] = {**_SHARED_LAYER, "ffn_norm": "post_attention_layernorm"}
_GEMMA3_LAYER: Mapping[str, str] = {
    **_SHARED_LAYER,
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """How one architecture's files are read. `extra_fields` are those it has beside the shared ones."""

    config: Callable[[Fields], dict[str, object]]
    layer_names: Mapping[str, str]
    extra_fields: tuple[str, ...] = ()
    interleaved_heads: bool = False
    norms_plus_one: bool = False


def family_of(file: GgufFile) -> GgufFamily:
    """The family of a file. Raises CheckpointError for an architecture, or a field of it, that peg does not know."""
    family = _FAMILIES.get(file.architecture)
    if family is None:
        raise file.fields.error("general.architecture", f"peg imports only {', '.join(_FAMILIES)}")
    prefix = f"{file.architecture}."
    known = {prefix + name for name in (*_SHARED_FIELDS, *family.extra_fields)}
    unknown = sorted(name for name in file.fields.names - known if name.startswith(prefix))
    if unknown:
        raise file.fields.error(unknown[0], "peg does not know this field, and it may change the computation")
    return family


def tensor_names(file: GgufFile, family: GgufFamily) -> dict[str, str]:
    """The name in the model directory of every tensor of the file. All missing and unknown ones are one error."""
    layers = file.fields.integer(f"{file.architecture}.block_count")
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if "output.weight" in file.tensors:
        names["output.weight"] = "lm_head.weight"
    for layer in range(layers):
        for theirs, ours in family.layer_names.items():
            names[f"blk.{layer}.{theirs}.weight"] = f"model.layers.{layer}.{ours}.weight"
    faults = [f"missing: {name}" for name in names if name not in file.tensors]
    faults += [f"unknown: {name}" for name in file.tensors if name not in names]
    if faults:
        raise CheckpointError(f"{file.path}: its tensors are not those of {layers} {file.architecture} layers", faults)
    return names


def row_order(config: Mapping[str, object], name: str) -> NDArray[np.int64]:
    """Which row of the file each row of a q or k projection is.

    Inside each head the file's rows are interleaved for rotation in pairs (0, d/2, 1, d/2 + 1, …); the model
    rotates halves, so the even ones come first.
    """
    sizes = Fields(config)
    heads = sizes.integer("num_attention_heads" if ".q_proj." in name else "num_key_value_heads")
    half = sizes.integer("head_dim") // 2
    return np.arange(heads * half * 2).reshape(heads, half, 2).swapaxes(1, 2).reshape(-1)


def _shared_config(fields: Fields, prefix: str) -> dict[str, object]:
    heads = fields.integer(f"{prefix}.attention.head_count")
    return {
        "hidden_size": fields.integer(f"{prefix}.embedding_length"),
        "intermediate_size": fields.integer(f"{prefix}.feed_forward_length"),
        "num_hidden_layers": fields.integer(f"{prefix}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer(f"{prefix}.attention.head_count_kv", default=heads),
        "max_position_embeddings": fields.integer(f"{prefix}.context_length"),
        # Written as fp32: 9.99999975e-06 was 1e-05 before.
        "rms_norm_eps": float(f"{fields.number(f'{prefix}.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_scaling": _rope_scaling(fields, prefix),
        "attention_bias": False,
        "torch_dtype": "bfloat16",
    }


def _rope_scaling(fields: Fields, prefix: str) -> dict[str, object] | None:
    name = f"{prefix}.rope.scaling.type"
    fields.expect(name, "none", "linear")
    if fields.text(name, default="none") == "none":
        return None
    return {"rope_type": "linear", "factor": fields.number(f"{prefix}.rope.scaling.factor")}


def _llama_config(fields: Fields) -> dict[str, object]:
    config = _shared_config(fields, "llama")
    hidden, heads = fields.integer("llama.embedding_length"), fields.integer("llama.attention.head_count")
    head_dim = fields.integer("llama.rope.dimension_count", default=hidden // heads)
    for name in ("llama.attention.key_length", "llama.attention.value_length"):
        fields.expect(name, head_dim)
    return config | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": head_dim,
        "hidden_act": "silu",
        "mlp_bias": False,
        "rope_theta": fields.number("llama.rope.freq_base", default=10_000.0),
    }


def _gemma3_config(fields: Fields) -> dict[str, object]:
    # The file says neither the scale of the queries nor the local theta nor the pattern of the layers. They are the
    # same in all sizes with heads of 256; the one size with heads of 128 scales by another number.
    fields.expect("gemma3.attention.key_length", 256)
    fields.expect("gemma3.attention.value_length", 256)
    layers = range(1, fields.integer("gemma3.block_count") + 1)
    return _shared_config(fields, "gemma3") | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "rope_theta": fields.number("gemma3.rope.freq_base", default=1_000_000.0),
        "rope_local_base_freq": 10_000.0,
        "sliding_window": fields.integer("gemma3.attention.sliding_window"),
        "layer_types": ["sliding_attention" if layer % 6 else "full_attention" for layer in layers],
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
    }


_FAMILIES: Mapping[str, GgufFamily] = {
    "llama": GgufFamily(_llama_config, _LLAMA_LAYER, interleaved_heads=True),
    "gemma3": GgufFamily(_gemma3_config, _GEMMA3_LAYER, ("attention.sliding_window",), norms_plus_one=True),
}
