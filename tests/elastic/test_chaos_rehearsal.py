"""`paceline chaos`: the rehearsal trains undisturbed and with losses, and shows that nothing else was lost."""

from __future__ import annotations

import re

import pytest
from launching import paceline

from paceline.errors import UsageError
from paceline.launch.chaos import FIRST, _lost, chaos, draw
from paceline.launch.chaos import KINDS as DRAWN
from paceline.launch.options import LaunchOptions
from paceline.team.fault_injection import FaultInjector, parse_faults


def test_chaos_shows_each_loss_and_that_nothing_else_was_lost(tmp_path):
    faults = "kill:0@4.backward,exit:1@9.reduced"
    (tmp_path / "train.py").write_text("from basics import *\nlist(make(plan='exact').steps(data, epochs=1000))\n")
    done = paceline("chaos", "train.py", "--workers", "3", "--steps", "14", "--faults", faults, cwd=tmp_path)
    head, first, second, _, steps, weights, lost = done.stdout.splitlines()[1:]
    assert head.split() == ["fault", "detected", "after", "team", "formed", "after", "back", "after"]
    assert first.startswith("kill:0@4.backward ")
    assert second.startswith("exit:1@9.reduced ")
    assert steps == "steps    14 steps counted, each exactly once"
    assert weights.startswith("weights  0.0e+00 apart")
    assert lost == "lost     nothing"


OTHERS = {
    "partition:1@4.backward": r"- +[\d.]+ m?s +-",
    "loss:2@8.loading": "happened: one in three operations was delayed for two seconds, first .+",
    "slow-memory:0@12.forward": "happened: memory was slow for two seconds",
    "slow-disk:1@14.loading": "happened: the disk was slow for two seconds",
    "clock:0@16.loading": "happened: the clock was an hour ahead for two seconds",
}


@pytest.mark.slow
def test_chaos_slows_partitions_and_sets_clocks_and_nothing_is_lost(tmp_path):
    """Every fault happens, and the weights are those of the undisturbed run to the byte. The clock of a worker is seen
    in what its script writes.
    """
    body = "from basics import *\nimport time\nbegan = time.time() - time.monotonic()\nahead = []\n"
    body += "for report in make(plan='exact').steps(data, epochs=1000):\n    time.sleep(0.05)\n"
    body += "    if time.time() - time.monotonic() - began > 3000:\n        open('ahead', 'w').close()\n"
    (tmp_path / "train.py").write_text(body)
    done = paceline("chaos", "train.py", "--workers", "3", "--steps", "80", "--faults", ",".join(OTHERS), cwd=tmp_path)
    rows = done.stdout.splitlines()[2:]
    for (fault, shown), row in zip(OTHERS.items(), rows, strict=False):
        assert re.fullmatch(rf"{re.escape(fault)} +{shown}", row), done.stdout
    assert (tmp_path / "ahead").exists()
    assert "steps    80 steps counted, each exactly once" in rows
    assert any(row.startswith("weights  0.0e+00 apart") for row in rows)
    assert rows[-1] == "lost     nothing"


def test_chaos_draws_faults_that_leave_a_team_able_to_finish():
    """All kinds are drawn, in steps that leave some before and after, spread over the workers."""
    kinds = set()
    for seed in range(40):
        drawn = draw(3, 100, 6, seed)
        kinds |= {fault.kind for fault in drawn}
        assert all(FIRST <= fault.step <= 100 - FIRST for fault in drawn)
        assert all(sum(fault.worker == worker for fault in drawn) == 2 for worker in range(3))
    assert kinds == {*DRAWN}


def test_faults_fire_one_after_another_also_after_one_that_nobody_is_lost_by(tmp_path, monkeypatch):
    """The next one waits until a slow disk is fast again, or until the team has formed again without a lost worker."""
    fired = []
    monkeypatch.setattr(FaultInjector, "_fire", lambda self, fault, step: (self._log(fault, step), fired.append(fault)))
    clock = [1000.0]
    faults = FaultInjector("apart:slow-disk:1@1.forward,kill:1@2.forward,kill:1@3.forward", 1, tmp_path)
    faults._now = lambda: clock[0]
    faults.formed()
    for after, members, count in ((1.0, 3, 1), (1.0, 3, 1), (2.0, 1, 1), (0.1, 3, 2), (5.0, 3, 2)):
        clock[0] += after
        faults.reached("forward", 5, members)
        assert len(fired) == count
    faults.formed()
    faults.reached("forward", 6, 3)
    assert [fault.kind for fault in fired] == ["slow-disk", "kill", "kill"]


