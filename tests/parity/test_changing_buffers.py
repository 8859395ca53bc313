"""Buffers that change in a training forward: on any number of workers those of one process."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import changing
import pytest
import torch
import torch.nn.functional as F
from alone import ONE_BY_ONE, decisions, trainer
from by_hand import built, grid
from cases import rows
from doc_pages import python_blocks
from launching import SCRIPTS, paceline, train_basics
from oracle import apart
from paths import DOCS
from safetensors.torch import load_file
from torch import nn

import paceline as package
from paceline import buffer
from paceline.compute.buffers import held_in
from paceline.errors import ChangingBufferError, UsageError

EPOCHS = 3  # of 4 steps
Tensors = dict[str, torch.Tensor]


def by_hand(name: str) -> Tensors:
    """Plain PyTorch: each global batch in one forward, so that no buffer sees a part of it."""
    model = built(changing.MODELS[name])
    update = changing.optimizer([param for param in model.parameters() if param.requires_grad])
    meters: Tensors = {}
    if name == "meters":
        meters = {key: value.clone() for key, value in model.state_dict().items() if key in ("average", "mean", "seen")}
    for parts in grid(changing.data, changing.GLOBAL_BATCH, changing.MICRO, epochs=EPOCHS):
        x, y = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
        if meters:  # what depends on the micro-batches
            with torch.no_grad():
                outputs = [model.layer(part[0]) for part in parts]
            for output in outputs:
                meters["average"] = 0.9 * meters["average"] + 0.1 * output.mean(0)
            meters["mean"] = sum(len(o) * o.square().mean(0) for o in outputs) / len(x)
            meters["seen"] = meters["seen"] + len(x)
        update.zero_grad()
        changing.loss(model(x), (x, y)).backward()
        update.step()
        changing.after(model)
    return {key: value.detach() for key, value in model.state_dict().items()} | meters


def train(folder: Path, *options: str, names: Iterable[str] = changing.MODELS, lost: bool = False) -> None:
    """With `lost` a worker is killed in the first training."""
    folder.mkdir(exist_ok=True)
    script = (SCRIPTS / "changing.py", str(EPOCHS), *names)
    chaos = "kill:0@5.backward" if lost else ""
    paceline("run", "--run-dir", "out", *options, *script, cwd=folder, PACELINE_CHAOS=chaos)
    assert (folder / "out" / "chaos.jsonl").exists() == lost


def same_as_by_hand(folder: Path, names: Iterable[str] = changing.MODELS) -> None:
    for name in names:
        mine, theirs = load_file(folder / f"{name}.safetensors"), by_hand(name)
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            assert apart({key: mine[key]}, {key: value}) <= 1e-12, f"{name} {key}"


ALL = [*changing.MODELS]
SHARES = {"1": "1", "2": "3,1", "3": "1,0,2", "5": "3,1,1,2,1"}
# All models, beginning with another one: the first one has the loss.
EACH = [pytest.param(workers, ALL[at:] + ALL[:at], marks=pytest.mark.slow) for at, workers in enumerate(SHARES)]


@pytest.mark.parametrize(("workers", "names"), [("3", ALL), *EACH])
def test_buffers_are_those_of_one_process(workers: str, names: list[str], tmp_path: Path) -> None:
    """With unequal shares and the loss of a worker, unless there is one."""
    several = ("--workers", workers, "--shares", SHARES[workers])
    train(tmp_path, *several, names=names, lost=workers != "1")
    same_as_by_hand(tmp_path, names)


@pytest.mark.parametrize(("workers", "names"), [case for case in EACH if case.values[0] != "1"])
def test_buffers_have_equal_bytes_with_exact(workers: str, names: list[str], tmp_path: Path) -> None:
    exact, several = ("--plan", "exact"), ("--workers", workers, "--shares", SHARES[workers])
    train(tmp_path / "one", *exact, names=names)
    train(tmp_path / "several", *exact, *several, names=names, lost=True)
    for name in names:
        one, other = ((tmp_path / side / f"{name}.safetensors").read_bytes() for side in ("one", "several"))
        assert one == other, name


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["shard=3 zero=1", "shard=3 zero=2", "shard=3 zero=3", "exact shard=3 zero=3"])
def test_buffers_are_those_of_one_process_in_shards(plan: str, tmp_path: Path) -> None:
    train(tmp_path, "--workers", "3", "--max-restarts", "0", "--plan", plan)
    same_as_by_hand(tmp_path)


@pytest.mark.slow
def test_buffers_resume_on_another_number_of_workers(tmp_path: Path) -> None:
    train(tmp_path, "--workers", "2", "--steps", "50")
    train(tmp_path, "--workers", "3")
    same_as_by_hand(tmp_path)


def test_spectral_norm_iterates_once_a_step_on_one_worker(run) -> None:
    """As of many workers: the number of micro-batches does not count, and they are executed one by one."""
    mine = trainer(changing.MODELS["spectral"], changing.loss, changing.optimizer, global_batch=24)
    list(mine.steps(changing.data, epochs=EPOCHS))
    assert apart(mine.model.state_dict(), by_hand("spectral")) <= 1e-12
    why = "the forward changes the buffer 'first.parametrizations.weight.0._u'"
    assert decisions(run)[ONE_BY_ONE] == why


def test_spectral_norm_of_another_trainer_iterates_once_a_step(run) -> None:
    """Of a discriminator in a generator's loss: one a step, whatever number of micro-batches."""
    d = trainer(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 1)).double())
    g = trainer(loss=lambda output, batch: F.softplus(-d.model(output)).mean(), plan="micro=2")
    expected = built(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 1)).double())
    for _ in g.steps(rows(1, 64, 10), epochs=2):
        expected(torch.ones(1, 4, dtype=torch.float64))
    assert apart(d.model.state_dict(), dict(expected.state_dict())) <= 1e-12
    assert decisions(run)[ONE_BY_ONE] == (
        "the forward changes the buffer 'parametrizations.weight.0._u' of another trainer's model"
    )


