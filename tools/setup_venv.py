"""Makes `.venv` in the checkout, for tools/check and tools/demo. Knows nothing but the standard library."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BIN = ROOT / ".venv" / "bin"
STAMP = ROOT / ".venv" / "setup-stamp"
DRIVER = Path("/proc/driver/nvidia/version")

# Without a driver the CPU build of torch is enough, and a tenth of the size. It brings no triton, whose interpreter
# the kernel tests need; a CUDA build brings the one that it wants.
CPU_TORCH = ("torch==2.13.0+cpu", "triton==3.6.0")
ANY_TORCH = ("torch==2.13.0",)


def say(text: str) -> None:
    print(f"[{Path(sys.argv[0]).name}] {text}", flush=True)


def setup() -> None:
    """Bring `.venv` up to date with pyproject.toml; returns at once if it is. Exits with the reason if it cannot."""
    if sys.version_info < (3, 11):  # noqa: UP036 - whatever python3 is on this machine runs this
        sys.exit(f"peg needs Python 3.11 or newer; {sys.executable} is {sys.version.split()[0]}")
    started = time.monotonic()
    if _stamp_is_current():
        say(f".venv is up to date ({time.monotonic() - started:.1f} s)")
        return
    STAMP.unlink(missing_ok=True)
    if not _venv_works():
        _make_venv()
    _install_torch()
    say("installing peg and what its tests need")
    if _pip("--editable", f"{ROOT}[dev]"):
        sys.exit("pip could not install peg: see its message above; `.venv` is unfinished, running this again goes on")
    STAMP.write_text(_stamp())
    say(f".venv is ready ({time.monotonic() - started:.1f} s)")


def _stamp() -> str:
    """What the installation depends on: the requirements, where the checkout is, and whether there is a driver."""
    facts = (ROOT / "pyproject.toml").read_bytes(), Path(__file__).read_bytes(), str(ROOT).encode()
    return hashlib.sha256(b"\0".join((*facts, str(DRIVER.exists()).encode()))).hexdigest()


def _stamp_is_current() -> bool:
    return STAMP.is_file() and STAMP.read_text() == _stamp() and _venv_works()


def _venv_works() -> bool:
    """Whether `.venv` has a Python that starts and is new enough, and pip.

    An upgrade of the system takes the one away, an interrupted setup leaves the other out.
    """
    test = "import sys, importlib.util as u; sys.exit(sys.version_info < (3, 11) or u.find_spec('pip') is None)"
    try:
        return subprocess.run([BIN / "python", "-c", test], check=False).returncode == 0
    except OSError:
        return False


def _make_venv() -> None:
    say(f"making .venv with {sys.executable}")
    try:
        venv.create(ROOT / ".venv", clear=True, symlinks=True, with_pip=True)
    except subprocess.CalledProcessError:
        sys.exit(f"{sys.executable} cannot make a virtual environment with pip (on Debian: apt install python3-venv)")


def _install_torch() -> None:
    """With a driver, pyproject.toml alone decides about torch."""
    if DRIVER.exists():
        return
    say("no NVIDIA driver here: installing the CPU build of torch")
    if _pip(*CPU_TORCH) == 0:
        return
    say("pip found no CPU build; installing torch as it comes: with the CUDA libraries that is several GB")
    if _pip(*ANY_TORCH):
        sys.exit("pip could not install torch: see its message above")


def _pip(*what: str) -> int:
    """Install, and return pip's exit code; its own environment variables and files say where packages come from."""
    quiet = () if sys.stdout.isatty() else ("--quiet",)
    command = (str(BIN / "python"), "-m", "pip", "install", "--disable-pip-version-check", *quiet, *what)
    return subprocess.run(command, check=False).returncode
