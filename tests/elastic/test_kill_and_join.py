"""Workers that are killed, that leave and that join: what the run says, who is started again, and who takes part."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import enter_group
from covering import each_value
from fault_runs import LONG, MOMENTS, STEPS, WORKERS, fired, same, train
from fault_runs import undisturbed as undisturbed
from launching import SCRIPTS, paceline, train_basics, without_an_agent

from paceline.base.journal import read_journal
from paceline.observe.summary import Summary, facts
from paceline.team.fault_injection import read_log


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.parametrize(("moment", "worker"), each_value(MOMENTS, [0, 3]))
def test_kill_of_a_worker_out_of_memory_gives_the_undisturbed_weights(
    worker, moment, undisturbed, memory_group, tmp_path
):
    """The kernel's out-of-memory killer strikes in a memory cgroup that all are in."""
    at = 9 if moment in ("saving", "writing") else 11
    faults = {f"memory:{worker}@{at}.{moment}"} | ({"kill:5@11.loading"} if moment == "forming" else set())
    ballast, enter = WORKERS if moment == "writing" else 0, enter_group(memory_group(4 << 30))
    ended = train(tmp_path, WORKERS, STEPS, ",".join(faults), preexec=enter, ballast=ballast)
    assert fired(ended) == faults, "a fault did not fire"
    same(ended, undisturbed["writing" if moment == "writing" else STEPS])
    assert f"worker {worker} was killed by the out-of-memory killer: " in ended.text


@pytest.mark.slow
def test_killed_worker_joins_again(undisturbed, tmp_path):
    ended = train(tmp_path, WORKERS, LONG, "kill:0@5.forward", 'journal.jsonl "formed" 2', loaders=1)
    same(ended, undisturbed[LONG])
    (lost, formed) = ended.events("lost"), ended.events("formed")
    assert [event["workers"] for event in lost] == [[0]]
    assert [event["workers"] for event in formed] == [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 0]]


def test_exception_that_is_raised_again_by_another_worker_ends_the_run(tmp_path):
    """The others try the rows that led to it, and meet it as well."""
    body = (
        "def loss(o, b):\n"
        "    if (b[0] == data[13][0]).all(1).any():\n"
        "        raise ValueError('row 13 is bad')\n"
        "    return F.cross_entropy(o, b[1])\n"
        "list(make(loss).steps(data))\n"
    )
    done = train_basics(tmp_path, body, 3, code=1)
    assert re.search(r"^worker \d raised ValueError: 2 workers go on$", done.stderr, re.M)
    assert re.search(r"^worker \d failed \(", done.stderr, re.M)
    assert "\n  ValueError: row 13 is bad\n" in done.stderr
    assert re.search(r"^worker \d failed in the same way$", done.stderr, re.M)


def test_sigterm_to_one_worker_lets_the_others_go_on_without_it(undisturbed, tmp_path):
    """Nobody takes its place."""
    ended = train(tmp_path, 3, STEPS, "leave:1@5.forward", 'journal.jsonl "formed" 1')
    assert fired(ended) == {"leave:1@5.forward"}
    same(ended, undisturbed[STEPS])
    assert ended.events("lost") == []
    assert [event["workers"] for event in ended.events("formed")] == [[0, 2]]
    assert "\nworker 1 left as requested: 2 workers go on\n" in ended.text


@pytest.mark.slow
def test_elastic_step_sends_the_same_messages_as_a_fixed_team(tmp_path):
    """A team that survives losses exchanges exactly what a fixed one does, which has no agent and no coordinator."""
    body = "for _ in make(plan='micro=2').steps(data, epochs=5):\n    pass\n"
    train_basics(tmp_path, body, 3)
    fixed = tmp_path / "fixed"
    script = tmp_path / "train.py"
    env = {"PACELINE_RUN_DIR": str(fixed), "PYTHONPATH": str(SCRIPTS), "OMP_NUM_THREADS": "1"}
    assert [code for code, _ in without_an_agent(script, script, script, **env)] == [0, 0, 0]
    found = []
    for folder in (tmp_path / "out", fixed):
        (told,) = [event["kinds"] for event in read_journal(folder) if event["event"] == "collectives"]
        found.append(({kind: entry[0] for kind, entry in told.items()}, told["gradients"][1]))
    assert found[0][0]["gradients"] >= 20
    assert found[0] == found[1]


