"""Sets up what CUDA and NCCL read from the environment before PyTorch is imported.

`PEG_NCCL_LIBRARY` names an NCCL of 2.30 or later, which several ranks on one GPU need.
"""

from __future__ import annotations

import os
from pathlib import Path

from peg.environment import prepare

if Path("/dev/nvidiactl").exists():
    named = os.environ.get("PEG_NCCL_LIBRARY")
    prepare(("0",) * 4, None if named is None else Path(named))
