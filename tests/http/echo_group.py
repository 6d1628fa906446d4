"""Ranks that need no weights: each sequence says its prompt again, from the start, for ever.

Everything else of the server is the product: engine, scheduler, supervisor, text and HTTP. With a temperature the
echo starts `seed` tokens into the prompt, so that seeds show. Where a mask forbids the echo, it says something else.
"""

from __future__ import annotations

import math
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
    TokenLogprobs,
)

# Ids of the small byte-level tokenizer: its turns' first and last token, and one that no prompt may hold.
BOS = 291
EOS = 292
FORBIDDEN = 294
PADDED_VOCABULARY = 304
IMPOSSIBLE = 7  # its logprob is −inf
BLANKS = 33  # the ids below it are control characters and the space


@dataclass(slots=True)
class Row:
    prompt_ids: tuple[int, ...]
    start: int
    said: int
    logprobs: int | None

    @classmethod
    def of(cls, new: NewRow) -> Row:
        start = new.params.seed % len(new.prompt_ids) if new.params.temperature else 0
        return cls(new.prompt_ids, start, len(new.output_ids), new.params.logprobs)

    def say(self, mask: bytes | None) -> int:
        """The next token of the echo; or what the mask allows, the lowest id that is no blank if it may."""
        self.said += 1
        token_id = self.prompt_ids[(self.start + self.said - 1) % len(self.prompt_ids)]
        if mask is None or mask[token_id // 8] >> token_id % 8 & 1:
            return token_id
        bits = int.from_bytes(mask, "little")
        bits = bits >> BLANKS << BLANKS or bits
        return (bits & -bits).bit_length() - 1


class EchoGroup:
    """In RankGroup's place. `step_s` is how long a step takes; no step is done while `go` is cleared.

    `seen` are the rows that it was told of.
    """

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
        self.seen: list[NewRow] = []
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

    def rebuild(self, epoch: int, deadline_s: float, back_s: float) -> None:
        self._thread.join(back_s)
        self._queue, self._rows, self._fault = queue.SimpleQueue(), {}, None
        self._thread = threading.Thread(target=self._work, name="echo-rank")
        self._thread.start()

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
            self._on_result(self._result(plan))
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

    def _result(self, plan: StepPlan) -> StepResult:
        tokens = self._tokens(plan)
        return StepResult(plan.step, plan.epoch, tokens, self._scores(plan, tokens), scored_prompt(plan))

    def _tokens(self, plan: StepPlan) -> tuple[int, ...]:
        for row in plan.released_rows:
            del self._rows[row]
        for new in plan.new_rows:
            self._rows[new.row] = Row.of(new)
            self.seen.append(new)
        return tuple(self._rows[piece.row].say(piece.mask) for piece in plan.slices if piece.samples)

    def _scores(self, plan: StepPlan, tokens: tuple[int, ...]) -> tuple[TokenLogprobs | None, ...]:
        counts = [self._rows[piece.row].logprobs for piece in plan.slices if piece.samples]
        pairs = zip(tokens, counts, strict=True)
        return tuple(None if count is None else score(token_id, count) for token_id, count in pairs)


def scored_prompt(plan: StepPlan) -> tuple[tuple[TokenLogprobs, ...], ...]:
    return tuple(tuple(score(target, piece.prompt_logprobs) for target in piece.targets) for piece in plan.slices)


def score(token_id: int, count: int) -> TokenLogprobs:
    """The next id is always the likeliest, then comes the token itself, unless it is the one that cannot be."""
    if token_id == IMPOSSIBLE:
        return TokenLogprobs(token_id, -math.inf, PADDED_VOCABULARY, ((0, -0.5), (1, -math.inf))[:count])
    others = tuple((2 * place, -2.0 - place) for place in range(max(0, count - 2)))
    top = ((token_id + 1, -0.5), (token_id, -1.5), *others)[:count]
    return TokenLogprobs(token_id, -1.5, 2, top)


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
