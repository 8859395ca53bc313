"""One of several workers that run collectives until they are interrupted, again and again, in new groups.

Usage: interrupted.py RANK SIZE. Reads commands from its standard input, one a line: ``start N PORT`` makes group
number N over a store at PORT and runs collectives; ``verdict`` (from the parent, by a thread) interrupts them. Answers
on its standard output: ``running``, then ``out SECONDS ERROR`` with the seconds from the verdict to the error.
"""

from __future__ import annotations

import queue
import random
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from paceline.comm.c10d_backend import ProcessGroup
from paceline.comm.transport import interrupt
from paceline.errors import PeerLostError

torch.set_num_threads(1)
rank, size = int(sys.argv[1]), int(sys.argv[2])
commands: queue.Queue[list[str]] = queue.Queue()
told = [0.0]


def listen() -> None:
    for line in sys.stdin:
        words = line.split()
        if words[0] == "verdict":
            told[0] = time.monotonic()
            interrupt(PeerLostError("the verdict", "form a new group"))
        else:
            commands.put(words)
    commands.put(["end"])


SIZES = [1, 1000, 1 << 18, 1 << 20]
# What collectives work on is made before: filling it takes longer than any of them may take to end.
PARTS = {numel: [torch.ones(numel) for _ in range(size)] for numel in SIZES}
OTHERS = {numel: [torch.ones(numel) for _ in range(size)] for numel in SIZES}
BIG = {numel: torch.ones(numel * size) for numel in SIZES}


def collective(group: ProcessGroup, kind: int, numel: int, place: int, count: int) -> None:
    """One collective of its kind, the same on all members."""
    big, parts, others = BIG[numel][: numel * count], PARTS[numel][:count], OTHERS[numel][:count]
    one = others[0]
    calls = [
        lambda: group.allreduce([one]),
        lambda: group.broadcast([one]),
        lambda: group.all_gather_single(big, one),
        lambda: group.reduce_scatter_single(one, big),
        lambda: group.alltoall(parts, others),
        lambda: group.barrier(),
        lambda: group.allreduce([shared]),
        lambda: group.channel.allocate(numel, torch.float32),  # asks the store
    ]
    if kind < len(calls):
        work = calls[kind]()
        if isinstance(work, dist.Work):
            work.wait()
        return
    works = [group.send([one], (place + 1) % count), group.recv([parts[0]], (place - 1) % count)]
    for work in works:
        work.wait()


loader = iter(DataLoader(TensorDataset(torch.zeros(10**6, 1)), num_workers=1))  # its child has our descriptors
next(loader)
threading.Thread(target=listen, daemon=True).start()
print("ready", flush=True)
while (words := commands.get())[0] == "start":
    number, port, host, members = words[1], int(words[2]), words[3], [int(word) for word in words[4:]]
    place, count = members.index(rank), len(members)
    store = dist.TCPStore(host, port, None, False, timeout=timedelta(seconds=30))
    group = ProcessGroup(dist.PrefixStore(f"group/{number}", store), place, count, timedelta(minutes=5))
    shared = group.channel.allocate(1 << 18, torch.float32)
    chance = random.Random(int(number))
    told[0] = 0.0
    print("running", flush=True)
    try:
        while True:
            kind, numel = chance.randrange(9), chance.choice(SIZES)
            collective(group, kind, numel, place, count)
            if told[0]:
                group.channel.broken = None
                raise PeerLostError("between two", "")
    except PeerLostError as error:
        print("out", time.monotonic() - told[0], error.what.replace("\n", " "), flush=True)
    group.abort()
