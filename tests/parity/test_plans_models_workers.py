"""The table of parity: plans x models x workers, each compared with plain PyTorch in one process.

A new plan joins by one line of `PLANS`, its words; a new model by one of `MODELS` in tests/scripts/parity_models.py.
`REFUSED` has the cells that do not exist. What is trained is a pairwise covering array of the table: each plan with
each model, each plan with each number of replicas, and each model with each number of replicas, at least once. The slow
tests have more plans and models, and train longer: each plan with each model, and with one number of replicas.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from agents import journal
from covering import pairwise
from launching import SCRIPTS, TRANSFORMERS, paceline
from mixtures import result_once
from once import once
from oracle import Result, apart, train
from oracle_over_batch import train_over_batch
from parity_models import MODELS, shortened
from safetensors.torch import load_file

TOLERANCE = 1e-12
# Plans of the fast tests, and those of the slow tests alone.
PLANS = [
    "",
    "exact",
    "shard=2 zero=1 offload=cpu",
    "exact tensor=2",
    "shard=2 zero=1 tensor=2",
    "pipeline=2 virtual=2",
    "pipeline=2 schedule=zbv",
    "pipeline=2 tensor=2",
    "context=2",
    "pipeline=2 context=2",
]
MORE_PLANS = [
    "exact shard=2 zero=3 recompute=blocks",
    "exact shard=3 zero=2",
    "shard=1 zero=3",
    "shard=2 zero=2",
    "shard=3 zero=3",
    "shard=4 zero=1",
    "exact shard=2 zero=1",
    "exact recompute=blocks",
    "exact recompute=blocks shard=2 zero=1",
    "exact shard=2 zero=3 offload=cpu",
    "tensor=4",
    "exact micro=1 tensor=2",
    "exact shard=2 zero=1 tensor=2",
    "tensor=2 recompute=blocks",
    "pipeline=2 schedule=gpipe",
    "pipeline=2 schedule=zb recompute=blocks",
    "pipeline=3",
    "pipeline=4",
    "shard=2 zero=1 pipeline=2",
    "context=4",
    "shard=2 zero=1 context=2",
    "pipeline=2 context=2 tensor=2",
]
# Numbers of replicas, and shares of workers where there are several replicas: some of the workers are idle.
REPLICAS = (1, 2, 3, 5)
SHARES = {2: "3,1", 3: "1,0,2", 4: "1,0,2,1", 5: "2,1,0,3,1", 6: "1,1,0,0,2,1", 8: "1,1,0,0,2,2,1,1"}
# The models that a word of a plan refuses, or does not divide.
WITH_BATCHNORM = {"batchnorm", "batchnorm over the batch"}
NO_LIST_OF_BLOCKS = {"partly", "tokens", "encoder, decoder", "towers over the batch"}
CALLED_TWICE = {f"{name} over the batch" for name in ("simclr", "batchnorm", "vicreg")}
SEQUENCES = {"skips", "tuples", "attention, experts", "few heads", "blocks over the batch", "llama", "llama, tied"}
TWO_BLOCKS = {"mlp", "dropout", "triplet over the batch", "attention, experts", "few heads", "llama", "llama, tied"}
REFUSED = {
    "tensor": WITH_BATCHNORM | {"branches"},
    "tensor=4": {"llama"},
    "pipeline": WITH_BATCHNORM | NO_LIST_OF_BLOCKS | CALLED_TWICE | {"branches"},
    "pipeline=[34]|virtual|zbv": TWO_BLOCKS,
    "pipeline=4|virtual|zbv": {"wide", "wide, unclipped"},
    "context": MODELS.keys() - SEQUENCES,
    "recompute": {"partly", "tokens", "encoder, decoder"},
    "zero=[23]": {"blocks over the batch"},
}
# What is said once for each model of a plan.
DECISIONS = {
    "tensor": r"layers? (is|are) split over",
    "pipeline": r"is split into \d+ stages",
    "context": "sequences are divided among .* holds the full weights",
    "shard=[2-9] zero=3": "parameters are gathered (in|at once)",
}
FOUR_BLOCKS = "virtual|zbv"  # the fast tests train models of two blocks under other plans
IN_TRANSFORMERS = {"llama", "llama, tied"}  # which takes seconds to be imported
# Only the slow tests train models that resemble another one, train a model under plans that it was not made for, train
# more than one model under a mixture of plans, and use many workers.
LIKE_OTHERS = {"mlp", "wide", "wide, unclipped", "few heads", "encoder, decoder"}
LIKE_OTHERS |= {f"{name} over the batch" for name in ("simclr", "batchnorm", "vicreg", "triplet")}
FAST_MODELS = sorted(MODELS.keys() - IN_TRANSFORMERS - LIKE_OTHERS)
MADE_FOR = {
    "tuples": "pipeline",
    "attention, experts": "tensor",
    "branches": "^$|zero=[23]",
    "towers over the batch": "^$|exact$|zero",
    "batchnorm": "^$|exact$|zero=[13]",
    "tokens": "^$|exact$|zero=1|tensor",
    "partly": "^$|exact$|zero=[12]",
    "blocks over the batch": "^(?!context|pipeline=3|.*zbv|.*tensor)",
    "shared": "^(?!.*zbv|.*tensor)",
}
RICH = "skips"
MOST_WORKERS = 4
Run = tuple[str, int]  # a plan, and how many replicas


def workers_of_replica(plan: str) -> int:
    count = 1
    for number in re.findall(r"(?:shard|tensor|pipeline|context)=(\d)", plan):
        count *= int(number)
    return count


def exists(plan: str, model: str, replicas: int) -> bool:
    workers = workers_of_replica(plan) * replicas
    refused = any(re.search(word, plan) and model in models for word, models in REFUSED.items())
    return not refused and (workers == 1 or workers in SHARES)


def is_fast(plan: str, model: str, replicas: int) -> bool:
    axes = re.findall("tensor|pipeline|context|shard", plan)
    few = workers_of_replica(plan) * replicas <= (2 if "context" in axes and len(axes) < 2 else MOST_WORKERS)
    for_it = re.search(MADE_FOR.get(model, ""), plan) is not None
    return few and for_it and (len(axes) < 2 or model == RICH) and exists(plan, model, replicas)


def by_run(cells: Iterable[tuple[str, str, int]]) -> dict[Run, tuple[str, ...]]:
    """The models of each run of the cells, in one order: a start of workers costs more than a training."""
    models: dict[Run, set[str]] = defaultdict(set)
    for plan, model, replicas in cells:
        models[plan, replicas].add(model)
    return {run: tuple(name for name in MODELS if name in names) for run, names in models.items()}


# One worker trains all that `exact` trains anywhere: with it bits are compared.
BITS = [("exact", model, 1) for model in FAST_MODELS if is_fast("exact", model, 1) or model in MADE_FOR]
FAST = by_run([*pairwise(PLANS, FAST_MODELS, REPLICAS, valid=is_fast), *BITS])


def with_replicas(number: int, plan: str) -> int:
    """How many replicas train a plan in the slow tests: plans in turn have another number, where it exists."""
    turns = (*REPLICAS[(number + 1) % len(REPLICAS) :], *REPLICAS)
    return next(replicas for replicas in turns if any(exists(plan, model, replicas) for model in MODELS))


# With one replica these train all models: bits are compared with those.
ONE = [plan for plan in (*PLANS, *MORE_PLANS) if plan == "exact" or re.search("exact.*tensor", plan)]
RUNS = [(plan, with_replicas(number, plan)) for number, plan in enumerate([*PLANS, *MORE_PLANS])]
RUNS += [(plan, 1) for plan in ONE]
ALL = by_run((plan, model, replicas) for plan, replicas in RUNS for model in MODELS if exists(plan, model, replicas))


def named(run: Run) -> str:
    plan, replicas = run
    return f"{plan or 'data'}, {replicas} replica{'s' * (replicas > 1)}"


def trained(run: Run, models: tuple[str, ...], factory: pytest.TempPathFactory, *short: str) -> Path:
    """The folder of what came of the models in a run, which is made once."""
    plan, replicas = run
    workers = workers_of_replica(plan) * replicas
    options = ["--workers", str(workers), *(["--shares", SHARES[workers]] if replicas > 1 else [])]
    options += ["--max-restarts", "0"] if plan else []
    command = ("run", *options, "--run-dir", "run", SCRIPTS / "contract.py", "out", *models, *plan.split())
    env = TRANSFORMERS if IN_TRANSFORMERS & {*models} else fewer_blocks(plan, *short)
    name = f"parity of {named(run)} {short}"
    return once(factory, name, lambda folder: paceline(*command, *short, cwd=folder, timeout=800, **env))


def fewer_blocks(plan: str, *short: str) -> dict[str, str]:
    """Sets BLOCKS for the short trainings of the fast tests."""
    return {"BLOCKS": "2"} if short and not re.search(FOUR_BLOCKS, plan) else {}


def oracle(model: str, plan: str, factory: pytest.TempPathFactory, *short: str) -> Result:
    """What plain PyTorch gives, with the micro-batches of the plan if it says how large they are."""
    case = shortened(MODELS[model]) if short else MODELS[model]
    if micro := re.search(r"micro=(\d+)", plan):
        case = replace(case, micro=int(micro[1]))
    make = partial(train_over_batch if case.loss_over else train, case)
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in fewer_blocks(plan, *short).items():
            patch.setenv(variable, value)
        return result_once(factory, f"oracle of {model} {short} {case.micro}", make)


def is_statistic(name: str) -> bool:
    return "running" in name or "tracked" in name


def differences(model: str, tensors: dict[str, torch.Tensor], figures: dict[str, Any], expected: Result) -> list[str]:
    """In what a run's model is not that of one process."""
    weights, theirs = (
        {name: value for name, value in state.items() if not is_statistic(name)}
        for state in (tensors, expected.weights)
    )
    found = []
    if (distance := apart(weights, theirs)) > TOLERANCE:
        found.append(f"weights are {distance} apart")
    for name, value in expected.weights.items():
        if is_statistic(name) and not torch.allclose(tensors[name], value, rtol=1e-12, atol=1e-14):
            found.append(f"statistics {name}")
    wanted = {
        "samples": expected.figures["samples"],
        "loss": pytest.approx(expected.figures["loss"], rel=1e-10),
        "norm": pytest.approx(expected.figures["norm"], rel=1e-9),
        "metrics": [pytest.approx(metrics, rel=1e-12) for metrics in expected.figures["metrics"]],
        "evaluation": pytest.approx(expected.evaluation, rel=1e-10),
    }
    found += [f"{key}: {figures[key]} instead of {value}" for key, value in wanted.items() if figures[key] != value]
    return found


