"""`paceline.launch(function)`: runs a Python function on several workers.

The function is pickled with cloudpickle and sent to the standard input of an agent, on this host or over an engine. The
return value comes back from its standard output. Only here are values unpickled, and only values of the caller. No
torch.
"""

from __future__ import annotations

import inspect
import os
import pickle
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

from paceline.base.console import say
from paceline.base.environment import read_call, read_world
from paceline.base.exit_codes import INTERRUPTED
from paceline.base.text import plural
from paceline.errors import LaunchError, UsageError, a, first_line
from paceline.launch.engines.engine import Engine, Host
from paceline.launch.engines.launcher import HostJob, Launcher
from paceline.observe.notebook import JournalFollower, in_notebook

T = TypeVar("T")
# Exceptions of pickle, and of the values' own pickling methods, for values that cannot be pickled.
UNPICKLABLE = (TypeError, ValueError, AttributeError, RuntimeError, pickle.PickleError)
LARGE = 100_000_000  # bytes of a pickled function above which a note is printed
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
    """Calls ``function(*arguments)`` on workers, and returns what worker 0 returns.

    It does what `paceline run` does, from a notebook or a script. Output goes to the standard streams of this process.
    Ctrl-C stops the workers with a checkpoint, a second one at once.

    Args:
        function: What each worker calls; it makes the `Trainer`.
        arguments: Its arguments; they and the function travel to the workers by value.
        workers: The number of workers.
        plan: How the work is spread, as with `paceline run --plan`.
        run_dir: The run folder; the same folder resumes its run (default: a new one in ``runs/``).
        where: ``"local"`` (this machine), ``"ray"`` (nodes of the Ray cluster that this process is connected to) or
            ``"spark"`` (executors of its Spark session).
        hosts: The number of nodes or executors (default: one per worker).

    Returns:
        The value that worker 0 returns.

    Raises:
        LaunchError: The workers failed, or there is no place for them.
        UsageError: The function cannot be sent.
        KeyboardInterrupt: Ctrl-C was pressed.

    Example:
        >>> losses = paceline.launch(train, 3e-4, workers=2, plan="local=8")
    """
    name = getattr(function, "__name__", type(function).__name__)
    if where not in ("local", "ray", "spark"):
        raise UsageError(f"where={where!r} is not supported", 'use "local", "ray" or "spark"')
    hosts = hosts or (workers if where != "local" else 1)
    if workers % hosts or (where == "local" and hosts > 1):
        cure = 'choose workers= as a multiple of hosts=, which must be 1 with where="local"'
        raise UsageError(f"{plural(workers, 'worker')} cannot be divided among {plural(hosts, 'host')}", cure)
    run_dir = run_dir or f"runs/{name.strip('<>')}-{time.strftime('%Y%m%d-%H%M%S')}"
    call = _packed(function, arguments, name)
    elsewhere = f", where={where!r}" if where != "local" else ""
    again = f"paceline.launch({name}, ...{elsewhere}, run_dir={run_dir!r})"
    options: dict[str, Any] = {"script": "", "plan": plan, "run_dir": run_dir, "again": again, "begin": workers}
    options |= {"environment": {"PYTHONPATH": _path()}}
    if where == "local" and in_notebook():  # which shows it itself
        options["progress"] = "none"
    each = workers // hosts
    asked = {"nodes": hosts, "workers": each, "hosts": [], "resources": {}, "wait": WAIT}
    engine = _LocalEngine([Host("here")]) if where == "local" else _ray(asked) if where == "ray" else _spark(asked)
    try:
        job = HostJob(options, sys.executable, os.getcwd(), workers=each, call=call, wait=WAIT if hosts > 1 else None)
        launcher = Launcher(engine, job)
        with _shown(Path(run_dir)) if where == "local" else nullcontext():
            code = launcher.run()
    finally:
        engine.close()
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code:
        raise LaunchError(f"{name} ended with exit code {code}", f"see the output above, or {run_dir}/logs")
    if not launcher.value:
        what = f"{name} ended the process of worker 0 with exit code 0 and returned no value"
        raise LaunchError(what, f"return from it instead of calling sys.exit() or os._exit(); see {run_dir}/logs")
    try:
        return pickle.loads(launcher.value)  # type: ignore[no-any-return]
    except (*UNPICKLABLE, ImportError, LookupError, EOFError) as error:
        what = f"the value that {name} returned cannot be unpickled here ({type(error).__name__}: {first_line(error)})"
        cure = f"return numbers, text or CPU tensors; files that it saved are in {run_dir}"
        raise LaunchError(what, cure) from error


def _shown(folder: Path) -> AbstractContextManager[object]:
    """Shows the progress in the output of a notebook's cell, if this is a notebook."""
    if not in_notebook():
        return nullcontext()
    from paceline.observe.progress import Progress

    return JournalFollower(folder, Progress())


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
        raise UsageError('where="ray" needs a process that is connected to Ray', "call ray.init(address=...) first")
    return Ray({**asked, "address": ray.get_runtime_context().gcs_address})


def _spark(asked: dict[str, Any]) -> Engine:
    from paceline.launch.engines.spark import Spark

    sql = sys.modules.get("pyspark.sql")
    session = sql and sql.SparkSession.getActiveSession()
    if not session:
        raise UsageError('where="spark" needs a Spark session', "call SparkSession.builder.getOrCreate() first")
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
        cure = "create objects that cannot be pickled inside the function: files, locks, a Trainer, a loader"
        raise UsageError(f"{name} cannot be sent to workers ({first_line(error)})", cure) from error
    if len(packed) > LARGE:
        carried: dict[str, Any] = {f"argument {at}": value for at, value in enumerate(arguments)}
        with suppress(TypeError):  # not a Python function, for example a functools.partial
            seen = inspect.getclosurevars(inspect.unwrap(function))
            carried = {**seen.globals, **seen.nonlocals, **carried}
        sizes = {}
        for part, value in carried.items():
            with suppress(*UNPICKLABLE):  # it is not sent: the worker imports the module of the function, which has it
                sizes[part] = len(cloudpickle.dumps(value))
        largest = max(sizes, key=lambda name: sizes[name], default="")
        what = f"{name} carries {len(packed) / 1e6:,.0f} MB to each worker"
        which = f", {sizes[largest] / 1e6:,.0f} MB of it in {largest}" if largest else ""
        say(f"note: {what}{which}; load large data inside the function instead")
    return packed


def _called(call: str, result: str) -> None:
    """Calls the pickled function in a worker; worker 0 writes its return value to the file `result`."""
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
            raise UsageError(
                what, "return numbers, text or tensors instead of objects that cannot be pickled"
            ) from error
        with open(result, "wb") as file:
            file.write(packed)


if __name__ == "__main__":
    _called(*read_call())
