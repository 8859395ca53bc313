"""A loss over the whole global batch is that of plain PyTorch on the whole batch: any accumulation, through kills of
workers. Parity under every plan is in test_plans_models_workers.py.
"""

from __future__ import annotations

import json
import re
import weakref
from pathlib import Path
from typing import Any

import basics
import over_batch
import pytest
import torch
import torch.nn.functional as F
from agents import journal
from alone import trainer
from by_hand import built, grid
from covering import each_value
from fault_runs import STEPS as LOST_STEPS
from fault_runs import Ended, fired, outcome, same, train
from launching import equal_bytes, exported, paceline, train_basics
from once import once
from oracle import apart
from over_batch import CASES, ROWS, tower, triplet
from safetensors.torch import load_file
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from paceline import Trainer, sample_index, stream_seed
from paceline.compute.loss_scale import FIRST
from paceline.errors import PacelineError
from paceline.session.run import Run

# ---- losses of workers


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    def make(folder: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OVER", "batch")
            train(folder, 1, LOST_STEPS)

    return outcome(once(tmp_path_factory, "undisturbed, over batches", make), "")


MOMENTS = ("loading", "outputs", "gathered", "forward", "backward", "summed", "reduced", "applied")
LOST = [("kill", *one) for one in each_value(MOMENTS, (0, 2, 4))]
LOST += [("stop", "outputs", 2), ("raise", "gathered", 2), ("exit", "outputs", 2)]


@pytest.mark.parametrize(
    ("kind", "moment", "worker", "workers"),
    [("kill", "gathered", 1, 3), *(pytest.param(*row, 5, marks=pytest.mark.slow) for row in LOST)],
)
def test_kill_stop_raise_or_exit_at_any_moment_gives_the_undisturbed_weights(
    kind: str, moment: str, worker: int, workers: int, calm: Ended, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OVER", "batch")
    fault = f"{kind}:{worker}@11.{moment}"
    ended = train(tmp_path, workers, LOST_STEPS, fault)
    assert fired(ended) == {fault}
    same(ended, calm)


# ---- bits, precisions, accumulation

EXACT = """
def contrast(o, b):
    logits = t.model.scale.exp() * o @ o.t()
    return F.cross_entropy(logits, (torch.arange(len(o)) + 1) % len(o))
def model():
    made = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 24))
    made.register_parameter("scale", nn.Parameter(torch.tensor(0.1)))
    return made
t = paceline.Trainer(model, contrast, lambda ps: torch.optim.AdamW(ps, lr=0.01), global_batch=24, clip_norm=1.0,
    forward=lambda model, batch: model(batch[0].float()), loss_over="batch")
for r in t.steps(data, count=6): pass
t.export("out.safetensors")
"""


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["", "shard=3 zero=1", "shard=3 zero=2", "shard=3", "precision=bf16"])
def test_exact_loss_over_the_batch_has_the_bytes_of_one_worker(plan: str, tmp_path: Path) -> None:
    """Where parameters are gathered for each forward, the loss can use single numbers; else any."""
    body = EXACT.replace("t.model.scale", "t.model[0].bias.mean()") if "zero" in plan else EXACT
    equal_bytes(tmp_path, body, 3, plan, f"exact {plan}" if "precision" in plan else "exact")


def loud(scale: float) -> tuple[dict[str, torch.Tensor], list[str]]:
    """fp16 with a loss scale, by hand: the weights, and the scales that were tried and left."""
    torch.manual_seed(stream_seed(0, 0, -1))
    model, said = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 8)), []
    update = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    for step in range(8):
        epoch, first = divmod(24 * step, 96)
        x = basics.x[[sample_index(place, 96, 0, epoch) for place in range(first, first + 24)]].float()
        with torch.autocast("cpu", torch.float16):
            z = model(x)
            loss = 100 * F.cross_entropy((z @ z.t()).float(), (torch.arange(24) + 1) % 24)
        tried = scale
        while True:
            update.zero_grad()
            (loss * tried).backward(retain_graph=True)
            if all(bool(p.grad.isfinite().all()) for p in model.parameters()):
                break
            tried /= 2
        said += [f"loss scale {tried:g} from step {step + 2}"] if tried < scale else []
        scale = tried
        for p in model.parameters():
            p.grad /= scale
        update.step()
    return dict(model.state_dict()), said


