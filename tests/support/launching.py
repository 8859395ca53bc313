"""Starting `paceline run` as a user would, in a process of its own."""

from __future__ import annotations

import hashlib
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from subprocess import PIPE
from typing import Protocol, TypeVar

import pytest
from once import once
from warm import SCRIPTS as SCRIPTS
from warm import Process, environment


class Closes(Protocol):
    def close(self) -> None: ...


Closed = TypeVar("Closed", bound=Closes)

# For the environment of scripts that import them, which takes each process seconds.
MODELS = (f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "llama", "falcon", "bert", "vit", "t5"))
TRANSFORMERS = {"WARM_WITH": " ".join(MODELS)}
METRICS = {"WARM_WITH": "torchmetrics.classification torchmetrics.regression"}

# Every level of shards on one to four workers: how many there are, and the words of the plan.


def paceline(
    *arguments: str | Path,
    cwd: Path,
    code: int | None = 0,
    timeout: float = 240,
    preexec: Callable[[], None] | None = None,
    **env: str,
) -> subprocess.CompletedProcess[str]:
    """`paceline ARGUMENTS...`; with `code` the exit code must be that. `preexec` runs in the child before it."""
    command = [sys.executable, "-m", "paceline", *map(str, arguments)]
    with Process(command, environment(**env), cwd=cwd, stdout=PIPE, stderr=PIPE, preexec_fn=preexec) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    assert code is None or process.returncode == code, f"exit code {process.returncode}\n{stdout}\n{stderr}"
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def piped(command: Sequence[str | Path], folder: Path, devices: str = "", **more: str) -> subprocess.Popen[str]:
    """A command that goes on, in a folder, without input; what it says is to be read."""
    env = environment(CUDA_VISIBLE_DEVICES=devices, **more)
    return subprocess.Popen(command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=PIPE, stderr=PIPE, text=True)


def train_basics(
    folder: Path, body: str | None, workers: int = 2, *options: str, code: int = 0, chaos: str = "", **env: str
) -> subprocess.CompletedProcess[str]:
    """Trains in `folder`, with the run folder `out`; `body` is the script's, after what basics.py makes, None the one
    that is there.
    """
    if body is not None:
        (folder / "train.py").write_text("from basics import *\n" + body)
    args = ("run", "--workers", str(workers), "--run-dir", "out", *options, "train.py")
    return paceline(*args, cwd=folder, code=code, PACELINE_CHAOS=chaos, **env)


def train_models(
    folder: Path, script: str, workers: int, plan: str, names: Sequence[str]
) -> subprocess.CompletedProcess[str]:
    """Trains the models of a script of tests/scripts that have these names, by a fixed team with the run folder `out`;
    the script exports each as NAME.safetensors. Without a plan: by the script's own.
    """
    options = ("--max-restarts", "0", *(("--plan", plan) if plan else ()))
    command = ("run", "--workers", str(workers), "--run-dir", "out", *options, SCRIPTS / script, *names)
    return paceline(*command, cwd=folder, **TRANSFORMERS)


def exported(folder: Path, body: str, workers: int, plan: str) -> Path:
    """What a script of `train_basics`, trained by a fixed team in a new folder, exports to out.safetensors."""
    folder.mkdir()
    train_basics(folder, body, workers, "--max-restarts", "0", "--plan", plan)
    return folder / "out.safetensors"


def exported_once(factory: pytest.TempPathFactory, body: str, words: str) -> bytes:
    """What one worker exports from such a script with `exact` and these words of a plan: trained once for all tests."""
    script = hashlib.sha256(body.encode()).hexdigest()[:8]
    folder = once(factory, f"{script} exact {words}", lambda made: exported(made / "one", body, 1, f"{words} exact"))
    return (folder / "one" / "out.safetensors").read_bytes()


def equal_bytes(folder: Path, body: str, workers: int, plan: str, alone: str = "exact") -> None:
    """A script of `train_basics` exports with `exact` what one worker does, in `several` and `one` of the folder."""
    one = exported(folder / "one", body, 1, alone)
    several = exported(folder / "several", body, workers, f"exact {plan}")
    assert one.read_bytes() == several.read_bytes()


def free_port() -> int:
    """A port that nobody gets meanwhile by asking for any."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = 10_000 + secrets.randbelow(first - 10_000)
        with suppress(OSError), closing(socket.create_server(("127.0.0.1", port))):
            return port


def without_an_agent(
    *scripts: Path | Sequence[str | Path], cwd: Path | None = None, **env: str
) -> list[tuple[int, str]]:
    """Workers started as torchrun starts them, one per script, which may have arguments: the exit code of each, and
    what it said.
    """
    shared = {"WORLD_SIZE": str(len(scripts)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **env}
    workers = [
        Process([sys.executable, *words], environment(**shared, RANK=str(rank)), cwd=cwd, stderr=PIPE)
        for rank, words in enumerate([script] if isinstance(script, Path) else script for script in scripts)
    ]
    return [(worker.returncode, text) for worker, text in zip(workers, stderr_of(workers), strict=True)]


def stderr_of(processes: Sequence[subprocess.Popen[str]]) -> list[str]:
    """Waits for processes, and returns what each of them wrote to stderr. AssertionError with all of it, and with the
    stacks of processes that still run after two minutes.
    """
    try:
        return [process.communicate(timeout=120)[1] for process in processes]
    except subprocess.TimeoutExpired:
        running = [process for process in processes if process.poll() is None]
        for process in running:
            process.send_signal(signal.SIGABRT)  # faulthandler then writes the stacks
        texts = [f"process {number}:\n{process.communicate()[1]}" for number, process in enumerate(processes)]
        raise AssertionError(f"{len(running)} processes were still running\n" + "\n".join(texts)) from None


@contextmanager
def in_short_folder(make: Callable[[Path], Closed], prefix: str) -> Iterator[Closed]:
    """What is made in a folder with a short path, in which sockets may lie; it is closed, and the folder removed."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    made = None
    try:
        made = make(folder)
        yield made
    finally:
        if made is not None:
            made.close()
        shutil.rmtree(folder, ignore_errors=True)
