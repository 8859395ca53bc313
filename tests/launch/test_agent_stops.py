"""How the agent stops a run: by signals, and by decision of its workers. With real processes."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from agents import AGAIN, POLITE, Launcher, until


@pytest.fixture(autouse=True)
def cold_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Launcher, "cold_start", True)


STOPPING = "stopping after this step and saving; press Ctrl-C again to stop at once\n"
UNSAVED = "stopping; press Ctrl-C again to stop at once\n"
START = "2 workers, run folder run\n"


@pytest.mark.parametrize(("number", "code"), [("SIGINT", 130), ("SIGTERM", 75), ("SIGHUP", 75)])
def test_stop_signal_saves_and_names_the_command_that_goes_on(launcher: Launcher, number: str, code: int) -> None:
    process = launcher.start(POLITE)
    launcher.wait_for("up")
    process.send_signal(signal.Signals[number])
    ended = launcher.end(process)
    assert ended.code == code
    assert ended.stderr == (
        f"{START}{STOPPING}stopped after step 120; saved run/checkpoints/step-000000000120\ncontinue with: {AGAIN}\n"
    )


DEAF = """
event("join")
signal.signal(signal.SIGUSR2, lambda *_: mark("heard"))
mark("up")
while True:
    time.sleep(1)
"""


@pytest.mark.parametrize(("number", "code"), [("SIGINT", 130), ("SIGTERM", 75)])
def test_second_stop_signal_ends_at_once(launcher: Launcher, number: str, code: int) -> None:
    process = launcher.start(DEAF, seconds={"TWICE": 0.0})
    launcher.wait_for("up")
    process.send_signal(signal.Signals[number])
    launcher.wait_for("heard")
    process.send_signal(signal.Signals[number])
    ended = launcher.end(process)
    assert ended.code == code
    assert ended.stderr == f"{START}{UNSAVED}stopped at once; no checkpoint was written\nstart again with: {AGAIN}\n"


def pending(pid: int, number: int) -> bool:
    """Whether a signal to a process was not delivered yet."""
    found = re.search(r"^ShdPnd:\s(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.M)
    assert found
    return bool(int(found[1], 16) >> (number - 1) & 1)


def test_second_sigterm_soon_after_the_first_is_ignored(launcher: Launcher) -> None:
    """They are sent to a group and to its members."""
    process = launcher.start(DEAF, seconds={"TWICE": 3600.0})
    launcher.wait_for("up")
    process.send_signal(signal.SIGTERM)
    launcher.wait_for("heard")
    process.send_signal(signal.SIGTERM)
    until(lambda: not pending(process.pid, signal.SIGTERM))
    process.send_signal(signal.SIGINT)
    assert launcher.end(process).code == 130, "it would be 75, had the second one counted"


def test_stop_before_a_worker_listens_ends_it(launcher: Launcher) -> None:
    """As in the seconds of `import torch`: nobody listens for the signal yet, so it ends the worker."""
    process = launcher.start("""
        if RANK == 1:
            signal.signal(signal.SIGUSR2, lambda *_: None)
        mark("up")
        for _ in range(600):
            time.sleep(1)
        """)
    launcher.wait_for("up")
    process.send_signal(signal.SIGINT)
    ended = launcher.end(process)
    assert ended.code == 130
    assert ended.stderr == f"{START}{UNSAVED}stopped; no checkpoint was written\nstart again with: {AGAIN}\n"


def test_stop_of_the_workers_is_exit_code_75(launcher: Launcher) -> None:
    """A notice at one worker makes all stop; the agent was not asked."""
    ended = launcher.run('event("join"); event("stopped", step=7, checkpoint=None); sys.exit(75)')
    assert ended.code == 75
    assert ended.stderr == f"{START}stopped; no checkpoint was written\nstart again with: {AGAIN}\n"


def test_steps_option_is_not_part_of_the_command_that_goes_on(launcher: Launcher) -> None:
    """--steps 7: the command that goes on does not end at step 7 again."""
    ended = launcher.run(
        """
        event("join")
        os.makedirs(RUN + "/checkpoints/step-000000000007", exist_ok=True)
        open(RUN + "/checkpoints/step-000000000007/manifest.json", "w").close()
        event("stopped", step=7, checkpoint="checkpoints/step-000000000007")
        """,
        max_steps=7,
    )
    assert ended.code == 0
    assert ended.stderr == (
        f"{START}stopped after step 7; saved run/checkpoints/step-000000000007\ncontinue with: {AGAIN}\n"
    )


def test_stop_while_the_run_finishes_is_exit_code_0(launcher: Launcher) -> None:
    process = launcher.start("""
        event("join")
        stop = []
        signal.signal(signal.SIGUSR2, lambda *_: stop.append(1))
        mark("up")
        while not stop:
            time.sleep(0.01)
        """)
    launcher.wait_for("up")
    process.send_signal(signal.SIGINT)
    assert launcher.end(process).code == 0


def test_failure_while_stopping_is_exit_code_1(launcher: Launcher) -> None:
    process = launcher.start(POLITE.replace("os.makedirs", "1 / 0; os.makedirs"))
    launcher.wait_for("up")
    process.send_signal(signal.SIGTERM)
    ended = launcher.end(process)
    assert ended.code == 1
    assert ended.block.splitlines()[1] == "  ZeroDivisionError: division by zero"
