"""How runs under the agent fail. With real processes."""

from __future__ import annotations

import os
import re

import pytest
from agents import AGAIN, Launcher, journal
from conftest import MemoryGroup, enter_group


def test_exception_in_one_worker_ends_the_run_with_its_traceback(launcher: Launcher) -> None:
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
        "Paceline stopped the others: worker 0\n"
        "logs: run/logs/\n"
        f"next: fix the cause; then run `{AGAIN}`: it starts over, as no checkpoint was written"
    )
    (event,) = journal(ended.folder, "failed")
    assert (event["worker"], event["cause"], event["code"]) == (1, "ValueError: no labels in batch 7", 1)
    assert event["host"] == os.uname().nodename
    assert str(event["text"]).endswith("no checkpoint was written")


def test_failure_names_the_users_line_and_shows_the_traceback_once(launcher: Launcher) -> None:
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
        ("sys.exit(3)", 3, "ended with exit code 3", "see the log of the worker"),
        ("sys.exit('no data')", 1, "ended with exit code 1", "see the log of the worker"),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            137,
            "killed by SIGKILL: a user or a job manager killed it",
            "find out who sent the signal",
        ),
        (
            "os.kill(os.getpid(), signal.SIGTERM)",
            143,
            "ended by SIGTERM: a user or a job manager asked it to end",
            "find out who sent the signal",
        ),
        ("os.kill(os.getpid(), signal.SIGUSR1)", 138, "ended by SIGUSR1", "find out who sent the signal"),
        (
            "raise OSError(24, os.strerror(24))",
            1,
            "OSError: [Errno 24] Too many open files",
            "close unused files, or raise the limit on open files first, for example with `ulimit -n 4096`",
        ),
        ("os.kill(os.getpid(), 40)", 168, "ended by signal 40", "find out who sent the signal"),
    ],
)
def test_exit_code_and_cause_of_a_failed_worker(
    launcher: Launcher, status: str, code: int, what: str, cure: str
) -> None:
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
    assert block[-3] == "Paceline stopped the others: worker 1"
    assert block[-1].startswith(f"next: {cure}; then run `{AGAIN}`")


@pytest.mark.parametrize(
    ("asks", "what"),
    [("input('name? ')", "EOFError: EOF when reading a line"), ("breakpoint()", "bdb.BdbQuit")],
)
def test_input_and_breakpoint_in_a_worker_have_a_hint(launcher: Launcher, asks: str, what: str) -> None:
    block = launcher.run(f'event("join")\nif RANK == 1: {asks}\nwait_for("never", 9)').block.splitlines()
    assert block[:2] == ["worker 1 failed (host H, pid P)", f"  {what}"]
    assert block[-1].startswith(
        "next: workers have no terminal for input: pass an argument instead, or give this worker one with --debug 1; "
        "then run `paceline run "
    )


@pytest.mark.parametrize(
    ("crash", "code", "what"),
    [
        (
            "ctypes.string_at(8)",
            139,
            "crashed with SIGSEGV: compiled code accessed invalid memory",
        ),
        ("os.abort()", 134, "aborted with SIGABRT: compiled code called abort()"),
        (
            "os.kill(os.getpid(), signal.SIGBUS)",
            135,
            "crashed with SIGBUS: shared memory or a memory-mapped file is too short; is /dev/shm full?",
        ),
    ],
)
def test_crash_by_signal_names_the_line(launcher: Launcher, crash: str, code: int, what: str) -> None:
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


def test_syntax_error_names_the_line(launcher: Launcher) -> None:
    ended = launcher.run("event('join'\n")
    lines = (launcher.folder / "train.py").read_text().splitlines()
    block = ended.block.splitlines()
    assert ended.code == 1
    assert block[1:3] == ["  SyntaxError: '(' was never closed", f"  at train.py:{len(lines)}: event('join'"]
    assert "worker 1 failed in the same way" in block


def test_plan_error_is_exit_code_2(launcher: Launcher) -> None:
    ended = launcher.run("""
        event("join")
        event("failed", kind="PlanError", step=0)
        class PlanError(Exception): pass
        raise PlanError("unknown word; take another")
        """)
    assert ended.code == 2
    assert ended.block.splitlines()[1] == "  PlanError: unknown word; take another"


def test_kill_of_a_worker_is_the_cause_of_lost_peers(launcher: Launcher) -> None:
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
        "  killed by SIGKILL: a user or a job manager killed it",
        "workers 0, 2 ended because of this failure",
        "Paceline stopped the others: worker 3",
        "logs: run/logs/",
        "next: find out who sent the signal; then run `paceline run --workers 4 --run-dir run train.py`: it "
        "starts over, as no checkpoint was written",
    ]
    assert "PeerLostError" not in ended.stderr
    assert "PeerLostError: the connection to worker 1 broke" in ended.log(0)


def test_lost_peers_without_a_cause_are_the_failure(launcher: Launcher) -> None:
    ended = launcher.run("""
        class PeerLostError(Exception): pass
        event("join")
        event("failed", kind="PeerLostError", step=2)
        raise PeerLostError(f"the connection broke")
        """)
    assert ended.code == 1
    assert ended.block.splitlines()[1] == "  PeerLostError: the connection broke"
    assert "worker 1 failed in the same way" in ended.block


def test_mismatch_names_both_workers_and_own_exceptions_come_first(launcher: Launcher) -> None:
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
    assert "worker 1 also failed: CollectiveMismatchError: worker 1 is in save() at train.py" in ended.block.replace(
        "__main__.", ""
    )
    ended = launcher.run("OWN = 1\n" + script.replace("\n        ", "\n"), run_dir="other")
    assert ended.block.splitlines()[0].startswith("worker 1 failed")
    assert ended.block.splitlines()[1] == "  KeyError: 'label'"
    assert "worker 0 ended because of this failure" in ended.block


def test_two_failures_are_shown_in_their_order(launcher: Launcher) -> None:
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
        f'worker 0 also failed: OSError: disk at train.py:{number} in <module>: raise OSError("disk")',
        "Paceline stopped the others: worker 1",
    ]


def test_failed_worker_that_does_not_end_is_ended(launcher: Launcher) -> None:
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


def test_failed_worker_is_awaited(launcher: Launcher) -> None:
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


def test_exception_in_a_loader_child_names_the_users_line(launcher: Launcher) -> None:
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
def test_out_of_memory_kill_is_named(launcher: Launcher, memory_group: MemoryGroup) -> None:
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
        "Paceline stopped the others: worker 0",
        "logs: run/logs/",
        "next: reduce the memory that is used: fewer workers on this host, fewer loader workers, or a smaller micro= "
        f"in the plan, which changes the mathematics; then run `{AGAIN}`: it starts over, as no checkpoint was written",
    ]
