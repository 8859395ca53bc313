"""Counts rows by training: of each row's weight, and of a BatchNorm's counter, each update takes one away or adds one.

The gradients depend on no weights, so the order of updates makes no difference: counted.py FOLDER STEPS. With PACE=S a
ticket takes S seconds, with SLOW=WORKER:TIMES that worker's so many times as long, with STRAGGLE=CHANCE:TIMES now and
then anybody's. With KILL=WORKER:CALLS that worker is killed, once, when its loss is called so often; with
REACHED=WORKER:CALLS it makes the file `reached` then. With MOMENTUM=M there is Nesterov's. With TABLE the rows are a
table's, whose gradients are sparse: `versions` has a line for each reading of weights, and `turns` for each turn. Once
there is the file `gate` nobody is slow any more.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from served import await_restored_server, faults
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.param_server.async_server import AsyncServer
from paceline.param_server.client import AsyncReplica
from paceline.param_server.protocol import Kind
from paceline.param_server.replication import Replication
from paceline.param_server.ssp_clock import SspScheduler

BATCH, ROWS = 6, 30
CALLS = [0]
ME = os.environ.get("PACELINE_RANK", "0")
DRAW = random.Random(int(ME))


def option(name: str) -> tuple[bool, float]:
    """Whether it is of this worker, and its number."""
    worker, _, number = os.environ.get(name, "none:0").partition(":")
    return worker == ME, float(number)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(ROWS, dtype=torch.float64))
        if "TABLE" in os.environ:
            del self.rows
            self.table = nn.Embedding.from_pretrained(torch.zeros(ROWS, 1).double(), freeze=False, sparse=True)
        self.more = nn.Parameter(torch.zeros(7, dtype=torch.float64))  # for another server
        self.norm = nn.BatchNorm1d(1).double()

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        self.norm(numbers.double().unsqueeze(1))
        rows = self.table(numbers)[:, 0] if "TABLE" in os.environ else self.rows[numbers]
        return rows + self.more.sum()


def loss(output: torch.Tensor, batch: Any) -> Any:
    CALLS[0] += 1
    mine, calls = option("KILL")
    if mine and CALLS[0] == calls and not (done := Path(sys.argv[1]) / "killed").exists():
        done.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    mine, calls = option("REACHED")
    if mine and CALLS[0] == calls:
        (Path(sys.argv[1]) / "reached").touch()
    mine, times = option("SLOW")
    chance, _, long = os.environ.get("STRAGGLE", "0:1").partition(":")
    pause = float(os.environ.get("PACE", "0")) * (times if mine else 1)
    pause *= not (Path(sys.argv[1]) / "gate").exists()
    time.sleep(pause * (float(long) if DRAW.random() < float(chance) else 1))
    return output.sum(), len(output)


def watch() -> None:
    """Where tickets are dealt, `reads` has how far ahead of the slowest a worker is who reads weights with one."""
    deal = SspScheduler.deal

    def watched(tickets: SspScheduler, worker: int, read: int | None = None) -> int | None:
        before = len(tickets.open)
        ticket = deal(tickets, worker, read)
        if len(tickets.open) > before:
            with (Path(sys.argv[1]) / "reads").open("a") as file:
                file.write(f"{tickets.clocks[worker] - min(tickets.clocks.values())}\n")
        return ticket

    SspScheduler.deal = watched  # type: ignore[method-assign]


def between() -> None:
    """With BETWEEN=WORKER:SERVER that worker is killed when its fifth ticket is whole at that server alone."""
    push, made = AsyncReplica.push, [0]

    def dying(replica: AsyncReplica, sums: Any, told: Any) -> None:
        made[0] += 1
        mine, server = option("BETWEEN")
        servers, done = replica.servers, Path(sys.argv[1]) / "killed"
        if mine and made[0] == 5 and not done.exists():
            keep = replica.servers.used
            servers.used = {int(server): keep[int(server)]}
            push(replica, sums, told)
            while servers.links[int(server)].sending:
                servers.advance()
            time.sleep(0.1)  # it has come, then
            done.write_text(str(replica.key[0]))
            os.kill(os.getpid(), signal.SIGKILL)
        push(replica, sums, told)

    AsyncReplica.push = dying  # type: ignore[method-assign]


def versions() -> None:
    """Of each reading: how many servers were asked, how many updates were asked for, the table and the rest have."""
    read = AsyncReplica.await_weights

    def noted(replica: AsyncReplica) -> None:
        asked, (update, _, _) = replica._reading
        servers = {*asked.values()}
        read(replica)  # asks another server if one is lost
        model: Any = replica.job.model
        found = (-float(some.sum()) / BATCH for some in (model.table.weight, model.more[0]))
        line = [len(servers | {*asked.values()}), update, *found]
        with (Path(sys.argv[1]) / "versions").open("a") as file:
            file.write(json.dumps(line) + "\n")

    AsyncReplica.await_weights = noted  # type: ignore[method-assign]


def noted(update: int) -> bool:
    """Whether `versions` has a reading of a table that has that update, and of other weights that do not."""
    text = file.read_text() if (file := Path(sys.argv[1]) / "versions").exists() else ""
    lines = [json.loads(line) for line in text.splitlines() if line.endswith("]")]
    return any(servers == 2 and rest <= update < table for servers, _, table, rest in lines)


def vanish(update: int) -> None:
    """The first server tells no other of that update, and is killed once a worker has read weights that have it: whose
    own push came right before, and was not known to be everywhere.
    """
    handle, send, advance = AsyncServer.handle, Replication._send_update, AsyncServer._advance
    held: list[Any] = []

    def late(server: AsyncServer, *message: Any) -> None:
        if message[-1].kind == Kind.APPLIED and message[-1].key[0] == update:
            held.append(message)
        else:
            handle(server, *message)
        while held and server.shard.applied > update:
            handle(server, *held.pop())

    def silent(replication: Replication, server: int, number: int) -> None:
        if number != update:
            send(replication, server, number)

    def last(server: AsyncServer) -> None:
        waiting = [*server.reads.waiting]
        advance(server)
        read = [link for link, frame in waiting if (link, frame) not in server.reads.waiting]
        if read and server.replication.leads and server.shard.server == 0 and server.shard.applied > update:
            others = [server.replication.peers[number] for number in server.replication.others]
            while not noted(update):
                for link in (*read, *others):
                    if link.sending:
                        link.advance()
                time.sleep(0.005)
            (Path(sys.argv[1]) / "vanished").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    AsyncServer.handle, Replication._send_update = late, silent  # type: ignore[method-assign]
    AsyncServer._advance = last  # type: ignore[method-assign]


def main() -> None:
    faults()
    if "TABLE" in os.environ:
        versions()
    if "VANISH" in os.environ and not (Path(sys.argv[1]) / "vanished").exists():
        vanish(int(os.environ["VANISH"]))
    if "WATCH" in os.environ:
        watch()
    if "BETWEEN" in os.environ:
        between()
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    momentum = float(os.environ.get("MOMENTUM", "0"))
    optimizer = lambda params: torch.optim.SGD(params, float(BATCH), momentum, nesterov=momentum > 0)
    trainer = paceline.Trainer(Counter(), loss, optimizer, global_batch=BATCH)
    turns = []
    for one in trainer.steps(TensorDataset(torch.arange(ROWS)), count=steps):
        turns.append([one.step, one.turn, one.samples])
        await_restored_server(one.step)
        if "TABLE" in os.environ:
            with (folder / "turns").open("a") as file:
                file.write(json.dumps([one.step, trainer.model.table.weight.flatten().tolist()]) + "\n")
    trainer.export(folder / "out.safetensors")
    if trainer.main:
        (folder / "told.json").write_text(json.dumps(turns))


if __name__ == "__main__":
    main()
