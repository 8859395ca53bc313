"""`paceline.launch(function)`: runs a Python function on several workers.

The function travels by cloudpickle to an agent's standard input, here or over an engine, and what it returns comes back
from its standard output. This is the one place where anything is unpickled, and it is nobody's but the caller's own. No
torch.
"""

from __future__ import annotations

import inspect
import os
import pickle
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from paceline.base.console import say
from paceline.base.environment import read_call, read_world
from paceline.base.text import plural
from paceline.errors import LaunchError, UsageError, a, first_line
from paceline.launch.engines.engine import Engine, Host
from paceline.launch.engines.launcher import HostJob, Launcher

T = TypeVar("T")
# What pickle raises for values that it cannot pack, and their own methods for it.
UNPICKLABLE = (TypeError, ValueError, AttributeError, RuntimeError, pickle.PickleError)
LARGE = 100_000_000  # bytes that a function may carry without a word
WAIT = 300  # seconds for an engine to place all hosts, and then for these to answer


def launch(
    function: Callable[..., T],
    *arguments: Any,
    workers: int = 1,
    plan: str | None = None,
    run_dir: str | None = None,
    where: str = "local",
    hosts: int | None = None,
) -> T:
    """Calls ``function(*arguments)`` on workers of this machine, as `paceline run` starts them, and returns what that
    of worker 0 returns. `run_dir`: the same one again resumes (default: a new one under ``runs/``).

    `where`: ``"local"``, or ``"ray"`` or ``"spark"``: nodes of the cluster of Ray that this process has come to, or
    executors of its session of Spark; `hosts`: on how many of them (default: one for each worker).

    Output goes to our standard streams. Ctrl-C stops the workers after a step and with a checkpoint, twice at once, and
    is raised then. LaunchError: they failed, and said why, or have no place. UsageError: the function cannot be sent.
    """
    name = getattr(function, "__name__", type(function).__name__)
    if where not in ("local", "ray", "spark"):
        raise UsageError(f"where={where!r} is no place for workers", 'say "local", "ray" or "spark"')
    hosts = hosts or (workers if where != "local" else 1)
    if workers % hosts or (where == "local" and hosts > 1):
        cure = "give each as many, on this machine all"
        raise UsageError(f"{plural(workers, 'worker')} cannot be on {plural(hosts, 'host')}", cure)
    run_dir = run_dir or f"runs/{name.strip('<>')}-{time.strftime('%Y%m%d-%H%M%S')}"
    call = _packed(function, arguments, name)
    elsewhere = f", where={where!r}" if where != "local" else ""
    again = f"paceline.launch({name}, ...{elsewhere}, run_dir={run_dir!r})"
    options: dict[str, Any] = {"script": "", "plan": plan, "run_dir": run_dir, "again": again, "begin": workers}
    options |= {"environment": {"PYTHONPATH": _path()}}
    each = workers // hosts
    asked = {"nodes": hosts, "workers": each, "hosts": [], "resources": {}, "wait": WAIT}
    engine = _LocalEngine([Host("here")]) if where == "local" else _ray(asked) if where == "ray" else _spark(asked)
    try:
        job = HostJob(options, sys.executable, os.getcwd(), workers=each, call=call, wait=WAIT if hosts > 1 else None)
        launcher = Launcher(engine, job)
        code = launcher.run()
    finally:
        engine.close()
    if code == 130:
        raise KeyboardInterrupt
    if code:
        raise LaunchError(f"{name} ended with exit code {code}", f"see above, or {run_dir}/logs")
    if not launcher.value:
        what = f"{name} ended the process of worker 0 with exit code 0, and so returned nothing"
        raise LaunchError(what, f"return from it instead of sys.exit() or os._exit(); its output is in {run_dir}/logs")
    try:
        return pickle.loads(launcher.value)  # type: ignore[no-any-return]
    except (*UNPICKLABLE, ImportError, LookupError, EOFError) as error:
        what = f"what {name} returned cannot be made again here ({type(error).__name__}: {first_line(error)})"
        cure = f"return numbers, text or tensors of the CPU; what it saved is in {run_dir}"
        raise LaunchError(what, cure) from error


class _LocalEngine(Engine):
    """Starts the agent on this machine."""

    name, listen = "here", "127.0.0.1"

    def command(self, host: Host) -> list[str]:
        """Runs ``sh`` with the import path of this process."""
        return ["env", f"PYTHONPATH={_path()}", "sh"]


def _ray(asked: dict[str, Any]) -> Engine:
    from paceline.launch.engines.ray import Ray

    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        raise UsageError("there is no Ray here", "call ray.init(address=...) before")
    return Ray({**asked, "address": ray.get_runtime_context().gcs_address})


def _spark(asked: dict[str, Any]) -> Engine:
    from paceline.launch.engines.spark import Spark

    sql = sys.modules.get("pyspark.sql")
    session = sql and sql.SparkSession.getActiveSession()
    if not session:
        raise UsageError("there is no session of Spark here", "make one before, by SparkSession.builder.getOrCreate()")
    return Spark(asked, session.sparkContext)


def _path() -> str:
    return os.pathsep.join(filter(None, [os.getcwd(), *sys.path]))


def _packed(function: Callable[..., Any], arguments: tuple[Any, ...], name: str) -> bytes:
    try:
        import cloudpickle
    except ModuleNotFoundError as error:
        raise UsageError("paceline.launch needs cloudpickle", "pip install 'paceline[notebook]'") from error
    try:
        packed: bytes = cloudpickle.dumps((function, arguments))
    except UNPICKLABLE as error:
        cure = "make inside of the function what cannot travel: files, locks, a Trainer, a loader"
        raise UsageError(f"{name} cannot be sent to workers ({first_line(error)})", cure) from error
    if len(packed) > LARGE:
        carried: dict[str, Any] = {f"argument {at}": value for at, value in enumerate(arguments)}
        with suppress(TypeError):  # it is no function of Python's, as a functools.partial
            seen = inspect.getclosurevars(inspect.unwrap(function))
            carried = {**seen.globals, **seen.nonlocals, **carried}
        sizes = {}
        for part, value in carried.items():
            with suppress(*UNPICKLABLE):  # it does not travel: the function is of a module, which has it there
                sizes[part] = len(cloudpickle.dumps(value))
        largest = max(sizes, key=lambda name: sizes[name], default="")
        what = f"{name} carries {len(packed) / 1e6:,.0f} MB to each worker"
        which = f", of which {largest} has {sizes[largest] / 1e6:,.0f}" if largest else ""
        say(f"note: {what}{which}; load it inside of the function")
    return packed


def _called(call: str, result: str) -> None:
    """What a worker does."""
    with open(call, "rb") as file:
        function, arguments = pickle.load(file)
    value = function(*arguments)
    if read_world().rank == 0:
        import cloudpickle

        try:
            packed = cloudpickle.dumps(value)
        except UNPICKLABLE as error:
            name = getattr(function, "__name__", type(function).__name__)
            what = f"{name} returned {a(type(value).__name__)}, which cannot be sent back ({first_line(error)})"
            raise UsageError(what, "return numbers, text or tensors, and keep what cannot travel inside") from error
        with open(result, "wb") as file:
            file.write(packed)


if __name__ == "__main__":
    _called(*read_call())
