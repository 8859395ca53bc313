"""What one script can do with the public interface, on any number of workers. Usage: public.py OUT

Each scenario returns what came out of it; worker K writes all of it to OUT/K.json and OUT/K.safetensors. The models,
data and losses are plain PyTorch, so that a test can train the same by hand.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from cases import Cramped, cross_entropy, mlp, rows
from safetensors.torch import save_file
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import paceline

Outcome = dict[str, Any]
ODD_BUFFERS = [torch.bool, torch.int16, torch.uint16, torch.float8_e4m3fn, torch.complex64, torch.bfloat16]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def trainer(model: Any = mlp, loss: Any = cross_entropy, optimizer: Any = sgd, **more: Any) -> paceline.Trainer:
    return paceline.Trainer(model, loss, optimizer, **{"global_batch": 16, **more})


# -- models and data --------------------------------------------------------------------------------------------


class Buffered(nn.Module):
    """Buffers of dtypes that a transport may not know."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 4)
        for number, dtype in enumerate(ODD_BUFFERS):
            self.register_buffer(f"odd{number}", (100 * torch.rand(3)).round().to(dtype), persistent=number % 2 == 0)


class Normalised(nn.Module):
    """BatchNorms as they come: cumulative, called twice, at rest, run again in backward, without momentum's default."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 6, bias=False)
        self.cumulative = nn.BatchNorm1d(6, momentum=None)
        self.twice = nn.BatchNorm1d(6, momentum=0.3)
        self.resting = nn.BatchNorm1d(6)
        self.again = nn.BatchNorm1d(6, affine=False)
        self.stateless = nn.BatchNorm1d(6, track_running_stats=False)
        self.last = nn.Linear(6, 4)
        self.resting.running_mean.add_(0.5)
        self.resting.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.twice(torch.tanh(self.twice(self.cumulative(self.first(x)))))
        x = checkpoint(self.again, self.resting(x), use_reentrant=False)
        return self.last(torch.tanh(self.stateless(x)))


class Counting(nn.Module):
    """Counts its calls in a buffer, and scales by it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"linear": nn.Linear(10, 4)})
        self.body["linear"].register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        linear = self.body["linear"]
        linear.calls += 1
        return linear(x) * (1 + 0.01 * linear.calls.item())


class Rarely(nn.Module):
    """A head that only some micro-batches use, and one that none uses."""

    def __init__(self) -> None:
        super().__init__()
        self.usual, self.rare, self.never = nn.Linear(10, 4), nn.Linear(10, 4), nn.Linear(10, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rare = x[:, :1] > 1.2
        return self.usual(x) + rare * self.rare(x) if rare.any() else self.usual(x)


class Late(nn.Module):
    """Begins to draw random numbers when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 4)
        self.draws = False
        self.sizes: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(x))
        x = self.linear(x)
        return F.dropout(x, 0.5) if self.draws else x


class Shaky(nn.Module):
    """Draws from the generators of Python, numpy and torch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) and random.random() < 0.5:  # stochastic depth
            x = x * np.random.rand()
        return F.dropout(self.linear(x), 0.2)


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 10))

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return self.layers(noise)


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 12), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(12, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def real_and_fake(generator: nn.Module) -> Callable[[nn.Module, Any], Any]:
    def forward(model: nn.Module, batch: Any) -> Any:
        noise = torch.randn(len(batch[0]), 3, dtype=torch.float64)
        return model(batch[0]), model(generator(noise).detach())

    return forward


def judge(output: Any, batch: Any) -> torch.Tensor:
    real, fake = output
    return F.softplus(-real).mean() + F.softplus(fake).mean()


def fool(discriminator: nn.Module) -> Callable[[Any, Any], torch.Tensor]:
    return lambda output, batch: F.softplus(-discriminator.eval()(output)).mean()


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01, betas=(0.5, 0.9))


