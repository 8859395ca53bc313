"""Describes how a script ended: the exception in one sentence with the user's line, or the exit code.

An exit handler cannot read the exit code of the interpreter, so the functions that end a script record it. The script's
own frame shows whether the script really ended there, or caught the exit. (A bare ``raise SystemExit(3)`` cannot be
recorded.) No torch.
"""

from __future__ import annotations

import _sitebuiltins
import dis
import sys
import threading
import traceback
from collections.abc import Callable
from functools import wraps
from types import FrameType
from typing import Any

from paceline.base.tracebacks import TRACEBACK, read_trace
from paceline.errors import hint_of, notes_of

# What str() of a user's exception may raise, mostly because of missing attributes.
_FAILURES = (ArithmeticError, AssertionError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)
LONGEST_TEXT = 800  # characters of each text about an exception that the agent gets


class ExitReports:
    """Records the script's exits. `code` is the code of the last one, `at` the user's line that it came from."""

    def __init__(self) -> None:
        self.code, self.at = 0, ""
        self._script = _frame_of_the_script()
        for owner, name in ((sys, "exit"), (_sitebuiltins.Quitter, "__call__")):
            setattr(owner, name, self._noting(getattr(owner, name)))

    def _noting(self, leave: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(leave)
        def noting(*given: Any, **named: Any) -> Any:
            codes = [code for code in (*given, *named.values()) if not isinstance(code, _sitebuiltins.Quitter)]
            self._note(codes[0] if codes else None, sys._getframe(1))
            return leave(*given, **named)

        return noting

    def _note(self, code: Any, frame: FrameType) -> None:
        self.code = code & 0xFF if isinstance(code, int) else int(code is not None)  # anything else is printed
        stack = "".join(traceback.format_stack(frame)).splitlines()
        self.at = read_trace([TRACEBACK, *stack, "SystemExit"])[1] or ""

    @property
    def failed(self) -> bool:
        """At the end of the interpreter: whether the script ended by an exit with another code than 0."""
        frame = self._script
        return self.code > 0 and frame is not None and not _returned(frame)


def _frame_of_the_script() -> FrameType | None:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    names = vars(sys.modules["__main__"])
    while frame is not None and not (frame.f_globals is names and frame.f_code.co_name == "<module>"):
        frame = frame.f_back
    return frame


def _returned(frame: FrameType) -> bool:
    """Whether a frame that is over ended by returning."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")


def _text(error: BaseException) -> str:
    """The text of an exception, or why there is none."""
    try:
        return str(error)
    except _FAILURES as failed:
        return f"its message cannot be read: str() raised {type(failed).__name__}"


def describe_exception(error: BaseException) -> dict[str, str]:
    """Describes an exception for the agent: its class and text, its line in a traceback, the user's innermost frame,
    notes on where it was raised, and a hint.
    """
    what, at = read_trace("".join(traceback.format_exception(error)).splitlines())
    texts = {"text": _text(error), "what": what, "at": at or "", "within": ", ".join(notes_of(error))}
    texts["hint"] = hint_of(error)
    return {"kind": type(error).__name__, **{name: text[:LONGEST_TEXT] for name, text in texts.items()}}
