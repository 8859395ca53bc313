"""The copy in memory of `--mirror`: it goes with its run, however that ends, and with no other."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from subprocess import DEVNULL, PIPE

import psutil
import pytest
from agents import until
from warm import Process, environment

from paceline.launch.mirror import PREFIX, mirror


def mirrors() -> set[Path]:
    return {path for path in Path("/dev/shm").iterdir() if path.name.lstrip(".").startswith(PREFIX)}


SWEEP = "from paceline.launch.mirror import mirror\nwith mirror(None): pass\n"
ENDLESS = """
from basics import *
for report in make().steps(data, count=10**6):
    time.sleep(0.02)
"""


@pytest.mark.parametrize("together", [False, True], ids=["the agent", "and what removes it"])
def test_memory_mirror_is_removed_after_a_kill_of_the_run(together: bool, tmp_path: Path) -> None:
    """At once; where what is to remove it is killed, too, as with a whole control group, the next run does."""
    before = mirrors()
    (tmp_path / "train.py").write_text("import time\n" + ENDLESS)
    command = [sys.executable, "-m", "paceline", "run", "--mirror", "1", "--run-dir", "out", "train.py"]
    with Process(command, environment(), cwd=tmp_path, stdout=DEVNULL, stderr=DEVNULL) as process:
        until(lambda: any([*folder.glob("step-*")] for folder in mirrors() - before))
        (folder,) = mirrors() - before
        removers = [
            one for one in psutil.Process(process.pid).children() if str(folder) in one.cmdline() and one.name() == "sh"
        ]
        for one in removers if together else ():
            one.kill()
        process.kill()
    if together:
        assert folder.exists()
        subprocess.run([sys.executable, "-c", SWEEP], check=True)
    until(lambda: not folder.exists())
    until(lambda: not any(one.is_running() and one.status() != "zombie" for one in removers))


# Becomes an agent, whose workers begin with torch imported.
SMALL_MEMORY = """
import subprocess
subprocess.run("mount -t tmpfs -o size=8k tmpfs /dev/shm".split(), check=True)
from paceline.launch import agent
from paceline.cli.main import main
raise SystemExit(main("run --mirror 1 --run-dir out train.py".split()))
"""


@pytest.mark.root
def test_memory_mirror_without_space_warns_once(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("from basics import *\nlist(make().steps(data, count=9))\n")
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n")
    own_mounts = ("/proc/self/ns/net", str(tmp_path / "hosts"), "localhost")
    command = [sys.executable, "-c", SMALL_MEMORY]
    with Process(command, environment(), own_mounts, cwd=tmp_path, stdout=PIPE, stderr=PIPE) as process:
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    (said,) = [line for line in errors.splitlines() if "training continues without this checkpoint" in line]
    assert re.fullmatch(
        r"training continues without this checkpoint: checkpoint of step \d could not be written to"
        r" /dev/shm/paceline-mirror-\S+: No "
        r"space left on device; free some space \([\d.]+ kB needed\) or choose --save-every with a folder as "
        r"--checkpoints instead of --mirror",
        said,
    ), said


@pytest.mark.root
def test_memory_mirror_of_a_running_run_is_kept_by_other_containers() -> None:
    """Process ids are others there, and the memory is the same."""
    with mirror(3) as variables:
        folder = Path(variables["PACELINE_MIRROR"].removeprefix("3:"))
        (folder / "step-1").mkdir()
        subprocess.run(["unshare", "-pf", "--mount-proc", sys.executable, "-c", SWEEP], check=True)
        assert [*folder.iterdir()] == [folder / "step-1"]
    assert not folder.exists()
