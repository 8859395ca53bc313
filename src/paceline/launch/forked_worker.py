"""The process that has imported torch and forks workers (`os.fork`), and what each of them then runs.

Its program is `PROGRAM`, followed by the descriptor of its socket to the agent and, to be found by, the script with its
arguments. A worker is forked twice, so that the agent, which adopts orphans, becomes its parent. What it then runs goes
the way that ``python SCRIPT`` goes, to the end of the interpreter. No torch in what the agent imports of this file.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import signal
import socket
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import BuiltinImporter, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from paceline.base.console import say
from paceline.base.environment import World, assume, worker_environment
from paceline.base.heartbeat import HEARTBEAT
from paceline.comm.autoload import register
from paceline.launch.processes import die_with, name_process

# Imports must find neither files in the folder in which the agent was started nor files next to this one.
PROGRAM = (
    "import sys; sys.path[0] or sys.path.pop(0); bare = {*sys.modules}; "
    "from paceline.launch.forked_worker import main; main(bare)"
)
# Variables that libraries read only while they are loaded.
READ_ONCE = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "NPY_", "ONEDNN_", "DNNL_"),
    *("TORCH", "PYTORCH_", "ATEN_", "MALLOC_", "THP_"),
)
READ_WHEN_USED = ("PYTORCH_NVML_BASED_CUDA_CHECK",)  # in each call of torch.cuda.is_available(); Lightning sets it
# Variables that the interpreter, the C library and its loader read at the start of a process.
READ_FIRST = ("PYTHON", "GLIBC_TUNABLES", "LD_", "LC_", "LANG")
POOL = "OPENBLAS_NUM_THREADS"  # unless it is 1, numpy starts threads when it is imported
_LIMITS = (POOL, "GOTO_NUM_THREADS", "OMP_NUM_THREADS")  # OpenBLAS uses the first that is set
_IMPORTS = (
    "paceline.trainer",
    "paceline.comm.message_types",
    "torch._dynamo",
)  # the last one as soon as there is an optimizer
MODULE = "-m"  # the option before the name of a module
WARM = "paceline warm", ["paceline: a warm process"]  # its name, its command line
_MOST = 16  # descriptors in one message at most
GO = b"!"  # the message that a worker waits for at its gate before it runs the script
PID_BYTES = 32  # bytes of a message with a process id, at most
_LOADED: set[str] = set()  # the modules that are imported in every worker from the start


class _FailedError(BaseException):
    """The script failed and its traceback was printed: the interpreter exits with 1, or by the signal that it noted."""


@dataclass(frozen=True)
class InitialState:
    """State of the process at its start: the imported modules, and the variables that are read only then."""

    modules: set[str]
    environment: dict[str, str]


# ---- messages on the socket


def send(to: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Sends a message of any length and open descriptors."""
    body = os.memfd_create("paceline")
    try:
        with open(body, "wb", closefd=False) as file:
            file.write(json.dumps(message).encode())
        socket.send_fds(to, [b"."], [body, *descriptors])
    finally:
        os.close(body)


