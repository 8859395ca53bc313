"""`paceline launch ray` on a real cluster of two raylets, `launch spark` on two executors, and both without any."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib.util import find_spec
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pytest
from agents import journal, until
from clusters import in_no_process, processes
from conftest import lacking
from launching import SCRIPTS, free_port, in_short_folder, paceline, piped
from oracle import as_one_worker
from pyarrow import parquet
from rays import Cluster
from real_engines import DIGITS, SLOWLY, weights
from sparks import Application

from paceline.cli.main import main
from paceline.launch.engines.driver_engine import LOST, Asker
from paceline.launch.engines.ray import bundles, why_pending
from paceline.launch.engines.spark_driver import Gate

slow, real = pytest.mark.slow, pytest.mark.timeout(600)
NO_SPARK = "there is no Spark: pip install 'paceline[spark]', and a Java of 17 or newer"


@pytest.fixture(scope="module")
def ray() -> Iterator[Cluster]:
    try:
        import ray
    except ModuleNotFoundError:
        lacking("there is no ray: pip install 'paceline[ray]'")
    assert ray.__version__
    with in_short_folder(Cluster, "ray-") as made:
        yield made


def needs_spark() -> None:
    if not find_spec("pyspark") or not shutil.which("java"):
        lacking(NO_SPARK)


class Launched:
    """Launchers of an engine, from a folder of the test's; its hosts have names that begin with `place`."""

    engine, place, at, logs, words, environment = "", "", "", Path(), list[str](), dict[str, str]()

    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, list[subprocess.Popen[str]]()

    def host(self, first: bool) -> psutil.Process:
        """What to kill for the loss of a run's first host, or of another one."""
        raise NotImplementedError

    def left(self) -> object:
        """What the engine still has of ours."""
        raise NotImplementedError

    def told(self) -> str:
        """What the engine shows of a run that goes on."""
        raise NotImplementedError

    def start(self, *words: str | Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "paceline", "launch", self.engine, *self.words]
        variables = ["--env=OMP_NUM_THREADS=1", f"--env=PYTHONPATH={SCRIPTS}"]
        command += ["--workers-per-host=1", *variables, *map(str, words)]
        self.started.append(piped(command, self.folder, **self.environment))
        return self.started[-1]

    def program(self, name: str) -> subprocess.Popen[str]:
        """A program of the folder that has a session of the engine's."""
        variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPTS)}
        self.started.append(
            piped([sys.executable, name, self.engine, self.at], self.folder, **variables, **self.environment)
        )
        return self.started[-1]

    def begun(self, *words: str) -> subprocess.Popen[str]:
        """A run of `SLOWLY` on two nodes, both of which train."""
        (self.folder / "train.py").write_text(SLOWLY)
        process = self.start("--nodes=2", "--run-dir", "run", "--min-workers", "2", *words, "train.py")
        run = self.folder / "run"
        until(lambda: (run / "journal.jsonl").exists() and bool(journal(run, "formed")), 400)
        return process

    def back(self, process: subprocess.Popen[str], how: str, meanwhile: Callable[[], object] = lambda: None) -> None:
        """The second host is lost, for a reason that says `how`; `meanwhile` something is done, and it comes again."""
        until(lambda: self.teams()[-1] == [0], 100)
        meanwhile()
        until(lambda: len(self.teams()[-1]) == 2, 200)
        (self.folder / "go").touch()
        error = self.ended(process)
        assert process.returncode == 0, error
        told = rf"^{self.place}-1 was lost \(.*{how}.*\); Paceline retries until it answers$"
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
        """Its standard error; nothing is left, neither here nor in the engine."""
        _, error = process.communicate(timeout=seconds)
        assert not [one for one in processes() if self.ours(one)]
        assert not self.left(), error
        return error

    def ours(self, one: psutil.Process) -> bool:
        command = " ".join(one.info["cmdline"] or ())
        return one.info["cwd"] == str(self.folder) and "paceline" in command

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate()
        until(lambda: not [one for one in processes() if self.ours(one)] and not self.left(), 100)


class OnRay(Launched):
    engine, place = "ray", "bundle"

    def __init__(self, ray: Cluster, folder: Path) -> None:
        super().__init__(folder)
        self.ray, self.logs, self.at, self.words = ray, ray.folder, ray.address, ["--address", ray.address]

    def host(self, first: bool) -> psutil.Process:
        return self.ray.actor(first)[1]

    def left(self) -> object:
        look = self.ray.look()
        return look["actors"] + look["groups"]

    def told(self) -> str:
        look = self.ray.look()
        assert look["actors"]
        assert len(look["groups"]) == 1
        return str(look["told"])


