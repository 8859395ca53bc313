"""A world of one where there is less than Linux has. What the other system does itself cannot be tested here."""

from __future__ import annotations

import sys
from pathlib import Path
from subprocess import PIPE

import pytest
import torch
from launching import SCRIPTS
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
    with Process([sys.executable, *command], environment(**env), cwd=cwd, stdout=PIPE, stderr=PIPE) as process:
        stdout, stderr = process.communicate(timeout=240)
    assert process.returncode == code, stderr
    return stdout + stderr if code else stdout


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_a_world_of_one_trains_without_what_linux_has(system: str, tmp_path: Path) -> None:
    exported = []
    for folder, before in (("here", ()), ("elsewhere", (SCRIPTS / "elsewhere.py", system))):
        here = tmp_path / folder
        here.mkdir()
        (here / "train.py").write_text(TRAINS)
        run(*before, "train.py", cwd=here, PACELINE_RUN_DIR="out", PACELINE_MAX_STEPS="5")
        assert run(*before, "train.py", cwd=here, PACELINE_RUN_DIR="out").split() == ["8"]
        assert (here / "out" / "checkpoints" / "step-000000000008" / "manifest.json").exists()
        assert (here / "out" / "report.html").exists()
        exported.append((here / "out.safetensors").read_bytes())
    assert exported[0] == exported[1]


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_more_workers_there_are_refused_in_a_sentence(system: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    said = run(SCRIPTS / "elsewhere.py", system, "paceline", "run", "--workers", "2", "train.py", cwd=tmp_path, code=2)
    assert said == (
        f"paceline: the workers of `paceline run` need Linux, and this is {system}; "
        "run `python train.py` here, which trains with one\n"
    )
    several = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    said = run(SCRIPTS / "elsewhere.py", system, "train.py", cwd=tmp_path, code=1, **several)
    assert said.splitlines()[-1] == (
        f"paceline.errors.UsageError: several workers need Linux, this is {system}; train with one worker here"
    )


def test_the_gpu_of_a_mac_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert device_of(0) == torch.device("mps")
