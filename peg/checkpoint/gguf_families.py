"""What each GGUF architecture that peg imports becomes: its config.json, and where each tensor goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from gguf import ReaderTensor
from numpy.typing import NDArray
from torch import Tensor

from peg.checkpoint.fields import Fields
from peg.checkpoint.gguf_file import GgufFile, read_bf16, shape
from peg.checkpoint.manifest import TensorSpec
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
# Each tensor of a layer: its name in a model directory, and its shape in the letters of `_sizes`.
_SHARED_LAYER: Mapping[str, tuple[str, str]] = {
    "attn_norm": ("input_layernorm", "M"),
    "attn_q": ("self_attn.q_proj", "QM"),
    "attn_k": ("self_attn.k_proj", "KM"),
    "attn_v": ("self_attn.v_proj", "KM"),
    "attn_output": ("self_attn.o_proj", "MQ"),
    "ffn_gate": ("mlp.gate_proj", "IM"),
    "ffn_up": ("mlp.up_proj", "IM"),
    "ffn_down": ("mlp.down_proj", "MI"),
}
_LLAMA_LAYER: Mapping[str, tuple[str, str]] = {**_SHARED_LAYER, "ffn_norm": ("post_attention_layernorm", "M")}
_GEMMA3_LAYER: Mapping[str, tuple[str, str]] = {
    **_SHARED_LAYER,
    "attn_q_norm": ("self_attn.q_norm", "D"),
    "attn_k_norm": ("self_attn.k_norm", "D"),
    "post_attention_norm": ("post_attention_layernorm", "M"),
    "ffn_norm": ("pre_feedforward_layernorm", "M"),
    "post_ffw_norm": ("post_feedforward_layernorm", "M"),
}


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """How one architecture's files are read. `extra_fields` are those it has beside the shared ones.

    `interleaved_heads`: the rows of q and k are stored in another order. `norms_plus_one`: norms are stored as 1 + w.
    """

    config_of: Callable[[Fields], dict[str, object]]
    layer: Mapping[str, tuple[str, str]]
    extra_fields: tuple[str, ...] = ()
    interleaved_heads: bool = False
    norms_plus_one: bool = False

    def config(self, file: GgufFile) -> dict[str, object]:
        """config.json, but for the token ids. Raises CheckpointError for a field that peg does not know."""
        prefix = f"{file.architecture}."
        known = {prefix + name for name in (*_SHARED_FIELDS, *self.extra_fields)}
        unknown = sorted(name for name in file.fields.names - known if name.startswith(prefix))
        if unknown:
            raise file.fields.error(unknown[0], "peg does not know this field, and it may change the computation")
        sizes = {"vocab_size": len(file.strings("tokenizer.ggml.tokens"))}
        return self.config_of(file.fields) | sizes | {"tie_word_embeddings": "output.weight" not in file.tensors}

    def tensors(self, file: GgufFile, config: Mapping[str, object]) -> list[tuple[TensorSpec, Iterator[Tensor]]]:
        """Every tensor of the model directory with its contents, read when asked for, by name.

        Raises CheckpointError with all that are missing, unknown or of the wrong shape.
        """
        specs = self._specs(file, config)
        faults = [f"{name}: missing" for name in specs if name not in file.tensors]
        for name, tensor in file.tensors.items():
            if name not in specs:
                faults.append(f"{name}: unknown")
            elif shape(tensor) != specs[name].shape:
                faults.append(f"{name}: shape {list(shape(tensor))}, must be {list(specs[name].shape)}")
        if faults:
            raise CheckpointError(f"{file.path}: its tensors are not those that its fields call for", faults)
        return [(spec, self._read(file.tensors[name], spec, config)) for name, spec in specs.items()]

    def _specs(self, file: GgufFile, config: Mapping[str, object]) -> dict[str, TensorSpec]:
        sizes = _sizes(Fields(config))
        names = {"token_embd": ("model.embed_tokens", "VM"), "output_norm": ("model.norm", "M")}
        if "output.weight" in file.tensors:
            names["output"] = ("lm_head", "VM")
        for layer in range(Fields(config).integer("num_hidden_layers")):
            for theirs, (ours, dims) in self.layer.items():
                names[f"blk.{layer}.{theirs}"] = (f"model.layers.{layer}.{ours}", dims)
        in_order = sorted(names.items(), key=lambda item: item[1])
        return {
            f"{theirs}.weight": TensorSpec(f"{ours}.weight", tuple(sizes[dim] for dim in dims))
            for theirs, (ours, dims) in in_order
        }

    def _read(self, tensor: ReaderTensor, spec: TensorSpec, config: Mapping[str, object]) -> Iterator[Tensor]:
        rotated = spec.name.endswith(("q_proj.weight", "k_proj.weight"))
        order = None
        if self.interleaved_heads and rotated:
            order = _halves_order(spec.shape[0], Fields(config).integer("head_dim"))
        return read_bf16(tensor, order, minus_one=self.norms_plus_one and spec.name.endswith("norm.weight"))


def family_of(file: GgufFile) -> GgufFamily:
    """The family of a file. Raises CheckpointError for an architecture that peg does not know."""
    family = _FAMILIES.get(file.architecture)
    if family is None:
        raise file.fields.error("general.architecture", f"peg imports only {', '.join(_FAMILIES)}")
    return family


def _halves_order(rows: int, head_dim: int) -> NDArray[np.int64]:
    """Which row of the file each row of q or k is.

    Inside each head the file has the rows for rotation in pairs (0, d/2, 1, d/2 + 1, …); the model rotates halves.
    """
    return np.arange(rows).reshape(-1, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def _sizes(config: Fields) -> dict[str, int]:
    head_dim = config.integer("head_dim")
    return {
        "M": config.integer("hidden_size"),
        "I": config.integer("intermediate_size"),
        "V": config.integer("vocab_size"),
        "Q": config.integer("num_attention_heads") * head_dim,
        "K": config.integer("num_key_value_heads") * head_dim,
        "D": head_dim,
    }


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
    if head_dim % 2:
        raise fields.error("llama.rope.dimension_count", f"heads of {head_dim} have no two halves to rotate")
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