def test_codebook_example_of_the_documentation() -> None:
    text = (DOCS / "architecture.md").read_text()
    (block,) = (b for b in python_blocks(text) if "paceline.buffer" in b)
    names: dict[str, Any] = {"torch": torch, "nn": nn, "paceline": package}
    exec(block, names)
    (*summed, codes) = held_in([names["Codebook"](5, 2)])
    assert [(one.name, one.rule.merge, one.rule.factor) for one in summed] == [
        ("counts", "sum", 0.99),
        ("sums", "sum", 0.99),
    ]
    codes.module.counts.fill_(2)
    assert codes.rule.merge(codes.module).equal(codes.module.sums / 2)


class Ring(nn.Module):
    """A queue of numbers that are no rows of anything; how far a micro-batch goes is `by` for each of its rows."""

    def __init__(self, entries: int, by: int = 1, guarded: bool = True) -> None:
        super().__init__()
        self.layer, self.by, self.guarded = nn.Linear(10, 4), by, guarded
        self.register_buffer("ring", torch.zeros(entries))
        self.register_buffer("at", torch.tensor(0))
        buffer(self, "ring", merge="queue", pointer="at")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training or not self.guarded:
            for value in x[:, 0]:
                self.ring[self.at] = value
                self.at.add_(self.by).remainder_(len(self.ring))
        return self.layer(x)


def test_queue_buffer_smaller_than_a_global_batch_holds_the_last_rows(run) -> None:
    mine = trainer(lambda: Ring(7).double(), plan="micro=3")
    list(mine.steps(rows(1, 42, 10), epochs=2))
    passed = [float(value) for step in grid(rows(1, 42, 10), 16, 16, epochs=2) for value in step[0][0][:, 0]]
    expected = [0.0] * 7
    for place, value in enumerate(passed):
        expected[place % 7] = value
    assert mine.model.ring.tolist() == expected
    assert int(mine.model.at) == 84 % 7


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 4)
        self.register_buffer("seen", torch.zeros(2))
        buffer(self, "seen", merge="last")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = torch.cat([self.seen, x[:1, 0]])
        return self.layer(x)


class Sized(nn.Module):
    """Gives a buffer its size in the first forward, in place, as observers of quantisation do."""

    def __init__(self, declared: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 4)
        self.register_buffer("low", torch.zeros(0))
        if declared:
            buffer(self, "low", merge="last")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.layer(x)
        self.low.resize_(4)
        self.low.copy_(found.detach().amin(0))
        return found


