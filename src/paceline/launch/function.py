"""`paceline.launch(function, workers=4)`: a function on several workers here, from a program or a notebook.

The function travels by cloudpickle, through memory of ours that only processes of the same user can open; so does what
it returns. This is the one place where anything is unpickled, and it is nobody's but the caller's own. No torch.
"""

from __future__ import annotations

import inspect
import json
import os
import pickle
import secrets
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from paceline.errors import LaunchError, UsageError, first_line
from paceline.launch.engines.hosted import MARK
from paceline.world import read_world, worker_environment

T = TypeVar("T")
LARGE = 100_000_000  # bytes that a function may carry without a word
BEAT = 0.5  # seconds between two bytes that say that we are there
CHUNK = 1 << 16


def launch(
    function: Callable[..., T], *arguments: Any, workers: int = 1, plan: str | None = None, run_dir: str | None = None
) -> T:
    """Calls ``function(*arguments)`` on workers of this machine, as `paceline run` starts them, and returns what that
    of worker 0 returns. `run_dir`: the same one again resumes (default: a new one under ``runs/``).

    Output goes to our standard streams. Ctrl-C stops the workers after a step and with a checkpoint, twice at once, and
    is raised then. LaunchError: they failed, and said why. UsageError: the function cannot be sent.
    """
    name = getattr(function, "__name__", type(function).__name__)
    run_dir = run_dir or f"runs/{name.strip('<>')}-{time.strftime('%Y%m%d-%H%M%S')}"
    with _memory(_packed(function, arguments, name)) as call, _memory(b"") as result:
        places = [f"/proc/{os.getpid()}/fd/{memory.fileno()}" for memory in (call, result)]
        options = {"script": __file__, "module": __name__, "arguments": places, "plan": plan, "run_dir": run_dir}
        options["again"] = f"paceline.launch({name}, ..., run_dir={run_dir!r})"
        code = _follow({"options": options, "workers": workers, "token": secrets.token_hex(32), "files": 0})
        if code == 130:
            raise KeyboardInterrupt
        result.seek(0)
        value = result.read()
        if code or not value:
            how = f"ended with exit code {code}" if code else "did not return on worker 0"
            raise LaunchError(f"{name} {how}", f"see above, or {run_dir}/logs")
        return pickle.loads(value)  # type: ignore[no-any-return]


def _memory(data: bytes) -> Any:
    memory = os.fdopen(os.memfd_create("paceline"), "w+b", buffering=0)
    view = memoryview(data)
    while view:
        view = view[memory.write(view) :]
    return memory


def _packed(function: Callable[..., Any], arguments: tuple[Any, ...], name: str) -> bytes:
    try:
        import cloudpickle
    except ModuleNotFoundError as error:
        raise UsageError("paceline.launch needs cloudpickle", "pip install 'paceline[notebook]'") from error
    try:
        packed: bytes = cloudpickle.dumps((function, arguments))
    except (TypeError, pickle.PicklingError, RuntimeError, AttributeError) as error:
        cure = "make inside of the function what cannot travel: files, locks, a Trainer, a loader"
        raise UsageError(f"{name} cannot be sent to workers ({first_line(error)})", cure) from error
    if len(packed) > LARGE:
        seen = inspect.getclosurevars(inspect.unwrap(function))
        carried = {**seen.globals, **seen.nonlocals, **{f"argument {at}": value for at, value in enumerate(arguments)}}
        sizes = {name: len(cloudpickle.dumps(value)) for name, value in carried.items()}
        largest = max(sizes, key=lambda name: sizes[name], default="")
        what = f"{name} carries {len(packed) / 1e6:,.0f} MB to each worker"
        which = f", of which {largest} has {sizes[largest] / 1e6:,.0f}" if largest else ""
        print(f"note: {what}{which}; load it inside of the function", file=sys.stderr)
    return packed


@contextmanager
def _interrupts() -> Iterator[int]:
    """What becomes readable with each Ctrl-C, none of which breaks in anywhere."""
    comes, tell = os.pipe()
    here = threading.current_thread() is threading.main_thread()  # elsewhere none comes
    here &= signal.getsignal(signal.SIGINT) != signal.SIG_IGN
    before = signal.signal(signal.SIGINT, lambda *_: os.write(tell, b"!")) if here else None
    try:
        yield comes
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)
        os.close(comes)
        os.close(tell)


def _follow(job: dict[str, Any]) -> int:
    """Runs an agent, in a process of its own, with all that it prints; its exit code."""
    path = os.pathsep.join(filter(None, [os.getcwd(), *sys.path]))
    agent = subprocess.Popen(
        [sys.executable, "-m", "paceline", "agent"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=worker_environment(None, PYTHONPATH=path),
        start_new_session=True,  # a terminal's Ctrl-C is ours to hand on
    )
    assert agent.stdin is not None
    order = {"name": "", "listen": "127.0.0.1", "towards": None, "join": None, "detach": False}
    said = "".join(json.dumps(line) + "\n" for line in (job, order)).encode()
    unread = {agent.stdout: b"", agent.stderr: b""}
    with agent, _interrupts() as interrupts, selectors.DefaultSelector() as selector:
        for pipe in (interrupts, *unread):
            selector.register(pipe, selectors.EVENT_READ)  # type: ignore[arg-type]
        while len(selector.get_map()) > 1:
            with suppress(BrokenPipeError):  # it has ended; what it printed is still to be read
                agent.stdin.write(said)
                agent.stdin.flush()
            said = b"\0"
            for key, _ in selector.select(BEAT):
                if key.fileobj == interrupts:
                    said = bytes([signal.SIGINT] * len(os.read(interrupts, CHUNK)))
                    continue
                data = os.read(key.fd, CHUNK)
                *lines, unread[key.fileobj] = (unread[key.fileobj] + data).split(b"\n")  # type: ignore[index]
                if not data:
                    selector.unregister(key.fileobj)
                out = sys.stdout if key.fileobj is agent.stdout else sys.stderr
                shown = [line for line in lines if not line.startswith(MARK)]
                out.write("".join(f"{line.decode(errors='replace')}\n" for line in shown))
                out.flush()
        with suppress(BrokenPipeError):
            agent.stdin.close()
        return agent.wait()


def _called(call: str, result: str) -> None:
    """What a worker does."""
    with open(call, "rb") as file:
        function, arguments = pickle.load(file)
    value = function(*arguments)
    if read_world().rank == 0:
        import cloudpickle

        with open(result, "wb") as file:
            cloudpickle.dump(value, file)


if __name__ == "__main__":
    _called(*sys.argv[1:])
