"""`paceline launch ssh` and `launch mpi` over real sshd, one in each network namespace; the launcher has a host of its
own.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from agents import journal, until
from clusters import processes
from conftest import lacking
from launching import paceline
from networks import Network
from networks import hosts as hosts
from oracle import apart
from real_engines import DIGITS, SLOWLY, needs, weights
from safetensors.torch import load_file
from ssh_hosts import Shore
from test_prometheus import told_from

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.timeout(600)]


@pytest.fixture(params=["ssh", "mpi"])
def shore(
    hosts: Callable[[int], Network], tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[[int], Shore]]:
    if request.param == "mpi":
        needs("mpirun")
    if shutil.which("sshd", path="/usr/sbin") is None:
        lacking("there is no sshd: run .ci/servers")
    made: list[Shore] = []

    def make(count: int) -> Shore:
        made.append(Shore(hosts(count + 1), tmp_path, request.param))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_ssh_two_hosts_give_the_weights_of_one_worker(shore: Callable[[int], Shore], tmp_path: Path) -> None:
    """To the byte with `exact`; no process, and nothing of the token, is left where others could see it."""
    paceline("run", "--plan", "exact", "--steps", "12", "--run-dir", "alone", DIGITS, cwd=tmp_path)
    here = shore(2)
    process = here.start(
        "--hosts", "a,b", "--min-workers", "2", "--plan", "exact", "--steps", "12", "--run-dir", "run", DIGITS
    )
    token = tmp_path / "run" / "token"
    until(lambda: token.exists() and journal(tmp_path / "run", "formed"), 200)
    secret = token.read_text().strip()
    for one in processes():
        assert not any(secret in word for word in one.info["cmdline"] or ())
        assert secret not in (one.info["environ"] or {}).values()
    out, error = process.communicate(timeout=200)
    assert process.returncode == 0, error
    assert secret not in out + error
    assert "worker 1 has joined: 2 workers" in error
    (reached,) = journal(tmp_path / "run", "stopped")
    assert (reached["step"], reached["why"]) == (12, "--steps 12")
    assert weights(tmp_path / "run") == weights(tmp_path / "alone")
    assert here.nobody()


WORKER_1_UP = 'paceline_worker_up{run="run",worker="1"} 1.0'


def begun(
    here: Shore,
    *words: str,
) -> subprocess.Popen[str]:
    """A run on two hosts, both of which train."""
    (here.folder / "train.py").write_text(SLOWLY)
    process = here.start("--hosts", "a,b", "--run-dir", "run", "--min-workers", "2", *words, "train.py")
    until(lambda: (here.folder / "run/journal.jsonl").exists() and journal(here.folder / "run", "formed"), 200)
    return process


def test_ssh_first_host_serves_metrics_and_page(shore: Callable[[int], Shore], tmp_path: Path) -> None:
    here, run = shore(2), tmp_path / "run"
    process = begun(here, "--metrics", "127.0.0.1:9464", "--page", "127.0.0.1:9465")
    key = (run / "reading_key").read_text().strip()
    figures = lambda: told_from(here.hosts[0], run, "/metrics", key, 9464)
    until(lambda: WORKER_1_UP in figures(), 60)
    jar = str(tmp_path / "cookies")
    told_from(here.hosts[0], run, "/session", key, 9465, "--cookie-jar", jar)
    assert ">Running<" in told_from(here.hosts[0], run, "/view", "", 9465, "--cookie", jar)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=100)
    assert process.returncode == 75, error
    assert re.search(r"^live page: http://127.0.0.1:9465/#[0-9a-f]{64}$", error, re.M)
    assert "paceline_running" in figures(), "the last ones, once"
    until(lambda: json.loads((run / "metrics.json").read_text()) == [])


def test_ssh_kill_of_the_launcher_leaves_a_checkpoint(shore: Callable[[int], Shore], tmp_path: Path) -> None:
    here = shore(2)
    process = begun(here)
    process.kill()
    until(lambda: here.nobody(), 100)
    (stopped,) = journal(tmp_path / "run", "stopped")
    assert (tmp_path / "run" / "checkpoints" / f"step-{stopped['step']:012d}" / "manifest.json").exists()


@pytest.mark.parametrize("shore", ["ssh"], indirect=True)
def test_ssh_hosts_cut_off_from_launcher_and_coordinator_end(shore: Callable[[int], Shore]) -> None:
    """The second one's worker cannot leave a team that is gone, and nobody is there to stop it at once."""
    here = shore(2)
    process = begun(here)
    process.kill()
    for host in here.hosts:
        host.cut()
    until(here.nobody, 60)


