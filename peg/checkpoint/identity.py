"""Which checkpoint a directory holds, told by its contents: its name says nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from peg.errors import CheckpointError

_PIECES = 64
_PIECE_BYTES = 4096
_MAX_HEADER_BYTES = 100 << 20  # the format's own limit


def checkpoint_digest(directory: Path) -> str:
    """A sha256, in hex: of config.json, and of the header and many pieces of every safetensors file.

    Names and shapes alone would not tell a fine-tuned model from its base; reading all of the weights would take
    minutes. Raises CheckpointError where there are no weights or a file cannot be read.
    """
    digest = hashlib.sha256()
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{directory}: holds no safetensors files")
    try:
        digest.update((directory / "config.json").read_bytes())
        for path in files:
            for piece in _pieces(path):
                digest.update(piece)
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be read: {error}") from error
    return digest.hexdigest()


def _pieces(path: Path) -> Iterator[bytes]:
    """The file's name, its size, its header, and pieces that are evenly spread over it, from its start to its end."""
    size = path.stat().st_size
    yield f"{path.name} {size} ".encode()
    with path.open("rb") as file:
        yield file.read(8 + _header_bytes(file.read(8)))
        for piece in range(_PIECES + 1):
            file.seek(max(0, size - _PIECE_BYTES) * piece // _PIECES)
            yield file.read(_PIECE_BYTES)


def _header_bytes(head: bytes) -> int:
    return min(int.from_bytes(head, "little"), _MAX_HEADER_BYTES)