def receive(of: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Receives a message and its descriptors, which this process must close. None: the other end is closed."""
    try:
        mark, descriptors, _, _ = socket.recv_fds(of, 1, _MOST)
    except ConnectionResetError:
        return None
    if not mark:
        return None
    body, *others = descriptors
    with open(body, "rb") as file:
        file.seek(0)
        return json.loads(file.read()), others


def fixed(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that are read only at the start of a process."""
    return {n: v for n, v in environment.items() if (_is_read_once(n) or n.startswith(READ_FIRST)) and n != POOL}


def _is_read_once(name: str) -> bool:
    return name.startswith(READ_ONCE) and name not in READ_WHEN_USED


# ---- the warm process


def main(bare: set[str]) -> None:
    """Imports torch and serves the agent until its end; in a forked worker, returns when the script has ended. `bare`:
    the modules that every interpreter has imported at its start.
    """
    # Before the import of torch, which adds modules and variables.
    initial = InitialState(bare, fixed(worker_environment()))
    loaded: dict[str, int] = {}
    last = sys.modules["paceline"]._last
    atexit.unregister(last)  # it was registered by the import of this file, and would find its modules removed
    atexit.register(_keep_unchanged_modules, loaded)  # registered before all others, so that it runs after them
    atexit.register(last)
    load()
    loaded_names = sys.modules.keys() - bare
    loaded |= {name: len(vars(sys.modules[name])) for name in loaded_names if isinstance(sys.modules[name], ModuleType)}
    if _has_nanobind(loaded):
        atexit.register(lambda: vars(sys).update(paceline_quiet_end=_QuietEnd()))
    name_process(*WARM)
    serve(socket.socket(fileno=int(sys.argv[1])), initial)


def load() -> None:
    """Imports the modules that training scripts need, which is slow; all workers share the memory of these modules."""
    gc.disable()
    for name in _IMPORTS:
        import_module(name)
    _LOADED.update(sys.modules)  # here, because iterating in each worker writes to the pages, and so copies them
    gc.enable()
    gc.freeze()  # a garbage collection would write to each object, and so copy its page
    for finalizer in [*getattr(weakref.finalize, "_registry", ())]:  # unregistering torch's operators is slow
        finalizer.atexit = False


def _keep_unchanged_modules(loaded: Mapping[str, int]) -> None:
    """Keeps the interpreter from tearing down modules that the script has not changed since they were `loaded` here (by
    their number of names). A teardown writes to shared pages, which copies them, and takes longer than a short script.
    """
    for name, names in loaded.items():
        module = sys.modules.get(name)
        if module is not None and len(vars(module)) == names:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))
            del sys.modules[name]


def _has_nanobind(names: Iterable[str]) -> bool:
    """Whether one of these modules was built with nanobind, like the Triton of torch 2.15."""
    modules = [module for name in names if isinstance(module := sys.modules.get(name), ModuleType)]
    return any(type(value).__module__ == "nanobind" for module in modules for value in vars(module).values())


class _QuietEnd:
    """Turns stderr off when the interpreter frees this object with the contents of `sys`, which it frees last.

    After that, nanobind reports every remaining object as a leak, in 30 lines. Objects of modules that are not torn
    down remain on purpose. Finalizers of the script have run by then, so they could still write to stderr.
    """

    def __init__(self) -> None:
        self._nothing = os.open(os.devnull, os.O_WRONLY)

    def __del__(self, redirect: Callable[[int, int], object] = os.dup2) -> None:  # `os` may be removed by then
        redirect(self._nothing, 2)


def serve(agent: socket.socket, initial: InitialState) -> None:
    """Forks a worker for each request until the agent ends; in a forked worker, returns when the script has ended."""
    os.set_inheritable(agent.fileno(), False)
    send(agent, {"environment": initial.environment})
    while (request := receive(agent)) is not None:
        given, descriptors = request
        trouble = _why_unforkable(agent, descriptors) or _why_unfit(given, initial)
        reply: dict[str, Any] = {"trouble": trouble}
        if trouble is None:
            try:
                between = _fork()
            except OSError as error:
                reply = {"trouble": f"the warm process cannot fork ({error.strerror})"}
            else:
                if between:
                    agent.close()
                    become_worker({**given, "between": between, "descriptors": descriptors})
                    return
        for descriptor in descriptors:
            os.close(descriptor)
        send(agent, reply)


def _fork() -> int:
    """Forks twice. Returns 0 here, and in the worker the id of the process between, which ends at once, so that the
    agent adopts the worker. OSError: the fork failed.
    """
    between = os.fork()
    if between == 0:
        between = os.getpid()
        try:
            worker = os.fork()
        except OSError as error:
            os._exit(error.errno or 1)
        if worker == 0:
            return between
        os._exit(0)
    _, status = os.waitpid(between, 0)
    if code := os.waitstatus_to_exitcode(status):
        raise OSError(code, os.strerror(code) if code > 0 else "its child process was killed")
    return 0


# A thread of the allocator that pyarrow brings along; jemalloc takes care of it in each fork.
FORKS_WELL = "jemalloc_bg_thd"


