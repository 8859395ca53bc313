"""GPT-2 of 124 M parameters on GPUs: `precision=bf16 compile` of a Trainer beside torch's plain loop and beside DDP.

    make gpu                                                  # the GPU tests, then all of this, and a record of both
    python benchmarks/gpu.py [--batch B] [--rounds 15] [--minutes 9] [--record FILE] [--tests]
    python benchmarks/gpu.py --cpu --eager --layers 2 --width 64 --length 32 --vocabulary 97 --batch 2 --rounds 2

The last line tries whether it runs. All sides take turns like those of step_time.py, and get the same GPT-2
(models.py, no dropout), fused AdamW, and the same rows, of each worker in one micro-batch; their losses must agree to
1 % in every step.

plain     torch.compile(model), torch.autocast(bfloat16), rows copied ahead from pinned memory
ddp       the same in DistributedDataParallel, over NCCL
trainer   `paceline run --plan "precision=bf16 compile"`

The first part uses one GPU. The second one, `fp8`, does so, too: the plain loop converts the blocks' linear layers with
torchao, and the plan is "precision=fp8 compile". It fails if the plan takes more than 2 % longer than the plain loop,
and is skipped where the GPU or the installation lacks 8-bit products. The last part, without the plain loop, uses all
GPUs of the machine; where there is one, it is skipped, which a line says. `--batch` is the rows of a worker; without it
they are as many as the memory holds for all sides together. A part that fails is tried once more with half as many.
After `--minutes` in all, the part under way is ended, and the record has what was measured until then. The exit code is
1 unless all parts were measured.

A token takes 6 N + 12 L W T operations for N parameters, L layers of width W and sequences of T tokens (PaLM, arXiv
2204.02311, appendix B); the utilisation is what that makes a second beside the dense bfloat16 peak that the GPU's maker
tells. Memory is the most that torch held of a GPU, without what NCCL and CUDA take themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import GPT2
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset
from turns import WARM_UP, Processes, compare, give, launch, medians, record, take

import paceline

ROOT = Path(__file__).resolve().parents[1]
AGREE, EACH, MOST = 0.01, 5, 32  # losses, steps of a turn, rows of a worker
LONGER = 1.02  # of the time of torchao by hand
PEAKS = {"A100": 312e12, "H100": 989.4e12, "H200": 989.4e12}  # NVIDIA's data sheets: operations a second


class OutOfTimeError(Exception):
    """All minutes are spent."""


def model(sizes: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    return GPT2(sizes.width, sizes.layers, max(1, sizes.width // 64), sizes.length, sizes.vocabulary)


def loss_of(logits: torch.Tensor, batch: Any) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten())


def rows(sizes: argparse.Namespace, steps: int) -> TensorDataset:
    shape = (steps * sizes.batch * sizes.workers, sizes.length)
    return TensorDataset(torch.randint(0, sizes.vocabulary, shape, generator=torch.Generator().manual_seed(0)))


def in_8_bits(net: nn.Module) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(net.blocks, config=Float8LinearConfig(pad_inner_dim=True))


def by_hand(sizes: argparse.Namespace, side: str, steps: int) -> Iterator[float]:
    """The loop as people write it."""
    rank, width = int(os.environ["RANK"]), sizes.batch * sizes.workers
    device = torch.device("cpu") if sizes.cpu else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if not sizes.cpu:
        torch.cuda.set_device(device)
    net = model(sizes).to(device)
    if sizes.fp8:
        in_8_bits(net)
    update = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    if side == "ddp":
        dist.init_process_group("gloo" if sizes.cpu else "nccl")
        net = DistributedDataParallel(net, device_ids=None if sizes.cpu else [device.index])
    forward = net if sizes.eager else torch.compile(net)
    mine = [step * width + rank * sizes.batch + row for step in range(steps) for row in range(sizes.batch)]
    try:
        for batch in DataLoader(Subset(rows(sizes, steps), mine), sizes.batch, pin_memory=not sizes.cpu):
            moved = [part.to(device, non_blocking=True) for part in batch]
            with torch.autocast(device.type, torch.bfloat16):
                loss = loss_of(forward(moved[0]), moved)
            update.zero_grad()
            loss.backward()
            update.step()
            yield loss.item()
    finally:
        if side == "ddp":
            dist.destroy_process_group()


def ours(sizes: argparse.Namespace, steps: int) -> Iterator[float]:
    trainer = paceline.Trainer(
        model=lambda: model(sizes),
        loss=loss_of,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4),
        global_batch=sizes.batch * sizes.workers,
        plan=f"precision={'fp8' if sizes.fp8 else 'bf16'} micro={sizes.batch}{'' if sizes.eager else ' compile'}",
    )
    for report in trainer.steps(rows(sizes, steps), count=steps, order=lambda position, size, seed, epoch: position):
        yield report.loss


def work(sizes: argparse.Namespace, steps: int) -> None:
    """What a worker does; at last it notes how much memory it took."""
    side, address, notes = sizes.worker
    rank = paceline.join().rank if side == "trainer" else int(os.environ["RANK"])
    take(address, side, rank, ours(sizes, steps) if side == "trainer" else by_hand(sizes, side, steps))
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if sizes.cpu else torch.cuda.max_memory_allocated()
    Path(notes, f"{side}-{rank}").write_text(str(peak))


def start(options: argparse.Namespace, folder: str, side: str, address: str) -> Processes:
    """The workers of a side, with the options of this process."""
    said = {name: getattr(options, name) for name in ("layers", "width", "length", "vocabulary", "rounds", "batch")}
    arguments = [f"--{name}={value}" for name, value in {**said, "workers": options.workers}.items()]
    arguments += [f"--{name}" for name in ("cpu", "eager", "fp8") if getattr(options, name)]
    script = [str(Path(__file__).resolve()), "--worker", side, address, folder, *arguments]
    if side != "trainer":
        return launch(script, os.environ, workers=options.workers)
    fixed = ["--workers", str(options.workers), "--shares", ",".join("1" * options.workers), "--max-restarts", "0"]
    command = [
        "-m",
        "paceline",
        "run",
        *fixed,
        "--quiet",
        "--run-dir",
        f"{folder}/run",
        "--save-every",
        "1000000",
    ]
    return [subprocess.Popen([sys.executable, *command, *script])]


def measure(options: argparse.Namespace, sides: tuple[str, ...], name: str) -> dict[str, object]:
    """One part: what all sides take in turns, on `options.workers` workers each."""
    started: Processes = []

    def begin(side: str, address: str) -> Processes:
        print(f"  {side} starts and compiles ...", flush=True)
        started.extend(processes := start(options, folder, side, address))
        return processes

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            taken = give(sides, begin, options.rounds, EACH, workers=options.workers)
        finally:
            for process in started:  # their memory is needed, and their files are in the folder
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
        peaks = {side: max(int(path.read_text()) for path in Path(folder).glob(f"{side}-*")) for side in sides}
    medians(f"{name}, {options.batch} rows for each worker", taken.seconds)
    found: dict[str, object] = {"batch": options.batch, "workers": options.workers, "seconds": taken.seconds}
    for other in sides[:-1]:  # tokens a second, the trainer's beside theirs
        found |= compare(taken.seconds, other, sides[-1])
    for side in sides:
        found[side] = utilisation(options, name, statistics.median(taken.seconds[side])) | {"memory": peaks[side]}
        print(f"  {side} held {peaks[side] / 1e9:.2f} GB of memory at most", flush=True)
    found["losses apart"] = apart = taken.apart()
    print(f"  losses {apart:.1e} apart at most", flush=True)
    if not apart <= AGREE:
        raise RuntimeError(f"losses are {apart:.1e} apart, so it is not the same training")
    if options.fp8 and (ratio := 1 / found["plain/trainer"]["ratio"]) > LONGER:
        raise RuntimeError(f"the plan takes {ratio:.3f} times as long as torchao by hand")
    return found


def utilisation(sizes: argparse.Namespace, name: str, seconds: float) -> dict[str, object]:
    """Of a worker, in a step of so many seconds on the device of that name."""
    parameters = sum(param.numel() for param in model(sizes).parameters())
    operations = 6 * parameters + 12 * sizes.layers * sizes.width * sizes.length
    tokens = sizes.batch * sizes.length / seconds
    found: dict[str, object] = {"tokens a second": tokens, "operations a second": tokens * operations}
    for peak in (peak for known, peak in PEAKS.items() if known in name):
        found["utilisation"] = tokens * operations / peak
    share = f", {found['utilisation']:.1%} of what {name} can do" if "utilisation" in found else ""
    print(f"  {tokens:,.0f} tokens a second, {tokens * operations / 1e12:.2f} TFLOP/s of a worker{share}")
    return found


def fitting(sizes: argparse.Namespace, sides: int) -> int:
    """Rows that each of so many sides has memory for: what a block and the logits keep for a backward, by estimate."""
    row = sizes.length * (34 * sizes.layers * sizes.width + 12 * sizes.vocabulary)
    beside = 2e9 + 20 * sum(param.numel() for param in model(sizes).parameters())
    free, _ = torch.cuda.mem_get_info()
    return max(1, min(MOST, int((0.85 * free / sides - beside) / row)))


def gpu_tests() -> dict[str, object]:
    """What `pytest -m gpu` says; of the files that have such tests, since others need more than a GPU's machine has."""
    files = [str(file) for file in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in file.read_text()]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "--tb=short", "-p", "no:cacheprovider", *files]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout is not None
        last = ""
        try:
            for last in tests.stdout:
                print(f"  {last}", end="", flush=True)
        except OutOfTimeError:
            tests.kill()
            raise
    if tests.returncode:
        raise RuntimeError(f"the GPU tests failed: {last.strip()}")
    return {"tests": last.strip()}


