"""Workers that do not train the same: other rows, or weights that a script changes on one of them alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from launching import equal_bytes, train_basics, without_an_agent
from safetensors.torch import load_file

from paceline.base.journal import read_journal
from paceline.data.fingerprint import _digests
from paceline.data.loader import Source
from paceline.session.consistency import digest

Golden = Callable[[str, str], None]
HEAD = "import os\nrank = int(os.environ.get('PACELINE_RANK') or os.environ['RANK'])\n"
CURE = (
    "; code that changes weights or buffers must run on every worker with the same numbers: without `if"
    " trainer.main:`, ranks or unseeded random numbers\n"
)
DATASETS = """
import json

longer = TensorDataset(*(t[: 40 + (rank == 1)] for t in data.tensors))
other = x.clone()
other[95] += 1e-9 * (rank == 1)
in_order = lambda position, *_: position
shifted = lambda position, size, seed, epoch: (position + rank // 2) % size
count = lambda output, batch: {"n": (len(output), 1)}
errors = {}
for name, use in {
    "length": lambda: list(make().steps(longer)),
    "length of evaluate": lambda: make().evaluate(longer, count),
    "content": lambda: list(make().steps(TensorDataset(other, data.tensors[1]), order=in_order)),
    "order": lambda: list(make().steps(data, order=shifted)),
}.items():
    try:
        use()
    except paceline.errors.DatasetError as error:
        errors[name] = str(error)
list(make().steps(data, count=2))
if rank == 0:
    json.dump(errors, open("errors.json", "w"))
"""


def test_workers_with_different_datasets_are_refused_by_what_differs(golden: Golden, tmp_path: Path) -> None:
    train_basics(tmp_path, HEAD + DATASETS, 3)
    errors = json.loads((tmp_path / "errors.json").read_text())
    assert [*errors] == ["length", "length of evaluate", "content", "order"]
    for name, error in errors.items():
        golden(f"different datasets: {name}", error)


class Rows:
    def __init__(self, row: object) -> None:
        self.row = row

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> object:
        return self.row


def told_of(row: object) -> list[str]:
    return _digests(Source.of(Rows(row), 0, None, None, {}), 0)


def test_digest_of_a_row_ignores_key_order_and_rounding() -> None:
    row = {"b": (torch.arange(3), [np.float32(0.5)]), "a": "text", "c": {"x": 1.5, "other": object()}}
    same = {"a": "text", "c": {"other": object(), "x": 1.5}, "b": (torch.arange(3), [np.float32(0.5)])}
    assert told_of(row) == told_of(same)
    exact = [{**row, "a": "texts"}, {**row, "b": (torch.arange(3).int(), [np.float32(0.5)])}, {**row, "b": None}]
    assert all(told_of(other)[0] != told_of(row)[0] for other in exact)
    floats = [{**row, "c": {"x": -1.5, "other": object()}}, {**row, "b": (torch.arange(3), [np.float32(0.25)])}]
    assert all(told_of(other)[0] == told_of(row)[0] and told_of(other) != told_of(row) for other in floats)


SEEN = """
import io, random
class Counting:
    def __init__(self):
        self.count, self.rows, self.file = 0, [], None
        self.own = torch.Generator().manual_seed(3), random.Random(3)
    def __len__(self):
        return 96
    def __getitem__(self, row):
        self.file = self.file or io.BytesIO(bytes(100))
        drawn = self.own[1].random(), float(torch.rand(1, generator=self.own[0]))
        first = self.count, self.rows, self.file.tell(), *drawn
        self.count, self.seen = self.count + 1, getattr(self, "seen", str(first))
        self.rows.append(row)
        self.file.read(1)
        return x[row] + {noise}, data.tensors[1][row]
own = Counting()
t = make(plan="exact micro=3")
list(t.steps(own))
expected = (0, [], 0, random.Random(3).random(), float(torch.rand(1, generator=torch.Generator().manual_seed(3))))
assert own.seen == str(expected), own.seen
t.export("out.safetensors")
"""


def test_comparing_rows_among_workers_leaves_generators_and_files_as_they_were(tmp_path: Path) -> None:
    """Counts, generators and files of the dataset stand where they stood, and the bytes are those of one worker, which
    compares nothing.
    """
    equal_bytes(tmp_path, SEEN.replace("{noise}", "torch.rand(1) + random.random()"), 2, "micro=3")


def test_random_rows_that_cannot_be_compared_are_named(tmp_path: Path) -> None:
    body = SEEN.replace("{noise}", "self.own[1].random() * (row > 50)").replace("list(t.steps(own))", (
        "list(t.steps(own, order=lambda position, *_: position))"
    ))  # fmt: skip
    told = (
        "rows 63, 95 of the dataset differed when loaded twice, because of random numbers other than those of torch,"
        " random and numpy; they cannot be compared between workers\n"
    )
    assert train_basics(tmp_path, body, 2).stderr.count(told) == 1


def test_digest_of_tensors_depends_on_bits_and_positions() -> None:
    values = torch.arange(1.0, 300_001)
    kinds = [values.double(), values.half(), values.int(), values > 3, torch.view_as_complex(values.view(-1, 2))]
    for tensor in [values, *kinds]:
        swapped, other = tensor.clone(), tensor.clone()
        swapped[[0, -1]] = tensor[[-1, 0]]
        other[7] = tensor[0]
        signs = tensor.clone() if tensor.dtype == torch.bool else tensor.clone().neg_()
        found = {digest([one]) for one in (tensor, swapped, other, signs)}
        assert len(found) == (3 if tensor.dtype == torch.bool else 4), tensor.dtype


ALONE = """
t = make(model=lambda: nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.Linear(16, 2)).double())
for report in t.steps(data, count=20):
    if report.step == {step} and rank == 1:
        with torch.no_grad():
            {change}
