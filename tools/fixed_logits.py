"""Writes a checkpoint whose next-token distribution never changes: all of peg but the model's mind, exactly known.

    .venv/bin/python tools/fixed_logits.py DIR
    .venv/bin/peg serve DIR --max-model-len 64

It is a small Llama in true layout. All embeddings are the same vector and neither attention nor MLP adds to it, so the
head sees the same hidden state at every position, and its rows say which logits come of it.
"""

from __future__ import annotations

import json
from pathlib import Path

import click
import torch
from safetensors.torch import load_file, save_file

from peg.checkpoint.synth_config import SynthOptions
from peg.commands.synth import synth
from peg.text.tokenizer import Tokenizer

LIKELIEST = " the"  # what greedy sampling says, for ever
_SEED = 7


def write_fixed_logits(target: Path) -> None:
    """Write the model directory `target`, which must not exist."""
    synth(SynthOptions(family="llama", dtype="float32"), target)
    config = json.loads((target / "config.json").read_text("utf-8")) | {"tie_word_embeddings": False}
    (target / "config.json").write_text(json.dumps(config), "utf-8")
    weights = load_file(target / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        elif name.endswith("norm.weight"):
            tensor.fill_(1)
    embedding.zero_()[:, 0] = embedding.shape[1] ** 0.5  # of mean square 1, which the norm leaves as it is
    head = torch.zeros_like(embedding)
    head[:, 0] = fixed_logits(target) / head.shape[1] ** 0.5
    save_file({**weights, "lm_head.weight": head}, target / "model.safetensors", metadata={"format": "pt"})


def fixed_logits(directory: Path) -> torch.Tensor:
    """float32 [V]: a few nats apart, LIKELIEST first of all, and the end likely enough to be sampled often."""
    tokenizer = Tokenizer.load(directory)
    vocab_size = json.loads((directory / "config.json").read_text("utf-8"))["vocab_size"]
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(_SEED))
    logits[list(tokenizer.special_ids)] = 2.0
    logits[tokenizer.encode(LIKELIEST)] = 5.0
    return logits


@click.command(help=__doc__)
@click.argument("target", type=click.Path(path_type=Path))
def main(target: Path) -> None:
    write_fixed_logits(target)


if __name__ == "__main__":
    main()
