"""The frozen types that cross the line between the loop and the rank threads. Nothing here knows torch.

A value of this module is made on one side and only read on the other, so none of them needs a lock.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

# --- KV groups: which layers cache alike ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Full:
    """Layers that keep every token. `kv_heads` counts the heads on one rank."""

    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int

    def bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of K and V that one token takes on one rank."""
        return 2 * len(self.layers) * self.kv_heads * self.head_dim * dtype_bytes


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """Layers in which a token sees itself and the `window - 1` tokens before it."""

    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    window: int

    def bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of K and V that one token takes on one rank, while it is inside the window."""
        return 2 * len(self.layers) * self.kv_heads * self.head_dim * dtype_bytes


@dataclass(frozen=True, slots=True)
class Recurrent:
    """Layers with a state of fixed size per sequence: `state_bytes` for all of them together on one rank."""

    layers: tuple[int, ...]
    state_bytes: int


KVGroup: TypeAlias = Full | SlidingWindow | Recurrent


@dataclass(frozen=True, slots=True)
class GroupCapacity:
    """One KV group and the size of its pool, block 0 (reserved for padding rows) included."""

    group: KVGroup
    num_blocks: int


# --- what a sequence asks of the sampler ------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """What decides a sampled token besides the logits and the row's tokens.

    `temperature` 0 is greedy, ties going to the lowest id. `top_k` 0 is off. `logprobs` is the number of top
    logprobs wanted beside the chosen token's (0: only the chosen one), None for none at all.

    `presence_penalty` is taken off the logit of each token generated before, `frequency_penalty` for each time that it
    was; `repetition_penalty` divides a positive logit and multiplies a negative one of tokens in prompt or output.
    `logit_bias` is added to the logits of the ids. Of `bad_words` (token sequences) none is completed by a generated
    token. Nothing that ends the sequence is sampled before `min_tokens` are there, and only `allowed_token_ids` are
    where they are given.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    allowed_token_ids: frozenset[int] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRequest:
    """One sequence to run, as `Engine.submit` takes it. A request with n choices is n of these.

    `max_tokens` None means: up to the context. The model's own end-of-sequence ids stop it unless `ignore_eos`.
    `prompt_logprobs` is the number of top logprobs wanted at every prompt position, None for none. A smaller `priority`
    goes first; any but 0 needs an engine that goes by priorities.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    prompt_logprobs: int | None = None
    priority: int = 0


# --- the step ---------------------------------------------------------------------------------------------


class Slice(msgspec.Struct, frozen=True, gc=False):
    """The tokens of one sequence in one step: positions `start` to `start + count - 1`.

    `token_ids` None is the placeholder: the one input token is what this row's previous step sampled, which only
    the device knows. `samples` is false for a chunk that is not the last. `targets` is not empty where prompt
    logprobs are wanted: `targets[i]` is the prompt token at position `start + i + 1`. Where there is a `mask`, only a
    token i with bit i % 8 of its byte i // 8 set may be sampled.

    One is made for each sequence in each step: a Struct in a fifteenth of the time that a frozen dataclass takes.
    """

    seq_id: int
    row: int
    start: int
    count: int
    token_ids: tuple[int, ...] | None
    samples: bool
    targets: tuple[int, ...] = ()
    prompt_logprobs: int = 0
    mask: bytes | None = None


@dataclass(frozen=True, slots=True)
class TableChange:
    """Entries `index`, `index + 1`, … of one row's block table of one group become `block_ids`."""

    row: int
    group: int
    index: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NewRow:
    """A row is taken into use, by a new sequence or by one that was preempted.

    `prompt_ids` and `output_ids` are all its tokens so far; `tables` has one whole block table per group. `stop_ids`
    are what `params.min_tokens` holds back.
    """

    row: int
    seq_id: int
    params: SamplingParams
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    tables: tuple[tuple[int, ...], ...]
    stop_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step, the same object for every rank.

    A rank applies `released_rows`, then `new_rows`, then `table_changes`, then runs the slices. The sampled ids
    of its ack are in the order of the slices that sample. `failures_seen` counts the failed steps (`StepFailed`) that
    the planner knew of: a rank that has had more answers with `Skipped`.
    """

    step: int
    epoch: int
    slices: tuple[Slice, ...]
    released_rows: tuple[int, ...] = ()
    new_rows: tuple[NewRow, ...] = ()
    table_changes: tuple[TableChange, ...] = ()
    failures_seen: int = 0

    @property
    def num_tokens(self) -> int:
        """T, the tokens that this step computes."""
        return sum(piece.count for piece in self.slices)

    @property
    def has_decode(self) -> bool:
        """Whether any slice continues a sequence that has sampled before."""
        return any(piece.token_ids is None or (piece.samples and piece.count == 1) for piece in self.slices)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities (exact log-softmax, before temperature) at one position.

    `rank` is the chosen token's place among all, from 1; `top` is (id, logprob), best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class RankAck:
    """What one rank did in one step, told by itself.

    `digest` is a running hash of what its own cache code wrote (row, tokens stored, block ids), `free_rows` its
    own count, `collectives` how many it has issued since the epoch began; none is derived from the plan.
    Logprobs come from rank 0 alone: one entry a sampling slice
    (None where none were asked for), and per slice with targets one entry a target.
    """

    step: int
    epoch: int
    rank: int
    token_ids: tuple[int, ...]
    digest: int
    free_rows: int
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    collectives: int = 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """A step that all ranks finished alike. Fields as in `RankAck`; `prompt_logprobs` has one entry a slice."""

    step: int
    epoch: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class StepFailed:
    """A step that failed at the cost of its own sequences: world size 1, prefill slices only.

    The plan's rows and tables were applied; what its slices stored is worth nothing.
    """

    step: int
    epoch: int
    message: str


@dataclass(frozen=True, slots=True)
class Unread:
    """A step that all ranks have done, and one could not tell of: that costs the sequences it had to tell of."""

    step: int
    epoch: int
    message: str


@dataclass(frozen=True, slots=True)
class Skipped:
    """A step planned before the failure of the one ahead of it was known. Nothing of its plan was applied."""

    step: int
    epoch: int


StepOutcome: TypeAlias = StepResult | StepFailed | Unread | Skipped
"""What comes back for a plan, once each, in the order of the plans."""


# --- commands -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Connect:
    """Make the communicator of this epoch; the caches and rows begin empty."""

    epoch: int


@dataclass(frozen=True, slots=True)
class LoadWeights:
    """Read this rank's shard of the weights and build the model."""


