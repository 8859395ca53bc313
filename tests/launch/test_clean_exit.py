"""Clean exits, and what they leave behind: nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from agents import Launcher, alive, family, journal, until
from launching import SCRIPTS, paceline, train_basics
from warm import Process, environment

from paceline.team.exit_reports import describe_exception


@pytest.mark.parametrize("times", [1, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.timeout(900)
def test_exit_code_0_leaves_no_process_and_no_shared_memory(times, tmp_path):
    """Two workers with a loader process each, a checkpoint and an evaluation: exit code 0, nothing left, every time."""
    body = (
        "t = make()\n"
        "list(t.steps(data, epochs=1, loader={'num_workers': 1}))\n"
        "t.evaluate(data, lambda o, b: {'n': (len(o), 1)})\n"
    )
    shared = set(Path("/dev/shm").iterdir())
    for number in range(times):
        done = train_basics(tmp_path, body, 2, "--run-dir", f"out-{number}")
        assert "train.py finished at step 4" in done.stderr
        left = [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(tmp_path) and p.pid != os.getpid()]
        assert left == []
        new = set(Path("/dev/shm").iterdir()) - shared
        # No process of this run is alive to remove one of its own; what runs beside it removes its own.
        until(lambda new=new: not any(path.exists() for path in new))


def test_gloo_threads_do_not_enter_the_interpreter(tmp_path):
    """They would at a fork or at the interpreter's end, one time in many: a child that hangs, an exit that aborts.

    A thread that enters gets a state from CPython. Where Python drops each collective at once, 300 rounds of 7 make
    over 500; a few may remain, when a thread was kept from its processor for long.
    """
    paceline("run", "--workers", "2", SCRIPTS / "foreign.py", "states", cwd=tmp_path)
    for rank in range(2):
        assert int((tmp_path / f"states-{rank}").read_text()) < 50


LATE = """
import sys, threading, time, types
from datetime import timedelta
import torch.distributed as dist
import paceline
paceline.join()
store = dist.TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=2), wait_for_workers=False)
began = threading.Event()
coming = threading.Thread(target=lambda: (began.set(), store.get("what nobody sets")), daemon=True)
coming.start()
class Last:
    def __del__(self, sleep=time.sleep):
        sleep(4)
sys.modules["last"] = types.ModuleType("last")  # the dying interpreter empties it; ours is held by the thread
sys.modules["last"].one = Last()
began.wait()
time.sleep(0.5)  # it is in compiled code by now
assert coming.is_alive()
sys.exit(3)
"""


@pytest.mark.parametrize("start", ["warm", pytest.param("cold", marks=pytest.mark.slow)])
def test_thread_that_returns_into_a_dying_interpreter_does_not_abort_it(start, tmp_path):
    """The store's client comes out of its wait while the interpreter ends, which waits for `last`."""
    (tmp_path / "train.py").write_text(LATE)
    given = environment(PACELINE_COLD_START=str(int(start == "cold")))
    process = Process([sys.executable, "train.py"], given, cwd=tmp_path, stderr=subprocess.PIPE)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 3, stderr
    assert "timed out after 2000ms" in stderr, "it did not come back in time"


FORKS = """
import gc, os, sys, time
from datetime import timedelta
import torch.distributed as dist
from paceline.comm.hierarchical import Gloo
gc.disable()
device = dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
store = dist.HashStore()
store.set_timeout(timedelta(seconds=10))
holder = {"group": Gloo(store, 0, 1, [device])}
holder["itself"] = holder
del holder
time.sleep(0.5)  # its threads wait for work by now
child = os.fork()
if not child:
    gc.enable()
    gc.collect()
    os._exit(0)
end = time.monotonic() + 20
while time.monotonic() < end and os.waitpid(child, os.WNOHANG) == (0, 0):
    time.sleep(0.05)
if time.monotonic() >= end:
    os.kill(child, 9)
    sys.exit("the child hangs")
"""


def test_forked_child_does_not_collect_its_parents_process_groups(tmp_path):
    """The group's destructor waits for threads that there are not in a child: a loader that never gives a row."""
    process = Process([sys.executable, "-c", FORKS], stderr=subprocess.PIPE)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr


# ---- nothing stays behind under the agent

FAMILY = """
import subprocess
event("join")
child = subprocess.Popen(["sleep", "600"])
moved = subprocess.Popen(["sleep", "600"], process_group=0)
code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(600)"
stubborn = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
stubborn.stdout.readline()
with open(f"{RUN}/pids-{RANK}.new", "w") as file:
    print(os.getpid(), child.pid, moved.pid, stubborn.pid, file=file)
os.rename(f"{RUN}/pids-{RANK}.new", f"{RUN}/pids-{RANK}")
"""


@pytest.mark.parametrize(
    "end", ["", pytest.param("sys.exit(3)", marks=pytest.mark.slow), "os.kill(os.getpid(), signal.SIGKILL)"]
)
def test_agent_ends_all_processes_that_workers_started(launcher: Launcher, end: str) -> None:
    ended = launcher.run(FAMILY + end)
    pids = family(launcher)
    assert len(pids) == 8
    assert not [pid for pid in pids if alive(pid)]
    if not end:
        left = [
            line
            for line in ended.stderr.splitlines()
            if line.startswith("ended processes that the workers left running: ")
        ]
        assert len(left) == 1
        assert left[0].count("sleep (") == 4


