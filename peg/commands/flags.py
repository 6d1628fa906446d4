"""The flags of the command line, each the field of a config whose default it shares."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import click

from peg.config import (
    DTYPES,
    GENERATION_CONFIG,
    LOAD_FORMATS,
    ON_FAILURE,
    REBUILD_ADMISSION,
    SCHEDULING_POLICIES,
    EngineConfig,
    ServerConfig,
)
from peg.errors import ConfigError

_UNITS: Mapping[str, int] = {
    "": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
}
_Decorator: TypeAlias = Callable[[Any], Any]


class Size(click.ParamType[int]):
    """A number of bytes, plain or with a unit."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        parsed = re.fullmatch(r"(\d+(?:\.\d+)?) ?([a-z]*)", str(value).strip().lower())
        if parsed is None or parsed[2] not in _UNITS:
            self.fail(f"{value!r} is no size; write bytes, or a number and a unit: 512MiB, 4GiB, 4GB", param, ctx)
        return int(float(parsed[1]) * _UNITS[parsed[2]])


def _flag(config: type[EngineConfig | ServerConfig], spelling: str, field: str, kind: Any, text: str) -> _Decorator:
    """An option that becomes `field` of `config`, whose default it shares."""
    default = config.__dataclass_fields__[field].default
    shown = default is not None and default != ()
    several = isinstance(default, tuple)
    env = "PEG_" + spelling.strip("-").replace("-", "_").upper() if "key" in spelling else None
    return click.option(
        spelling, field, type=kind, default=default, show_default=shown, multiple=several, envvar=env, help=text
    )


def _read_config(ctx: click.Context, _param: click.Parameter, path: Path | None) -> None:
    """Let a TOML file of flags (`tensor-parallel-size = 3`) stand behind the command line."""
    if path is None:
        return
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config {path}: {error}") from None
    options = [param for param in ctx.command.params if isinstance(param, click.Option) and param.name != "config"]
    names = {spelling.removeprefix("--"): str(param.name) for param in options for spelling in param.opts}
    if unknown := sorted(values.keys() - names.keys()):
        raise ConfigError(f"--config {path}: {', '.join(unknown)}: peg {ctx.info_name} has no such flag")
    ctx.default_map = {names[key]: value for key, value in values.items()}


def _together(*decorators: _Decorator) -> _Decorator:
    def apply(command: Any) -> Any:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return apply