LATE = "import time, os, sys\nif os.path.exists(sys.argv[1]): time.sleep(0.7)\nopen(sys.argv[1], 'w').close()\n"
LATE += "from basics import *\nlist(make().steps(data, epochs=1000))\n"


@pytest.mark.slow
def test_chaos_draws_losses_that_wait_until_a_killed_worker_has_joined_again(tmp_path):
    """Those that take their places import for longer than all steps take."""
    (tmp_path / "train.py").write_text(LATE)
    options = ("--workers", "2", "--steps", "120", "--losses", "2")
    done = paceline("chaos", "train.py", *options, "--", tmp_path / "begun", cwd=tmp_path)
    rows = done.stdout.splitlines()
    assert len([row for row in rows if "@" in row and "did not happen" not in row]) == 2, done.stdout
    assert "steps    120 steps counted, each exactly once" in rows
    assert rows[-1] == "lost     nothing"


def test_chaos_reports_the_exit_code_of_a_run_that_nobody_survives(tmp_path):
    """With the exit code that the last line has in words."""
    (tmp_path / "train.py").write_text("from basics import *\nlist(make().steps(data, epochs=1000))\n")
    options = ("--workers", "2", "--steps", "8", "--faults", "kill:0@3.loading,kill:1@3.loading")
    done = paceline("chaos", "train.py", *options, cwd=tmp_path, code=1)
    last = done.stdout.splitlines()[-1]
    assert last == "lost     the run: it ended before its last step, with exit code 137"
    again = f"next: find out who sent the signal; then run `paceline chaos train.py {' '.join(options)}`\n"
    assert done.stderr.endswith(again)
    assert "/paceline-chaos-" not in done.stderr  # that folder is gone


def test_chaos_that_is_stopped_names_no_folder_that_it_removes(tmp_path):
    body = "from basics import *\nimport os, signal\nfor report in make().steps(data, epochs=1000):\n"
    (tmp_path / "train.py").write_text(body + "    report.step == 3 and os.kill(os.getppid(), signal.SIGTERM)\n")
    done = paceline("chaos", "train.py", "--workers", "2", "--", "it's", cwd=tmp_path, code=75)
    assert done.stderr.splitlines() == [
        "100 steps without faults ...",
        "stopping after this step and saving; press Ctrl-C again to stop at once",
        "stopped",
        """start again with: paceline chaos train.py --workers 2 -- 'it'"'"'s'""",
    ]


@pytest.mark.parametrize("code", [0, 1, 137])
@pytest.mark.parametrize("has_weights", [False, True])
@pytest.mark.parametrize("same", [False, True])
def test_chaos_loses_nothing_if_the_run_ended_with_exit_code_0_and_the_same_weights(code, has_weights, same):
    assert (_lost(code, has_weights, same) == "") == (code == 0 and has_weights and same)


@pytest.mark.parametrize(("workers", "faults"), [(1, ""), (4, "kill:4@1.forward"), (4, "kill:0@1")])
def test_chaos_refuses_wrong_arguments(workers, faults, golden):
    with pytest.raises(UsageError) as caught:
        chaos(LaunchOptions(script="train.py", workers=workers), 10, 2, 0, faults)
    golden(f"{workers} workers, faults={faults!r}", str(caught.value))


def test_chaos_draws_the_same_losses_for_the_same_seed():
    assert draw(4, 100, 6, seed=3) == draw(4, 100, 6, seed=3)
    assert draw(4, 100, 6, seed=3) != draw(4, 100, 6, seed=4)
    assert [fault.step for fault in draw(3, 50, 4, seed=0)] == [2, 13, 25, 36]
    assert {fault.worker for fault in draw(3, 50, 3, seed=0)} == {0, 1, 2}
    assert parse_faults(",".join(map(str, draw(4, 100, 6, seed=3)))) == draw(4, 100, 6, seed=3)
