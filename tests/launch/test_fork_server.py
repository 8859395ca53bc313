"""Workers that are forked from a warm process: to a script nothing is other than in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest
from agents import Launcher, alive, journal, until, warm_of
from launching import SCRIPTS, paceline
from warm import Process, environment

# ---- what a script sees, and what it leaves

WAYS = ["nothing", "exit", "exit at once", "exit with a word", "raise", "raise elsewhere", "interrupted", "killed"]
WAYS += ["crash"]


def traps(folder: Path, how: str, cold: bool) -> tuple[int, str, str]:
    """scripts/traps.py in a folder of its own: its exit code, and what it printed."""
    folder.mkdir()
    for name in ("traps.py", "beside_traps.py"):
        shutil.copy(SCRIPTS / name, folder)
    (folder / "out").mkdir()
    given = environment(GIVEN="to compiled code", OPENBLAS_NUM_THREADS="2", PYTHONUNBUFFERED="1", PYTHONHASHSEED="0")
    given["PACELINE_COLD_START"] = "1" if cold else "0"
    streams = {"stdin": subprocess.DEVNULL, "stdout": PIPE, "stderr": PIPE}
    command = [sys.executable, "traps.py", "out", how]
    process = Process(command, given, cwd=folder, start_new_session=cold, **streams)
    stdout, stderr = process.communicate(timeout=60)
    return process.returncode, stdout.replace(str(folder), "HERE"), stderr.replace(str(folder), "HERE")


def left(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (folder / "out").iterdir() if path.is_file()}


@pytest.mark.parametrize("how", WAYS)
def test_warm_worker_ends_as_a_cold_one_does(tmp_path, how):
    warm, cold = traps(tmp_path / "warm", how, False), traps(tmp_path / "cold", how, True)
    if how == "crash":  # the stack goes on to who runs the script, and names what it has loaded
        warm, cold = ((*ended[:2], ended[2].partition("Thread")[0]) for ended in (warm, cold))
    assert warm == cold
    assert left(tmp_path / "warm") == left(tmp_path / "cold")
    if how == "nothing":
        assert left(tmp_path / "warm") == {
            "never closed": "written", "by C": "written", "at exit": "yes", "finalized": "yes", "collected": "yes",
            "thread": "waited for",
        }  # fmt: skip


def test_warm_worker_sees_what_a_cold_one_sees(tmp_path):
    seen, drawn = [], []
    for name in ("warm", "cold", "another"):
        assert traps(tmp_path / name, "see", name == "cold")[0] == 0
        files = left(tmp_path / name)
        assert files["spawned"] == "__mp_main__ traps.py"
        seen.append(json.loads(files["seen.json"].replace(str(tmp_path / name), "HERE")))
        seen[-1]["environment"] = [pair for pair in seen[-1]["environment"] if pair[0] != "PACELINE_COLD_START"]
        drawn += json.loads(files["random.json"])
    assert seen[0] == seen[1] == seen[2]
    assert seen[0]["numpy's threads"][1] == 2
    assert len(set(drawn)) == len(drawn), "no two processes draw the same"


# ---- what cannot be kept, and is said


def warmed(script: Path, *arguments: str, **env: str) -> subprocess.Popen[str]:
    given = environment(PYTHONUNBUFFERED="1", **env)
    return Process([sys.executable, script, *arguments], given, cwd=script.parent, stdout=PIPE, stderr=PIPE)


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", pytest.param("ATEN_CPU_CAPABILITY", marks=pytest.mark.slow)])
def test_variable_set_before_import_torch_starts_the_worker_cold(tmp_path, name):
    """The worker begins anew in its place, and one line says why."""
    (tmp_path / "train.py").write_text(
        "import ctypes, os, sys\n"
        "print(os.getpid(), 'torch' in sys.modules)\n"
        f"os.environ[{name!r}] = 'default' if 'ATEN' in {name!r} else '2'\n"
        "import torch\n"
        "print(torch.get_num_threads(), torch.backends.cpu.get_cpu_capability())\n"
        "import paceline\n"
        "print(os.getppid(), paceline.join().size)\n"
    )
    done = paceline("run", "--run-dir", "out", "train.py", cwd=tmp_path)
    said = [line for line in done.stderr.splitlines() if "cold" in line]
    assert said == [f"workers start cold: the script sets {name} before it imports torch"]
    first, again, found, last = (tmp_path / "out/logs/worker-0.log").read_text().splitlines()
    assert (first.split()[0], again) == (again.split()[0], f"{first.split()[0]} False"), "the same process"
    threads, capability = found.split()
    assert threads == ("2" if name == "OMP_NUM_THREADS" else "1")
    assert (capability == "DEFAULT") == (name == "ATEN_CPU_CAPABILITY")
    assert last.split()[1] == "1"


def test_variable_that_torch_reads_in_each_use_keeps_the_worker_warm(tmp_path):
    """Lightning sets it when it is imported."""
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    (tmp_path / "train.py").write_text(
        f"import os, sys\nos.environ[{name!r}] = '1'\nprint('torch' in sys.modules, os.environ[{name!r}])\n"
        "import paceline\npaceline.join()\n"
    )
    done = paceline("run", "--run-dir", "out", "train.py", cwd=tmp_path)
    assert "cold" not in done.stderr
    assert (tmp_path / "out/logs/worker-0.log").read_text() == "True 1\n"


def test_variable_set_after_import_torch_changes_nothing(tmp_path):
    (tmp_path / "train.py").write_text(
        "import os\n"
        "print(os.getpid())\n"
        "os.environ['MY_OWN'] = os.environ['OMP_NUM_THREADS']\n"
        "os.environ['OMP_NUM_THREADS'] = os.environ['MY_OWN']\n"
        "if os.fork() == 0:\n"
        "    os.environ['OMP_NUM_THREADS'] = '5'\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "from torch import nn\n"
        "os.environ['OMP_NUM_THREADS'] = '3'\n"
        "import torch\n"
        "print(torch.get_num_threads())\n"
    )
    process = warmed(tmp_path / "train.py")
    stdout, _ = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (0, f"{process.pid}\n1\n")


def test_module_beside_the_script_hides_an_imported_one(tmp_path):
    """The script gets its own, as Python would give it."""
    (tmp_path / "sympy.py").write_text("print('one of my own')\n")
    (tmp_path / "torch").mkdir()  # no package: it hides nothing
    (tmp_path / "train.py").write_text("import sympy\n")
    done = paceline("run", "--run-dir", "out", "train.py", cwd=tmp_path)
    assert done.stdout == "one of my own\n"
    why = f"{tmp_path}/sympy.py has the name of a module that the warm process has imported"
    assert f"\nworkers start cold: {why}\n" in done.stderr
    assert [event["why"] for event in journal(tmp_path / "out", "decision") if event["what"] == "workers start cold"]


def test_warm_process_refuses_to_fork_with_threads_files_or_cuda(tmp_path):
    """Before each fork; each of these would be inherited by the worker, or be missing in it."""
    (tmp_path / "look.py").write_text(
        "import os, socket, sys, threading, torch\n"
        "from multiprocessing import resource_tracker\n"
        "from paceline.launch.forked_worker import _why_unforkable\n"
        "agent, ours = socket.socketpair()\n"
        "known = [ours.fileno()]\n"
        "print(_why_unforkable(agent, known))\n"
        "file = open(__file__)\n"
        "print(_why_unforkable(agent, known))\n"
        "file.close()\n"
        "over = threading.Event()\n"
        "thread = threading.Thread(target=over.wait)\n"
        "thread.start()\n"
        "print(_why_unforkable(agent, known))\n"
        "over.set(); thread.join()\n"
        "while len(os.listdir('/proc/self/task')) > 1: pass\n"  # the system has it a little longer than Python
        "torch.cuda._initialized = True\n"
        "print(_why_unforkable(agent, known))\n"
        "torch.cuda._initialized = False\n"
        "resource_tracker.ensure_running()\n"
        "print(_why_unforkable(agent, known))\n"
    )
    stdout, stderr = warmed(tmp_path / "look.py").communicate(timeout=60)
    assert stdout.splitlines() == [
        "None",
        f"the warm process has opened {tmp_path}/look.py",
        "the warm process has other threads (python)",
        "the warm process has initialised cuda",
        "the warm process has started the resource tracker of multiprocessing",
    ], stderr


@pytest.mark.slow
def test_warm_process_with_threads_starts_workers_cold(tmp_path):
    """Here one of the user's own, from a file that every interpreter runs at its start."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import sys, threading, time\n"
        "if '-c' in sys.orig_argv:\n"
        "    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    (tmp_path / "train.py").write_text("print('hello')\n")
    done = paceline("run", "--run-dir", "out", "train.py", cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"))
    assert done.stdout == "hello\n"
    assert "\nworkers start cold: the warm process has other threads (python)\n" in done.stderr
    assert [event["why"] for event in journal(tmp_path / "out", "decision") if event["what"] == "workers start cold"]


# ---- among processes

WAITS = """
    event("join")
    print(open("/proc/self/comm").read().strip(), os.getppid())
    mark(f"up-{os.environ.get('PACELINE_NEWCOMER', '')}")
    wait_for("go", 0)
"""


def test_warm_worker_has_the_command_line_and_name_of_its_script(launcher: Launcher) -> None:
    agent = launcher.start(WAITS, arguments=["--lr", "1"])
    launcher.wait_for("up-")
    found = subprocess.run(["pgrep", "-f", "train.py --lr 1"], capture_output=True, text=True).stdout.split()
    started = {event["worker"]: event["pid"] for event in journal(launcher.folder / "run", "worker")}
    assert {*map(str, started.values())} == set(found) - {str(agent.pid)}
    (launcher.folder / "run" / "go-0").touch()
    ended = launcher.end(agent)
    assert [ended.log(rank) for rank in (0, 1)] == [f"paceline {rank} {agent.pid}\n" for rank in (0, 1)]
    told = [(event["worker"], event["what"]) for event in journal(ended.folder, "worker")]
    assert sorted(told) == [(0, "ended"), (0, "started"), (1, "ended"), (1, "started")]


def test_journal_has_stop_continue_and_kill_of_a_worker(launcher: Launcher) -> None:
    agent = launcher.start(WAITS)
    launcher.wait_for("up-")

    def told() -> list[object]:
        events = journal(launcher.folder / "run", "worker")
        return [event["what"] for event in events if event["worker"] == 1]

    until(lambda: "started" in told())  # the worker may be up before the agent has written it
    pid = next(event["pid"] for event in journal(launcher.folder / "run", "worker") if event["worker"] == 1)
    for number, what in ((signal.SIGSTOP, "stopped"), (signal.SIGCONT, "continued")):
        os.kill(pid, number)
        until(lambda what=what: what in told())
    os.kill(pid, signal.SIGKILL)
    ended = launcher.end(agent)
    assert told() == ["started", "stopped", "continued", "ended"]
    (last,) = (event for event in journal(ended.folder, "worker") if event["what"] == "ended" and event["worker"] == 1)
    assert (last["pid"], last["life"], last["cause"]) == (pid, 0, "was killed by SIGKILL")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_kill_or_stop_of_the_warm_process_starts_another_one(launcher: Launcher, how: int) -> None:
    """And nothing happens to the workers that it made."""
    agent = launcher.start(WAITS)
    launcher.wait_for("up-")
    warm = warm_of(agent.pid)
    os.kill(warm, how)
    until(lambda: not Path(f"/proc/{warm}").exists())
    (launcher.folder / "run" / "go-0").touch()
    ended = launcher.end(agent)
    assert ended.code == 0
    assert "\nthe warm process ended (SIGKILL); a new one is started\n" in ended.stderr


def test_cold_start_option_debug_and_variable(tmp_path):
    (tmp_path / "train.py").write_text("import sys\nprint('torch' in sys.modules, sys.orig_argv[1:])\n")
    run = ("run", "--run-dir", "out")
    assert paceline(*run, "--cold-start", "train.py", cwd=tmp_path).stdout == "False ['train.py']\n"
    assert paceline(*run, "--debug", "0", "train.py", cwd=tmp_path).stdout == "False ['train.py']\n"
    assert paceline(*run, "train.py", cwd=tmp_path, PACELINE_COLD_START="1").stdout == "False ['train.py']\n"
    assert paceline(*run, "train.py", cwd=tmp_path).stdout == "True ['train.py']\n"


@pytest.mark.slow
def test_check_starts_one_warm_process_for_its_runs(tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'launch.forked_worker' in ' '.join(sys.orig_argv):\n"
        f"    open({str(tmp_path / 'started')!r}, 'a').write('.')\n"
    )
    (tmp_path / "train.py").write_text("from basics import *\nlist(make().steps(data, count=1))\n")
    path = f"{tmp_path / 'site'}{os.pathsep}{SCRIPTS}"
    done = paceline("check", "train.py", "--steps", "1", cwd=tmp_path, PYTHONPATH=path)
    assert done.stdout.endswith("verdict: the same training on 2 workers as on one\n")
    assert (tmp_path / "started").read_text() == "."


def test_agent_reaps_orphans_of_workers(launcher: Launcher) -> None:
    """The agent adopts them, and no number of ended ones piles up."""
    agent = launcher.start("""
        event("join")
        for _ in range(5):
            if os.fork() == 0:
                if os.fork() == 0:
                    time.sleep(0.1)
                os._exit(0)
            os.wait()
        mark("up")
        wait_for("go", 0)
    """)
    launcher.wait_for("up")

    def ended() -> int:
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        return sum(not alive(int(pid)) for pid in children)

    until(lambda: ended() == 0)
    (launcher.folder / "run" / "go-0").touch()
    assert launcher.end(agent).code == 0
