"""What a model directory says about itself, read once and then only looked at."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from peg.checkpoint.fields import Fields, read_json
from peg.errors import CheckpointError

_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    """A Hugging Face model directory without its weights.

    `architecture` is the one name in `architectures`; `digest` is the sha256 of config.json, in hex. An absent
    generation_config.json is an empty mapping. The mappings are never written to.
    """

    path: Path
    config: Mapping[str, object]
    generation_config: Mapping[str, object]
    architecture: str
    digest: str

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end a sequence: those of generation_config.json, else of config.json, else of its text part."""
        config = Fields(self.config)
        text = config.section("text_config") or config
        for fields in (Fields(self.generation_config, "generation_config.json"), config, text):
            if ids := fields.token_ids("eos_token_id"):
                return ids
        return ()

    @property
    def dtype(self) -> str:
        """The dtype that the config declares: bfloat16, float16 or float32. Raises CheckpointError without one."""
        config = Fields(self.config)
        text = config.section("text_config") or config
        fields = text if {"dtype", "torch_dtype"} & text.names else config
        dtype = fields.text("dtype", "torch_dtype")
        if dtype not in _DTYPES:
            raise fields.error("dtype" if "dtype" in fields.names else "torch_dtype", f"must be {', '.join(_DTYPES)}")
        return dtype


def open_model_directory(path: Path) -> ModelDirectory:
    """Read config.json and generation_config.json. Raises CheckpointError if they are not what they must be."""
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path}: not a model directory: it has no config.json")
    config = read_json(path / "config.json")
    generation = path / "generation_config.json"
    architectures = Fields(config).strings("architectures") or ()
    if len(architectures) != 1:
        raise Fields(config).error("architectures", "must name exactly one architecture")
    return ModelDirectory(
        path=path,
        config=config,
        generation_config=read_json(generation) if generation.exists() else {},
        architecture=architectures[0],
        digest=hashlib.sha256((path / "config.json").read_bytes()).hexdigest(),
    )
