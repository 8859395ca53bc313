"""`paceline launch ray` on a real cluster of two raylets, and what it says without one."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from agents import journal, until
from clusters import processes
from conftest import lacking
from launching import SCRIPTS, free_port, in_short_folder, paceline, piped
from oracle import as_one_worker
from rays import Cluster
from test_launchers_of_others import weights
from test_ssh import DIGITS, SLOWLY

from paceline.cli import main
from paceline.launch.engines.ray import bundles, pending

slow, real = pytest.mark.slow, pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def ray() -> Iterator[Cluster]:
    try:
        import ray
    except ModuleNotFoundError:
        lacking("there is no ray: pip install 'paceline[ray]'")
    assert ray.__version__
    with in_short_folder(Cluster, "ray-") as made:
        yield made


class Launched:
    """Launchers on a cluster, from a folder of the test's."""

    def __init__(self, ray: Cluster, folder: Path) -> None:
        self.ray, self.folder, self.started = ray, folder, list[subprocess.Popen[str]]()

    def start(self, *words: str | Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "paceline", "launch", "ray", "--address", self.ray.address]
        variables = ["--env=OMP_NUM_THREADS=1", f"--env=PYTHONPATH={SCRIPTS}"]
        self.started.append(piped([*command, "--workers-per-host=1", *variables, *words], self.folder))
        return self.started[-1]

    def begun(self, *words: str) -> subprocess.Popen[str]:
        """A run of `SLOWLY` on two nodes, both of which train."""
        (self.folder / "train.py").write_text(SLOWLY)
        process = self.start("--nodes=2", "--run-dir", "run", "--min-workers", "2", *words, "train.py")
        run = self.folder / "run"
        until(lambda: (run / "journal.jsonl").exists() and bool(journal(run, "formed")), 200)
        return process

    def back(self, process: subprocess.Popen[str], how: str, meanwhile: Callable[[], object] = lambda: None) -> None:
        """The second host is lost, for a reason that says `how`; `meanwhile` something is done, and it comes again."""
        until(lambda: self.teams()[-1] == [0], 100)
        meanwhile()
        until(lambda: len(self.teams()[-1]) == 2, 200)
        (self.folder / "go").touch()
        error = self.ended(process)
        assert process.returncode == 0, error
        told = rf"^bundle-1 is lost \(.*{how}.*\): it is tried again until it comes$"
        assert re.search(told, error, re.MULTILINE), error
        as_one_worker(self.folder)

    def saved(self) -> None:
        """It was stopped, with a checkpoint."""
        (stopped,) = journal(self.folder / "run", "stopped")
        name = f"step-{stopped['step']:012d}"
        assert (self.folder / "run" / "checkpoints" / name / "manifest.json").exists()

    def teams(self) -> list[object]:
        return [event["workers"] for event in journal(self.folder / "run", "generation")]

    def ended(self, process: subprocess.Popen[str], seconds: float = 300) -> str:
        """Its standard error; nothing is left, neither here nor in Ray."""
        _, error = process.communicate(timeout=seconds)
        assert not [one for one in processes() if self.ours(one)]
        look = self.ray.look()
        assert (look["actors"], look["groups"]) == ([], []), error
        return error

    def ours(self, one: psutil.Process) -> bool:
        command = " ".join(one.info["cmdline"] or ())
        return one.info["cwd"] == str(self.folder) and "paceline" in command

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate()


@pytest.fixture
def launched(ray: Cluster, tmp_path: Path) -> Iterator[Launched]:
    made = Launched(ray, tmp_path)
    yield made
    made.close()
    until(lambda: not [one for one in processes() if made.ours(one)], 100)


@slow
@real
def test_two_nodes_train_what_one_worker_trains(launched: Launched, tmp_path: Path) -> None:
    """To the byte with `exact`. The token is in no argument, environment or log, and nowhere in Ray's tables."""
    paceline("run", "--plan", "exact", "--steps", "12", "--run-dir", "alone", DIGITS, cwd=tmp_path)
    words = ("--nodes=2", "--min-workers", "2", "--plan", "exact", "--steps", "12", "--run-dir", "run")
    process = launched.start(*words, "--env=SECRET=hidden-from-ray", DIGITS)
    token = tmp_path / "run" / "token"
    until(lambda: token.exists() and bool(journal(tmp_path / "run", "formed")), 200)
    secret = token.read_text().strip()
    for one in processes():
        assert not any(secret in word for word in one.info["cmdline"] or ())
        assert secret not in (one.info["environ"] or {}).values()
    look = launched.ray.look()
    assert (len(look["actors"]), len(look["groups"])) == (2, 1)
    error = launched.ended(process)
    assert process.returncode == 0, error
    assert "Ray has placed bundle-0 on " in error
    assert "worker 1 has joined: 2 workers" in error
    assert weights(tmp_path / "run") == weights(tmp_path / "alone")
    logs = [path for path in launched.ray.folder.rglob("*") if path.is_file()]
    assert len(logs) > 10
    for word in (secret, "hidden-from-ray"):
        assert word not in look["told"] + error
        assert not [path for path in logs if word in path.read_text("latin-1")]


