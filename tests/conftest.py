"""What all tests share: one option."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="run what is shortened for CI at its full length")


@pytest.fixture(scope="session")
def whole(pytestconfig: pytest.Config) -> bool:
    """Whether nothing is to be shortened."""
    return bool(pytestconfig.getoption("--whole"))
