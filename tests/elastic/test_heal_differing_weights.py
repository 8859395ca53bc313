"""Workers whose weights or optimizer states differ take those of a majority, and the run goes on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from launching import train_basics
from safetensors.torch import load_file

from paceline.base.journal import read_journal
from paceline.observe.summary import Summary, facts

BODY = """
import os
from safetensors.torch import save_file
rank = int(os.environ["PACELINE_RANK"])

def adamw(params):
    return torch.optim.AdamW(params, lr=0.01)

def here(tensor):
    return getattr(tensor, "_local_tensor", tensor).detach()

def flip(tensor):
    here(tensor).view(torch.int64).view(-1)[3] ^= 1 << 40

t = paceline.Trainer(net, cross_entropy, adamw, global_batch=24, plan="PLAN")
for report in t.steps(data, count=12):
    if report.step == STEP and rank in WHO:
        optimizer = t._job.optimizers[0]
        flip(t.model[0].weight if WHAT == "weight" else next(iter(optimizer.state.values()))["exp_avg"])
        print("flipped", rank)
save_file({name: here(value).clone() for name, value in t.model.state_dict().items()}, f"{rank}.safetensors")
"""


def trained(
    folder: Path,
    workers: int,
    what: str,
    step: int,
    who: tuple[int, ...],
    *options: str,
    code: int = 0,
    plan: str = "exact micro=3",
) -> tuple[str, list[dict[str, torch.Tensor]]]:
    """What it said, and each worker's weights."""
    folder.mkdir(exist_ok=True)
    body = BODY.replace("PLAN", plan).replace("WHAT", repr(what)).replace("WHO", repr(who)).replace("STEP", str(step))
    said = train_basics(folder, body, workers, *options, code=code).stderr
    logs = [(folder / "out" / "logs" / f"worker-{rank}.log").read_text() for rank in range(workers)]
    assert [f"flipped {rank}\n" in log for rank, log in enumerate(logs)] == [rank in who for rank in range(workers)]
    return said, [] if code else [load_file(folder / f"{rank}.safetensors") for rank in range(workers)]


def healed(said: str) -> list[str]:
    return re.findall(r"^healed: (.*)$", said, re.M)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


# The first steps are compared before 1, 2, 4 and 8: what is flipped after step 7 has been used by nobody.
@pytest.mark.parametrize(
    ("workers", "what", "named"),
    [
        (3, "weight", "0.weight"),
        (3, "state", "exp_avg of 0.weight"),
        pytest.param(4, "weight", "0.weight", marks=pytest.mark.slow),
        pytest.param(5, "state", "exp_avg of 0.weight", marks=pytest.mark.slow),
    ],
)
def test_one_bit_on_one_worker_is_healed_before_it_is_used(workers: int, what: str, named: str, tmp_path: Path) -> None:
    said, found = trained(tmp_path / "flipped", workers, what, 7, (1,), "--heal")
    (line,) = healed(said)
    assert re.fullmatch(
        rf"worker 1 had another {named}, seen after step 7 and not yet after step \d, and took what the majority has",
        line,
    ), line
    _, undisturbed = trained(tmp_path / "undisturbed", 1, what, 0, ())
    assert all(same(one, undisturbed[0]) for one in found)
    (told,) = [event for event in read_journal(tmp_path / "flipped" / "out") if event["event"] == "healed"]
    assert (told["workers"], told["tensors"], told["step"]) == ([1], [named], 7)
    shown = dict(facts(Summary(tmp_path / "flipped" / "out"))["What happened"])
    assert shown["healed"] == f"worker 1, after step 7: {named}"


@pytest.mark.parametrize(
    ("plan", "workers", "who"),
    [
        ("micro=3", 5, (1, 3)),
        pytest.param("shard=2 zero=1 micro=3", 6, (3,), marks=pytest.mark.slow),
        pytest.param("shard=2 zero=2 micro=3", 6, (3,), marks=pytest.mark.slow),
    ],
)
def test_all_are_equal_again(plan: str, workers: int, who: tuple[int, ...], tmp_path: Path) -> None:
    what = "state" if "zero=1" in plan else "weight"
    said, found = trained(tmp_path, workers, what, 5, who, "--heal", plan=plan)
    assert healed(said)
    places = 2 if "zero=2" in plan else 1  # of pieces
    assert all(same(one, found[rank % places]) for rank, one in enumerate(found))


@pytest.mark.parametrize(
    ("workers", "who", "options", "why"),
    [
        (2, (1,), ("--heal",), "; --heal needs three replicas that have it, and there are 2"),
        (4, (1, 3), ("--heal",), "; --heal needs a strict majority, which 2 of 4 are not"),
        (3, (1,), (), ""),
    ],
)
def test_what_cannot_be_healed_is_refused(
    workers: int, who: tuple[int, ...], options: tuple[str, ...], why: str, tmp_path: Path
) -> None:
    said, _ = trained(tmp_path, workers, "state", 7, who, "--max-restarts", "0", *options, code=1)
    odd = " than on ".join(["worker 1", "worker 0"] if workers == 2 else ["workers 1, 3", "workers 0, 2"])
    odd = "worker 1 than on workers 0, 2" if workers == 3 else odd
    assert re.search(
        rf"WorkersDifferError: exp_avg of 0.weight is another one on {odd}, seen after step 7 and not yet after step "
        rf"\d{why}; let every worker do what changes weights or buffers, with the same numbers: ",
        said,
    ), said
    assert not healed(said)


def test_islands_are_not_healed(tmp_path: Path) -> None:
    said, _ = trained(tmp_path, 2, "weight", 0, (), "--heal", plan="local=2 every=3")
    assert "--heal does nothing under local=: workers do not have the same there" in said
