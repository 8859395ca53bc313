"""`predict`: each row once and in order, on any number of workers, through losses, and what cannot be handed on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from alone import trainer
from basics import cross_entropy, data, net, x
from by_hand import Plain, built, grid
from cases import rows
from covering import pairwise
from launching import train_basics
from public import Stream
from safetensors.torch import load_file

from paceline.base.journal import read_journal
from paceline.errors import CheckpointError, UsageError

# In the body of step 4, and of 3 rows with more workers than micro-batches. One worker kills itself in it.
SCRIPT = """
import json, os, signal
from safetensors.torch import save_file
now = ""
seen = 0
def forward(model, batch):
    global seen
    if now == "{during}" and os.environ["PACELINE_RANK"] == "{lost}" and not os.path.exists("lost"):
        seen += 1
        if seen == {after}:  # after its first window
            open("lost", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
    output = model(batch[0])
    forms = {{"iterator": {{"logits": output, "all": [batch[1], (output.sum(1),)]}}}}
    return (forms | {{"file": {{"a": output, "b": batch[1]}}, "npy": output.float()}}).get(now, output)
t = make(forward=forward, plan="exact micro=3")
some = torch.utils.data.Subset(data, range(95))
for report in t.steps(data, count=8):
    if report.step == 4:
        t.export("weights.safetensors")
        now = "iterator"
        got = [(rows, output) for rows, output in t.predict(some)]
        few = [rows for rows, output in t.predict(torch.utils.data.Subset(data, range(3)))]
        if t.main:
            last = [output["all"] for _, output in got]
            json.dump([[rows.start, rows.stop] for rows, _ in got], open("rows.json", "w"))
            json.dump(len(few), open("few.json", "w"))
            found = {{"logits": torch.cat([output["logits"] for _, output in got])}}
            found |= {{"target": torch.cat([a for a, _ in last]), "sums": torch.cat([b for _, (b,) in last])}}
            save_file(found, "got.safetensors")
        now = "file"
        assert str(t.predict(some, path="out.safetensors")) == "out.safetensors"
        now = "npy"
        t.predict(some, path="out.npy")
        now = ""
t.export("end.safetensors")
"""


LEFT = """
def left(line):
    with open(f"left-{os.environ['PACELINE_RANK']}", "a") as file:
        file.write(f"{line}\\n")
t = make(plan="exact micro=3")
for report in t.steps(data, count=3):
    for rows, output in t.predict(data):
        left(rows)
        break
    left(t.evaluate(data, lambda o, b: {"right": (1, 1)})["n"])
try:
    for rows, output in t.predict(data):
        raise ValueError("in the body")
except ValueError:
    left("raised")
left(t.evaluate(data, lambda o, b: {"right": (1, 1)})["n"])
"""


def predicts(folder: Path, workers: int, shares: str, during: str, lost: int | str) -> None:
    body = SCRIPT.format(during=during, lost=lost, after=3 if workers == 5 else 5)
    train_basics(folder, body + LEFT, workers, *(["--shares", shares] if shares else []))
    assert (folder / "lost").exists() == (lost != "")
    model = net()
    model.load_state_dict(load_file(folder / "weights.safetensors"))
    with torch.no_grad():
        logits = model(x[:95])
    got, file = load_file(folder / "got.safetensors"), load_file(folder / "out.safetensors")
    target = (x[:95].sum(1) > 0).long()
    assert torch.allclose(got["logits"], logits, rtol=0, atol=1e-12)
    assert torch.allclose(got["sums"], logits.sum(1), rtol=0, atol=1e-12)
    assert torch.equal(got["target"], target)
    starts = [*range(0, 95, 3)]
    assert json.loads((folder / "rows.json").read_text()) == [[start, min(start + 3, 95)] for start in starts]
    assert json.loads((folder / "few.json").read_text()) == 1
    assert torch.equal(file["a"], got["logits"])
    assert torch.equal(file["b"], target)
    array = np.load(folder / "out.npy")
    assert array.dtype == np.float32
    assert np.array_equal(array, got["logits"].float().numpy())
    assert not [path for path in folder.iterdir() if path.name.startswith(".out")]
    left = sorted((path.read_text().splitlines() for path in folder.glob("left-*")), key=len, reverse=True)
    assert left[0] == ["range(0, 3)", "96"] * 3 + ["raised", "96"], "a loop that is left keeps nobody waiting"
    assert left[1 : workers - (lost != "")] == [["96"] * 4] * (workers - 1 - (lost != ""))


@pytest.mark.parametrize(
    ("workers", "shares", "during", "lost"),
    [(3, "3,1,2", "file", 0), pytest.param(2, "", "iterator", 1, marks=pytest.mark.slow)],
)
def test_predict_gives_each_row_once_in_order_through_a_kill(
    workers: int, shares: str, during: str, lost: int, tmp_path: Path
) -> None:
    predicts(tmp_path, workers, shares, during, lost)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shares", "during", "lost"),
    pairwise(
        ["", "3,1", "1,1,1", "1,2,2,3,1"],
        ["iterator", "file"],
        ["", 0, 1],
        valid=lambda shares, during, lost: shares or lost == "",
    ),
)
def test_predict_gives_each_row_once_on_any_workers(shares: str, during: str, lost: Any, tmp_path: Path) -> None:
    predicts(tmp_path, shares.count(",") + 1, shares, during, lost)


AGAIN = """
import os, time
from pathlib import Path
t = make(plan="exact micro=3")
before = [len(rows) for rows, _ in t.predict(data)]
t.predict(data, path="before.npy")
journal = Path("out/journal.jsonl")
for report in t.steps(data, count=60):
    if report.step < 50 and os.environ.get("PACELINE_CHAOS") and journal.read_text().count('"formed"') < 2:
        time.sleep(0.05 if report.step < 40 else 1.0)
t.predict(data, path="after.npy")
print("rows", sum(before), sum(len(rows) for rows, _ in t.predict(data)))
"""


def test_predict_before_training_is_not_repeated_after_a_resume(tmp_path: Path) -> None:
    """Its weights are gone. A worker that comes back passes it by, too."""
    train_basics(tmp_path, AGAIN, 2, "--steps", "50", chaos="kill:1@1.backward")
    events = read_journal(tmp_path / "out")
    assert [event["workers"] for event in events if event["event"] == "formed"] == [[0], [0, 1]]
    before = (tmp_path / "before.npy").stat().st_mtime_ns
    done = train_basics(tmp_path, AGAIN, 3)
    assert done.stderr.count("predict() of step 0 is not repeated: the weights are those of step 50\n") == 1
    assert (tmp_path / "before.npy").stat().st_mtime_ns == before
    assert "rows 0 96\n" in done.stdout
    model = built(net)
    plain = Plain(model, cross_entropy, [torch.optim.SGD(model.parameters(), lr=0.1)])
    for name, count in (("before.npy", 0), ("after.npy", 60)):
        plain.train(grid(data, 24, micro=3, count=count))
        np.testing.assert_allclose(np.load(tmp_path / name), model(x).detach().numpy(), rtol=0, atol=1e-12)


@pytest.mark.usefixtures("run")
def test_predict_holds_a_window_of_micro_batches_in_memory() -> None:
    calls: list[int] = []
    mine = trainer(forward=lambda model, batch: calls.append(len(batch[0])) or model(batch[0]), plan="micro=3")
    seen = [(rows, len(calls)) for rows, _ in mine.predict(rows(2, 45, 10))]
    assert seen == [(range(3 * n, 3 * n + 3), min(15, 4 * (n // 4 + 1))) for n in range(15)]
    assert [len(rows) for rows, _ in mine.predict(Stream(noisy=False))][:2] == [3, 3]
    assert mine.model.training


@pytest.mark.usefixtures("run")
def test_predict_refuses_outputs_that_a_file_cannot_hold(tmp_path: Path) -> None:
    """Also where another library has told numpy of bfloat16."""
    import ml_dtypes  # noqa: F401

    here, none = tmp_path / "out.npy", tmp_path / "none" / "out.npy"
    cure = (
        "return a tensor (for .safetensors a mapping of tensors) with one entry per row and the same shape for all rows"
    )
    cannot = f"rows 0-3 cannot be written to {here}: output"
    for forward, path, text in (
        (lambda m, b: m(b[0]).sum(), here, f"{cannot} float64[]; {cure}"),
        (lambda m, b: "text", here, f"{cannot} str; {cure}"),
        (lambda m, b: m(b[0]).bfloat16(), here, f"{cannot} bfloat16[4, 4]; {cure}"),
        (lambda m, b: {"a": m(b[0])}, here, f"{cannot} dict; {cure}"),
        (
            lambda m, b: m(b[0])[:, : 1 + (len(b[0]) == 4)],
            here,
            f"rows 44-44 cannot be written to {here}: output float64[1, 1]; {cure}",
        ),
        (
            lambda m, b: m(b[0]),
            none,
            f"the outputs could not be written to {none}: No such file or directory; "
            "check that the folder exists and that you can write to it, or choose another file",
        ),
    ):
        mine = trainer(forward=lambda m, b, forward=forward: m(b[0]) if m.training else forward(m, b), plan="micro=4")
        with pytest.raises(CheckpointError) as caught:
            mine.predict(rows(2, 45, 10), path=path)
        assert str(caught.value) == text
        assert [*tmp_path.glob("*.npy")] == []


@pytest.mark.usefixtures("run")
def test_predict_refuses_outputs_it_cannot_hand_on(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        list(trainer(forward=lambda m, b: {"a": {1, 2}}).predict(rows(2, 45, 10)))
    assert str(caught.value) == (
        "the output contains a set, which predict() cannot return; "
        "use a forward= that returns tensors, or tuples, lists and mappings of tensors"
    )
    with pytest.raises(UsageError) as caught:
        trainer().predict(rows(2, 45, 10), path=tmp_path / "out.pt")
    assert (
        str(caught.value)
        == f"predict() cannot write {tmp_path}/out.pt; use a file name that ends in .npy or .safetensors"
    )