def noise(step: int) -> torch.Tensor:
    return torch.randn(12, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def slope(model: nn.Module, batch: Any) -> Any:
    """Its output, and how steep that is: derivatives are taken in the forward."""
    x = batch[0].clone().requires_grad_(True)
    output = model(x)
    return output, torch.autograd.grad(output.sum(), x, create_graph=True)[0]


def steep(output: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(output[0], batch[1]) + output[1].square().sum(1).mean()


class Augmented(Dataset):
    """Rows with noise of their own, from three generators."""

    def __init__(self) -> None:
        self.rows = rows(11, 45, 10)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x, y = self.rows[index]
        drawn = [torch.rand(()).item(), random.random(), np.random.rand()]
        return x * drawn[0] + drawn[1] - drawn[2], y, torch.tensor([index, *drawn], dtype=torch.float64)


def masked(samples: list[Any]) -> Any:
    """A collate that draws, as that of masked language models does."""
    x = torch.stack([sample[0] for sample in samples])
    mask = torch.rand_like(x) < 0.8 if random.random() < 0.9 else torch.ones_like(x)
    return x * mask, torch.stack([sample[1] for sample in samples])


class Stream(IterableDataset):
    """Rows of 45, in an order that set_epoch turns, with noise."""

    def __init__(self, noisy: bool) -> None:
        self.rows, self.noisy, self.epoch = rows(11, 45, 10), noisy, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        for number in range(len(self.rows)):
            x, y = self.rows[(number + 7 * self.epoch) % len(self.rows)]
            yield (x + torch.randn(10, dtype=torch.float64) * random.random() if self.noisy else x), y


# -- scenarios --------------------------------------------------------------------------------------------------


def twins() -> Outcome:
    """The first rows that workers bring must not be the same ones."""
    x, y = rows(5, 6, 10).tensors
    try:
        trainer(global_batch=None).step((x, y))
    except paceline.PacelineError as error:
        return {"error": str(error)}
    return {"error": None}


def given_module() -> Outcome:
    """A module whose weights differ from worker to worker: those of worker 0 count."""
    torch.manual_seed(100 + paceline.join().rank)
    made = Buffered()
    trained = trainer(made)
    buffers = {f"buffer {name}": b.float() if b.is_floating_point() else b for name, b in trained.model.named_buffers()}
    return {"same object": trained.model is made, **trained.model.state_dict(), **buffers}


def made_by_function() -> Outcome:
    def make() -> nn.Module:
        model = nn.Linear(10, 4).double()
        with torch.no_grad():
            model.bias += torch.from_numpy(np.random.rand(4)) + random.random()
        return model

    torch.manual_seed(paceline.join().rank)  # what the script drew before does not matter
    return trainer(make, seed=3).model.state_dict()


def gan() -> Outcome:
    """Two trainers: a loop of one with single steps of the other in its body, then single steps of both in turn."""
    team = paceline.join()
    share = slice(12 * team.rank // team.size, 12 * (team.rank + 1) // team.size)
    g = paceline.Trainer(
        lambda: Generator().double(),
        lambda *both: fool(d.model)(*both),
        adam,
        forward=lambda model, batch: model(batch),
    )
    d = trainer(lambda: Discriminator().double(), judge, adam, forward=real_and_fake(g.model))
    losses = []
    for report in d.steps(rows(6, 40, 10), epochs=4):
        losses.append(report.loss)
        losses.append(g.step(noise(report.step)[share]).loss)
        d.model.train()
    x, y = rows(7, 24, 10).tensors
    cut = slice(2 * (12 * team.rank // team.size), 2 * (12 * (team.rank + 1) // team.size))
    for number in range(5):
        losses.append(d.step((x[cut], y[cut])).loss)
        losses.append(g.step(noise(100 + number)[share]).loss)
        d.model.train()
    return {
        "losses": losses,
        "done": [d.steps_done, g.steps_done],
        **{f"d.{name}": value for name, value in d.model.state_dict().items()},
        **{f"g.{name}": value for name, value in g.model.state_dict().items()},
    }


BOUNDS = {
    1: [[0, 14]],
    2: [[0, 6, 14], [0, 0, 14], [0, 14, 14]],
    3: [[0, 9, 9, 14], [0, 0, 3, 14], [0, 14, 14, 14], [0, 3, 6, 14]],
}


def own_rows() -> Outcome:
    """Each worker brings what it has: several micro-batches, no rows as empty tensors, or nothing at all."""
    team = paceline.join()
    trained = trainer(
        lambda: nn.Sequential(mlp(), nn.Dropout(0.2)),
        lambda output, batch: F.cross_entropy(output, batch["rest"][0]),
        forward=lambda model, batch: model(batch["x"]),
        plan="micro=3",
    )
    reports = []
    for number in range(12):
        x, y = rows(20 + number, 14, 10).tensors
        bounds = BOUNDS[team.size][number % len(BOUNDS[team.size])]
        part = slice(bounds[team.rank], bounds[team.rank + 1])
        mine = None if part.start == part.stop and number % 2 else {"x": x[part], "rest": [y[part], "a text"]}
        reports.append(trained.step(mine))
    return {
        "losses": [report.loss for report in reports],
        "samples": [report.samples for report in reports],
        **trained.model.state_dict(),
    }


def rows_once() -> Outcome:
    """Own order; what collate saw on this worker, call by call."""
    data = rows(8, 45, 10)
    calls: list[list[int]] = []

    def collate(samples: list[int]) -> Any:
        calls.append(list(samples))
        return data[samples]

    def order(position: int, size: int, seed: int, epoch: int) -> int:
        return (7 * position + epoch) % size

    trained = trainer(plan="micro=3")
    options = {"num_workers": 0}
    reports = list(trained.steps(range(45), count=8, collate=collate, order=order, loader=options))
    return {
        "calls": calls,
        "samples": [report.samples for report in reports],
        "epochs": [report.epoch for report in reports],
        "steps": [report.step for report in reports],
        **trained.model.state_dict(),
    }


def augmentation() -> Outcome:
    """Random rows and a random collate."""
    drawn: list[list[float]] = []

    def collate(samples: list[Any]) -> Any:
        drawn.extend(sample[2].tolist() for sample in samples)
        return masked(samples)

    trained = trainer()
    list(trained.steps(Augmented(), epochs=2, collate=collate, loader={"num_workers": 0}))
    return {"drawn": drawn, **trained.model.state_dict()}


READINGS = {"plain": (False, 0), "noisy": (True, 0), "noisy ahead": (True, 1)}


def streams() -> Outcome:
    """Iterable datasets, also with noise, and read by a process of their own."""
    out: Outcome = {}
    for name, (noisy, workers) in READINGS.items():
        trained = trainer()
        reports = list(trained.steps(Stream(noisy), epochs=3, loader={"num_workers": workers}))
        out |= {f"{name} {key}": value for key, value in trained.model.state_dict().items()}
        out[f"{name} samples"] = [report.samples for report in reports]
    return out


def normalised() -> Outcome:
    trained = trainer(lambda: Normalised().double())
    list(trained.steps(rows(9, 62, 10), count=9))
    return trained.model.state_dict()


def renormed() -> nn.Module:
    """Looking rows up rescales them."""
    return nn.Sequential(nn.Embedding(9, 5, max_norm=0.5), nn.Flatten(), nn.Linear(20, 4)).double()


def words() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randint(0, 9, (40, 4), generator=generator), torch.randint(0, 4, (40,), generator=generator)
    )


def changing_buffer() -> Outcome:
    return changing(lambda: Counting().double(), rows(9, 40, 10))


def changing_parameter() -> Outcome:
    return changing(renormed, words())


def changing(model: Callable[[], nn.Module], data: Any) -> Outcome:
    trained = trainer(model)
    try:
        list(trained.steps(data, epochs=2))
    except paceline.PacelineError as error:
        return {"error": f"{type(error).__name__}: {error}", "done": trained.steps_done, **trained.model.state_dict()}
    return {"error": None, "done": trained.steps_done, **trained.model.state_dict()}


def rarely() -> Outcome:
    trained = trainer(lambda: Rarely().double(), optimizer=adam)
    list(trained.steps(rows(10, 60, 10), epochs=3))
    return trained.model.state_dict()


def penalised() -> Outcome:
    trained = trainer(loss=steep, forward=slope)
    list(trained.steps(rows(10, 45, 10), epochs=2))
    return trained.model.state_dict()


def toggled() -> Outcome:
    """Parts of the model are frozen for a while; a plain loss of the mean goes on through the rest."""
    trained = trainer()
    for report in trained.steps(rows(12, 50, 10), epochs=4):
        trained.model[0].requires_grad_(not 3 <= report.step < 8)
    return trained.model.state_dict()


def late() -> Outcome:
    """A model that is executed in pieces of up to four micro-batches, and then begins to draw."""
    trained = trainer(lambda: Late().double(), global_batch=32, plan="micro=2")
    sizes = []
    for report in trained.steps(rows(13, 160, 10), count=9):
        if report.step == 1:  # allowed by now; how many is a matter of time, which no test may depend on
            trained._context.merging.size, trained._context.merging._settled = 4, True
        sizes.append(list(trained.model.sizes))
        trained.model.sizes.clear()
        trained.model.draws = report.step >= 6
    return {"sizes": sizes, **trained.model.state_dict()}


def cramped(moment: str) -> Outcome:
    """As `late`, with a memory that holds pieces of no more than eight rows."""
    trained = trainer(lambda: Cramped(moment), global_batch=32, plan="micro=2")
    for report in trained.steps(rows(13, 160, 10), count=5):
        if report.step == 1:
            trained._context.merging.size, trained._context.merging._settled = 8, True
    return {"sizes": trained.model.sizes, **trained.model.state_dict()}


def shaky() -> Outcome:
    trained = trainer(lambda: Shaky().double())
    list(trained.steps(rows(14, 40, 10), epochs=2))
    return trained.model.state_dict()


def own_stream() -> Outcome:
    """The script's own draws, between those of model, loader and evaluation."""
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    drawn = [torch.rand(()).item()]
    trained = trainer(lambda: Shaky().double())
    for _ in trained.steps(Augmented(), count=3, collate=masked, loader={"num_workers": 0}):
        drawn += [torch.rand(()).item(), random.random(), np.random.rand()]
        trained.evaluate(rows(15, 9, 10), lambda output, batch: {"sum": (output.sum(), len(output))})
    list(trained.steps(Stream(noisy=True)))
    drawn += [torch.rand(()).item(), random.random(), np.random.rand()]
    return {"drawn": drawn}


def evaluation() -> Outcome:
    trained = trainer(lambda: nn.Sequential(mlp(), nn.Dropout(0.5)), plan="micro=2")

    def metric(output: torch.Tensor, batch: Any) -> dict[str, tuple[Any, Any]]:
        return {
            "loss": (F.cross_entropy(output, batch[1], reduction="sum"), len(output)),
            "first": (output[batch[1] == 0].sum(), (batch[1] == 0).sum()),
            "nothing": (0.0, 0),
        }

    def by_rows(output: torch.Tensor, batch: Any) -> dict[str, tuple[Any, Any]]:
        return {"even" if float(batch[0][0, 0]) > 0 else "odd": (output.sum(), 1)}

    torch.manual_seed(3)
    other = nn.Sequential(nn.Linear(10, 4), nn.Dropout(0.5)).double().requires_grad_(False)
    out: Outcome = {
        "all": trained.evaluate(rows(16, 45, 10), metric),
        "three rows": trained.evaluate(rows(16, 3, 10), metric),
        "iterable": trained.evaluate(Stream(noisy=False), metric),
        "other model": trained.evaluate(rows(16, 45, 10), metric, model=other),
    }
    out["modes"] = [trained.model.training, other.training]
    try:
        trained.evaluate(rows(16, 45, 10), by_rows)
    except paceline.PacelineError as error:
        out["error"] = f"{type(error).__name__}: {error}"
    out["again"] = trained.evaluate(rows(16, 45, 10), metric)
    return out


def collectives() -> Outcome:
    team = paceline.join()
    mine = torch.arange(2 * (team.rank + 1), dtype=torch.float64).view(team.rank + 1, 2) + 10 * team.rank
    before = mine.clone()
    out: Outcome = {
        "place": [team.rank, team.size],
        "sum": team.all_reduce(torch.tensor([1.0, team.rank]), name="sums").tolist(),
        "integers": team.all_reduce(torch.tensor(2**40 + team.rank)).item(),
        "columns": team.all_reduce(torch.full((2, 3), float(team.rank)).t()).tolist(),
        "broadcast": team.broadcast(torch.tensor([[team.rank + 0.5]])).tolist(),
        "gathered": [part.tolist() for part in team.gather(mine)],
        "empty": [list(part.shape) for part in team.gather(torch.ones(0, 3))],
        "scalars": [part.item() for part in team.gather(torch.tensor(team.rank))],
        "turned": [part.tolist() for part in team.gather(torch.arange(6).view(2, 3).t() + team.rank)],
        "any": [team.any(team.rank == 1), team.any(False), team.any(True)],
    }
    for dtype in (torch.bool, torch.int16, torch.bfloat16, torch.uint16, torch.complex64):
        value = torch.ones(team.rank, 1).to(dtype)
        out[f"gather {dtype}"] = [[list(part.shape), str(part.dtype)] for part in team.gather(value)]
        out[f"broadcast {dtype}"] = str(team.broadcast(torch.ones(()).to(dtype)).dtype)
    out["untouched"] = torch.equal(mine, before)
    marks = Path(sys.argv[1]) / "marks"
    seen = []
    for turn in range(2):
        with team.main_first():
            seen.append((marks / str(turn)).exists())
            if team.rank == 0:
                time.sleep(0.3)
                marks.mkdir(parents=True, exist_ok=True)
                (marks / str(turn)).touch()
    return {**out, "seen": seen}


def reports() -> Outcome:
    """Reports are the same on every worker; a loop may be left and another begun; stop() ends it all."""
    trained = trainer(
        loss=lambda output, batch: (
            F.cross_entropy(output, batch[1], reduction="sum"),
            len(output),
            {"right": ((output.argmax(1) == batch[1]).sum(), len(output)), "never": (0.0, 0)},
        ),
        clip_norm=0.1,
    )
    seen: list[Any] = []
    for report in trained.steps(rows(17, 40, 10), epochs=5):
        seen.append([report.step, report.epoch, report.loss, report.metrics["right"], report.samples, report.grad_norm])
        if report.step == 4:
            break
    with contextlib.suppress(ZeroDivisionError):
        for report in trained.steps(rows(18, 40, 10)):
            seen.append([report.step, report.epoch, report.loss])
            raise ZeroDivisionError
    for report in trained.steps(rows(19, 40, 10), count=50):
        seen.append([report.step, report.epoch, report.loss])
        if report.step == 8:
            trained.stop()
    after = [report.step for report in trained.steps(rows(19, 40, 10))]
    out = {"seen": seen, "after": after, "done": trained.steps_done, "complete": trained.complete}
    return {**out, "main": trained.main, "nan": str(report.metrics["never"]), **trained.model.state_dict()}


SCENARIOS: dict[str, Callable[[], Outcome]] = {
    scenario.__name__: scenario
    for scenario in (
        twins, given_module, made_by_function, gan, own_rows, rows_once, augmentation, streams, normalised,
        changing_buffer, changing_parameter, rarely, penalised, toggled, late, shaky, own_stream, evaluation,
        collectives, reports,
    )
}  # fmt: skip
SCENARIOS |= {f"cramped_{moment}": partial(cramped, moment) for moment in Cramped.MOMENTS}

if __name__ == "__main__":
    tensors, plain = {}, {}
    out = Path(sys.argv[1])
    for title, scenario in SCENARIOS.items():
        for key, value in scenario().items():
            if isinstance(value, torch.Tensor):
                value = torch.view_as_real(value) if value.is_complex() else value
                tensors[f"{title}/{key}"] = value.detach().clone()
            else:
                plain[f"{title}/{key}"] = value
    out.mkdir(parents=True, exist_ok=True)
    rank = paceline.join().rank
    save_file(tensors, out / f"{rank}.safetensors")
    (out / f"{rank}.json").write_text(json.dumps(plain))