@pytest.mark.slow
def test_time_accounts_add_up_to_the_wall_clock(tmp_path):
    """What brings the training forward, and what losses cost, add up to the wall clock."""
    faults = "stop:1@5.reduced,kill:2@9.backward"
    ended = train(tmp_path, 3, LONG, faults, 'journal.jsonl "formed" 4')
    (start,) = ended.events("start")
    summary = Summary(ended.folder)
    (finished,) = ended.events("finished")
    assert sum(summary.account.values()) == pytest.approx(finished["at"] - start["began"], rel=0.01)
    assert summary.account["detection"] == pytest.approx(0.3, abs=0.1), "for which the stopped one was waited for"
    assert {"starting", "steps", "script", "saving", "evaluating", "forming", "hand-over", "redone"} <= {
        *summary.account
    }
    assert {"goodput", "wall clock"} & dict(facts(summary)["Results"]).keys()


def test_killed_worker_is_not_restarted_with_a_changed_script(tmp_path):
    """Worker 1 changes the script, and worker 2 removes it."""
    body = (
        "import os\n"
        "t = make()\n"
        "for report in t.steps(data, count=12):\n"
        "    if report.step == 4 and os.environ['PACELINE_RANK'] == '1':\n"
        "        open('train.py', 'a').write('# changed')\n"
        "        os.kill(os.getpid(), 9)\n"
        "    if report.step == 8 and os.environ['PACELINE_RANK'] == '2':\n"
        "        os.remove('train.py')\n"
        "        os.kill(os.getpid(), 9)\n"
    )
    done = train_basics(tmp_path, body, 3)
    changed = "has changed since the run began; to use the new script, start the same command again"
    removed = "was deleted; restore it, then start the same command again"
    for worker, text in ((1, changed), (2, removed)):
        assert f"\nworker {worker} is not restarted: train.py {text}\n" in done.stderr
    report = paceline("explain", "out", cwd=tmp_path).stdout
    assert re.search(r"^  lost         worker 1 was killed by SIGKILL, after step \d$", report, re.M)
    assert re.search(r"^  teams        re-formed 2 times in \d+.*; 1 worker at the end$", report, re.M)


def test_worker_that_fails_before_it_joins_is_restarted_after_longer_pauses(tmp_path):
    body = (
        "import os, time\n"
        "tries = lambda: len(open('lost').read()) if os.path.exists('lost') else 0\n"
        "if os.path.exists('lost'):\n"
        "    open('lost', 'a').write('x')\n"
        "    raise OSError('no such device')\n"
        "t = make()\n"
        "for report in t.steps(data, count=120):\n"
        "    if report.step == 4 and paceline.join().rank == 1:\n"
        "        open('lost', 'w').close()\n"
        "        os.kill(os.getpid(), 9)\n"
        "    time.sleep(0.05 * (tries() < 3))\n"
    )
    done = train_basics(tmp_path, body, 2)
    lines = [line for line in done.stderr.splitlines() if line.startswith("worker 1 ")]
    assert lines[0] == "worker 1 was killed by SIGKILL: 1 worker goes on"
    again = "worker 1 ended with exit code 1 before it had rejoined; it is restarted in {} s"
    assert lines[1:3] == [again.format(1), again.format(2)]  # and 4, 8, if it had come to that
    below = "\n  OSError: no such device\n  at train.py:6 in <module>: raise OSError('no such device')\n"
    assert f"{again.format(1)}{below}  log: out/logs/worker-1.log\n" in done.stderr
    assert "OSError: no such device" in (tmp_path / "out/logs/worker-1.log").read_text()


def test_collective_before_training_keeps_a_killed_worker_from_joining_again(tmp_path):
    body = (
        "import os, time\n"
        "assert paceline.join().any(True)\n"
        "t = make()\n"
        "for report in t.steps(data, count=200):\n"
        "    time.sleep(0 if 'UsageError' in open('out/logs/worker-1.log').read() else 0.05)\n"
        "    if report.step == 4 and paceline.join().rank == 1 and not os.path.exists('lost'):\n"
        "        open('lost', 'w').close()\n"
        "        os.kill(os.getpid(), 9)\n"
    )
    done = train_basics(tmp_path, body, 2)
    assert "\nworker 1 was killed by SIGKILL: 1 worker goes on\n" in done.stderr
    told = "\nworker 1 raised UsageError before it had rejoined; it is not restarted\n  UsageError: worker 1 has"
    assert told in done.stderr
    log = (tmp_path / "out/logs/worker-1.log").read_text()
    assert "UsageError: worker 1 has rejoined, and cannot join collectives that ran before training began; " in log


