"""RankGroup: start, steps, agreement of the ranks, and an end without anything left behind."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from peg.errors import CheckpointError, ConfigError, InvalidRequest, RankError
from peg.failure import CauseKind, Fault, FaultKind, FaultPoint
from peg.kernels.heads import Angles, HeadRules, turn_queries
from peg.models.inputs import LayerCache
from peg.plan import (
    SamplingParams,
    Shutdown,
    Skipped,
    StepFailed,
    StepPlan,
    StepResult,
    TableChange,
)
from peg.ranks.machine import cores_per_rank
from peg.ranks.runner import Runner
from tests.unit.tiny_group import CONFIG, SOON_S, TinyGroup, rank_threads, tiny_group, write_config

PROMPTS = [[random.Random(seed).randrange(3, 50) for _ in range(5 + 7 * seed)] for seed in range(5)]


def runner(tiny: TinyGroup, rank: int) -> Runner:
    return tiny.group._ranks[rank].runner


# --- what it computes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(seed=5, top_p=0.9, logprobs=2)])
def test_ids_are_the_same_at_every_world_size_chunk_and_batch(params: SamplingParams, tmp_path: Path) -> None:
    """In fp32 the ids do not depend on ranks, chunks, batch mates or preemption."""
    alone = []
    for prompt in PROMPTS:
        with tiny_group(tmp_path) as tiny:
            alone += tiny.generate([prompt], 12, params)[0]
    for world_size, chunk, kv_bytes in (
        (1, 512, 1 << 20),
        (3, 512, 1 << 20),
        (3, 1, 1 << 20),
        (1, 7, 1 << 20),
        (3, 16, 8704),
    ):
        options = {"max_num_batched_tokens": chunk, "kv_cache_memory_bytes": kv_bytes}
        with tiny_group(tmp_path, world_size, **options) as tiny:
            assert tiny.generate(PROMPTS, 12, params)[0] == alone, (world_size, chunk, kv_bytes)


@pytest.mark.parametrize("world_size", [1, 3])
def test_logprobs_come_back_for_prompt_and_sampled_tokens(world_size: int, tmp_path: Path) -> None:
    """Every prompt position but the first is scored, whatever the chunks; sampled tokens where it was asked for."""
    prompt = PROMPTS[4]
    with tiny_group(tmp_path, world_size, max_num_batched_tokens=7) as tiny:
        (tokens,), (scored,) = tiny.generate([prompt], 3, prompt_logprobs=2)
    with tiny_group(tmp_path, world_size) as tiny:
        tiny.group.run(tiny.prefill(prompt))
        assert tiny.result().logprobs == ()
        plan = tiny.prefill(prompt, row=1)
        wanted = replace(plan.new_rows[0], params=SamplingParams(temperature=0, logprobs=2))
        tiny.group.run(replace(plan, new_rows=(wanted,)))
        (sampled,) = tiny.result().logprobs
    assert [entry.token_id for entry in scored] == prompt[1:]
    assert all(len(entry.top) == 2 and entry.logprob < 0 for entry in scored)
    assert sampled is not None
    assert (sampled.token_id, sampled.rank, len(sampled.top)) == (tokens[0], 1, 2)
    assert sampled.top[0] == (tokens[0], sampled.logprob)


def test_two_steps_in_flight_use_what_was_sampled(tmp_path: Path) -> None:
    """A placeholder stands for the id of a step whose result nobody has seen yet."""
    with tiny_group(tmp_path) as tiny:
        expected = tiny.generate([[5, 6, 7], [9]], 3)[0][0]
    with tiny_group(tmp_path, 3) as tiny:
        for plan in (tiny.prefill([5, 6, 7]), tiny.decode(3), tiny.decode(4)):
            tiny.group.run(plan)
        assert [tiny.result().token_ids[0] for _ in range(3)] == expected


# --- start --------------------------------------------------------------------------------------------------


def test_info_tells_what_was_loaded(tmp_path: Path) -> None:
    """EngineInfo carries the resolved configuration and the sizes of everything."""
    with tiny_group(tmp_path, 3, kv_cache_memory_bytes=10_000) as tiny:
        info = tiny.info
        names = [(thread.name, thread.daemon) for thread in threading.enumerate() if thread.name.startswith("peg-")]
    assert sorted(names) == [(f"peg-rank-{rank}", False) for rank in range(3)]
    assert (info.architecture, info.world_size, info.devices) == ("LlamaForCausalLM", 3, ("cpu",) * 3)
    assert (info.communicator, info.dtype, info.vocab_size, info.eos_token_ids) == ("thread", "float32", 50, (2,))
    assert (info.max_model_len, info.block_size, info.max_num_seqs, info.max_num_batched_tokens) == (64, 4, 4, 512)
    block_bytes = 2 * 2 * 1 * 8 * 4 * 4  # K and V, layers, heads of one rank, head dim, fp32, tokens
    assert info.groups[0].num_blocks == 10_000 // block_bytes
    assert info.kv_bytes == info.groups[0].num_blocks * block_bytes * 3
    q_and_o, k_and_v, mlp, norms = 2 * 48 * 24, 2 * 24 * 24, 3 * 20 * 24, 2 * 24
    assert info.parameters == 50 * 24 + 24 + 2 * (q_and_o + k_and_v + mlp + norms)
    assert [name for name, _ in info.load_times_s] == ["validate", "load", "connect", "warm up"]


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"tensor_parallel_size": 2}, ConfigError, "6 query heads and 3 KV heads"),
        ({"max_model_len": 65}, ConfigError, "--max-model-len 65: the model has 64 positions"),
        ({"kv_cache_memory_bytes": 4000}, ConfigError, "raise --kv-cache-memory to"),
        ({"dtype": "float16"}, ConfigError, "--dtype float16: not on a CPU"),
        ({"devices": ("0",)}, ConfigError, "built without CUDA|not here"),
        ({"load_format": "auto"}, CheckpointError, "model.safetensors"),
    ],
)
def test_a_faulty_start_is_the_users_and_leaves_no_thread(
    options: dict[str, object], kind: type[Exception], words: str, tmp_path: Path
) -> None:
    """What the user got wrong is a UsageError that names it; no failure is reported, and nothing is left."""
    world_size = int(str(options.pop("tensor_parallel_size", 1)))
    tiny = TinyGroup(write_config(tmp_path), world_size, **options)
    with pytest.raises(kind, match=words):
        tiny.group.start(SOON_S)
    assert tiny.failures == []
    assert rank_threads() == []
    assert tiny.group.close(SOON_S)


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    """The message names the architecture and those that peg runs."""
    tiny = TinyGroup(write_config(tmp_path, architectures=["Unheard"]), 1)
    with pytest.raises(CheckpointError, match=r"Unheard: peg runs .*LlamaForCausalLM"):
        tiny.group.start(SOON_S)


Phase = Callable[[Runner], None]


@pytest.mark.parametrize("phase", ["connect", "load", "make_cache", "warm_up"])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_fails_in_the_start_ends_all(
    phase: str, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure in any phase on any rank is told with rank and phase, ends the start at once, leaves no thread."""
    whole = getattr(Runner, phase)

    def broken(self: Runner, *args: object) -> None:
        if self.rank == rank:
            raise ZeroDivisionError("made to fail")
        whole(self, *args)

    monkeypatch.setattr(Runner, phase, broken)
    tiny = TinyGroup(write_config(tmp_path), 3)
    with pytest.raises(RankError, match="made to fail"):
        tiny.group.start(SOON_S)
    cause = tiny.first_failure()
    assert (cause.kind, cause.rank) == (CauseKind.STARTUP_FAILED, rank)
    assert "in broken" in cause.traceback
    assert rank_threads() == []
    assert len(tiny.failures) == 1