MAX_TOKENS = 256
engine_flags = _together(
    click.argument("model"),
    _flag(EngineConfig, "--tensor-parallel-size", "tensor_parallel_size", int, "How many ranks share the model."),
    click.option(
        "--devices",
        metavar="cpu|0,1,…",
        help="cpu, or a GPU for each rank, one of them several times over if that is wanted. [default: GPUs if there "
        "is a driver, else cpu]",
    ),
    _flag(EngineConfig, "--dtype", "dtype", click.Choice(DTYPES), "What to compute in; auto is the checkpoint's own."),
    _flag(EngineConfig, "--max-model-len", "max_model_len", int, "Context in tokens, if less than the model's."),
    _flag(EngineConfig, "--kv-cache-memory", "kv_cache_memory_bytes", Size(), "KV cache of each rank: 512MiB, 4GiB."),
    _flag(EngineConfig, "--max-num-seqs", "max_num_seqs", int, "Sequences at a time. [default: 256, on a CPU 16]"),
    _flag(EngineConfig, "--max-num-batched-tokens", "max_num_batched_tokens", int, "Tokens in one step, all together."),
    _flag(EngineConfig, "--block-size", "block_size", int, "Tokens in one block of the KV cache."),
    _flag(EngineConfig, "--seed", "seed", int, "Where random choices begin."),
    _flag(EngineConfig, "--load-format", "load_format", click.Choice(LOAD_FORMATS), "dummy: random weights, no files."),
    click.option("--enforce-eager", is_flag=True, help="No graphs. A CPU has none."),
    _flag(
        EngineConfig, "--gpu-memory-utilization", "gpu_memory_utilization", float, "GPU memory to use. [default: 0.9]"
    ),
    click.option(
        "--nccl-library",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="NCCL to load in place of PyTorch's. Several ranks on one GPU need 2.30 or later.",
    ),
    click.option(
        "--config",
        type=click.Path(dir_okay=False, path_type=Path),
        is_eager=True,
        expose_value=False,
        callback=_read_config,
        help="TOML file of flags, without their dashes; the command line goes first.",
    ),
)
request_flags = _together(
    click.argument("prompt"),
    click.option("--chat", is_flag=True, help="Render PROMPT as a user's message with the model's chat template."),
    click.option("--max-tokens", type=click.IntRange(min=1), help=f"Tokens to make at most. [default: {MAX_TOKENS}]"),
    click.option("--temperature", type=click.FloatRange(0, 2), help="0 is greedy. [default: the model's, else 1]"),
    click.option("--top-k", type=click.IntRange(min=0), help="Only the k most likely tokens; 0 is all."),
    click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), help="Only the likeliest that add up to p."),
    click.option("--min-p", type=click.FloatRange(0, 1), help="Only those min-p times as likely as the likeliest."),
    click.option("--ignore-eos", is_flag=True, help="Go on where the model would end."),
    click.option("--token-ids", is_flag=True, help="Write token ids instead of text."),
)
REQUEST_FLAGS = ("prompt", "chat", "max_tokens", "temperature", "top_k", "top_p", "min_p", "ignore_eos", "token_ids")
step_timeout = _flag(EngineConfig, "--step-timeout", "step_timeout_s", float, "Seconds that a step may take at most.")
server_flags = _together(
    _flag(ServerConfig, "--host", "host", str, "Address to listen on."),
    _flag(ServerConfig, "--port", "port", int, "Port to listen on; 0 takes any that is free."),
    _flag(
        ServerConfig, "--served-model-name", "served_model_names", str, "Name in answers, instead of MODEL; repeatable."
    ),
    _flag(ServerConfig, "--api-key", "api_keys", str, "Key that requests must bring; repeatable. Also: $PEG_API_KEY."),
    _flag(ServerConfig, "--admin-key", "admin_key", str, "Key for the admin routes. Also: $PEG_ADMIN_KEY."),
    _flag(EngineConfig, "--max-num-queued-reqs", "max_num_queued_reqs", int, "Sequences that may wait; then 429."),
    _flag(
        EngineConfig,
        "--max-num-queued-tokens",
        "max_num_queued_tokens",
        int,
        "Prompt tokens that may wait, all together; then 429.",
    ),
    _flag(
        EngineConfig,
        "--scheduling-policy",
        "scheduling_policy",
        click.Choice(SCHEDULING_POLICIES),
        "priority: requests with a smaller priority go first.",
    ),
    _flag(ServerConfig, "--shutdown-timeout", "shutdown_timeout_s", float, "Seconds to finish requests on SIGTERM."),
    _flag(
        ServerConfig,
        "--generation-config",
        "generation_config",
        click.Choice(GENERATION_CONFIG),
        "none: leave the checkpoint's sampling defaults out.",
    ),
    _flag(ServerConfig, "--max-logprobs", "max_logprobs", int, "Most logprobs a request may ask for."),
    _flag(ServerConfig, "--request-timeout", "request_timeout_s", float, "Seconds a request may take; then 504."),
    _flag(ServerConfig, "--stream-interval", "stream_interval", int, "Tokens in one event of a stream."),
    click.option(
        "--trust-request-chat-template",
        is_flag=True,
        help="Let a request bring its own chat template, which runs in a sandbox.",
    ),
    _flag(
        EngineConfig,
        "--on-failure",
        "on_failure",
        click.Choice(ON_FAILURE),
        "rebuild: begin again with the weights that are loaded; what was open has failed.",
    ),
    _flag(
        EngineConfig,
        "--rebuild-admission",
        "rebuild_admission",
        click.Choice(REBUILD_ADMISSION),
        "Requests that come meanwhile: a 503, or they wait.",
    ),
    _flag(EngineConfig, "--rebuild-limit", "rebuild_limit", int, "Rebuilds within 10 minutes; then exit code 70."),
    click.option("--enable-fault-injection", is_flag=True, help="Open POST /admin/fault. Not for production."),
)
synth_flags = _together(
    click.option("--layers", type=click.IntRange(min=1), help="Layers, if not the family's own few."),
    click.option("--hidden-size", type=int, default=64, show_default=True, help="A multiple of 16."),
    click.option("--vocab-size", type=click.IntRange(min=1), help="At least the tokenizer's, which is the default."),
    click.option("--window", type=click.IntRange(min=1), default=16, show_default=True, help="Of sliding layers."),
    click.option(
        "--prefix",
        type=click.Choice(("model.", "model.language_model.", "language_model.model.")),
        default="model.",
        show_default=True,
        help="Of the text part's tensors: alone, beside a vision tower, and so in older files.",
    ),
    click.option(
        "--spelling",
        type=click.Choice(("transformers", "hub")),
        default="transformers",
        show_default=True,
        help="Of config.json's fields: as save_pretrained writes them now, or as published files have them.",
    ),
    click.option("--dtype", type=click.Choice(("bfloat16", "float32")), default="bfloat16", show_default=True),
    click.option("--shards", type=click.IntRange(min=1), default=1, show_default=True, help="Weight files."),
    click.option("--seed", type=int, default=0, show_default=True, help="Where random choices begin."),
)
