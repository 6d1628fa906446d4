"""Validated values from outside: what the command line hands to the engine and the server."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from peg.errors import ConfigError

DTYPES = ("auto", "bfloat16", "float32", "float16")
ON_FAILURE = ("exit", "rebuild")
REBUILD_ADMISSION = ("refuse", "wait")
LOAD_FORMATS = ("auto", "safetensors", "dummy")
GENERATION_CONFIG = ("auto", "none")
SCHEDULING_POLICIES = ("fcfs", "priority")


def _at_least(flag: str, value: float | None, limit: float) -> None:
    if value is not None and not value >= limit:
        raise ConfigError(f"{flag} {value}: must be at least {limit}")


def _one_of(flag: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{flag} {value}: must be one of {', '.join(allowed)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the engine is to run, and within which limits. None means: decided from the model and the machine.

    `devices` is ("cpu",) or CUDA device indices as text, one per rank.
    """

    model: str
    model_dir: Path
    tensor_parallel_size: int = 1
    devices: tuple[str, ...] = ("cpu",)
    dtype: str = "auto"
    max_model_len: int | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_memory_bytes: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    scheduling_policy: str = "fcfs"
    block_size: int = 16
    seed: int = 0
    enforce_eager: bool = False
    load_format: str = "auto"
    step_timeout_s: float = 60.0
    startup_timeout_s: float = 600.0
    on_failure: str = "exit"
    rebuild_admission: str = "refuse"
    rebuild_limit: int = 3
    enable_fault_injection: bool = False

    def __post_init__(self) -> None:
        _at_least("--tensor-parallel-size", self.tensor_parallel_size, 1)
        _one_of("--dtype", self.dtype, DTYPES)
        _at_least("--max-model-len", self.max_model_len, 1)
        _at_least("--kv-cache-memory", self.kv_cache_memory_bytes, 1)
        _at_least("--max-num-seqs", self.max_num_seqs, 1)
        _at_least("--max-num-batched-tokens", self.max_num_batched_tokens, 1)
        _at_least("--max-num-queued-reqs", self.max_num_queued_reqs, 0)
        _at_least("--max-num-queued-tokens", self.max_num_queued_tokens, 0)
        _one_of("--scheduling-policy", self.scheduling_policy, SCHEDULING_POLICIES)
        _at_least("--block-size", self.block_size, 1)
        _at_least("--step-timeout", self.step_timeout_s, 0.01)
        _one_of("--on-failure", self.on_failure, ON_FAILURE)
        _one_of("--rebuild-admission", self.rebuild_admission, REBUILD_ADMISSION)
        if self.rebuild_admission == "wait" and self.on_failure != "rebuild":
            raise ConfigError(f"--rebuild-admission wait: only with --on-failure rebuild, not {self.on_failure}")
        _at_least("--rebuild-limit", self.rebuild_limit, 0)
        _one_of("--load-format", self.load_format, LOAD_FORMATS)
        if self.gpu_memory_utilization is not None and not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"--gpu-memory-utilization {self.gpu_memory_utilization}: must be in (0, 1]")
        if not self.devices:
            raise ConfigError("--devices: names no device")
        if self.devices == ("cpu",) and self.gpu_memory_utilization is not None:
            raise ConfigError(f"--gpu-memory-utilization {self.gpu_memory_utilization}: the ranks run on the CPU")
        if self.devices != ("cpu",) and len(self.devices) != self.tensor_parallel_size:
            raise ConfigError(
                f"--devices {','.join(self.devices)} names {len(self.devices)} devices, "
                f"--tensor-parallel-size is {self.tensor_parallel_size}: they must be equal"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """What the HTTP server is told. Keys are left out of the repr, so that no log line can hold one.

    `served_model_names` empty means: the model's name as typed. `generation_config` "none" leaves the checkpoint's
    sampling defaults out. A reader that takes nothing for `reader_stall_s` is cancelled. `request_timeout_s` None means
    that a request may take as long as it wants. After its first token a stream's events come every `stream_interval`
    tokens; one that has nothing to say tells that it lives every `keep_alive_s`.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_key: str | None = field(default=None, repr=False)
    shutdown_timeout_s: float = 30.0
    generation_config: str = "auto"
    trust_request_chat_template: bool = False
    request_timeout_s: float | None = None
    stream_interval: int = 1
    keep_alive_s: float = 15.0
    max_logprobs: int = 20
    max_choices: int = 1024
    max_body_bytes: int = 64 << 20
    reader_stall_s: float = 60.0
    status_interval_s: float = 10.0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port {self.port}: must be in 0..65535")
        if any(not name for name in self.served_model_names):
            raise ConfigError("--served-model-name: a name is empty")
        if any(not key for key in self.api_keys):
            raise ConfigError("--api-key: a key is empty")
        if self.admin_key == "":
            raise ConfigError("--admin-key: the key is empty")
        _at_least("--shutdown-timeout", self.shutdown_timeout_s, 0)
        _one_of("--generation-config", self.generation_config, GENERATION_CONFIG)
        _at_least("--max-logprobs", self.max_logprobs, 0)
        _at_least("--request-timeout", self.request_timeout_s, 0.001)
        _at_least("--stream-interval", self.stream_interval, 1)
