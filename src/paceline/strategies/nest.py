"""From a plan to nested strategies: the only place that sees them all."""

from __future__ import annotations

from functools import partial

from paceline.comm.group import Group
from paceline.plan import Plan
from paceline.strategies.base import Job, Single, Strategy
from paceline.strategies.blocks import compiled, recompute
from paceline.strategies.data import Data, share
from paceline.strategies.shard import Shard


def nest(plan: Plan, job: Job, group: Group, elastic: bool, known: bool = False) -> Strategy:
    """The plan's strategies, outermost first around `Single`. An `elastic` team may be of one worker and grow; where
    the others do not make this trainer now, it is `known` to them. Collective if it is not.
    """
    if not known and job.blueprint is None:
        share([*job.model.parameters(), *job.model.buffers()], group)
    places = plan.shard or 1
    if plan.recompute:
        job.decisions.append(recompute(job.model))
    if plan.compile:
        job.decisions.append(compiled(job.model, plan.together > 1, plan.exact))
    if places > 1:
        replica = group.replica(places)
        if plan.zero == 1:
            return Data(Shard(job, replica), group, job, places)
        from paceline.strategies.fully_shard import FullyShard  # torch takes half a second to import what it needs

        filled = None if known else partial(share, group=group)
        return Data(FullyShard(job, replica, plan.zero == 3, filled), group, job, places)
    if group.size == 1 and not elastic:
        return Single(job, group.allocate if plan.exact else None)
    return Data(Single(job, group.allocate), group, job)
