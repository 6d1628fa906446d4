"""What all tests share: one option, and a core for each worker where several run."""

from __future__ import annotations

import os

import hypothesis
import pytest

hypothesis.settings.register_profile("peg", deadline=None)  # a busy machine is no fault of an example
hypothesis.settings.load_profile("peg")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="run what is shortened for CI at its full length")


def pytest_configure(config: pytest.Config) -> None:
    """Two workers whose ranks each take both cores get in each other's way: a worker has one core."""
    worker = getattr(config, "workerinput", {}).get("workerid")
    if worker is not None:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})


@pytest.fixture(scope="session")
def whole(pytestconfig: pytest.Config) -> bool:
    """Whether nothing is to be shortened."""
    return bool(pytestconfig.getoption("--whole"))