def test_a_faulty_checkpoint_found_while_loading_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A UsageError on one rank comes out of the start as it is, although its peers feel the abort."""
    whole = Runner.warm_up

    def broken(self: Runner) -> None:
        if self.rank == 1:
            raise CheckpointError("a truncated file")
        whole(self)

    monkeypatch.setattr(Runner, "warm_up", broken)
    tiny = TinyGroup(write_config(tmp_path), 3)
    with pytest.raises(CheckpointError, match="a truncated file"):
        tiny.group.start(SOON_S)
    assert rank_threads() == []
    assert tiny.failures == []


def test_a_rank_that_is_late_in_the_start_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start's deadline names phase and rank, and the start returns although the rank does not."""
    go_on = threading.Event()
    whole = Runner.load

    def slow(self: Runner) -> None:
        if self.rank == 1:
            assert go_on.wait(SOON_S)
        whole(self)

    monkeypatch.setattr(Runner, "load", slow)
    tiny = TinyGroup(write_config(tmp_path), 3)
    with pytest.raises(RankError, match=r"LoadWeights took over 0\.\d s on rank 1"):
        tiny.group.start(0.5)
    assert tiny.first_failure().kind is CauseKind.STARTUP_DEADLINE
    go_on.set()
    assert tiny.group.join(SOON_S)


