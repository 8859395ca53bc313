"""What goes between a worker and a parameter server beside what the machine can: a push and a pull of 64 MB.

Usage: server.py [--rounds N] [--host] [--hosts] [--record FILE]; --hosts as root. On one host beside writing into
shared memory, and another process reading it from there; between two hosts, which are network namespaces, beside a
stream through a socket, sent at once and received at once into memory that is there. A push is done when the server has
told the squares of the sum, whose gradients came as buckets of 16 MB; a pull when the worker has the weights. Rounds
alternate. Seconds of each, their ratio by round, and how much of one round ours alone does beside the link: reading the
sum once for its norm, and, between hosts, copying the weights from where they landed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from turns import compare, medians, record

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from networks import Host, network

from paceline.team.auth import keep_token

SIZE, TENSORS, BUCKET, WARM = 64 << 20, 16, 4, 4


def parts() -> Any:
    """A trainer of as many bytes, whose optimizer does nothing: what a server and a worker have of it."""
    import torch

    from paceline.plan import Plan

    params = {str(n): torch.nn.Parameter(torch.zeros(SIZE // TENSORS // 4)) for n in range(TENSORS)}
    job = SimpleNamespace(named=params, dense=[*params.values()], in_rows=[], sparse=False, optimizers=[], exact=False)
    updater = SimpleNamespace(names={}, apply=lambda *_: None)
    return SimpleNamespace(
        replica=SimpleNamespace(job=job, updater=updater),
        plan=Plan.parse("server=1"),
        done=0,
        params=[*params.values()],
    )


def serve(address: str, folder: str) -> None:
    import torch

    from paceline.base.environment import SERVERS
    from paceline.param_server.server import ParameterServer

    torch.set_num_threads(1)

    def tell(what: str, **more: Any) -> None:
        if "at" in more:
            print(json.dumps(more["at"]), flush=True)

    world: Any = SimpleNamespace(store=(address, 0), rank=SERVERS, tell=tell, run_dir=folder)
    server = ParameterServer(world)
    server.take()
    server.contexts.append(parts())
    server.serve(lambda moment: None)


def ours(at: Any, folder: str) -> tuple[Callable[[], None], Callable[[], None]]:
    import torch

    from paceline.checkpoint.tree import pack
    from paceline.param_server.client import RANKED, ServerClient
    from paceline.param_server.protocol import Kind
    from paceline.team.auth import handshake_key

    servers = ServerClient(1, 0, 0, lambda: {0: tuple(at)}, partial(handshake_key, folder), lambda: None)
    while not servers.ready_servers:
        servers.meet(0.1, True)
        for empty in servers.empty:
            servers.give(empty, pack({}))
    servers.met = True
    servers.use([0], 1)
    params, step = parts().params, [0]
    grads = [torch.ones(param.numel()) for param in params]
    servers.landings[0] = {number: torch.zeros(param.numel()) for number, param in enumerate(params)}

    def push() -> None:
        key = step[0], 1, 0
        servers.begin(0)
        for first in range(0, TENSORS, BUCKET):
            numbers = range(first, first + BUCKET)
            servers.put(0, Kind.PUSH, 0, key, [*numbers], [grads[number] for number in numbers])
            servers.advance()
        servers.put(0, Kind.SQUARES, 0, key, (), RANKED.pack(0, 1))
        servers.answers(Kind.SQUARES, 0, key)

    def pull() -> None:
        told = json.dumps({"count": 1, "loss": 0.0, "unused": [], "expected": 1.0, "norm": 1.0}).encode()
        servers.put(0, Kind.COMMIT, 0, (step[0], 1, 0), (), told)
        about = Kind.READ, 0, (step[0] + 1, 1, 0), lambda *_: str(step[0]).encode()
        servers.hear(servers.ask(*about), *about)
        with torch.no_grad():
            for number, param in enumerate(params):
                param.copy_(servers.landings[0][number])
        step[0] += 1

    return push, pull


def memories() -> list[Any]:
    import torch

    return [torch.ones(SIZE // 4) for _ in range(2)]


def mapped(path: str) -> list[Any]:
    import torch

    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 2 * SIZE)
    return list(torch.frombuffer(memory, dtype=torch.float32).chunk(2))


def raw_peer(address: str, path: str) -> None:
    """The other end of the raw side: through a file that is mapped, or the socket."""
    with socket.create_server((address, 0)) as listener:
        print(json.dumps([address, listener.getsockname()[1]]), flush=True)
        link, _ = listener.accept()
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    (taken, given), shared = memories(), mapped(path) if path else []
    while asked := link.recv(1):
        if asked == b"<" and path:
            taken.copy_(shared[0])
        elif asked == b"<":
            _receive(link, taken)
        elif path:
            shared[1].copy_(given)
        else:
            link.sendall(memoryview(given.numpy()).cast("B"))
            continue
        link.sendall(b".")


def _receive(link: socket.socket, target: Any) -> None:
    view = memoryview(target.numpy()).cast("B")
    while len(view):
        view = view[link.recv_into(view) :]


def raw(at: Any, path: str) -> tuple[Callable[[], None], Callable[[], None]]:
    link = socket.create_connection(tuple(at))
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    (given, taken), shared = memories(), mapped(path) if path else []

    def push() -> None:
        if path:
            shared[0].copy_(given)
        link.sendall(b"<")
        if not path:
            link.sendall(memoryview(given.numpy()).cast("B"))
        assert link.recv(1) == b"."

    def pull() -> None:
        link.sendall(b">")
        if path:
            assert link.recv(1) == b"."
            taken.copy_(shared[1])
        else:
            _receive(link, taken)

    return push, pull


def drive(folder: str, server: str, peer: str, path: str, rounds: int) -> None:
    """Prints seconds by side, of pushes and pulls."""
    import torch

    from paceline.compute.grad_noise import squares

    torch.set_num_threads(1)
    sides = {"paceline": ours(json.loads(server), folder), "raw": raw(json.loads(peer), path)}
    found: dict[str, list[list[float]]] = {side: [] for side in sides}
    for number in range(-WARM, rounds):
        for side in sorted(sides, reverse=number % 2 > 0):
            times = [time.perf_counter()]
            for part in sides[side]:
                part()
                times.append(time.perf_counter())
            if number >= 0:
                found[side].append([after - before for before, after in itertools.pairwise(times)])
    tensors = [torch.ones(SIZE // TENSORS // 4) for _ in range(TENSORS)]
    alone = []
    for _ in range(rounds):
        began = time.perf_counter()
        squares(tensors)
        alone.append(time.perf_counter() - began)
    print(json.dumps({**found, "squares": alone}))


def measured(rounds: int, hosts: Sequence[Host]) -> dict[str, Any]:
    """On one host, or two."""
    with ExitStack() as stack, tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        keep_token(Path(folder), secrets.token_hex(32).encode())
        path, address = "", "127.0.0.1"
        if hosts:
            address = hosts[0].address
        else:
            path = f"{folder}/raw"
            Path(path).write_bytes(bytes(2 * SIZE))

        def started(host: int, *words: str) -> subprocess.Popen[str]:
            command = [sys.executable, __file__, "--as", *words]
            process = subprocess.Popen(
                hosts[host].command(*command) if hosts else command,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            )
            stack.callback(process.kill)
            return process

        peers = [started(0, "serve", address, folder), started(0, "raw", address, path)]
        at = [peer.stdout.readline() for peer in peers if peer.stdout is not None]
        said, _ = started(1, "drive", folder, *at, path, str(rounds)).communicate(timeout=1200)
        return dict(json.loads(said.splitlines()[-1]))


def tell(name: str, found: dict[str, Any]) -> dict[str, Any]:
    results: dict[str, Any] = {"seconds": found}
    for part, what in enumerate(("push", "pull")):
        seconds = {side: [one[part] for one in found[side]] for side in ("raw", "paceline")}
        medians(f"{name}, {what} of {SIZE >> 20} MB", seconds)
        results[what] = compare(seconds, "raw", "paceline")
    both = {side: [sum(one) for one in found[side]] for side in ("raw", "paceline")}
    medians(f"{name}, both", both)
    results["both"] = compare(both, "raw", "paceline")
    print(f"  of a push {1000 * statistics.median(found['squares']):.1f} ms are the norm")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--host", action="store_true", help="on one host alone")
    parser.add_argument("--hosts", action="store_true", help="between two hosts alone")
    parser.add_argument("--record", type=Path, metavar="FILE", help="writes the raw figures")
    parser.add_argument("--as", nargs="+", dest="role", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        role, *words = options.role
        if role == "drive":
            drive(*words[:4], int(words[4]))
        else:
            {"serve": serve, "raw": raw_peer}[role](*words)
        return
    results, both = {}, options.host is options.hosts
    if options.host or both:
        results["one host"] = tell("one host", measured(options.rounds, []))
    if options.hosts or both:
        with tempfile.TemporaryDirectory() as base, network(2, Path(base)) as net:
            results["two hosts"] = tell("two hosts", measured(options.rounds, net.hosts))
    if options.record:
        about = {"bytes": SIZE, "tensors": TENSORS, "tensors of a bucket": BUCKET, "rounds": options.rounds}
        record(options.record, **about, results=results)


if __name__ == "__main__":
    main()
