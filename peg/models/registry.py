"""Which class runs which architecture, by the name in config.json."""

from __future__ import annotations

from collections.abc import Mapping

from peg.errors import CheckpointError
from peg.models.family import Family
from peg.models.llama import Llama

FAMILIES: Mapping[str, type[Family]] = {
    "LlamaForCausalLM": Llama,
}


def find_family(architecture: str) -> type[Family]:
    """The class for an architecture. Raises CheckpointError, naming those that peg runs."""
    family = FAMILIES.get(architecture)
    if family is None:
        raise CheckpointError(f"config.json: architecture {architecture}: peg runs {', '.join(FAMILIES)}")
    return family
