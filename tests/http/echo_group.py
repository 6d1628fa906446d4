"""Ranks that need no weights: each sequence says its prompt again, from the start, for ever.

A mask is kept to. Everything else of the server is the product: engine, scheduler, supervisor, text and HTTP. With a temperature the
echo starts `seed` tokens into the prompt, so that seeds show.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from peg.config import EngineConfig
from peg.failure import Cause, CauseKind, FailureCallback, Fault, FaultKind, Heartbeat
from peg.plan import (
    EngineInfo,
    Full,
    GroupCapacity,
    NewRow,
    StepPlan,
    StepResult,
)

# Ids of the small byte-level tokenizer: its turns' first and last token, and one that no prompt may hold.
BOS = 291
EOS = 292
FORBIDDEN = 294
PADDED_VOCABULARY = 304


@dataclass(slots=True)
class Row:
    prompt_ids: tuple[int, ...]
    start: int
    said: int

    @classmethod
    def of(cls, new: NewRow) -> Row:
        start = new.params.seed % len(new.prompt_ids) if new.params.temperature else 0
        return cls(new.prompt_ids, start, len(new.output_ids))

    def say(self, mask: bytes | None) -> int:
        """The next token of the echo; where the mask does not allow it, the lowest id that it does."""
        self.said += 1
        token_id = self.prompt_ids[(self.start + self.said - 1) % len(self.prompt_ids)]
        if mask is None or mask[token_id // 8] >> token_id % 8 & 1:
            return token_id
        bits = int.from_bytes(mask, "little")
        return (bits & -bits).bit_length() - 1


class EchoGroup:
    """In RankGroup's place. `step_s` is how long a step takes; no step is done while `go` is cleared."""

    def __init__(
        self,
        config: EngineConfig,
        on_result: Callable[[StepResult], None],
        on_failure: FailureCallback,
        may_publish: Callable[[int], bool],
    ) -> None:
        self.step_s = 0.0
        self.go = threading.Event()
        self.go.set()
        self.loaded = threading.Event()
        self.loaded.set()
        self.steps = 0
        self.info = echo_info(config)
        self._on_result = on_result
        self._on_failure = on_failure
        self._queue: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._rows: dict[int, Row] = {}
        self._fault: tuple[Fault, int] | None = None
        self._beat = Heartbeat(0, "idle", -1, time.monotonic())
        self._thread = threading.Thread(target=self._work, name="echo-rank")

    def start(self, deadline_s: float, phases_s: object = None) -> EngineInfo:
        assert self.loaded.wait(deadline_s)
        self._thread.start()
        return self.info

    def run(self, plan: StepPlan) -> None:
        self._queue.put(plan)

    def inject(self, fault: Fault) -> None:
        self._fault = (fault, self.steps + fault.after_steps)

    def heartbeats(self) -> tuple[Heartbeat, ...]:
        return (self._beat,)

    def dead_rank(self) -> int | None:
        return None

    def poll(self) -> str | None:
        return None

    def poison(self, reason: str) -> None:
        self._queue.put(None)

    def abort(self, reason: str, deadline_s: float) -> bool:
        self.go.set()
        return True

    def join(self, deadline_s: float) -> bool:
        if self._thread.is_alive():
            self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def close(self, deadline_s: float) -> None:
        self.poison("closed")
        self.abort("closed", deadline_s)
        self.join(deadline_s)

    def _work(self) -> None:
        while (plan := self._queue.get()) is not None:
            self._beat = Heartbeat(0, "step", plan.step, time.monotonic())
            if self.step_s:
                time.sleep(self.step_s)
            self.go.wait()
            self.steps += 1
            if self._struck(plan):
                return
            self._on_result(StepResult(plan.step, plan.epoch, self._tokens(plan)))
            self._beat = Heartbeat(0, "idle", plan.step, time.monotonic())

    def _struck(self, plan: StepPlan) -> bool:
        if self._fault is None or self.steps < self._fault[1]:
            return False
        if self._fault[0].kind is FaultKind.RAISE:
            self._on_failure(Cause(kind=CauseKind.RANK_RAISED, message="injected", rank=0, step=plan.step))
        else:
            self.go.clear()
            self.go.wait()
        return True

    def _tokens(self, plan: StepPlan) -> tuple[int, ...]:
        for row in plan.released_rows:
            del self._rows[row]
        for new in plan.new_rows:
            self._rows[new.row] = Row.of(new)
        return tuple(self._rows[piece.row].say(piece.mask) for piece in plan.slices if piece.samples)


def echo_info(config: EngineConfig) -> EngineInfo:
    context = config.max_model_len or 4096
    blocks = 1 + 64 * -(-context // config.block_size)
    return EngineInfo(
        architecture="EchoForCausalLM",
        world_size=config.tensor_parallel_size,
        devices=config.devices,
        communicator="none",
        dtype="float32",
        vocab_size=PADDED_VOCABULARY,
        eos_token_ids=(EOS,),
        forbidden_token_ids=(FORBIDDEN,),
        max_model_len=context,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs or 64,
        max_num_batched_tokens=config.max_num_batched_tokens or 8192,
        groups=(GroupCapacity(Full((0,), 1, 8), blocks),),
        parameters=0,
        weight_bytes=0,
        kv_bytes=0,
    )
