"""Losses of logits that stay divided along the vocabulary, under `tensor=`: as of one process in plain PyTorch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from agents import journal
from launching import SCRIPTS, paceline
from oracle import Plain, apart, built, grid
from safetensors.torch import load_file
from vocabulary import BATCH, CALLING, DIVIDED, LOSSES, MODELS, RATE, STEPS, Model, rows

VERIFIED = "tensor= was verified on one micro-batch"
FAST = ["plain", "ignoring", "with_z_loss", "of_other_functions", "written"]
PLANS = {
    "tensor=4": 4,
    "data=2 tensor=2": 4,
    "tensor=2 context=2": 4,
    "pipeline=2 tensor=2": 4,
    "shard=2 zero=3 tensor=2": 4,
    "tensor=2 recompute=blocks": 2,
    "exact tensor=2": 2,
}


def expected(name: str, words: int, tied: bool) -> tuple[dict[str, torch.Tensor], list[list[Any]]]:
    """The weights after all steps, and of each step the loss, the norm and the metrics."""
    model = built(partial(Model, words, tied))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    plain = Plain(model, (LOSSES | CALLING)[name], [optimizer], clip_norm=torch.inf)
    MODELS[:] = [model]
    plain.train(grid(rows(words), BATCH, count=STEPS))
    figures = zip(plain.losses, plain.norms, plain.sums, strict=True)
    metrics = [[loss, norm, *(a / b for a, b in sums.metrics.values())] for loss, norm, sums in figures]
    return dict(model.state_dict()), metrics


def check(
    folder: Path,
    workers: int,
    plan: str,
    words: int,
    *names: str,
    tied: bool = False,
    note: str = VERIFIED,
    script: str = "vocabulary.py",
    kind: Sequence[str] = (),
) -> list[str]:
    """Trains with each loss and compares; returns the notes about the comparisons with full layers."""
    options = ("--workers", str(workers), "--run-dir", folder / "run", "--plan", plan)
    words_of_script = (*kind, str(words), folder, *(["tied"] if tied else []), *names)
    paceline("run", *options, SCRIPTS / script, *words_of_script, cwd=folder)
    found = json.loads((folder / "figures.json").read_text())
    assert [*found] == [*(names or LOSSES)]
    for name in found:
        weights, figures = expected(name, words, tied)
        assert apart(load_file(folder / f"{name}.safetensors"), weights) < 1e-12, name
        for mine, theirs in zip(found[name][:-1], figures, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-12), name
        model = Model(words, tied)
        model.load_state_dict(weights)
        with torch.no_grad():
            largest = torch.stack([model(ids[None]).amax() for (ids,) in rows(words)])
        assert found[name][-1][1] % words == 0  # an evaluation sees full outputs
        assert largest.min() - 1e-9 <= found[name][-1][0] <= largest.max() + 1e-9
    notes = journal(folder / "run", "note")
    return [event["text"] for event in notes if event["text"].startswith(note)]


@pytest.mark.parametrize(
    ("words", "names"), [(23, FAST), *(pytest.param(words, [*LOSSES], marks=pytest.mark.slow) for words in (23, 24))]
)
def test_losses_of_divided_logits_are_those_of_one_process(words: int, names: list[str], tmp_path: Path) -> None:
    """With a vocabulary that the number of workers divides, and one that it does not."""
    told = dict(zip(names, check(tmp_path, 2, "tensor=2", words, *names), strict=True))
    gathered = {name: text.partition("; outputs")[2] for name, text in told.items()}
    assert {name for name, text in gathered.items() if not text} == {*names} & {one.__name__ for one in DIVIDED}
    assert gathered["of_other_functions"] == " are gathered in the loss for cummax, special_entr"
    assert gathered["written"] == " are gathered for the loss, because it differs if they are divided"


@pytest.mark.slow
@pytest.mark.parametrize("words", [24, 23])
@pytest.mark.parametrize("plan", PLANS)
def test_losses_of_divided_logits_under_mixtures(plan: str, words: int, tmp_path: Path) -> None:
    check(tmp_path, PLANS[plan], plan, words)


@pytest.mark.slow
def test_losses_of_a_head_that_is_tied_to_the_embedding(tmp_path: Path) -> None:
    check(tmp_path, 4, "tensor=4", 26, tied=True)


def test_loss_that_calls_the_model_gets_its_full_outputs(tmp_path: Path) -> None:
    check(tmp_path, 2, "tensor=2", 24, *CALLING)


def test_class_out_of_range_is_named_as_by_torch(tmp_path: Path) -> None:
    script = (SCRIPTS / "vocabulary.py").read_text()
    wrong = "    y = y.masked_fill(y == 5, 99)\n    hits, among"
    (tmp_path / "train.py").write_text(script.replace("    hits, among", wrong))
    options = ("--workers", "2", "--run-dir", "run", "--plan", "tensor=2", "--max-restarts", "0")
    done = paceline("run", *options, "train.py", "24", tmp_path, "plain", cwd=tmp_path, code=1)
    assert "IndexError: Target 99 is out of bounds." in done.stderr


@pytest.mark.slow
def test_losses_of_logits_without_the_last_token_stay_divided_along_the_sequence(tmp_path: Path) -> None:
    names = [one.__name__ for one in DIVIDED if one.__name__ != "of_probabilities"]
    told = check(tmp_path, 2, "context=2", 24, *names, note="sequences are divided among 2 workers")
    assert len(told) == len(names)
    assert not [text for text in told if "on the full sequence" in text]


@pytest.mark.slow
def test_logits_of_a_large_vocabulary_are_divided_by_the_number_of_workers(tmp_path: Path) -> None:
    """And under `tensor=` less is sent than if they were gathered."""
    peaks, sent = {}, {}
    for plan, words in (("", ()), ("tensor=4", ()), ("tensor=4", ("gathered",)), ("context=2", ())):
        name = f"{plan} {' '.join(words)}".strip() or "alone"
        options = ("--workers", plan[-1:] or "1", "--run-dir", name, *(("--plan", plan) if plan else ()))
        done = paceline("run", *options, SCRIPTS / "logits_memory.py", *words, cwd=tmp_path)
        peaks[name] = float(done.stdout.split("peak ")[1].split()[0])
        (figures,) = journal(tmp_path / name, "figures")
        sent[name] = figures["measured"][0]["sent"].get("tensor", 0)
        assert words or "gathered" not in done.stderr
    assert peaks["tensor=4"] <= 1.05 * peaks["alone"] / 4
    assert peaks["context=2"] <= 1.05 * peaks["alone"] / 2
    assert peaks["tensor=4 gathered"] > peaks["alone"] / 2
    assert 0 < sent["tensor=4"] < sent["tensor=4 gathered"] / 10
