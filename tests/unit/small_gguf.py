"""GGUF files of both families, small enough to be written in a test, with the tensors that they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from tokenizers.pre_tokenizers import ByteLevel

CONTROL, NORMAL, USER_DEFINED, BYTE = 3, 1, 4, 6
LLAMA_SIZES = {"hidden": 32, "mlp": 64, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16}
GEMMA_SIZES = {"hidden": 32, "mlp": 64, "layers": 7, "heads": 2, "kv_heads": 1, "head_dim": 256}

Array = NDArray[np.floating[Any]]


@dataclass
class SmallGguf:
    """What goes into the file. A test changes it before `write`; `expected` is what a model directory must hold."""

    architecture: str
    fields: dict[str, object]
    tensors: dict[str, Array]
    expected: dict[str, Array]
    types: dict[str, GGMLQuantizationType] = field(default_factory=dict)

    def write(self, path: Path) -> Path:
        writer = GGUFWriter(path, self.architecture)
        for name, value in self.fields.items():
            _add(writer, name, value)
        for name, tensor in self.tensors.items():
            kind = self.types.get(name, GGMLQuantizationType.F32)
            plain = kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F64)
            writer.add_tensor(name, tensor if plain else quantize(tensor, kind), raw_dtype=None if plain else kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def quantize(self, name: str, ours: str, kind: GGMLQuantizationType) -> None:
        """Store one tensor in `kind`; what is expected of it is what `kind` keeps of each row."""
        self.types[name] = kind
        self.expected[ours] = dequantize(quantize(self.expected[ours], kind), kind)


def small_llama(rng: np.random.Generator) -> SmallGguf:
    """A file like SmolLM2's: interleaved heads, byte-level tokenizer with a chat template, tied head."""
    expected = _layer_tensors(rng, LLAMA_SIZES, ("input_layernorm", "post_attention_layernorm"))
    specials = ["<unk>", "<start>", "<end>"]
    merges = ["Ġ Ġ", "Ġ a", "a b", "Ġa b"]
    tokens = [*specials, *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in merges)]
    expected["model.embed_tokens.weight"] = _bf16(rng, len(tokens), LLAMA_SIZES["hidden"])
    tensors = {theirs: expected[ours] for ours, theirs in _names(expected, "ffn_norm").items()}
    for layer in range(LLAMA_SIZES["layers"]):
        for projection, heads in (("attn_q", LLAMA_SIZES["heads"]), ("attn_k", LLAMA_SIZES["kv_heads"])):
            name = f"blk.{layer}.{projection}.weight"
            tensors[name] = _interleave(tensors[name], heads)
    fields: dict[str, object] = {
        **_size_fields("llama", LLAMA_SIZES),
        "llama.rope.dimension_count": LLAMA_SIZES["head_dim"],
        "llama.rope.freq_base": 100_000.0,
        "llama.vocab_size": len(tokens),
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL] * 3 + [NORMAL] * (len(tokens) - 3),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages }}",
    }
    return SmallGguf("llama", fields, tensors, expected)


def small_gemma(rng: np.random.Generator) -> SmallGguf:
    """A file like Gemma 3's: norms stored as 1 + w, no merges, runs of spaces and newlines as tokens, `<bos>` added."""
    norms = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    expected = _layer_tensors(rng, GEMMA_SIZES, norms)
    specials = ["<pad>", "<eos>", "<bos>", "<unk>"]
    made = ["\n\n", "  ", "   ", "<b>"]
    pieces = ["▁", "a", "b", "c", "▁a", "ab", "▁ab", "abc"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = [*specials, *made, *bytes_, *pieces]
    expected["model.embed_tokens.weight"] = _bf16(rng, len(tokens), GEMMA_SIZES["hidden"])
    for layer in range(GEMMA_SIZES["layers"]):
        for norm in ("q_norm", "k_norm"):
            expected[f"model.layers.{layer}.self_attn.{norm}.weight"] = _bf16(rng, GEMMA_SIZES["head_dim"])
    tensors = {theirs: expected[ours] for ours, theirs in _names(expected, "post_attention_norm").items()}
    for name, tensor in tensors.items():
        if name.endswith("norm.weight"):
            tensors[name] = tensor + 1
    fields: dict[str, object] = {
        **_size_fields("gemma3", GEMMA_SIZES),
        "gemma3.attention.key_length": 256,
        "gemma3.attention.value_length": 256,
        "gemma3.attention.sliding_window": 512,
        "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
        "gemma3.rope.freq_base": 1_000_000.0,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * len(tokens),
        "tokenizer.ggml.token_type": [CONTROL] * 4 + [USER_DEFINED] * 4 + [BYTE] * 256 + [NORMAL] * len(pieces),
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }
    return SmallGguf("gemma3", fields, tensors, expected)


def _size_fields(prefix: str, sizes: Mapping[str, int]) -> dict[str, object]:
    return {
        f"{prefix}.block_count": sizes["layers"],
        f"{prefix}.context_length": 128,
        f"{prefix}.embedding_length": sizes["hidden"],
        f"{prefix}.feed_forward_length": sizes["mlp"],
        f"{prefix}.attention.head_count": sizes["heads"],
        f"{prefix}.attention.head_count_kv": sizes["kv_heads"],
    }


def _layer_tensors(rng: np.random.Generator, sizes: Mapping[str, int], norms: tuple[str, ...]) -> dict[str, Array]:
    hidden, query, kv = sizes["hidden"], sizes["heads"] * sizes["head_dim"], sizes["kv_heads"] * sizes["head_dim"]
    shapes = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (sizes["mlp"], hidden),
        "mlp.up_proj": (sizes["mlp"], hidden),
        "mlp.down_proj": (hidden, sizes["mlp"]),
        **dict.fromkeys(norms, (hidden,)),
    }
    tensors = {
        f"model.layers.{layer}.{name}.weight": _bf16(rng, *shape)
        for layer in range(sizes["layers"])
        for name, shape in shapes.items()
    }
    return tensors | {"model.norm.weight": _bf16(rng, hidden)}


def _names(expected: Mapping[str, Array], post_attention: str) -> dict[str, str]:
    """Our name of each tensor to the file's, spelled out apart from the importer's own table."""
    parts = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "model.layers": "blk",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": post_attention,
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    names = {}
    for ours in expected:
        theirs = ours
        for part, spelled in parts.items():
            theirs = theirs.replace(f"{part}.", f"{spelled}.")
        names[ours] = theirs
    return names


def _interleave(weight: Array, heads: int) -> Array:
    """The row order that llama.cpp's converter gives q and k: halves of a head become neighbours."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def _bf16(rng: np.random.Generator, *shape: int) -> Array:
    """Random numbers of eight bits, so that bf16 keeps them, and one more than each as well."""
    return (rng.integers(-127, 128, shape) / 128).astype(np.float32)


def _add(writer: GGUFWriter, name: str, value: object) -> None:
    match value:
        case bool():
            writer.add_bool(name, value)
        case int():
            writer.add_uint32(name, value)
        case float():
            writer.add_float32(name, value)
        case str():
            writer.add_string(name, value)
        case list():
            writer.add_array(name, value)
        case _:
            raise TypeError(f"{name}: {type(value)}")
