"""One worker is one process at any time, whatever happens to the process that it is forked from."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path
from subprocess import PIPE

import pytest
from agents import SPREAD, Launcher, alive, until, warm_of
from launching import paceline
from noting import NOTES
from once import once
from warm import Process, environment

SCRIPT = f"""{NOTES}
from basics import *
trainer = make(plan="exact micro=3")
for report in trainer.steps(data, count=6):
    if report.step == 3:
        open(f"half-{{RANK}}", "w").close()
        while not os.path.exists("go"):
            time.sleep(0.005)
trainer.export("out.safetensors")
"""
CELLS, DELAYS = 2, 5  # each cell of so many delays


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    def make(folder: Path) -> None:
        (folder / "train.py").write_text(SCRIPT)
        (folder / "go").touch()
        paceline("run", "train.py", cwd=folder)

    return (once(tmp_path_factory, "undisturbed by a warm process", make) / "out.safetensors").read_bytes()


def disturbed(folder: Path, delay: float = 0.0, how: int = 0, late: bool = False, dies: str = "") -> bytes:
    """What a run exports whose warm process `dies` after a call, or is killed so many seconds after the agent begins to
    fork: its workers, or, `late`, another worker 1 in mid-run.
    """
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "paceline", "run", "--workers", "2", "--run-dir", "run", "train.py"]
    given = environment(**({"PACELINE_TEST_WARM_DIES": dies} if dies else {}))
    with Process(command, given, cwd=folder, stdout=PIPE, stderr=PIPE) as agent:
        try:
            until(lambda: (folder / "run/logs/worker-0.log").exists())
            warm = warm_of(agent.pid) if how or late else None
            if late:
                until(lambda: all((folder / f"half-{rank}").exists() for rank in (0, 1)))
                os.kill(int((folder / "processes-1").read_text()), signal.SIGKILL)
            if warm is not None and how:
                time.sleep(delay)
                os.kill(warm, how)
            if warm is not None and how != signal.SIGINT:
                until(lambda: not alive(warm))
            (folder / "go").touch()
            _, stderr = agent.communicate(timeout=120)
        except BaseException:
            agent.kill()
            raise
    if how != signal.SIGINT:  # which Python may raise where nobody hears it, and the warm process goes on
        assert "the warm process" in stderr, stderr
    assert agent.returncode == 0, stderr
    assert not (folder / "twice").exists(), (folder / "twice").read_text()
    return (folder / "out.safetensors").read_bytes()


@pytest.mark.parametrize(
    "dies", ["fork 1", "waitpid 2", *(pytest.param(dies, marks=pytest.mark.slow) for dies in ("fork 2", "waitpid 1"))]
)
def test_kill_of_the_warm_process_while_it_forks_leaves_one_process_per_worker(launcher: Launcher, dies: str) -> None:
    """The workers here import no torch."""
    agent = launcher.start(
        """
        open(os.path.join(RUN, f"processes-{RANK}"), "a").write(f"{os.getpid()}\\n")
        event("join")
        meet("up")
        time.sleep(0.2)  # in which another process would come
        """,
        env={"PACELINE_TEST_WARM_DIES": dies},
    )
    ended = launcher.end(agent)
    assert ended.code == 0, ended.stderr
    assert "\nthe warm process ended (SIGKILL); a new one is started\n" in ended.stderr
    for rank in (0, 1):
        assert len((ended.folder / f"processes-{rank}").read_text().split()) == 1


CURE = (
    "create and use Trainers only in the process that `paceline run` starts (in scripts that spawn processes, under "
    "`if __name__ == '__main__':`); to train in a separate process, remove the PACELINE_ variables from its environment"
)
TWIN = """
import multiprocessing, os, subprocess, sys, traceback
from basics import *
how, *again = sys.argv[1:]
again = again or __name__ == "__mp_main__"  # of a script without a guard
if again:
    try:
        trainer = make()
    except paceline.PacelineError as error:
        print(f"twin {os.getpid()}: {error}", flush=True)
    os._exit(0)
trainer = make()
if how == "forked" and os.fork() == 0:
    try:
        list(trainer.steps(data, count=2))
    except paceline.PacelineError as error:
        print(f"twin {os.getpid()}: {error}", flush=True)
    sys.exit()
if how == "subprocess":
    subprocess.run([sys.executable, __file__, how, "again"])
elif how == "spawned":
    child = multiprocessing.get_context("spawn").Process(target=print)
    child.start()
    child.join()
list(trainer.steps(data, count=2))
"""


@pytest.mark.parametrize(
    "how", [*(pytest.param(h, marks=pytest.mark.slow) for h in ("subprocess", "spawned")), "forked"]
)
def test_child_process_of_a_worker_cannot_train_as_the_worker(tmp_path, how):
    (tmp_path / "train.py").write_text(TWIN)
    paceline("run", "--workers", "2", "--run-dir", "run", "train.py", how, cwd=tmp_path)
    for rank in (0, 1):
        lines = (tmp_path / f"run/logs/worker-{rank}.log").read_text().splitlines()
        (twin,) = [line for line in lines if line.startswith("twin ")]
        pid, text = twin.removeprefix("twin ").split(": ", 1)
        if how == "forked":
            assert text == f"process {pid} was forked from worker {rank}, and cannot train in its place; {CURE}"
        else:
            which = "another process"
            what = f"process {pid} has the environment of worker {rank}, but worker {rank} is {which}"
            assert text == f"{what}; {CURE}"


@pytest.mark.slow
@pytest.mark.parametrize("dies", ["fork 2", "waitpid 2", "fork 3", "waitpid 3"])
def test_kill_of_the_warm_process_gives_the_undisturbed_weights(tmp_path, undisturbed, dies):
    assert disturbed(tmp_path / "run", late=dies.endswith("3"), dies=dies) == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("cell", range(CELLS))
def test_kill_of_the_warm_process_at_random_delays(tmp_path, undisturbed, cell, late):
    chance = random.Random(cell)
    for number in range(DELAYS):
        delay, how = chance.uniform(0.0, SPREAD), chance.choice([signal.SIGKILL, signal.SIGINT])
        assert disturbed(tmp_path / str(number), delay, how, late) == undisturbed, (delay, how)