def _why_unforkable(agent: socket.socket, descriptors: Sequence[int]) -> str | None:
    """Describes state that a worker must not inherit; None if there is none. It is checked before each fork."""
    tasks = [task for task in os.listdir("/proc/self/task") if int(task) != os.getpid()]
    names = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in tasks]
    if names := [name for name in names if name != FORKS_WELL]:
        return f"the warm process has other threads ({', '.join(names)})"
    torch = sys.modules["torch"]
    for accelerator in ("cuda", "xpu", "mtia"):
        if getattr(torch, accelerator).is_initialized():
            return f"the warm process has initialised {accelerator}"
    tracker = sys.modules.get("multiprocessing.resource_tracker")
    if tracker is not None and tracker._resource_tracker._fd is not None:
        return "the warm process has started the resource tracker of multiprocessing"
    expected = {0, 1, 2, agent.fileno(), *descriptors}
    for name in os.listdir("/proc/self/fd"):
        path = Path("/proc/self/fd", name)
        if int(name) not in expected and path.is_symlink():  # otherwise it was the descriptor of the listing itself
            return f"the warm process has opened {os.readlink(path)}"
    return None


def _why_unfit(given: Mapping[str, Any], initial: InitialState) -> str | None:
    """Why a script would not run in a copy of this process as in a fresh interpreter; None if it would."""
    import zipfile  # imported here because the agent, which imports this file too, does not need it

    script = Path(given["folder"], given["program"][0])
    if zipfile.is_zipfile(script):
        return f"{script} is a zip archive"
    if sys.flags.safe_path:
        return None
    folder = _first_path(given["program"], given["folder"])
    try:
        neighbours = {path.name.partition(".")[0]: path for path in Path(folder).iterdir()}
    except OSError:
        return None
    for name in sorted((neighbours.keys() & sys.modules.keys()) - initial.modules):
        script_spec, loaded_spec = PathFinder.find_spec(name, [folder]), sys.modules[name].__spec__
        if script_spec and script_spec.origin and (loaded_spec is None or script_spec.origin != loaded_spec.origin):
            return f"{neighbours[name]} has the name of a module that the warm process has imported"
    return None


def _first_path(program: Sequence[str], folder: str) -> str:
    """The first folder on the import path of a script."""
    return folder if program[0] == MODULE else str(Path(folder, program[0]).resolve().parent)


# ---- the worker


def become_worker(given: Mapping[str, Any]) -> None:
    """Runs the script as ``python SCRIPT ARGUMENTS`` would; `given` is what `ForkServer` asks for."""
    gate, stdout, stderr, *numbered = given["descriptors"]
    os.setsid()
    while os.getppid() == given["between"]:
        time.sleep(0)
    die_with(given["agent"])
    _wait_at_gate(socket.socket(fileno=gate))
    for descriptor, stream in ((stdout, 1), (stderr, 2)):
        os.dup2(descriptor, stream)
        os.close(descriptor)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.chdir(given["folder"])
    environment = {**given["environment"], **dict(zip(given["numbered"], map(str, numbered), strict=True))}
    assume(environment)
    HEARTBEAT.take()
    register()  # torch was imported before this process became a worker
    _seed_anew()
    _limit_pool(environment)
    if "LD_PRELOAD" not in environment:  # a preloaded library may have exit handlers that must run
        _end_after_the_script()
    run(given["program"], given["name"], environment)


def _wait_at_gate(gate: socket.socket) -> None:
    """Sends the agent the id of this process and waits for its answer; exits if the agent does not answer."""
    go = b""
    with gate, suppress(OSError):
        gate.send(str(os.getpid()).encode())
        go = gate.recv(len(GO))
    if go != GO:
        os._exit(1)


