"""`paceline launch spark`: one agent on each of several Spark executors.

Spark itself runs in a process of its own, `spark_driver`, which keeps a barrier task that runs `sh` for each host.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import threading
from collections.abc import Mapping
from typing import Any

from paceline.base.console import shown
from paceline.base.environment import variable, worker_environment
from paceline.errors import UsageError
from paceline.launch.engines.driver_engine import DriverEngine, start_driver
from paceline.launch.engines.engine import split_options

# Each host is a stage of its own, because Spark ends all tasks of a stage when it loses one of them. Spark does not
# repeat a stage, and the number of executors stays the number of hosts: we repeat the stage, and see its result.
SPARK_SETTINGS = {
    "spark.dynamicAllocation.enabled": "false",
    "spark.stage.maxConsecutiveAttempts": "1",
    "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
    "spark.scheduler.barrier.maxConcurrentTasksCheck.maxFailures": "1000000",
}


class Spark(DriverEngine):
    """Barrier tasks, one per host, as `asked` describes them (see `driver_request`); in a Spark `context`, if given."""

    name, title, host_prefix = "spark", "Spark", "task"

    def __init__(self, asked: Mapping[str, Any], context: Any = None) -> None:
        if context is not None:
            super().__init__([], *_start_driver_thread(asked, context))
            return
        submit = shlex.join([*asked["submit"], "pyspark-shell"])
        python = variable("PYSPARK_PYTHON") or asked["python"]
        env = worker_environment(PYSPARK_SUBMIT_ARGS=submit, PYSPARK_PYTHON=python)
        super().__init__([], *start_driver("spark_driver", {**asked, "submit": None}, env))


def _start_driver_thread(asked: Mapping[str, Any], context: Any) -> tuple[Any, Any, Any]:
    """Starts the driver as a thread of this process. Returns what `start_driver` returns."""
    from paceline.launch.engines.spark_driver import serve_tasks

    input_reader, input_writer = os.pipe()
    output_reader, output_writer = os.pipe()

    def work() -> None:
        with open(output_writer, "w") as out, open(input_reader):
            serve_tasks(context, asked, input_reader, lambda **what: print(json.dumps(what), file=out, flush=True))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return open(input_writer, "wb"), open(output_reader, "rb"), thread.join


def driver_request(given: Mapping[str, Any], python: str) -> dict[str, Any]:
    """The request to the driver; ``submit``: options of spark-submit. UsageError: an option is missing or wrong."""
    nodes, master = given["nodes"], given["master"]
    if nodes is None:
        raise UsageError("the number of nodes is missing", "pass -N NODES")
    if master is not None and not re.match(r"spark://.|k8s://.|yarn$|local\b", master):
        cure = "use spark://HOST:7077, yarn, k8s://https://HOST:6443 or local-cluster[2,1,1024]"
        raise UsageError(f"--master {shown(master)} is not a Spark master", cure)
    cores = str(given["workers_per_host"] or 1)
    conf = {
        "spark.app.name": "paceline",
        "spark.executor.instances": str(nodes),
        "spark.executor.cores": cores,
        "spark.task.cpus": cores,
        "spark.cores.max": str(nodes * int(cores)),
        **SPARK_SETTINGS,
    }
    words = [] if master is None else ["--master", master]
    words += [word for name, value in conf.items() for word in ("--conf", f"{name}={value}")]
    words += split_options(given["engine"])  # of two settings with one name, the later one wins
    return {"nodes": nodes, "master": master, "submit": words, "wait": given["wait"], "python": python}
