"""Shows the progress of a run in a notebook: a bar in the output of the cell that is repainted in place."""

from __future__ import annotations

import contextvars
import secrets
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from paceline.base.console import markup
from paceline.base.journal import NAME, Reader

EVERY = 0.25  # seconds between two reads of the journal
_BAR = '<progress value="{:.4f}" max="1" style="width: 16em; vertical-align: middle"></progress> '


def _shell() -> Any:
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook. IPython is not imported for this."""
    return getattr(_shell(), "kernel", None) is not None


class NotebookBar:
    """A bar and a line of text in the output of the current cell. Each cell gets a bar of its own.

    `on_end` is called when a cell has been executed, to show what is still to be shown.
    """

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._cell: int | None = None
        self._id, self._on_end = "", lambda *_: on_end()
        _shell().events.register("post_run_cell", self._on_end)

    def close(self) -> None:
        """Forgets the cells."""
        with suppress(ValueError):  # it was closed before
            _shell().events.unregister("post_run_cell", self._on_end)

    def show(self, parts: Iterable[tuple[str, bool]], fraction: float | None) -> None:
        """Shows `parts` of text, each with whether it is in bold. The bar is filled to `fraction`, and left out if that
        is not known.
        """
        from IPython.display import display

        shown = [(f"<b>{markup(text)}</b>" if is_bold else markup(text), text) for text, is_bold in parts]
        bar = _BAR.format(fraction) if fraction is not None else ""
        html = f"<div>{bar}<code>{'&ensp;'.join(text for text, _ in shown)}</code></div>"
        data = {"text/html": html, "text/plain": "  ".join(text for _, text in shown)}
        cell = _shell().execution_count
        is_new, self._cell = cell != self._cell, cell
        if is_new:
            self._id = f"paceline-{secrets.token_hex(8)}"
        display(data, raw=True, display_id=self._id, update=not is_new)


class JournalFollower(AbstractContextManager["JournalFollower"]):
    """Shows the progress of a run of other processes in this notebook, from the journal in `folder`, in a thread.

    `progress` shows it; what an earlier attempt has written is left out.
    """

    def __init__(self, folder: Path, progress: Any) -> None:
        path = folder / NAME
        self._reader = Reader(folder, path.stat().st_size if path.exists() else 0, damaged=False)
        self._progress, self._ends = progress, threading.Event()
        # The context says to which cell an output belongs.
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._follow,), name="paceline-notebook", daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()
        self._progress.close()

    def _follow(self) -> None:
        has_ended = False
        while not has_ended:
            has_ended = self._ends.wait(EVERY)
            for _, event in self._reader.news():
                if event["event"] == "grid":
                    self._progress.phase({**event, "text": None})  # the workers' console has the text
                elif event["event"] in ("step", "evaluate"):
                    getattr(self._progress, event["event"])(event)
