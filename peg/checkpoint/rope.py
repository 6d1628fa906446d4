"""Rotary position embedding parameters, in both spellings that config files have for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from peg.checkpoint.fields import Fields

_KEYS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
_ALWAYS = ("rope_type", "type", "rope_theta")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeParameters:
    """How one kind of layer rotates q and k.

    `rope_type` is default, linear (every frequency divided by `factor`) or llama3 (low frequencies divided by
    `factor`, high ones kept, a linear blend between; Llama 3.1). What a type does not use keeps its default.
    """

    rope_type: str = "default"
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0


def read_rope(
    fields: Fields,
    kind: str | None = None,
    *,
    theta_field: str = "rope_theta",
    scaled: bool = True,
    default_theta: float = 10_000.0,
) -> RopeParameters:
    """The parameters of one kind of layer, from `rope_parameters` or from `theta_field` and `rope_scaling`.

    With `kind`, `rope_parameters` holds one object for each kind of layer; `scaled` false says that the older
    `rope_scaling` is not meant for this kind. Raises CheckpointError for any other type and for unknown keys.
    """
    newer = fields.section("rope_parameters")
    if newer is not None and kind is not None:
        nested = newer.section(kind)
        if nested is None:
            raise newer.error(kind, "rope parameters of this kind of layer are required")
        newer = nested
    older = fields.section("rope_scaling") if scaled else None
    theta = fields.optional_number(theta_field)
    if newer is None:
        return _parse(older, theta or default_theta)
    parameters = _parse(newer, theta or default_theta)
    if theta is not None and theta != parameters.theta:
        raise fields.error(theta_field, f"rope_parameters.rope_theta means the same and is {parameters.theta}")
    if older is not None and _parse(older, parameters.theta) != parameters:
        raise fields.error("rope_scaling", "rope_parameters means the same and differs")
    return parameters


def _parse(scaling: Fields | None, theta: float) -> RopeParameters:
    if scaling is None:
        return RopeParameters(theta=theta)
    rope_type = scaling.text("rope_type", "type", default="default")
    if rope_type not in _KEYS:
        name = "rope_type" if "rope_type" in scaling.names else "type"
        raise scaling.error(name, f"peg supports only {', '.join(_KEYS)}")
    unknown = sorted(scaling.names - set(_KEYS[rope_type]) - set(_ALWAYS))
    if unknown:
        raise scaling.error(unknown[0], f"not a parameter of rope type {rope_type}")
    theta = scaling.number("rope_theta", default=theta)
    if rope_type == "default":
        return RopeParameters(theta=theta)
    factor = scaling.number("factor")
    if rope_type == "linear":
        return RopeParameters(rope_type="linear", theta=theta, factor=factor)
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if not low < high:
        raise scaling.error("high_freq_factor", f"must be above low_freq_factor, {low}")
    return RopeParameters(
        rope_type="llama3",
        theta=theta,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=scaling.integer("original_max_position_embeddings"),
    )
