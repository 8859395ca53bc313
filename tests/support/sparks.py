"""Spark applications on this machine, each with a cluster of its own that lives in its driver."""

from __future__ import annotations

import json
import shlex
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from urllib.request import urlopen

import psutil
from clusters import processes
from launching import free_port


class Application:
    """What a test asks for, with a folder of its own: two executors of a core in small processes, and an event log."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        home = folder / "home"  # where executors leave what they have said
        self.environment = {"SPARK_LOCAL_IP": "127.0.0.1", "SPARK_LOCAL_DIRS": str(folder / "local")}
        self.environment["SPARK_HOME"] = str(home)
        (folder / "log").mkdir()
        home.mkdir()
        found = find_spec("pyspark")
        assert found is not None
        for name in ("bin", "jars", "python"):
            (home / name).symlink_to(Path(found.origin or "").parent / name)
        java = f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Djava.io.tmpdir={folder}"
        conf = {
            "spark.executor.extraJavaOptions": java,
            "spark.executor.memory": "512m",
            "spark.driver.host": "127.0.0.1",
            "spark.ui.port": str(self.port),
            "spark.eventLog.enabled": "true",
            "spark.eventLog.compress": "false",
            "spark.eventLog.dir": str(folder / "log"),
        }
        words = [word for name, value in conf.items() for word in ("--conf", f"{name}={value}")]
        self.options = shlex.join(["--driver-java-options", java, *words])
        self.environment["PYSPARK_SUBMIT_ARGS"] = f"--master local-cluster[2,1,1024] {self.options} pyspark-shell"
        self.words = ["--master", "local-cluster[2,1,1024]", f"--engine={self.options}"]

    def processes(self) -> list[psutil.Process]:
        """Java's, of this application."""
        return [one for one in processes() if f"-Djava.io.tmpdir={self.folder}" in (one.info["cmdline"] or ())]

    def executor(self, first: bool) -> psutil.Process:
        """Where a run's first host is, or another one: the first one has the coordinator."""
        for one in self.processes():
            below = one.children(True) if "CoarseGrainedExecutorBackend" in " ".join(one.info["cmdline"]) else []
            if below and first == any("paceline.team.coordinator_server" in other.cmdline() for other in below):
                return one
        raise AssertionError("there is no such executor")

    def pages(self) -> str:
        """What its own page tells of it."""
        base = f"http://127.0.0.1:{self.port}/api/v1/applications"
        with urlopen(base, timeout=60) as answer:
            (own,) = json.load(answer)
        told = []
        for page in ("environment", "jobs", "stages", "allexecutors"):
            with urlopen(f"{base}/{own['id']}/{page}", timeout=60) as answer:
                told.append(answer.read().decode())
        return "".join(told)

    def close(self) -> None:
        for one in self.processes():
            with suppress(psutil.NoSuchProcess):
                one.kill()
