"""How runs under the agent end: failures and stops. With real processes."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from agents import AGAIN, POLITE, Launcher, journal, until
from conftest import MemoryGroup, enter_group

# ---- failures


def test_an_exception_in_one_worker(launcher: Launcher) -> None:
    ended = launcher.run("""
        def loss(batch):
            raise ValueError(f"no labels in {batch}")
        event("join")
        print("working")
        meet("up")
        if RANK == 1:
            event("failed", kind="ValueError", step=812)
            loss("batch 7")
        time.sleep(600)
        """)
    number = (launcher.folder / "train.py").read_text().splitlines().index(
        '    raise ValueError(f"no labels in {batch}")'
    ) + 1
    path = launcher.folder / "train.py"
    assert ended.code == 1
    assert ended.block == (
        "worker 1 failed (host H, pid P, after step 812)\n"
        "  ValueError: no labels in batch 7\n"
        f'  at train.py:{number} in loss: raise ValueError(f"no labels in {{batch}}")\n'
        "the end of run/logs/worker-1.log:\n"
        "  | working\n"
        "  | Traceback (most recent call last):\n"
        f'  |   File "{path}", line {number + 6}, in <module>\n'
        '  |     loss("batch 7")\n'
        f'  |   File "{path}", line {number}, in loss\n'
        '  |     raise ValueError(f"no labels in {batch}")\n'
        "  | ValueError: no labels in batch 7\n"
        "the others were stopped by us: worker 0\n"
        "logs: run/logs/\n"
        f"next: fix the cause; then run `{AGAIN}`: it starts anew: no checkpoint was written"
    )
    (event,) = journal(ended.folder, "failed")
    assert (event["worker"], event["cause"], event["code"]) == (1, "ValueError: no labels in batch 7", 1)
    assert event["host"] == os.uname().nodename
    assert str(event["text"]).endswith("no checkpoint was written")


def test_the_users_frame_is_named_and_the_traceback_shown_once(launcher: Launcher) -> None:
    ended = launcher.run(
        """
        event("join"); event("step", step=3)
        os.makedirs(RUN + "/checkpoints/step-000000000002")
        open(RUN + "/checkpoints/step-000000000002/manifest.json", "w").close()
        os.makedirs(RUN + "/checkpoints/step-000000000003")  # it was not finished
        import json.decoder
        json.loads("{")  # the library raises
        """,
        workers=1,
        plan="micro=4",
        max_steps=9,
        arguments=["--lr", "a b"],
    )
    lines = (launcher.folder / "train.py").read_text().splitlines()
    number = next(at for at, line in enumerate(lines, 1) if "the library raises" in line)
    block = ended.block.splitlines()
    assert block[0] == "worker 0 failed (host H, pid P, after step 3)"
    assert block[1].startswith("  json.decoder.JSONDecodeError: Expecting property name")
    assert block[2] == f'  at train.py:{number} in <module>: json.loads("{{")  # the library raises'
    assert block[-1] == (
        "next: fix the cause; then run `paceline run --workers 1 --run-dir run --plan micro=4 --steps 9 train.py "
        "--lr 'a b'`: it continues from step 2"
    )
    assert ended.stderr.count("Traceback (most recent call last)") == 1  # in the block


@pytest.mark.parametrize(
    ("status", "code", "what", "cure"),
    [
        ("sys.exit(3)", 3, "ended with exit code 3", "see its log"),
        ("sys.exit('no data')", 1, "ended with exit code 1", "see its log"),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            137,
            "killed by SIGKILL: somebody, or a job manager, ended it",
            "find out who sent the signal",
        ),
        (
            "os.kill(os.getpid(), signal.SIGTERM)",
            143,
            "ended by SIGTERM: somebody, or a job manager, asked it to end",
            "find out who sent the signal",
        ),
        ("os.kill(os.getpid(), signal.SIGUSR1)", 138, "ended by SIGUSR1", "find out who sent the signal"),
        (
            "raise OSError(24, os.strerror(24))",
            1,
            "OSError: [Errno 24] Too many open files",
            "close files that are not used any more, or raise the limit on open files before, as by `ulimit -n 4096`",
        ),
        ("os.kill(os.getpid(), 40)", 168, "ended by signal 40", "find out who sent the signal"),
    ],
)
def test_other_ends(launcher: Launcher, status: str, code: int, what: str, cure: str) -> None:
    ended = launcher.run(f"""
        event("join")
        meet("up")
        if RANK == 0:
            {status}
        time.sleep(600)
        """)
    assert ended.code == code
    block = ended.block.splitlines()
    assert block[:2] == ["worker 0 failed (host H, pid P)", f"  {what}"]
    assert block[-3] == "the others were stopped by us: worker 1"
    assert block[-1].startswith(f"next: {cure}; then run `{AGAIN}`")


@pytest.mark.parametrize(
    ("asks", "what"),
    [("input('name? ')", "EOFError: EOF when reading a line"), ("breakpoint()", "bdb.BdbQuit")],
)
def test_a_script_that_asks_is_told_that_nobody_answers(launcher: Launcher, asks: str, what: str) -> None:
    block = launcher.run(f'event("join")\nif RANK == 1: {asks}\nwait_for("never", 9)').block.splitlines()
    assert block[:2] == ["worker 1 failed (host H, pid P)", f"  {what}"]
    assert block[-1].startswith(
        "next: workers have no terminal to ask at: give an argument instead, or this worker the terminal: --debug 1; "
        "then run `paceline run "
    )


@pytest.mark.parametrize(
    ("crash", "code", "what"),
    [
        (
            "ctypes.string_at(8)",
            139,
            "crashed with SIGSEGV: compiled code touched memory that is not its own",
        ),
        ("os.abort()", 134, "aborted with SIGABRT: compiled code gave up"),
        (
            "os.kill(os.getpid(), signal.SIGBUS)",
            135,
            "crashed with SIGBUS: shared memory or a mapped file ended early; is /dev/shm full?",
        ),
    ],
)
def test_a_crash_in_compiled_code(launcher: Launcher, crash: str, code: int, what: str) -> None:
    ended = launcher.run(f"""
        import ctypes
        def work():
            {crash}  # here
        event("join")
        work() if RANK == 1 else time.sleep(600)
        """)
    lines = (launcher.folder / "train.py").read_text().splitlines()
    number = next(at for at, line in enumerate(lines, 1) if "# here" in line)
    assert ended.code == code
    assert ended.block.splitlines()[1:3] == [f"  {what}", f"  at train.py:{number} in work: {crash}  # here"]


def test_a_script_that_does_not_compile(launcher: Launcher) -> None:
    ended = launcher.run("event('join'\n")
    lines = (launcher.folder / "train.py").read_text().splitlines()
    block = ended.block.splitlines()
    assert ended.code == 1
    assert block[1:3] == ["  SyntaxError: '(' was never closed", f"  at train.py:{len(lines)}: event('join'"]
    assert "worker 1 failed in the same way" in block


def test_a_plan_error_is_usage(launcher: Launcher) -> None:
    ended = launcher.run("""
        event("join")
        event("failed", kind="PlanError", step=0)
        class PlanError(Exception): pass
        raise PlanError("unknown word; take another")
        """)
    assert ended.code == 2
    assert ended.block.splitlines()[1] == "  PlanError: unknown word; take another"


def test_lost_peers_are_a_consequence(launcher: Launcher) -> None:
    ended = launcher.run(
        """
        class PeerLostError(Exception): pass
        event("join")
        meet("up")
        if RANK == 3:
            time.sleep(600)
        if RANK == 1:
            wait_for("lost", 0, 2)
            os.kill(os.getpid(), signal.SIGKILL)
        event("failed", kind="PeerLostError", step=11)
        mark("lost")
        raise PeerLostError("the connection to worker 1 broke")
        """,
        workers=4,
    )
    assert ended.code == 137
    block = ended.block.splitlines()
    assert block == [
        "worker 1 failed (host H, pid P)",
        "  killed by SIGKILL: somebody, or a job manager, ended it",
        "workers 0, 2 ended because of it",
        "the others were stopped by us: worker 3",
        "logs: run/logs/",
        "next: find out who sent the signal; then run `paceline run --workers 4 --run-dir run train.py`: it "
        "starts anew: no checkpoint was written",
    ]
    assert "PeerLostError" not in ended.stderr
    assert "PeerLostError: the connection to worker 1 broke" in ended.log(0)


def test_lost_peers_without_a_cause(launcher: Launcher) -> None:
    ended = launcher.run("""
        class PeerLostError(Exception): pass
        event("join")
        event("failed", kind="PeerLostError", step=2)
        raise PeerLostError(f"the connection broke")
        """)
    assert ended.code == 1
    assert ended.block.splitlines()[1] == "  PeerLostError: the connection broke"
    assert "worker 1 failed in the same way" in ended.block


def test_a_mismatch_names_both_and_own_failures_come_first(launcher: Launcher) -> None:
    script = """
        class CollectiveMismatchError(Exception): pass
        event("join")
        meet("up")
        if RANK == OWN:
            wait_for("failed", 0)
            raise KeyError("label")
        if RANK:
            wait_for("failed", 0)
        event("failed", kind="CollectiveMismatchError", step=2)
        mark("failed")
        raise CollectiveMismatchError(f"worker {RANK} is in save()")
        """
    ended = launcher.run("OWN = 9\n" + script.replace("\n        ", "\n"))
    assert ended.block.splitlines()[1] == "  CollectiveMismatchError: worker 0 is in save()"
    assert "worker 1 failed too: CollectiveMismatchError: worker 1 is in save() at train.py" in ended.block.replace(
        "__main__.", ""
    )
    ended = launcher.run("OWN = 1\n" + script.replace("\n        ", "\n"), run_dir="other")
    assert ended.block.splitlines()[0].startswith("worker 1 failed")
    assert ended.block.splitlines()[1] == "  KeyError: 'label'"
    assert "worker 0 ended because of it" in ended.block


def test_two_that_fail_by_themselves(launcher: Launcher) -> None:
    ended = launcher.run(
        """
        event("join")
        meet("up")
        if RANK == 2:
            event("failed", kind="KeyError", step=1)
            mark("first")
            wait_for("second", 0)
            other = int(open(os.path.join(RUN, "second-0")).read())
            while open(f"/proc/{other}/stat").read().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.01)
            raise KeyError("label")
        wait_for("first", 2)
        if RANK == 0:
            with open(os.path.join(RUN, "second.new"), "w") as file:
                file.write(str(os.getpid()))
            os.rename(file.name, os.path.join(RUN, "second-0"))
            raise OSError("disk")
        time.sleep(600)
        """,
        workers=3,
    )
    lines = (launcher.folder / "train.py").read_text().splitlines()
    number = next(at for at, line in enumerate(lines, 1) if "disk" in line)
    block = ended.block.splitlines()
    assert block[:2] == ["worker 2 failed (host H, pid P, after step 1)", "  KeyError: 'label'"]
    assert block[-4:-2] == [
        f'worker 0 failed too: OSError: disk at train.py:{number} in <module>: raise OSError("disk")',
        "the others were stopped by us: worker 1",
    ]


def test_one_that_fails_and_does_not_end(launcher: Launcher) -> None:
    """A thread that is not a daemon keeps the interpreter alive after the exception."""
    ended = launcher.run(
        """
        import threading
        event("join")
        if RANK == 1:
            threading.Thread(target=time.sleep, args=(600,)).start()
            event("failed", kind="ValueError", step=4)
            raise ValueError("stuck")
        time.sleep(600)
        """,
        seconds={"EXIT": 0.5},
    )
    assert ended.code == 1
    assert ended.block.splitlines()[:2] == [
        "worker 1 failed (host H, pid P, after step 4)",
        "  ValueError: stuck",
    ]


def test_one_that_ends_after_its_word_that_it_fails(launcher: Launcher) -> None:
    """Its end is waited for for long, and no longer than to its end."""
    ended = launcher.run(
        """
        event("join")
        if RANK == 1:
            event("failed", kind="ValueError", step=4)
            time.sleep(1)  # its failure has ended the run by now
            raise ValueError("late")
        time.sleep(600)
        """,
        seconds={"EXIT": 3600.0},
    )
    assert ended.code == 1
    assert ended.block.splitlines()[1] == "  ValueError: late"


def test_a_loader_childs_exception_names_the_users_line(launcher: Launcher) -> None:
    """torch's DataLoader raises in the worker with the child's traceback in the message."""
    ended = launcher.run(
        """
        import traceback
        event("join")
        def item(index):
            return [][index]
        try:
            item(3)
        except IndexError:
            text = traceback.format_exc()
        raise IndexError(f"Caught IndexError in DataLoader worker process 0.\\nOriginal {text}")
        """,
        workers=1,
    )
    block = ended.block.splitlines()
    assert block[1] == "  IndexError: list index out of range"
    assert block[2].endswith("in item: return [][index]")


@pytest.mark.root
def test_out_of_memory(launcher: Launcher, memory_group: MemoryGroup) -> None:
    group = memory_group(200 << 20)
    ended = launcher.run(
        """
        event("join")
        meet("up")
        if RANK == 1:
            hoard = []
            while True:
                hoard.append(bytearray(os.urandom(1 << 20)))
        time.sleep(600)
        """,
        preexec=enter_group(group),
    )
    counter = next(file for file in (group / "memory.oom_control", group / "memory.events") if file.exists())
    assert re.search(r"^oom_kill 1$", counter.read_text(), re.MULTILINE)
    assert ended.code == 137
    assert ended.block.splitlines() == [
        "worker 1 failed (host H, pid P)",
        "  killed by the kernel's out-of-memory killer (SIGKILL)",
        "the others were stopped by us: worker 0",
        "logs: run/logs/",
        "next: give it less to hold: fewer workers on this host, fewer loader workers, or a smaller micro= in the "
        f"plan, which changes the mathematics; then run `{AGAIN}`: it starts anew: no checkpoint was written",
    ]


# ---- stopping

STOPPING = "stopping after this step and saving; press Ctrl-C again to stop at once\n"
UNSAVED = "stopping; press Ctrl-C again to stop at once\n"
START = "2 workers, run folder run\n"


@pytest.mark.parametrize(("number", "code"), [("SIGINT", 130), ("SIGTERM", 75), ("SIGHUP", 75)])
def test_a_polite_stop(launcher: Launcher, number: str, code: int) -> None:
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
def test_a_second_signal_stops_at_once(launcher: Launcher, number: str, code: int) -> None:
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


def test_a_second_sigterm_that_comes_with_the_first_is_the_same_one(launcher: Launcher) -> None:
    """They are sent to a group and to its members."""
    process = launcher.start(DEAF, seconds={"TWICE": 3600.0})
    launcher.wait_for("up")
    process.send_signal(signal.SIGTERM)
    launcher.wait_for("heard")
    process.send_signal(signal.SIGTERM)
    until(lambda: not pending(process.pid, signal.SIGTERM))
    process.send_signal(signal.SIGINT)
    assert launcher.end(process).code == 130, "it would be 75, had the second one counted"


def test_a_stop_before_a_worker_is_ready(launcher: Launcher) -> None:
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


def test_a_stop_that_the_workers_decided(launcher: Launcher) -> None:
    """A notice at one worker makes all stop; the agent was not asked."""
    ended = launcher.run('event("join"); event("stopped", step=7, checkpoint=None); sys.exit(75)')
    assert ended.code == 75
    assert ended.stderr == f"{START}stopped; no checkpoint was written\nstart again with: {AGAIN}\n"


def test_the_end_that_was_asked_for(launcher: Launcher) -> None:
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


def test_a_stop_that_comes_as_the_run_finishes(launcher: Launcher) -> None:
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


def test_a_failure_while_stopping_is_a_failure(launcher: Launcher) -> None:
    process = launcher.start(POLITE.replace("os.makedirs", "1 / 0; os.makedirs"))
    launcher.wait_for("up")
    process.send_signal(signal.SIGTERM)
    ended = launcher.end(process)
    assert ended.code == 1
    assert ended.block.splitlines()[1] == "  ZeroDivisionError: division by zero"