def test_poison_ends_a_start_that_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever winds the engine up while it loads does not wait for the start's own deadline."""
    go_on, loading = threading.Event(), threading.Event()

    def slow(self: Runner) -> None:
        loading.set()
        assert go_on.wait(SOON_S)

    monkeypatch.setattr(Runner, "load", slow)
    tiny = TinyGroup(write_config(tmp_path), 1)

    def poison() -> None:
        assert loading.wait(SOON_S)
        tiny.group.poison("someone had enough")

    helper = threading.Thread(target=poison)
    helper.start()
    threading.Timer(0.5, go_on.set).start()
    with pytest.raises(RankError, match="someone had enough"):
        tiny.group.start(SOON_S)
    assert tiny.group.join(SOON_S)
    helper.join()


# --- agreement ----------------------------------------------------------------------------------------------


class SkipsOneWrite:
    """A layer's cache that forgets its next write, as a broken rank would."""

    def __init__(self, cache: LayerCache) -> None:
        self._cache = cache
        self.k, self.v = cache.k, cache.v
        self._skipped = False

    def write(self, heads: Tensor, rules: HeadRules, angles: Angles, slots: Tensor) -> Tensor:
        if self._skipped:
            return self._cache.write(heads, rules, angles, slots)
        self._skipped = True
        return turn_queries(heads, rules, angles)


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("decode", [False, True])
def test_a_skipped_cache_write_is_caught_on_that_step(rank: int, decode: bool, tmp_path: Path) -> None:
    """One write of one layer, skipped on one rank, is a divergence of digests, and the step is not published."""
    with tiny_group(tmp_path, 3) as tiny:
        tiny.group.run(tiny.prefill([5, 6, 7, 8, 9]))
        tiny.result()
        runner(tiny, rank).caches[1] = SkipsOneWrite(runner(tiny, rank).caches[1])
        plan = tiny.decode(5) if decode else tiny.prefill([4, 4, 4], row=1)
        tiny.group.run(plan)
        cause = tiny.first_failure()
        assert (cause.kind, cause.step, cause.rank) == (CauseKind.RANK_DIVERGED, plan.step, rank)
        assert "digest" in cause.message
        assert "token_ids" not in cause.message or rank >= 0
        assert tiny.outcomes.empty()


def test_a_write_to_other_slots_is_caught(tmp_path: Path) -> None:
    """A rank that stores at a slot of its own has another digest, though it stored as much."""
    with tiny_group(tmp_path, 3) as tiny:
        tiny.group.run(tiny.prefill([5, 6, 7]))
        tiny.result()
        runner(tiny, 1)._tables.blocks[0][0, 0] = 30
        tiny.group.run(tiny.decode(3))
        assert "digest" in tiny.first_failure().message
        assert tiny.outcomes.empty()


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_flipped_token_is_caught_on_that_step(rank: int, tmp_path: Path) -> None:
    """One sampled id that differs on one rank is a divergence that names step, rank and both ids."""
    with tiny_group(tmp_path, 3) as tiny:
        sampler = runner(tiny, rank)._sampler
        whole = sampler.sample
        sampler.sample = lambda *args: whole(*args) ^ 1  # type: ignore[method-assign]
        plan = tiny.prefill([5, 6, 7])
        tiny.group.run(plan)
        cause = tiny.first_failure()
        assert (cause.kind, cause.step, cause.rank) == (CauseKind.RANK_DIVERGED, plan.step, rank)
        assert "token_ids" in cause.message
        assert "digest" not in cause.message
        assert tiny.outcomes.empty()


def test_free_rows_are_compared(tmp_path: Path) -> None:
    """A rank that lost a row is found, though ids and digests agree."""
    with tiny_group(tmp_path, 3) as tiny:
        runner(tiny, 2)._tables._used[3] = True
        tiny.group.run(tiny.prefill([5, 6, 7]))
        cause = tiny.first_failure()
        assert "free_rows: 3 on rank 0, 1; 2 on rank 2" in cause.message


