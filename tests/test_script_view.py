"""What a script sees of a cut model outside of the trainer's own steps is what it sees with one worker."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from launching import train_basics

STREAMS = """
import json, random, zlib
import numpy
torch.manual_seed(5), numpy.random.seed(5), random.seed(5)
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(10, 24), nn.Linear(24, 10), nn.Dropout(0.5)
    def forward(self, x): return x + self.drop(self.down(torch.tanh(self.up(x))))
class Net(nn.Sequential):
    def __init__(self):
        numpy.random.rand(), random.random()
        super().__init__(*[Layer() for _ in range(3)], nn.Linear(10, 2))
def drawing(params):
    torch.rand(1)
    return torch.optim.SGD(params, lr=0.1)
def streams():
    states = torch.get_rng_state().tolist(), numpy.random.get_state(), random.getstate()
    return [zlib.crc32(repr(state).encode()) for state in states]
def called():
    with torch.no_grad(): return t.model(x[:4]).sum().item()
t = paceline.Trainer(lambda: Net().double(), cross_entropy, drawing, global_batch=24, seed=1)
said = {"made": streams(), "drawn": [called()]}
for _ in t.steps(data, count=2): said["drawn"].append(called())
said["end"] = streams()
if t.main: open("said.json", "w").write(json.dumps(said))
"""


def said(folder: Path, body: str, workers: int, plan: str) -> Any:
    """What a script writes into said.json."""
    folder.mkdir()
    train_basics(
        folder,
        body,
        workers,
        *(("--plan", plan) if plan else ()),
        *(() if "server" in plan else ("--max-restarts", "0")),
    )
    return json.loads((folder / "said.json").read_text())


@cache
def streams_of_one(folder: Path) -> Any:
    return said(folder, STREAMS, 1, "")


@pytest.mark.parametrize(
    ("workers", "plan"),
    [
        (2, "tensor=2"),
        *(
            pytest.param(workers, plan, marks=pytest.mark.slow)
            for workers, plan in [
                (2, ""),
                (3, "tensor=3"),
                (2, "shard=2 zero=1"),
                (2, "shard=2 zero=3"),
                (3, "pipeline=3"),
                (2, "context=2"),
                (2, "server=1"),
                (4, "pipeline=2 tensor=2"),
            ]
        ),
    ],
)
def test_a_trainer_leaves_the_scripts_generators_and_a_call_in_the_loop_draws_from_them(
    workers: int, plan: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    alone = streams_of_one(tmp_path_factory.getbasetemp() / "streams")
    found = said(tmp_path / "several", STREAMS, workers, plan)
    assert (found["made"], found["end"]) == (alone["made"], alone["end"])
    assert found["drawn"] == pytest.approx(alone["drawn"], rel=1e-12)
