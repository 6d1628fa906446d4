"""A GGUF file becomes a Hugging Face model directory, whole or not at all."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from peg.checkpoint.gguf_families import GgufFamily, family_of, row_order, tensor_names
from peg.checkpoint.gguf_file import GgufFile, read_bf16, shape
from peg.checkpoint.gguf_tokenizer import build_tokenizer, special_ids, tokenizer_config
from peg.checkpoint.progress import Progress
from peg.errors import CheckpointError


def import_gguf(source: Path, target: Path, progress: Progress) -> None:
    """Write the model directory `target`, which must not exist, from the file `source`.

    The directory appears under its name only once it is complete. Raises CheckpointError for a file that is
    damaged, or of an architecture, tensor type or tokenizer that peg does not know.
    """
    if target.exists():
        raise CheckpointError(f"{target}: already exists")
    progress.notice(f"importing {source.name} into {target}")
    file = GgufFile(source)
    family = family_of(file)
    names = tensor_names(file, family)
    config = _config(file, family)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as parent:
        directory = Path(parent) / "model"
        directory.mkdir()
        _write_json(directory / "config.json", config)
        _write_json(directory / "generation_config.json", special_ids(file))
        _write_json(directory / "tokenizer_config.json", tokenizer_config(file))
        build_tokenizer(file).save(str(directory / "tokenizer.json"), pretty=False)
        template = file.fields.text("tokenizer.chat_template", default="")
        if template:
            (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
        _write_weights(directory / "model.safetensors", file, family, names, config, progress)
        directory.rename(target)


def _config(file: GgufFile, family: GgufFamily) -> dict[str, object]:
    vocab_size = len(file.strings("tokenizer.ggml.tokens"))
    config = family.config(file.fields) | special_ids(file) | {"vocab_size": vocab_size}
    return config | {"tie_word_embeddings": "output.weight" not in file.tensors}


def _write_json(path: Path, values: Mapping[str, object]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _write_weights(
    path: Path,
    file: GgufFile,
    family: GgufFamily,
    names: Mapping[str, str],
    config: Mapping[str, object],
    progress: Progress,
) -> None:
    """One safetensors file, written tensor by tensor: the library's own writer wants them all in memory at once."""
    theirs = {ours: name for name, ours in names.items()}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    total = 0
    for name in sorted(theirs):
        sizes = shape(file.tensors[theirs[name]])
        size_bytes = 2 * math.prod(sizes)
        header[name] = {"dtype": "BF16", "shape": sizes, "data_offsets": [total, total + size_bytes]}
        total += size_bytes
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as out:
        out.write(len(head).to_bytes(8, "little") + head)
        done = 0
        for name in sorted(theirs):
            order = row_order(config, name) if family.interleaved_heads and _is_rotated(name) else None
            minus_one = family.norms_plus_one and name.endswith("norm.weight")
            for rows in read_bf16(file.tensors[theirs[name]], order, minus_one):
                done += out.write(rows.view(torch.int16).numpy().data)
                progress.stage("import", done, total)


def _is_rotated(name: str) -> bool:
    return name.endswith(("q_proj.weight", "k_proj.weight"))
