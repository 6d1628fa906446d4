"""What cannot run on the cards that are here is refused by name, before a model is looked at."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from peg.checkpoint.synth_config import SynthOptions
from peg.commands.synth import synth
from tests.gpu.cards import needs_card

pytestmark = [pytest.mark.gpu, needs_card]


def refused(model: Path, *flags: str, **environment: str) -> str:
    """What `peg generate` says, and it must end with 2."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("NCCL_", "CUDA_", "PEG_"))}
    done = subprocess.run(
        [sys.executable, "-m", "peg", "generate", str(model), "Hello", *flags],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=clean | environment,
    )
    assert done.returncode == 2, done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("synth") / "model"
    synth(SynthOptions(family="llama"), folder)
    return folder


def test_a_card_that_is_not_here(model: Path) -> None:
    """The number that is too high, and how many there are."""
    count = torch.cuda.device_count()
    assert f"--devices {count}: GPU {count} is not here; there are {count}" in refused(model, "--devices", str(count))


def test_what_names_no_card(model: Path) -> None:
    """Neither cpu nor a number."""
    assert "--devices cuda: cuda is neither cpu nor the number of a GPU" in refused(model, "--devices", "cuda")


def test_ranks_and_cards_that_disagree(model: Path) -> None:
    """As many devices as ranks."""
    told = refused(model, "--devices", "0,0", "--tensor-parallel-size", "4")
    assert "--devices 0,0 names 2 devices, --tensor-parallel-size is 4: they must be equal" in told


def test_several_ranks_on_one_card_with_an_old_nccl(model: Path) -> None:
    """PyTorch's own NCCL, where it is too old: version, path, and what to do."""
    if torch.cuda.nccl.version() >= (2, 30, 0) and "PEG_NCCL_LIBRARY" not in os.environ:
        pytest.skip("PyTorch's NCCL is new enough: no refusal of an older one was seen")
    told = refused(model, "--devices", "0,0", "--tensor-parallel-size", "2")
    assert "several ranks on one GPU need NCCL 2.30 or later" in told
    assert "name a newer one with --nccl-library" in told


def test_an_environment_that_would_hang(model: Path) -> None:
    """Launches that wait, and a multicast that was switched on, are refused by their variables."""
    told = refused(model, "--devices", "0", CUDA_LAUNCH_BLOCKING="1", NCCL_NVLS_ENABLE="1")
    assert "CUDA_LAUNCH_BLOCKING is set: launches that wait" in told
    assert "NCCL_NVLS_ENABLE is 1, must be 0" in told


def test_a_library_that_is_none(model: Path) -> None:
    """The path, and what the loader says."""
    told = refused(model, "--devices", "0", "--nccl-library", __file__)
    assert f"--nccl-library {__file__}: " in told
    assert "invalid ELF header" in told


def test_too_little_memory(model: Path) -> None:
    """Pools that one context does not fit in are refused with the arithmetic and the flags."""
    told = refused(model, "--devices", "0", "--kv-cache-memory", "1KiB")
    assert "raise --kv-cache-memory to" in told