@dataclass(frozen=True, slots=True)
class MakeCache:
    """Allocate the KV pools."""

    groups: tuple[GroupCapacity, ...]


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Run the model once on padding tokens, so that whatever is made on first use is made before READY."""


@dataclass(frozen=True, slots=True)
class Settle:
    """Nothing. A rank that carries it out is back at its queue, and has told whatever it had to tell."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Close the communicator and end the thread."""


RankCommand: TypeAlias = Connect | LoadWeights | MakeCache | WarmUp | StepPlan | Settle | Shutdown
"""What a rank's queue holds. The same object goes to every rank."""


# --- start-up ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What the ranks know once they are loaded; the loop's only source for it.

    `weight_bytes` counts each parameter once, in the model's dtype; `kv_bytes` are the pools of all ranks together.
    """

    architecture: str
    world_size: int
    devices: tuple[str, ...]
    communicator: str
    dtype: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    forbidden_token_ids: tuple[int, ...]
    max_model_len: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    groups: tuple[GroupCapacity, ...]
    parameters: int
    weight_bytes: int
    kv_bytes: int
    load_times_s: tuple[tuple[str, float], ...] = ()

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens that the smallest pool without a window holds (of the smallest at all, if all have one)."""
        paged = [cap for cap in self.groups if not isinstance(cap.group, Recurrent)]
        full = [cap for cap in paged if isinstance(cap.group, Full)] or paged
        return min((cap.num_blocks - 1) * self.block_size for cap in full)


# --- how a sequence ends ------------------------------------------------------------------------------------


class FinishReason(enum.StrEnum):
    """The five terminals. Every request gets exactly one."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminal:
    """How one sequence ended. `stop_token_id` is set where a stop token ended it; `message` where it failed.

    `engine_wide`: it failed as everyone did who was open then. The engine itself may be READY again by the time that
    this is read.
    """

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    stop_token_id: int | None = None
    message: str | None = None
    engine_wide: bool = False
