"""From a plan to nested strategies: the only place that sees them all."""

from __future__ import annotations

from paceline.comm.group import Group
from paceline.plan import Plan
from paceline.strategies.base import Job, Single, Strategy
from paceline.strategies.data import Data
from paceline.strategies.shard import Shard


def nest(plan: Plan, job: Job, group: Group, elastic: bool) -> Strategy:
    """The plan's strategies, outermost first around `Single`. An `elastic` team may be of one worker and grow."""
    if plan.shard is not None and plan.shard > 1:
        size = plan.shard
        replica = group.split([range(first, first + size) for first in range(0, group.size, size)])
        return Data(Shard(job, replica), group, job, places=size)
    if group.size == 1 and not elastic:
        return Single(job, group.allocate if plan.exact else None)
    return Data(Single(job, group.allocate), group, job)