def test_a_slice_that_does_not_begin_where_its_row_ends_is_refused(tmp_path: Path) -> None:
    """The rank's own frontier and the plan must agree, also without peers, and not at the cost of one request."""
    with tiny_group(tmp_path) as tiny:
        tiny.group.run(tiny.prefill([5, 6, 7]))
        tiny.result()
        tiny.group.run(tiny.decode(4))
        cause = tiny.first_failure()
        assert cause.kind is CauseKind.RANK_DIVERGED
        assert "row 0 begins at 4, the row has stored 3" in cause.message


def test_a_lost_command_is_found(tmp_path: Path) -> None:
    """A rank that gets step n + 1 after step n − 1 fails."""
    with tiny_group(tmp_path, 3) as tiny:
        tiny.group.run(tiny.prefill([5, 6, 7]))
        tiny.result()
        tiny.decode(3)
        tiny.group.run(tiny.decode(4))
        assert "step 2 came after step 0" in tiny.first_failure().message


# --- failing and ending -------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [True, False])
@pytest.mark.parametrize("scored", [True, False])
def test_a_failed_prefill_costs_its_own_request_only(samples: bool, scored: bool, tmp_path: Path) -> None:
    """World size 1: the step is StepFailed, the one behind it Skipped whole, and the next one is served."""
    with tiny_group(tmp_path) as tiny:
        expected = tiny.generate([[5, 6, 7]], 4)[0][0]
    with tiny_group(tmp_path, enable_fault_injection=True) as tiny:
        tiny.group.inject(Fault(FaultKind.RAISE, 0, 1, FaultPoint.AFTER))
        plan = tiny.prefill([5, 9, 7], samples=samples)
        scoring = msgspec.structs.replace(plan.slices[0], targets=(9, 7) if scored else (), prompt_logprobs=1)
        tiny.group.run(replace(plan, slices=(scoring,)))
        tiny.group.run(tiny.prefill([8, 9], row=1))
        failed = tiny.outcome()
        assert isinstance(failed, StepFailed)
        assert (failed.step, failed.message) == (0, "InjectedFault: injected on rank 0 after a collective")
        assert tiny.outcome() == Skipped(1, 0)
        after = tiny.prefill([5, 6, 7], row=1, failures_seen=1)
        tiny.group.run(replace(after, released_rows=(0,)))
        tokens = list(tiny.result().token_ids)
        for start in range(3, 6):
            tiny.group.run(replace(tiny.decode(start, row=1), failures_seen=1))
            tokens += tiny.result().token_ids
        assert tokens == expected
        assert tiny.failures == []


@pytest.mark.parametrize(("world_size", "decode"), [(1, True), (3, False), (3, True)])
def test_other_failures_are_the_engines(world_size: int, decode: bool, tmp_path: Path) -> None:
    """With peers, or with a decode slice, an exception breaks the engine and no later step is run."""
    with tiny_group(tmp_path, world_size, enable_fault_injection=True) as tiny:
        tiny.group.run(tiny.prefill([5, 6, 7]))
        tiny.result()
        tiny.group.inject(Fault(FaultKind.RAISE, world_size - 1, 1))
        plan = tiny.decode(3) if decode else tiny.prefill([5, 6, 7], row=1)
        tiny.group.run(plan)
        tiny.group.run(tiny.decode(4))
        cause = tiny.first_failure()
        assert (cause.kind, cause.rank, cause.step) == (CauseKind.RANK_RAISED, world_size - 1, plan.step)
        assert cause.phase == "forward"
        assert "InjectedFault" in cause.traceback
        assert tiny.group.abort(str(cause), 1.0)
        assert tiny.group.join(SOON_S)
        assert max(beat.step for beat in tiny.group.heartbeats()) == plan.step
        assert len(tiny.failures) == 1
        assert tiny.outcomes.empty()


