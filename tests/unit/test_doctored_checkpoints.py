"""Checkpoints that are not what they must be: each is refused by the name of its fault, before a weight is read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from peg.checkpoint.reader import ShardReader
from peg.checkpoint.synth_config import SynthOptions
from peg.commands.synth import synth
from peg.config import EngineConfig
from peg.errors import CheckpointError
from peg.ranks.group import RankGroup

NORM, DOWN = "model.layers.1.input_layernorm.weight", "model.layers.2.mlp.down_proj.weight"
SHARD = "model-00002-of-00002.safetensors"
Doctor = Callable[[Path], object]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("synth") / "model"
    synth(SynthOptions(family="gemma4-31b", shards=2), directory)
    return directory


def tensors(change: Callable[[dict[str, Tensor]], object], to: str = SHARD) -> Doctor:
    """Change what a shard holds."""

    def doctor(directory: Path) -> None:
        held = {name: tensor.clone() for name, tensor in load_file(directory / to).items()}
        change(held)
        save_file(held, directory / to, {"format": "pt"})

    return doctor


def replaced(name: str, make: Callable[[Tensor], Tensor]) -> Doctor:
    return tensors(lambda held: held.update({name: make(held[name])}))


def config(change: Callable[[dict[str, Any]], object]) -> Doctor:
    def doctor(directory: Path) -> None:
        value = json.loads((directory / "config.json").read_text())
        change(value)
        (directory / "config.json").write_text(json.dumps(value))

    return doctor


def truncate(directory: Path) -> None:
    path = directory / SHARD
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("doctor", "faults"),
    [
        pytest.param(lambda path: (path / SHARD).unlink(), (SHARD, "it is not there"), id="missing shard"),
        pytest.param(truncate, (SHARD, "truncated or damaged"), id="truncated shard"),
        pytest.param(tensors(lambda held: held.pop(DOWN)), (DOWN, "not in", "missing"), id="missing tensor"),
        pytest.param(tensors(lambda held: held.update(extra=torch.ones(3))), ("extra: unexpected",), id="extra tensor"),
        pytest.param(
            replaced(DOWN, lambda tensor: tensor[:, 1:].clone()),
            (DOWN, "shape [64, 129], must be [64, 130]"),
            id="wrong shape",
        ),
        pytest.param(
            replaced(DOWN, lambda tensor: tensor.to(torch.int8)), (DOWN, "dtype I8, must be"), id="wrong dtype"
        ),
        pytest.param(
            config(lambda value: value.update(tie_word_embeddings=False)),
            ("lm_head.weight: missing",),
            id="untied without a head",
        ),
        pytest.param(
            tensors(lambda held: held.update({"lm_head.weight": torch.ones(3)})),
            ("lm_head.weight: unexpected",),
            id="tied with a head",
        ),
        pytest.param(
            config(lambda value: value["rope_parameters"]["full_attention"].update(rope_type="spiral")),
            ("rope_parameters.full_attention", "spiral"),
            id="unknown rope type",
        ),
        pytest.param(
            config(lambda value: value["layer_types"].pop()),
            ("layer_types", "for each of 4 layers"),
            id="too few layer types",
        ),
        pytest.param(
            config(lambda value: value.update(hidden_activation="relu")),
            ("hidden_activation", "relu"),
            id="unknown value of a field",
        ),
    ],
)
def test_a_fault_is_named_before_a_weight_is_read(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, doctor: Doctor, faults: tuple[str, ...]
) -> None:
    """Starting the ranks is refused; the message names the tensor, file or field, and what is wrong with it."""
    directory = tmp_path / "model"
    shutil.copytree(whole, directory)
    doctor(directory)
    read: list[object] = []
    monkeypatch.setattr(ShardReader, "__init__", lambda *given: read.append(given))
    with pytest.raises(CheckpointError) as refusal:
        start(directory)
    assert not read
    for fault in faults:
        assert fault in str(refusal.value)


def start(directory: Path) -> None:
    """As the engine does."""
    config = EngineConfig(model="doctored", model_dir=directory, tensor_parallel_size=2)
    group = RankGroup(config, on_result=print, on_failure=print, may_publish=bool)
    group.start(60.0)
    group.close(5.0)


def test_what_was_not_doctored_is_read(whole: Path) -> None:
    """The same checkpoint as it is starts: nothing above is refused for another reason."""
    start(whole)
