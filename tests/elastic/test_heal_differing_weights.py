"""Workers whose weights or optimizer states differ take those of a majority, and the run goes on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from launching import train_basics
from once import once
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
for report in t.steps(data, count=17):
    for what in (what for what, step in WHAT.items() if step == report.step and rank in WHO):
        optimizer = t._job.optimizers[0]
        flip(t.model[0].weight if what == "weight" else next(iter(optimizer.state.values()))["exp_avg"])
        print("flipped", rank)
save_file({name: here(value).clone() for name, value in t.model.state_dict().items()}, f"{rank}.safetensors")
"""


def trained(
    folder: Path,
    workers: int,
    what: dict[str, int],
    who: tuple[int, ...],
    *options: str,
    code: int = 0,
    plan: str = "exact micro=3",
) -> tuple[str, list[dict[str, torch.Tensor]]]:
    """The console, and each worker's weights. `what` is flipped after which step."""
    folder.mkdir(exist_ok=True)
    body = BODY.replace("PLAN", plan).replace("WHAT", repr(what)).replace("WHO", repr(who))
    said = train_basics(folder, body, workers, *options, code=code).stderr
    logs = [(folder / "out" / "logs" / f"worker-{rank}.log").read_text() for rank in range(workers)]
    assert [f"flipped {rank}\n" in log for rank, log in enumerate(logs)] == [rank in who for rank in range(workers)]
    return said, [] if code else [load_file(folder / f"{rank}.safetensors") for rank in range(workers)]


def healed(said: str) -> list[str]:
    return re.findall(r"^healed: (.*)$", said, re.M)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


# The first steps are compared before 1, 2, 4, 8 and 16: what is flipped after steps 7 and 15 has been used by nobody.
@pytest.mark.parametrize("workers", [3, pytest.param(5, marks=pytest.mark.slow)])
def test_one_flipped_bit_of_weights_or_optimizer_state_is_healed_before_it_is_used(
    workers: int, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    flips = {"weight": 7, "state": 15}
    names = {7: "0.weight", 15: "exp_avg of 0.weight"}
    said, found = trained(tmp_path, workers, flips, (1,), "--heal")
    for line, (step, name) in zip(healed(said), names.items(), strict=True):
        seen = f"worker 1 had different values of {name}, seen after step {step}, but not after step "
        assert re.fullmatch(re.escape(seen) + r"\d+, and received those of the majority", line), line
    one = once(tmp_path_factory, "undisturbed by flips", lambda folder: trained(folder, 1, {}, ()))
    assert all(same(weights, load_file(one / "0.safetensors")) for weights in found)
    events = [event for event in read_journal(tmp_path / "out") if event["event"] == "healed"]
    assert [(e["workers"], e["tensors"], e["step"]) for e in events] == [
        ([1], [name], at) for at, name in names.items()
    ]
    shown = [text for name, text in facts(Summary(tmp_path / "out"))["What happened"] if name == "healed"]
    assert shown == [f"worker 1, after step {step}: {name}" for step, name in names.items()]


@pytest.mark.parametrize(
    ("plan", "workers", "who"),
    [
        ("micro=3", 5, (1, 3)),
        pytest.param("shard=2 zero=1 micro=3", 6, (3,), marks=pytest.mark.slow),
        pytest.param("shard=2 zero=2 micro=3", 6, (3,), marks=pytest.mark.slow),
    ],
)
def test_healed_workers_have_equal_weights(plan: str, workers: int, who: tuple[int, ...], tmp_path: Path) -> None:
    what = "state" if "zero=1" in plan else "weight"
    said, found = trained(tmp_path, workers, {what: 5}, who, "--heal", plan=plan)
    assert healed(said)
    places = 2 if "zero=2" in plan else 1  # of pieces
    assert all(same(one, found[rank % places]) for rank, one in enumerate(found))


@pytest.mark.parametrize(
    ("workers", "who", "options", "why"),
    [
        (2, (1,), ("--heal",), "; --heal needs at least three replicas, got 2"),
        (4, (1, 3), ("--heal",), "; --heal needs a strict majority, which 2 of 4 are not"),
        (3, (1,), (), ""),
    ],
)
def test_heal_without_a_majority_is_refused(
    workers: int, who: tuple[int, ...], options: tuple[str, ...], why: str, tmp_path: Path
) -> None:
    said, _ = trained(tmp_path, workers, {"state": 7}, who, "--max-restarts", "0", *options, code=1)
    odd = " differs from that on ".join(["worker 1", "worker 0"] if workers == 2 else ["workers 1, 3", "workers 0, 2"])
    odd = "worker 1 differs from that on workers 0, 2" if workers == 3 else odd
    assert re.search(
        rf"WorkersDifferError: exp_avg of 0.weight on {odd}, seen after step 7, but not after step "
        rf"\d{why}; code that changes weights or buffers must run on every worker with the same numbers: ",
        said,
    ), said
    assert not healed(said)


def test_heal_does_nothing_under_local_sgd(tmp_path: Path) -> None:
    said, _ = trained(tmp_path, 2, {}, (), "--heal", plan="local=2 every=3")
    assert "--heal does nothing under local=, where workers do not hold equal weights" in said
