"""The `paceline` command; a signal ends it with one line, even while imports are running.

A signal ends it with one line from its first moment on: the imports alone take a while.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

CODES = {signal.SIGINT: 130, signal.SIGTERM: 75}
if sys.platform != "win32":
    CODES[signal.SIGHUP] = 75
AGAIN = "the same command starts again"


def _line(number: int, then: str = AGAIN) -> str:
    return f"paceline: stopped by {signal.Signals(number).name}; {then}\n"


def _open_streams() -> None:
    """Standard streams that are closed, as some daemons leave them, are those of /dev/null: else what is opened next
    would have their descriptors, and our children take it for them.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 (for as long as we are)


def main() -> int:
    """Reads the command line and does what it says; the exit code. Once workers run, their agent hears the signals."""
    _open_streams()
    parent_pid, imported = os.getpid(), False

    def stop(number: int, _: Any) -> None:
        signal.signal(number, signal.SIG_DFL)  # whoever sends it again means at once
        if os.getpid() != parent_pid:  # forked from us
            os.kill(os.getpid(), number)
        elif not imported:  # there is nothing to tidy, and importlib would swallow exceptions here and there
            os.write(2, _line(number).encode())
            os._exit(CODES[signal.Signals(number)])
        raise KeyboardInterrupt(number)

    for number in CODES:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, stop)
    from paceline.cli.main import main as command

    imported = True
    try:
        code = command()
        try:
            sys.stdout.flush()
        except OSError as error:
            if isinstance(error, BrokenPipeError):
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # `say` has said it; the end would try once more
            return code or 2
        return code
    except BrokenPipeError:  # whoever read it, as head does, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141  # what a shell says of SIGPIPE
    except KeyboardInterrupt as stopped:
        number = stopped.args[0] if stopped.args else signal.SIGINT
        sys.stderr.write(_line(number, *getattr(stopped, "__notes__", ())))
        return CODES[number]


if __name__ == "__main__":
    sys.exit(main())
