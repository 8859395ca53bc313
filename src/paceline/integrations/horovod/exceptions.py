"""The exceptions of Horovod's API."""

from __future__ import annotations

from paceline.errors import PacelineError, UsageError


class HorovodInternalError(PacelineError, RuntimeError):
    """A collective failed: the workers disagree about it, or a worker was lost. `hvd.elastic.run` restores the last
    committed state and goes on after a lost worker.
    """


class HorovodArgumentError(UsageError, ValueError, NotImplementedError):
    """An argument of Horovod's API has a wrong value. Nothing was sent, and the other calls go on."""


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 (Horovod's name)
    """The team is about to change: raised by `State.commit` and `State.check_host_updates` on all workers.

    `skip_sync` says whether workers only leave, so that the state needs no synchronisation.
    """

    def __init__(self, skip_sync: bool) -> None:
        super().__init__("the workers of the run change")
        self.skip_sync = skip_sync


def not_initialized() -> HorovodArgumentError:
    """The error of calls that need `hvd.init()`."""
    return HorovodArgumentError("Horovod has not been initialized", "call hvd.init() first")