class OnSpark(Launched):
    engine, place = "spark", "task"

    def __init__(self, application: Application, folder: Path) -> None:
        super().__init__(folder)
        self.logs, self.words, self.environment = application.folder, application.words, application.environment
        self.host, self.left, self.told = application.executor, application.processes, application.pages


@pytest.fixture
def launched(ray: Cluster, tmp_path: Path) -> Iterator[OnRay]:
    with closing(OnRay(ray, tmp_path)) as made:
        yield made


@pytest.fixture(params=["ray", "spark"])
def on(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Launched]:
    """Both engines, one after the other."""
    if request.param == "ray":
        with closing(OnRay(request.getfixturevalue("ray"), tmp_path)) as made:
            yield made
        return
    needs_spark()
    with in_short_folder(Application, "spark-") as application, closing(OnSpark(application, tmp_path)) as on_spark:
        yield on_spark


@slow
@real
def test_ray_and_spark_give_the_weights_of_one_worker(on: Launched, tmp_path: Path) -> None:
    """To the byte with `exact`. The token is in no argument or environment, and nowhere in what the engine shows."""
    waits = '    import os, time\n    while report.step == 8 and not os.path.exists("go"):\n        time.sleep(0.05)\n'
    before, loop, after = DIGITS.read_text().partition("for report in trainer.steps(training, epochs=EPOCHS):\n")
    (tmp_path / "digits.py").write_text(before + loop + waits + after)
    words = ("--nodes=2", "--min-workers", "2", "--plan", "exact", "--steps", "12", "--run-dir", "run")
    process = on.start(*words, "--env=SECRET=hidden-from-it", "digits.py")
    token = tmp_path / "run" / "token"
    until(lambda: token.exists() and bool(journal(tmp_path / "run", "formed")), 200)
    secret = token.read_text().strip()
    in_no_process(secret)
    told = on.told()
    (tmp_path / "go").touch()
    error = on.ended(process)
    assert process.returncode == 0, error
    assert f"placed {on.place}-0 on " in error
    assert "worker 1 has joined: 2 workers" in error
    paceline("run", "--plan", "exact", "--steps", "12", "--run-dir", "alone", "digits.py", cwd=tmp_path)
    assert weights(tmp_path / "run") == weights(tmp_path / "alone")
    logs = [path.read_text("latin-1") for path in on.logs.rglob("*") if path.is_file()]
    assert any(
        {"ray": "Ray runtime started", "spark": "SparkListenerEnvironmentUpdate"}[on.engine] in log for log in logs
    )
    if on.engine == "spark":
        assert len(list(on.logs.glob("home/work/*/*/stderr"))) == 2
    for word in (secret, "hidden-from-it"):
        assert not [text for text in (told, error, *logs) if word in text]


@slow
@real
def test_ray_kill_of_a_node_and_its_replacement(launched: OnRay) -> None:
    process = launched.begun()
    raylet, _ = launched.ray.actor(first=False)
    raylet.kill()
    launched.back(process, "(actor|node)", launched.ray.add)


@slow
@real
def test_ray_is_asked_for_another_node(launched: OnRay) -> None:
    """Instead of one that was lost once too often, and still has room."""
    process = launched.begun("--exclude-after", "1")
    before, actor = launched.ray.actor(first=False)
    launched.ray.add()
    actor.kill()
    until(lambda: launched.teams()[-1] == [0], 100)
    until(lambda: len(launched.teams()[-1]) == 2, 300)
    after, actor = launched.ray.actor(first=False)
    assert after != before
    launched.ray.add()
    actor.kill()
    until(lambda: launched.teams()[-1] == [0], 100)
    until(lambda: len(launched.teams()[-1]) == 2, 300)
    assert launched.ray.actor(first=False)[0] not in (before, after)
    until(lambda: len(launched.ray.look()["groups"]) == 2)  # that of the first hosts and that of the last one
    (launched.folder / "go").touch()
    error = launched.ended(process)
    launched.ray.end_added_nodes()
    assert process.returncode == 0, error
    assert "\nbundle-1 is left out; ray was asked for another host\n" in error
    as_one_worker(launched.folder)


@slow
@real
def test_ray_and_spark_kill_of_a_host_and_its_return(on: Launched) -> None:
    process = on.begun()
    on.host(first=False).kill()
    on.back(process, {"ray": "actor", "spark": "ExecutorLostFailure"}[on.engine])