def test_fp16_loss_scale_over_the_batch_is_that_of_one_process(tmp_path: Path) -> None:
    body = (
        "def contrast(z, b): return 100 * F.cross_entropy((z @ z.t()).float(), (torch.arange(24) + 1) % 24)\n"
        "model = lambda: nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 8))\n"
        "t = paceline.Trainer(model, contrast, lambda ps: torch.optim.AdamW(ps, lr=0.01, eps=1e-4), global_batch=24,\n"
        "    forward=lambda model, batch: model(batch[0].float()), loss_over='batch')\n"
        "for r in t.steps(data, count=8): pass\n"
        "t.export('out.safetensors')\n"
    )
    weights, said = loud(FIRST)
    assert said, "the gradients were to overflow"
    found = exported(tmp_path / "team", body, 2, "precision=fp16")
    told = (str(entry["what"]) for entry in journal(found.parent / "out", "decision"))
    assert [what for what in told if what.startswith("loss scale")] == said
    assert apart(load_file(found), weights) <= 1e-3


@pytest.mark.parametrize("micro", [32, 16, 8, 4, 3, 2])
def test_loss_over_the_batch_with_any_accumulation(micro: int, run: Run) -> None:
    """Against one forward of all rows, which knows no micro-batches."""
    case = CASES["triplet"]
    mine = trainer(
        lambda: case.model().double(),
        lambda output, batch: triplet(None, output),
        over_batch.adamw,
        global_batch=32,
        forward=case.forward,
        loss_over="batch",
        plan=f"micro={micro}",
    )
    losses = [report.loss for report in mine.steps(case.data, epochs=2)]
    model = built(lambda: case.model().double())
    update, expected = over_batch.adamw(model.parameters()), []
    for ((x, labels),) in grid(case.data, 32, 32, epochs=2):
        update.zero_grad()
        loss = triplet(None, (model(x), labels))
        loss.backward()
        update.step()
        expected.append(loss.item())
    assert apart(mine.model.state_dict(), model.state_dict()) <= 1e-12
    assert losses == pytest.approx(expected, rel=1e-12)


# ---- what may be said


def small(forward: Any = None, loss: Any = None, model: Any = None, **more: Any) -> Any:
    loss = loss or (lambda output, batch: output.square().mean())
    return trainer(model or (lambda: tower(10).double()), loss, forward=forward, loss_over="batch", **more)


