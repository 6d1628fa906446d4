"""The scripts that set the checkout up and check it."""

from __future__ import annotations

import sys
import time
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A script as a module; like a script it finds its neighbours."""
    monkeypatch.syspath_prepend(str(TOOLS))
    loader = SourceFileLoader(name, str(TOOLS / name))
    spec = spec_from_loader(name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture
def venv(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """setup_venv in an empty checkout, no driver. `asked` is what pip was asked for, `missing` what it lacks."""
    module = load("setup_venv.py", monkeypatch)
    (tmp_path / "pyproject.toml").write_text("[project]")
    (tmp_path / ".venv").mkdir()
    module.asked, module.missing = [], ""

    def pip(*what: str) -> int:
        module.asked.append(what)
        return int(what[0] == module.missing)

    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "STAMP", tmp_path / ".venv" / "stamp")
    monkeypatch.setattr(module, "DRIVER", tmp_path / "driver")
    monkeypatch.setattr(module, "_venv_works", lambda: True)
    monkeypatch.setattr(module, "_pip", pip)
    return module


def test_second_setup_does_nothing(venv: Any) -> None:
    """Setup asks pip once, and again only after pyproject.toml has changed."""
    venv.setup()
    assert [what[0] for what in venv.asked] == ["torch==2.13.0+cpu", "--editable"]
    venv.asked.clear()
    venv.setup()
    assert venv.asked == []
    (venv.ROOT / "pyproject.toml").write_text("[project]\nname = 'peg'")
    venv.setup()
    assert len(venv.asked) == 2


def test_no_cpu_build(venv: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the index has no CPU build, torch is taken as it comes, and its size is said before."""
    venv.missing = venv.CPU_TORCH[0]
    venv.setup()
    assert [what[0] for what in venv.asked] == ["torch==2.13.0+cpu", "torch==2.13.0", "--editable"]
    assert "several GB" in capsys.readouterr().out


def test_with_a_driver_pyproject_decides(venv: Any) -> None:
    """With an NVIDIA driver nobody asks for a CPU build."""
    venv.DRIVER.touch()
    venv.setup()
    assert [what[0] for what in venv.asked] == ["--editable"]


def test_failed_setup_is_not_remembered(venv: Any) -> None:
    """A setup that pip could not finish ends with a reason, and the next one tries again."""
    venv.missing = "--editable"
    with pytest.raises(SystemExit, match="pip could not install"):
        venv.setup()
    assert not venv.STAMP.exists()


@pytest.mark.parametrize(("tests", "skipped", "ran"), [(0, 0, 0), (3, 3, 0), (5, 2, 3)])
def test_skipped_tests_did_not_run(
    tests: int, skipped: int, ran: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What pytest skipped counts as not run, so that a run of skips alone is a failure."""
    check = load("check", monkeypatch)
    report = tmp_path / "report.xml"
    report.write_text(f'<testsuites><testsuite tests="{tests}" skipped="{skipped}"/></testsuites>')
    assert check.tests_run(report) == ran


def test_step_past_the_deadline_is_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the deadline a step is ended with everything it started, and counts as failed."""
    check = load("check", monkeypatch)
    monkeypatch.setattr(check, "BIN", Path(sys.executable).parent)
    mark = tmp_path / "mark"
    child = f"import time; time.sleep(3); open({str(mark)!r}, 'w')"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    started_s = time.monotonic()
    assert not check.passes("step", [Path(sys.executable).name, "-c", code], started_s)
    assert time.monotonic() - started_s < 2.5
    assert "FAILED" in capsys.readouterr().out
    time.sleep(2.5)
    assert not mark.exists()