@slow
@real
def test_a_node_that_dies_leaves_and_another_takes_its_place(launched: Launched) -> None:
    process = launched.begun()
    raylet, _ = launched.ray.actor(first=False)
    raylet.kill()
    launched.back(process, "(actor|node)", launched.ray.add)


@slow
@real
def test_an_actor_that_is_killed_leaves_and_comes_back(launched: Launched) -> None:
    process = launched.begun()
    _, second = launched.ray.actor(first=False)
    second.kill()
    launched.back(process, "actor")


@slow
@real
def test_the_first_actor_is_killed_and_the_same_command_goes_on(launched: Launched, tmp_path: Path) -> None:
    process = launched.begun()
    _, first = launched.ray.actor(first=True)
    first.kill()
    error = launched.ended(process)
    assert process.returncode == 75, error
    assert re.search(r"^bundle-0: lost \(.*\); the same command goes on$", error, re.MULTILINE)
    launched.saved()
    (tmp_path / "go").touch()
    error = launched.ended(launched.start("--nodes=2", "--run-dir", "run", "train.py"))
    assert "train.py finished at step 400" in error
    as_one_worker(launched.folder)


@slow
@real
def test_ctrl_c_saves_and_leaves_nothing(launched: Launched) -> None:
    process = launched.begun()
    process.send_signal(signal.SIGINT)
    error = launched.ended(process)
    assert process.returncode == 130, error
    (again,) = [line for line in error.splitlines() if line.startswith("continue with: ")]
    assert again.startswith("continue with: paceline launch ray --address ")


@slow
@real
def test_a_launcher_that_is_killed_leaves_a_checkpoint_and_nothing_else(launched: Launched) -> None:
    process = launched.begun()
    process.kill()
    until(lambda: not [one for one in processes() if launched.ours(one)], 100)
    launched.saved()
    launched.ended(process)


@slow
@real
def test_a_failure_on_another_node_is_that_of_a_local_run(launched: Launched, tmp_path: Path) -> None:
    fails = "    if report.step >= 20 and os.environ['PACELINE_RANK'] != '0':\n        raise ValueError('here')\n"
    (tmp_path / "train.py").write_text(SLOWLY.replace("trainer.export", f"{fails}trainer.export"))
    process = launched.start("--nodes=2", "--run-dir", "run", "--min-workers", "2", "--max-restarts", "1", "train.py")
    error = launched.ended(process)
    assert process.returncode == 1, error
    assert re.search(r"^bundle-1 \| worker 1 failed \(host \S+, pid \d+, after step \d+\)$", error, re.MULTILINE), error
    assert "ValueError: here" in error


