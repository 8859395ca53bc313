"""Processes of the tests that begin with torch imported: real ones, forked from one warm process per test session.

An agent that is started here holds no torch (it is exec'd), and gets a warm process of its own, which `paceline run`
otherwise starts by itself, in a fortieth of the time.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from paths import SCRIPTS

from paceline.launch.fork_server import ForkServer, WorkerProgram
from paceline.launch.forked_worker import PROGRAM, READ_FIRST
from paceline.launch.tuning import worker_settings

# Variables that torch's compiler, sklearn and Lightning set in the process of the tests itself when they are imported:
# with one that the warm process did not begin with, each later worker would start cold.
SET_BY_LIBRARIES = ("TORCHINDUCTOR_", "TRITON_", "KMP_", "PYTORCH_NVML_")
BEGAN = {name for name in os.environ if name.startswith(SET_BY_LIBRARIES)}


def environment(**more: str | None) -> dict[str, str]:
    """What the tests' processes find; None unsets."""
    later = {name for name in os.environ if name.startswith(SET_BY_LIBRARIES)} - BEGAN
    began = {name: value for name, value in os.environ.items() if name not in later}
    path = os.pathsep.join(filter(None, [str(SCRIPTS), began.get("PYTHONPATH")]))
    variables = {**began, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **more}
    variables.setdefault("PYTHONFAULTHANDLER", "1")
    return {name: value for name, value in variables.items() if value is not None}


@cache
def _given() -> dict[str, str]:
    given = environment(PYTHONUNBUFFERED="1")
    variables, _, _ = worker_settings(1, given, [0])
    return given | variables


def _begun() -> ForkServer:
    selector = selectors.DefaultSelector()
    warm = ForkServer(["of the tests", " " * 4000], _given(), selector, lambda: None, print)
    while not warm.ready:
        assert warm.trouble is None, warm.trouble
        for key, _ in selector.select():
            key.data()
    return warm


@cache
def _warm() -> ForkServer:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.launch.fork_server.PROGRAM", PROGRAM.replace("from", "import agent_parts; from", 1))
        return _begun()


@cache
def _warm_with(modules: str) -> ForkServer:
    """Forked from the first one, and inherited by us."""
    ours, theirs = socket.socketpair()
    program = [str(SCRIPTS / "with_warm.py"), json.dumps({"environment": _warm().environment, "modules": modules})]
    handed = {"PACELINE_TEST_SERVE": theirs.fileno()}
    child = _warm().fork(WorkerProgram("python", program, environment(OPENBLAS_NUM_THREADS="1"), (1, 2), handed))
    theirs.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_WARM", f"{child.pid}:{ours.detach()}")
        os.close(child.pidfd)
        return _begun()


class Process(subprocess.Popen[str]):
    """`command` of ``[sys.executable, SCRIPT, ...]`` with torch imported; any other with a warm process to inherit.

    WARM_WITH in the environment names modules that are imported, too.

    `inside`: a network namespace, a file of known hosts and a host's name to run it with.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        env: Mapping[str, str] | None = None,
        inside: tuple[str, ...] | None = None,
        **more: Any,
    ) -> None:
        self._inside = inside
        given = environment() if env is None else dict(env)
        self._cold = more.get("preexec_fn") is not None or given.get("PACELINE_COLD_START") == "1"
        super().__init__([*map(str, command)], env=given, text=True, **more)

    def _execute_child(self, args: list[str], *more: Any) -> None:
        if self._cold:
            super()._execute_child(args, *more)  # type: ignore[misc]
            return
        _, _, _, _, folder, env, _, _, _, *ends = more
        modules = env.pop("WARM_WITH", "")
        warm = _warm_with(modules) if modules else _warm()
        stdin, _, _, stdout, _, stderr = ends[:6]
        first = environment()
        other = any(env.get(name) != first.get(name) for name in env.keys() | first if name.startswith(READ_FIRST))
        given = {"command": args, "inside": self._inside, "environment": warm.environment, "exec": other}
        program = [str(SCRIPTS / "with_warm.py"), json.dumps(given)]
        streams = (stdout if stdout >= 0 else 1, stderr if stderr >= 0 else 2)
        handed = {"PACELINE_TEST_STDIN": stdin} if stdin >= 0 else {}
        child = warm.fork(WorkerProgram("python", program, env, streams, handed, str(folder or ".")))
        self.pid, self._child_created = child.pid, True
        os.close(child.pidfd)
        self._close_pipe_fds(*ends[:6])  # type: ignore[attr-defined]
