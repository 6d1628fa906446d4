"""The fault table: every fault, wherever it can strike, over a real engine; five outcomes are looked at for each."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from peg.deadlines import Deadlines
from peg.errors import EngineUnavailable
from peg.failure import CauseKind, EngineState, Fault, FaultKind, FaultPoint
from peg.plan import FinishReason, StepPlan
from tests.faults.cells import STANDS_STILL, STARTING, Cell, Outcome, Phase, cells, table
from tests.faults.faulty_engine import (
    CHUNK_TOKENS,
    HEALTHY_S,
    MAX_TOKENS,
    FaultyEngine,
    open_files,
    temporary_files,
    threads,
    until,
    write_model,
)

SHORT, LONG, QUEUED = [5, 6, 7], [(7 * i) % 40 + 3 for i in range(2 * CHUNK_TOKENS + 3)], [9, 10, 11, 12]
LIMIT_S = 0.3
LIMITS = Deadlines(
    step_cap_s=5.0,
    step_floor_s=5.0,
    pickup_s=5.0,
    abort_s=0.2,
    join_s=0.2,
    linger_s=0.05,
    exit_s=0.8,
    rebuild_s=0.6,
    rebuild_limit=1,
)
LATE_S = 1.5  # how much later than its deadline something may be on a busy machine
WAIT = (FaultKind.STALL, FaultKind.HANG, FaultKind.ABORT_HANGS)  # for a deadline, side by side
AT_A_TIME = 4
CELLS = cells()


def limits(cell: Cell) -> Deadlines:
    """Short where the fault can be found by its deadline alone, so that a busy machine is not taken for a fault."""
    if cell.kind not in STANDS_STILL and cell.kind not in (FaultKind.SKIP, FaultKind.EXTRA):
        return LIMITS
    match cell.phase:
        case Phase.LOAD:
            return replace(LIMITS, load_s=LIMIT_S)
        case Phase.WARM_UP:
            return replace(LIMITS, warm_up_s=LIMIT_S)
        case _:
            return replace(LIMITS, step_cap_s=LIMIT_S, step_floor_s=LIMIT_S)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def right(model: Path) -> dict[tuple[int, ...], list[int]]:
    """What each prompt goes on with where nothing is at fault."""

    async def generate() -> dict[tuple[int, ...], list[int]]:
        faulty = FaultyEngine(model, Deadlines())
        await faulty.engine.start()
        prompts = (SHORT, LONG, QUEUED)
        for prompt in prompts:
            faulty.submit(prompt)
        await faulty.all_answered(HEALTHY_S)
        await faulty.close()
        return {tuple(prompt): tokens for prompt, tokens in zip(prompts, faulty.tokens, strict=True)}

    return asyncio.run(generate())


@pytest.fixture(autouse=True)
def as_in_the_product() -> Iterator[None]:
    """Whoever runs for ever in Python gives the interpreter lock back soon."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(scope="module")
def ran() -> set[Cell]:
    return set()


@pytest.mark.parametrize(("kind", "phase"), list(dict.fromkeys((cell.kind, cell.phase) for cell in CELLS)))
async def test_cells(
    kind: FaultKind, phase: Phase, model: Path, right: dict[tuple[int, ...], list[int]], ran: set[Cell]
) -> None:
    """Cause, answers, silence after the fault, the end or the rebuild, and nothing left.

    Where engines wait some run at a time; others would only take the interpreter lock from each other. Their deadlines
    are short and they share two cores: what fails beside others has to pass alone.
    """
    files, temporary = open_files(), temporary_files()
    places = asyncio.Semaphore(AT_A_TIME if kind in WAIT else 1)

    async def run(cell: Cell) -> str | None:
        async with places:
            try:
                await run_cell(cell, model, right)
            except (AssertionError, TimeoutError) as error:
                return f"{cell}: {''.join(traceback.format_exception(error))}"
            finally:
                ran.add(cell)
        return None

    cells = [cell for cell in CELLS if (cell.kind, cell.phase) == (kind, phase)]
    first = await asyncio.gather(*map(run, cells))
    again = [cell for cell, failure in zip(cells, first, strict=True) if failure is not None]
    failed = [failure for cell in again if (failure := await run(cell)) is not None]
    assert not failed, "\n".join(failed)
    await until(lambda: threads() == [], HEALTHY_S)
    gc.collect(0)
    assert open_files() <= files
    assert temporary_files() == temporary


async def run_cell(cell: Cell, model: Path, right: dict[tuple[int, ...], list[int]]) -> None:
    faulty = FaultyEngine(
        model,
        limits(cell),
        tensor_parallel_size=cell.world_size,
        max_num_seqs=2 if cell.phase is Phase.MIXED else 1,
        on_failure=cell.policy,
    )
    try:
        if cell.phase in STARTING:
            await fail_to_start(cell, faulty)
        else:
            await strike(cell, faulty, right)
    finally:
        await faulty.close()
    assert not [thread.name for thread in faulty.threads() if thread.is_alive()]


