"""What one rank holds and does: its shard of the model, its caches and rows, and one step after another."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from peg.checkpoint.source import shard_size
from peg.kernels.ordering import key_ids
from peg.models.comm import Communicator
from peg.models.family import Model
from peg.models.inputs import LayerCache
from peg.plan import GroupCapacity, RankAck, Slice, StepPlan, TokenLogprobs
from peg.ranks.blueprint import Blueprint
from peg.ranks.cache import WriteDigest, make_caches
from peg.ranks.device import Device, HostArray, Landing
from peg.ranks.inputs import lay_out
from peg.ranks.logprobs import NUM_SCORES, Scorer, read_logprobs
from peg.ranks.rehearsal import Rehearsal
from peg.ranks.rows import SamplingRows
from peg.ranks.rules import Share
from peg.ranks.sampling import Draw, Sampler, read_tokens
from peg.ranks.silent_comm import SilentComm
from peg.ranks.tables import RowTables

_CONTEXT = 8192  # in a longer one no kernel is launched otherwise
_WARM_UP_S = 600.0
_CLOSE_S = 2.0


class StepPhase(enum.StrEnum):
    """Where in a step a rank is."""

    ROWS = "rows"
    FORWARD = "forward"
    SCORE = "score"
    SAMPLE = "sample"
    WAIT = "wait"  # for the device
    READ = "read"


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that the device works on, or is done with. `landing` brings what `finish` reads, in the order there.

    `alone`: it may fail at the cost of its own sequences, so no other step begins before it has ended.
    """

    plan: StepPlan
    landing: Landing
    digest: int
    free_rows: int
    collectives: int
    draws: tuple[Draw, ...]
    alone: bool


