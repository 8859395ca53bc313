"""What it costs the others when a worker on another host joins a run with a large state.

Usage: joining.py [--members N] [--record FILE], as root. 67 million parameters with AdamW, steps of about 3 s, mostly
pauses in forward and backward that stand for an accelerator: this machine's cores are not the measure. Members on one
host, a newcomer on another, each a network namespace with a link of 1 Gbit/s, and of 100 Mbit/s. At 1 Gbit/s
the state goes ahead beside training: by how much a step took longer meanwhile, on average. At 100 Mbit/s it cannot:
how long everybody waited, beside the time that as many bytes take over a plain socket.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from turns import record

from paceline.base.journal import read_journal

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from networks import Host, network

WIDTH, LAYERS, ROWS, PORT = 4096, 4, 64, 29400
FORWARD, BACKWARD = 0.9, 1.9  # seconds of a step's pauses, which stand for an accelerator
BEFORE, AFTER = 12, 3  # steps before the newcomer comes, and after it
PROBE = 64 << 20


def train(out: Path) -> None:
    import torch

    import paceline

    class Pause(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            time.sleep(FORWARD * len(x) / ROWS / LAYERS)
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            time.sleep(BACKWARD * len(grad) / ROWS / LAYERS)
            return grad

    class Layer(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(super().forward(Pause.apply(x)))

    torch.manual_seed(0)
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(ROWS, WIDTH), torch.randint(0, 8, (ROWS,)))
    layers = [Layer(WIDTH, WIDTH) for _ in range(LAYERS)]
    trainer = paceline.Trainer(
        torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 8)),
        lambda output, batch: torch.nn.functional.cross_entropy(output, batch[1]),
        lambda params: torch.optim.AdamW(params, lr=1e-5),
        global_batch=ROWS,
    )
    with (out / f"{os.getpid()}.times").open("w", buffering=1) as file:
        for report in trainer.steps(data, count=10_000):
            file.write(f"{report.step} {time.time()}\n")


def send(port: str) -> None:
    """What a plain socket needs for PROBE bytes, to a host that listens."""
    import socket

    with socket.create_connection(("10.77.0.2", int(port))) as wire:
        wire.sendall(bytes(PROBE // 4))  # what a queue on the way takes at once does not count
        began = time.perf_counter()
        wire.sendall(bytes(PROBE))
        wire.shutdown(socket.SHUT_WR)
        wire.recv(1)
        print(time.perf_counter() - began)


def take(port: str) -> None:
    import socket

    with socket.create_server(("10.77.0.2", int(port))) as server:
        wire, _ = server.accept()
        with wire:
            while wire.recv(1 << 20):
                pass
            wire.sendall(b"x")


def touch(size: int) -> None:
    """Memory of a virtual machine that nobody used yet comes from its host at the first touch, slowly."""
    import mmap

    with mmap.mmap(-1, size) as memory:
        for at in range(0, size, mmap.PAGESIZE):
            memory[at] = 1


def plain(hosts: list[Host]) -> float:
    """Bytes a second of a plain socket."""
    taker = subprocess.Popen(hosts[1].command(sys.executable, __file__, "--as", "take", "29800"))
    time.sleep(1)
    done = subprocess.run(
        hosts[0].command(sys.executable, __file__, "--as", "send", "29800"), check=True, capture_output=True
    )
    taker.wait()
    return PROBE / float(done.stdout)


def ends(out: Path) -> list[float]:
    """When each step was done, by the first worker."""
    files = sorted(out.glob("*.times"), key=lambda path: path.stat().st_ctime_ns)
    done: dict[int, float] = {}
    for file in files:
        for line in file.read_text().splitlines():
            step, at = line.split()
            done.setdefault(int(step), float(at))
    return [done[step] for step in sorted(done)]


def join(members: int, mbit: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as base, network(2, Path(base)) as net:
        folder = Path(base)
        for host in net.hosts:
            host.cap(mbit)
        speed = plain(net.hosts)
        launch = [sys.executable, "-m", "paceline", "run", "--save-every", "3600s"]
        script = [__file__, "--as", "train", base]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}

        def start(host: Host, name: str, *options: str) -> subprocess.Popen[bytes]:
            out = (folder / f"{name}.console").open("wb")
            command = host.command(*launch, "--run-dir", str(folder / name), *options, *script)
            return subprocess.Popen(command, env=environment, cwd=folder, stdout=out, stderr=out)

        first = start(net.hosts[0], "first", "--workers", str(members), "--listen", f"10.77.0.1:{PORT}")
        while len(ends(folder)) < BEFORE:
            if first.poll() is not None:
                raise SystemExit((folder / "first.console").read_text())
            time.sleep(0.1)
        came = time.time()
        token = str(folder / "first" / "token")
        second = start(net.hosts[1], "second", "--workers", "1", "--join", f"10.77.0.1:{PORT}", "--token-file", token)
        formed: list[dict[str, Any]] = []
        while not formed and second.poll() is None and first.poll() is None:
            time.sleep(0.2)
            formed = [event for event in read_journal(folder / "first") if event["event"] == "formed"]
        steps = len(ends(folder))
        while len(ends(folder)) < steps + AFTER and first.poll() is None:
            time.sleep(0.1)
        first.send_signal(signal.SIGTERM)
        if (first.wait(60), second.wait(60)) != (75, 75):
            raise SystemExit((folder / "first.console").read_text() + (folder / "second.console").read_text())
        done = ends(folder)
        took = [after - before for before, after in pairwise(done)]
        # The step that ended last before the team had formed, and what forming added, belong to the time of joining.
        before = [seconds for seconds, at in zip(took, done[1:], strict=True) if at < came][-6:]
        during = [s for s, at in zip(took, done[1:], strict=True) if at - s < formed[0]["at"] and at > came]
        usual = statistics.median(before)
        told = re.search(r"everybody waits for about (\S+ \S+), .*", (folder / "first.console").read_text())
        said = {"told": told[0] if told else None, "plain bytes a second": speed, "usual": usual}
        after = [s for s, at in zip(took, done[1:], strict=True) if at - s >= formed[0]["at"]][1:]
        gives = next(event for event in read_journal(folder / "first") if event["event"] == "gives")
        said |= {"bytes": gives["bytes"], "whole": gives["whole"], "forming": formed[0]["seconds"]}
        return {**said, "before": before, "during": during, "after": after}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, default=1)
    parser.add_argument("--mbit", type=int, nargs="*", default=[1000, 100])
    parser.add_argument("--record", type=Path, metavar="FILE", help="writes the raw figures")
    parser.add_argument("--as", nargs=2, dest="role", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        role, what = options.role
        {"train": lambda text: train(Path(text)), "send": send, "take": take}[role](what)
        return
    touch(12 << 30)
    results = {}
    for mbit in options.mbit:
        found = results[f"{mbit} Mbit/s"] = join(options.members, mbit)
        usual, during, alone = found["usual"], found["during"], found["whole"] / found["plain bytes a second"]
        last = statistics.median(found["after"])  # the step that the newcomer takes part in first
        pause, rise = max(during) - last, (sum(during) - last) / (len(during) - 1) / usual
        found |= {"rise": rise, "pause": pause, "of a plain transfer": pause / alone}
        print(f"{mbit} Mbit/s: a step {usual:.2f} s before, {last:.2f} s after")
        print(f"  {len(during) - 1} steps meanwhile, with what forming took {rise:.3f} of one before on average")
        print(f"  handed over at last: {found['bytes'] / 1e6:.1f} of {found['whole'] / 1e6:.1f} MB")
        print(f"  the longest step took {pause:.2f} s more than one after, {pause / alone:.2f} of a plain transfer")
        print(f"  told: {found['told'] or 'nothing, there was no wait'}", flush=True)
    if options.record:
        record(options.record, members=options.members, threads=1, results=results)


if __name__ == "__main__":
    main()