async def fail_to_start(cell: Cell, faulty: FaultyEngine) -> None:
    began_s = time.monotonic()
    faulty.inject(Fault(cell.kind, cell.rank, 1, cell.point, cell.place))
    start = asyncio.create_task(faulty.engine.start())
    await the_end(cell, faulty, began_s)
    with pytest.raises(EngineUnavailable) as refused:
        await start
    assert str(refused.value) == str(faulty.engine.cause)
    check_cause(cell, faulty, None)
    with pytest.raises(EngineUnavailable):
        faulty.submit(SHORT)


async def strike(cell: Cell, faulty: FaultyEngine, right: dict[tuple[int, ...], list[int]]) -> None:
    """One request meets the fault, two wait behind it, and one comes later."""
    await faulty.engine.start()
    prompts = [LONG if cell.phase is Phase.CHUNK else SHORT, QUEUED, QUEUED]
    fault = Fault(cell.kind, cell.rank, 1, cell.point, cell.place)
    draining = None
    if cell.phase in (Phase.PREFILL, Phase.SCORED, Phase.CHUNK):
        struck = faulty.next_step
        faulty.inject(fault)
        faulty.submit(prompts[0], prompt_logprobs=1 if cell.phase is Phase.SCORED else None)
    else:
        running = faulty.submit(SHORT, host_paced=cell.phase is Phase.DECODE)
        await faulty.until(running, 2)
        if cell.phase is Phase.DRAIN:
            draining = asyncio.create_task(faulty.engine.drain(HEALTHY_S))
            await asyncio.sleep(0)
            assert faulty.engine.state is EngineState.DRAINING
            prompts = prompts[:1]
        struck = faulty.next_step
        if cell.phase is Phase.REBUILD:
            faulty.inject(Fault(FaultKind.RAISE, 0, 1, FaultPoint.BEFORE))
        faulty.inject(fault)
    for prompt in prompts[1:]:
        faulty.submit(prompt)
    waited_s = LIMIT_S if limits(cell) is not LIMITS else 0.0
    await faulty.all_answered(HEALTHY_S)
    index, plan = next((index, plan) for index, plan in enumerate(faulty.plans) if plan.step == struck)
    check_phase(cell, plan)
    if cell.outcome is Outcome.REQUEST:
        check_only_the_request_failed(faulty, right, prompts, plan)
        if draining is not None:
            await draining
        return
    began_s = faulty.issued_s[index] + waited_s
    assert max(faulty.answered_s) - began_s < LATE_S
    if cell.outcome is Outcome.REBUILT:
        await rebuilt(cell, faulty, right, began_s, struck)
    else:
        with pytest.raises(EngineUnavailable) as refused:
            faulty.submit(SHORT)
        assert str(faulty.engine.cause) in str(refused.value)
        await the_end(cell, faulty, began_s)
        check_cause(cell, faulty, struck)
    check_answers(cell, faulty, right, prompts, struck)
    if draining is not None:
        await draining


async def the_end(cell: Cell, faulty: FaultyEngine, began_s: float) -> None:
    """The process ends with 70 within its bound, by force only where a thread did not come back."""
    over = LIMIT_S if cell.phase in STARTING else 0.0
    bound_s = over + LIMITS.exit_s + LATE_S + (LIMITS.rebuild_s if cell.phase is Phase.REBUILD else 0.0)
    if cell.outcome is Outcome.LEFT_BEHIND:
        await until(lambda: bool(faulty.end.codes), bound_s)
        faulty.let_go()
    else:
        assert await asyncio.wait_for(faulty.engine.ended(), bound_s) == 70
    assert time.monotonic() - began_s < bound_s
    assert faulty.engine.state is EngineState.BROKEN
    assert faulty.end.armed
    if cell.outcome is not Outcome.LEFT_BEHIND:
        await faulty.engine.close()
        assert faulty.end.codes == []


async def rebuilt(
    cell: Cell, faulty: FaultyEngine, right: dict[tuple[int, ...], list[int]], began_s: float, struck: int
) -> None:
    """READY again in a new epoch, the cause kept, and whoever comes now is served."""
    engine = faulty.engine
    await until(lambda: engine.state is EngineState.READY and bool(engine.vitals().rebuilt), LIMITS.rebuild_s + LATE_S)
    assert time.monotonic() - began_s < LIMITS.rebuild_s + LATE_S
    assert (faulty.engine.epoch, faulty.engine.cause) == (1, None)
    check_cause(cell, faulty, struck)
    later = faulty.submit(QUEUED)
    await faulty.all_answered(HEALTHY_S)
    assert faulty.tokens.pop() == right[tuple(QUEUED)]
    faulty.streams.remove(later)


