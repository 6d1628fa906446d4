"""A RankGroup over a tiny Llama with random weights, and the scheduler to drive it. Milliseconds a step."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peg.config import EngineConfig
from peg.failure import Cause
from peg.plan import (
    EngineInfo,
    NewRow,
    SamplingParams,
    SequenceRequest,
    Slice,
    StepOutcome,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from peg.ranks.group import RankGroup
from peg.sched.limits import SchedulerLimits
from peg.sched.scheduler import Scheduler

SOON_S = 20.0  # a bound no healthy wait comes near
GREEDY = SamplingParams(temperature=0)
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "eos_token_id": 2,
}


def write_config(folder: Path, **changes: object) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes), "utf-8")
    return folder


class TinyGroup:
    """A started group, everything it published, and everything that failed."""

    def __init__(self, folder: Path, world_size: int, **options: Any) -> None:
        self.outcomes: queue.SimpleQueue[StepOutcome] = queue.SimpleQueue()
        self.failures: list[Cause] = []
        self.failed = threading.Event()
        self.may_publish = True
        settings = {"load_format": "dummy", "block_size": 4, "max_num_seqs": 4, "kv_cache_memory_bytes": 1 << 20}
        self.group = RankGroup(
            EngineConfig(model="tiny", model_dir=folder, tensor_parallel_size=world_size, **{**settings, **options}),
            self.outcomes.put,
            self._fail,
            lambda _: self.may_publish,
        )
        self.info: EngineInfo
        self._step = -1
        self._schedulers: dict[int, Scheduler] = {}

    def _fail(self, cause: Cause) -> None:
        self.failures.append(cause)
        self.failed.set()

    def first_failure(self, timeout_s: float = SOON_S) -> Cause:
        assert self.failed.wait(timeout_s), "nothing failed"
        return self.failures[0]

    def outcome(self, timeout_s: float = SOON_S) -> StepOutcome:
        return self.outcomes.get(timeout=timeout_s)

    def result(self) -> StepResult:
        outcome = self.outcome()
        assert isinstance(outcome, StepResult), outcome
        return outcome

    # --- plans by hand: one row, whose blocks are 1, 2, 3, … ---------------------------------------------

    def prefill(self, ids: Sequence[int], *, samples: bool = True, row: int = 0, failures_seen: int = 0) -> StepPlan:
        """A new row with these tokens."""
        self._step += 1
        table = tuple(range(row * 16 + 1, row * 16 + 17))
        new = NewRow(row, row, GREEDY, tuple(ids), (), (table,))
        piece = Slice(row, row, 0, len(ids), tuple(ids), samples)
        return StepPlan(self._step, 0, (piece,), new_rows=(new,), failures_seen=failures_seen)

    def decode(self, start: int, *, row: int = 0) -> StepPlan:
        """The token that the row sampled last."""
        self._step += 1
        return StepPlan(self._step, 0, (Slice(row, row, start, 1, None, samples=True),))

    # --- whole requests ---------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        params: SamplingParams | Sequence[SamplingParams] = GREEDY,
        epoch: int = 0,
        **request: Any,
    ) -> tuple[list[list[int]], list[list[TokenLogprobs]]]:
        """Tokens and prompt logprobs of each prompt, all submitted at once, two steps in flight.

        `params` are those of all prompts, or of each. One scheduler serves all calls of an epoch; plans by hand do
        not go with it.
        """
        scheduler = self._schedulers.setdefault(epoch, Scheduler(SchedulerLimits.of(self.info, None, epoch)))
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        ids = [
            scheduler.admit(
                SequenceRequest(
                    request_id=str(number),
                    prompt_ids=tuple(prompt),
                    sampling=sampling,
                    max_tokens=max_tokens,
                    ignore_eos=True,
                    **request,
                )
            )
            for number, (prompt, sampling) in enumerate(zip(prompts, each, strict=True))
        ]
        tokens: dict[int, list[int]] = {seq_id: [] for seq_id in ids}
        scored: dict[int, list[TokenLogprobs]] = {seq_id: [] for seq_id in ids}
        open_ids = set(ids)
        while open_ids:
            while (plan := scheduler.plan()) is not None:
                self.group.run(plan)
            for update in scheduler.commit(self.result()):
                tokens[update.seq_id] += update.token_ids
                scored[update.seq_id] += update.prompt_logprobs
                if update.terminal is not None:
                    open_ids.remove(update.seq_id)
        return [tokens[seq_id] for seq_id in ids], [scored[seq_id] for seq_id in ids]

    @property
    def preemptions(self) -> int:
        return sum(scheduler.stats().counters.preemptions for scheduler in self._schedulers.values())


@contextmanager
def tiny_group(folder: Path, world_size: int = 1, **options: Any) -> Iterator[TinyGroup]:
    """A group that is started here and closed at the end, when no thread of it may be left."""
    tiny = TinyGroup(write_config(folder), world_size, **options)
    tiny.info = tiny.group.start(SOON_S)
    try:
        yield tiny
    finally:
        assert tiny.group.close(SOON_S)
        assert rank_threads() == []


def rank_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("peg-")]
