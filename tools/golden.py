#!/usr/bin/env python3
"""Writes what Hugging Face transformers says about a checkpoint, so that later nobody needs it any more.

    .venv/bin/python tools/golden.py MODEL GOLDEN
    .venv/bin/peg parity MODEL --reference GOLDEN

For each prompt of `peg parity`: its ids, the 64 likeliest tokens at every position, and a greedy continuation. Beside
them a digest of the checkpoint's config, headers and weights, and the versions. Repeated, it writes the same bytes.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

import click
import torch

from peg.checkpoint.directory import open_model_directory
from peg.checkpoint.identity import checkpoint_digest
from peg.checkpoint.progress import Silent
from peg.checkpoint.resolve import cache_dir, resolve
from peg.models.registry import find_family
from peg.parity.golden import Golden, write_golden
from peg.parity.prompts import make_prompts
from peg.parity.reference import Transformers


@click.command()
@click.argument("model")
@click.argument("golden", type=click.Path(path_type=Path))
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), help="The checkpoint's own unless said.")
@click.option("--prompts", type=click.IntRange(min=2), default=6, show_default=True, help="How many prompts.")
@click.option("--new-tokens", type=click.IntRange(min=1), default=16, show_default=True, help="Greedy tokens of each.")
def main(model: str, golden: Path, dtype: str | None, prompts: int, new_tokens: int) -> None:
    """Read MODEL, a directory or a packaged model's name, and write the file GOLDEN."""
    make_golden(resolve(model, cache_dir(os.environ), Silent()), golden, dtype, prompts, new_tokens)


def make_golden(model_dir: Path, golden: Path, dtype: str | None, prompts: int, new_tokens: int) -> None:
    """`dtype` None is the one that the checkpoint declares. Raises UsageError."""
    directory = open_model_directory(model_dir)
    dtype = dtype or directory.dtype
    forbidden_ids = find_family(directory.architecture).parse(directory.config).forbidden_token_ids
    texts = make_prompts(model_dir, prompts, new_tokens, None).texts
    reference = Transformers(model_dir, dtype)
    write_golden(
        golden,
        Golden(
            checkpoint=checkpoint_digest(model_dir),
            dtype=dtype,
            versions={
                "transformers": reference.version,
                "torch": str(torch.__version__),
                "python": platform.python_version(),
            },
            readings=tuple(reference.read(texts, new_tokens, forbidden_ids)),
        ),
    )


if __name__ == "__main__":
    main()
