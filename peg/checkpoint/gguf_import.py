"""A GGUF file becomes a Hugging Face model directory, whole or not at all."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

from peg.checkpoint.gguf_families import family_of
from peg.checkpoint.gguf_file import GgufFile
from peg.checkpoint.gguf_tokenizer import build_tokenizer, special_ids, tokenizer_config
from peg.checkpoint.progress import Progress
from peg.checkpoint.writer import write_bf16
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
    config = family.config(file) | special_ids(file)
    tensors = family.tensors(file, config)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as parent:
            directory = Path(parent) / "model"  # not `parent` itself: that one is closed to everybody else
            directory.mkdir()
            _write_text_files(directory, file, config)
            write_bf16(directory / "model.safetensors", tensors, progress)
            directory.rename(target)
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be written: {error}") from error


def _write_text_files(directory: Path, file: GgufFile, config: Mapping[str, object]) -> None:
    contents = {
        "config.json": json.dumps(config, indent=2) + "\n",
        "generation_config.json": json.dumps(special_ids(file), indent=2) + "\n",
        "tokenizer_config.json": json.dumps(tokenizer_config(file), indent=2) + "\n",
        "tokenizer.json": build_tokenizer(file).to_str(),
        "chat_template.jinja": file.fields.text("tokenizer.chat_template", default=""),
    }
    for name, content in contents.items():
        if content:
            (directory / name).write_text(content, encoding="utf-8")
