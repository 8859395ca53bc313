"""What ends a run early or interrupts it between two steps: signals, `--steps`, and requests of its workers."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Never

from paceline.base.batching import Agreed
from paceline.base.environment import World
from paceline.base.exit_codes import INTERRUPTED, STOPPED
from paceline.session.reporter import Reporter


class Notices:
    """The requests to this worker and to the run.

    A worker that got a `stop_signal` asks in its next step that all stop. What workers agreed on in a step
    (`save_due`, `stop_due`, `enter_due`) waits until the outermost loop asks for its next step.
    """

    def __init__(self, world: World, reporter: Reporter, elastic: bool, saves: bool) -> None:
        self._world, self._reporter, self._saves = world, reporter, saves
        self.stop_signal: int | None = None
        self.save_due = 0  # 1: a checkpoint, 2: a copy in the memory of the agent
        self.stop_due = self.enter_due = False
        self.max_steps = world.max_steps
        self.left = False  # the script was ended on purpose, before its end
        self._handles_signals = threading.current_thread() is threading.main_thread()
        # An agent sends SIGUSR2 to stop the whole run. The other signals ask this worker alone to leave, in a team that
        # can go on without it.
        leave = self._leave_alone if elastic else self._stop_all
        handlers = {"SIGUSR1": leave, "SIGTERM": leave, "SIGUSR2": self._stop_all}
        for name, handler in handlers.items() if self._handles_signals else ():
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), handler)

    def _stop_all(self, number: int, _: object) -> None:
        self.stop_signal = number

    def _leave_alone(self, number: int, _: object) -> None:
        self._world.tell("leaves")

    @contextmanager
    def ctrl_c_stops(self, outermost: bool) -> Iterator[None]:
        """Lets Ctrl-C stop the outermost loop cleanly, if there is no agent that handles it."""
        handles = outermost and self._handles_signals and self._world.launcher != "paceline"
        before = signal.signal(signal.SIGINT, self._on_ctrl_c) if handles else None
        try:
            yield
        finally:
            if handles:
                signal.signal(signal.SIGINT, before)

    def _on_ctrl_c(self, number: int, _: object) -> None:
        """Stops after the step at the first Ctrl-C, and at once at the second."""
        if self.stop_signal is not None:
            raise KeyboardInterrupt
        self.stop_signal = number
        saves = " and saving" if self._saves else ""
        self._reporter.say(f"stopping after this step{saves}; press Ctrl-C again to stop at once")

    def record_agreed(self, agreed: Agreed) -> None:
        """Records the wishes that workers agreed on in a step."""
        self.save_due = agreed.save or self.save_due
        self.stop_due |= agreed.stop > 0
        self.enter_due |= agreed.enter > 0

    def reason_to_stop(self, step: int) -> tuple[int, str] | None:
        """Returns an exit code and why the run stops after `step`; None if it goes on."""
        if self.stop_due:
            return (INTERRUPTED if self.stop_signal == signal.SIGINT else STOPPED), "asked to stop"
        if self.max_steps is not None and step >= self.max_steps:
            return 0, f"--steps {self.max_steps}"
        return None

    def withdraw(self) -> None:
        """Forgets that the run was asked to stop: in a notebook more cells may follow."""
        self.stop_signal, self.stop_due = None, False

    def end_script(self, code: int = STOPPED) -> Never:
        """Ends the script on purpose."""
        self.left = True
        raise SystemExit(code)
