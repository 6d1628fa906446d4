"""Ids that no token has: found in the tokenizer's file, neither sampled nor taken in a prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from peg.checkpoint.vocabulary import ids_without_token
from peg.config import EngineConfig
from peg.errors import CheckpointError
from peg.ranks.blueprint import draw_blueprint
from tests.unit.small_tokenizers import byte_level
from tests.unit.tiny_group import write_config


def test_the_padding_has_no_tokens(tmp_path: Path) -> None:
    """Everything past the tokenizer's last id, added tokens counted in; nothing where there is no tokenizer."""
    assert ids_without_token(tmp_path, 304) == ()
    byte_level().save(str(tmp_path / "tokenizer.json"))
    assert ids_without_token(tmp_path, 304) == tuple(range(295, 304))
    assert ids_without_token(tmp_path, 295) == ()


@pytest.mark.parametrize(
    ("vocab", "unused"),
    [({"a": 0, "b": 2}, (1, 4)), ([["a", -1.0], ["b", -2.0]], (2, 4)), ({}, (0, 1, 2, 4))],
)
def test_holes_are_found(tmp_path: Path, vocab: Any, unused: tuple[int, ...]) -> None:
    """Vocabularies of both shapes, with ids left out."""
    document = {"model": {"type": "x", "vocab": vocab, "merges": []}, "added_tokens": [{"id": 3, "content": "<x>"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    assert ids_without_token(tmp_path, 5) == unused


def test_a_file_that_is_none_is_told(tmp_path: Path) -> None:
    """By its path."""
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": "b"}}}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        ids_without_token(tmp_path, 5)


def test_ranks_are_told(tmp_path: Path) -> None:
    """What every rank masks, and the engine refuses in prompts, is settled before a rank starts."""
    write_config(tmp_path, vocab_size=304)
    config = EngineConfig(model="tiny", model_dir=tmp_path, load_format="dummy")
    assert draw_blueprint(config).forbidden_token_ids == ()
    byte_level().save(str(tmp_path / "tokenizer.json"))
    drawn = draw_blueprint(config)
    assert drawn.forbidden_token_ids == tuple(range(295, 304))
    assert drawn.describe((), ("cpu",), "solo", ()).forbidden_token_ids == drawn.forbidden_token_ids
