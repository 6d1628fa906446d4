"""`peg synth`: a small random checkpoint of a family that peg runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from peg.checkpoint.manifest import Manifest
from peg.checkpoint.synth import write_synthetic
from peg.checkpoint.synth_config import SynthOptions
from peg.models.registry import find_family


def synth(options: SynthOptions, directory: Path) -> None:
    """Write the checkpoint. Raises UsageError."""

    def manifest(config: Mapping[str, object]) -> Manifest:
        family = find_family(options.architecture)
        return family.manifest(family.parse(config))

    write_synthetic(directory, options, manifest)
