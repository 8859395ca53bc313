"""A Ray cluster on this machine: raylets with an address in common, each in processes that end with it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from agents import until
from launching import free_port
from warm import environment

RAY = environment(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0", CUDA_VISIBLE_DEVICES=None, PYTHONPATH=None)
# What Ray itself has written down of a cluster, which is what its dashboard shows.
LOOK = """
import json, sys, ray
from ray._private.state import actors, state
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
own = ray.get_runtime_context().get_job_id()
alive = [key for key, actor in actors().items() if actor["State"] != "DEAD" and actor["JobID"] != own]
groups = [key for key, group in ray.util.placement_group_table().items() if group["state"] != "REMOVED"]
table = state._connect_and_get_accessor()
kinds = ("job", "node", "placement_group", "worker")
told = [getattr(table, f"get_{kind}_table")() for kind in kinds]
told += [table.get_actor_table(None, None), table.get_task_events()]
nodes = sum(node["Alive"] for node in ray.nodes())
print(json.dumps({"actors": alive, "groups": groups, "nodes": nodes, "told": str(told)}))
"""


class Cluster:
    """A head without a CPU, and two nodes with one each."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.address = folder, f"127.0.0.1:{free_port()}"
        self.nodes: list[subprocess.Popen[bytes]] = []
        port = self.address.rpartition(":")[2]
        self.start("--num-cpus=0", "--head", "--port", port, "--temp-dir", str(folder / "t"))
        self.add()
        self.add()

    def add(self) -> None:
        self.start("--num-cpus=1", "--address", self.address)

    def start(self, *words: str) -> None:
        log = self.folder / f"node-{free_port()}.log"
        some = ["--object-store-memory=100000000", "--min-worker-port=0", "--max-worker-port=0"]
        some += [f"--ray-client-server-port={free_port()}", "--include-dashboard=false"] if "--head" in words else []
        some += ["--node-ip-address=127.0.0.1", "--dashboard-agent-listen-port=0", "--disable-usage-stats", "--block"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *words, *some]
        with log.open("wb") as file:
            process = subprocess.Popen(command, env=RAY, cwd=self.folder, stdout=file, stderr=file)
        self.nodes.append(process)
        until(lambda: "Ray runtime started" in log.read_text() or process.poll() is not None)
        assert process.poll() is None, log.read_text()

    def actor(self, first: bool) -> tuple[psutil.Process, psutil.Process]:
        """The raylet and the actor of a run's first host, or of another one: the first one's has the coordinator."""
        for node in self.nodes[1:]:
            below = psutil.Process(node.pid).children() if node.poll() is None else []
            for raylet in (one for one in below if one.name() == "raylet"):
                for actor in (one for one in raylet.children() if "ray::Shell" in " ".join(one.cmdline())):
                    if first == any(
                        "paceline.team.coordinator_server" in one.cmdline() for one in actor.children(True)
                    ):
                        return raylet, actor
        raise AssertionError("there is no such actor")

    def look(self) -> dict[str, Any]:
        command = [sys.executable, "-c", LOOK, self.address]
        done = subprocess.run(command, env=RAY, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    def end_added_nodes(self) -> None:
        """Leaves the head and two nodes, as at the beginning."""
        added = [node for node in self.nodes if node.poll() is None][3:]
        for node in added:
            node.send_signal(signal.SIGTERM)
            node.wait(60)
        if added:
            until(lambda: self.look()["nodes"] == 3, 100)

    def close(self) -> None:
        left = [one for node in self.nodes if node.poll() is None for one in psutil.Process(node.pid).children(True)]
        for node in reversed(self.nodes):
            node.send_signal(signal.SIGTERM)
            node.wait(60)
        for one in left:  # what a killed raylet has left behind, too
            with suppress(psutil.NoSuchProcess):
                one.kill()
