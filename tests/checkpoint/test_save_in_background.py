"""Checkpoints that are written while training goes on: they hold what was there when they were taken."""

from __future__ import annotations

import json
import math
import re
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import find_checkpoint, list_checkpoints
from launching import paceline, train_basics, without_an_agent
from paths import SCRIPTS
from safetensors.torch import load_file

from paceline.base.journal import read_journal
from paceline.base.sharding import Block
from paceline.checkpoint import writer as saver
from paceline.checkpoint.files import write_files
from paceline.checkpoint.storage import Folder
from paceline.checkpoint.writer import WriterJob
from paceline.errors import CheckpointError
from paceline.session.checkpoint_manager import CheckpointManager

WIDE = """
import os
from pathlib import Path
from safetensors.torch import save_file

def wide():
    made = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 2)).double()
    made.register_parameter("ballast", nn.Parameter(torch.ones(700, 600, dtype=torch.float64)))
    made.register_buffer("seen", torch.zeros(()))
    return made

def loss(output, batch):
    return cross_entropy(output, batch) + 1e-6 * t.model.ballast.square().sum()

t = make(loss, wide)
there = lambda step: Path(f"out/checkpoints/step-{step:012d}/manifest.json").exists()
"""


def of_step(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """The weights in a checkpoint, by the model's own names."""
    found = find_checkpoint(folder, pytest.fail, step)
    assert found is not None
    start = "trainers.0.model."
    return {name.removeprefix(start): t for name, t in found.tensors().items() if name.startswith(start)}


def wait_for(part: WriterJob) -> None:
    while not part.over:
        time.sleep(0.01)


def test_changes_after_a_save_are_not_in_its_checkpoint(tmp_path: Path) -> None:
    """Three workers write; the writing takes until steps later, of which nothing is in it."""
    body = WIDE + (
        "t.state['best'] = torch.zeros(3)\n"
        "for report in t.steps(data, count=9):\n"
        "    if report.step == 4:\n"
        "        t.save()\n"
        "        if t.main:\n"
        "            save_file(t.model.state_dict(), 'then.safetensors')\n"
        "    t.state['best'] += 1\n"
        "    t.model.seen += 1\n"
        "    if report.step == 6:\n"
        "        print('there' if there(4) else 'not yet')\n"
        "with torch.no_grad():\n"
        "    t.model.ballast.zero_()\n"
        "t.save()\n"
        "with torch.no_grad():\n"
        "    t.model.ballast.fill_(7)\n"
    )
    train_basics(tmp_path, body, 3, "--keep", "3", chaos="slow:1@4.writing")
    assert "not yet\n" in (tmp_path / "out/logs/worker-0.log").read_text()
    then = load_file(tmp_path / "then.safetensors")
    found = find_checkpoint(tmp_path / "out", pytest.fail, 4)
    assert found is not None
    assert len(found.manifest["files"]) == 3
    held = of_step(tmp_path / "out", 4)
    assert {name for name in held if not torch.equal(held[name], then[name])} == {"seen"}
    assert held["seen"] == then["seen"] + 1  # the body did it before the loop asked for its next step
    assert found.tensors()["trainers.0.state.best.1"].tolist() == [4.0] * 3
    assert of_step(tmp_path / "out", 9)["ballast"].count_nonzero() == 0


@pytest.mark.slow
def test_changes_after_a_save_between_step_calls_are_not_in_its_checkpoint(tmp_path: Path) -> None:
    """step() in a loop of the script's: what it does to the weights right after save() does not show either."""
    body = WIDE + (
        "rows = data[:24]\n"
        "while t.steps_done < 6:\n"
        "    t.step(rows if t.main else None)\n"
        "    if t.steps_done == 3:\n"
        "        t.save()\n"
        "        with torch.no_grad():\n"
        "            t.model.ballast.zero_()\n"
    )
    train_basics(tmp_path, body, 2)
    assert of_step(tmp_path / "out", 3)["ballast"].count_nonzero() == 420_000


def test_a_parameter_that_changes_while_it_is_copied_voids_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changing(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()
        tensor += 1  # as a forward might
        return copy

    monkeypatch.setattr(saver, "_copy", changing)
    live = torch.ones(3, 4)
    part = WriterJob(
        Folder(tmp_path),
        7,
        {"a.safetensors": [("net.w", Block((1, 0), (2, 4), (1, 0)))]},
        {"net.w": live},
        {"net.w"},
        False,
        print,
        lambda: 0,
    )
    part.copied()
    wait_for(part)
    assert part.trouble == [
        "checkpoint of step 7 was discarded: 'net.w' changed before the optimizer update",
        "change weights in the body of the training loop, not in the forward",
    ]
    assert not [*tmp_path.iterdir()]


def test_a_writer_copies_buffers_at_once(tmp_path: Path) -> None:
    state = {"weight": torch.ones(3, 4).t(), "buffer": torch.ones(2), "half": torch.ones(5, dtype=torch.bfloat16)}
    go = Path(tmp_path / "go")

    def reached(_: str) -> None:
        while not go.exists():
            time.sleep(0.01)

    files = {"a.safetensors": [("weight", Block((1, 0), (2, 3), (1, 0))), ("buffer", None), ("half", None)]}
    part = WriterJob(Folder(tmp_path / "checkpoints"), 7, files, state, {"weight", "half"}, False, reached, lambda: 0)
    state["buffer"].zero_()  # may change at once
    part.copied()
    state["weight"].zero_()
    state["half"].zero_()
    assert not part.over
    go.touch()
    wait_for(part)
    assert part.trouble is None
    written = load_file(tmp_path / "checkpoints/step-000000000007/a.safetensors")
    assert all(tensor.min() == 1 for tensor in written.values())
    assert written["weight"].shape == (2, 3)


def test_a_failing_writer_does_not_remove_the_folder_of_another(tmp_path: Path) -> None:
    class Meanwhile(Folder):
        def make(self, folder: str = "") -> Path:
            path = super().make(folder)
            (path / "b.safetensors").touch()
            with pytest.raises(CheckpointError, match="File exists"):
                write_files(Folder(self.path), 7, {"b.safetensors": [("w", None)]}, lambda *_: torch.ones(2), lambda: 0)
            return path

    written = write_files(Meanwhile(tmp_path), 7, {"a.safetensors": [("w", None)]}, lambda *_: torch.ones(2), lambda: 0)
    assert {path.name for path in (tmp_path / "step-000000000007").iterdir()} == {*written} == {"a.safetensors"}


def test_a_worker_that_cannot_write_ends_the_save_but_not_training(tmp_path: Path) -> None:
    body = WIDE + (
        "import resource, threading, time\n"
        "for report in t.steps(data, count=12):\n"
        "    while report.step == 8 and any(thread.name == 'paceline-save' for thread in threading.enumerate()):\n"
        "        time.sleep(0.01)\n"
        "    if os.environ['PACELINE_RANK'] == '1' and report.step in (3, 8):\n"
        "        most = 4096 if report.step == 3 else resource.RLIM_INFINITY\n"
        "        resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))\n"
        "    if report.step in (4, 6):\n"
        "        t.save()\n"
        "    if report.step >= 10:\n"
        "        t.save()\n"
    )
    done = train_basics(tmp_path, body, 3, "--keep", "9")
    assert done.stderr.count("training continues without this checkpoint") == 1  # also of that of step 6
    assert re.search(r"\ncheckpoints can be written to \S+/out/checkpoints again\n", done.stderr)
    assert re.search(
        r"training continues without this checkpoint: worker 1: checkpoint of step 4 could not be written to"
        r" \S+/out/checkpoints: "
        r"File too large; raise the file size limit \(ulimit -f\) or choose another --run-dir",
        done.stderr,
    ), done.stderr
    assert [step for step, _ in list_checkpoints(tmp_path / "out")] == [12, 11, 10]


@pytest.mark.slow
def test_kill_of_a_checkpoint_writer_begins_the_next_save_at_once(tmp_path: Path) -> None:
    body = WIDE + ("for report in t.steps(data, count=12):\n    if report.step == 4:\n        t.save()\n")
    done = train_basics(tmp_path, body, 3, "--keep", "9", chaos="kill:1@4.writing")
    assert (
        "training continues without this checkpoint: checkpoint of step 4 was abandoned because worker 1 was lost"
        " while writing its part; the next checkpoint begins at once" in done.stderr
    )
    steps = [event["step"] for event in read_journal(tmp_path / "out") if event["event"] == "checkpoint"]
    assert steps[-1] == 12
    assert 4 < steps[0] < 12


@pytest.mark.slow
def test_save_and_resume_on_hosts_with_separate_disks(tmp_path: Path) -> None:
    """Only those write who see the first worker's folder; who does not see the checkpoint gets it from one who does."""
    script = (
        "import os\nos.environ['PACELINE_RUN_DIR'] = 'ab'[os.environ['RANK'] == '2']\nfrom basics import *\n" + WIDE
    )
    end = "list(t.steps(data, count=8))\nt.export(f'out-{os.environ[\"RANK\"]}-{t.steps_done}.safetensors')\n"
    (tmp_path / "train.py").write_text(script + end)
    env = {"PYTHONPATH": str(SCRIPTS), "OMP_NUM_THREADS": "1", "PACELINE_MAX_STEPS": "5"}
    train = tmp_path / "train.py"
    first = without_an_agent(train, train, train, cwd=tmp_path, **env)
    assert [code for code, _ in first] == [0, 0, 0], first
    found = find_checkpoint(tmp_path / "a", pytest.fail)
    assert found is not None
    assert (found.step, len(found.manifest["files"])) == (5, 2)
    assert not (tmp_path / "b" / "checkpoints").exists()
    second = without_an_agent(train, train, train, cwd=tmp_path, **env | {"PACELINE_MAX_STEPS": ""})
    assert [code for code, _ in second] == [0, 0, 0], second
    assert (
        "worker 2 cannot read the checkpoint of step 5 in a/checkpoints and receives it from worker 0" in second[0][1]
    )
    (tmp_path / "whole").mkdir()
    train_basics(tmp_path / "whole", WIDE + "list(t.steps(data, count=8))\nt.export('out.safetensors')\n", 1)
    ours, whole = load_file(tmp_path / "out-0-8.safetensors"), load_file(tmp_path / "whole/out.safetensors")
    assert all(torch.allclose(ours[name], whole[name], rtol=0, atol=1e-12) for name in whole)


COUNTS = (1, 2, 3, 5)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["micro=3", "micro=3 exact"])
def test_resume_on_any_number_of_workers_from_any_other(plan: str, tmp_path: Path) -> None:
    """Saved on so many workers, loaded on as many others: the next losses are those of the undisturbed run."""
    large = WIDE.replace("torch.ones(700, 600,", "torch.ones(700, 1200,")  # 1 MB for each of five writers
    body = large.replace("make(loss, wide)", f"make(loss, wide, plan='{plan}')") + (
        "import json\n"
        "losses = [report.loss for report in t.steps(data, count=11)]\n"
        "if t.main:\n"
        "    Path('losses.json').write_text(json.dumps(losses))\n"
    )

    def losses(folder: Path) -> list[float]:
        found: list[float] = json.loads((folder / "losses.json").read_text())
        return found

    (tmp_path / "whole").mkdir()
    train_basics(tmp_path / "whole", body, 1)
    wanted = losses(tmp_path / "whole")
    for wrote in COUNTS:
        folder = tmp_path / f"by-{wrote}"
        folder.mkdir()
        train_basics(folder, body, wrote, "--steps", "6")
        found = find_checkpoint(folder / "out", pytest.fail)
        assert found is not None
        assert (found.step, len(found.manifest["files"])) == (6, wrote)
        for reads in COUNTS:
            copy = tmp_path / f"by-{wrote}-for-{reads}"
            shutil.copytree(folder, copy)
            train_basics(copy, None, reads)
            theirs = losses(copy)
            assert len(theirs) == 5
            if "exact" in plan:
                assert theirs == wanted[6:]
            assert theirs == pytest.approx(wanted[6:], rel=1e-12)


@pytest.mark.slow
def test_keep_option_limits_the_number_of_checkpoints(tmp_path: Path) -> None:
    body = (
        "import glob\n"
        "t = make()\n"
        "for _ in t.steps(data, count=10**6):\n"
        "    if paceline.join().any(len(glob.glob('out/checkpoints/*/manifest.json')) == 3):\n"
        "        t.stop()\n"
    )
    train_basics(tmp_path, body, 2, "--save-every", "2", "--keep", "3")
    assert len(list_checkpoints(tmp_path / "out")) == 3
    done = paceline("run", "--keep", "0", "train.py", cwd=tmp_path, code=2)
    assert done.stderr == "paceline: --keep 0 is not a whole number from 1 to 999,999,999,999; write it in digits\n"


@pytest.mark.slow
def test_a_killed_single_worker_resumes_from_the_memory_mirror(tmp_path: Path) -> None:
    """Killed twice, it goes on from the copy that its agent has; nothing was written to the disk on the way."""
    body = WIDE + (
        "import signal, time\n"
        "for report in t.steps(data, count=20):\n"
        "    time.sleep(0.15)\n"  # for a copy to be there
        "    killed = Path(f'killed-{report.step}')\n"
        "    if report.step in (8, 15) and 'MIRRORED' in os.environ and not killed.exists():\n"
        "        killed.touch()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "t.export('out.safetensors')\n"
    )
    (tmp_path / "whole").mkdir()
    train_basics(tmp_path / "whole", body, 1)
    (tmp_path / "train.py").write_text("import os\nos.environ['MIRRORED'] = 'yes'\nfrom basics import *\n" + body)
    done = train_basics(tmp_path, None, 1, "--mirror", "3")
    assert {path.name for path in tmp_path.glob("killed-*")} == {"killed-8", "killed-15"}
    assert "\nrestarting from the state in memory (1 of 10)\n" in done.stderr
    assert "\nrestarting from the state in memory (2 of 10)\n" in done.stderr
    steps = [int(step) for step in re.findall(r"^resuming from step (\d+) of its copy in memory$", done.stderr, re.M)]
    assert len(steps) == 2
    assert 3 <= steps[0] < 8
    assert steps[0] < steps[1] < 15
    events = read_journal(tmp_path / "out")
    assert [event["step"] for event in events if event["event"] == "checkpoint"] == [20]
    ours, whole = load_file(tmp_path / "out.safetensors"), load_file(tmp_path / "whole/out.safetensors")
    assert all(torch.allclose(ours[name], whole[name], rtol=0, atol=1e-12) for name in whole)
    assert [*Path("/dev/shm").glob("paceline-mirror-*")] == []


def test_run_dir_refuses_a_url(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    done = paceline("run", "--run-dir", "s3://bucket/a", "train.py", cwd=tmp_path, code=2)
    assert done.stderr == (
        "paceline: --run-dir s3://bucket/a is not a local folder, which logs and the journal need; "
        "use --checkpoints s3://bucket/a instead\n"
    )
    done = paceline("run", "--checkpoints", "nowhere://a", "train.py", cwd=tmp_path, code=2)
    assert done.stderr == (
        "paceline: checkpoints cannot be stored at nowhere://a (Protocol not known: nowhere); "
        "install the Python package for this kind of URL, or use a folder\n"
    )


@pytest.mark.parametrize(
    ("cost", "losses", "wanted"),
    [(0.0, 0, 1.0), (0.5, 0, math.sqrt(2 * 0.5 * 14400)), (0.5, 99, 0.5 / 0.03), (600.0, 0, 1800.0), (None, 0, 60.0)],
)
def test_save_interval(cost: float | None, losses: int, wanted: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    commands = SimpleNamespace(damaged=-1)
    team: Any = SimpleNamespace(transactions=SimpleNamespace(commands=commands))
    reporter: Any = None
    saving = CheckpointManager(team, reporter, None, "auto", 2)
    saving._cost, saving.losses = cost, losses
    assert saving._interval() == pytest.approx(wanted, rel=1e-3)
    saving._saved_at = now - wanted * 1.01
    assert saving.wants(5)
    saving._saved_at = now - wanted * 0.5
    assert not saving.wants(5)
    saving.begun, commands.damaged = 4, 3
    assert not saving.wants(5), "there is a newer one than the damaged one"
    commands.damaged = 4
    assert saving.wants(5)


def test_an_error_of_the_writer_thread_is_kept(tmp_path: Path) -> None:
    def reached(_: str) -> None:
        raise CheckpointError("it broke", "mend it")

    part = WriterJob(Folder(tmp_path), 7, {"a": [("x", None)]}, {"x": torch.ones(1)}, {"x"}, False, reached, lambda: 0)
    wait_for(part)
    assert part.trouble == ["it broke", "mend it"]
    assert part.result is None