def part(options: argparse.Namespace, name: str, device: str) -> dict[str, object]:
    """A part of the whole, tried once more with half of the rows where it fails."""
    if name == "tests":
        return gpu_tests()
    several = name == "several"
    options.fp8 = name == "fp8"
    sides = ("ddp", "trainer") if several else ("plain", "trainer") if options.fp8 else ("plain", "ddp", "trainer")
    options.workers = count_of(options) if several else 1
    options.batch = options.said or fitting(options, len(sides))
    try:
        return measure(options, sides, device)
    except (SystemExit, EOFError, ConnectionError) as error:
        if options.said or options.batch == 1:
            raise
        print(f"  {error or 'a worker ended'}: once more with half of the rows", flush=True)
        options.batch //= 2
        return measure(options, sides, device)


def lacks_8_bits(options: argparse.Namespace) -> str:
    """Why linear layers cannot compute in 8 bits here, or an empty text."""
    if options.cpu or torch.cuda.get_device_capability() < (8, 9):
        return "this device has no products of 8-bit matrices"
    return "" if find_spec("torchao") else "torchao is not installed"


def count_of(options: argparse.Namespace) -> int:
    return int(options.several) if options.cpu else torch.cuda.device_count()


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--batch", type=int, dest="said", help="rows of a worker (default: what its memory holds)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--cpu", action="store_true", help="to try this script; says nothing about a GPU")
    parser.add_argument("--several", type=int, default=2, help="with --cpu: the workers of the second part")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--tests", action="store_true", help="the GPU tests first; without a GPU that is an error")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--worker", nargs=3, metavar=("SIDE", "ADDRESS", "FOLDER"), help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--fp8", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.batch = options.said or 1
    return options