def run(program: Sequence[str], name: str, environment: dict[str, str]) -> None:
    """Turns this process into an interpreter that runs a `program`, as in `WorkerProgram`."""
    script, *arguments = program
    module = arguments.pop(0) if script == MODULE else ""
    sys.argv = [script, *arguments]
    sys.orig_argv = [sys.executable, *program]
    name_process(name, sys.orig_argv)
    if not sys.flags.safe_path:
        sys.path.insert(0, _first_path(program, os.getcwd()))
    _watch_environment(environment)
    main = sys.modules["__main__"] = ModuleType("__main__")  # replaces the former one, which would never be collected
    vars(main).update(__annotations__={}, __builtins__=sys.modules["builtins"], __loader__=BuiltinImporter)
    del main
    _run(script, module)


def _run(script: str, module: str) -> None:
    """Runs a script or a module to its end. The interpreter itself runs it, so that tracebacks, exits and signals are
    those of ``python SCRIPT``.
    """
    text = f"import runpy; runpy._run_module_as_main({module!r})".encode()
    library, run = ctypes.CDLL(None), ctypes.pythonapi.PyRun_AnyFileExFlags
    library.fopen.restype = library.fmemopen.restype = ctypes.c_void_p
    run.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p]
    path = "<frozen runpy>" if module else os.path.abspath(script)
    file = library.fmemopen(text, len(text), b"rb") if module else library.fopen(os.fsencode(path), b"rb")
    if not file:
        say(f"{sys.executable}: can't open file {path!r}")
        raise SystemExit(2)
    if run(file, os.fsencode(path), 1, None):
        sys.excepthook = lambda *_: None
        raise _FailedError


def _seed_anew() -> None:
    """Seeds the generators that torch and numpy seeded during their import, and that would be equal in all workers.
    Python's own generator seeds itself after a fork.
    """
    sys.modules["torch"].default_generator.seed()
    sys.modules["numpy"].random.seed()


def _end_after_the_script() -> None:
    """Ends the process before the destructors of torch's libraries run, which take most of the time of an exit. C calls
    exit handlers in reverse order, so those of libraries that the script loads still run.
    """
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)  # `_exit` receives the exit code
    libc.__cxa_atexit(libc.fflush, None, None)


def _limit_pool(environment: Mapping[str, str]) -> None:
    """Gives numpy the number of threads that it would use in a fresh interpreter."""
    asked = next((environment[name] for name in _LIMITS if environment.get(name, "").isdecimal()), "")
    threads = int(asked) if asked else len(os.sched_getaffinity(0))
    paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "openblas" in line}
    for path in paths:
        library = ctypes.CDLL(path)
        for name in ("scipy_openblas_set_num_threads64_", "scipy_openblas_set_num_threads", "openblas_set_num_threads"):
            if hasattr(library, name):
                getattr(library, name)(threads)
                break


def _watch_environment(environment: dict[str, str]) -> None:
    """Watches for variables that libraries read while they are loaded. If the script sets one before it imports torch,
    the worker starts again in its place, without the imports of the warm process.
    """
    worker = os.getpid()

    def on_audit_event(event: str, values: tuple[Any, ...]) -> None:
        if event not in ("os.putenv", "os.unsetenv") or os.getpid() != worker:
            return
        name = os.fsdecode(values[0])
        value = os.fsdecode(values[1]) if event == "os.putenv" else None
        if _is_read_once(name) and value != environment.get(name) and not _has_torch():
            _restart_cold(name, environment)

    sys.addaudithook(on_audit_event)


def _has_torch() -> bool:
    """Whether the script or one of its modules has imported torch: some name in them refers to an object of torch."""
    script_modules = [module for name, module in {**sys.modules}.items() if name == "__main__" or name not in _LOADED]
    for value in (value for module in script_modules for value in {**vars(module)}.values()):
        name = getattr(value, "__name__" if isinstance(value, ModuleType) else "__module__", None)
        if isinstance(name, str) and (name.partition(".")[0] == "torch" or name.startswith("paceline.")):
            return True
    return False


def _restart_cold(variable: str, environment: dict[str, str]) -> NoReturn:
    """Starts the same process again, cold, with the same descriptors."""
    events = environment.get("PACELINE_EVENTS_FD")
    why = f"the script sets {variable} before it imports torch"
    World(events_fd=int(events) if events else None).tell("cold", why=why)
    HEARTBEAT.hand_on()
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, sys.orig_argv, environment)
