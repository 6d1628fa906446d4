"""Servers for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from peg.config import EngineConfig
from tests.http.serving import Server, echo_config, echo_in_place_of_ranks, serving


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineConfig]:
    """A config whose engine echoes its prompts; the context is 256 tokens."""
    with pytest.MonkeyPatch.context() as patch:
        echo_in_place_of_ranks(patch)
        yield echo_config(tmp_path_factory.mktemp("model"), max_model_len=256)


@pytest.fixture(scope="module")
def server(echo: EngineConfig) -> Iterator[Server]:
    """One server for a module, over a model that echoes."""
    with serving(echo) as running:
        yield running
