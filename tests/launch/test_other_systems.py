"""A world of one where there is less than Linux has. What the other system does itself cannot be tested here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE

import pytest
import torch
from launching import SCRIPTS
from once import once
from warm import Process, environment

from paceline.session.validation import device_of

TRAINS = """
from basics import *
t = make()
for report in t.steps(data, epochs=2):
    if report.step == 3:
        t.save()
        t.log(**t.evaluate(data, lambda o, b: {"right": ((o.argmax(1) == b[1]).sum(), len(o))}))
t.export("out.safetensors")
print(t.steps_done)
"""


def run(*command: str | Path, cwd: Path, code: int = 0, **env: str) -> str:
    """What a command prints; with its errors, if it is to fail."""
    with Process([sys.executable, *command], environment(**env), cwd=cwd, stdout=PIPE, stderr=PIPE) as process:
        stdout, stderr = process.communicate(timeout=240)
    assert process.returncode == code, stderr
    return stdout + stderr if code else stdout


def train_and_resume(folder: Path, *before: str | Path) -> bytes:
    """The weights of one worker that stops at step 5 and goes on to step 8."""
    (folder / "train.py").write_text(TRAINS)
    run(*before, "train.py", cwd=folder, PACELINE_RUN_DIR="out", PACELINE_MAX_STEPS="5")
    assert run(*before, "train.py", cwd=folder, PACELINE_RUN_DIR="out").split() == ["8"]
    assert (folder / "out" / "checkpoints" / "step-000000000008" / "manifest.json").exists()
    assert (folder / "out" / "report.html").exists()
    return (folder / "out.safetensors").read_bytes()


@pytest.mark.parametrize("system", [pytest.param("darwin", marks=pytest.mark.slow), "win32"])
def test_one_worker_on_macos_and_windows_trains_and_resumes(
    system: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    linux = once(tmp_path_factory, "one worker on linux", train_and_resume)
    assert train_and_resume(tmp_path, SCRIPTS / "elsewhere.py", system) == (linux / "out.safetensors").read_bytes()


@pytest.mark.parametrize("system", ["darwin", pytest.param("win32", marks=pytest.mark.slow)])
def test_several_workers_on_macos_and_windows_are_refused(
    system: str, tmp_path: Path, golden: Callable[[str, str], None]
) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    elsewhere = SCRIPTS / "elsewhere.py"
    text = run(elsewhere, system, "paceline", "run", "--workers", "2", "train.py", cwd=tmp_path, code=2)
    golden("paceline run --workers 2", text.replace(system, "SYSTEM"))
    several = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    text = run(elsewhere, system, "train.py", cwd=tmp_path, code=1, **several)
    golden("a world of two", text.splitlines()[-1].replace(system, "SYSTEM"))


def test_mps_gpu_is_chosen_on_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert device_of(0) == torch.device("mps")
