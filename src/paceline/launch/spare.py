"""A process that has imported torch before it is needed, and then becomes a worker in a fraction of the time.

Started as a worker would be, but for its number, which comes as the first line on the socket for orders.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import TracebackType

from paceline.world import assume, read_spare


def _first_line(fd: int) -> bytes:
    """Up to the first line's end and no further: what follows is for somebody else."""
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(fd, 1)
        if not piece:  # the agent is gone
            os._exit(0)
        line += piece
    return line


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A traceback that begins in the script, as it does in a process that was started with it."""
    while trace is not None and trace.tb_frame.f_code.co_filename != sys.argv[0]:
        trace = trace.tb_next
    if trace is not None:
        error = error.with_traceback(trace)
    sys.__excepthook__(kind, error, error.__traceback__)


def main() -> None:
    """Waits, and runs the script as ``python SCRIPT ARGUMENTS`` would."""
    import paceline.trainer  # noqa: F401  what takes the time

    assume(json.loads(_first_line(read_spare())))
    sys.argv = sys.argv[1:]
    script = sys.argv[0]
    sys.path[0] = str(Path(script).resolve().parent)
    sys.excepthook = _show
    names = sys.modules["__main__"].__dict__
    kept = {name: names[name] for name in ("__builtins__", "__loader__")}
    names.clear()
    names.update(kept, __name__="__main__", __file__=script, __spec__=None, __doc__=None, __package__=None)
    exec(compile(Path(script).read_bytes(), script, "exec"), names)