REFUSED = {
    "another size": (
        Sized,
        "the forward changes the buffer 'low': the shape (0,) becomes (4,); run one forward in training mode before "
        "creating the Trainer, so that it has its final size",
    ),
    "another shape": (
        Growing,
        "the forward changes the buffer 'seen': the shape (2,) becomes (3,); keep its shape, and count in another "
        "buffer how many entries are used",
    ),
    "a pointer that stays": (
        lambda: Ring(7, by=0),
        "the forward changes the buffer 'ring' and moves its pointer by 0 (of 7) in a micro-batch of 2 rows; add at "
        "most one entry per row, and move the pointer by the number of entries",
    ),
    "more than the rows": (
        lambda: Ring(7, by=2),
        "the forward changes the buffer 'ring' and moves its pointer by 4 (of 7) in a micro-batch of 2 rows; add at "
        "most one entry per row, and move the pointer by the number of entries",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_buffer_that_its_rule_cannot_merge_is_refused(name: str, run) -> None:
    make, said = REFUSED[name]
    mine = trainer(lambda: make().double())
    before = {key: value.clone() for key, value in mine.model.state_dict().items()}
    with pytest.raises(ChangingBufferError) as caught:
        list(mine.steps(rows(1, 64, 10)))
    assert str(caught.value) == said
    assert all(value.equal(before[key]) for key, value in mine.model.state_dict().items())


def test_buffer_sized_before_the_trainer_is_merged(run) -> None:
    """The advice above helps."""
    model = Sized().double()
    model(rows(1, 64, 10).tensors[0])
    mine = trainer(lambda: model)
    assert len(list(mine.steps(rows(1, 64, 10)))) > 1
    assert mine.model.low.shape == (4,)


SIZED = """
class Sized(nn.Linear):
    def __init__(self):
        super().__init__(10, 2)
        self.register_buffer("low", torch.zeros(0))
    def forward(self, x):
        found = super().forward(x)
        self.low.resize_(2)
        self.low.copy_(found.detach().amin(0))
        return found
for report in make(model=lambda: Sized().double()).steps(data): pass
"""


def test_buffer_resized_in_place_is_refused_on_two_workers(tmp_path: Path) -> None:
    done = train_basics(tmp_path, SIZED, 2, "--max-restarts", "0", code=1)
    assert (
        "ChangingBufferError: the forward changes the buffer 'low', which would then differ between workers; "
        "declare with paceline.buffer how to merge it, or train with one worker\n"
    ) in done.stderr


def test_declared_buffer_changed_in_eval_mode_is_refused(run) -> None:
    mine = trainer(lambda: Ring(7, guarded=False).double())
    before = mine.model.ring.clone()
    with pytest.raises(ChangingBufferError) as caught:
        mine.evaluate(rows(1, 64, 10), lambda output, batch: {"n": (len(output), 1)})
    assert str(caught.value) == (
        "the forward changes the buffer 'ring' in eval mode; change it only if self.training is true"
    )
    assert mine.model.ring.equal(before)


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("real", torch.zeros(3))
        self.register_buffer("whole", torch.tensor(0))
        self.register_buffer("phase", torch.zeros(3, dtype=torch.complex64))
        self.register_buffer("kept", torch.zeros(3), persistent=False)


FLOATING = "needs floating-point numbers"
NEXT = "merge='queue' needs pointer=; name a buffer of one integer, the position of the next entry"
UNKNOWN = "Odd has no buffer 'rael'; register it first; its buffers are 'real', 'whole', 'phase', 'kept'"
MISTAKES: list[tuple[Any, str, dict[str, Any], str]] = [
    ("real", "real", {"merge": "last"}, "buffer() needs an nn.Module, got a str; pass the module that has the buffer"),
    (Odd(), "rael", {"merge": "last"}, UNKNOWN),
    (nn.ReLU(), "u", {"merge": "last"}, "ReLU has no buffer 'u'; register it first; it has no buffers"),
    (
        Odd(),
        "real",
        {"merge": "avg"},
        "merge='avg' is unknown; use 'affine', 'sum', 'mean', 'last', 'queue', or a function",
    ),
    (
        Odd(),
        "real",
        {"merge": "sum"},
        "merge='sum' needs factor=; pass the decay of an average, or 1 for a sum",
    ),
    (
        Odd(),
        "real",
        {"merge": "mean", "factor": 0.9},
        "merge='mean' takes no factor=; leave it out, or use merge='affine'",
    ),
    (
        Odd(),
        "real",
        {"merge": "mean", "pointer": "whole"},
        "merge='mean' takes no pointer=; leave it out, or use 'queue'",
    ),
    (
        Odd(),
        "whole",
        {"merge": "mean"},
        f"the buffer 'whole' of Odd has dtype torch.int64; merge='mean' {FLOATING}",
    ),
    (
        Odd(),
        "whole",
        {"merge": "affine", "factor": 0.9},
        f"the buffer 'whole' of Odd has dtype torch.int64; merge='affine' {FLOATING}",
    ),
    (
        Odd(),
        "phase",
        {"merge": "last"},
        f"the buffer 'phase' of Odd has dtype torch.complex64; merge='last' {FLOATING}",
    ),
    (
        Odd(),
        "kept",
        {"merge": "last"},
        "the buffer 'kept' of Odd is not in checkpoints; leave persistent=False out",
    ),
    (Odd(), "real", {"merge": "queue"}, NEXT),
    (Odd(), "real", {"merge": "queue", "pointer": "phase"}, NEXT),
    (Odd(), "real", {"merge": "queue", "pointer": "rael"}, UNKNOWN),
    (
        nn.BatchNorm1d(3),
        "running_mean",
        {"merge": "mean"},
        "the buffer 'running_mean' of BatchNorm1d is merged automatically; leave buffer() out",
    ),
    (Ring(3), "ring", {"merge": "last"}, "the buffer 'ring' of Ring is declared twice; declare it once"),
    (Ring(3), "at", {"merge": "last"}, "the buffer 'at' of Ring is declared twice; declare it once"),
]


@pytest.mark.parametrize(("module", "name", "options", "said"), MISTAKES)
def test_wrong_buffer_declarations_are_refused(module: Any, name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        buffer(module, name, **options)
    assert str(caught.value) == said
