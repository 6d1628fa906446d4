"""The small text files of a model directory, as the text zone reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peg.errors import CheckpointError

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; an empty one where there is no such file.

    Raises CheckpointError for a file that cannot be read or holds anything else.
    """
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must be a JSON object, is a {type(value).__name__}")
    return value


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that tokenizer_config.json names (`bos_token` and so on), as text.

    A token is written as a string or as an object with `content`. Raises CheckpointError for anything else.
    """
    named: dict[str, str] = {}
    for name in SPECIAL_NAMES:
        value = config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            named[name] = content
        elif value is not None:
            raise CheckpointError(f"tokenizer_config.json: {name} must be text, is {value!r}")
    return named
