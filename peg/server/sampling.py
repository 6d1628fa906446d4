"""From a request's fields to what the engine samples with. What peg cannot honour is refused here, by name."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from peg.errors import CheckpointError
from peg.plan import SamplingParams
from peg.server.errors import invalid
from peg.server.types import GenerationRequest

T = TypeVar("T", int, float)

_LOWEST_TEMPERATURE = 0.01  # below it the softmax of bf16 logits overflows; 0 itself is greedy

# Fields that are known but not built: the values that change nothing are accepted, every other one is refused.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "spaces_between_special_tokens": (True,),
    "cache_salt": (),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "suffix": ("",),
}


class SamplingDefaults(Struct, frozen=True, kw_only=True):
    """What applies where a request says nothing: the checkpoint's generation_config.json over OpenAI's defaults."""

    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0)] = 1.0

    @classmethod
    def load(cls, model_dir: Path) -> SamplingDefaults:
        """From `model_dir`. Raises CheckpointError for a file that cannot be read or values that cannot be honoured."""
        path = model_dir / "generation_config.json"
        if not path.exists():
            return cls()
        try:
            found = msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw])
            named = {
                name: raw for name, raw in found.items() if name in cls.__struct_fields__ and bytes(raw) != b"null"
            }
            return msgspec.json.decode(msgspec.json.encode(named), type=cls)
        except (OSError, msgspec.MsgspecError) as error:
            hint = "--generation-config none starts without the file's values"
            raise CheckpointError(f"{path}: {error}; {hint}") from None


def refuse_unsupported(request: GenerationRequest) -> None:
    """Refuse the first field that asks for something peg does not do."""
    for name, neutral in _NEUTRAL.items():
        value = getattr(request, name, None)
        if value is not None and value not in neutral:
            raise invalid(f"{name}: this value is not supported, only {_listed(neutral)}", name, "unsupported_value")


def sampling_params(request: GenerationRequest, defaults: SamplingDefaults, seed: int) -> SamplingParams:
    """The request's sampling parameters, the defaults filled in."""
    temperature = _chosen(request.temperature, defaults.temperature)
    return SamplingParams(
        temperature=max(temperature, _LOWEST_TEMPERATURE) if temperature else 0.0,
        top_k=max(0, _chosen(request.top_k, defaults.top_k)),
        top_p=_chosen(request.top_p, defaults.top_p),
        min_p=_chosen(request.min_p, defaults.min_p),
        seed=seed,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=_chosen(request.repetition_penalty, defaults.repetition_penalty),
        min_tokens=request.min_tokens or 0,
    )


def choice_seed(seed: int, index: int) -> int:
    """The seed of a request's choice: its own for the first, so that n = 1 and n = 2 begin alike; int64."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _chosen(asked: T | None, default: T) -> T:
    return default if asked is None else asked


def _listed(neutral: tuple[object, ...]) -> str:
    return " or ".join(msgspec.json.encode(value).decode() for value in (*neutral, None))
