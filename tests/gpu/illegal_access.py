"""`python -m peg` with a rank that, in its tenth decode step, writes where nothing is. Run by test_serving.py."""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
import triton.language as tl

from peg.__main__ import run
from peg.ranks.decode import Decoder

_step = Decoder.step
_steps = 0


@triton.jit
def _write_far_away(p_out):  # type: ignore[no-untyped-def]  # Triton gives a type to what it is called with
    tl.store(p_out + (1 << 44), 1)


def _strike(self: Decoder, *arguments: Any, **named: Any) -> None:
    global _steps  # noqa: PLW0603 (one rank, one count)
    _steps += arguments[0].epoch >= 0  # not in the rehearsal
    if _steps == 10:
        _write_far_away[(1,)](torch.zeros(1, dtype=torch.int32, device="cuda"))
    _step(self, *arguments, **named)


if __name__ == "__main__":
    Decoder.step = _strike  # type: ignore[method-assign]
    sys.exit(run(sys.argv[1:]))
