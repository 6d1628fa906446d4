"""Runs a model of peg without the ranks' own machinery: hand-made step inputs, a poisoned cache, a thread per rank."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peg.checkpoint.directory import open_model_directory
from peg.checkpoint.reader import ShardReader
from peg.checkpoint.source import Placement
from peg.checkpoint.weights import open_weights
from peg.kernels.heads import Angles, HeadRules, store_heads
from peg.models.comm import Communicator
from peg.models.family import Model
from peg.models.inputs import GroupInputs, StepInputs
from peg.models.registry import find_family
from peg.plan import Full, SlidingWindow
from peg.ranks.solo_comm import SoloComm
from peg.ranks.thread_comm import Rendezvous, ThreadComm

NAN = float("nan")


@dataclass
class PoisonedCache:
    """A layer's pool in which everything that was not written is NaN."""

    k: Tensor
    v: Tensor

    def write(self, heads: Tensor, rules: HeadRules, angles: Angles, slots: Tensor) -> Tensor:
        return store_heads(heads, rules, angles, self.k, self.v, slots)


@dataclass
class Row:
    """One sequence: tokens stored, and a block table per group with entries in shuffled order."""

    length: int
    tables: list[list[int]] = field(default_factory=list)


class Driver:
    """All ranks of one model. `step` runs slices of sequences, made known by their first slice."""

    def __init__(
        self, directory: Path, world_size: int = 1, dtype: torch.dtype = torch.float32, block: int = 4
    ) -> None:
        opened = open_model_directory(directory)
        family = find_family(opened.architecture)
        self.config: Any = family.parse(opened.config)
        self.groups = [
            group for group in family.kv_groups(self.config, world_size) if isinstance(group, Full | SlidingWindow)
        ]
        self.block, self.world_size, self.dtype = block, world_size, dtype
        self._blocks = 2048 // block
        stored = open_weights(directory, family.manifest(self.config))
        cpu = torch.device("cpu")
        self.models: list[Model] = [
            family.load(self.config, ShardReader(stored, Placement(rank, world_size, dtype, cpu)))
            for rank in range(world_size)
        ]
        rendezvous = Rendezvous(world_size, 0)
        self.comms: list[Communicator] = (
            [SoloComm(0)] if world_size == 1 else [ThreadComm(rendezvous, rank) for rank in range(world_size)]
        )
        self.caches = [self._make_caches() for _ in range(world_size)]
        free = list(range(1, self._blocks))
        random.Random(0).shuffle(free)
        self.free = [list(free) for _ in self.groups]
        self.sequences: dict[int, Row] = {}
        # Small products are not worth sharing out.
        cores = max(1, (os.cpu_count() or 1) // world_size) if self.config.hidden_size > 256 else 1
        self.pool = ThreadPoolExecutor(world_size, initializer=torch.set_num_threads, initargs=(cores,))

    def _make_caches(self) -> list[PoisonedCache]:
        nothing = torch.empty(0)
        caches = [PoisonedCache(nothing, nothing)] * self.config.num_layers
        for group in self.groups:
            shape = (self._blocks, self.block, group.kv_heads, group.head_dim)
            for layer in group.layers:
                caches[layer] = PoisonedCache(
                    torch.full(shape, NAN, dtype=self.dtype), torch.full(shape, NAN, dtype=self.dtype)
                )
        return caches

    def forget(self, seq: int) -> None:
        """Poison a sequence's blocks and give them back."""
        for index, table in enumerate(self.sequences.pop(seq).tables):
            self._release(index, [block for block in table if block])

    def step(self, slices: Sequence[tuple[int, Sequence[int]]]) -> list[Tensor]:
        """Run one step. Returns the logits [count, V] of each slice, gathered over the ranks."""
        hidden = self.forward(slices)
        with torch.inference_mode():
            parts = list(self.pool.map(lambda model: model.logits(hidden), self.models))
        logits = torch.cat(parts, -1)
        assert logits[:, self.config.vocab_size :].eq(float("-inf")).all()
        logits = logits[:, : self.config.vocab_size]
        assert logits.isfinite().all()
        return list(logits.split([len(tokens) for _, tokens in slices]))

    def forward(self, slices: Sequence[tuple[int, Sequence[int]]]) -> Tensor:
        """Run one step without its logits. Returns hidden [T, M], which must be the same on every rank."""
        inputs = self._inputs(slices)
        parts = list(self.pool.map(lambda rank: self._run(rank, inputs), range(self.world_size)))
        for hidden in parts[1:]:
            assert torch.equal(hidden, parts[0]), "hidden states differ between ranks"
        self._release_behind_windows()
        return parts[0]

    def score(self, tokens: Sequence[int], chunk: int = 0, seq: int = -1) -> Tensor:
        """Logits [len(tokens), V] of one sequence alone, in chunks of `chunk` (0: whole)."""
        size = chunk or len(tokens)
        out = [self.step([(seq, tokens[i : i + size])])[0] for i in range(0, len(tokens), size)]
        self.forget(seq)
        return torch.cat(out)

    def _run(self, rank: int, inputs: StepInputs) -> Tensor:
        with torch.inference_mode():
            return self.models[rank].forward(inputs, self.caches[rank], self.comms[rank])

    def _inputs(self, slices: Sequence[tuple[int, Sequence[int]]]) -> StepInputs:
        lengths = [len(tokens) for _, tokens in slices]
        positions: list[int] = []
        slots: list[list[int]] = [[] for _ in self.groups]
        for seq, tokens in slices:
            state = self.sequences.setdefault(seq, Row(0, [[] for _ in self.groups]))
            new = range(state.length, state.length + len(tokens))
            state.length += len(tokens)
            positions += new
            for table, free, place in zip(state.tables, self.free, slots, strict=True):
                table += [free.pop() for _ in range(-(-state.length // self.block) - len(table))]
                place += [table[p // self.block] * self.block + p % self.block for p in new]
        states = [self.sequences[seq] for seq, _ in slices]
        contexts = tuple(state.length for state in states)
        groups = []
        for index, place in enumerate(slots):
            tables = [state.tables[index] for state in states]
            width = max(map(len, tables)) + 1
            padded = [table + [self._blocks - 1] * (width - len(table)) for table in tables]
            groups.append(GroupInputs(torch.tensor(place), torch.tensor(padded, dtype=torch.int32)))
        return StepInputs(
            token_ids=torch.tensor([token for _, tokens in slices for token in tokens]),
            positions=torch.tensor(positions),
            query_starts=torch.tensor([0, *lengths]).cumsum(0).int(),
            context_lens=torch.tensor(contexts, dtype=torch.int32),
            groups=tuple(groups),
            query_lens=tuple(lengths),
            context_lens_host=contexts,
        )

    def _release_behind_windows(self) -> None:
        for index, group in enumerate(self.groups):
            if not isinstance(group, SlidingWindow):
                continue
            for state in self.sequences.values():
                table = state.tables[index]
                gone = [
                    b for b in range(len(table)) if table[b] and (b + 1) * self.block + group.window <= state.length
                ]
                self._release(index, [table[b] for b in gone])
                for b in gone:
                    table[b] = 0

    def _release(self, index: int, blocks: list[int]) -> None:
        self.free[index] += blocks
        for caches in self.caches:
            for layer in self.groups[index].layers:
                caches[layer].k[blocks] = NAN
                caches[layer].v[blocks] = NAN
