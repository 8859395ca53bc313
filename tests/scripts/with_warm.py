"""Goes where it should, and becomes a script with torch imported, or a command with a warm process to inherit."""

import ctypes
import json
import os
import signal
import socket
import sys

from paceline.launch import forked
from paceline.launch.processes import die_with, name_process

SPACES = {"net": 0x40000000, "uts": 0x04000000, "mount": 0x00020000}  # CLONE_NEW... of linux/sched.h
BIND, ALL, PRIVATE = 1 << 12, 1 << 14, 1 << 18  # MS_... of sys/mount.h
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


def leave_warm(environment: dict[str, str]) -> str:
    """A child that forks workers; what tells our next program of it."""
    ours, theirs = socket.socketpair()
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
    forked.serve(theirs, forked.Began(set(), environment))
    sys.exit()


def main() -> None:
    given = json.loads(sys.argv[1])
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
    ours = command[1:3] == ["-m", "paceline"] and not {"run", "check", "chaos"} & {*command[3:4]}
    if command[1].startswith("-") and not ours:  # an agent, which holds no torch
        os.execve(command[0], command, {**os.environ, "PACELINE_WARM": leave_warm(given["environment"])})
    forked.run(command[1:], "python", {**os.environ})


main()
