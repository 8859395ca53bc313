"""Models in stages, and sequences that are divided, are compared with the whole model before the first step: what is
not the same is refused, and what can be right is.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import aside
import pytest
import torch
from agents import journal
from judging import FAST, LOSSES
from launching import SCRIPTS, paceline
from oracle import apart
from safetensors.torch import load_file
from torch import nn

from paceline import sample_index, stream_seed

RESULTS = (
    "return everything that the loss or later layers need from the blocks: values that a block stores in a list or an "
    "attribute stay on that block's worker, and so do those that the loss takes from a hook; and do not sum over "
    "the model's parameters in the forward or loss (use weight_decay= of the optimizer for a penalty); or leave "
    "pipeline= out"
)


def run(folder: Path, script: str, workers: int, plan: str, *arguments: str, code: int | None = 0) -> str:
    folder.mkdir(exist_ok=True)
    options = ("--workers", str(workers), "--run-dir", "out", "--max-restarts", "0", "--plan", plan)
    return paceline("run", *options, SCRIPTS / script, *arguments, cwd=folder, code=code, timeout=500).stderr


def plain(name: str, micro: int = 2) -> nn.Module:
    """The same training in plain PyTorch."""
    torch.manual_seed(stream_seed(0, 0, -1))
    make, loss = aside.CASES[name]
    model = make().double()
    optimizer = aside.optimizer(model.parameters())
    for step in range(3):
        rows = [sample_index(position, 24, 0, 0) for position in range(8 * step, 8 * step + 8)]
        optimizer.zero_grad()
        for number, first in enumerate(range(0, 8, micro)):
            torch.manual_seed(stream_seed(0, step, number))
            some = rows[first : first + micro]
            batch = [column[some] for column in aside.data.tensors]
            (loss(model(batch[0]), batch) * len(some) / 8).backward()
        optimizer.step()
    return model


SAME = {"pipeline=2": 2, "pipeline=3": 3, "pipeline=2 virtual=2": 2, "pipeline=2 schedule=gpipe": 2, "context=2": 2}
SAME |= {"tensor=2": 2, "pipeline=2 tensor=2": 4, "shard=2 zero=3 pipeline=2": 4, "shard=2 zero=2 pipeline=2": 4}


@pytest.mark.parametrize("plan", [p if p == "pipeline=2" else pytest.param(p, marks=pytest.mark.slow) for p in SAME])
def test_pipeline_trains_what_equals_the_whole_model(plan: str, tmp_path: Path) -> None:
    names = ["detached", "bridged", "recomputed", "routed"]
    if "pipeline" in plan:
        names.append("altered")
    if plan != "pipeline=2":
        names += ["plain", "dropped", "registered", "collected"]
    if plan == "pipeline=2 tensor=2":  # what is computed again meets parts where nobody follows them: refused
        names.remove("recomputed")
    run(tmp_path, "aside.py", SAME[plan], f"micro=2 {plan}", *names)
    for name in names:
        assert apart(load_file(tmp_path / f"{name}.safetensors"), dict(plain(name).named_parameters())) <= 1e-12, name
    if "pipeline" in plan:
        said = [str(event["text"]) for event in journal(tmp_path / "out", "note")]
        verified = "pipeline= was verified on one micro-batch against the full model"
        assert f"{verified}: relative difference 0 of the loss and 0 of the gradients" in said


@pytest.mark.slow
def test_tensor_refuses_user_checkpointing_of_cut_layers(tmp_path: Path) -> None:
    said = run(tmp_path, "aside.py", 4, "micro=2 pipeline=2 tensor=2", "recomputed", code=None)
    what = (
        "UsageError: Recomputed fails when tensor= splits its layers (The size of tensor a (8) must match the size of "
        'tensor b (4) at non-singleton dimension 2); in tensor=, set to "whole" the layers that run inside '
        "checkpoint() (the plan word recompute=blocks recomputes blocks without checkpoint())\n"
    )
    assert what in said
    assert not list(journal(tmp_path / "out", "step"))


SUMS = {"pipeline=2": 2, "pipeline=2 virtual=2": 2, "pipeline=3": 3, "pipeline=2 tensor=2": 4}
SUMS |= {"shard=2 zero=3 pipeline=2": 4}


@pytest.mark.parametrize("plan", [p if p == "pipeline=2" else pytest.param(p, marks=pytest.mark.slow) for p in SUMS])
def test_pipeline_with_micro_batches_of_a_single_row(plan: str, tmp_path: Path) -> None:
    """In a step, after seven rows, and at the end of an evaluation."""
    run(tmp_path, "aside.py", SUMS[plan], f"micro=7 {plan}", "sums")
    model = plain("sums", 7)
    assert apart(load_file(tmp_path / "sums.safetensors"), dict(model.named_parameters())) <= 1e-12
    x, y = aside.some.tensors
    with torch.no_grad():
        losses = [float(aside.mse(model(a), (a, b))) * len(a) for a, b in zip(x.split(7), y.split(7), strict=True)]
    found = json.loads((tmp_path / "losses.json").read_text())["evaluated"]
    assert found == pytest.approx([sum(losses) / 22], rel=1e-12)


ANOTHER = "the loss of a micro-batch is {} when pipeline= splits {} into stages, but {} with the full model"
REFUSED = {  # in two stages
    "hooked": ANOTHER.format("nan", "Hooked", "2.1804846"),
    "appends": ANOTHER.format("2.1169828", "Appends", "2.1575505"),
    "penalty in the loss": ANOTHER.format("2.0300652", "Net", "2.0614485"),
    "penalty in the forward": ANOTHER.format("2.3393096", "Penalized", "2.6001983"),
    "penalty of a list": ANOTHER.format("2.1150522", "Listed", "2.2110142"),
    "attribute": "Attribute fails when pipeline= splits it into stages (AttributeError: 'Sets' object has no attribute "
    "'seen')",
}


OUTSIDE = (
    "the forward or the loss uses a sharded parameter outside of model(...)",
    "use the parameter inside model(...), where it is gathered, or use zero=2",
)
GATHERED = {  # what sharding refuses before the comparison
    "penalty in the loss": OUTSIDE,
    "penalty in the forward": OUTSIDE,
    "penalty of a list": (
        "the attribute weights of the model refers to parameters that sharding replaces",
        "keep the parameters in an nn.ParameterList, or use zero=1",
    ),
}


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [n if n == "hooked" else pytest.param(n, marks=pytest.mark.slow) for n in REFUSED])
def test_pipeline_refuses_what_differs_from_the_whole_model(name: str, workers: int, tmp_path: Path) -> None:
    said = run(tmp_path, "aside.py", workers, f"micro=2 pipeline={workers}", name, code=None)
    found = re.findall(f"UsageError: (.*); {re.escape(RESULTS)}\n", said)
    if workers > 2:  # what one stage has is another part of it
        found = [re.sub(r"micro-batch is [\d.]+", "micro-batch is some", one) for one in found]
    wanted = re.sub(r"micro-batch is [\d.]+", "micro-batch is some", REFUSED[name]) if workers > 2 else REFUSED[name]
    assert found[:1] == [wanted]
    assert not list(journal(tmp_path / "out", "step"))


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_pipeline_of_gathered_parameters_refuses_what_differs_from_the_whole_model(name: str, tmp_path: Path) -> None:
    said = run(tmp_path, "aside.py", 4, "micro=2 shard=2 zero=3 pipeline=2", name, code=None)
    wanted, cure = GATHERED.get(name, (REFUSED[name], RESULTS))
    (found, *_) = re.findall(f"UsageError: (.*); {re.escape(cure)}\n", said)
    masked = [re.sub(r"\d+\.\d+", "some", text) for text in (found, wanted)]  # of another micro-batch
    assert masked[0] == masked[1]
    assert not list(journal(tmp_path / "out", "step"))


BY_BLOCK = {  # what fits is a forward to which blocks come one after another
    "hooked": (2, "pipeline=2", REFUSED["hooked"]),
    "routed": (2, "pipeline=2", ""),
    "penalty of a list": (2, "pipeline=2", ANOTHER.format("2.1150522", "Listed", "nan")),
    "penalty in the loss": (3, "pipeline=3", ANOTHER.format("some", "Net", "nan")),
    "plain": (2, "pipeline=2", ""),
    "dropped": (3, "pipeline=3", ""),
    "bridged": (2, "pipeline=2 virtual=2", ""),
}


@pytest.mark.parametrize("name", [n if n == "hooked" else pytest.param(n, marks=pytest.mark.slow) for n in BY_BLOCK])
def test_pipeline_compares_a_model_that_does_not_fit_block_by_block(name: str, tmp_path: Path) -> None:
    workers, plan, wrong = BY_BLOCK[name]
    room = "room=60000" if name == "bridged" else "room=13000"
    said = run(tmp_path, "aside.py", workers, f"micro=2 {plan}", room, name, code=None if wrong else 0)
    if wrong:
        (found, *_) = re.findall(f"UsageError: (.*); {re.escape(RESULTS)}\n", said)
        assert found == wrong or ("some" in wrong and re.sub(r"is [\d.]+", "is some", found, count=1) == wrong)
        assert not list(journal(tmp_path / "out", "step"))
        return
    assert apart(load_file(tmp_path / f"{name}.safetensors"), dict(plain(name).named_parameters())) <= 1e-12
    assert (
        "pipeline= was verified on one micro-batch against the full model, computed block by block as it does not fit "
        "on one worker: relative difference 0 of the loss, gradients not compared"
    ) in [event["text"] for event in journal(tmp_path / "out", "note")]


def judged(folder: Path, workers: int, plan: str, names: tuple[str, ...]) -> dict[str, list[float] | str]:
    run(folder, "judging.py", workers, plan, "found.json", *names)
    found: dict[str, list[float] | str] = json.loads((folder / "found.json").read_text())
    return found


# A gradient that the loss itself takes of weights is one worker's part.
OF_WEIGHTS = (
    r"UsageError: the loss of a micro-batch is [\d.]+ instead of 1\.9200454 when context= divides the sequences of "
    r"Net; leave context= out"
)


@pytest.mark.parametrize(
    ("workers", "names"),
    [(2, FAST), *(pytest.param(workers, tuple(LOSSES), marks=pytest.mark.slow) for workers in (2, 3))],
    ids=["2, some", "2", "3"],
)
def test_context_parallel_loss_is_right_or_refused(workers: int, names: tuple[str, ...], tmp_path: Path) -> None:
    one = judged(tmp_path / "one", 1, "micro=3", names)
    found = judged(tmp_path / "several", workers, f"micro=3 context={workers}", names)
    refused = {name: said for name, said in found.items() if isinstance(said, str)}
    assert [*refused] == [name for name in names if name == "gradients of weights"]
    assert all(re.fullmatch(OF_WEIGHTS, said) for said in refused.values())
    for name in set(names) - refused.keys():
        assert found[name] == pytest.approx(one[name], rel=1e-12, abs=1e-12), name


def test_context_parallel_refuses_a_model_without_sequences(tmp_path: Path) -> None:
    body = """
from basics import *
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(10, 10) for _ in range(2))
        self.head = nn.Linear(10, 2)
    def forward(self, x):
        for block in self.blocks: x = block(x).relu()
        return self.head(x)
for _ in make(model=lambda: Net().double()).steps(data, count=2): pass
"""
    (tmp_path / "train.py").write_text(body)
    options = ("--workers", "2", "--run-dir", "out", "--max-restarts", "0", "--plan", "context=2")
    said = paceline("run", *options, "train.py", cwd=tmp_path, code=None).stderr
    what = (
        "no block of Net takes a sequence (rows, tokens, width) that context= can divide: one block takes a tensor of "
        "shape"
    )
    assert f"UsageError: {what} (3, 10); use data=2 instead of context=2\n" in said
    assert not list(journal(tmp_path / "out", "step"))