@slow
@real
def test_ray_and_spark_kill_of_the_first_host_and_resume(on: Launched, tmp_path: Path) -> None:
    process = on.begun()
    on.host(first=True).kill()
    error = on.ended(process)
    assert process.returncode == 75, error
    assert re.search(rf"^{on.place}-0: lost \(.*\); run the same command again to continue$", error, re.MULTILINE)
    on.saved()
    (tmp_path / "go").touch()
    error = on.ended(on.start("--nodes=2", "--run-dir", "run", "train.py"))
    assert "train.py finished at step 400" in error
    as_one_worker(on.folder)


@slow
@real
def test_ray_and_spark_ctrl_c_saves_and_leaves_nothing(on: Launched) -> None:
    process = on.begun()
    process.send_signal(signal.SIGINT)
    error = on.ended(process)
    assert process.returncode == 130, error
    (again,) = [line for line in error.splitlines() if line.startswith("continue with: ")]
    assert again.startswith(f"continue with: paceline launch {on.engine} ")


@slow
@real
def test_ray_and_spark_kill_of_the_launcher_leaves_a_checkpoint(on: Launched) -> None:
    process = on.begun()
    process.kill()
    until(lambda: not [one for one in processes() if on.ours(one)] and not on.left(), 100)
    on.saved()
    on.ended(process)


@slow
@real
def test_ray_failure_on_another_node_is_shown(launched: OnRay, tmp_path: Path) -> None:
    fails = "    if report.step >= 20 and os.environ['PACELINE_RANK'] != '0':\n        raise ValueError('here')\n"
    (tmp_path / "train.py").write_text(SLOWLY.replace("trainer.export", f"{fails}trainer.export"))
    process = launched.start("--nodes=2", "--run-dir", "run", "--min-workers", "2", "--max-restarts", "1", "train.py")
    error = launched.ended(process)
    assert process.returncode == 1, error
    assert re.search(r"^bundle-1 \| worker 1 failed \(host \S+, pid \d+, after step \d+\)$", error, re.MULTILINE), error
    assert "ValueError: here" in error


