"""What a model's output consists of, once its markup is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    """More of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call begins. Calls of one output count from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the JSON text of a call's arguments. What the model leaves unfinished stays unfinished here."""

    index: int
    text: str


Event: TypeAlias = Content | Reasoning | ToolCall | Arguments
