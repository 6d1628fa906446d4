"""A whole session: every arm is read, every gate judged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from peg.checkpoint.identity import checkpoint_digest
from peg.config import EngineConfig
from peg.errors import ConfigError, EngineUnavailable
from peg.parity.arm import ArmReading, read_arm
from peg.parity.gates import Verdict, drift, equal, near, near_continued
from peg.parity.golden import Golden, read_golden
from peg.parity.lines import LINES, Lines
from peg.parity.prompts import make_prompts
from peg.parity.reading import Reading
from peg.parity.reference import Transformers
from peg.plan import EngineInfo

TRANSFORMERS = "transformers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to compare. `reference` is None, `transformers` or the path of a golden file."""

    prompts: int = 6
    new_tokens: int = 16
    reference: str | None = None


class Session:
    """One rank against itself, against all ranks, and either against the reference. Owned by the loop.

    `info` is that of the last engine that was started, None before the first.
    """

    def __init__(self, config: EngineConfig, wanted: Wanted) -> None:
        """Raises UsageError for a reference that cannot be had, or that is another checkpoint's."""
        dummy = config.load_format == "dummy"
        if dummy and wanted.reference is not None:
            raise ConfigError(f"--reference {wanted.reference}: random weights have none")
        self.checkpoint = f"random weights of seed {config.seed}" if dummy else checkpoint_digest(config.model_dir)
        self.info: EngineInfo | None = None
        self._golden = _open_golden(wanted.reference)
        if self._golden is not None:
            config = replace(config, dtype=self._golden.dtype if config.dtype == "auto" else config.dtype)
            self._golden.refuse_other(self.checkpoint, config.dtype)
        self._config = config
        self._wanted = wanted
        self._prompts = make_prompts(config.model_dir, wanted.prompts, wanted.new_tokens, config.max_model_len)
        self._new_tokens = wanted.new_tokens
        if self._golden is not None:
            texts = tuple(reading.prompt_ids for reading in self._golden.readings)
            self._prompts = replace(self._prompts, texts=texts)
            self._new_tokens = len(self._golden.readings[0].greedy)

    async def verdicts(self) -> AsyncIterator[Verdict]:
        """Each as soon as it is known; a run that fails is the last. Raises UsageError for what cannot be started."""
        try:
            async for verdict in self._read():
                yield verdict
        except EngineUnavailable as error:
            yield Verdict("every run ends", (str(error),))

    async def _read(self) -> AsyncIterator[Verdict]:
        size = self._config.tensor_parallel_size
        one, again = await self._arm(1, passes=2)
        arms = {"one rank": one}
        yield equal("one rank, twice", one.every, again.every)
        for verdict in self._near("one rank, alone or in a batch", [one.solo], one.batch[:1]):
            yield verdict
        yield near("one rank, in front of more text", one.fronts[:1], one.fronts[1:], self._lines)
        if size > 1:
            name = f"{size} ranks"
            (many,) = await self._arm(size, passes=1)
            arms[name] = many
            for verdict in self._near(f"{name} or one", many.every, one.every):
                yield verdict
            for verdict in self._near(f"{name}, alone or in a batch", [many.solo], many.batch[:1]):
                yield verdict
            yield drift(f"{name}, in front of more text", many.fronts, one.fronts, self._lines)
        if self._wanted.reference is not None:
            expected = await asyncio.to_thread(self._expected)
            for name, arm in arms.items():
                for verdict in self._near(f"{name} or the reference", arm.batch, expected):
                    yield verdict

    def _near(self, gate: str, one: Sequence[Reading], other: Sequence[Reading]) -> tuple[Verdict, Verdict]:
        """Over prompts, and over what was generated."""
        return near(gate, one, other, self._lines), near_continued(f"{gate}, continued", one, other, self._lines)

    @property
    def _lines(self) -> Lines:
        assert self.info is not None
        return LINES[self.info.dtype]

    async def _arm(self, size: int, passes: int) -> list[ArmReading]:
        devices = self._config.devices if self._config.devices == ("cpu",) else self._config.devices[:size]
        config = replace(self._config, tensor_parallel_size=size, devices=devices)
        self.info, readings = await read_arm(config, self._prompts, self._new_tokens, passes)
        return readings

    def _expected(self) -> tuple[Reading, ...]:
        assert self.info is not None
        if self._golden is not None:
            return self._golden.readings
        model = Transformers(self._config.model_dir, self.info.dtype)
        return tuple(model.read(self._prompts.texts, self._new_tokens, self.info.forbidden_token_ids))


def _open_golden(reference: str | None) -> Golden | None:
    return None if reference in (None, TRANSFORMERS) else read_golden(Path(str(reference)))