@slow
@real
def test_ray_without_resources_names_them(launched: OnRay, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    process = launched.start("--nodes=3", "--wait=0", "train.py")
    head = r"\S+ \([0-9a-f]{6}\) has 0 of 0 CPU free"
    what = (
        "paceline: Ray has not placed the hosts within 0 s: 3 nodes with 1 CPU each are needed; 2 of 3 live nodes can "
    )
    cure = "; increase --wait, request less, or check `ray status`\n"
    assert re.fullmatch(f"{what}provide that: {head}{cure}", launched.ended(process))
    assert process.returncode == 2
    process = launched.start("--nodes=2", "--wait=300", "--engine=CPU=1 TPU=4", "train.py")
    assert process.stderr is not None
    told = process.stderr.readline()
    what = "waiting for Ray: 2 nodes with 1 CPU and 4 TPU each are needed; 0 of 3 live nodes can provide that: "
    assert told.startswith(what), told
    assert told.count(" 0 of 0 TPU free") == 3
    process.send_signal(signal.SIGINT)
    assert launched.ended(process) == "paceline: stopped by SIGINT; the same command starts again\n"
    assert process.returncode == 130


def test_reason_of_a_lost_host_is_a_line_of_its_own_after_a_torn_one() -> None:
    for written, shown in ((b"", ""), (b"begun\n", "begun\n"), (b"begun\nworker 1 has jo", "begun\nworker 1 has jo\n")):
        link, waiting = socket.socketpair()
        pipes = [os.pipe() for _ in range(3)]
        with link, waiting, open(pipes[2][0], encoding="utf-8") as error, open(pipes[1][0], "rb") as output:
            asker = Asker(link, [end for _, end in pipes])
            asker.write(1, b"no line")
            asker.write(2, written)
            asker.finish(LOST, "the actor has died")
            assert int(waiting.recv(16)) == LOST
            assert (output.read(), error.read()) == (b"no line", f"{shown}engine: the actor has died\n")
        for end in pipes[0]:
            os.close(end)


def test_ray_bundles_of_hosts() -> None:
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


def test_ray_pending_reasons() -> None:
    a, b = {"CPU": 4.0, "GPU": 4.0, "node:a": 1.0}, {"CPU": 8.0, "node:b": 1.0}
    wanted = [{"CPU": 2.0, "GPU": 4.0}] * 2
    assert why_pending(wanted, {"a": (a, a), "b": (b, b)}) == (
        "2 nodes with 2 CPU and 4 GPU each are needed; 1 of 2 live nodes can provide that: b has 0 of 0 GPU free"
    )
    assert why_pending(wanted[:1], {"a": ({"CPU": 1.0}, a)}) == (
        "1 node with 2 CPU and 4 GPU each is needed; 0 of 1 live node can provide that: "
        "a has 1 of 4 CPU free and 0 of 4 GPU free"
    )
    assert why_pending([{"CPU": 1.0, "node:c": 0.001}], {"a": (a, a)}) == "the node c is not alive"


@pytest.mark.usefixtures("with_a_script")
def test_ray_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--dry-run", "--python=/py", "--cwd=/c", "--env=KEY=secret", "--engine=CPU=2 GPU=1"]
    assert main(["launch", "ray", "--nodes=2", *given, "train.py"]) == 0
    one = json.dumps({"CPU": 2.0, "GPU": 1.0})
    asked = f'placement_group([{one}, {one}], strategy="STRICT_SPREAD")'
    assert capsys.readouterr().out == f"{asked}: sh <<< $'cd /c && exec /py -m paceline agent\\n'\n"


@pytest.mark.usefixtures("with_a_script")
def test_spark_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--dry-run", "--python=/py", "--cwd=/c", "--env=KEY=secret", "--engine=--executor-memory 8g"]
    assert main(["launch", "spark", "-N", "3", "--master=yarn", "--workers-per-host=4", *given, "train.py"]) == 0
    conf = {
        "spark.app.name": "paceline",
        "spark.executor.instances": "3",
        "spark.executor.cores": "4",
        "spark.task.cpus": "4",
        "spark.cores.max": "12",
        "spark.dynamicAllocation.enabled": "false",
        "spark.stage.maxConsecutiveAttempts": "1",
        "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
        "spark.scheduler.barrier.maxConcurrentTasksCheck.maxFailures": "1000000",
    }
    words = " ".join(f"--conf {name}={value}" for name, value in conf.items())
    assert capsys.readouterr().out == (
        f"spark-submit --master yarn {words} --executor-memory 8g: 3 barrier tasks: "
        "sh <<< $'cd /c && exec /py -m paceline agent\\n'\n"
    )


def test_spark_driver_refuses_tasks_without_its_secret() -> None:
    """Neither who does not know it, nor a task that nobody waits for, gets anything out of Spark's driver."""
    with closing(Gate("127.0.0.1", "127.0.0.1")) as gate:
        with pytest.raises(AuthenticationError):
            Client(gate.address, authkey=b"another")
        with Client(gate.address, authkey=gate.key) as pipe:
            pipe.send_bytes(b"0.unknown 0")
            with pytest.raises(EOFError):
                pipe.recv_bytes()


def test_spark_without_pyspark(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "without" / "pyspark").mkdir(parents=True)
    absent = "raise ModuleNotFoundError(\"No module named 'pyspark'\", name='pyspark')\n"
    (tmp_path / "without" / "pyspark" / "__init__.py").write_text(absent)
    command = ("launch", "spark", "-N", "2", "train.py")
    done = paceline(*command, cwd=tmp_path, code=2, PYTHONPATH=str(tmp_path / "without"))
    assert done.stderr == f"paceline: pyspark is not installed for {sys.executable}; pip install 'paceline[spark]'\n"


@slow
def test_spark_without_a_master_or_java(tmp_path: Path) -> None:
    """Nothing listens, no Java."""
    if not find_spec("pyspark"):
        lacking(NO_SPARK)
    (tmp_path / "train.py").touch()
    cure = "use --master spark://HOST:7077, yarn or local-cluster[2,1,1024]; Spark also needs Java"
    master = f"spark://127.0.0.1:{free_port()}"
    done = paceline("launch", "spark", "-N", "2", "--master", master, "train.py", cwd=tmp_path, code=2)
    assert done.stderr == f"paceline: Spark at {master} cannot be reached ([Errno 111] Connection refused); {cure}\n"
    (tmp_path / "bin").mkdir()
    for tool in ("sh", "bash", "dirname", "env", "cat", "ps", "uname"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool) or "")
    command = ("launch", "spark", "-N", "2", "--master", "local[2]", "train.py")
    done = paceline(*command, cwd=tmp_path, code=2, PATH=str(tmp_path / "bin"), JAVA_HOME="")
    assert done.stderr.startswith("paceline: Spark at local[2] cannot be reached ([JAVA_GATEWAY_EXITED] ")
    assert done.stderr.endswith(f"; JAVA_HOME is not set); {cure}\n")


