"""Checks whether a run may have spare workers (`--spares`)."""

from __future__ import annotations

from paceline.base.text import plural
from paceline.errors import UsageError
from paceline.launch.options import LaunchOptions
from paceline.plan import Plan
from paceline.team.spare_workers import refuse_spares


def team_text(workers: int, spares: int) -> str:
    """The number of workers, and of spares if there are any; a host that joins may have spares only."""
    counts = [plural(workers, "worker")] if workers or not spares else []
    return ", ".join([*counts, *([plural(spares, "spare")] if spares else [])])


def check_spares(options: LaunchOptions) -> None:
    """Checks the options of a run with spares. UsageError: a spare could never take the place of a lost worker."""
    given = f"--spares {options.spares}"
    if not options.max_restarts:
        what = f"{given} has no effect with --max-restarts 0: the loss of any worker ends the run"
        raise UsageError(what, "leave one of the two out")
    if options.shares is not None:
        what = f"{given} cannot be combined with --shares, which belong to workers by their numbers"
        raise UsageError(what, "leave --shares out: shares follow from measured speed")
    if options.debug is not None:
        what = f"{given} cannot be combined with --debug, which holds the worker at a prompt"
        raise UsageError(what, "leave --spares out while you debug")
    known = options.workers == 1 or (options.plan is not None and "auto" not in options.plan.split())
    if known and is_one_host(options):
        refuse_spares(Plan.parse(options.plan or "").validate(options.workers), options.workers, options.spares)


def is_one_host(options: LaunchOptions) -> bool:
    """Whether all workers that the run may ever have belong to this command."""
    return options.join is None and options.listen is None and options.begin <= options.workers
