"""Kills in replicas of several workers, beyond the table of recovery: between the sums of a step, one replica after the
other, in an evaluation, and of the last replica.
"""

from __future__ import annotations

import re
import threading

import pytest
from agents import until
from fault_runs import LONG, STEPS, Ended, fired, same, train
from fault_runs import undisturbed as undisturbed
from launching import train_basics

from paceline.team.fault_injection import GO, read_log


def plan(zero: int) -> str:
    return f"micro=2 exact shard=2 zero={zero}"


def formed(ended: Ended) -> list[object]:
    return [event["workers"] for event in ended.events("formed")]


@pytest.mark.slow
@pytest.mark.parametrize("zero", [2, 3])
def test_kill_between_the_sums_of_two_shards(zero, undisturbed, tmp_path, monkeypatch):
    """Worker 0 has the sums of its rows over all replicas; those of the other rows wait for worker 3.

    Of a model with blocks, worker 2 would wait for worker 3 at the end of its backward if that comes last.
    """
    monkeypatch.setenv("WHOLE", "1")
    faults = ["wait:3@11.backward", "kill:0@11.summed"]
    run, waited = tmp_path / "run", threading.Event()

    def let_go() -> None:
        """Worker 3 waits in its backward until worker 0 is lost, whichever comes first."""
        try:
            until(lambda: {*faults} == {entry["fault"] for entry in read_log(run)})
            waited.set()
        finally:
            (run / GO).touch()

    watcher = threading.Thread(target=let_go)
    watcher.start()
    ended = train(tmp_path, 4, STEPS, ",".join(faults), plan=plan(zero))
    watcher.join()
    assert waited.is_set(), "the other sums were not waited for"
    same(ended, undisturbed[STEPS])


@pytest.mark.parametrize("zero", [1, *(pytest.param(zero, marks=pytest.mark.slow) for zero in (2, 3))])
def test_replica_that_has_the_sums_applies_the_step_of_a_killed_one(zero, undisturbed, tmp_path):
    """Workers 0 to 3 have updated, 4 and 5 hold the sums alone: 5 sleeps when worker 0 is lost."""
    faults = {"kill:0@12.applied", "slow:5@11.reduced"}
    ended = train(tmp_path, 6, STEPS, ",".join(faults), plan=plan(zero))
    assert fired(ended) == faults
    same(ended, undisturbed[STEPS])
    assert formed(ended)[0] == [2, 3, 4, 5]
    (event, *_) = ended.events("formed")
    assert event["step"] == 12, "the step was made again"


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 3])
def test_kill_of_a_second_replica_while_the_team_forms_anew(zero, undisturbed, tmp_path):
    """The second is lost in the generation that the first loss makes."""
    faults = {"kill:5@11.loading", "kill:0@11.forming"}
    ended = train(tmp_path, 6, STEPS, ",".join(faults), plan=plan(zero))
    assert fired(ended) == faults
    same(ended, undisturbed[STEPS])


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("workers", [[0], [4], [5], [1, 4]])
def test_kill_while_a_replica_joins(zero, workers, undisturbed, tmp_path):
    """From replica 0 to the one of workers 4 and 5."""
    faults = {f"kill:{worker}@{0 if worker > 3 else 6}.hand-over" for worker in workers}
    wait = f"chaos.jsonl fault {1 + len(faults)}"
    ended = train(tmp_path, 6, LONG, ",".join({"kill:5@5.forward"} | faults), wait, plan=plan(zero))
    assert fired(ended) == {"kill:5@5.forward"} | faults, "a fault did not fire"
    same(ended, undisturbed[LONG])


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_kill_in_an_evaluation_repeats_it(zero, tmp_path):
    """Whoever is in the midst of a forward then, with parameters that are gathered, makes another one."""
    body = (
        "import os, signal\n"
        "from pathlib import Path\n"
        "def right(output, batch):\n"
        "    if {kill} and t.steps_done == 4 and paceline.join().rank == 3 and not Path('killed').exists():\n"
        "        Path('killed').touch()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return {{'loss': (output.square().sum(), len(output))}}\n"
        "t = make(plan='{plan}')\n"
        "found = []\n"
        "for report in t.steps(data, count=8):\n"
        "    found.append(t.evaluate(data, right)['loss'])\n"
        "if t.main:\n"
        "    Path('found').write_text(repr(found))\n"
    )
    (tmp_path / "calm").mkdir()
    train_basics(tmp_path / "calm", body.format(kill=False, plan="exact"), 1)
    done = train_basics(tmp_path, body.format(kill=True, plan=f"exact shard=2 zero={zero}"), 4)
    assert "worker 3 was killed by SIGKILL, and worker 2 of the same replica is restarted" in done.stderr
    assert (tmp_path / "found").read_text() == (tmp_path / "calm/found").read_text()


@pytest.mark.slow
def test_sigterm_to_one_worker_takes_its_replica_out(undisturbed, tmp_path):
    ended = train(tmp_path, 4, LONG, "leave:1@5.forward", 'journal.jsonl "formed" 1', plan=plan(3))
    same(ended, undisturbed[LONG])
    assert ended.events("lost") == []
    assert formed(ended) == [[2, 3]]
    assert "\nworker 1 left as requested: 2 workers go on\n" in ended.text


def test_trainers_with_replicas_of_different_sizes_are_refused(golden, tmp_path):
    body = "make(plan='shard=2')\nmake(plan='shard=4')\n"
    done = train_basics(tmp_path, body, 4, code=2)
    text, *_ = re.findall(r"PlanError: .*?a lost worker ends the run", re.sub(r"\s+", " ", done.stderr))
    golden("replicas of different sizes", text)


LAST = (
    "import os, signal, time\n"
    "from pathlib import Path\n"
    "from safetensors.torch import load_file\n"
    "t = make(plan='{plan}')\n"
    "for report in t.steps(data, count=20):\n"
    "    time.sleep(0.1)\n"
    "    killed = Path('killed')\n"
    "    if report.step == 12 and {kill} and os.environ['PACELINE_RANK'] == '1' and not killed.exists():\n"
    "        killed.touch()\n"
    "        os.kill(os.getpid(), signal.SIGKILL)\n"
    "t.export('out.safetensors')\n"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("zero", "option", "source"),
    [
        (3, ("--save-every", "5"), "the last checkpoint"),
        (1, ("--mirror", "3"), "the state in memory"),
        (3, ("--mirror", "3"), "the state in memory"),
    ],
)
def test_kill_of_the_last_replica_resumes_from_memory_or_checkpoint(zero, option, source, tmp_path):
    """Nobody is left who holds its rows; the run goes on from the copy in memory, or from the last checkpoint."""
    (tmp_path / "calm").mkdir()
    train_basics(tmp_path / "calm", LAST.format(plan="exact", kill=False), 1)
    done = train_basics(tmp_path, LAST.format(plan=f"exact shard=2 zero={zero}", kill=True), 2, *option)
    assert f"\nrestarting from {source} (1 of 10)\n" in done.stderr
    (step,) = re.findall(r"^resuming from step (\d+) of ", done.stderr, re.M)
    assert 5 <= int(step) <= 12
    assert (tmp_path / "out.safetensors").read_bytes() == (tmp_path / "calm/out.safetensors").read_bytes()