def test_nothing_is_published_once_the_gate_is_closed(tmp_path: Path) -> None:
    """A result that is ready after the state, the epoch or a communicator said no is dropped."""
    with tiny_group(tmp_path, 3) as tiny:
        tiny.may_publish = False
        tiny.group.run(tiny.prefill([5, 6, 7]))
        wait_idle(tiny, 0)
        tiny.may_publish = True
        tiny.group._comms[1].abort("an asynchronous error")
        assert tiny.group.poll() == "an asynchronous error"
        assert tiny.outcomes.empty()


def wait_idle(tiny: TinyGroup, step: int) -> None:
    """Until every rank is back at its queue after this step."""
    done = threading.Event()
    for _ in range(2000):
        if all(beat.phase == "idle" and beat.step == step for beat in tiny.group.heartbeats()):
            return
        done.wait(0.005)
    raise AssertionError(tiny.group.heartbeats())


def test_a_poisoned_group_runs_nothing(tmp_path: Path) -> None:
    """Steps queued behind the poison are not begun, later ones not even queued."""
    with tiny_group(tmp_path, 3) as tiny:
        tiny.group.run(tiny.prefill([5, 6, 7]))
        tiny.result()
        tiny.group.poison("enough")
        tiny.group.run(tiny.decode(3))
        assert [beat.step for beat in tiny.group.heartbeats()] == [0, 0, 0]
        assert tiny.group.abort("enough", 1.0)


@pytest.mark.parametrize("world_size", [1, 3])
def test_rebuild_begins_a_new_epoch(world_size: int, tmp_path: Path) -> None:
    """After an abort the same threads and weights serve a new epoch with empty rows; old plans are not run."""
    with tiny_group(tmp_path, world_size) as tiny:
        first = tiny.generate([[5, 6, 7]], 4)[0]
        threads = rank_threads()
        assert tiny.group.abort("a test", 1.0)
        tiny.group.rebuild(1, SOON_S)
        assert tiny.group.poll() is None
        assert tiny.generate([[5, 6, 7]], 4, epoch=1)[0] == first
        assert rank_threads() == threads


def test_cores_are_divided_among_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank's thread has its share of the cores, and other threads keep theirs."""
    counts: list[int] = []
    whole = Runner.warm_up

    def look(self: Runner) -> None:
        counts.append(torch.get_num_threads())
        whole(self)

    monkeypatch.setattr(Runner, "warm_up", look)
    torch.set_num_threads(5)
    try:
        with tiny_group(tmp_path, 3):
            pass
        assert torch.get_num_threads() == 5
    finally:
        torch.set_num_threads(cores_per_rank(1))
    assert counts == [cores_per_rank(3)] * 3


def test_inject_is_refused_unless_asked_for_at_start(tmp_path: Path) -> None:
    """Without the flag a fault is a ConfigError; a rank that is not there is an InvalidRequest."""
    fault = Fault(FaultKind.RAISE, 3, 1)
    with tiny_group(tmp_path, 3) as tiny, pytest.raises(ConfigError, match="--enable-fault-injection"):
        tiny.group.inject(fault)
    with tiny_group(tmp_path, 3, enable_fault_injection=True) as tiny, pytest.raises(InvalidRequest, match="0 to 2"):
        tiny.group.inject(fault)


def test_a_thread_that_ends_is_seen(tmp_path: Path) -> None:
    """dead_rank names a rank whose thread is gone though nobody asked it to end; none while all live."""
    with tiny_group(tmp_path, 3) as tiny:
        assert tiny.group.dead_rank() is None
        tiny.group._ranks[1].put(Shutdown())
        tiny.group._ranks[1].thread.join(SOON_S)
        assert tiny.group.dead_rank() == 1


def test_table_changes_reach_the_rank(tmp_path: Path) -> None:
    """A block that a later plan brings is the one that is written to."""
    with tiny_group(tmp_path) as tiny:
        plan = tiny.prefill([5, 6, 7, 8])
        short = replace(plan.new_rows[0], tables=((1,),))
        tiny.group.run(replace(plan, new_rows=(short,)))
        tiny.result()
        grown: StepPlan = replace(tiny.decode(4), table_changes=(TableChange(0, 0, 1, (29,)),))
        tiny.group.run(grown)
        assert isinstance(tiny.outcome(), StepResult)
        cache = runner(tiny, 0).caches[0]
        assert cache.k[29, 0].abs().sum() > 0
        assert cache.k[29, 1:].abs().sum() == 0
        assert CONFIG["num_hidden_layers"] == len(runner(tiny, 0).caches)
