"""GPT-2 of 124 M parameters on one GPU: `precision=bf16 compile` of a Trainer beside the plain loop of torch.

    python benchmarks/gpu.py [--batch 32] [--rounds 15] [--record FILE]
    python benchmarks/gpu.py --layers 2 --width 64 --length 64 --batch 4 --rounds 3 --cpu     # whether it runs

Both sides are one process each, take turns like those of step_time.py, and get transformers' GPT2LMHeadModel (with its
own loss, no dropout), fused AdamW, and the same rows in one micro-batch; their losses must agree to 1 % in every step.

plain     torch.compile(model), torch.autocast(bfloat16), rows copied ahead from pinned memory
trainer   `paceline run --plan "precision=bf16 compile"`

A token takes 6 N + 12 L W T operations for N parameters, L layers of width W and sequences of T tokens (PaLM, arXiv
2204.02311, appendix B); the utilisation is what that makes a second beside the dense bfloat16 peak that the GPU's maker
tells. Without a GPU nothing is measured, which is said.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel
from turns import WARM_UP, Processes, compare, give, launch, medians, record, take

import paceline

AGREE, EACH = 0.01, 5  # steps of a turn
PEAKS = {"A100": 312e12, "H100": 989.4e12, "H200": 989.4e12}  # NVIDIA's data sheets: operations a second


def model(sizes: argparse.Namespace) -> nn.Module:
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    shape = {"n_layer": sizes.layers, "n_embd": sizes.width, "n_head": sizes.width // 64, "n_positions": sizes.length}
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**none, **shape, use_cache=False))


def loss_of(net: nn.Module, batch: Any) -> torch.Tensor:
    return net(input_ids=batch[0], labels=batch[0]).loss


def rows(sizes: argparse.Namespace, steps: int) -> TensorDataset:
    shape = (steps * sizes.batch, sizes.length)
    return TensorDataset(torch.randint(0, 50257, shape, generator=torch.Generator().manual_seed(0)))


def by_hand(sizes: argparse.Namespace, steps: int) -> Iterator[float]:
    """The loop as people write it."""
    device = torch.device("cpu" if sizes.cpu else "cuda")
    net = model(sizes).to(device)
    update = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    forward = torch.compile(net)
    for batch in DataLoader(rows(sizes, steps), sizes.batch, pin_memory=not sizes.cpu):
        moved = [part.to(device, non_blocking=True) for part in batch]
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(forward, moved)
        update.zero_grad()
        loss.backward()
        update.step()
        yield loss.item()


def ours(sizes: argparse.Namespace, steps: int) -> Iterator[float]:
    trainer = paceline.Trainer(
        model=lambda: model(sizes),
        forward=loss_of,
        loss=lambda output, batch: output,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4),
        global_batch=sizes.batch,
        plan=f"precision=bf16 compile micro={sizes.batch}",
    )
    for report in trainer.steps(rows(sizes, steps), count=steps, order=lambda position, size, seed, epoch: position):
        yield report.loss


def start(arguments: list[str], folder: Path, side: str, address: str) -> Processes:
    script = [str(Path(__file__).resolve()), "--worker", side, address, *arguments]
    if side == "plain":
        return launch(script, os.environ, workers=1)
    command = ["-m", "paceline.cli", "run", "--quiet", "--run-dir", str(folder / side), "--save-every", "1000000"]
    return [subprocess.Popen([sys.executable, *command, *script])]


def utilisation(sizes: argparse.Namespace, parameters: int, name: str, seconds: float) -> dict[str, object]:
    """Of a step of so many seconds on the device of that name."""
    operations = 6 * parameters + 12 * sizes.layers * sizes.width * sizes.length
    tokens = sizes.batch * sizes.length / seconds
    found: dict[str, object] = {"tokens a second": tokens, "operations a second": tokens * operations}
    for peak in (peak for known, peak in PEAKS.items() if known in name):
        found["utilisation"] = tokens * operations / peak
    share = f", {found['utilisation']:.1%} of what {name} can do" if "utilisation" in found else ""
    print(f"  {tokens:,.0f} tokens a second, {tokens * operations / 1e12:.1f} TFLOP/s{share}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--cpu", action="store_true", help="to try this script; says nothing about a GPU")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--worker", nargs=2, metavar=("SIDE", "ADDRESS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    steps = WARM_UP + EACH * options.rounds + 1
    if options.worker:
        side, address = options.worker
        take(address, side, 0, (by_hand if side == "plain" else ours)(options, steps))
        return
    if not options.cpu and not torch.cuda.is_available():
        print("skipped: there is no CUDA device, so nothing is measured")
        return
    with tempfile.TemporaryDirectory() as folder:
        begin = partial(start, sys.argv[1:], Path(folder))
        taken = give(("plain", "trainer"), begin, options.rounds, EACH, workers=1)
    parameters = sum(param.numel() for param in model(options).parameters())
    device = "the CPU" if options.cpu else torch.cuda.get_device_name()
    apart = taken.apart()
    found: dict[str, object] = {"seconds": taken.seconds, "losses apart": apart}
    medians(f"{parameters / 1e6:.0f} M parameters", taken.seconds)
    found |= compare(taken.seconds, "plain", "trainer")  # tokens a second, trainer's beside plain's
    for side, seconds in taken.seconds.items():
        found[side] = utilisation(options, parameters, device, statistics.median(seconds))
    print(f"  losses {apart:.1e} apart at most")
    assert apart <= AGREE, "both sides must give the same training"
    if options.record:
        record(options.record, device=device, results=found)


if __name__ == "__main__":
    main()
