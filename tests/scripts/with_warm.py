"""Goes where it should, and becomes a script with torch imported, or a command with a warm process to inherit."""

import atexit
import ctypes
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from contextlib import suppress
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import NoReturn

from agent_parts import NAMES

from paceline.launch import coordinator_process
from paceline.launch import forked_worker as forked
from paceline.launch.processes import die_with, name_process
from paceline.team import coordinator_server as server

SPACES = {"net": 0x40000000, "uts": 0x04000000, "mount": 0x00020000}  # CLONE_NEW... of linux/sched.h
BIND, ALL, PRIVATE = 1 << 12, 1 << 14, 1 << 18  # MS_... of sys/mount.h
LAUNCHES = "from paceline.launch import"  # has a text that is an agent
libc = ctypes.CDLL(None, use_errno=True)


def sure(status: int) -> None:
    if status:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def enter(network: str, hosts: str, name: str) -> None:
    """A namespace for the network, with a name and a file of known hosts of its own."""
    file = os.open(network, os.O_RDONLY)
    sure(libc.setns(file, SPACES["net"]))
    os.close(file)
    sure(libc.unshare(SPACES["uts"] | SPACES["mount"]))
    sure(libc.mount(None, b"/", None, ALL | PRIVATE, None))
    sure(libc.mount(os.fsencode(hosts), b"/etc/hosts", None, BIND, None))
    sure(libc.sethostname(os.fsencode(name), len(os.fsencode(name))))


def die_after(what: str, times: str) -> None:
    """This process, and none that it forks, is killed once such a call of the system's has returned so many times."""
    call, me, returned = getattr(os, what), os.getpid(), 0

    def and_die(*given):
        nonlocal returned
        result = call(*given)
        if os.getpid() == me:
            returned += 1
            if returned == int(times):
                os.kill(me, signal.SIGKILL)
        return result

    setattr(os, what, and_die)


def leave(code: int = 0) -> NoReturn:
    """Ends a process without taking torch's modules to pieces, which copies the pages that it shares with others."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


def leave_warm(environment: dict[str, str]) -> str:
    """A child that forks workers; what tells our next program of it."""
    ours, theirs = socket.socketpair()
    dies_after = os.environ.pop("PACELINE_TEST_WARM_DIES", "")
    parent, warm = os.getpid(), os.fork()
    if warm:
        theirs.close()
        os.set_inheritable(ours.fileno(), True)
        return f"{warm}:{ours.detach()}"
    ours.close()
    die_with(parent)
    os.setsid()
    name_process(*forked.WARM)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    os.close(nothing)
    me = os.getpid()
    if dies_after:
        die_after(*dies_after.split())
    forked.serve(theirs, forked.InitialState(set(), environment))
    if os.getpid() == me:
        os._exit(0)
    leave()  # a worker, at its end; tests/launch/test_fork_server.py compares how the package's own end


class Forked(subprocess.Popen):
    """The coordinator's process, from an agent that has imported what it needs, and as yet no second thread."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, *more):
        ends = more[5:11]
        if len(os.listdir("/proc/self/task")) > 1:
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, *more)
            return
        self.pid = os.fork()
        if self.pid == 0:
            try:
                coordinate(args, preexec_fn, pass_fds, (ends[0], ends[3], ends[5]))
            finally:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
        self._child_created = True
        self._close_pipe_fds(*ends)


def coordinate(args, preexec_fn, pass_fds, streams):
    os.setsid()
    preexec_fn()
    for stream, end in enumerate(streams):
        os.dup2(end, stream)
    signal.set_wakeup_fd(-1)
    for number in {*signal.Signals} - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in pass_fds:
            with suppress(OSError):
                os.close(int(name))
    name_process("python", args)
    server.main(int(args[3]), json.loads(args[4]))


def forget() -> None:
    """What an agent has not imported itself is not there for it."""
    for name in sys.modules.keys() - NAMES - {"__main__"}:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(sys.modules.pop(name)))  # for ever: it is not taken to pieces


def execute(command: list[str]) -> None:
    """What ``python -c TEXT ARGUMENTS`` does."""
    name_process("python", command)
    sys.argv, sys.orig_argv = ["-c", *command[3:]], command
    sys.path.insert(0, "")
    main = sys.modules["__main__"] = ModuleType("__main__")
    exec(compile(command[2], "<string>", "exec"), vars(main))


def serve_with(modules: list[str], descriptor: int, environment: dict[str, str]) -> None:
    """Becomes a warm process that has also imported these; see `forked.load`."""
    before = {*sys.modules}
    for name in modules:
        import_module(name)
    atexit.register(
        forked._keep_unchanged_modules, {name: len(vars(sys.modules[name])) for name in sys.modules.keys() - before}
    )
    forked._LOADED.update(sys.modules)
    gc.freeze()
    name_process(*forked.WARM)
    forked.serve(socket.socket(fileno=descriptor), forked.InitialState(set(), environment))


def pause(waited: float, crowded: bool) -> None:
    """Between two looks of who waits for others: several tests at a time have more workers than there are cores."""
    time.sleep(min(4e-3, max(waited / 4, 5e-5)))


def main() -> None:
    engine = sys.modules["paceline.comm.progress_engine"]
    pause.__code__ = pause.__code__.replace(co_filename=engine.__file__)  # so no stack takes it for the user's code
    engine.ProgressEngine._pause = staticmethod(pause)
    coordinator_process.subprocess = SimpleNamespace(Popen=Forked, DEVNULL=subprocess.DEVNULL)
    given = json.loads(sys.argv[1])
    descriptor = os.environ.pop("PACELINE_TEST_SERVE", None)
    if descriptor is not None:
        serve_with(given["modules"].split(), int(descriptor), given["environment"])
        return
    # What runs in the background of a shell, or under nohup, ignores them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    sys.path.pop(0)
    standard_input = os.environ.pop("PACELINE_TEST_STDIN", None)
    if standard_input is not None:
        os.dup2(int(standard_input), 0)
        os.close(int(standard_input))
    if given["inside"]:
        enter(*given["inside"])
    command = given["command"]
    python, text = command[0] == sys.executable, command[2] if command[1] == "-c" else ""
    agent = command[1:3] == ["-m", "paceline"] or LAUNCHES in text
    ours = agent and not text and not {"run", "check", "chaos", "explain"} & {*command[3:4]}
    if ours:
        sys.exit = leave
    if not command[1].startswith("-") or ours or (command[1] == "-m" and not agent):
        forked.run(command[1:], "python", {**os.environ})
        return
    if agent or not python:
        os.environ["PACELINE_WARM"] = leave_warm(given["environment"])
    if given["exec"] or not python or not (agent or text):
        os.execve(command[0], command, os.environ)
    if agent and command[3:4] not in (["check"], ["chaos"]):  # which read weights in the end
        forget()
    if agent and not text:
        sys.exit = leave  # its last words: `sys.exit(main())`
    if text:
        execute(command)
    else:
        forked.run(command[1:], "python", {**os.environ})


main()
