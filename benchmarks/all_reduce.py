"""All-reduce among the workers of one host: Paceline's transport beside gloo and Open MPI, float32 sums.

    python benchmarks/all_reduce.py [--workers 2 4] [--sizes 4K 1M ...] [--rounds 15] [--record FILE]

Paceline and gloo run in the same processes, each size after each other in alternating order. Open MPI has processes of
its own, which spin while they wait: so it starts anew after each round, while the others sleep. Every figure is the
median over rounds of the seconds of one operation on worker 0's clock; the first operation of each kind checks the sum
and does not count. Rules: one thread per worker; Open MPI's workers are bound to cores where there is one for each,
Paceline's and gloo's are not; gloo connects over the loopback.

in place    a tensor of memory that the workers share, as the Trainer's gradients are
ordinary    any other tensor
copy        no sum at all: each worker copies its share of a peer's tensor into its own once, the least that any
            all-reduce in place must do
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from turns import record

HERE = Path(__file__).resolve()
SIZES = ["4K", "16K", "64K", "256K", "1M", "4M", "16M", "64M", "256M"]
UNITS = {"K": 1 << 10, "M": 1 << 20}
Figures = dict[int, dict[str, list[float]]]  # by bytes and contender, a figure per round


def number(size: str) -> int:
    return int(size[:-1]) * UNITS[size[-1].upper()] if size[-1].upper() in UNITS else int(size)


def times(size: int) -> int:
    """How often an operation is repeated within one figure."""
    return max(2, min(200, (32 << 20) // size))


# -- a worker of Paceline and gloo -------------------------------------------------------------------------------


def contenders(size: int) -> dict[str, Callable[[], object]]:
    """One operation of each kind, ready to be repeated; the sums are checked here."""
    import torch
    import torch.distributed as dist

    world = dist.group.WORLD
    rank, workers, count = dist.get_rank(), dist.get_world_size(), size // 4
    in_place = world.channel.allocate(count, torch.float32)  # type: ignore[union-attr]
    arena = world.channel.in_arena(in_place)  # type: ignore[union-attr]
    if arena is None:
        sys.exit("there is no memory to share here")
    ordinary, over_gloo = torch.empty(count), torch.empty(count)
    share = slice(count * rank // workers, count * (rank + 1) // workers)
    mine, theirs = in_place[share], arena.parts[(rank + 1) % workers][share]
    found: dict[str, Callable[[], object]] = {
        "in place": lambda: dist.all_reduce(in_place),
        "ordinary": lambda: dist.all_reduce(ordinary),
        "gloo": lambda: dist.all_reduce(over_gloo, group=GLOO),
        "copy": lambda: mine.copy_(theirs),
    }
    for name, tensor in (("in place", in_place), ("ordinary", ordinary), ("gloo", over_gloo)):
        tensor.fill_(1)
        dist.barrier()
        found[name]()
        assert bool((tensor == workers).all()), name
        dist.barrier()
        tensor.zero_()  # zeros stay zeros, however often they are added
    found["copy"]()
    return found


def work() -> None:
    """Reads "BYTES TIMES TURN" lines; worker 0 answers each with the seconds of all contenders."""
    global GLOO
    import torch
    import torch.distributed as dist

    from paceline.comm.autoload import register

    torch.set_num_threads(1)
    register()
    rank, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("paceline", init_method=f"file://{os.environ['STORE']}", rank=rank, world_size=workers)
    GLOO = dist.new_group(backend="gloo")
    ready: dict[int, dict[str, Callable[[], object]]] = {}
    for line in sys.stdin:
        size, repeat, turn = map(int, line.split())
        if size not in ready:
            ready[size] = contenders(size)
        seconds = {}
        for name in sorted(ready[size], reverse=turn % 2 == 1):
            operation = ready[size][name]
            operation()
            dist.barrier()
            began = time.perf_counter()
            for _ in range(repeat):
                operation()
            seconds[name] = (time.perf_counter() - began) / repeat
            dist.barrier()
        if rank == 0:
            print(json.dumps(seconds), flush=True)
    dist.destroy_process_group()


# -- both sides, as processes ------------------------------------------------------------------------------------


@contextmanager
def team(workers: int, folder: Path) -> Iterator[Callable[[int, int], dict[str, float]]]:
    """Workers of Paceline and gloo, and how to have a size measured."""
    common = {"WORLD_SIZE": str(workers), "STORE": str(folder / f"store-{workers}")}
    common |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    started = [
        subprocess.Popen(
            [sys.executable, HERE, "--work"],
            env={**os.environ, **common, "RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(workers)
    ]

    def measure(size: int, turn: int) -> dict[str, float]:
        for process in started:
            assert process.stdin is not None
            process.stdin.write(f"{size} {times(size)} {turn}\n")
            process.stdin.flush()
        assert started[0].stdout is not None
        line = started[0].stdout.readline()
        if not line:
            sys.exit("a worker failed")
        found: dict[str, float] = json.loads(line)
        return found

    try:
        yield measure
        for process in started:
            process.communicate(timeout=60)  # the end of its input ends it
    finally:
        for process in started:
            process.kill()


def compiled(folder: Path) -> Path | None:
    """The MPI program; None, and a word about it, where there is no Open MPI."""
    if not (shutil.which("mpicc") and shutil.which("mpirun")):
        print("no Open MPI here: .ci/servers installs it")
        return None
    program = folder / "all_reduce"
    subprocess.run(["mpicc", "-O2", "-o", program, HERE.with_suffix(".c")], check=True)
    return program


def open_mpi(program: Path, workers: int, sizes: list[int]) -> dict[int, float]:
    crowded = workers > len(os.sched_getaffinity(0))
    pairs = [str(value) for size in sizes for value in (size, times(size))]
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none" if crowded else "core"]
    command += ["-n", str(workers), str(program), *pairs]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    lines = (line.split() for line in done.stdout.splitlines())
    return {int(size): float(seconds) for size, seconds in lines}


def measure(workers: int, sizes: list[int], rounds: int, folder: Path, program: Path | None) -> Figures:
    figures: Figures = {size: {} for size in sizes}
    with team(workers, folder) as ours:
        for turn in range(rounds):
            for size in sizes:
                for name, seconds in ours(size, turn).items():
                    figures[size].setdefault(name, []).append(seconds)
            if program is not None:
                for size, seconds in open_mpi(program, workers, sizes).items():
                    figures[size].setdefault("Open MPI", []).append(seconds)
    return figures


# -- what comes out ----------------------------------------------------------------------------------------------


def shown(seconds: float) -> str:
    return f"{1e6 * seconds:.0f} µs" if seconds < 1e-3 else f"{1e3 * seconds:.1f} ms"


def ratio(figures: dict[str, list[float]], over: str, under: str) -> str:
    """The median of the ratios of each round."""
    if over not in figures or under not in figures:
        return "-"
    pairs = zip(figures[over], figures[under], strict=True)
    return f"{statistics.median(a / b for a, b in pairs):.2f}"


def table(workers: int, figures: Figures) -> None:
    names = ["in place", "ordinary", "gloo", "Open MPI", "copy"]
    ratios = [("gloo", "ordinary"), ("Open MPI", "ordinary"), ("Open MPI", "in place"), ("in place", "copy")]
    print(f"\n{workers} workers   {''.join(f'{name:>12}' for name in names)}   ", end="")
    print("".join(f"{f'{over} / {under}':>22}" for over, under in ratios))
    for size, found in figures.items():
        size_text = f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} KB"
        cells = [shown(statistics.median(found[name])) if name in found else "-" for name in names]
        print(f"{size_text:>9}   {''.join(f'{cell:>12}' for cell in cells)}   ", end="")
        print("".join(f"{ratio(found, *pair):>22}" for pair in ratios), flush=True)


def version(program: Path | None) -> str:
    if program is None:
        return ""
    return subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=True).stdout.split("\n")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", nargs="+", default=SIZES, help="bytes, with K or M behind them")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work()
        return
    sizes, results = [number(size) for size in options.sizes], {}
    with tempfile.TemporaryDirectory() as name:
        program = compiled(Path(name))
        mpi = version(program)
        for workers in options.workers:
            results[workers] = measure(workers, sizes, options.rounds, Path(name), program)
            table(workers, results[workers])
    if options.record:
        record(options.record, open_mpi=mpi, threads=1, rounds=options.rounds, seconds=results)


if __name__ == "__main__":
    main()
