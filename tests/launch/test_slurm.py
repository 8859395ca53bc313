"""`paceline launch slurm` on a real Slurm of two nodes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from agents import journal, until
from clusters import worker_of
from launching import SCRIPTS, paceline
from oracle import apart
from real_engines import SLOWLY
from safetensors.torch import load_file
from slurm import Slurm
from slurm import slurm as slurm
from slurm import slurm_of_three as slurm_of_three

from paceline.base.journal import Event, read_journal

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.timeout(600)]
LAUNCH = [sys.executable, "-m", "paceline", "launch", "slurm"]


class Job:
    """A run of `SLOWLY` on both nodes, submitted by a launcher that follows it."""

    def __init__(self, slurm: Slurm, folder: Path, *options: str, **variables: str) -> None:
        self.slurm, self.folder = slurm, folder
        (folder / "train.py").write_text(SLOWLY)
        words = ["-N", "2", "--workers-per-host", "1", "--min-workers", "2", "--run-dir", "run", *options, "train.py"]
        self.console = folder / "console"
        with self.console.open("w") as out:
            env = {**slurm.env, "PYTHONPATH": f"{SCRIPTS}:{os.environ.get('PYTHONPATH', '')}", **variables}
            del env["PACELINE_MAX_STEPS"]
            command = slurm.hosts[0].command(*LAUNCH, *words)
            self.process = subprocess.Popen(command, cwd=folder, env=env, stdout=out, stderr=out)
        until(lambda: (folder / "run/journal.jsonl").exists() and journal(folder / "run", "formed"), 300)
        (self.number,) = [path.stem.removeprefix("slurm-") for path in (folder / "run").glob("slurm-*.out")]

    @property
    def text(self) -> str:
        return self.console.read_text()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.slurm.run("scancel", self.number)


@pytest.fixture
def job(slurm: Slurm, tmp_path: Path) -> Iterator[Job]:
    made = Job(slurm, tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("notice", [["--batch", "--signal=USR2"], ["--signal=USR1"]], ids=["script", "steps"])
def test_slurm_notice_saves_and_requeues(job: Job, notice: list[str]) -> None:
    """What comes out is what one worker gives; no token is in the script, the output or what Slurm tells of the job."""
    token = (job.folder / "run" / "token").read_text().strip()
    job.slurm.run("scancel", *notice, job.number)
    until(lambda: f"job {job.number} was preempted or is near its time limit, and was requeued\n" in job.text, 120)
    (stopped, *_) = journal(job.folder / "run", "stopped")
    assert (job.folder / "run/checkpoints" / f"step-{stopped['step']:012d}" / "manifest.json").exists()
    (job.folder / "go").touch()

    def hurried() -> bool:  # Slurm itself would wait for two minutes
        time.sleep(1.0)
        job.slurm.run("scontrol", "update", f"JobId={job.number}", "StartTime=now")
        return f"job {job.number} continues: restart 1\n" in job.text

    until(hurried, 240)
    assert job.process.wait(240) == 0, job.text
    assert "train.py finished at step 400" in job.text
    for said in (job.text, job.slurm.run("scontrol", "show", "job", job.number).stdout):
        assert token not in said
    found = load_file(job.folder / "out.safetensors")
    paceline("run", "--run-dir", "alone", "train.py", cwd=job.folder)
    assert apart(found, load_file(job.folder / "out.safetensors")) < 1e-12


def test_slurm_ctrl_c_leaves_no_allocation(job: Job) -> None:
    job.process.send_signal(signal.SIGINT)
    assert job.process.wait(240) == 130, job.text
    assert "continue with: paceline launch slurm -N 2 " in job.text
    assert journal(job.folder / "run", "stopped")
    until(lambda: job.slurm.run("squeue", "-h", "-t", "running").stdout == "", 60)


def test_slurm_refusal_is_shown(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    done = slurm.run(*LAUNCH, "-N", "2", "--engine=-p none", "train.py", cwd=tmp_path)
    what = "sbatch: error: invalid partition specified: none\nsbatch: error: Batch job submission failed: Invalid "
    cure = "partition name specified); check --engine='...' and --dry-run\n"
    assert (done.returncode, done.stderr) == (2, f"paceline: Slurm rejects the job ({what}{cure}")


def events(run: Path, kind: str) -> list[Event]:
    """Also while a line is being written."""
    return [event for event in read_journal(run) if event["event"] == kind]


def test_slurm_is_asked_for_another_node(slurm_of_three: Slurm, tmp_path: Path) -> None:
    """Instead of one whose workers were killed twice; the run ends with what one worker gives."""
    run, cache = tmp_path / "run", str(tmp_path / "cache")
    made = Job(slurm_of_three, tmp_path, "--exclude-after", "2", "--min-workers", "1", XDG_CACHE_HOME=cache)
    try:
        joined = lambda: [event["workers"] for event in events(run, "formed")]
        until(lambda: joined()[-1] == [0, 1], 200)
        os.kill(worker_of(run / "hosts/n2"), signal.SIGKILL)
        until(lambda: joined()[-1] == [0], 100)
        until(lambda: joined()[-1] == [0, 1], 200)
        os.kill(worker_of(run / "hosts/n2"), signal.SIGKILL)
        until(lambda: joined()[-1] == [0, 2], 300)
        (further,) = {str(event["host"]) for event in events(run / "hosts/further-1", "worker")}
        assert further == "nowhere-3"
        (tmp_path / "go").touch()
        assert made.process.wait(240) == 0, made.text
    finally:
        made.close()
    reasons = "2 failures (worker 1 was killed by SIGKILL)"
    assert f"\nnowhere-2 is left out of the run after {reasons}\n" in made.text
    assert "\nn2 is left out; slurm was asked for another host\n" in made.text
    assert [event["host"] for event in events(run, "excluded")] == ["nowhere-2"]
    until(lambda: slurm_of_three.run("squeue", "-h", "-t", "running").stdout == "", 60)
    found = load_file(tmp_path / "out.safetensors")
    paceline("run", "--run-dir", "alone", "train.py", cwd=tmp_path)
    assert apart(found, load_file(tmp_path / "out.safetensors")) < 1e-12
