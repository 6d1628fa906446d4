"""The fields of a config file, read strictly: a wrong type or an unknown value is refused by name, never guessed at."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from peg.errors import CheckpointError

_T = TypeVar("_T")


class Fields:
    """One JSON object of a model directory.

    Every reader takes the spellings of one field; a null counts as absent, and two spellings that are both there
    must agree. A reader without a default raises CheckpointError if the field is absent. Read-only, any thread.
    """

    def __init__(self, values: Mapping[str, object], source: str = "config.json", prefix: str = "") -> None:
        self._values = values
        self._source = source
        self._prefix = prefix

    @property
    def names(self) -> frozenset[str]:
        """The fields that are there and not null."""
        return frozenset(name for name, value in self._values.items() if value is not None)

    def integer(self, *names: str, default: int | None = None, minimum: int = 1) -> int:
        """An integer of at least `minimum`."""
        value = self.optional_integer(*names, minimum=minimum)
        return self._required(names, default if value is None else value)

    def optional_integer(self, *names: str, minimum: int = 1) -> int | None:
        """As `integer`, None where the field is absent."""
        name, value = self._find(names)
        if value is None or (type(value) is int and value >= minimum):
            return value
        raise self.error(name, f"must be an integer of at least {minimum}")

    def number(self, *names: str, default: float | None = None) -> float:
        """A finite number above zero."""
        value = self.optional_number(*names)
        return self._required(names, default if value is None else value)

    def optional_number(self, *names: str) -> float | None:
        """As `number`, None where the field is absent."""
        name, value = self._find(names)
        if value is None:
            return None
        # By way of text, because an integer may be too large for a float: then it is infinite.
        if type(value) in (int, float) and math.isfinite(number := float(str(value))) and number > 0:
            return number
        raise self.error(name, "must be a finite number above zero")

    def boolean(self, *names: str, default: bool | None = None) -> bool:
        """True or false."""
        name, value = self._find(names)
        if value is None or isinstance(value, bool):
            return self._required(names, default if value is None else value)
        raise self.error(name, "must be true or false")

    def text(self, *names: str, default: str | None = None) -> str:
        """A string."""
        name, value = self._find(names)
        if value is None or isinstance(value, str):
            return self._required(names, default if value is None else value)
        raise self.error(name, "must be a string")

    def strings(self, *names: str) -> tuple[str, ...] | None:
        """A list of strings, None where the field is absent."""
        name, value = self._find(names)
        if value is None:
            return None
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise self.error(name, "must be a list of strings")

    def token_ids(self, *names: str) -> tuple[int, ...]:
        """Token ids, written as one integer or as a list of them; empty where the field is absent."""
        name, value = self._find(names)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if all(type(item) is int and item >= 0 for item in ids):
            return tuple(ids)
        raise self.error(name, "must be a token id or a list of token ids")

    def section(self, *names: str) -> Fields | None:
        """A nested object, None where the field is absent."""
        name, value = self._find(names)
        if value is None:
            return None
        if isinstance(value, dict):
            return Fields(value, self._source, f"{self._prefix}{name}.")
        raise self.error(name, "must be an object")

    def expect(self, name: str, *allowed: object) -> None:
        """Refuse any value of a field that changes the computation but those in `allowed`. Absent is allowed."""
        value = self._values.get(name)
        if value is None or any(_same(value, choice) for choice in allowed):
            return
        raise self.error(name, f"peg supports only {', '.join(map(json.dumps, allowed)) or 'null'}")

    def error(self, name: str, rule: str) -> CheckpointError:
        """The error for one field: its file, path and value, and the rule it breaks."""
        value = json.dumps(self._values.get(name))
        shown = value if len(value) <= 120 else f"{value[:117]}..."
        return CheckpointError(f"{self._source}: {self._prefix}{name} is {shown}: {rule}")

    def _find(self, names: tuple[str, ...]) -> tuple[str, object]:
        found = [(name, self._values[name]) for name in names if self._values.get(name) is not None]
        for name, value in found[1:]:
            if not _same(value, found[0][1]):
                raise self.error(name, f"{self._prefix}{found[0][0]} means the same and is {json.dumps(found[0][1])}")
        return found[0] if found else (names[0], None)

    def _required(self, names: tuple[str, ...], value: _T | None) -> _T:
        if value is None:
            raise CheckpointError(f"{self._source}: {self._prefix}{names[0]} is missing")
        return value


def read_json(path: Path) -> dict[str, object]:
    """The object in a JSON file. Raises CheckpointError, naming the file, for anything else."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, holds {type(values).__name__}")
    return values


def _same(left: object, right: object) -> bool:
    """Equality as JSON has it: true is not 1, but 1 is 1.0."""
    return left == right and isinstance(left, bool) == isinstance(right, bool)