def test_collective_in_the_loss_is_part_of_the_step(tmp_path):
    body = (
        "calls = []\n"
        "def loss(o, b):\n"
        "    if o.requires_grad:\n"
        "        calls.append(paceline.join().any(paceline.join().rank == 1))\n"
        "    return F.cross_entropy(o, b[1])\n"
        "list(make(loss, plan='micro=12').steps(data, count=5))\n"
        "assert calls == [True] * 5, calls\n"
    )
    train_basics(tmp_path, body, 2)


def test_kill_removes_shared_memory_of_loader_processes(tmp_path):
    """Torch opens a file there for each tensor that it sends, and unlinks it: a kill may come between."""
    body = (
        "import os\n"
        "from pathlib import Path\n"
        "class Rows(torch.utils.data.Dataset):\n"
        "    def __len__(self):\n"
        "        return len(data)\n"
        "    def __getitem__(self, row):\n"
        "        name = f'torch_{os.getpid()}_1_0'\n"
        "        Path('/dev/shm', name).touch()\n"
        "        Path('left', name).touch()\n"
        "        return data[row]\n"
        "list(make().steps(Rows(), count=12, loader={'num_workers': 1}))\n"
    )
    (tmp_path / "left").mkdir()
    train_basics(tmp_path, body, 2, "--max-restarts", "1", chaos="kill:1@4.forward")
    assert [entry["fault"] for entry in read_log(tmp_path / "out")] == ["kill:1@4.forward"]
    left = [path.name for path in (tmp_path / "left").iterdir()]
    assert len(left) >= 2
    assert [name for name in left if Path("/dev/shm", name).exists()] == []


def generations_with_the_weights_of_one_worker(folder: Path, body: str, chaos: str) -> list[object]:
    """The generations of three workers with a fault, whose weights must be those of one worker."""
    weights = []
    for workers, faults in ((1, ""), (2, chaos)):
        train_basics(folder, body, workers, "--run-dir", f"out-{workers}", chaos=faults)
        weights.append((folder / "weights.safetensors").read_bytes())
    assert weights[0] == weights[1]
    return [event["workers"] for event in read_journal(folder / "out-2") if event["event"] == "formed"]


@pytest.mark.slow
def test_joining_worker_creates_trainers_that_the_others_created_between_loops(tmp_path):
    body = (
        "import os, time\n"
        "list(make(plan='exact').steps(data, count=6))\n"
        "second = make(plan='exact')\n"
        "for report in second.steps(data, count=200 if os.environ['PACELINE_CHAOS'] else 30):\n"
        "    time.sleep(0.1 * bool(os.environ['PACELINE_CHAOS']))\n"
        "    if report.step == 30:\n"
        "        second.export('weights.safetensors')\n"
        "    if report.step > 30 and paceline.join().size == 2:\n"
        "        second.stop()\n"
    )
    assert generations_with_the_weights_of_one_worker(tmp_path, body, "kill:1@10.forward") == [[0], [0, 1]]


@pytest.mark.parametrize(
    ("count", "ending", "formed"),
    [
        pytest.param(6, "", [[0]], marks=pytest.mark.slow),
        pytest.param(9, "    if report.step == 6:\n        trainer.stop()\n", [[0]], marks=pytest.mark.slow),
        pytest.param(6, "list(trainer.steps(data, count=3))\n", [[0], [0, 1]], marks=pytest.mark.slow),
        (9, "    if report.step == 6:\n        break\nlist(trainer.steps(data, count=3))\n", [[0], [0, 1]]),
    ],
    ids=["its end", "stopped", "another loop follows", "left, and another loop follows"],
)
def test_worker_that_joins_with_the_last_step_of_a_loop_passes_over_the_loop(count, ending, formed, tmp_path):
    """A generation that admits it is planned before that step, and not sooner. It passes over the loop, and so over the
    checkpoint that the others end it with.
    """
    body = (
        "import os, time\n"
        "while os.environ.get('PACELINE_NEWCOMER') and not os.path.exists('fifth'):\n"
        "    time.sleep(0.01)\n"
        "trainer = make(plan='exact')\n"
        f"for report in trainer.steps(data, count={count}):\n"
        "    trainer.save()\n"
        "    if report.step == 5 and os.environ['PACELINE_CHAOS']:\n"
        "        open('fifth', 'w').close()\n"
        "        while not paceline.join().transactions.newcomers:\n"
        "            time.sleep(0.01)\n"
        f"{ending}"
        "trainer.export('weights.safetensors')\n"
    )
    assert generations_with_the_weights_of_one_worker(tmp_path, body, "kill:1@4.forward") == formed
