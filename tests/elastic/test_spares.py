"""Spare workers: they take the place of lost ones, at any moment, and the training is that of an undisturbed run."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
import torch
from agents import until
from fault_runs import LONG, STEPS, Ended, Undisturbed, fired, same, train
from fault_runs import calm as calm
from fault_runs import undisturbed as undisturbed
from host_folders import launched as launched
from launching import paceline, train_basics

from paceline.base.journal import Journal, read_journal
from paceline.checkpoint.files import write_checkpoint
from paceline.checkpoint.storage import Folder
from paceline.observe.metrics import METRICS
from paceline.observe.summary import Summary, facts
from paceline.observe.team_table import describe_team, happened, members
from paceline.session.checkpoint_checker import becomes_reader, read_newest

WAIT = "wait:0@3.loading"  # until the spares are ready
EXACT = "micro=2 exact"


def formed(ended: Ended) -> list[tuple[object, object]]:
    return [(event["workers"], event["step"]) for event in ended.events("formed")]


def kill(
    folder: Path, calm: Undisturbed, faults: str, spares: int, plan: str = EXACT, workers: int = 3, teams: int = 0
) -> Ended:
    """Trains with kills and spares, and asserts the undisturbed bytes. With `teams` until so many have formed."""
    faults, steps = f"{WAIT},{faults}", LONG if teams else STEPS
    wait = f'journal.jsonl "formed" {teams}' if teams else ""
    ended = train(folder, workers, steps, faults, wait, plan=plan, spares=spares)
    assert fired(ended) == {*faults.split(",")}, "a fault did not fire"
    same(ended, calm[steps])
    return ended


def test_spare_takes_the_place_of_a_killed_worker(undisturbed, tmp_path):
    ended = kill(tmp_path, undisturbed, "kill:1@5.backward", 1)
    assert formed(ended) == [([0, 2], 5), ([0, 2, 3], 5)], "the full team repeats the interrupted step"
    first, second, *_ = [(event["workers"], event["enter"]) for event in ended.events("spares")]
    assert (first, second) == (([3], []), ([], [3]))
    assert "\nworker 3 is ready as a spare: 3 workers, 1 spare\n" in ended.text
    assert "\nworker 1 was killed by SIGKILL: 2 workers go on\n" in ended.text
    assert "\nworker 3 has joined: 3 workers, " in ended.text


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["reduced", "applied", "saving"])
def test_two_kills_in_a_row_with_two_spares(moment, undisturbed, tmp_path):
    at = 9 if moment == "saving" else 6
    ended = kill(tmp_path, undisturbed, f"kill:1@5.backward,kill:0@{at}.{moment}", 2, teams=4)
    assert [team for team, _ in formed(ended)][:3] == [[0, 2], [0, 2, 3], [2, 3]]
    assert formed(ended)[3][0] in ([2, 3, 4], [2, 3, 1]), "worker 1 may be ready again"


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["forming", "hand-over"])
def test_kill_of_a_spare_while_it_is_admitted(moment, undisturbed, tmp_path):
    """The other spare takes the place instead."""
    ended = kill(tmp_path, undisturbed, f"kill:1@5.backward,kill:3@0.{moment}", 2)
    assert [0, 2, 4] in [team for team, _ in formed(ended)]


@pytest.mark.slow
def test_kill_outside_of_a_step_admits_the_spare_after_it(undisturbed, tmp_path):
    """Worker 0 is lost when it has updated: the others complete the step, and the spare enters at its end."""
    ended = kill(tmp_path, undisturbed, "kill:0@6.applied", 1, teams=2)
    assert formed(ended)[0][0] == [1, 2]
    assert formed(ended)[1][0] == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 3])
def test_two_spares_take_the_place_of_a_replica(zero, undisturbed, tmp_path):
    plan = f"{EXACT} shard=2 zero={zero}"
    ended = kill(tmp_path, undisturbed, "kill:1@5.backward", 2, plan=plan, workers=4)
    assert formed(ended) == [([2, 3], 5), ([2, 3, 4, 5], 5)]


def test_kill_of_a_spare_does_not_disturb_the_training(tmp_path):
    """The next process of the spare is ready later, and takes a place."""
    body = (
        "import os, signal, time\n"
        "from pathlib import Path\n"
        "from paceline.base.journal import read_journal\n"
        "events = lambda kind: [e for e in read_journal(Path('out')) if e['event'] == kind]\n"
        "def wait(ready):\n"
        "    while not ready():\n"
        "        time.sleep(0.02)\n"
        "t = make(plan='exact micro=2')\n"
        "for report in t.steps(data, count=12):\n"
        "    if KILLS and report.step == 3 and paceline.join().rank == 0:\n"
        "        wait(lambda: len(events('spares')) == 1)\n"
        "        os.kill([e['pid'] for e in events('worker') if e['worker'] == 2][0], signal.SIGKILL)\n"
        "        wait(lambda: [e['workers'] for e in events('spares')] == [[2], [], [2]])\n"
        "    if KILLS and report.step == 6 and os.environ['PACELINE_RANK'] == '1':\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "t.export('w.safetensors')\n"
    )
    (tmp_path / "calm").mkdir()
    train_basics(tmp_path / "calm", body.replace("KILLS", "0"), 1)
    done = train_basics(tmp_path, body.replace("KILLS", "1"), 2, "--spares", "1")
    assert (tmp_path / "w.safetensors").read_bytes() == (tmp_path / "calm" / "w.safetensors").read_bytes()
    assert "\nworker 2 was killed by SIGKILL while it was a spare\n" in done.stderr
    events = read_journal(tmp_path / "out")
    assert [e["workers"] for e in events if e["event"] == "formed"][-1] == [0, 2]
    assert len([e for e in events if e["event"] == "formed" and e["step"] < 6]) == 0, "the team did not form again"
    report = paceline("explain", "out", cwd=tmp_path).stdout
    assert re.search(r"^  spares +\d spare workers? ready at the end; 1 spare worker entered the team$", report, re.M)


def test_waiting_spare_finds_a_damaged_checkpoint_and_another_one_is_written(tmp_path):
    body = (
        "import os, signal, time\n"
        "from pathlib import Path\n"
        "from paceline.base.journal import read_journal\n"
        "events = lambda kind: [e for e in read_journal(Path('out')) if e['event'] == kind]\n"
        "spare = lambda: [e['pid'] for e in events('worker') if e['worker'] == 2][0]\n"
        "def wait(ready):\n"
        "    while not ready():\n"
        "        time.sleep(0.02)\n"
        "t = make(plan='exact micro=2')\n"
        "is_damaged = False\n"
        "for report in t.steps(data, count=40):\n"
        "    main = paceline.join().rank == 0\n"
        "    if report.step == 3 and main:\n"
        "        wait(lambda: len(events('spares')) == 1)\n"
        "        os.kill(spare(), signal.SIGSTOP)\n"
        "    if report.step == 3:\n"
        "        t.save()\n"
        "    if main and not is_damaged and any(Path('out/checkpoints').glob('step-*/manifest.json')):\n"
        "        is_damaged, (file,) = True, Path('out/checkpoints').glob('step-*/model-*')\n"
        "        with file.open('r+b') as damaged:\n"
        "            damaged.seek(-1, 2)\n"
        "            last = damaged.read()[0]\n"
        "            damaged.seek(-1, 2)\n"
        "            damaged.write(bytes([last ^ 1]))\n"
        "        os.kill(spare(), signal.SIGCONT)\n"
        "        wait(lambda: events('checked'))\n"
        "    if main and report.step == 39:\n"
        "        wait(lambda: len(events('checked')) >= 2)\n"
        "    time.sleep(0.05)\n"
    )
    done = train_basics(tmp_path, body, 2, "--spares", "1", "--save-every", "100")
    events = read_journal(tmp_path / "out")
    saved = [event["step"] for event in events if event["event"] == "checkpoint"]
    assert saved[0] in (3, 4)
    assert saved[1] < 40, "after the damage was known, and not at the end"
    checked = [(event["step"], event["worker"], event["damage"]) for event in events if event["event"] == "checked"]
    damage = checked[0][2]
    assert re.fullmatch(r"model-\w+\.safetensors: SHA-256 differs", damage)
    assert checked[:2] == [(saved[0], 2, damage), (saved[1], 2, "")]
    what = f"worker 2, a spare, has read the checkpoint of step {saved[0]} again: it is damaged ({damage})"
    assert f"\n{what}; another one is written now\n" in done.stderr
    read = f"spares have read {len(checked)} again, damaged: step {saved[0]} ({damage})"
    assert read in dict(facts(Summary(tmp_path / "out"))["What happened"])["checkpoints"]


def test_one_of_the_spares_that_see_a_folder_reads_its_checkpoints(tmp_path):
    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    storage = Folder(tmp_path / "checkpoints")
    assert not becomes_reader(storage, first), "the folder is created with the first checkpoint"
    storage.make()
    with second:
        with first:
            assert becomes_reader(storage, first)
            assert not becomes_reader(storage, second)
        assert becomes_reader(storage, second), "the first one has ended"


def test_newest_finished_checkpoint_is_read_once(tmp_path):
    storage = Folder(tmp_path)
    write_checkpoint(storage, 3, {"a": torch.arange(4.0)}, {})
    read = read_newest(storage, -1)
    assert read is not None
    assert read[:2] == (3, "")
    assert read_newest(storage, 3) is None
    storage.put("step-000000000005", "model-1.safetensors", b"being written")
    assert read_newest(storage, 2) is not None, "the newest one is not finished"
    assert read_newest(storage, 2, ends=lambda: True) is None


def test_spares_are_in_the_table_of_workers_the_report_and_the_metrics(tmp_path):
    journal = Journal(tmp_path)
    journal.write("start", workers=2, hosts=1, plan="data=2")
    for worker in range(3):
        journal.write("worker", worker=worker, life=0, host="node7", pid=1 + worker, what="started")
    journal.write("spares", workers=[2], enter=[], step=0)
    journal.flush()
    summary = Summary(tmp_path)
    assert [(one.worker, one.state) for one in members(summary)] == [("0", "up"), ("1", "up"), ("2", "spare")]
    assert describe_team(members(summary)).startswith("3 workers, 2 up, 1 spare")
    (metric,) = [metric for metric in METRICS if metric.name == "paceline_spare_workers"]
    assert [*metric.values(summary)] == [(("", ""), 1.0)]
    journal.write("lost", workers=[1], why="was killed by SIGKILL", step=3)
    journal.write("spares", workers=[], enter=[2], step=3)
    journal.write("formed", number=2, workers=[0, 2], step=3, seconds=0.1)
    journal.close()
    summary = Summary(tmp_path)
    assert [(one.worker, one.state) for one in members(summary)] == [("0", "up"), ("1", "lost"), ("2", "up")]
    spares = "0 spare workers ready at the end; 1 spare worker entered the team"
    assert ("spares", spares) in facts(summary)["What happened"]
    assert "spare worker 2 enters the team" in [text for _, text in happened(summary)]


@pytest.mark.slow
def test_worker_of_a_spare_host_takes_the_place_of_a_lost_host(launched, tmp_path):
    """The spare has received the state and the sums of steps beforehand, since nobody else on its host has them."""
    script = (
        "from basics import make, data\n"
        "t = make(plan='exact micro=2')\n"
        "for report in t.steps(data, count=300):\n"
        "    time.sleep(0 if os.path.exists('../go') else 0.1)\n"
        "t.export('../{}.safetensors')\n"
    )
    process = launched.start(dict.fromkeys("abc", script.format("lost")), spare="c")
    folder = tmp_path / "a" / "run"
    events = lambda kind: [event for event in read_journal(folder) if event["event"] == kind]
    until(lambda: folder.exists() and any(len(event["workers"]) == 1 for event in events("spares")))
    until(lambda: any(len(event["workers"]) == 2 for event in events("formed")))
    (tmp_path / "b" / "down").touch()
    for one in [one for one in launched.ours() if (one.info["cwd"] or "").startswith(str(tmp_path / "b"))]:
        one.kill()
    until(lambda: any(event["enter"] for event in events("spares")) and len(events("formed")[-1]["workers"]) == 2)
    (tmp_path / "go").touch()
    _, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    (spare,) = [number for event in events("spares") for number in event["enter"]]
    assert events("formed")[-1]["workers"] == [0, spare]
    gives = [event for event in events("gives") if event["worker"] == spare][-1]
    assert gives["bytes"] < gives["whole"], "nothing had gone ahead"
    alone = launched.start({"d": script.format("calm")})
    assert alone.wait(timeout=120) == 0
    assert (tmp_path / "lost.safetensors").read_bytes() == (tmp_path / "calm.safetensors").read_bytes()


ALONE = "have the only copy of the state, and no spare can continue if it is lost; use at least two"
MIRROR = "or --mirror, which restarts the run from a copy in memory"
REFUSED = {
    "--workers 1": f"--spares 1: the only worker {ALONE.replace('have', 'has')} workers, {MIRROR}",
    "--workers 4 --plan shard=4": f"--spares 1: all 4 workers together {ALONE} replicas, {MIRROR}",
    "--workers 4 --plan shard=2": "--spares 1: a replica of the plan data=2 shard=2 zero=3 has 2 workers, "
    "which join and leave together; use --spares 2",
    "--workers 2 --max-restarts 0": "--spares 1 has no effect with --max-restarts 0: the loss of "
    "any worker ends the run; leave one of the two out",
    "--workers 2 --shares 2,1": "--spares 1 cannot be combined with --shares, which belong to workers by "
    "their numbers; leave --shares out: shares follow from measured speed",
    "--workers 2 --debug 1": "--spares 1 cannot be combined with --debug, which holds the worker at a "
    "prompt; leave --spares out while you debug",
}


@pytest.mark.parametrize("options", REFUSED)
def test_run_refuses_spares_that_could_never_help(options, tmp_path):
    (tmp_path / "train.py").write_text("import paceline\n")
    done = paceline("run", *options.split(), "--spares", "1", "train.py", cwd=tmp_path, code=2)
    assert done.stderr == f"paceline: {REFUSED[options]}\n"


@pytest.mark.slow
def test_plan_of_the_script_refuses_spares_that_could_never_help(tmp_path):
    done = train_basics(tmp_path, "list(make(plan='shard=2').steps(data))\n", 4, "--spares", "1", code=2)
    assert "--spares 1: a replica of the plan data=2 shard=2 zero=3 has 2 workers" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("words", ["server=1", "local=3 every=2"])
def test_spare_takes_the_place_of_a_worker_of_other_plans(words, calm, tmp_path):
    """To rounding, as without spares; a round or an asynchronous window ends before the spare enters."""
    plan = f"micro=4 {words}"
    ended = train(tmp_path, 3, LONG, f"{WAIT},kill:1@5.backward", 'journal.jsonl "formed" 2', plan=plan, spares=1)
    assert fired(ended) == {WAIT, "kill:1@5.backward"}
    assert [team for team, _ in formed(ended)] == [[0, 2], [0, 2, 3]]
    if "server" in words:
        calm.meets(ended, LONG)