@slow
@real
def test_spark_without_executors_names_them(tmp_path: Path) -> None:
    needs_spark()
    (tmp_path / "train.py").touch()
    with in_short_folder(Application, "spark-") as application, closing(OnSpark(application, tmp_path)) as on:
        error = on.ended(on.start("--nodes=3", "--wait=0", "train.py"))
    assert on.started[0].returncode == 2, error
    what = r"paceline: Spark has not placed the hosts within 0 s: [0-2] of 3 tasks running, 2 executors available"
    assert re.fullmatch(rf"{what}; increase --wait, request less, or check the web page of Spark\n", error)


def test_ray_without_the_package_or_a_cluster(tmp_path: Path) -> None:
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
        f"paceline: Ray at {command[3]} cannot be reached ([Errno 111] Connection "
        "refused); start it with `ray start --head`, "
        "or pass --address HOST:PORT of a cluster that has a node here\n"
    )


# A program that has a session, as a notebook: a table goes to Parquet, its rows are trained on, and Ctrl-C ends a cell.
CELLS = """
import json, os, sys, time
import paceline
where, folder = sys.argv[1:]
if where == "ray":
    import ray
    ray.init(address=folder, log_to_driver=False)
else:
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as F
    session = SparkSession.builder.getOrCreate()
    table = session.range(96).select(F.array(F.sin("id"), F.cos("id")).alias("x"), F.sin(2 * F.col("id")).alias("y"))
    table.repartition(3).write.option("parquet.block.size", 1024).parquet("rows")
def train(epochs, pause=0):
    import torch
    from paceline.data import ParquetRows
    rows = ParquetRows("rows")
    torch.manual_seed(0)
    trainer = paceline.Trainer(
        model=lambda: torch.nn.Linear(2, 1).double(), optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        forward=lambda model, batch: model(batch["x"])[:, 0], global_batch=32, plan="exact",
        loss=lambda output, batch: torch.nn.functional.mse_loss(output, batch["y"]))
    for report in trainer.steps(rows, epochs=epochs, order=rows.order):
        print("step", report.step, flush=True)
        time.sleep(pause)
    return [value.tolist() for value in trainer.model.state_dict().values()]
found = paceline.launch(train, 2, workers=2, where=where, run_dir="run")
print("values", json.dumps(found), flush=True)
print("alone", json.dumps(paceline.launch(train, 2)), flush=True)
try:
    paceline.launch(train, 1000, 0.1, workers=2, where=where, run_dir="long")
except KeyboardInterrupt:
    print("interrupted", flush=True)
if where == "spark":
    print("goes on", session.range(10).count(), flush=True)
else:
    print("goes on", ray.get(ray.remote(lambda: 10).remote()), flush=True)
"""


@slow
@real
def test_launch_function_on_ray_and_spark_sessions(on: Launched, tmp_path: Path) -> None:
    (tmp_path / "cells.py").write_text(CELLS)
    if on.engine == "ray":
        rows = np.arange(96)
        columns = {"x": list(np.stack([np.sin(rows), np.cos(rows)], 1)), "y": np.sin(2 * rows)}
        (tmp_path / "rows").mkdir()
        parquet.write_table(pa.table(columns), tmp_path / "rows" / "a.parquet", row_group_size=20)
    process = on.program("cells.py")
    assert process.stdout is not None
    said = list[str]()
    while not said or said[-1] != "step 3\n" or "alone" not in "".join(said):
        said.append(process.stdout.readline())
        assert said[-1], "".join(said) + process.communicate()[1]
    told = on.told()
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=200)
    assert process.returncode == 0, error
    assert out.endswith("interrupted\ngoes on 10\n"), out
    values, alone = (next(line for line in said if line.startswith(word)) for word in ("values", "alone"))
    assert values.removeprefix("values ") == alone.removeprefix("alone ")
    assert said.index(values) == 6, said
    assert [event["workers"] for event in journal(tmp_path / "run", "generation")][-1:] == [[0, 1]]
    assert list((tmp_path / "long" / "checkpoints").glob("step-*/manifest.json"))
    assert (tmp_path / "long" / "token").read_text().strip() not in told + error
    assert f"continue with: paceline.launch(train, ..., where='{on.engine}', run_dir='long')\n" in error
    until(lambda: not [one for one in processes() if on.ours(one)] and not on.left(), 100)
