"""Trains with the plan that `--plan` says, and writes weights and figures: served.py FOLDER STEPS

With KILL=WORKER:CALLS that worker is killed, once, when its loss is called so often; with SLOW=CALLS the first worker
makes the file `reached` when its loss is called so often, and is slow from then on until there is the file `gate`; with
CUT=N connections to servers are lost after each N frames; with PROXY=PORT they go through what listens there, and is
told first where to; X"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.base.handshake import SEAL
from paceline.param_server import client as servers
from paceline.param_server import protocol as frames
from paceline.param_server.client import ServerClient
from paceline.session.run import Run

SEED, BATCH, MICRO, ROWS, WIDTH, CLIP = 5, 12, 2, 40, 6, 0.3
CALLS = [0]


def data() -> TensorDataset:
    draw = torch.Generator().manual_seed(SEED)
    return TensorDataset(
        torch.randn(ROWS, WIDTH, generator=draw).double(), torch.randn(ROWS, 2, generator=draw).double()
    )


def net() -> nn.Module:
    parts = [nn.Linear(WIDTH, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 8), nn.Linear(8, 2)]
    return nn.Sequential(*parts).double()


def groups(params: Any) -> torch.optim.Optimizer:
    """No decay for what has one dimension."""
    params = list(params)
    if "NESTEROV" in os.environ:
        return nesterov(params)
    kinds = [[one for one in params if one[1].dim() > 1], [one for one in params if one[1].dim() <= 1]]
    decays = zip(kinds, (0.1, 0.0), strict=True)
    return torch.optim.AdamW([{"params": some, "weight_decay": decay} for some, decay in decays], lr=0.02, eps=1e-3)


def nesterov(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.8, nesterov=True, weight_decay=0.1)


def rate(step: int) -> float:
    return 1 / (1 + step)


def loss(output: torch.Tensor, batch: Any) -> Any:
    act()
    return (output - batch[1]).square().sum(1).mean()


def act() -> None:
    CALLS[0] += 1
    worker, _, calls = os.environ.get("KILL", ":").partition(":")
    mine = worker and worker == os.environ.get("PACELINE_RANK") and CALLS[0] == int(calls)
    if mine and not (done := Path(sys.argv[1]) / "killed").exists():
        done.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if "SLOW" in os.environ and CALLS[0] >= int(os.environ["SLOW"]) and os.environ["PACELINE_RANK"] == "0":
        (Path(sys.argv[1]) / "reached").touch()
        time.sleep(0.0 if (Path(sys.argv[1]) / "gate").exists() else 0.3)


def cut(every: int) -> None:
    """The connection is lost after each so many frames, which have gone or not; `cuts` has a line for each."""
    put, made = ServerClient.put, [0]

    def cutting(servers: ServerClient, server: int, *frame: Any) -> None:
        put(servers, server, *frame)
        made[0] += 1
        if made[0] % every == 0:
            servers.links[server].advance()
            servers.links[server].close()
            with (Path(sys.argv[1]) / "cuts").open("a") as file:
                file.write("cut\n")

    ServerClient.put = cutting  # type: ignore[method-assign]


def through(port: int) -> None:
    """A worker's connections to servers go through a proxy, which may repeat what has a seal."""

    def connect(at: tuple[str, int], seconds: float) -> socket.socket:
        link = socket.create_connection(("127.0.0.1", port), seconds)
        link.sendall(f"{at[0]} {at[1]}\n".encode())
        return link

    servers.socket = SimpleNamespace(create_connection=connect)  # type: ignore[assignment]
    frames.MessageSeals.next = lambda self, part: bytes(SEAL)  # type: ignore[method-assign]


def faults() -> None:
    if "CUT" in os.environ:
        cut(int(os.environ["CUT"]))
    if "PROXY" in os.environ:
        through(int(os.environ["PROXY"]))
    if "FAR" in os.environ:
        frames._memory_domain = lambda: ""
    while "START" in os.environ and not Path(os.environ["START"]).exists():
        time.sleep(0.05)


def await_restored_server(step: int) -> None:
    """Called after each step: which the others go on from in that generation, or are in it already."""
    team = Run.current().team.transactions
    while step == int(os.environ.get("RESTORED", "-1")) and not (team.newcomers or team.number > 0):
        time.sleep(0.005)


def main() -> None:
    faults()
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    trainer = paceline.Trainer(
        net, loss, groups, global_batch=BATCH, schedule=rate, clip_norm=CLIP, seed=SEED, plan=f"micro={MICRO}"
    )
    score = lambda output, batch: {"far": ((output - batch[1]).abs().sum(), len(output))}
    before = trainer.evaluate(data(), score)
    figures = []
    for report in trainer.steps(data(), count=steps):
        figures.append([report.step, report.loss, report.lr, report.grad_norm])
        await_restored_server(report.step)
    after = trainer.evaluate(data(), score)
    trainer.export(folder / "out.safetensors")
    if trainer.main:
        (folder / "told.json").write_text(json.dumps({"figures": figures, "evaluated": [before, after]}))


if __name__ == "__main__":
    main()