def check_parity(run: Run, models: tuple[str, ...], factory: pytest.TempPathFactory, *short: str) -> None:
    folder = trained(run, models, factory, *short)
    tensors, figures = load_file(folder / "out.safetensors"), json.loads((folder / "out.json").read_text())
    wrong = {}
    for model in models:
        mine = {
            name.removeprefix(f"{model}/"): value for name, value in tensors.items() if name.startswith(f"{model}/")
        }
        wrong[model] = differences(model, mine, figures[model], oracle(model, run[0], factory, *short))
    assert {model: found for model, found in wrong.items() if found} == {}
    plan, _ = run
    events = [str(event["what"]) for event in journal(folder / "run", "decision")]
    for word, text in DECISIONS.items():
        if re.search(word, plan):
            assert sum(bool(re.search(text, event)) for event in events) == len(models), text


@pytest.mark.parametrize("run", FAST, ids=named)
def test_plan_gives_weights_losses_and_evaluations_of_one_process(
    run: Run, tmp_path_factory: pytest.TempPathFactory
) -> None:
    check_parity(run, FAST[run], tmp_path_factory, "short")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("run", ALL, ids=named)
def test_all_models_give_weights_losses_and_evaluations_of_one_process(
    run: Run, tmp_path_factory: pytest.TempPathFactory
) -> None:
    check_parity(run, ALL[run], tmp_path_factory)