"""
ONE = {
    "weight": ("for p in t.model.parameters(): p.mul_(1.001)", "0.weight"),
    "statistics": ("t.model.train()(x)", "1.running_mean"),
}


def seen(text: str, name: str, others: str) -> tuple[int, ...]:
    """After which step it was seen, and after which not yet."""
    what = rf"WorkersDifferError: {name} on {others}, seen after step (\d+), but not after step (\d+)"
    found = re.search(what + re.escape(CURE), text)
    assert found, text
    return tuple(map(int, found.groups()))


@pytest.mark.parametrize("case", [pytest.param("weight", marks=pytest.mark.slow), "statistics"])
def test_weights_changed_on_one_worker_end_the_run(case: str, tmp_path: Path) -> None:
    change, name = ONE[case]
    text = train_basics(tmp_path, HEAD + ALONE.format(step=5, change=change), 3, code=1).stderr
    after, before = seen(text, name, "worker 1 differs from that on workers 0, 2")
    assert before < 5 <= after <= 7  # which of them is the clock's choice


def test_weights_changed_after_the_last_step_are_found_by_the_checkpoint(tmp_path: Path) -> None:
    change, name = ONE["weight"]
    text = train_basics(tmp_path, HEAD + ALONE.format(step=20, change=change), 2, code=1).stderr
    assert seen(text, name, "worker 1 differs from that on worker 0")[0] == 20


@pytest.mark.parametrize(
    ("leave", "changed"),
    [(False, True), (True, True), (True, False), pytest.param(False, False, marks=pytest.mark.slow)],
)
def test_without_a_run_folder_the_end_of_the_script_finds_weights_that_differ(
    leave: bool, changed: bool, tmp_path: Path
) -> None:
    """In the last step, also of a loop that is left; what is changed after training is the script's own affair."""
    change, name = ONE["weight"]
    script = tmp_path / "train.py"
    body = ALONE.replace("20", "21" if leave else "20").format(step=20 if changed else 0, change=change)
    body += "    if report.step == 20:\n        break\n" if leave else ""
    body += "" if changed else "if rank == 0:\n    t.model.half()\n"
    script.write_text(f"from basics import *\n{HEAD}{body}")
    ends = without_an_agent(script, script)
    assert [code for code, _ in ends] == [int(changed)] * 2, ends
    if changed:
        assert seen(ends[0][1], name, "worker 1 differs from that on worker 0")[0] == 20


LATE = """
import sys, time
from types import SimpleNamespace
from paceline.comm import communicator

t = make()
for report in t.steps(data, count=4):
    if report.step == 3:
        break  # so that all compare their weights at the end
if rank == 1:
    def sleep(seconds):
        print("late", file=sys.stderr)
        time.sleep(2.5)

    communicator.time = SimpleNamespace(sleep=sleep)
"""


