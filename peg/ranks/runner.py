"""What one rank holds and does: its shard of the model, its caches and rows, and one step after another."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from peg.checkpoint.source import shard_size
from peg.models.comm import Communicator
from peg.models.family import Model
from peg.models.inputs import LayerCache
from peg.plan import GroupCapacity, RankAck, SamplingParams, Slice, StepPlan, TokenLogprobs
from peg.ranks.blueprint import Blueprint
from peg.ranks.cache import WriteDigest, make_caches
from peg.ranks.inputs import build_inputs, padding_inputs
from peg.ranks.logprobs import Scorer, Target
from peg.ranks.machine import kv_budget_bytes
from peg.ranks.rows import SamplingRows
from peg.ranks.sampling import Draw, Sampler
from peg.ranks.tables import RowTables


class StepPhase(enum.StrEnum):
    """Where in a step a rank is."""

    ROWS = "rows"
    FORWARD = "forward"
    SCORE = "score"
    SAMPLE = "sample"


class Runner:
    """One rank without its thread, which owns it.

    It is made in this order: `connect`, `load`, `make_cache`, `warm_up`; then it runs steps. A later `connect` begins
    a new epoch with empty rows; weights and pools stay. `enter` is told of every phase. `kv_budget_bytes` is what
    loading has left for this rank's pools.
    """

    def __init__(self, blueprint: Blueprint, rank: int, enter: Callable[[StepPhase], None]) -> None:
        self.rank = rank
        self.caches: list[LayerCache] = []
        self.kv_budget_bytes = 0
        self._blueprint = blueprint
        self._enter = enter
        config = blueprint.family_config
        share = shard_size(config.vocab_size, blueprint.world_size)
        self._sampler = Sampler(rank * share, share, config.forbidden_token_ids)
        self._scorer = Scorer(rank * share, share)
        self._digest = WriteDigest()
        self._model: Model
        self._comm: Communicator
        self._tables: RowTables
        self._rows: SamplingRows

    # --- making -----------------------------------------------------------------------------------------

    def connect(self, comm: Communicator) -> None:
        """Begin an epoch: this communicator, no row in use."""
        plan = self._blueprint
        self._comm = comm
        self._tables = RowTables(plan.max_num_seqs, len(plan.groups), -(-plan.max_model_len // plan.block_size))
        self._rows = SamplingRows(plan.max_num_seqs)
        self._digest.value = 0

    def load(self) -> None:
        """Read this rank's weights and build the model."""
        plan = self._blueprint
        self._model = plan.family.load(plan.family_config, plan.source(self.rank, torch.device("cpu")))
        self.kv_budget_bytes = kv_budget_bytes(plan.world_size)

    def make_cache(self, capacities: Sequence[GroupCapacity]) -> None:
        """Allocate the pools."""
        plan = self._blueprint
        layers = plan.family_config.num_layers
        self.caches = make_caches(capacities, layers, plan.block_size, plan.torch_dtype, self._digest)

    def warm_up(self) -> None:
        """Run the model on padding tokens, as a chunk and as one token, and sample from what comes out."""
        plan = self._blueprint
        for tokens in (plan.block_size, 1):
            inputs = padding_inputs(tokens, len(plan.groups), plan.block_size)
            hidden = self._model.forward(inputs, self.caches, self._comm)
        self._sampler.sample(self._model.logits(hidden), [Draw(SamplingParams(), 0)], self._comm)

    def close(self, deadline_s: float) -> None:
        """Close the communicator."""
        self._comm.close(deadline_s)

    # --- a step -----------------------------------------------------------------------------------------

    def step(self, plan: StepPlan) -> RankAck:
        """Run one step. What it raises, and in which phase, decides whom it costs."""
        self._enter(StepPhase.ROWS)
        self._tables.apply(plan)
        self._rows.apply(plan)
        inputs = build_inputs(plan, self._tables, self._rows.last_tokens, self._blueprint.block_size)
        starts = inputs.query_starts.tolist()
        self._enter(StepPhase.FORWARD)
        hidden = self._model.forward(inputs, self.caches, self._comm)
        rows = [piece.row for piece in plan.slices]
        self._digest.advanced(rows, self._tables.advance(rows, inputs.query_lens))
        self._enter(StepPhase.SCORE)
        prompt_logprobs = self._score_prompts(plan.slices, starts, hidden)
        self._enter(StepPhase.SAMPLE)
        token_ids, logprobs = self._sample(plan.slices, starts, hidden)
        leads = self.rank == 0
        return RankAck(
            step=plan.step,
            epoch=plan.epoch,
            rank=self.rank,
            token_ids=token_ids,
            digest=self._digest.value,
            free_rows=self._tables.free_rows,
            logprobs=logprobs if leads else (),
            prompt_logprobs=prompt_logprobs if leads else (),
        )

    def _sample(
        self, slices: Sequence[Slice], starts: Sequence[int], hidden: Tensor
    ) -> tuple[tuple[int, ...], tuple[TokenLogprobs | None, ...]]:
        """One token for each slice that samples, and its logprobs where they are wanted."""
        places = [place for place, piece in enumerate(slices) if piece.samples]
        if not places:
            return (), ()
        rows = [slices[place].row for place in places]
        logits = self._model.logits(hidden[[starts[place + 1] - 1 for place in places]])
        draws = [Draw(self._rows[row].params, int(self._tables.stored[row])) for row in rows]
        sampled = self._sampler.sample(logits, draws, self._comm)
        self._rows.last_tokens.index_copy_(0, torch.tensor(rows), sampled)
        token_ids = sampled.tolist()
        self._rows.sampled(rows, token_ids)
        return tuple(token_ids), self._score_sampled(logits, token_ids, draws)

    def _score_sampled(
        self, logits: Tensor, token_ids: Sequence[int], draws: Sequence[Draw]
    ) -> tuple[TokenLogprobs | None, ...]:
        """The logprobs of the sampled tokens, where they are wanted; nothing at all where none are."""
        wanted = [index for index, draw in enumerate(draws) if draw.params.logprobs is not None]
        if not wanted:
            return ()
        targets = [Target(token_ids[index], draws[index].params.logprobs or 0) for index in wanted]
        scored = self._scorer.score(lambda part: logits[wanted[part]], targets, self._comm)
        found = dict(zip(wanted, scored, strict=True))
        return tuple(found.get(index) for index in range(len(draws)))

    def _score_prompts(
        self, slices: Sequence[Slice], starts: Sequence[int], hidden: Tensor
    ) -> tuple[tuple[TokenLogprobs, ...], ...]:
        """For each slice the logprobs of its targets; nothing at all where no slice has any."""
        targets = [Target(token, piece.prompt_logprobs) for piece in slices for token in piece.targets]
        if not targets:
            return ()
        rows = [
            start + index for start, piece in zip(starts, slices, strict=False) for index in range(len(piece.targets))
        ]
        scored = iter(self._scorer.score(lambda part: self._model.logits(hidden[rows[part]]), targets, self._comm))
        return tuple(tuple(next(scored) for _ in piece.targets) for piece in slices)