def test_kill_of_the_agent_ends_workers_and_loader_children(launcher: Launcher) -> None:
    """A loader child asks for the signal itself, as the trainer's worker_init does."""
    process = launcher.start("""
        import ctypes, subprocess
        event("join")
        def loader():
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        child = os.fork()
        if child == 0:
            loader()
            mark("loader")
            time.sleep(600)
        wait_for("loader", RANK)
        with open(f"{RUN}/pids-{RANK}", "w") as file:
            print(os.getpid(), child, file=file)
        mark("up")
        while True:
            time.sleep(1)
        """)
    launcher.wait_for("up")
    pids = family(launcher)
    assert len(pids) == 4
    assert all(alive(pid) for pid in pids)
    process.kill()
    process.wait()
    until(lambda: not any(alive(pid) for pid in pids))
    assert launcher.run('event("join")').code == 0  # the folder is free at once


def test_kill_of_a_worker_leaves_no_shared_memory(launcher: Launcher) -> None:
    ended = launcher.run("""
        from multiprocessing.shared_memory import SharedMemory
        event("join")
        memory = SharedMemory(create=True, size=4096)
        with open(f"{RUN}/name-{RANK}", "w") as file:
            file.write(memory.name)
        meet("up")
        if RANK == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
        """)
    assert ended.code == 137
    names = [(ended.folder / f"name-{rank}").read_text() for rank in range(2)]
    assert not [name for name in names if Path("/dev/shm", name.lstrip("/")).exists()]


LAUNCHES = """
import os, signal
from paceline.launch.local import launch
from paceline.launch.options import LaunchOptions
handler = signal.getsignal(signal.SIGINT)
counts = []
for number in range(3):
    assert launch(LaunchOptions("train.py", workers=2, run_dir=f"run{number}", cold_start=number > 0)) == 0
    counts.append(len(os.listdir("/proc/self/fd")))
assert counts[0] == counts[1] == counts[2], counts
assert signal.getsignal(signal.SIGINT) is handler
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print("no child")
"""


@pytest.mark.parametrize("torch", ["broken", pytest.param("real", marks=pytest.mark.slow)])
def test_agent_leaves_no_open_file_child_or_signal_handler(launcher: Launcher, torch: str) -> None:
    """Several launches in one process. A broken torch ends the warm process of the first one at its start: its workers
    start cold, and the reason is printed.
    """
    (launcher.folder / "train.py").write_text(
        "import os\nos.write(int(os.environ['PACELINE_EVENTS_FD']), b'{\"event\": \"join\"}\\n')\n"
    )
    broken = launcher.folder / "site" / "torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('no torch today')\n")
    env = environment(PYTHONPATH=str(broken.parent) if torch == "broken" else None, PACELINE_COLD_START=None)
    pipe = subprocess.PIPE
    process = Process([sys.executable, "-c", LAUNCHES], env, cwd=launcher.folder, stdout=pipe, stderr=pipe)
    stdout, stderr = process.communicate(timeout=120)
    assert (process.returncode, stdout) == (0, "no child\n"), stderr
    why = "workers start cold: the warm process ended (exit code 1): ImportError: no torch today\n"
    assert stderr.count(why) == (torch == "broken")


def test_daemon_that_keeps_the_pipes_open_does_not_delay_the_end(launcher: Launcher) -> None:
    """A daemon of the user's own, in a session of its own, is left alone."""
    ended = launcher.run("""
        import subprocess
        event("join")
        daemon = subprocess.Popen(["sleep", "600"], start_new_session=True)
        with open(f"{RUN}/pids-{RANK}", "w") as file:
            file.write(str(daemon.pid))
        print("done")
        """)
    pids = family(launcher)
    lives = [alive(pid) for pid in pids]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert (ended.code, ended.stdout, lives) == (0, "done\n", [True, True])


@pytest.mark.parametrize(
    "closed", ["<&- >&- 2>&-", *(pytest.param(one, marks=pytest.mark.slow) for one in ("<&-", ">&- 2>&-"))]
)
def test_run_with_closed_standard_streams(closed: str, tmp_path: Path) -> None:
    """As some daemons start a command: descriptors 0 to 2 are free, and the next thing that is opened gets them."""
    body = "t = make()\nlist(t.steps(data, epochs=1))\nt.export('out.safetensors')\n"
    (tmp_path / "train.py").write_text(f"from basics import *\n{body}")
    run = f'exec "{sys.executable}" -m paceline run --workers 2 --run-dir out train.py {closed}'
    with Process(["/bin/bash", "-c", run], environment(), cwd=tmp_path) as process:
        assert process.wait(120) == 0
    assert journal(tmp_path / "out", "finished")
    assert (tmp_path / "out.safetensors").exists()


def test_exception_whose_str_raises_is_described() -> None:
    class OddError(Exception):
        def __str__(self) -> str:
            return str(self.args[0]["message"])

    description = describe_exception(OddError({}))
    assert (description["kind"], description["text"]) == (
        "OddError",
        "its message cannot be read: str() raised KeyError",
    )


OPEN_FILE = """
import paceline
log = open(f"log-{paceline.join().rank}", "a")  # never closed
log.write("written\\n")
list(make().steps(data, epochs=1))
log.write("last line\\n")
"""


def test_kill_of_a_worker_leaves_the_open_files_of_all_complete(tmp_path: Path) -> None:
    """The others have left a generation, and end without the interpreter's clean-up; the exit code is 0."""
    done = train_basics(tmp_path, OPEN_FILE, 3, chaos="kill:1@2.backward")
    assert "worker 1 was killed by SIGKILL" in done.stderr
    for rank in (0, 2):
        assert (tmp_path / f"log-{rank}").read_text().splitlines()[-1] == "last line"
