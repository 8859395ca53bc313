"""The head and the loss of a large vocabulary in tiles of tokens (`tiles=`), beside full logits, on this machine.

    python benchmarks/tiled_logits.py [--tokens 256] [--width 128] [--words 131072] [--rounds 5] [--record FILE]

Times forward and backward of cross_entropy of an nn.Linear, with so many words, and of nothing else: the ratio of a
whole training step is nearer to 1. The sides take turns; medians of seconds are printed, and the ratio to full logits.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from turns import record

from paceline.compute.tiled_logits import Tiles, tiled_linear

TILES = (1, 2, 4, 8, 16)


def seconds(tiles: int, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> float:
    """Seconds of a forward and backward; 0 tiles stand for full logits."""
    hidden.grad = weight.grad = None
    start = time.perf_counter()
    logits = tiled_linear(hidden, weight, None, Tiles(tiles)) if tiles else F.linear(hidden, weight)
    F.cross_entropy(logits, labels).backward()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("tokens", 256), ("width", 128), ("words", 131_072), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    hidden = torch.randn(options.tokens, options.width, dtype=torch.float32).requires_grad_()
    weight = torch.randn(options.words, options.width, dtype=torch.float32).mul_(0.02).requires_grad_()
    labels = torch.randint(0, options.words, (options.tokens,))
    times: dict[int, list[float]] = {tiles: [] for tiles in (0, *TILES)}
    for number in range(options.rounds + 1):
        for tiles, of_side in times.items():
            measured = seconds(tiles, hidden, weight, labels)
            of_side += [measured] if number else []  # the first round warms up
    medians = {tiles: statistics.median(of_side) for tiles, of_side in times.items()}
    for tiles, median in medians.items():
        name = f"tiles={tiles}" if tiles else "full logits"
        print(f"{name:12} {median:7.3f} s  {median / medians[0]:.2f}")
    if options.record:
        shape = {"tokens": options.tokens, "width": options.width, "words": options.words}
        record(options.record, **shape, seconds={str(tiles): median for tiles, median in medians.items()})


if __name__ == "__main__":
    main()