def drawn(generator: torch.Generator) -> Any:
    return lambda model, batch: model(batch[0]) * torch.rand((), generator=generator, dtype=torch.float64)


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = tower(10).double()
        self.register_buffer("center", torch.zeros(8, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def moving(output: torch.Tensor, batch: Any) -> torch.Tensor:
    CENTRED[-1].model.center += output.detach().mean(0)
    return output.square().mean()


CENTRED: list[Any] = []
ROWS_FIRST = 'with loss_over="batch", return tensors whose first dimension is the rows, in any nesting'
REFUSED: dict[str, tuple[Any, str]] = {
    "a number for all": (
        lambda: small(lambda model, batch: (model(batch[0]), batch[0].sum())),
        "the forward returns a tensor of shape () for a micro-batch of 2 rows; "
        f"{ROWS_FIRST}; let the loss read values for all rows (a temperature) from the model",
    ),
    "rows last": (
        lambda: small(lambda model, batch: model(batch[0]).t()),
        "the forward returns a tensor of shape (8, 2) for a micro-batch of 2 rows; "
        f"{ROWS_FIRST}; let the loss read values for all rows (a temperature) from the model",
    ),
    "text": (lambda: small(lambda model, batch: (model(batch[0]), "text")), f"the forward returns a str; {ROWS_FIRST}"),
    "a generator of its own": (
        lambda: small(drawn(torch.Generator().manual_seed(0))),
        "the forward of step 1 gives other results when run again with the same seeds; draw only from torch's, "
        "Python's or numpy's global generators, and keep no state from one call to the next",
    ),
    "a loss of nothing": (
        lambda: small(loss=lambda output, batch: output.detach().sum()),
        "the loss does not depend on any trainable parameter; compute the loss from the model's output, without "
        "detach(), item() or no_grad()",
    ),
    "a checkpoint of the older kind": (
        lambda: small(loss=lambda output, batch: checkpoint(torch.square, output, use_reentrant=True).mean()),
        "the loss over the batch calls checkpoint(..., use_reentrant=True); pass use_reentrant=False",
    ),
    "a loss that changes a buffer": (
        lambda: CENTRED.append(small(model=Centred, loss=moving)) or CENTRED[-1],
        "the loss over the batch changes the buffer 'center'; change it in the training loop instead",
    ),
    "infinite": (
        lambda: small(loss=lambda output, batch: output.square().mean() / 0),
        "the loss of step 1 is not finite (worker 0: all outputs of the forward are finite); the step was not applied; "
        "look at these rows, lower the learning rate or set clip_norm=",
    ),
    "another word": (
        lambda: Trainer(tower, triplet, over_batch.adamw, loss_over="rows"),
        'loss_over= needs "batch" or None; got \'rows\'; write loss_over="batch"',
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_loss_over_the_batch_refuses_what_it_cannot_train(what: str, run: Run) -> None:
    make, text = REFUSED[what]
    with pytest.raises(PacelineError, match=f"^{re.escape(text)}"):
        next(iter(make().steps(TensorDataset(over_batch.x))))


def test_hint_for_a_loss_over_the_batch_that_reads_the_batch(run: Run) -> None:
    made = small(loss=lambda output, batch: F.cross_entropy(output, batch[1]))
    with pytest.raises(TypeError) as raised:
        next(iter(made.steps(TensorDataset(over_batch.x, over_batch.labels))))
    hint = 'hint: batch is None with loss_over="batch": return the needed parts of the batch from the forward'
    assert hint in raised.value.__notes__


def test_loss_over_the_batch_merges_buffers_once_and_seeds_its_draws(run: Run) -> None:
    """A counter of forwards is merged as ever; what the loss draws is the same whoever computes it."""
    seen: list[float] = []

    def noisy(output: torch.Tensor, batch: Any) -> torch.Tensor:
        seen.append(float(torch.rand(())))
        return output.square().mean()

    made = small(model=lambda: tower(10, nn.BatchNorm1d(over_batch.WIDTH)).double(), loss=noisy)
    list(made.steps(TensorDataset(over_batch.x[:64]), epochs=1))
    assert int(made.model[2].num_batches_tracked) == 32
    torch.manual_seed(stream_seed(0, 0, 8))
    assert seen[0] == float(torch.rand(()))


# ---- metrics

EVALUATED = """
import json
from over_batch import CASES, clip, simclr
def recall(output, batch):
    assert batch is None
    near = (output["one"] @ output["two"].t()).argmax(1) == torch.arange(len(output["one"]))
    return {"recall": (near.sum(), len(near)), "batches": (1, 1 / 3)}
class Widest:
    _defaults, _reductions = {"widest": torch.zeros(())}, {"widest": "max"}
    def reset(self): self.widest = torch.zeros(())
    def update(self, output, batch): self.widest = output["one"].std(0).max()
    def compute(self): return {"widest": self.widest}
case = CASES["towers"]
t = paceline.Trainer(lambda: case.model().double(), lambda o, b: clip(t.model, o), torch.optim.AdamW, global_batch=24,
    forward=case.forward, loss_over="batch")
found = [t.evaluate(case.data, recall), t.evaluate(case.data, Widest()), t.evaluate(case.data)]
if t.main: __import__("pathlib").Path("found.json").write_text(json.dumps(found))
"""


@pytest.mark.parametrize(
    ("workers", "plan"), [(3, ""), *(pytest.param(*p, marks=pytest.mark.slow) for p in ((1, ""), (2, "shard=2")))]
)
def test_evaluate_gives_metrics_whole_batches(workers: int, plan: str, tmp_path: Path) -> None:
    train_basics(tmp_path, EVALUATED, workers, *(("--plan", plan) if plan else ()))
    case = CASES["towers"]
    model = built(lambda: case.model().double())
    near, widest, losses = [], [], []
    with torch.no_grad():
        for start in range(0, ROWS, 24):
            one, two = model(over_batch.x[start : start + 24], over_batch.y[start : start + 24]).values()
            near.append((one @ two.t()).argmax(1) == torch.arange(len(one)))
            widest.append(float(one.std(0).max()))
            losses.append(float(over_batch.clip(model, {"one": one, "two": two})[0]))
    means, largest, loss = json.loads((tmp_path / "found.json").read_text())
    assert means == {"recall": pytest.approx(float(torch.cat(near).double().mean())), "batches": 3.0, "n": ROWS}
    assert largest == {"widest": pytest.approx(max(widest)), "n": ROWS}
    mean = pytest.approx(sum(losses) / (2 * ROWS), rel=1e-9)
    assert loss == {"loss": mean, "right": means["recall"], "n": ROWS}


# ---- memory: what autograd keeps for backwards, at most


class Kept:
    """Bytes of the tensors that are kept at present, and at most."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        kept, size = tensor.detach(), tensor.nbytes
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(kept, self.free, size)
        return kept

    def free(self, size: int) -> None:
        self.now -= size


def kept(loss_over: str | None, micro: int) -> int:
    wide = lambda: nn.Sequential(nn.Linear(10, 256), nn.Dropout(0.1), nn.Tanh(), nn.Linear(256, 4))
    mine = trainer(
        lambda: wide().double(),
        lambda output, batch: (output - output.mean(0)).square().mean(),
        forward=None,
        loss_over=loss_over,
        global_batch=64,
        plan=f"micro={micro}",
    )
    found = Kept()
    with torch.autograd.graph.saved_tensors_hooks(found.pack, lambda tensor: tensor):
        for _ in mine.steps(TensorDataset(over_batch.x[:64]), count=3):
            pass
    return found.most


def test_memory_of_a_loss_over_the_batch_is_one_micro_batch_and_the_outputs(run: Run) -> None:
    outputs = 64 * 4 * 8
    assert kept("batch", 4) <= 1.2 * kept(None, 4) + outputs
    assert kept("batch", 64) > 4 * kept("batch", 4), "it can be seen"


# ---- rows that workers bring, bytes, and the rehearsal

BROUGHT = """
from over_batch import CASES
case, team = CASES["blocks"], paceline.join()
sgd = lambda params: torch.optim.SGD(params, lr=0.1)
loss = lambda output, batch: case.loss(t.model, output)
t = paceline.Trainer(lambda: case.model().double(), loss, sgd, forward=case.forward, loss_over="batch")
for step in range(3):
    rows = case.data.tensors[0][20 * step : 20 * step + 20]
    mine = rows.split([20] if team.size == 1 else [15, 5, 0])[team.rank]
    t.step([mine] if len(mine) else None)
t.export("out.safetensors")
"""


def test_step_makes_one_batch_of_the_rows_that_workers_bring(tmp_path: Path) -> None:
    one, three = (exported(tmp_path / str(workers), BROUGHT, workers, "micro=5") for workers in (1, 3))
    assert apart(load_file(three), load_file(one)) <= 1e-12


def test_loss_over_the_batch_sends_outputs_and_gradients_once(tmp_path: Path) -> None:
    body = (
        "model = lambda: nn.Linear(10, 50).double()\n"
        "loss = lambda o, b: (o[0] @ o[0].t()).square().mean() + o[1].double().mean() * 0\n"
        "t = paceline.Trainer(model, loss, torch.optim.AdamW, global_batch=24, loss_over='batch',\n"
        "    forward=lambda model, batch: (model(batch[0]), batch[1]))\n"
        "for r in t.steps(data, count=10): pass\n"
    )
    train_basics(tmp_path, body, 2, "--shares", "1,1")
    (told,) = journal(tmp_path / "out", "collectives")
    rows, small = 12, 700  # and what says how many there are
    assert 10 * rows * 51 * 8 <= told["kinds"]["outputs"][1] <= 10 * (rows * 51 * 8 + small)
    vector = 10 * 400
    assert 10 * 11 * 50 * 8 <= told["kinds"]["gradients"][1] <= 10 * 11 * 50 * 8 + vector


@pytest.mark.slow
def test_check_command_with_a_loss_over_the_batch(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("from basics import *\n" + EXACT)
    said = paceline("check", "train.py", "--workers", "2", "--steps", "3", cwd=tmp_path).stdout
    assert said.splitlines()[-1] == "verdict: the same training on 2 workers as on one"
