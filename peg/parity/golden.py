"""Golden files: what the reference said about a checkpoint, kept, so that nobody needs it again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peg.checkpoint.fields import Fields, read_json
from peg.errors import CheckpointError, ConfigError
from peg.parity.reading import Reading
from peg.plan import TokenLogprobs

_FORMAT = "peg-golden-1"
_DECIMALS = 6  # finer than any line, and coarser than what differs between two machines' last bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    """A golden file. `checkpoint` is the digest of the checkpoint that was read; `versions` are for people."""

    checkpoint: str
    dtype: str
    versions: Mapping[str, str]
    readings: tuple[Reading, ...]

    def refuse_other(self, checkpoint: str, dtype: str) -> None:
        """Raise ConfigError where another checkpoint or dtype is to be compared."""
        if self.checkpoint != checkpoint:
            raise ConfigError(f"--reference: made from checkpoint {self.checkpoint}, this one is {checkpoint}")
        if self.dtype != dtype:
            raise ConfigError(f"--reference: made in {self.dtype}, the ranks run in {dtype}: say --dtype {self.dtype}")


def write_golden(path: Path, golden: Golden) -> None:
    """Write a file; the same bytes for the same numbers."""
    value = {
        "format": _FORMAT,
        "checkpoint": golden.checkpoint,
        "dtype": golden.dtype,
        "versions": dict(golden.versions),
        "readings": [_reading_json(reading) for reading in golden.readings],
    }
    path.write_text(json.dumps(value, separators=(",", ":")) + "\n", encoding="utf-8")


def read_golden(path: Path) -> Golden:
    """Read a file. Raises CheckpointError for anything else than a golden file."""
    value: dict[str, Any] = read_json(path)
    fields = Fields(value, str(path))
    fields.expect("format", _FORMAT)
    try:
        return Golden(
            checkpoint=fields.text("checkpoint"),
            dtype=fields.text("dtype"),
            versions=dict(value["versions"]),
            readings=tuple(_reading(f"prompt {index}", item) for index, item in enumerate(value["readings"])),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: not a golden file: {error!r}") from error


def _reading_json(reading: Reading) -> dict[str, object]:
    return {
        "prompt_ids": reading.prompt_ids,
        "scored": [_entry_json(entry) for entry in reading.scored],
        "greedy": [_entry_json(entry) for entry in reading.greedy],
    }


def _entry_json(entry: TokenLogprobs) -> list[object]:
    top = [number for token, logprob in entry.top for number in (token, round(logprob, _DECIMALS))]
    return [entry.token_id, round(entry.logprob, _DECIMALS), entry.rank, top]


def _reading(name: str, value: Mapping[str, Any]) -> Reading:
    prompt = tuple(map(int, value["prompt_ids"]))
    scored, greedy = (tuple(map(_entry, value[part])) for part in ("scored", "greedy"))
    if len(scored) != len(prompt) - 1:
        raise ValueError(f"{len(prompt)} prompt tokens have {len(scored)} entries")
    return Reading(name, prompt, scored, greedy)


def _entry(value: Sequence[Any]) -> TokenLogprobs:
    token, logprob, rank, top = value
    pairs = zip(map(int, top[::2]), map(float, top[1::2]), strict=True)
    return TokenLogprobs(int(token), float(logprob), int(rank), tuple(pairs))
