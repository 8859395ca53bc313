"""`compile` beside `tensor=` and `context=`: compiled blocks of shards train as one process does.

Most of these tests leave out the compiler of kernels, which takes most of the time and changes nothing in the trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from agents import journal
from launching import SCRIPTS, TRANSFORMERS, paceline, train_basics
from mixtures import check_figures, result_once
from oracle import train
from parity_models import MODELS, shortened


def check(folder: Path, plan: str, workers: int, names: Sequence[str], factory: pytest.TempPathFactory) -> None:
    words = ["out", *names, "short", *plan.split()]
    options = ["--workers", str(workers), "--run-dir", "run", "--max-restarts", "0"]
    options += ["--shares", "3,3,1,1"] if "data" in plan else []
    env = TRANSFORMERS if any("llama" in name for name in names) else {}
    paceline("run", *options, SCRIPTS / "contract.py", *words, cwd=folder, timeout=800, **env)
    decisions = [str(event["what"]) for event in journal(folder / "run", "decision")]
    assert sum("compiled separately" in what or "compiled as one unit" in what for what in decisions) == len(names)
    notes = (folder / "run" / "journal.jsonl").read_text()
    assert "so was compiled code" in notes
    results = {
        name: result_once(factory, f"oracle of {name} True", lambda name=name: train(shortened(MODELS[name])))  # type: ignore[misc]
        for name in names
    }
    check_figures(folder, results)


@pytest.mark.parametrize(
    ("axis", "model"),
    [
        ("tensor", "mlp"),
        pytest.param("tensor", "few heads", marks=pytest.mark.slow),
        pytest.param("context", "few heads", marks=pytest.mark.slow),
    ],
)
def test_compiled_blocks_of_shards_train_as_one_process(
    axis: str, model: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Attention takes the compiler six times as long as an MLP."""
    check(tmp_path, f"{axis}=2 compile aot_eager", 2, [model], tmp_path_factory)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("plan", "workers", "names"),
    [
        ("tensor=2 compile", 2, ["llama", "tokens"]),
        ("context=2 compile", 2, ["llama"]),
        ("tensor=2 compile aot_eager", 2, ["mlp", "partly", "skips", "tuples", "attention, experts", "llama, tied"]),
        ("context=2 compile aot_eager", 2, ["skips", "tuples", "llama, tied"]),
        ("data=2 tensor=2 compile aot_eager", 4, ["skips", "llama"]),
        ("shard=2 tensor=2 zero=3 compile aot_eager", 4, ["skips"]),
        ("pipeline=2 tensor=2 compile aot_eager", 4, ["skips"]),
        ("tensor=2 compile recompute=blocks aot_eager", 2, ["skips", "few heads"]),
        ("context=2 compile recompute=blocks aot_eager", 2, ["skips", "few heads"]),
    ],
)
def test_compiled_plans_train_as_one_process(
    plan: str, workers: int, names: Sequence[str], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    check(tmp_path, plan, workers, names, tmp_path_factory)


@pytest.mark.slow
def test_checkpoint_in_a_compiled_block_is_refused(tmp_path: Path) -> None:
    body = """
from torch.utils.checkpoint import checkpoint
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(10, 16), nn.Linear(16, 10)
    def forward(self, x):
        return x + self.down(checkpoint(torch.tanh, self.up(x), use_reentrant=False))
t = make(model=lambda: nn.Sequential(Block(), Block(), nn.Linear(10, 2)).double())
for _ in t.steps(data, count=2): pass
"""
    done = train_basics(tmp_path, body, 2, "--max-restarts", "0", "--plan", "tensor=2 compile", code=2)
    what = "compile with tensor=2 does not work with torch.utils.checkpoint, which 0 uses; leave compile out"
    assert f"UsageError: {what}" in " ".join(done.stderr.split())
