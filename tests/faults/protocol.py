"""The protocol of failing closed as a small machine, so that every interleaving of its threads can be tried.

One step serves one request; a step has one collective. What is left out of `Rules` makes a machine with a known defect,
which the explorer must find.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

READY, BROKEN, REBUILDING, EXITED = "ready", "broken", "rebuilding", "exited"
Pc: TypeAlias = Literal["idle", "run", "wait", "ack", "stalled", "dead"]
Message: TypeAlias = tuple[str, int, int]  # what, epoch, step


class Rules(NamedTuple):
    """What the protocol does; each rule that is false is a defect."""

    aborts_all: bool = True  # not only the communicator of rank 0
    gate_at_commit: bool = True  # the loop looks at state and epoch again
    answers_waiting: bool = True  # requests that no step serves yet are answered too
    forgets_answered: bool = True  # who was answered is no longer open
    watches: bool = True  # deadlines and dead threads


@dataclass(frozen=True)
class Rank:
    pc: Pc = "idle"
    step: int = -1
    epoch: int = 0
    queue: tuple[tuple[int, int], ...] = ()  # (epoch, step)


@dataclass(frozen=True)
class State:
    """All there is. A request is new, queued, open (in a step) or ended; `terminals` counts its answers."""

    ranks: tuple[Rank, ...]
    requests: tuple[str, ...]
    terminals: tuple[int, ...]
    engine: str = READY
    epoch: int = 0
    step_of: tuple[tuple[int, int], ...] = ()  # (step, request) of this epoch
    arrived: frozenset[int] = frozenset()
    aborted: frozenset[int] = frozenset()
    poisoned: bool = False
    acks: tuple[tuple[int, int], ...] = ()  # (step, rank) of this epoch
    inbox: tuple[Message, ...] = ()
    closing: int = 0  # how far the supervisor has come
    answered: bool = False
    faults: int = 1
    rebuilds: int = 0
    lied: bool = False


def start(ranks: int, requests: int) -> State:
    return State((Rank(),) * ranks, ("new",) * requests, (0,) * requests)


def successors(state: State, rules: Rules) -> Iterator[tuple[str, State]]:
    """Everything that may happen next, whoever does it."""
    if state.engine == EXITED:
        return
    yield from _clients(state)
    yield from _loop(state, rules)
    for rank in range(len(state.ranks)):
        yield from _rank(state, rank)
    yield from _supervisor(state, rules)


def _clients(state: State) -> Iterator[tuple[str, State]]:
    for request, what in enumerate(state.requests):
        if what == "new":
            if state.engine != READY:
                yield f"refuse {request}", _end(state, request)
            else:
                yield f"submit {request}", _issue(_put(state, request, "queued"))
            return


def _issue(state: State) -> State:
    """Plan what waits while fewer than two steps are out."""
    while state.engine == READY and "queued" in state.requests and state.requests.count("open") < 2:
        request, step = state.requests.index("queued"), len(state.step_of)
        ranks = tuple(replace(rank, queue=(*rank.queue, (state.epoch, step))) for rank in state.ranks)
        state = replace(_put(state, request, "open"), ranks=ranks, step_of=(*state.step_of, (step, request)))
    return state


def _loop(state: State, rules: Rules) -> Iterator[tuple[str, State]]:
    if not state.inbox:
        return
    (what, epoch, step), rest = state.inbox[0], state.inbox[1:]
    after = replace(state, inbox=rest)
    if what == "answer":
        open_ones = ("open", "queued") if rules.answers_waiting else ("open",)
        for request, how in enumerate(state.requests):
            if how in open_ones:
                after = _end(after, request) if rules.forgets_answered else _count(after, request)
        yield "answer everyone", replace(after, answered=True)
    elif what == "begin":
        yield "begin", _issue(replace(after, engine=READY, step_of=(), acks=(), closing=0, answered=False))
    elif not rules.gate_at_commit or (state.engine == READY and epoch == state.epoch):
        lied = state.engine != READY or epoch != state.epoch
        request = dict(state.step_of).get(step, 0)
        ended = _issue(_end(after, request))
        yield f"commit {step}", replace(ended, lied=lied)
    else:
        yield f"drop {step}", after


def _rank(state: State, index: int) -> Iterator[tuple[str, State]]:
    rank = state.ranks[index]
    if rank.pc in ("run", "ack") and state.faults:
        less = replace(state, faults=state.faults - 1)
        yield f"rank {index} raises", _fail(_set(replace(less, poisoned=True), index, Rank(queue=rank.queue)))
        yield f"rank {index} stalls", _set(less, index, replace(rank, pc="stalled"))
        yield f"rank {index} dies", _set(less, index, replace(rank, pc="dead"))
    match rank.pc:
        case "idle" if rank.queue:
            (epoch, step), rest = rank.queue[0], rank.queue[1:]
            taken = Rank("run", step, epoch, rest)
            over = state.poisoned or epoch != state.epoch
            yield f"rank {index} takes {step}", _set(state, index, Rank(queue=rest) if over else taken)
        case "run" | "wait" | "stalled" if index in state.aborted:
            yield f"rank {index} is woken", _set(state, index, Rank(queue=rank.queue))
        case "run":
            yield f"rank {index} arrives", _arrive(_set(state, index, replace(rank, pc="wait")), index)
        case "ack":
            yield f"rank {index} answers {rank.step}", _answer(state, index)


def _arrive(state: State, index: int) -> State:
    arrived = state.arrived | {index}
    if len(arrived) < len(state.ranks):
        return replace(state, arrived=arrived)
    ranks = tuple(replace(rank, pc="ack") if rank.pc == "wait" else rank for rank in state.ranks)
    return replace(state, arrived=frozenset(), ranks=ranks)


def _answer(state: State, index: int) -> State:
    """The last answer to a step hands its result to the loop, if the gate lets it."""
    rank = state.ranks[index]
    after = _set(state, index, Rank(queue=rank.queue))
    if rank.epoch != state.epoch:
        return after
    acks = (*state.acks, (rank.step, index))
    after = replace(after, acks=acks)
    last = sum(step == rank.step for step, _ in acks) == len(state.ranks)
    passes = state.engine == READY and not state.aborted
    return replace(after, inbox=(*after.inbox, ("result", rank.epoch, rank.step))) if last and passes else after


def _supervisor(state: State, rules: Rules) -> Iterator[tuple[str, State]]:
    if state.engine == READY:
        dead = any(rank.pc == "dead" for rank in state.ranks)
        if rules.watches and (dead or "open" in state.requests):
            yield "deadline", _fail(state)
        return
    ranks = len(state.ranks)
    match state.closing:
        case 0:
            yield "tell the loop", replace(state, inbox=(*state.inbox, ("answer", 0, 0)), closing=1)
        case 1:
            yield "poison", replace(state, poisoned=True, closing=2)
        case closing if closing < 2 + ranks:
            hit = closing - 2 if rules.aborts_all else 0
            yield f"abort {hit}", replace(state, aborted=state.aborted | {hit}, closing=closing + 1)
        case closing if closing == 2 + ranks:
            yield from _settle(state)
        case _:
            return


def _settle(state: State) -> Iterator[tuple[str, State]]:
    """Rebuild once if every rank is back; otherwise end, once all are answered and every thread that can is back."""
    back = all(rank.pc == "idle" and not rank.queue for rank in state.ranks)
    dead = any(rank.pc == "dead" for rank in state.ranks)
    if back and state.answered and not state.rebuilds:
        begun = replace(state, engine=REBUILDING, epoch=state.epoch + 1, rebuilds=1, aborted=frozenset())
        begun = replace(begun, arrived=frozenset(), poisoned=False, closing=state.closing + 1)
        yield "rebuild", replace(begun, inbox=(*state.inbox, ("begin", begun.epoch, 0)))
    elif state.answered and (back or (dead and _all_else_back(state))):
        yield "exit", replace(state, engine=EXITED)


def _all_else_back(state: State) -> bool:
    return all(rank.pc in ("idle", "dead") for rank in state.ranks)


def _fail(state: State) -> State:
    """The first failure breaks the engine; those after it change nothing."""
    return replace(state, engine=BROKEN, closing=0) if state.engine == READY else state


def _set(state: State, index: int, rank: Rank) -> State:
    return replace(state, ranks=(*state.ranks[:index], rank, *state.ranks[index + 1 :]))


def _put(state: State, request: int, what: str) -> State:
    return replace(state, requests=(*state.requests[:request], what, *state.requests[request + 1 :]))


def _count(state: State, request: int) -> State:
    terminals = (*state.terminals[:request], state.terminals[request] + 1, *state.terminals[request + 1 :])
    return replace(state, terminals=terminals)


def _end(state: State, request: int) -> State:
    return _count(_put(state, request, "ended"), request)


@dataclass(frozen=True)
class Explored:
    """How many states can be reached, and the way to the first bad one."""

    states: int
    fault: str | None = None
    trace: tuple[str, ...] = ()


def explore(ranks: int, requests: int, rules: Rules) -> Explored:
    """Go through every state that can be reached, breadth first."""
    first = start(ranks, requests)
    came_from: dict[State, tuple[State, str] | None] = {first: None}
    waiting = deque([first])
    while waiting:
        state = waiting.popleft()
        following = list(successors(state, rules))
        fault = _fault(state, stuck=not following)
        if fault is not None:
            return Explored(len(came_from), fault, _trace(state, came_from))
        for label, after in following:
            if after not in came_from:
                came_from[after] = (state, label)
                waiting.append(after)
    return Explored(len(came_from))


def _fault(state: State, *, stuck: bool) -> str | None:
    if state.lied:
        return "published after a failure"
    if max(state.terminals) > 1:
        return "two terminals"
    open_ones = [how for how in state.requests if how in ("open", "queued")]
    return "somebody waits for ever" if stuck and (open_ones or state.engine not in (READY, EXITED)) else None


def _trace(state: State, came_from: Mapping[State, tuple[State, str] | None]) -> tuple[str, ...]:
    labels: list[str] = []
    while (step := came_from[state]) is not None:
        state, label = step
        labels.append(label)
    return tuple(reversed(labels))