def check_bits(run: Run, runs: dict[Run, tuple[str, ...]], factory: pytest.TempPathFactory, *short: str) -> None:
    """With those of one worker, and of layers that are cut, whose own sums have another order, of one replica."""
    plan, replicas = run
    other = (plan, 2 if replicas == 1 else 1) if "tensor" in plan else ("exact", 1)
    one, two = (trained(key, runs[key], factory, *short) for key in (run, other))
    models = {*runs[run]} & {*runs[other]}
    assert models
    figures = [json.loads((folder / "out.json").read_text()) for folder in (one, two)]
    tensors = [load_file(folder / "out.safetensors") for folder in (one, two)]
    for model in models:
        assert figures[0][model] == figures[1][model], model
        names = [name for name in tensors[0] if name.startswith(f"{model}/")]
        assert names
        assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in names), model


def has_bits(run: Run) -> bool:
    plan, replicas = run
    return "exact" in plan and ("tensor" not in plan or replicas > 1)


@pytest.mark.parametrize("run", [run for run in FAST if has_bits(run)], ids=named)
def test_exact_bits_do_not_depend_on_workers_and_shards(run: Run, tmp_path_factory: pytest.TempPathFactory) -> None:
    check_bits(run, FAST, tmp_path_factory, "short")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("run", [run for run in ALL if has_bits(run)], ids=named)
def test_exact_bits_of_all_models(run: Run, tmp_path_factory: pytest.TempPathFactory) -> None:
    check_bits(run, ALL, tmp_path_factory)


def test_evaluation_has_the_same_bits_on_any_number_of_workers(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Also without `exact`, of weights that have: before the first step."""
    one, three = (
        json.loads((trained(run, FAST[run], tmp_path_factory, "short") / "out.json").read_text())
        for run in (("", 1), ("", 3))
    )
    models = {name for name in one.keys() & three.keys() if one[name]["before"]}
    assert models
    assert {name: one[name]["before"] for name in models} == {name: three[name]["before"] for name in models}


def test_fast_runs_have_every_pair_of_plan_model_and_replicas() -> None:
    """So that no filter leaves a plan or a model out."""
    assert {plan for plan, _ in FAST} == {*PLANS}
    counted = Counter(model for models in FAST.values() for model in models)
    assert sorted(counted) == FAST_MODELS
