"""Which tensors a checkpoint must hold: derived from the config, compared with the files before anything is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FLOAT_DTYPES = ("BF16", "F16", "F32")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One expected tensor. `dtypes` are the safetensors names of those that the model can take."""

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOAT_DTYPES


@dataclass(frozen=True, slots=True)
class Manifest:
    """All that a model's files may hold.

    Every tensor of `required` must be there, those of `optional` may be. A name that starts with one of
    `skipped_prefixes` is not looked at (parts of a checkpoint that peg does not run, such as a vision tower).
    `renamed_prefixes` are (prefix in the file, prefix here), where files spell a prefix in more than one way. For
    weights that are made up, `means` are (end of a name, what its numbers are about), the first that fits; 0 else.
    """

    required: tuple[TensorSpec, ...]
    optional: tuple[TensorSpec, ...] = ()
    skipped_prefixes: tuple[str, ...] = ()
    renamed_prefixes: tuple[tuple[str, str], ...] = ()
    means: tuple[tuple[str, float], ...] = (("norm.weight", 1.0), ("layer_scalar", 1.0))

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Every tensor, required and optional, by name."""
        return {spec.name: spec for spec in (*self.required, *self.optional)}

    def mean(self, name: str) -> float:
        """What the numbers of a tensor are about, in a model that works."""
        return next((mean for end, mean in self.means if name.endswith(end)), 0.0)

    def canonical(self, name: str) -> str | None:
        """The name here of a name in the file, None for one that is skipped."""
        if name.startswith(self.skipped_prefixes):
            return None
        for theirs, ours in self.renamed_prefixes:
            if name.startswith(theirs):
                return ours + name.removeprefix(theirs)
        return name
