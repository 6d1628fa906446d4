"""What one rank holds and does: its shard of the model, its caches and rows, and one step after another."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from torch import Tensor

from peg.checkpoint.source import shard_size
from peg.errors import RankError
from peg.kernels.ordering import key_ids
from peg.models.comm import Communicator
from peg.models.family import Model
from peg.models.inputs import LayerCache, StepInputs
from peg.plan import GroupCapacity, RankAck, Slice, StepPlan
from peg.ranks.blueprint import Blueprint
from peg.ranks.cache import WriteDigest, make_caches
from peg.ranks.decode import Decoder, DecodeSizes
from peg.ranks.device import Device, HostArray, Landing
from peg.ranks.inputs import HostInputs, lay_out
from peg.ranks.launched import Launched
from peg.ranks.logprobs import Scorer
from peg.ranks.rehearsal import Rehearsal
from peg.ranks.rows import SamplingRows
from peg.ranks.rules import Share
from peg.ranks.sampling import Draw, Sampler
from peg.ranks.silent_comm import SilentComm
from peg.ranks.tables import RowTables

_CONTEXT = 8192  # in a longer one no kernel is launched otherwise
_WARM_UP_S = 600.0
_RULE_BYTES = 6  # of one row, for each token of its share of the vocabulary


class StepPhase(enum.StrEnum):
    """Where in a step a rank is."""

    ROWS = "rows"
    FORWARD = "forward"
    SCORE = "score"
    SAMPLE = "sample"
    WAIT = "wait"  # for the device
    READ = "read"


class Runner:
    """One rank without its thread, which owns it.

    It is made in this order: `load`, `connect`, `warm_up`, `make_cache`; then it runs steps. `disconnect` and a later
    `connect` begin a new epoch with empty rows; weights and pools stay. `enter` is told of every phase.
    `kv_budget_bytes` is what everything else has left for this rank's pools. Where the device works by itself, steps
    that only decode are the `_decoder`'s, captured unless graphs were refused.
    """

    def __init__(self, blueprint: Blueprint, rank: int, device: Device, enter: Callable[[StepPhase], None]) -> None:
        self.rank = rank
        self.device = device
        self.caches: list[LayerCache] = []
        self.kv_budget_bytes = 0
        self.used: dict[str, int] = {}  # of the device's memory, after each phase of the start
        self._blueprint = blueprint
        self._enter = enter
        config = blueprint.family_config
        share = shard_size(config.vocab_size, blueprint.world_size)
        self._share = Share(rank * share, share)
        self._sampler = Sampler(rank * share, share, blueprint.forbidden_token_ids, device)
        self._scorer = Scorer(rank * share, share)
        self._digest = WriteDigest()
        self._model: Model
        self._decoder: Decoder | None = None
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
        self.used["context"] = self.device.used_bytes()
        plan = self._blueprint
        self._model = plan.family.load(plan.family_config, plan.source(self.rank, self.device.place))
        self._sampler.prepare()
        if self.device.launches:
            sizes = DecodeSizes(
                rows=plan.max_num_seqs,
                groups=len(plan.groups),
                blocks=-(-plan.max_model_len // plan.block_size),
                block_size=plan.block_size,
                vocab_share=self._share.size,
            )
            self.used["weights"] = self.device.used_bytes()
            self._decoder = Decoder(sizes, self.device, self._digest, self._logits, self._pick)

    def connect(self, comm: Communicator) -> None:
        """Begin an epoch: this communicator, no row in use."""
        self._begin(comm)
        self.used.setdefault("communicators", self.device.used_bytes())
        if self.caches:
            self._capture()

    def disconnect(self, deadline_s: float) -> None:
        """End an epoch, whose steps are done. The graphs go first: NCCL gives nothing back while one is there.

        Raises RankError where the device is of no further use: after a sticky error every call fails.
        """
        if self._decoder is not None:
            if not self.device.usable():
                raise RankError(f"{self.device.name} is of no further use to this process")
            self._decoder.reset()
        if self._comm is not None:
            self._comm.close(deadline_s)

    def warm_up(self) -> None:
        """Run steps of padding, so that whatever is made on first use is made now, and see what memory is left.

        On a device that works by itself each rank goes through it alone first: loading a kernel may wait for the
        device, which must not wait for a peer then.
        """
        plan, comm = self._blueprint, self.comm
        self.caches = self._make([GroupCapacity(group, 1) for group in plan.groups])
        for _ in self._turns() if self.device.launches else ():
            self._begin(SilentComm(self.rank, plan.world_size))
            with self.device.workspace(_RULE_BYTES * plan.max_num_seqs * self._share.size):
                self._rehearse(alone=True)
            self._begin(comm)
        self._rehearse(alone=False)
        self._begin(comm)
        comm.barrier(_WARM_UP_S)
        self.used["workspace"] = self.device.used_bytes()
        comm.barrier(_WARM_UP_S)
        self._capture()
        self.used["graphs"] = self.device.used_bytes()
        self.kv_budget_bytes = self.device.kv_budget_bytes()
        comm.barrier(_WARM_UP_S)
        if self._decoder is not None:
            self._decoder.reset()
        self.caches = []

    def make_cache(self, capacities: Sequence[GroupCapacity]) -> None:
        """Allocate the pools, and capture the steps that read them."""
        with self.device.pools():
            self.caches = self._make(capacities)
        self._capture()
        self.comm.barrier(_WARM_UP_S)
        self.used["ready"] = self.device.used_bytes()

    def _make(self, capacities: Sequence[GroupCapacity]) -> list[LayerCache]:
        plan = self._blueprint
        layers, dtype = plan.family_config.num_layers, plan.torch_dtype
        return make_caches(capacities, layers, plan.block_size, dtype, self.device.place, self._digest)

    def _begin(self, comm: Communicator) -> None:
        plan, decoder = self._blueprint, self._decoder
        self._comm = comm
        self._tables = RowTables(plan.max_num_seqs, len(plan.groups), -(-plan.max_model_len // plan.block_size))
        last_tokens = None
        if decoder is not None:
            decoder.begin()
            last_tokens = decoder.state.last_tokens
        self._rows = SamplingRows(plan.max_num_seqs, self._share, self.device, last_tokens)
        self._digest.value = 0

    def _turns(self) -> Iterator[None]:
        """Once, while all other ranks wait on the host."""
        comm = self.comm
        for turn in range(self._blueprint.world_size):
            comm.barrier(_WARM_UP_S)
            if turn == self.rank:
                yield
                self.device.synchronize()
        comm.barrier(_WARM_UP_S)

    def _capture(self) -> None:
        """One rank after another; then all replay together."""
        if self._decoder is None or self._blueprint.enforce_eager:
            return
        for _ in self._turns():
            self._decoder.capture()
        self._decoder.replay_all()
        self.comm.barrier(_WARM_UP_S)

    def _rehearse(self, *, alone: bool) -> None:
        plan, decoder = self._blueprint, self._decoder
        rehearsal = Rehearsal(
            chunk=plan.block_size if decoder is None else plan.max_num_batched_tokens,
            targets=1 if decoder is None else self._scorer.at_once + 1,
            batches=(1,) if decoder is None else decoder.sizes.batches,
            context=min(plan.max_model_len, 2 * plan.block_size if decoder is None else _CONTEXT),
            num_groups=len(plan.groups),
            block_size=plan.block_size,
        )
        for step in rehearsal.plans():
            launched = self.launch(step)
            self.device.synchronize()
            if not alone:  # alone, a rank whose tokens are all forbidden has nothing to sample
                self.finish(launched)
        if decoder is not None:
            decoder.rehearse()
            self.device.synchronize()

    # --- a step -----------------------------------------------------------------------------------------

    def launch(self, plan: StepPlan) -> Launched:
        """Begin one step. What it raises, and in which phase, decides whom it costs."""
        self._enter(StepPhase.ROWS)
        self.device.begin_step()
        self._tables.apply(plan)
        self._rows.apply(plan)
        host = lay_out(plan, self._tables, self._blueprint.block_size)
        decodes = self._decoder is not None and self._decoder.takes(plan)
        if self._decoder is not None:
            self._decoder.changed(plan, self._tables, taken=decodes)
        draws = tuple(
            Draw(self._rows[piece.row].params, piece.start + piece.count) for piece in plan.slices if piece.samples
        )
        landing = self._decode(plan, host, draws) if decodes else self._compute(plan, host, draws)
        self._enter(StepPhase.WAIT)
        return Launched(
            plan=plan,
            landing=landing,
            digest=self._digest.value,
            free_rows=self._tables.free_rows,
            collectives=self.comm.issued,
            draws=draws,
            alone=self._blueprint.world_size == 1 and not plan.has_decode,
        )

    def finish(self, launched: Launched) -> RankAck:
        """What a launched step came to, once its landing is done."""
        self._enter(StepPhase.READ)
        return launched.read(self.rank)

    def _compute(self, plan: StepPlan, host: HostInputs, draws: Sequence[Draw]) -> Landing:
        """Launch a step of any slices."""
        inputs = host.upload(self.device, self._rows.last_tokens)
        self._digest.begin(zip((group.slots for group in inputs.groups), host.slots, strict=True))
        self._enter(StepPhase.FORWARD)
        hidden = self._model.forward(inputs, self.caches, self.comm)
        self._advance(plan)
        self._enter(StepPhase.SCORE)
        scored = self._score_prompts(plan.slices, host.query_starts, hidden)
        self._enter(StepPhase.SAMPLE)
        sampled: tuple[Tensor, ...] = ()
        if draws:
            ends = host.query_starts[1:][[piece.samples for piece in plan.slices]] - 1
            (last,) = self.device.upload((ends.astype(np.int64),))
            sampled = self._sample(plan.slices, self._model.logits(hidden.index_select(0, last)), draws)
        return self.device.fetch((*sampled, *scored))

    def _decode(self, plan: StepPlan, host: HostInputs, draws: Sequence[Draw]) -> Landing:
        """Launch a step that is the decoder's."""
        assert self._decoder is not None
        self._enter(StepPhase.FORWARD)
        plain = not any(draw.filtered or draw.params.logprobs is not None for draw in draws)
        plain = plain and not any(piece.mask is not None or self._rows[piece.row].rules for piece in plan.slices)
        self._decoder.step(plan, host, self._tables, draws, self.comm, samples=plain)
        self._advance(plan)
        if plain:
            return self._decoder.landing(len(draws))
        self._enter(StepPhase.SAMPLE)
        return self.device.fetch(self._sample(plan.slices, self._decoder.logits[: len(draws)], draws))

    def _logits(self, inputs: StepInputs) -> Tensor:
        return self._model.logits(self._model.forward(inputs, self.caches, self.comm))

    def _pick(self, logits: Tensor, temperatures: Tensor, noise: Tensor) -> Tensor:
        return self._sampler.pick(logits, temperatures, noise, self.comm)

    def _advance(self, plan: StepPlan) -> None:
        """The step's tokens are stored."""
        rows, counts = [piece.row for piece in plan.slices], [piece.count for piece in plan.slices]
        self._digest.advanced(rows, self._tables.advance(rows, counts))

    def _sample(self, slices: Sequence[Slice], logits: Tensor, draws: Sequence[Draw]) -> tuple[Tensor, ...]:
        """The key of one token for each slice that samples, and its scores where some are wanted."""
        sampling = [piece for piece in slices if piece.samples]
        wanted = [index for index, draw in enumerate(draws) if draw.params.logprobs is not None]
        rows = [piece.row for piece in sampling]
        there, scored = self.device.upload((np.array(rows), np.array(wanted, np.int64)))
        if self._decoder is not None and any(self._rows[row].rules for row in rows):
            self.comm.barrier(_WARM_UP_S)  # rules launch much without a collective, which keeps ranks together
        keys = self._sampler.sample(self._rows.shape(logits, sampling), draws, self.comm)
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
