"""The gloo group between hosts: several of them in one process, a thread for each worker."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist

from paceline.comm.hierarchical import CHUNK, Gloo
from paceline.comm.progress_engine import Steps

WORKERS, TIMES, ELEMENTS = 3, 60, 1 << 18


def finished(steps: Steps) -> object:
    """What a collective returns."""
    try:
        while True:
            until = next(steps)
            while not until():
                time.sleep(0.0005)
    except StopIteration as end:
        return end.value


def test_no_tensor_is_held_once_it_has_arrived() -> None:
    """Nor anything that was sent."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=20))
    device = dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")  # type: ignore[attr-defined]

    def worker(rank: int) -> list[int]:
        group, held = Gloo(store, rank, WORKERS, [device]), list[int]()
        group.chunk = CHUNK
        for turn in range(TIMES):
            rows = torch.full((WORKERS, ELEMENTS), float(WORKERS * turn + rank))
            taken = finished(group.all_to_all(rows))
            assert torch.equal(taken, WORKERS * turn + torch.arange(3.0)[:, None].expand(-1, ELEMENTS))  # type: ignore[arg-type]
            gathered = finished(group.all_gather(rows[0]))
            assert torch.equal(gathered, taken)  # type: ignore[arg-type]
            del rows, taken, gathered
            for _ in range(2000):
                group._release()
                if not group._aliases:
                    break
                time.sleep(0.001)
            held.append(len(group._aliases))
        return held

    with ThreadPoolExecutor(WORKERS) as pool:
        held = [*pool.map(worker, range(WORKERS))]
    assert held == [[0] * TIMES] * WORKERS
