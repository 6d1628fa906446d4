"""A small random checkpoint in true Hugging Face layout, to try a set-up on without downloading anything."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from peg.checkpoint.dummy import DummySource
from peg.checkpoint.manifest import Manifest
from peg.checkpoint.source import Placement
from peg.checkpoint.synth_config import RECIPES, TEXT_PREFIX, SynthOptions, synth_config
from peg.checkpoint.synth_text import TOKENS, build_tokenizer, role_ids, tokenizer_config
from peg.errors import CheckpointError, ConfigError

_DUMMY_DEVIATION = 0.02
_NORM_DEVIATION = 0.2


def write_synthetic(target: Path, options: SynthOptions, manifest: Callable[[Mapping[str, object]], Manifest]) -> None:
    """Write the model directory `target`, which must not exist; the same bytes for the same options.

    `manifest` says which tensors a config calls for. Raises ConfigError for options that do not go together,
    CheckpointError where the directory cannot be written.
    """
    if target.exists():
        raise CheckpointError(f"{target}: already exists")
    config, texts = _texts(options)
    tensors = _tensors(options, manifest(config))
    if options.shards > len(tensors):
        raise ConfigError(f"--shards {options.shards}: there are {len(tensors)} tensors")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as parent:
            directory = Path(parent) / "model"  # not `parent` itself: that one is closed to everybody else
            directory.mkdir()
            for name, text in texts.items():
                (directory / name).write_text(text, encoding="utf-8")
            _write_weights(directory, tensors, options.shards)
            directory.rename(target)
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be written: {error}") from error


def _texts(options: SynthOptions) -> tuple[dict[str, object], dict[str, str]]:
    """config.json as an object, and every file that is not weights."""
    tokens = TOKENS[RECIPES[options.family].tokens]
    tokenizer = build_tokenizer(tokens)
    known = tokenizer.get_vocab_size()
    vocab_size = known if options.vocab_size is None else options.vocab_size
    if vocab_size < known:
        raise ConfigError(f"--vocab-size {vocab_size}: the tokenizer has {known} tokens")
    config = synth_config(options, vocab_size, role_ids(tokens, tokenizer))
    generation = {"eos_token_id": [tokenizer.token_to_id(token) for token in tokens.ends], "do_sample": True}
    return config, {
        "config.json": _json(config),
        "generation_config.json": _json(generation),
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": _json(tokenizer_config(tokens)),
        "chat_template.jinja": tokens.template,
    }


def _json(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"


def _tensors(options: SynthOptions, manifest: Manifest) -> dict[str, Tensor]:
    """Every required tensor by its name in the file, and one that stands for the vision tower where there is one."""
    dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[options.dtype]
    source = DummySource(replace(manifest, means=()), options.seed, Placement(0, 1, torch.float32, torch.device("cpu")))
    tensors = {}
    for spec in manifest.required:
        scaled = _scaled(source.whole(spec.name), near_one=manifest.mean(spec.name) > 0)
        tensors[_spelled(options, manifest, spec.name)] = scaled.to(dtype)
    if options.prefix != TEXT_PREFIX:
        tower = "model.vision_tower." if options.prefix.startswith("model.") else "vision_tower."
        assert tower in manifest.skipped_prefixes, tower
        tensors[f"{tower}vision_model.post_layernorm.weight"] = torch.ones(8, dtype=dtype)
    return tensors


def _spelled(options: SynthOptions, manifest: Manifest, name: str) -> str:
    """A tensor's name in the file."""
    if options.prefix == TEXT_PREFIX or not name.startswith(TEXT_PREFIX):
        return name
    if (options.prefix, TEXT_PREFIX) not in manifest.renamed_prefixes:
        raise ConfigError(f"--prefix {options.prefix}: no files of {options.family} have it")
    return options.prefix + name.removeprefix(TEXT_PREFIX)


def _scaled(noise: Tensor, *, near_one: bool) -> Tensor:
    """Noise brought to a size at which every tensor matters: products keep their scale, norms are about one."""
    noise = noise.div_(_DUMMY_DEVIATION)
    if noise.dim() > 1:
        return noise.mul_(noise.shape[-1] ** -0.5)
    return noise.mul_(_NORM_DEVIATION).add_(1 if near_one else 0)


def _write_weights(directory: Path, tensors: Mapping[str, Tensor], shards: int) -> None:
    """One file, or several of about the same number of tensors and the index that names them."""
    names = sorted(tensors)
    files = ["model.safetensors"]
    if shards > 1:
        files = [f"model-{number:05}-of-{shards:05}.safetensors" for number in range(1, shards + 1)]
        weight_map = {name: files[place * shards // len(names)] for place, name in enumerate(names)}
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(_json(index), encoding="utf-8")
    for number, file in enumerate(files):
        held = {name: tensors[name] for place, name in enumerate(names) if place * shards // len(names) == number}
        save_file(held, directory / file, metadata={"format": "pt"})
        (directory / file).chmod(0o644)  # the library closes it to everybody else
