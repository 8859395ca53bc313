"""Every exception of Paceline; each message ends with what to do next.

A message says what happened and where, and ends with what to do next.
"""

from __future__ import annotations

from collections.abc import Callable

_NOTE = "raised in "
_HINT = "hint: "


def a(noun: str) -> str:
    """Returns a noun with its article: ``an int``, ``a float``."""
    return f"{'an' if noun[0] in 'aeiouAEIOU' else 'a'} {noun}"


class PacelineError(Exception):
    """Base of all. `what` happened and where; `cure` is the next step for the user. Printed as ``what; cure``."""

    def __init__(self, what: str, cure: str) -> None:
        super().__init__(f"{what}; {cure}")
        self.what = what
        self.cure = cure


class PlanError(PacelineError):
    """The plan cannot be read, contradicts itself, or does not fit the workers."""


class UsageError(PacelineError):
    """The public interface was called with something that cannot work."""


class UnsupportedError(UsageError, RuntimeError, ValueError):
    """A collective that the backend cannot do. Nothing was sent, and the group goes on. Torch's own backends raise the
    one or the other of the further bases.
    """


class LossError(PacelineError):
    """The loss returned something that is not a scalar, a (sum, count) or a (sum, count, metrics)."""


class NonFiniteLossError(PacelineError):
    """The loss became NaN or infinite; the step was not applied."""


class MetricError(PacelineError):
    """Metrics are not (sum, count) by name, or their names differ between workers."""


class ChangingBufferError(PacelineError):
    """A buffer changes in the forward in a way that depends on who computes what."""


class CollectiveMismatchError(PacelineError):
    """Workers entered different collectives, or one ended while the others still wait for it."""


class PeerLostError(PacelineError):
    """The connection to another worker broke: the reason stands in that worker's log, not here."""


class WorkersDifferError(PacelineError):
    """The workers of one team run different scripts, plans or versions."""


class HardwareError(PacelineError):
    """A worker computes other values than the other workers from the same rows. It leaves the run; they continue."""


class DatasetError(PacelineError):
    """The dataset is not what the run recorded, or not what a dataset must be."""


class ReaderError(DatasetError):
    """The worker that reads an iterable dataset for this one failed: its own error is the cause."""


class CheckpointError(PacelineError):
    """A checkpoint cannot be written, read or verified."""


class FormatError(PacelineError):
    """A file or a message is not what its format says: which, and in which field."""


class OutOfMemoryError(PacelineError):
    """A worker's memory is too small for what the plan makes it hold."""


class LaunchError(PacelineError):
    """The workers could not be started, or the script did not train."""


class AddNote:
    """Adds a note to an exception that leaves the context: what raised it, as ``micro-batch 4``. Exceptions of Paceline
    name that themselves.
    """

    def __init__(self, what: Callable[[], str]) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, PacelineError):
            error.add_note(_NOTE + self._what())


def add_hint(error: BaseException, hint: str) -> None:
    """Adds a hint to a user's exception: what to write instead. Only the first hint is added, and an empty one is
    ignored.
    """
    if hint and not isinstance(error, PacelineError) and not hint_of(error):
        error.add_note(_HINT + hint)


def hint_of(error: BaseException) -> str:
    """Returns the hint that `add_hint` added to an exception; empty if there is none."""
    notes = getattr(error, "__notes__", ())
    return next((n.removeprefix(_HINT) for n in notes if isinstance(n, str) and n.startswith(_HINT)), "")


def notes_of(error: BaseException) -> list[str]:
    """Returns the notes that `AddNote` added to an exception."""
    notes = getattr(error, "__notes__", ())
    return [note.removeprefix(_NOTE) for note in notes if isinstance(note, str) and note.startswith(_NOTE)]


def first_line(error: Exception) -> str:
    """Returns the first line of another library's error message, or the name of its class if the message is empty."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
