"""The Triton kernels give the references' numbers, in Triton's interpreter: no card is needed to see it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.kernels.triton_cases import CASES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def errors() -> Mapping[str, str]:
    """Traceback, or nothing, by case; in a process of its own, since Triton reads the switch when it is imported."""
    command = [sys.executable, "-W", "error", "-m", "tests.kernels.interpreted"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 0, ran.stderr
    found: Mapping[str, str] = json.loads(ran.stdout)
    return found


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("case", CASES)
def test_kernel_equals_its_reference(errors: Mapping[str, str], case: str, dtype: str) -> None:
    """Every element of what a kernel wrote is within a few roundings of the reference's."""
    error = errors[f"{case}, torch.{dtype}"]
    assert not error, error
