"""What codecs are worth on a slow link, beside DistributedDataParallel and its communication hooks.

Usage: slow_link.py [--mbit N ...] [--delay MS] [--side S ...] [--steps N] [--seeds N] [--from-seed N] [--record FILE],
as root; 0 is a link that is not capped. Two hosts of one worker, each a network namespace whose interface lets so many
Mbit/s out (a token bucket). An MLP of 6.3 million parameters (25 MB of gradients) learns a teacher's classes: so
little to compute that the link decides. All sides have the same rows, weights, optimizer (SGD with momentum) and
learning rate; ours with no codec has what DDP has. Seconds a step (the median of the later half, in which nothing is
tried any more), bytes a step by the interfaces' counters, the loss of the held-out rows after as many steps, and the
seconds until DDP's loss is reached on them. `raw` is one connection over which each host sends the other as many bytes
as there are gradients: what the link can do.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from turns import record

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from networks import far, network

WIDTH, DEPTH, CLASSES, ROWS, RATE, PORT = 1024, 6, 16, 64, 0.02, 29500
EVERY = 5  # steps between two looks at the held-out rows
DDP = {"ddp": "", "ddp fp16": "fp16", "ddp powersgd:4": "powersgd"}
OURS = ["none", "bf16", "int8", "powersgd:4", "auto", "auto:lossy"]
SIDES = ["raw", *DDP, *OURS]


def job(seed: int) -> tuple[Any, Any, Any, Any, Any]:
    """Model, rows and classes to learn from, and others to look at."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model, teacher = nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES)), nn.Linear(WIDTH, CLASSES)
    for layer in layers[::2]:
        nn.init.kaiming_normal_(layer.weight)
    x = torch.randn(40 * ROWS + 1024, WIDTH)
    with torch.no_grad():
        y = teacher(x.relu()).argmax(1)
    return model, x[:-1024], y[:-1024], x[-1024:], y[-1024:]


def ddp(hook: str, steps: int, seed: int) -> Iterator[Callable[[], float]]:
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
    from torch.nn.parallel import DistributedDataParallel

    model, x, y, *held = job(seed)
    dist.init_process_group("gloo")
    wrapped = DistributedDataParallel(model)
    if hook == "fp16":
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook:
        state = power.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, power.powerSGD_hook)
    update, half = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9), ROWS // 2
    for step in range(steps):
        at = step % 40 * ROWS + dist.get_rank() * half
        update.zero_grad()
        F.cross_entropy(wrapped(x[at : at + half]), y[at : at + half]).backward()
        update.step()
        yield lambda: float(F.cross_entropy(model(held[0]), held[1]).detach())
    dist.destroy_process_group()


def raw(steps: int) -> Iterator[None]:
    """What the link can do: each host sends the other as many bytes as there are gradients, over one connection."""
    size = 4 * sum(param.numel() for param in job(0)[0].parameters())
    at = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if os.environ["RANK"] == "0":
        with socket.create_server(at) as server:
            link = server.accept()[0]
    else:
        link = connected(at)
    given, taken = bytes(size), memoryview(bytearray(size))
    for _ in range(steps):
        sender = threading.Thread(target=link.sendall, args=[given])
        sender.start()
        rest = taken
        while rest:
            rest = rest[link.recv_into(rest) :]
        sender.join()
        yield None
    link.close()


def connected(at: tuple[str, int]) -> socket.socket:
    for _ in range(600):
        with suppress(OSError):
            return socket.create_connection(at)
        time.sleep(0.1)
    raise SystemExit(f"nobody listens at {at[0]}:{at[1]}")


def ours(codec: str, steps: int, seed: int) -> Iterator[Callable[[], float]]:
    import torch
    import torch.nn.functional as F
    from torch.utils.data import TensorDataset

    import paceline

    model, x, y, *held = job(seed)
    trainer = paceline.Trainer(
        model,
        lambda output, batch: F.cross_entropy(output, batch[1]),
        lambda params: torch.optim.SGD(params, lr=RATE, momentum=0.9),
        global_batch=ROWS,
        plan=f"micro={ROWS // 2}" + (f" codec={codec}" if codec != "none" else ""),
    )
    for _ in trainer.steps(TensorDataset(x, y), count=steps, order=lambda position, *_: position):
        yield lambda: float(F.cross_entropy(trainer.model(held[0]), held[1]).detach())


def counted() -> int:
    """Bytes that left this host so far."""
    (line,) = (line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("eth0:"))
    return int(line.partition(":")[2].split()[8])


def train(side: str, steps: int, seed: int) -> None:
    """Prints when each step was done, the bytes that had left by then, and the held-out loss now and then."""
    import torch

    torch.set_num_threads(1)
    stepping: Iterator[Any] = (
        raw(steps) if side == "raw" else ddp(DDP[side], steps, seed) if side in DDP else ours(side, steps, seed)
    )
    ends, bytes_, cpu, losses, looked = [], [], [], {}, 0.0
    for number, look in enumerate(stepping, 1):
        ends.append(time.perf_counter() - looked)  # looking is not training
        bytes_.append(counted())
        cpu.append(time.process_time())
        if look is not None and (number % EVERY == 0 or number == steps):
            began = time.perf_counter()
            with torch.no_grad():
                losses[number] = look()
            looked += time.perf_counter() - began
    print("\n" + json.dumps({"ends": ends, "bytes": bytes_, "cpu": cpu, "losses": losses}))


