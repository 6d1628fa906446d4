"""Which devices there are, and whether they can run what was asked for. Looked at before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog
import torch

from peg.config import EngineConfig
from peg.environment import faults
from peg.errors import ConfigError
from peg.ranks.cuda_device import CudaDevice
from peg.ranks.device import CpuDevice, Device
from peg.ranks.nccl import Nccl

log = structlog.get_logger("peg.ranks")

_CAPABILITY = (9, 0)
_SHARING_NCCL = (2, 30, 0)
_UTILIZATION = 0.9


def open_devices(config: EngineConfig) -> tuple[Device, ...]:
    """One device a rank; nothing is allocated on it yet. Raises ConfigError where one is not there, or not usable."""
    if config.devices == ("cpu",):
        return tuple(CpuDevice(config.tensor_parallel_size) for _ in range(config.tensor_parallel_size))
    indices = [_index(name, config.devices) for name in config.devices]
    flag = f"--devices {','.join(config.devices)}"
    if torch.version.cuda is None:
        raise ConfigError(f"{flag}: PyTorch {torch.__version__} is built without CUDA; install one with it, or say cpu")
    count = torch.cuda.device_count()
    if max(indices) >= count:
        here = f"there are {count}" if count else "no usable NVIDIA GPU is here"
        raise ConfigError(f"{flag}: GPU {max(indices)} is not here; {here}")
    for index in indices:
        capability = torch.cuda.get_device_capability(index)
        if capability < _CAPABILITY:
            told = ".".join(map(str, capability))
            raise ConfigError(f"{flag}: GPU {index} has compute capability {told}; peg has been measured from 9.0 on")
    found = faults(config.devices)
    if found:
        raise ConfigError("\n  - ".join((f"{flag}: the environment is not as it must be before CUDA starts", *found)))
    utilization = config.gpu_memory_utilization or _UTILIZATION
    try:
        return tuple(CudaDevice(index, indices.count(index), utilization) for index in indices)
    except ImportError as error:
        raise ConfigError(f"{flag}: {error}; the packages of peg[cuda] are needed") from None


def refuse_weights(devices: Sequence[Device], rank_bytes: Callable[[int], int]) -> None:
    """Before anything is loaded: raises ConfigError where the weights of the ranks on a GPU do not fit on it."""
    for rank, device in enumerate(devices):
        if isinstance(device, CudaDevice):
            device.refuse_weights(rank_bytes(rank))


def open_nccl(config: EngineConfig) -> Nccl | None:
    """The library that the ranks talk through, None where they do not need one. Raises ConfigError."""
    if config.devices == ("cpu",) or config.tensor_parallel_size == 1:
        return None
    flag = f"--devices {','.join(config.devices)}"
    try:
        nccl = Nccl()
    except ImportError as error:
        raise ConfigError(f"{flag}: {error}; several ranks need nccl4py, which comes with peg[cuda]") from None
    version = ".".join(map(str, nccl.version))
    if len(set(config.devices)) < len(config.devices) and nccl.version < _SHARING_NCCL:
        raise ConfigError(
            f"{flag}: several ranks on one GPU need NCCL 2.30 or later, {nccl.path} is {version}: "
            "name a newer one with --nccl-library"
        )
    log.info("NCCL", version=version, library=nccl.path)
    return nccl


def _index(name: str, devices: Sequence[str]) -> int:
    if not name.isdecimal():
        raise ConfigError(f"--devices {','.join(devices)}: {name} is neither cpu nor the number of a GPU")
    return int(name)
