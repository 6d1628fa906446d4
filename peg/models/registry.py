"""Which class runs which architecture, by the name in config.json."""

from __future__ import annotations

from collections.abc import Mapping

from peg.errors import CheckpointError
from peg.models.family import Family
from peg.models.gemma3 import Gemma3
from peg.models.gemma4 import Gemma4
from peg.models.llama import Llama
from peg.models.qwen3 import Qwen3

FAMILIES: Mapping[str, type[Family]] = {
    "Gemma3ForCausalLM": Gemma3,
    "Gemma3ForConditionalGeneration": Gemma3,
    "Gemma4ForCausalLM": Gemma4,
    "Gemma4ForConditionalGeneration": Gemma4,
    "Gemma4UnifiedForCausalLM": Gemma4,
    "Gemma4UnifiedForConditionalGeneration": Gemma4,
    "LlamaForCausalLM": Llama,
    "Qwen3ForCausalLM": Qwen3,
}


def find_family(architecture: str) -> type[Family]:
    """The class for an architecture. Raises CheckpointError, naming those that peg runs."""
    family = FAMILIES.get(architecture)
    if family is None:
        raise CheckpointError(f"config.json: architecture {architecture}: peg runs {', '.join(FAMILIES)}")
    return family