def on_two_hosts(script: Sequence[str], mbit: int, delay: float = 0.0) -> tuple[list[Any], str]:
    """What a script with these words says at last on each of two hosts of one worker, as JSON, and what both log."""
    said, processes, lines = [], [], ""
    with tempfile.TemporaryDirectory() as base, network(2, Path(base)) as net, ExitStack() as stack:
        if delay:
            stack.enter_context(far(*net.hosts, delay / 1000))
        for host in net.hosts if mbit else ():
            host.cap(mbit)
        for rank, host in enumerate(net.hosts):
            env = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "OMP_NUM_THREADS": 1}
            env |= {"MASTER_ADDR": net.hosts[0].address, "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": "eth0"}
            command = host.command(sys.executable, *script)
            variables = {**os.environ, **{name: str(value) for name, value in env.items()}}
            pipe = subprocess.PIPE
            processes.append(subprocess.Popen(command, env=variables, cwd=base, stdout=pipe, stderr=pipe, text=True))
        try:
            for process in processes:
                out, err = process.communicate(timeout=3600)
                if process.returncode:
                    raise SystemExit(f"{' '.join(script)} at {mbit} Mbit/s:\n{err}")
                lines += err
                said.append(json.loads(out.splitlines()[-1]))
        finally:
            for process in processes:
                process.kill()
    return said, lines


def run(side: str, mbit: int, delay: float, steps: int, seed: int) -> dict[str, Any]:
    said, lines = on_two_hosts([__file__, "--as", side, str(steps), str(seed)], mbit, delay)
    ends, warm = said[0]["ends"], steps // 2
    took = [after - before for before, after in zip(ends[warm - 1 :], ends[warm:], strict=False)]
    sent = max((one["bytes"][-1] - one["bytes"][warm - 1]) / (steps - warm) for one in said)
    chosen = [line for line in lines.splitlines() if line.startswith(("bucket ", "codecs tried"))]
    cpu = max((one["cpu"][-1] - one["cpu"][warm - 1]) / (steps - warm) for one in said)
    losses = {int(step): loss for step, loss in said[0]["losses"].items()}
    found = {
        "seconds": statistics.median(took),
        "took": took,
        "sent": sent,
        "cpu": cpu,
        "losses": losses,
        "chosen": chosen,
    }
    return {**found, "ends": [end - ends[0] for end in ends]}


def reaches(found: dict[str, Any], loss: float) -> float | None:
    """Seconds from the end of the first step until the held-out loss was no more than that."""
    steps = [step for step, value in found["losses"].items() if value <= loss]
    return found["ends"][min(steps) - 1] if steps else None


def tell(mbit: int, results: dict[str, list[dict[str, Any]]], gradient: int) -> None:
    print(f"{mbit} Mbit/s" if mbit else "not capped")
    median = {side: statistics.median(one["seconds"] for one in found) for side, found in results.items()}
    whole = 2 * (2 - 1) / 2 * gradient
    for side, found in results.items():
        sent, cpu = (statistics.fmean(one[name] for one in found) for name in ("sent", "cpu"))
        text = f"  {side:15} {median[side]:8.3f} s a step ({cpu:.2f} s of a core), "
        text += f"{sent / 1e6:7.2f} MB ({sent / whole:6.1%})"
        if "raw" in results:
            text += f", {median[side] / median['raw']:5.2f} of a raw stream's"
        if side != "raw":
            text += f", loss {statistics.fmean(list(one['losses'].values())[-1] for one in found):.4f}"
        if "ddp" in results and side != "raw":
            goals = zip(found, results["ddp"], strict=True)
            until = [reaches(one, 1.02 * list(base["losses"].values())[-1]) for one, base in goals]
            reached = [seconds for seconds in until if seconds is not None]
            text += f", {median['ddp'] / median[side]:6.2f} times as fast as ddp"
            text += f", its loss after {statistics.fmean(reached):.1f} s" if len(reached) == len(until) else ""
        print(text, flush=True)
        for line in found[0]["chosen"]:
            print(f"    {line}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mbit", type=int, nargs="*", default=[10, 50, 100, 500, 0])
    parser.add_argument("--delay", type=float, default=0.0, metavar="MS", help="one way, instead of that of a switch")
    parser.add_argument("--side", nargs="*", choices=SIDES, default=SIDES)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--from-seed", type=int, default=0, metavar="N", help="the first of these")
    parser.add_argument("--record", type=Path, metavar="FILE", help="writes the raw figures")
    parser.add_argument("--as", nargs=3, dest="role", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        side, steps, seed = options.role
        train(side, int(steps), int(seed))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the hosts go with it
    gradient = 4 * sum(param.numel() for param in job(0)[0].parameters())
    results: dict[str, Any] = {}
    for mbit in options.mbit:
        of_rate: dict[str, list[dict[str, Any]]] = {side: [] for side in options.side}
        for seed in range(options.from_seed, options.from_seed + options.seeds):
            for side in options.side:
                found = run(side, mbit, options.delay, options.steps, seed)
                of_rate[side].append(found)
                print(f"{mbit} Mbit/s, {side}: {found['seconds']:.3f} s a step", file=sys.stderr, flush=True)
        results[f"{mbit} Mbit/s"] = of_rate
        tell(mbit, of_rate, gradient)
    if options.record:
        about = {"gradient": gradient, "delay": options.delay, "rows": ROWS, "steps": options.steps, "threads": 1}
        record(options.record, **about, results=results)


if __name__ == "__main__":
    main()