def test_ssh_detached_run_is_stopped_by_paceline_stop(shore: Callable[[int], Shore], tmp_path: Path) -> None:
    """Nothing of the launcher's is left, nor of its ways to the hosts."""
    here = shore(2)
    (tmp_path / "train.py").write_text(SLOWLY)
    run = tmp_path / "run"
    process = here.start("--hosts", "a,b", "--run-dir", "run", "--min-workers", "2", "--detach", "train.py")
    _, error = process.communicate(timeout=200)
    assert process.returncode == 0, error
    assert "follow or stop it with `paceline watch`, `paceline logs -f` or `paceline stop`, and that folder\n" in error
    words = [word for one in processes() if here.ours(one.info) for word in one.info["cmdline"] or ()]
    assert "paceline" in words
    assert not {"ssh", "mpirun", "launch"}.intersection(words)
    until(lambda: bool(journal(run, "formed")), 100)
    steps = len(journal(run, "step")) + 90  # which take longer than an agent waits for its launcher
    until(lambda: len(journal(run, "step")) > steps, 200)
    assert not journal(run, "lost")
    stop = here.here.command(sys.executable, "-m", "paceline", "stop", "run")
    done = subprocess.run(stop, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    (stopped,) = journal(run, "stopped")
    assert done.stderr.endswith(f"run has ended: stopped at step {stopped['step']}\n")
    assert (run / "checkpoints" / f"step-{stopped['step']:012d}" / "manifest.json").exists()
    until(here.nobody, 60)
    assert "stopped after step " in (run / "console.log").read_text()


def test_ssh_ctrl_c_saves_and_the_same_command_resumes(shore: Callable[[int], Shore], tmp_path: Path) -> None:
    here = shore(2)
    process = begun(here)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=100)
    assert process.returncode == 130, error
    again = next(
        line for line in error.splitlines() if line.startswith(f"continue with: paceline launch {here.engine} ")
    )
    assert " --run-dir run " in again
    assert "VISIBLE_DEVICES" in again
    until(here.nobody, 30)
    (tmp_path / "go").touch()
    _, error = here.start("--hosts", "a,b", "--run-dir", "run", "train.py").communicate(timeout=200)
    assert "train.py finished at step 400" in error
    found = load_file(tmp_path / "out.safetensors")
    paceline("run", "--run-dir", "alone", "train.py", cwd=tmp_path)
    assert apart(found, load_file(tmp_path / "out.safetensors")) < 1e-12


def test_ssh_host_with_a_cut_cable_leaves_and_joins_again(shore: Callable[[int], Shore], tmp_path: Path) -> None:
    here = shore(2)
    process = begun(here)
    here.hosts[1].cut()
    until(lambda: journal(tmp_path / "run", "lost"), 100)
    here.hosts[1].mend()
    (tmp_path / "go").touch()
    _, error = process.communicate(timeout=200)
    assert process.returncode in (0, 75), error
    until(here.nobody, 100)


@pytest.mark.parametrize("shore", ["ssh"], indirect=True)
def test_ssh_errors_are_shown(shore: Callable[[int], Shore], tmp_path: Path) -> None:
    """A closed port, a key that is refused, an unknown key of a host, no such name."""
    here = shore(2)
    (tmp_path / "train.py").write_text("print('trained')\n")
    here.servers[1].terminate()
    here.servers[1].wait(20)
    process = here.start("--hosts", "a,b", "--cold-start", "train.py")
    out, error = process.communicate(timeout=100)
    assert (process.returncode, out) == (0, "trained\n"), error
    why = f"ssh: connect to host {here.hosts[1].address} port 22: Connection refused"
    assert error.startswith(f"b does not answer ({why}); Paceline retries until it answers\n")
    _, error = here.start("--hosts", "nowhere,a", "train.py").communicate(timeout=100)
    assert error.startswith("paceline: the hosts differ:\nhost ")
    assert "\nnowhere  ssh: Could not resolve hostname nowhere: " in error
    (tmp_path / "client.pub").write_text("")
    _, error = here.start("--hosts", "a", "train.py").communicate(timeout=100)
    assert f"\na     root@{here.hosts[0].address}: Permission denied (publickey" in error
    (tmp_path / "known").write_text("")
    _, error = here.start("--hosts", "a", "train.py").communicate(timeout=100)
    assert "\na     Host key verification failed.; " in error


def closed(shore: Callable[[int], Shore], count: int) -> Shore:
    """Hosts that do not reach each other: the launcher's reaches them."""
    here = shore(count)
    here.part(*here.hosts)
    knock = here.hosts[0].command("bash", "-c", f"echo > /dev/tcp/{here.hosts[1].address}/22")
    assert "No route to host" in subprocess.run(knock, capture_output=True, text=True, check=False).stderr
    return here


