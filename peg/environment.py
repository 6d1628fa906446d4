"""What NCCL and CUDA read from the environment. The entry point sets it, before it imports PyTorch."""

from __future__ import annotations

import ctypes
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from peg.errors import ConfigError

_REQUIRED: Mapping[str, str] = {
    "NCCL_NVLS_ENABLE": "0",  # multicast: a hung program that uses it takes the host's GPUs with it
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "NCCL_RUNTIME_CONNECT": "0",  # connect at once, so that no later collective meets the others on the host
    "NCCL_GRAPH_REGISTER": "0",  # registered buffers cannot be given back while a graph holds them
    "NCCL_RAS_ENABLE": "0",  # no threads and ports of its own
}
_SHARED: Mapping[str, str] = {  # several ranks on one GPU
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "CUDA_MODULE_LOADING": "EAGER",  # loading a kernel waits for the GPU, on which a peer may wait for this rank
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # two streams that share a queue would wait for each other for ever
}
_MANY_SHARED: Mapping[str, str] = {"NCCL_MAX_CTAS": "8"}  # over two of them: all kernels must fit at once
_FORBIDDEN: Mapping[str, str] = {
    "CUDA_LAUNCH_BLOCKING": "launches that wait make ranks of one process wait for each other for ever",
    "NCCL_LAUNCH_MODE": "its barrier cannot be aborted",
}


def prepare(devices: Sequence[str], nccl_library: Path | None = None) -> None:
    """Set what ranks on these devices need, and load the NCCL library that is to be used in place of PyTorch's.

    Raises ConfigError where a variable is set otherwise, or the library cannot be loaded.
    """
    if nccl_library is not None:
        assert "torch" not in sys.modules, "PyTorch has loaded its own NCCL by now"
        try:
            ctypes.CDLL(str(nccl_library), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise ConfigError(f"--nccl-library {nccl_library}: {error}") from None
    for name, value in _wanted(devices).items():
        os.environ.setdefault(name, value)  # noqa: TID251 (this is where it is set)
    os.environ.setdefault("NCCL_DEBUG", "WARN")  # noqa: TID251
    found = faults(devices)
    if found:
        raise ConfigError("\n  - ".join((f"--devices {','.join(devices)}: the environment", *found)))


def faults(devices: Sequence[str]) -> list[str]:
    """What is not as ranks on these devices need it, one line each."""
    environment = os.environ  # noqa: TID251 (this is where it is looked at)
    wrong = [
        f"{name} is {environment.get(name, 'not set')}, must be {value}"
        for name, value in _wanted(devices).items()
        if environment.get(name) != value
    ]
    return wrong + [f"{name} is set: {reason}" for name, reason in _FORBIDDEN.items() if name in environment]


def _wanted(devices: Sequence[str]) -> Mapping[str, str]:
    if tuple(devices) == ("cpu",):
        return {}
    sharing = max(Counter(devices).values())
    return {**_REQUIRED, **(_SHARED if sharing > 1 else {}), **(_MANY_SHARED if sharing > 2 else {})}