def test_a_worker_that_sees_late_that_all_have_ended_disturbs_nobody(tmp_path: Path) -> None:
    """The others wait for it in the collectives that follow the end of the script."""
    script = tmp_path / "train.py"
    script.write_text(f"from basics import *\n{HEAD}{LATE}")
    ends = without_an_agent(script, script, script)
    assert [code for code, _ in ends] == [0, 0, 0], ends
    assert ends[1][1].count("late\n") == 1


SHARDS = """
t = make(plan="{plan}")
for report in t.steps(data, count=20):
    if rank == 1:
        with torch.no_grad():
            for p in t.model.parameters():
                getattr(p, "_local_tensor", p).mul_(1.001)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "others"),
    [
        ("exact", "worker 1 differs from that on workers 0, 2-3"),
        ("shard=2 zero=1", "worker 1 differs from that on workers 0, 2-3"),
        ("shard=2 zero=2", "worker 3 differs from that on worker 1"),  # who have the same piece
        ("exact shard=2 zero=3", "worker 3 differs from that on worker 1"),
    ],
)
def test_weights_changed_on_one_worker_are_named_under_every_plan(plan: str, others: str, tmp_path: Path) -> None:
    text = train_basics(tmp_path, HEAD + SHARDS.format(plan=plan), 4, "--max-restarts", "0", code=1).stderr
    assert re.search(rf"0\.weight on {others}, seen after step 1, but not before the first", text), text


ALIKE = """
for t in (make(), make(plan="exact micro=3")):
    t.state["mean"] = [p.detach().clone() for p in t.model.parameters()]
    for report in t.steps(data, count=16):
        with torch.no_grad():
            for m, p in zip(t.state["mean"], t.model.parameters()):
                m.lerp_(p.clamp_(-1, 1), 0.1)
                if report.step % 5 == 0:  # swapped
                    old = p.clone()
                    p.copy_(m)
                    m.copy_(old)
    t.evaluate(data, lambda o, b: {"n": (len(o), 1)})
"""


def test_weights_changed_alike_on_all_workers_are_accepted(tmp_path: Path) -> None:
    """Also through a loss and a return, and with two trainers."""
    train_basics(tmp_path, ALIKE, 3, chaos="kill:1@5.backward")
    told = [event for event in read_journal(tmp_path / "out") if event["event"] == "agreement"]
    assert [event["trainer"] for event in told] == [0, 1]
    assert all(event["checks"] >= 6 and event["distance"] is None for event in told)


KINDS = """import os
rank = int(os.environ["PACELINE_RANK"])
if rank == 1:
    {another_processor}
from basics import *
from safetensors.torch import save_file
data = TensorDataset(x.float(), data.tensors[1])
t = paceline.Trainer(net().float(), cross_entropy, lambda params: torch.optim.AdamW(params), global_batch=24)
for report in t.steps(data, count=30):
    if report.step == {step} and rank == 1:
        with torch.no_grad():
            t.model[0].weight.mul_(1.5)
save_file(t.model.state_dict(), f"{{rank}}.safetensors")
"""


ROUNDS_OTHERWISE = 'os.environ["ATEN_CPU_CAPABILITY"] = "default"'
IS_CALLED_OTHERWISE = (  # and the worker starts with torch imported
    'from paceline.session import consistency; consistency.get_cpu_capability = lambda: "DEFAULT"'
)


@pytest.mark.slow
def test_workers_with_different_processors_get_the_weights_of_one(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(KINDS.format(step=-1, another_processor=ROUNDS_OTHERWISE))
    train_basics(tmp_path, None, 2, "--save-every", "10")
    (told,) = [event for event in read_journal(tmp_path / "out") if event["event"] == "agreement"]
    assert 0 <= told["distance"] < 1e-5
    one, other = (load_file(tmp_path / f"{rank}.safetensors") for rank in range(2))
    assert all(value.equal(other[name]) for name, value in one.items())


def test_weights_apart_by_more_than_rounding_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(KINDS.format(step=5, another_processor=IS_CALLED_OTHERWISE))
    text = train_basics(tmp_path, None, 2, "--save-every", "10", code=1).stderr
    kinds = (
        r"the weights of worker 1 \(cpu DEFAULT\) differ by \d\.\de-01 of their norm from those of worker 0 \(cpu \w+\)"
    )
    found = re.search(
        rf"WorkersDifferError: {kinds}, seen after step (\d+), but not after step (\d+){re.escape(CURE)}", text
    )
    assert found, text
    assert int(found[2]) < 5 <= int(found[1]) <= 7