@slow
@real
def test_what_ray_has_no_place_for_is_told(launched: Launched, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    process = launched.start("--nodes=3", "--wait=0", "train.py")
    head = r"\S+ \([0-9a-f]{6}\) has 0 of 0 CPU free"
    what = (
        "paceline: Ray has not placed the hosts within 0 s: 3 nodes with 1 CPU each are wanted, and of 3 alive 2 can "
    )
    cure = "; wait for longer with --wait, ask for less, or see `ray status`\n"
    assert re.fullmatch(f"{what}give that: {head}{cure}", launched.ended(process))
    assert process.returncode == 2
    process = launched.start("--nodes=2", "--wait=300", "--engine=CPU=1 TPU=4", "train.py")
    assert process.stderr is not None
    told = process.stderr.readline()
    what = "waiting for Ray: 2 nodes with 1 CPU and 4 TPU each are wanted, and of 3 alive 0 can give that: "
    assert told.startswith(what), told
    assert told.count(" 0 of 0 TPU free") == 3
    process.send_signal(signal.SIGINT)
    assert launched.ended(process) == "paceline: stopped by SIGINT; the same command starts again\n"
    assert process.returncode == 130


def test_bundles_are_what_hosts_need() -> None:
    asked = {"nodes": 2, "hosts": [], "workers": None, "resources": {}}
    assert bundles(asked, [{"CPU": 8.0}, {"CPU": 8.0}, {"CPU": 4.0}]) == [{"CPU": 1.0}] * 2
    assert bundles({**asked, "nodes": None}, [{"CPU": 8.0}] * 3 + [{}]) == [{"CPU": 1.0}] * 3
    some = [{"CPU": 8.0, "GPU": 8.0}, {"CPU": 8.0}, {"CPU": 8.0, "GPU": 2.0}]
    assert bundles(asked, some) == [{"CPU": 2.0, "GPU": 2.0}] * 2
    assert bundles({**asked, "nodes": 3}, some) == [{"CPU": 2.0, "GPU": 2.0}] * 3
    assert bundles({**asked, "nodes": None}, some) == [{"CPU": 2.0, "GPU": 2.0}] * 2
    assert bundles({**asked, "workers": 4}, some) == [{"CPU": 4.0, "GPU": 4.0}] * 2
    assert bundles({**asked, "resources": {"CPU": 6.0, "GPU": 0.0}}, some) == [{"CPU": 6.0}] * 2
    hosts = {**asked, "nodes": None, "hosts": [("a", 2), ("b", None)]}
    assert bundles(hosts, [{"CPU": 8.0}]) == [{"CPU": 2.0, "node:a": 0.001}, {"CPU": 1.0, "node:b": 0.001}]


def test_why_there_is_no_place_yet() -> None:
    a, b = {"CPU": 4.0, "GPU": 4.0, "node:a": 1.0}, {"CPU": 8.0, "node:b": 1.0}
    wanted = [{"CPU": 2.0, "GPU": 4.0}] * 2
    assert pending(wanted, {"a": (a, a), "b": (b, b)}) == (
        "2 nodes with 2 CPU and 4 GPU each are wanted, and of 2 alive 1 can give that: b has 0 of 0 GPU free"
    )
    assert pending(wanted[:1], {"a": ({"CPU": 1.0}, a)}) == (
        "1 node with 2 CPU and 4 GPU each is wanted, and of 1 alive 0 can give that: "
        "a has 1 of 4 CPU free and 0 of 4 GPU free"
    )
    assert pending([{"CPU": 1.0, "node:c": 0.001}], {"a": (a, a)}) == "c is no node that is alive"


WRONG = [
    (["--engine=CPU"], "--engine CPU is no resource of Ray's; give some as --engine='CPU=8 GPU=4'"),
    (["--engine=CPU=-1"], "--engine CPU=-1 is no resource of Ray's; give some as --engine='CPU=8 GPU=4'"),
    (
        ["--hosts=a,b", "--nodes=2"],
        "--hosts says how many nodes there are; leave --nodes out, or let Ray choose: no --hosts",
    ),
    (
        ["--address=ray://a:10001"],
        "ray://a:10001 is for Ray's client; "
        "run this on a node of the cluster, as by `ray job submit -- paceline launch ray ...`",
    ),
    (["--address=nowhere"], "--address nowhere is no address; give HOST:PORT, as 10.0.0.7:6379"),
]


@pytest.mark.parametrize(("words", "told"), WRONG, ids=[told.split(";")[0] for _, told in WRONG])
def test_what_cannot_be_asked_for(
    words: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert main(["launch", "ray", *words, "train.py"]) == 2
    assert capsys.readouterr().err == f"paceline: {told}\n"


def test_a_dry_run_says_what_ray_would_be_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    given = ["--dry-run", "--python=/py", "--cwd=/c", "--env=KEY=secret", "--engine=CPU=2 GPU=1"]
    assert main(["launch", "ray", "--nodes=2", *given, "train.py"]) == 0
    one = json.dumps({"CPU": 2.0, "GPU": 1.0})
    assert capsys.readouterr().out == (
        f"placement_group([{one}, {one}], strategy=\"STRICT_SPREAD\"): sh <<< 'cd /c && exec /py -m paceline agent\n'\n"
    )


def test_where_there_is_no_ray(tmp_path: Path) -> None:
    """Neither the package nor a cluster."""
    (tmp_path / "train.py").touch()
    (tmp_path / "without" / "ray").mkdir(parents=True)
    absent = "raise ModuleNotFoundError(\"No module named 'ray'\", name='ray')\n"
    (tmp_path / "without" / "ray" / "__init__.py").write_text(absent)
    command = ("launch", "ray", "--address", f"127.0.0.1:{free_port()}", "train.py")
    done = paceline(*command, cwd=tmp_path, code=2, PYTHONPATH=str(tmp_path / "without"))
    assert done.stderr == f"paceline: ray is not installed for {sys.executable}; pip install 'paceline[ray]'\n"
    try:
        import ray
    except ModuleNotFoundError:
        lacking("there is no ray: pip install 'paceline[ray]'")
    assert ray.__version__
    done = paceline(*command, cwd=tmp_path, code=2)
    assert done.stderr == (
        f"paceline: there is no Ray at {command[3]} ([Errno 111] Connection refused); start one by `ray start --head`, "
        "or give --address HOST:PORT of one that has a node here\n"
    )