def out_of_time(*_: object) -> None:
    raise OutOfTimeError("the minutes are spent")


def main() -> None:
    options = parsed()
    if options.worker:
        work(options, WARM_UP + EACH * options.rounds + 1)
        return
    if not options.cpu and not torch.cuda.is_available():
        if options.tests:
            sys.exit(f"make gpu needs a CUDA device, and torch {torch.__version__} finds none here")
        print("skipped: there is no CUDA device, so nothing is measured")
        return
    device = "the CPU" if options.cpu else torch.cuda.get_device_name()
    found: dict[str, Any] = {}
    signal.signal(signal.SIGALRM, out_of_time)
    ends = time.monotonic() + 60 * options.minutes
    lacking = lacks_8_bits(options)
    names = [*["tests"] * options.tests, "one", *["fp8"] * (not lacking), *["several"] * (count_of(options) > 1)]
    for name in names:
        print(f"{name} of {', '.join(names)}, {max(0.0, ends - time.monotonic()):.0f} s are left:", flush=True)
        signal.setitimer(signal.ITIMER_REAL, max(0.1, ends - time.monotonic()))
        try:
            found[name] = part(options, name, device)
        except (SystemExit, EOFError, ConnectionError, RuntimeError, OutOfTimeError) as error:
            found[name] = {"failed": f"{type(error).__name__}: {error}"}
            print(f"  {name} failed: {error}", flush=True)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if options.record:  # whatever happens to what follows
            record(options.record, device=device, cuda=torch.version.cuda, results=found)
    if lacking:
        print(f"skipped: {lacking}, so nothing is measured in 8 bits")
    if "several" not in names:
        print("skipped: there is one GPU, so nothing goes over NCCL between several")
    if failed := [name for name in names if "failed" in found[name]]:
        sys.exit(f"failed: {json.dumps({name: found[name]['failed'] for name in failed})}")


if __name__ == "__main__":
    main()
