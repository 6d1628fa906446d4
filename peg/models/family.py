"""What every model family offers, and what its loaded model does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from torch import Tensor

from peg.checkpoint.manifest import Manifest
from peg.checkpoint.source import TensorSource
from peg.models.comm import Communicator
from peg.models.inputs import LayerCache, StepInputs
from peg.plan import KVGroup


class FamilyConfig(Protocol):
    """A parsed config.json, frozen; besides these it holds what only its family reads.

    `forbidden_token_ids` stand for images or sound: refused in prompts, never sampled.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def max_positions(self) -> int: ...

    @property
    def forbidden_token_ids(self) -> tuple[int, ...]: ...


class Model(Protocol):
    """One rank's shard of a loaded model. Owned by the rank's thread."""

    def forward(self, inputs: StepInputs, caches: Sequence[LayerCache], comm: Communicator) -> Tensor:
        """Run all layers; `caches` is indexed by layer. Returns hidden [T, M] after the final norm, the same on
        every rank.
        """  # noqa: D205

    def logits(self, hidden: Tensor) -> Tensor:
        """This rank's part of the vocabulary for hidden [rows, M]: float32 [rows, V/R].

        Rank r holds the ids from r · V/R on. V is padded to a multiple of R; the padding is −inf.
        """


class Family(Protocol):
    """A model family, as a class: `config` is always what its own `parse` returned.

    `dtypes` are those it computes rightly in.
    """

    dtypes: ClassVar[tuple[str, ...]]

    @staticmethod
    def parse(config: Mapping[str, object]) -> Any:
        """Read config.json strictly into a `FamilyConfig`. Raises CheckpointError for what peg cannot run."""

    @staticmethod
    def manifest(config: Any) -> Manifest:
        """Every tensor that the files must hold."""

    @staticmethod
    def kv_groups(config: Any, world_size: int) -> tuple[KVGroup, ...]:
        """The layers that cache alike. Raises ConfigError, with the arithmetic, if the heads do not divide."""

    @classmethod
    def load(cls, config: Any, source: TensorSource) -> Model:
        """Read one rank's weights into their final form."""
