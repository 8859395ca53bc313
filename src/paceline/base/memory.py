"""Advice for a worker that ran out of memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from paceline.base.text import size_of

FULL = 0.9  # of the room that a plan may take, besides what forward and backward keep
_PARTS = ("the parameters", "the gradients", "the optimizer's state")


def machine_memory() -> int:
    """Returns the bytes of this machine's main memory."""
    if sys.platform == "win32":
        return sys.maxsize  # not known
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def address_limit() -> int:
    """Returns the bytes that this process may address at most, as `ulimit -v` sets them."""
    if sys.platform == "win32":
        return sys.maxsize
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def advice(plans: Sequence[tuple[str, Sequence[int]]], besides: int, room: int) -> tuple[str, str]:
    """Explains why a worker ran out of memory: returns (what did not fit into its `room`, what to do).

    `plans` has, for each plan, the bytes that a worker holds of parameters, gradients and optimizer state. The first
    plan was tried, and the others resemble it less and less. `besides` are the bytes that a worker takes before it has
    any of these.
    """
    (tried, held), *others = plans
    sums = [besides + sum(held[: count + 1]) for count in range(len(held))]
    what = next((part for part, total in zip(_PARTS, sums, strict=True) if total > room), "")
    parameters, gradients, state = map(size_of, held)
    description = (
        f"the plan {tried!r} makes a worker hold {parameters} of parameters, {gradients} of gradients and {state} of "
        f"the optimizer's state, and {size_of(besides)} of other memory, of {size_of(room)} available"
    )
    fitting = [(text, sum(sizes)) for text, sizes in others if besides + sum(sizes) <= FULL * room]
    smaller = [(text, size) for text, size in fitting if size < sum(held)]
    if not what:
        cure = "use recompute=blocks"
        if smaller:
            cure += f", or --plan {smaller[0][0]!r}, which frees {size_of(sum(held) - smaller[0][1])}"
        cure += ", or a smaller micro= in the plan, which changes the mathematics"
        return f"the activations of forward and backward did not fit into memory: {description}", cure
    if fitting:
        return (
            f"{what} did not fit into memory: {description}",
            f"use --plan {fitting[0][0]!r}: it needs {size_of(fitting[0][1])}",
        )
    least, size = min(((text, sum(sizes)) for text, sizes in plans), key=lambda plan: plan[1])
    cure = f"use more workers, on other hosts: {least!r}, which needs least memory, needs {size_of(size)}"
    return f"{what} did not fit into memory: {description}", cure
