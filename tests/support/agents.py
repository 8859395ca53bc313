"""Starts the agent as its own process, as a user would, on small scripts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from paths import ROOT
from warm import Process, environment

SOURCE = ROOT / "src"
T = TypeVar("T")

# What stands for the command line: the options as JSON, and seconds of the agent's that a test says otherwise.
MAIN = """
import json, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from paceline.errors import PacelineError
from paceline.launch import agent
from paceline.launch.local import launch
from paceline.launch.options import LaunchOptions
assert "torch" not in sys.modules
given = json.loads(sys.argv[1])
vars(agent).update(given.pop("seconds", {}))
try:
    code = launch(LaunchOptions(**given))
except PacelineError as error:
    print(error, file=sys.stderr)
    code = 2
assert "torch" not in sys.modules
sys.exit(code)
"""

# What stands for a worker's part: it writes events itself, so that no test of the agent waits for torch.
WORKER = """
import json, os, signal, sys, time, warnings
RANK = int(os.environ["PACELINE_RANK"])
SIZE = int(os.environ["PACELINE_WORLD_SIZE"])
RUN = os.environ["PACELINE_RUN_DIR"]
def event(kind, /, **fields):
    line = json.dumps({"event": kind, **fields}) + "\\n"
    os.write(int(os.environ["PACELINE_EVENTS_FD"]), line.encode())
def mark(name):
    open(os.path.join(RUN, f"{name}-{RANK}"), "w").close()
def wait_for(name, *workers):
    while not all(os.path.exists(os.path.join(RUN, f"{name}-{rank}")) for rank in workers or range(SIZE)):
        time.sleep(0.01)
def meet(name):
    mark(name)
    wait_for(name)
"""

# A worker that is asked to stop says that it has written a checkpoint, and ends with exit code 75.
POLITE = """
event("join")
event("phase")
stop = []
signal.signal(signal.SIGUSR2, lambda *_: stop.append(1))
mark("up")
print("up", flush=True)
while not stop:
    time.sleep(0.01)
os.makedirs(RUN + "/checkpoints/step-000000000120", exist_ok=True)
open(RUN + "/checkpoints/step-000000000120/manifest.json", "w").close()
event("stopped", step=120, checkpoint="checkpoints/step-000000000120")
sys.exit(75)
"""

# How the agent names the command that goes on with the run of `Launcher.run`.
AGAIN = "paceline run --workers 2 --run-dir run train.py"


@dataclass
class Ended:
    code: int
    stdout: str
    stderr: str
    folder: Path

    def log(self, rank: int) -> str:
        return (self.folder / "logs" / f"worker-{rank}.log").read_text(errors="surrogateescape")

    @property
    def block(self) -> str:
        """The failure block, without what differs from run to run; it must come last on the console."""
        found = re.findall(r"^worker \d+ failed \(host.*\Z", self.stderr, re.MULTILINE | re.DOTALL)
        assert len(found) == 1, self.stderr
        assert self.stderr.count(" failed (host ") == 1, self.stderr
        return re.sub(r"\(host \S+, pid \d+", "(host H, pid P", found[0]).strip()


class Launcher:
    """Runs scripts under the agent in a folder of the test; whatever is still alive at the end is ended.

    `cold_start`: workers are Python processes of their own. For scripts without torch that takes less time than to fork
    them from a process with torch.
    """

    cold_start = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []

    def start(
        self,
        script: str,
        /,
        preexec: Callable[[], None] | None = None,
        env: Mapping[str, str] | None = None,
        seconds: Mapping[str, float] | None = None,
        **options: Any,
    ) -> subprocess.Popen[str]:
        """`seconds`: constants of the agent's."""
        (self.folder / "train.py").write_text(WORKER + textwrap.dedent(script))
        given = {"script": "train.py", "workers": 2, "run_dir": "run", "seconds": seconds or {}, **options}
        given.setdefault("cold_start", self.cold_start or preexec is not None)  # which may leave no room for torch
        process = Process(
            [sys.executable, "-c", MAIN, json.dumps(given)],
            environment(**(env or {})),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            errors="surrogateescape",
            preexec_fn=preexec,
        )
        self.started.append(process)
        return process

    def end(self, process: subprocess.Popen[str]) -> Ended:
        stdout, stderr = process.communicate(timeout=120)
        # The settings of workers depend on the machine: test_threads_and_cores.py looks at them.
        stderr = re.sub(r"^(\d+ workers?) \([^)]*\), run", r"\1, run", stderr, flags=re.MULTILINE)
        return Ended(process.returncode, stdout, stderr, self.folder / "run")

    def run(self, script: str, /, **options: Any) -> Ended:
        return self.end(self.start(script, **options))

    def wait_for(self, name: str, workers: int = 2) -> None:
        """Until every worker has called mark(name)."""
        until(lambda: all((self.folder / "run" / f"{name}-{rank}").exists() for rank in range(workers)))

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate()


def until(condition: Callable[[], T | None], seconds: float = 60.0) -> T:
    """Waits until `condition` returns something true, and returns that."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):  # the latter when it ends between open and read
        return False


def family(launcher: Launcher, workers: int = 2) -> list[int]:
    """The process ids that the workers left in their files."""
    files = [launcher.folder / "run" / f"pids-{rank}" for rank in range(workers)]
    return [int(pid) for file in files for pid in file.read_text().split()]


SPREAD = 0.08  # seconds: an agent takes as long to fork two workers


def warm_of(agent: int) -> int:
    """The agent's warm process, once it has its name: a number that is never negative, which would mean everybody."""
    warm: list[int] = []

    def named() -> bool:
        for pid in map(int, Path(f"/proc/{agent}/task/{agent}/children").read_text().split()):
            with suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text() == "paceline warm\n":
                    warm.append(pid)
        return bool(warm)

    until(named)
    assert warm[0] > 1
    return warm[0]


def journal(folder: Path, kind: str) -> list[dict[str, object]]:
    text, _, _ = (folder / "journal.jsonl").read_text().rpartition("\n")  # the last line may be half written
    events = [json.loads(line) for line in text.splitlines()]
    return [event for event in events if event["event"] == kind]
