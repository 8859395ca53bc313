"""Losses with weights in bfloat16 (`precision=bf16:pure`) and optimizer states in 8 bits (`optimizer_states=int8`).

    python benchmarks/precision.py [--steps 1000] [--sides NAME ...] [--record FILE]

A small version of the GPT of examples/gpt.py (width 64, two blocks, windows of 64 bytes) learns the source of Python's
standard library. *by hand* is plain PyTorch: a bfloat16 model, float32 copies of its weights, AdamW on the copies, and
the copies rounded into the weights after each update. *float32 by hand* is the same loop without bfloat16. A plan is
compared with the loop that has weights of its type. Losses are in bits per byte: of the last 100 training steps, and of
512 windows of files held out, with the weights of the end.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset
from turns import record

import paceline

LENGTH, WIDTH, LAYERS, BATCH, MICRO, SEED, LAST = 64, 64, 2, 16, 8, 0, 100
PLANS = {
    "bf16:pure": (1, "precision=bf16:pure"),
    "bf16:pure, stochastic": (1, "precision=bf16:pure,stochastic"),
    "bf16:pure data=2": (2, "precision=bf16:pure data=2"),
    "bf16:pure shard=2 zero=1": (2, "precision=bf16:pure shard=2 zero=1"),
    "bf16:pure, stochastic shard=2 zero=3": (2, "precision=bf16:pure,stochastic shard=2 zero=3"),
    "int8 states": (1, "optimizer_states=int8"),
    "int8 states shard=2 zero=1": (2, "optimizer_states=int8 shard=2 zero=1"),
    "int8 states bf16:pure": (1, "optimizer_states=int8 precision=bf16:pure"),
}


class GPT(nn.Module):
    """Predicts the next byte: the embedding of a byte and its place, transformer blocks, a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.head = nn.Embedding(256, WIDTH), nn.Linear(WIDTH, 256)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, F.gelu, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1], text.device)
        return self.head(self.blocks(self.bytes(text) + self.places[: text.shape[1]], mask, is_causal=True))


def windows() -> list[TensorDataset]:
    """Windows of the standard library's bytes without its tests, and of every twentieth file's, which are held out."""
    lib = Path(sysconfig.get_paths()["stdlib"])
    files = [f for f in sorted(lib.rglob("*.py")) if "test" not in (p := str(f.relative_to(lib))) and "site-p" not in p]
    made = []
    for part in ([f for i, f in enumerate(files) if i % 20], files[::20]):
        text = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in part)), dtype=torch.uint8)
        made.append(TensorDataset(text.unfold(0, LENGTH + 1, LENGTH)))
    return made


def loss(output: torch.Tensor, batch: tuple[torch.Tensor]) -> tuple[torch.Tensor, int]:
    after = batch[0][:, 1:].flatten().long()
    return F.cross_entropy(output.flatten(0, 1), after, reduction="sum") / math.log(2), len(after)


def forward(model: nn.Module, batch: tuple[torch.Tensor]) -> torch.Tensor:
    return model(batch[0][:, :-1].long())


def optimizer(params: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=2e-3, betas=(0.9, 0.98), weight_decay=0.05)  # type: ignore[arg-type]


def rate(steps: int) -> Callable[[int], float]:
    return lambda step: min((step + 1) / 40, 0.02 + 0.98 * math.cos(math.pi / 2 * min(step / steps, 1)) ** 2)


def train(steps: int, out: Path) -> None:
    """What each worker of a run by Paceline does."""
    torch.set_num_threads(1)
    trainer = paceline.Trainer(
        model=GPT, loss=loss, optimizer=optimizer, global_batch=BATCH, forward=forward, schedule=rate(steps),
        clip_norm=1.0, seed=SEED,
    )  # fmt: skip
    losses = [report.loss for report in trainer.steps(windows()[0], count=steps)]
    trainer.export(out / "out.safetensors")
    if trainer.main:
        (out / "losses.json").write_text(json.dumps(losses))


def by_hand(steps: int, bf16: bool) -> tuple[list[float], Mapping[str, torch.Tensor]]:
    """The losses and the weights of a loop in plain PyTorch over the same batches."""
    torch.manual_seed(paceline.stream_seed(SEED, 0, -1))
    model, data, losses = GPT(), windows()[0], []
    model.to(torch.bfloat16 if bf16 else torch.float32)
    masters = [nn.Parameter(param.detach().float().clone()) for param in model.parameters()]
    adamw = optimizer(masters)
    schedule = torch.optim.lr_scheduler.LambdaLR(adamw, rate(steps))
    for batches in batches_of(len(data), steps):
        model.zero_grad()
        total = 0.0
        for rows in batches:
            batch = (data.tensors[0][rows],)
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                summed, _ = loss(forward(model, batch), batch)
            (summed / (BATCH * LENGTH)).backward()
            total += float(summed.detach()) / (BATCH * LENGTH)
        losses.append(total)
        for param, master in zip(model.parameters(), masters, strict=True):
            master.grad = param.grad.float() if param.grad is not None else None
        nn.utils.clip_grad_norm_(masters, 1.0)
        adamw.step()
        schedule.step()
        with torch.no_grad():
            for param, master in zip(model.parameters(), masters, strict=True):
                param.copy_(master)
    return losses, model.state_dict()


def batches_of(size: int, steps: int) -> Iterator[list[list[int]]]:
    """The rows of each micro-batch of each step."""
    for step in range(steps):
        epoch, first = divmod(step * BATCH, BATCH * -(-size // BATCH))
        rows = [paceline.sample_index(place, size, SEED, epoch) for place in range(first, min(first + BATCH, size))]
        yield [rows[start : start + MICRO] for start in range(0, len(rows), MICRO)]


def held_out(weights: Mapping[str, torch.Tensor]) -> float:
    """Bits per byte of 512 windows that were not trained on."""
    model, data = GPT(), windows()[1].tensors[0]
    batch = (data[:: len(data) // 512][:512],)
    model.load_state_dict(weights)
    with torch.no_grad():
        summed, count = loss(forward(model, batch), batch)
    return float(summed) / count


def by_paceline(steps: int, workers: int, plan: str) -> tuple[list[float], Mapping[str, torch.Tensor]]:
    with tempfile.TemporaryDirectory() as folder:
        options = [
            "--workers",
            str(workers),
            "--plan",
            f"micro={MICRO} {plan}",
            "--run-dir",
            f"{folder}/run",
            "--quiet",
        ]
        command = [sys.executable, "-m", "paceline", "run", *options, __file__, "--steps", str(steps), "--out", folder]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return json.loads(Path(folder, "losses.json").read_text()), load_file(f"{folder}/out.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--sides", nargs="+", default=["float32 by hand", "by hand", *PLANS])
    parser.add_argument("--record", type=Path)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.out is not None:
        train(args.steps, args.out)
        return
    torch.set_num_threads(1)
    found: dict[str, dict[str, float]] = {}
    for side in args.sides:
        if side in PLANS:
            losses, weights = by_paceline(args.steps, *PLANS[side])
        else:
            losses, weights = by_hand(args.steps, bf16=side == "by hand")
        found[side] = {"training": statistics.fmean(losses[-LAST:]), "held out": held_out(weights)}
        like = "by hand" if side == "by hand" or "bf16" in side else "float32 by hand"
        if like in found:
            found[side] |= {f"{kind} to {like}": found[side][kind] / found[like][kind] for kind in [*found[side]]}
        print(side, found[side], flush=True)
    if args.record:
        record(args.record, steps=args.steps, bits_per_byte=found)


if __name__ == "__main__":
    main()