def check_cause(cell: Cell, faulty: FaultyEngine, struck: int | None) -> None:
    """Kind, rank, step, message and traceback are those of the fault; what came of it is beside it."""
    vitals = faulty.engine.vitals()
    cause = vitals.cause or vitals.rebuilt[0].cause
    assert cause.kind in cell.causes, (str(cause), [str(each) for each in vitals.secondary])
    assert vitals.failures == {(cause.kind, cause.rank): 1}
    if cell.phase is Phase.REBUILD:
        assert (cause.rank, cause.step) == (0, struck)
        assert vitals.secondary, "what stopped the rebuild is told too"
        return
    if cell.names_rank:
        assert cause.rank == cell.rank, str(cause)
    if cell.names_step:
        after = 1 if cell.phase is Phase.CHUNK and cell.kind in (FaultKind.SKIP, FaultKind.EXTRA) else 0
        assert cause.step is not None
        assert struck is not None
        assert struck <= cause.step <= struck + after, str(cause)
    raised = cause.kind in (CauseKind.RANK_RAISED, CauseKind.STARTUP_FAILED, CauseKind.LOOP_FAILED)
    if raised or cause.kind is CauseKind.SUPERVISOR_FAILED:
        assert "Traceback" in cause.traceback
    words = {FaultKind.MEMORY_ERROR: "MemoryError", FaultKind.DIE: "has ended", FaultKind.COMM_ERROR: "injected into"}
    if raised and cell.kind not in words and cell.kind not in (FaultKind.SKIP, FaultKind.EXTRA, FaultKind.WRONG_SHAPE):
        assert "injected" in cause.message
    assert words.get(cell.kind, "") in cause.message


def check_phase(cell: Cell, plan: StepPlan) -> None:
    """The step that was struck is of the kind that the cell says."""
    first = plan.slices[0]
    match cell.phase:
        case Phase.PREFILL | Phase.SCORED:
            assert (first.count, first.samples) == (len(SHORT), True)
            assert bool(first.targets) is (cell.phase is Phase.SCORED)
        case Phase.CHUNK:
            assert (first.count, first.samples) == (CHUNK_TOKENS, False)
        case Phase.MIXED:
            assert plan.has_decode
            assert any(piece.count == len(QUEUED) for piece in plan.slices)
        case Phase.DECODE:
            assert (first.count, first.token_ids is None) == (1, False)
        case _:
            assert (first.count, first.token_ids) == (1, None)


def check_answers(
    cell: Cell, faulty: FaultyEngine, right: dict[tuple[int, ...], list[int]], prompts: list[list[int]], struck: int
) -> None:
    """Each request has one terminal of the right kind, and no token that was computed after the fault."""
    vitals = faulty.engine.vitals()
    cause = vitals.cause or vitals.rebuilt[0].cause
    for seq_id, (stream, tokens, prompt) in enumerate(zip(faulty.streams, faulty.tokens, prompts, strict=True)):
        terminal = stream.terminal
        assert terminal is not None
        assert (terminal.reason, terminal.message) == (FinishReason.FAILED, str(cause))
        assert terminal.completion_tokens == len(tokens)
        assert tokens == right[tuple(prompt)][: len(tokens)]
        before = [plan for plan in faulty.plans if plan.epoch == 0 and plan.step < struck]
        most = sum(piece.samples for plan in before for piece in plan.slices if piece.seq_id == seq_id)
        if cell.kind is not FaultKind.SUPERVISOR_RAISES:  # that strikes no step
            assert len(tokens) <= most
    finished = faulty.engine.stats().scheduler.counters.finished
    ends = Counter({reason: count for reason, count in finished.items() if count})
    expected = Counter({FinishReason.FAILED: len(prompts)})
    if cell.outcome is Outcome.REBUILT:
        expected[FinishReason.LENGTH] += 1
    assert ends == expected


def check_only_the_request_failed(
    faulty: FaultyEngine, right: dict[tuple[int, ...], list[int]], prompts: list[list[int]], struck: StepPlan
) -> None:
    """The step's own requests fail with its reason, those behind it are served, and the engine goes on."""
    hit = {piece.seq_id for piece in struck.slices}
    for seq_id, (stream, tokens, prompt) in enumerate(zip(faulty.streams, faulty.tokens, prompts, strict=True)):
        assert stream.terminal is not None
        if seq_id in hit:
            before = [plan for plan in faulty.plans if plan.step < struck.step]
            most = sum(piece.samples for plan in before for piece in plan.slices if piece.seq_id == seq_id)
            assert stream.terminal.reason is FinishReason.FAILED
            assert "injected" in str(stream.terminal.message)
            assert tokens == right[tuple(prompt)][: len(tokens)]
            assert len(tokens) == most
        else:
            assert (stream.terminal.reason, len(tokens)) == (FinishReason.LENGTH, MAX_TOKENS)
            assert tokens == right[tuple(prompt)]
    assert hit
    assert faulty.engine.state in (EngineState.READY, EngineState.DRAINING)
    assert (faulty.engine.cause, faulty.end.codes) == (None, [])


def test_every_cell_was_run(ran: set[Cell], capsys: pytest.CaptureFixture[str]) -> None:
    """What does not exist says why, and of what exists nothing was left out."""
    reasons = Counter(reason for _, reason in table() if reason is not None)
    assert len({cell for cell, _ in table()}) == len(list(table()))
    with capsys.disabled():
        for reason, count in reasons.most_common():
            print(f"\n{count} cells do not exist: {reason}", end="")
        print(f"\ncells: {len(ran)} run, {len(CELLS)} exist")
    assert ran == set(CELLS)