class Runner:
    """One rank without its thread, which owns it.

    It is made in this order: `load`, `connect`, `warm_up`, `make_cache`; then it runs steps. A later `connect` begins
    a new epoch with empty rows; weights and pools stay. `enter` is told of every phase. `kv_budget_bytes` is what
    everything else has left for this rank's pools.
    """

    def __init__(self, blueprint: Blueprint, rank: int, device: Device, enter: Callable[[StepPhase], None]) -> None:
        self.rank = rank
        self.device = device
        self.caches: list[LayerCache] = []
        self.kv_budget_bytes = 0
        self._blueprint = blueprint
        self._enter = enter
        config = blueprint.family_config
        share = shard_size(config.vocab_size, blueprint.world_size)
        self._share = Share(rank * share, share)
        self._sampler = Sampler(rank * share, share, config.forbidden_token_ids, device)
        self._scorer = Scorer(rank * share, share)
        self._digest = WriteDigest()
        self._model: Model
        self._comm: Communicator | None = None
        self._tables: RowTables
        self._rows: SamplingRows

    @property
    def comm(self) -> Communicator:
        assert self._comm is not None, "not connected yet"
        return self._comm

    # --- making -----------------------------------------------------------------------------------------

    def load(self) -> None:
        """Make the thread and the device this rank's, read its weights and build the model."""
        self.device.enter()
        plan = self._blueprint
        self._model = plan.family.load(plan.family_config, plan.source(self.rank, self.device.place))
        self._sampler.prepare()

    def connect(self, comm: Communicator) -> None:
        """Begin an epoch: this communicator, no row in use."""
        if self._comm is not None:
            self._comm.close(_CLOSE_S)
        self._begin(comm)

    def warm_up(self) -> None:
        """Run steps of padding, so that whatever is made on first use is made now, and see what memory is left.

        First each rank by itself: loading a kernel may wait for the device, which must not wait for a peer then.
        """
        plan = self._blueprint
        comm = self.comm
        self.caches = self._make([GroupCapacity(group, 1) for group in plan.groups])
        for turn in range(plan.world_size):
            comm.barrier(_WARM_UP_S)
            if turn == self.rank:
                self._begin(SilentComm(self.rank, plan.world_size))
                self._rehearse()
        comm.barrier(_WARM_UP_S)
        self._begin(comm)
        self._rehearse()
        comm.barrier(_WARM_UP_S)
        self._begin(comm)
        self.caches = []
        self.kv_budget_bytes = self.device.kv_budget_bytes()

    def make_cache(self, capacities: Sequence[GroupCapacity]) -> None:
        """Allocate the pools."""
        self.caches = self._make(capacities)

    def close(self, deadline_s: float) -> None:
        """Close the communicator."""
        if self._comm is not None:
            self._comm.close(deadline_s)

    def _make(self, capacities: Sequence[GroupCapacity]) -> list[LayerCache]:
        plan = self._blueprint
        layers, dtype = plan.family_config.num_layers, plan.torch_dtype
        return make_caches(capacities, layers, plan.block_size, dtype, self.device.place, self._digest)

    def _begin(self, comm: Communicator) -> None:
        plan = self._blueprint
        self._comm = comm
        self._tables = RowTables(plan.max_num_seqs, len(plan.groups), -(-plan.max_model_len // plan.block_size))
        self._rows = SamplingRows(plan.max_num_seqs, self._share, self.device)
        self._digest.value = 0

    def _rehearse(self) -> None:
        plan, whole = self._blueprint, self.device.launches
        rehearsal = Rehearsal(
            chunk=plan.max_num_batched_tokens if whole else plan.block_size,
            rows=plan.max_num_seqs if whole else 1,
            context=min(plan.max_model_len, _CONTEXT if whole else 2 * plan.block_size),
            num_groups=len(plan.groups),
            block_size=plan.block_size,
        )
        for step in rehearsal.plans():
            launched = self.launch(step)
            self.device.synchronize()
            self.finish(launched)

    # --- a step -----------------------------------------------------------------------------------------

    def launch(self, plan: StepPlan) -> Launched:
        """Begin one step. What it raises, and in which phase, decides whom it costs."""
        self._enter(StepPhase.ROWS)
        self.device.begin_step()
        self._tables.apply(plan)
        self._rows.apply(plan)
        host = lay_out(plan, self._tables, self._blueprint.block_size)
        inputs = host.upload(self.device, self._rows.last_tokens)
        self._digest.begin(zip((group.slots for group in inputs.groups), host.slots, strict=True))
        self._enter(StepPhase.FORWARD)
        hidden = self._model.forward(inputs, self.caches, self.comm)
        rows = [piece.row for piece in plan.slices]
        self._digest.advanced(rows, self._tables.advance(rows, inputs.query_lens))
        self._enter(StepPhase.SCORE)
        scored = self._score_prompts(plan.slices, host.query_starts, hidden)
        self._enter(StepPhase.SAMPLE)
        sampling = [piece.row for piece in plan.slices if piece.samples]
        draws = tuple(Draw(self._rows[row].params, int(self._tables.stored[row])) for row in sampling)
        sampled = self._sample(plan.slices, host.query_starts, hidden, draws) if draws else ()
        self._enter(StepPhase.WAIT)
        return Launched(
            plan=plan,
            landing=self.device.fetch((*sampled, *scored)),
            digest=self._digest.value,
            free_rows=self._tables.free_rows,
            collectives=self.comm.issued,
            draws=draws,
            alone=self._blueprint.world_size == 1 and not plan.has_decode,
        )

    def finish(self, launched: Launched) -> RankAck:
        """What a launched step came to, once its landing is done."""
        self._enter(StepPhase.READ)
        plan, landed = launched.plan, list(launched.landing.tensors)
        token_ids = read_tokens(landed.pop(0)) if launched.draws else ()
        return RankAck(
            step=plan.step,
            epoch=plan.epoch,
            rank=self.rank,
            token_ids=token_ids,
            digest=launched.digest,
            free_rows=launched.free_rows,
            collectives=launched.collectives,
            logprobs=_sampled_logprobs(token_ids, launched.draws, landed),
            prompt_logprobs=_prompt_logprobs(plan.slices, landed),
        )

    def _sample(
        self, slices: Sequence[Slice], starts: HostArray, hidden: Tensor, draws: Sequence[Draw]
    ) -> tuple[Tensor, ...]:
        """The key of one token for each slice that samples, and its scores where some are wanted."""
        sampling = [place for place, piece in enumerate(slices) if piece.samples]
        wanted = [index for index, draw in enumerate(draws) if draw.params.logprobs is not None]
        rows = [slices[place].row for place in sampling]
        last, there, scored = self.device.upload(
            ((starts[1:][sampling] - 1).astype(np.int64), np.array(rows), np.array(wanted, np.int64))
        )
        logits = self._model.logits(hidden.index_select(0, last))
        shaped = self._rows.shape(logits, [slices[place] for place in sampling])
        keys = self._sampler.sample(shaped, draws, self.comm)
        token_ids = key_ids(keys)
        self._rows.last_tokens.index_copy_(0, there, token_ids)
        self._rows.sampled(rows, token_ids)
        if not wanted:
            return (keys,)
        top = max(draws[index].params.logprobs or 0 for index in wanted)
        scores = self._scorer.score(
            lambda part: logits.index_select(0, scored[part]), token_ids.index_select(0, scored), top, self.comm
        )
        return (keys, *scores) if self.rank == 0 else (keys,)

    def _score_prompts(self, slices: Sequence[Slice], starts: HostArray, hidden: Tensor) -> tuple[Tensor, ...]:
        """Scores of all targets of all slices; nothing at all where no slice has any."""
        tokens = np.array([token for piece in slices for token in piece.targets], np.int64)
        if not len(tokens):
            return ()
        places = [starts[index] + np.arange(len(piece.targets)) for index, piece in enumerate(slices)]
        targets, rows = self.device.upload((tokens, np.concatenate(places)))
        top = max(piece.prompt_logprobs for piece in slices if piece.targets)
        scores = self._scorer.score(
            lambda part: self._model.logits(hidden.index_select(0, rows[part])), targets, top, self.comm
        )
        return scores if self.rank == 0 else ()


def _sampled_logprobs(
    token_ids: Sequence[int], draws: Sequence[Draw], landed: list[Tensor]
) -> tuple[TokenLogprobs | None, ...]:
    """One entry for each sampled token, None where none was asked for; nothing at all where none was scored."""
    wanted = [index for index, draw in enumerate(draws) if draw.params.logprobs is not None]
    if not wanted or not landed:
        return ()
    scores = [landed.pop(0) for _ in range(NUM_SCORES)]
    tops = [draws[index].params.logprobs or 0 for index in wanted]
    found = dict(zip(wanted, read_logprobs([token_ids[index] for index in wanted], tops, scores), strict=True))
    return tuple(found.get(index) for index in range(len(draws)))


def _prompt_logprobs(slices: Sequence[Slice], landed: list[Tensor]) -> tuple[tuple[TokenLogprobs, ...], ...]:
    """For each slice those of its targets; nothing at all where none was scored."""
    if not landed:
        return ()
    tokens = [token for piece in slices for token in piece.targets]
    tops = [piece.prompt_logprobs for piece in slices for _ in piece.targets]
    scored = iter(read_logprobs(tokens, tops, landed))
    return tuple(tuple(next(scored) for _ in piece.targets) for piece in slices)
