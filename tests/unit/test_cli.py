"""The command line: what it parses, what it refuses, and with which exit code it ends."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from peg.__main__ import run
from peg.checkpoint.packaged import PACKAGED_MODELS
from peg.cli import cli
from peg.commands.flags import Size, engine_flags, server_flags

HEAVY = ("torch", "structlog", "aiohttp", "numpy", "tokenizers", "rich", "uvloop")


def peg(*arguments: str, timeout_s: float = 30.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "peg", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)


def parsed(*arguments: str) -> dict[str, object]:
    """What the flags of `peg serve` become."""
    seen: dict[str, object] = {}

    @click.command("serve")
    @engine_flags
    @server_flags
    def command(**flags: object) -> None:
        seen.update(flags)

    command.main(list(arguments), standalone_mode=False)
    return seen


def test_help_loads_nothing_heavy() -> None:
    """`peg serve --help` works without importing torch or anything else that takes time."""
    code = f"""
import sys
from peg.__main__ import run
assert run(["serve", "--help"]) == 0
found = [name for name in {HEAVY} if name in sys.modules]
assert not found, found
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--tensor-parallel-size" in done.stdout


def test_help_is_instant() -> None:
    """The best of five starts of `peg --help` takes less than 0.3 s."""
    took_s = []
    for _ in range(5):
        started_s = time.perf_counter()
        assert peg("--help").returncode == 0
        took_s.append(time.perf_counter() - started_s)
    assert min(took_s) < 0.3


def test_help_names_every_packaged_model() -> None:
    """A packaged model that is added later shows in the help."""
    assert all(model.name in str(cli.help) for model in PACKAGED_MODELS)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("1073741824", 1 << 30),
        ("512MiB", 512 << 20),
        ("4GiB", 4 << 30),
        ("4 gib", 4 << 30),
        ("1.5GiB", 3 << 29),
        ("4GB", 4_000_000_000),
        ("7KB", 7000),
        ("2TiB", 2 << 40),
    ],
)
def test_size(text: str, size_bytes: int) -> None:
    """A size is bytes, or a number with a unit of 1000 or 1024."""
    assert parsed("m", "--kv-cache-memory", text)["kv_cache_memory_bytes"] == size_bytes


@pytest.mark.parametrize("text", ["", "4G", "-1", "GiB", "4 GiBit", "1e9", "nan"])
def test_no_size(text: str) -> None:
    """What is no size is refused with what it should have been."""
    with pytest.raises(click.BadParameter, match="4GiB"):
        Size().convert(text, None, None)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nonsense"], "nonsense"),
        (["generate", "m"], "PROMPT"),
        (["generate", "m", "p", "--no-such-flag"], "--no-such-flag"),
        (["generate", "m", "p", "--devices", "0,1"], "--tensor-parallel-size is 1: they must be equal"),
        (["generate", "m", "p", "--gpu-memory-utilization", "0.5"], "--gpu-memory-utilization 0.5"),
        (["generate", "m", "p", "--devices", "cpu", "--nccl-library", __file__], "the ranks run on the CPU"),
        (["generate", "m", "p", "--tensor-parallel-size", "0"], "--tensor-parallel-size 0: must be at least 1"),
        (["generate", "m", "p", "--max-tokens", "0"], "--max-tokens"),
        (["serve", "m", "--on-failure", "explode"], "--on-failure"),
        (["serve", "m", "--rebuild-limit", "-1"], "--rebuild-limit -1: must be at least 0"),
        (["serve", "m", "--rebuild-admission", "wait"], "--rebuild-admission wait"),
        (["serve", "m", "--port", "65536"], "--port 65536"),
        (["serve", "m", "--host", "no.such.host.invalid"], "no.such.host.invalid"),
        (["serve", "m", "--port", "0", "--host", "0.0.0.0", "--enable-fault-injection"], "--admin-key"),
        (["import", "/nowhere.gguf", "out"], "/nowhere.gguf"),
    ],
)
def test_usage_errors_end_with_2(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What the user can mend is exit code 2 and a message that names it, on standard error alone."""
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert named in err
    assert not out


def test_no_such_model() -> None:
    """A model that is nowhere is code 2 and a message that names it and the packaged ones."""
    done = peg("generate", "/nowhere/at/all", "p")
    assert (done.returncode, done.stdout) == (2, "")
    assert "/nowhere/at/all" in done.stderr
    assert "smollm2-135m" in done.stderr


def test_port_in_use() -> None:
    """A port that is taken ends `peg serve` within 2 s, with code 2 and one line, before torch is loaded."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        started_s = time.perf_counter()
        done = peg("serve", "smollm2-135m", "--port", str(port))
        took_s = time.perf_counter() - started_s
    assert done.returncode == 2
    assert done.stderr.splitlines() == [f"peg: --host 127.0.0.1 --port {port}: Address already in use"]
    assert took_s < 2


def test_defaults_are_those_of_the_configs() -> None:
    """Without flags every field of both configs has its own default, so that help and configs cannot differ."""
    flags = parsed("m")
    assert (flags["port"], flags["block_size"], flags["api_keys"]) == (8000, 16, ())
    assert flags["max_num_seqs"] is None


def test_config_file(write: Callable[[str], str]) -> None:
    """Flags of a TOML file stand behind those of the command line."""
    path = write('tensor-parallel-size = 3\nkv-cache-memory = "1GiB"\napi-key = ["a", "b"]\nport = 9000\n')
    flags = parsed("m", "--config", path, "--port", "9001")
    assert flags["tensor_parallel_size"] == 3
    assert flags["kv_cache_memory_bytes"] == 1 << 30
    assert flags["api_keys"] == ("a", "b")
    assert flags["port"] == 9001


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("no-such-flag = 1", "no-such-flag"),
        ("model = 'x'", "model"),
        ("config = 'x'", "config"),
        ("tensor-parallel-size = 'three'", "three"),
        ("on-failure = 'explode'", "--on-failure"),
        ("no toml", "config.toml"),
    ],
)
def test_faulty_config_file(
    write: Callable[[str], str], text: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unknown flag, or a value that a flag would refuse, is refused in a file too."""
    assert run(["serve", "m", "--config", write(text)]) == 2
    assert named in capsys.readouterr().err


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "config.toml"
        path.write_text(text, "utf-8")
        return str(path)

    return write


def test_keys_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys may come from the environment, where other users of the machine cannot read them."""
    monkeypatch.setenv("PEG_API_KEY", "one two")
    monkeypatch.setenv("PEG_ADMIN_KEY", "three")
    flags = parsed("m")
    assert (flags["api_keys"], flags["admin_key"]) == (("one", "two"), "three")
