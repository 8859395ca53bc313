"""What can go wrong between hosts: the table of docs/howto/launch-ssh.md, each text as it is said.

What needs servers of others is held by tests beside those: here it is seen that they still say the same.
"""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from launching import paceline
from paths import DOCS, ROOT
from test_engines import Launched
from test_engines import launched as launched

from paceline.base.environment import read_nodes
from paceline.errors import PacelineError
from paceline.launch.engines.engine import parse_hosts
from paceline.launch.engines.preflight_hosts import _of_hosts
from paceline.launch.joining import join, listen
from paceline.launch.options import LaunchOptions
from paceline.team.auth import read_token
from paceline.team.coordinator_client import RefusedError, UnsignedError

OPTIONS = LaunchOptions(script="train.py")


def table() -> dict[str, str]:
    """What is said, by situation."""
    _, _, rest = (DOCS / "howto" / "launch-ssh.md").read_text().partition("\n## What can go wrong\n")
    rows = re.findall(r"^\| (.+?) \| (.+?) \| .+ \|$", rest.partition("\n## ")[0], re.MULTILINE)
    return {what: said for what, said in rows if what not in ("what", "---")}


def like(said: str) -> str:
    """The pattern of a text in which words in capitals stand for others."""
    (text,) = re.findall("`(.+)`", said)
    return re.sub(r"\b[A-Z]{3,}\b", r"\\S+", re.escape(text))


def refused(make: Callable[[], Any]) -> str:
    with pytest.raises(PacelineError) as raised:
        make()
    return str(raised.value)


def taken_port(_: Path) -> str:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        return refused(lambda: listen(replace(OPTIONS, listen=address)))


def open_token(folder: Path) -> str:
    (folder / "token").write_text(64 * "k")
    (folder / "token").chmod(0o640)
    return refused(lambda: read_token(folder / "token"))


def joined(code: int, **said: Any) -> str:
    def introduce() -> None:
        raise RefusedError(code, said)

    link: Any = SimpleNamespace(address=("10.0.0.1", 29400), introduce=introduce)
    return refused(lambda: join(OPTIONS, link))


def unsigned(code: int) -> str:
    def introduce() -> None:
        raise UnsignedError(("10.0.0.1", 29400), code)

    link: Any = SimpleNamespace(address=("10.0.0.1", 29400), introduce=introduce)
    return refused(lambda: join(OPTIONS, link))


def nobody(_: Path) -> str:
    def introduce() -> None:
        raise ConnectionRefusedError(111, "Connection refused")

    link: Any = SimpleNamespace(address=("10.0.0.1", 29400), introduce=introduce)
    return refused(lambda: join(OPTIONS, link))


def apart(_: Path) -> str:
    host: Any = SimpleNamespace(name="b", facts={"versions": {}, "at": ["10.0.0.2"]}, clock=3.0, why="")
    (found,) = _of_hosts([host], lambda _: None)
    return str(found)


def disagree(_: Path) -> str:
    sky = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    return refused(lambda: read_nodes({**sky, "PET_NODE_RANK": "0", "PET_NNODES": "2", "PET_MASTER_ADDR": "a"}))


def no_secret(folder: Path) -> str:
    (folder / "train.py").touch()
    told = {"DSTACK_NODE_RANK": "1", "DSTACK_NODES_NUM": "2", "DSTACK_MASTER_NODE_IP": "10.0.0.1"}
    said = paceline("run", "--nodes", "auto", "train.py", cwd=folder, code=2, **told).stderr
    return said.removeprefix("paceline: ").strip()


NOW: dict[str, Callable[[Path], str]] = {
    "a name that begins with `-`": lambda _: refused(lambda: parse_hosts("-oProxyCommand=x")),
    "another torch, at a join": lambda _: joined(412, differs=[["torch", "2.13.0", "2.12.0"]], script=""),
    "clocks that differ, as `paceline doctor --hosts` sees": apart,
    "two runs on one port": taken_port,
    "a token that others may read": open_token,
    "a wrong token": lambda _: unsigned(401),
    "another program has the port": lambda _: unsigned(200),
    "no run there": nobody,
    "variables of two starts disagree": disagree,
    "`--nodes auto` without a secret": no_secret,
}
# By situation: words of its text that another test expects, which makes it happen.
ELSEWHERE = {
    "a host's name means nothing": "ssh: Could not resolve hostname",
    "its key is not known yet": "Host key verification failed.",
    "it refuses yours": "Permission denied (publickey",
    "its port is closed": "Paceline retries until it answers",
    "the first host does not answer": "but it must run the coordinator",
    "another script there": "the hosts differ:",
    "no folder that they share, and no script there": "missing; copy the same script to all hosts, or use --sync",
    "no Python there": "not found; install the same versions",
    "the first host does not know the name of the next": (
        "pass --listen ADDR, at which the other hosts reach the first host"
    ),
    "hosts do not reach each other": "open all ports between the hosts, or use --tunnel",
    "`--tunnel` where sshd forbids it": "set AllowStreamLocalForwarding yes for sshd there, or leave --tunnel out",
    "/dev/shm is small": "use docker run --shm-size=8g, or a memory emptyDir in Kubernetes",
    "Slurm refuses": "check --engine='...' and --dry-run",
    "the queue is full": "waiting for Ray: 2 nodes with 1 CPU and 4 TPU each are needed; 0 of 3 live nodes ",
    "a quota, or no room": "Insufficient cpu.)",
    "the launcher is killed": '"stopped"',
    "a host is lost": '"lost"',
}


def test_each_situation_has_one_text() -> None:
    assert {*table()} == {*NOW, *ELSEWHERE, "no Paceline there"}
    assert len(table()) >= 20


@pytest.mark.parametrize("what", NOW)
def test_text_of_a_host_fault(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert re.fullmatch(like(table()[what]), NOW[what](tmp_path))


@pytest.mark.parametrize("what", ELSEWHERE)
def test_text_of_a_host_fault_that_another_test_makes_happen(what: str) -> None:
    """Another test, or its golden file, and the table have the words."""
    tests = (path for kind in ("py", "txt") for path in (ROOT / "tests").rglob(f"*.{kind}") if path != Path(__file__))
    assert any(ELSEWHERE[what] in path.read_text() for path in tests)
    if not ELSEWHERE[what].startswith('"'):
        assert ELSEWHERE[what] in table()[what]


def test_host_without_paceline_is_named(launched: Launched) -> None:
    process = launched.start({"a": "pass\n"}, python=sys._base_executable)  # type: ignore[attr-defined]
    _, error = process.communicate(timeout=60)
    assert process.returncode == 2
    row = error.splitlines()[-1]
    assert re.fullmatch(like(table()["no Paceline there"]).replace("\\ ", r"\s+", 2), row), row
