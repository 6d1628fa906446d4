"""Ranks on a device that works by itself: what is begun before what is done, in which order it is answered."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from peg.errors import RankError
from peg.failure import CauseKind, Fault, FaultKind
from peg.plan import Skipped, Slice, StepFailed, StepPlan, StepResult
from peg.ranks.device import CpuDevice
from peg.ranks.pace import Pace
from tests.unit.tiny_group import TinyGroup, rank_threads, tiny_group


class Gate:
    """A landing that is done once it was opened."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self.opened = threading.Event()
        self.error: RankError | None = None

    def done(self) -> bool:
        return self.opened.is_set()

    @property
    def tensors(self) -> Sequence[Tensor]:
        assert self.opened.is_set(), "read before it was done"
        if self.error is not None:
            raise self.error
        return self._tensors


class SlowDevice(CpuDevice):
    """Answers a step only once the test lets it, from the first one after `hold` on."""

    def __init__(self) -> None:
        super().__init__(1)
        self.gates: list[Gate] = []
        self.holds = False

    def fetch(self, tensors: Sequence[Tensor]) -> Gate:  # type: ignore[override]
        gate = Gate([tensor.clone() for tensor in tensors])
        if not self.holds:
            gate.opened.set()
        self.gates.append(gate)
        return gate

    def hold(self) -> None:
        self.holds, self.gates = True, []

    def launched(self, count: int) -> bool:
        """Whether so many steps were begun, after a moment."""
        until_s = time.monotonic() + 5
        while len(self.gates) < count and time.monotonic() < until_s:
            time.sleep(0.001)
        time.sleep(0.05)
        return len(self.gates) == count


@contextmanager
def slow_group(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Iterator[tuple[TinyGroup, SlowDevice]]:
    device = SlowDevice()
    monkeypatch.setattr("peg.ranks.group.open_devices", lambda _: (device,))
    with tiny_group(folder, **options) as tiny:
        yield tiny, device


def test_the_next_step_is_begun_while_one_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two decode steps are launched before the first is done; both are answered, in order, with the right ids."""
    with tiny_group(tmp_path) as tiny:
        expected = tiny.generate([[5, 6, 7], [9]], 3)[0][0]
    with slow_group(tmp_path, monkeypatch) as (tiny, device):
        tiny.group.run(tiny.prefill([5, 6, 7]))
        tokens = list(tiny.result().token_ids)
        device.hold()
        for start in (3, 4):
            tiny.group.run(tiny.decode(start))
        assert device.launched(2)
        assert tiny.outcomes.empty()
        assert tiny.group.heartbeats()[0].phase == "wait"
        device.gates[1].opened.set()
        time.sleep(0.05)
        assert tiny.outcomes.empty(), "the second step was answered before the first"
        device.gates[0].opened.set()
        results = [tiny.result(), tiny.result()]
        assert [result.step for result in results] == [1, 2]
        assert tokens + [result.token_ids[0] for result in results] == expected


def test_a_step_that_may_fail_alone_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a prefill at world size 1 nothing is begun: were it to fail, the next step would have to be undone."""
    with slow_group(tmp_path, monkeypatch) as (tiny, device):
        device.hold()
        tiny.group.run(tiny.prefill([5, 6, 7]))
        tiny.group.run(tiny.decode(3))
        assert device.launched(1)
        device.gates[0].opened.set()
        assert device.launched(2)
        device.gates[1].opened.set()
        assert [tiny.result().step, tiny.result().step] == [0, 1]


def test_failures_are_answered_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill that fails while a decode runs is told after it, and so is the step that was refused behind it."""
    with slow_group(tmp_path, monkeypatch, enable_fault_injection=True) as (tiny, device):
        tiny.group.run(tiny.prefill([5, 6, 7]))
        tiny.result()
        device.hold()
        tiny.group.run(tiny.decode(3))
        assert device.launched(1)
        tiny.group.inject(Fault(FaultKind.RAISE, 0, 1))
        tiny.group.run(tiny.prefill([8, 9], row=1))
        tiny.group.run(tiny.decode(4))
        time.sleep(0.05)
        assert tiny.outcomes.empty()
        device.gates[0].opened.set()
        outcomes = [tiny.outcome() for _ in range(3)]
        assert [type(outcome) for outcome in outcomes] == [StepResult, StepFailed, Skipped]
        assert [outcome.step for outcome in outcomes] == [1, 2, 3]


def test_what_the_device_did_wrong_is_the_steps_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that shows only at the end of a step, and stays, breaks the engine, named by rank, step and phase."""
    with slow_group(tmp_path, monkeypatch) as (tiny, device):
        monkeypatch.setattr(device, "usable", lambda: False)
        tiny.group.run(tiny.prefill([5, 6, 7]))
        tiny.result()
        device.hold()
        tiny.group.run(tiny.decode(3))
        assert device.launched(1)
        device.gates[0].error = RankError("CUDA: cudaErrorIllegalAddress")
        device.gates[0].opened.set()
        cause = tiny.first_failure()
        assert (cause.kind, cause.rank, cause.step, cause.phase) == (CauseKind.RANK_RAISED, 0, 1, "read")
        assert "cudaErrorIllegalAddress" in cause.message
        tiny.group.abort(str(cause), 1.0)


def test_steps_of_an_epoch_that_is_over_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that ends after the group was poisoned, with garbage perhaps, is dropped."""
    with slow_group(tmp_path, monkeypatch) as (tiny, device):
        tiny.group.run(tiny.prefill([5, 6, 7]))
        tiny.result()
        device.hold()
        tiny.group.run(tiny.decode(3))
        assert device.launched(1)
        tiny.group.poison("enough")
        device.gates[0].error = RankError("read although the epoch is over")
        device.gates[0].opened.set()
        time.sleep(0.05)
        assert tiny.failures == []
        assert tiny.outcomes.empty()
        tiny.group.abort("enough", 1.0)


def test_a_device_that_never_answers_does_not_keep_the_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing waits for the step that is out, for a bounded time; then the thread ends all the same."""
    device = SlowDevice()
    monkeypatch.setattr("peg.ranks.group.open_devices", lambda _: (device,))
    with tiny_group(tmp_path) as tiny:
        tiny.group.run(tiny.prefill([5, 6, 7]))
        tiny.result()
        device.hold()
        tiny.group.run(tiny.decode(3))
        assert device.launched(1)
        began = time.monotonic()
        assert tiny.group.close(5.0)
        assert time.monotonic() - began < 3
        assert rank_threads() == []


def test_a_rank_sleeps_most_of_a_step_and_learns_that_steps_got_quicker(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks at the device before a step like the last ones can end, so quicker ones are noticed."""
    now = 0.0
    monkeypatch.setattr("peg.ranks.pace.time.monotonic", lambda: now)
    plan = StepPlan(0, 0, (Slice(0, 0, 3, 1, None, samples=True),))
    pace, took = Pace(), []
    for length_s in [0.01] * 20 + [0.004] * 40:
        pace.begun(plan)
        began = now
        while now < began + length_s:
            now += pace.wait_s()
        took.append(now - began)
        pace.ended()
    assert took[19] < 0.0101
    assert took[20] < 0.0101
    assert took[-1] < 0.0042