def sockets(here: Shore) -> list[Path]:
    """On all hosts, while the launcher's connections are there: to go, to come and to ask."""
    commands = [one.info["cmdline"] or () for one in processes()]
    given = [
        word for words in commands if words[:1] == ["ssh"] and str(here.folder / "config") in words for word in words
    ]
    goes = [word.partition(":")[0] for word in given if word.startswith("/tmp/") and "-go:" in word]
    return [Path(go.removesuffix("go") + end) for go in goes for end in ("go", "come", "come-ask")]


@pytest.mark.parametrize("shore", ["ssh"], indirect=True)
def test_ssh_tunnel_between_hosts(shore: Callable[[int], Shore], tmp_path: Path) -> None:
    """All that three hosts say to each other goes through ssh and the launcher's host. Nothing is left of that."""
    paceline("run", "--plan", "exact", "--steps", "30", "--run-dir", "alone", DIGITS, cwd=tmp_path)
    here, run = closed(shore, 3), tmp_path / "run"
    words = ["--hosts", "a,b,c:2", "--tunnel", "--min-workers", "4", "--plan", "exact", "--steps", "30"]
    process = here.start(*words, "--run-dir", "run", DIGITS)
    until(lambda: run.exists() and journal(run, "formed"), 200)
    files = sockets(here)
    assert [path.stat().st_mode & 0o777 for path in files] == [0o600] * 9
    _, error = process.communicate(timeout=200)
    assert process.returncode == 0, error
    assert sorted(journal(run, "formed")[-1]["workers"]) == [0, 1, 2, 3]
    assert weights(run) == weights(tmp_path / "alone")
    assert here.nobody()
    assert not [path for path in files if path.exists()]


@pytest.mark.parametrize("shore", ["ssh"], indirect=True)
@pytest.mark.parametrize("plan", ["exact", "server=1"])
def test_ssh_tunnel_host_leaves_and_joins_again(shore: Callable[[int], Shore], tmp_path: Path, plan: str) -> None:
    """Its connection breaks with its sshd; with another one it takes the state through a new tunnel."""
    here, run = closed(shore, 2), tmp_path / "run"
    process = begun(here, "--tunnel", "--plan", plan)
    here.servers[1].kill()
    here.servers[1].wait(20)
    here.hosts[1].cut()
    until(lambda: journal(run, "lost"), 100)
    here.hosts[1].mend()
    here.servers[1] = here.serve(1)
    until(lambda: len(journal(run, "formed")) > 1, 200)
    (tmp_path / "go").touch()
    _, error = process.communicate(timeout=200)
    assert process.returncode == 0, error
    found = load_file(tmp_path / "out.safetensors")
    paceline("run", "--run-dir", "alone", "train.py", cwd=tmp_path)
    assert apart(found, load_file(tmp_path / "out.safetensors")) < 1e-12
    until(here.nobody, 100)


@pytest.mark.parametrize("shore", ["ssh"], indirect=True)
def test_ssh_unreachable_host_has_a_hint_to_tunnel(shore: Callable[[int], Shore], tmp_path: Path) -> None:
    here = closed(shore, 2)
    (tmp_path / "train.py").write_text(SLOWLY)
    process = here.start("--hosts", "a,b", "--run-dir", "run", "--min-workers", "1", "train.py")
    assert process.stderr is not None
    until(lambda: (tmp_path / "run").exists() and journal(tmp_path / "run", "step"), 100)
    told = next(line for line in process.stderr if "no run answers" in line)
    cure = "open all ports between the hosts, or use --tunnel if only ssh is open"
    assert told.startswith(f"b | paceline: no run answers at {here.hosts[0].address}:")
    assert told.endswith(f"); {cure}\n")  # there is no route, or no answer
    (tmp_path / "go").touch()
    assert process.wait(100) == 0


@pytest.mark.parametrize("shore", ["ssh"], indirect=True)
def test_ssh_tunnel_that_sshd_forbids(shore: Callable[[int], Shore], tmp_path: Path) -> None:
    here = shore(2)
    (tmp_path / "train.py").touch()
    here.servers[1].terminate()
    here.servers[1].wait(20)
    here.servers[1] = here.serve(1, "AllowStreamLocalForwarding no\n")
    process = here.start("--hosts", "a,b", "--tunnel", "train.py")
    until(lambda: len(sockets(here)) > 0)
    files = sockets(here)
    _, error = process.communicate(timeout=100)
    assert "\nb     Error: remote port forwarding failed for listen path /tmp/paceline-" in error
    assert error.endswith("; set AllowStreamLocalForwarding yes for sshd there, or leave --tunnel out\n")
    until(lambda: not [path for path in files if path.exists()])
