"""Everything about a model that is decided before a rank thread starts: read from files, checked, frozen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from peg.checkpoint.counting import CountingSource
from peg.checkpoint.directory import ModelDirectory, open_model_directory
from peg.checkpoint.dummy import DummySource
from peg.checkpoint.manifest import Manifest
from peg.checkpoint.reader import ShardReader
from peg.checkpoint.source import Placement, TensorSource
from peg.checkpoint.vocabulary import ids_without_token
from peg.checkpoint.weights import StoredTensor, open_weights
from peg.config import EngineConfig
from peg.errors import ConfigError
from peg.models.family import Family
from peg.models.registry import find_family
from peg.plan import EngineInfo, Full, GroupCapacity, KVGroup, Recurrent, SlidingWindow
from peg.ranks.capacity import CapacityRequest, divide_budget
from peg.ranks.machine import has_bf16_instructions

_CPU_MAX_NUM_SEQS = 16
_CPU_MAX_NUM_BATCHED_TOKENS = 512
_CUDA_MAX_NUM_SEQS = 256
_CUDA_MAX_NUM_BATCHED_TOKENS = 2048
_TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """What every rank builds from. `family_config` is what `family.parse` returned.

    `stored` says where each tensor lies, None for random weights of `seed`. `forbidden_token_ids` are neither sampled
    nor taken in a prompt: the family's own, and those that the tokenizer has no token for.
    """

    directory: ModelDirectory
    family: type[Family]
    family_config: Any
    manifest: Manifest
    stored: Mapping[str, StoredTensor] | None
    groups: tuple[KVGroup, ...]
    forbidden_token_ids: tuple[int, ...]
    world_size: int
    dtype: str
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    seed: int
    enforce_eager: bool

    @property
    def torch_dtype(self) -> torch.dtype:
        return _TORCH_DTYPES[self.dtype]

    @property
    def parameters(self) -> int:
        """Numbers in the weights, each counted once."""
        return sum(math.prod(spec.shape) for spec in self.manifest.required)

    def rank_weight_bytes(self, rank: int) -> int:
        """What one rank's weights take, replicated tensors and padding included."""
        source = CountingSource(self.manifest, rank, self.world_size, self.torch_dtype)
        self.family.load(self.family_config, source)
        return source.bytes_held

    def kv_bytes_per_token(self, *, beyond_window: bool) -> int:
        """What one more token takes on one rank; beyond the window the sliding groups give back what they take."""
        return sum(
            group.bytes_per_token(self.torch_dtype.itemsize)
            for group in self.groups
            if isinstance(group, Full) or (isinstance(group, SlidingWindow) and not beyond_window)
        )

    def capacities(self, budget_bytes: int) -> tuple[GroupCapacity, ...]:
        """The pools of one rank within a budget. Raises ConfigError where one whole context does not fit."""
        return divide_budget(self._request, budget_bytes)

    def kv_bytes(self, capacities: Sequence[GroupCapacity]) -> int:
        """What these pools take on one rank."""
        return sum(capacity.num_blocks * self._request.block_bytes(capacity.group) for capacity in capacities)

    def describe(
        self,
        capacities: tuple[GroupCapacity, ...],
        devices: tuple[str, ...],
        communicator: str,
        load_times_s: Sequence[tuple[str, float]],
    ) -> EngineInfo:
        """What the loop and its clients learn, once everything is loaded."""
        return EngineInfo(
            architecture=self.directory.architecture,
            world_size=self.world_size,
            devices=devices,
            communicator=communicator,
            dtype=self.dtype,
            vocab_size=self.family_config.vocab_size,
            eos_token_ids=self.directory.eos_token_ids,
            forbidden_token_ids=self.forbidden_token_ids,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            groups=capacities,
            parameters=self.parameters,
            weight_bytes=self.parameters * self.torch_dtype.itemsize,
            kv_bytes=self.kv_bytes(capacities) * self.world_size,
            load_times_s=tuple(load_times_s),
        )

    @property
    def _request(self) -> CapacityRequest:
        return CapacityRequest(
            groups=self.groups,
            dtype_bytes=self.torch_dtype.itemsize,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )

    def source(self, rank: int, device: torch.device) -> TensorSource:
        """One rank's view of the weights, for its own thread."""
        placement = Placement(rank, self.world_size, self.torch_dtype, device)
        if self.stored is None:
            return DummySource(self.manifest, self.seed, placement)
        return ShardReader(self.stored, placement)


def draw_blueprint(config: EngineConfig) -> Blueprint:
    """Read the model directory and settle what the configuration left open. Raises UsageError; reads no weights."""
    on_cpu = config.devices == ("cpu",)
    directory = open_model_directory(config.model_dir)
    family = find_family(directory.architecture)
    family_config = family.parse(directory.config)
    groups = family.kv_groups(family_config, config.tensor_parallel_size)
    if any(isinstance(group, Recurrent) for group in groups):
        raise ConfigError(f"{directory.architecture}: layers with a recurrent state cannot be run so far")
    manifest = family.manifest(family_config)
    blueprint = Blueprint(
        directory=directory,
        family=family,
        family_config=family_config,
        manifest=manifest,
        stored=None if config.load_format == "dummy" else open_weights(config.model_dir, manifest),
        groups=groups,
        forbidden_token_ids=_forbidden_token_ids(config.model_dir, family_config),
        world_size=config.tensor_parallel_size,
        dtype=_choose_dtype(config, directory, family),
        block_size=config.block_size,
        max_model_len=_choose_max_model_len(config.max_model_len, family_config.max_positions),
        max_num_seqs=config.max_num_seqs or (_CPU_MAX_NUM_SEQS if on_cpu else _CUDA_MAX_NUM_SEQS),
        max_num_batched_tokens=config.max_num_batched_tokens
        or (_CPU_MAX_NUM_BATCHED_TOKENS if on_cpu else _CUDA_MAX_NUM_BATCHED_TOKENS),
        seed=config.seed,
        enforce_eager=config.enforce_eager,
    )
    if config.kv_cache_memory_bytes is not None:
        blueprint.capacities(config.kv_cache_memory_bytes)
    return blueprint


def _forbidden_token_ids(model_dir: Path, family_config: Any) -> tuple[int, ...]:
    own = frozenset(family_config.forbidden_token_ids)
    return tuple(sorted(own.union(ids_without_token(model_dir, family_config.vocab_size))))


def _choose_dtype(config: EngineConfig, directory: ModelDirectory, family: type[Family]) -> str:
    """The checkpoint's own by default; on a CPU fp32 in place of fp16, and of bf16 if it has no instructions for it."""
    asked, on_cpu = config.dtype, config.devices == ("cpu",)
    if asked == "float16" and on_cpu:
        raise ConfigError("--dtype float16: not on a CPU, where nobody has measured it; take bfloat16 or float32")
    chosen = asked
    if asked == "auto":
        chosen = directory.dtype
        if on_cpu:
            chosen = "bfloat16" if chosen == "bfloat16" and has_bf16_instructions() else "float32"
    if chosen not in family.dtypes:
        raise ConfigError(f"--dtype {asked}: {directory.architecture} runs in {', '.join(family.dtypes)}")
    return chosen


def _choose_max_model_len(asked: int | None, max_positions: int) -> int:
    if asked is not None and asked > max_positions:
        raise ConfigError(f"--max-model-len {asked}: the model has {max_positions} positions")
    return asked or max_positions
