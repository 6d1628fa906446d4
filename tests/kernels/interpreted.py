"""Run by test_triton_interpreted.py in a process of its own: every case in Triton's interpreter, errors as JSON."""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter

from tests.kernels.triton_cases import CASES, Site


def mend_interpreter() -> None:
    """Triton 3.6 uses a one-element array as the bound of a range, which numpy 2.4 no longer converts."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor: type, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def main() -> None:
    torch.set_num_threads(1)
    mend_interpreter()
    errors = {}
    for name, case in CASES.items():
        for dtype in (torch.float32, torch.float16):
            try:
                with np.errstate(all="ignore"):
                    case(Site(torch.device("cpu"), dtype))
                errors[f"{name}, {dtype}"] = ""
            except Exception:
                errors[f"{name}, {dtype}"] = traceback.format_exc(limit=-4)
    json.dump(errors, sys.stdout)


if __name__ == "__main__":
    main()
