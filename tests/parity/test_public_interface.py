"""The public interface on one, two and three workers: what each scenario of scripts/public.py gives, and to whom.

Trainings are compared with the same ones by hand in plain PyTorch; what the loader draws with what one worker draws.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections import Counter
from functools import cache, partial
from pathlib import Path
from subprocess import PIPE
from typing import Any

import numpy as np
import public
import pytest
import torch
import torch.nn.functional as F
from by_hand import Plain, built, grid, in_order
from cases import Cramped, cross_entropy, mlp, rows
from launching import SCRIPTS, paceline, without_an_agent
from once import once
from oracle import apart
from public import BOUNDS, Counting, Discriminator, Generator, Late, Normalised, Rarely, Shaky, Stream, noise
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import default_collate
from warm import Process, environment

from paceline.base.journal import read_journal

TOLERANCE = 1e-12
TEAMS = {
    "1 worker": ["--workers", "1"],
    "2 workers": ["--workers", "2", "--shares", "1,1"],  # said, or they follow what is measured
    "3 unequal workers": ["--workers", "3", "--shares", "3,1,2"],
}
# What each worker has of its own.
OWN = ["rows_once/calls", "augmentation/drawn", "late/sizes", "collectives/place", "collectives/seen", "reports/main"]
OWN += ["cramped_forward/sizes", "cramped_backward/sizes"]


class Worker:
    """What one worker wrote, by scenario."""

    def __init__(self, out: Path, rank: int) -> None:
        self.tensors = load_file(out / f"{rank}.safetensors")
        self.values = json.loads((out / f"{rank}.json").read_text())

    def state(self, scenario: str) -> dict[str, torch.Tensor]:
        found = {key.split("/")[1]: value for key, value in self.tensors.items() if key.startswith(f"{scenario}/")}
        assert found, scenario
        return found

    def __getitem__(self, key: str) -> Any:
        return self.values[key]


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    failed: dict[str, str] = {}

    @cache
    def launch(team: str) -> list[Worker]:
        if team in failed:
            pytest.fail(failed[team], pytrace=False)
        failed[team] = "the script failed, see the first test of this team"
        torch.set_num_threads(1)
        command = ("run", *TEAMS[team], "--run-dir", "run", SCRIPTS / "public.py", "out")
        train = partial(paceline, *command, CUDA_VISIBLE_DEVICES="")
        folder = once(tmp_path_factory, f"public on {team}", lambda folder: train(cwd=folder))
        return [Worker(folder / "out", rank) for rank in range(int(TEAMS[team][1]))]

    return launch


@pytest.fixture(params=[pytest.param(team, marks=pytest.mark.slow) if "2" in team else team for team in TEAMS])
def workers(launched, request) -> list[Worker]:
    return launched(request.param)


@pytest.fixture
def alone(launched) -> Worker:
    return launched("1 worker")[0]


def by_hand(model: nn.Module, optimizer: Any = public.sgd, **more: Any) -> Plain:
    return Plain(model, **{"loss": cross_entropy, **more}, optimizers=[optimizer(model.named_parameters())])


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def same(mine: dict[str, torch.Tensor], model: nn.Module) -> None:
    assert apart(mine, dict(model.state_dict())) <= TOLERANCE


# -- what is the same on every worker ---------------------------------------------------------------------------


def test_every_worker_ends_with_the_same_bits(workers):
    for other in workers[1:]:
        assert other.tensors.keys() == workers[0].tensors.keys()
        for name, tensor in workers[0].tensors.items():
            if name.startswith("changing_parameter"):
                continue  # refused: each has rescaled what it looked up
            assert torch.equal(bits(other.tensors[name]), bits(tensor)), name


def test_reports_and_results_are_the_same_bits_on_every_worker(workers):
    for other in workers[1:]:
        for name, value in workers[0].values.items():
            if name not in OWN:
                assert repr(other[name]) == repr(value), name


def test_trainer_main_is_true_on_one_worker(workers):
    assert [worker["reports/main"] for worker in workers] == [True, *[False] * (len(workers) - 1)]


# -- models -----------------------------------------------------------------------------------------------------


def test_a_given_module_gets_the_weights_and_buffers_of_worker_0_in_place(workers):
    torch.manual_seed(100)
    expected = public.Buffered()
    for worker in workers:
        assert worker["given_module/same object"]
        mine = worker.state("given_module")
        for name, tensor in [
            *expected.state_dict().items(),
            *((f"buffer {n}", b) for n, b in expected.named_buffers()),
        ]:
            if name.startswith("buffer") and tensor.is_floating_point():
                tensor = tensor.float()
            tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            assert torch.equal(bits(mine[name]), bits(tensor)), name


def test_a_model_function_builds_the_same_bits_on_every_worker(workers):
    def make() -> nn.Module:
        model = nn.Linear(10, 4).double()
        with torch.no_grad():
            model.bias += torch.from_numpy(np.random.rand(4)) + random.random()
        return model

    expected = built(make, seed=3).state_dict()
    for worker in workers:
        assert all(torch.equal(worker.state("made_by_function")[name], expected[name]) for name in expected)


# -- training ---------------------------------------------------------------------------------------------------


def test_gan_of_two_trainers_trains_as_one_process(workers):
    g, d = built(lambda: Generator().double()), built(lambda: Discriminator().double())
    d_plain = by_hand(d, public.adam, loss=public.judge, forward=public.real_and_fake(g))
    g_plain = by_hand(g, public.adam, loss=public.fool(d), forward=lambda model, batch: model(batch))
    x, y = rows(7, 24, 10).tensors
    again = [(x[start : start + 2], y[start : start + 2]) for start in range(0, 24, 2)]
    loop = [(batch, noise(number + 1)) for number, batch in enumerate(grid(rows(6, 40, 10), 16, epochs=4))]
    for batch, drawn in [*loop, *((again, noise(100 + number)) for number in range(5))]:
        d_plain.step(batch)
        g_plain.step([drawn])
        d.train()
    expected = {f"d.{name}": value for name, value in d.state_dict().items()}
    expected |= {f"g.{name}": value for name, value in g.state_dict().items()}
    assert apart(workers[0].state("gan"), expected) <= TOLERANCE
    losses = [loss for pair in zip(d_plain.losses, g_plain.losses, strict=True) for loss in pair]
    assert workers[0]["gan/losses"] == pytest.approx(losses, rel=1e-10)
    assert workers[0]["gan/done"] == [17, 17]


def test_step_with_own_rows_trains_as_one_process(workers):
    """Some workers bring nothing; the micro-batches, and with them the dropout masks, are those of the whole."""
    plain = by_hand(built(lambda: nn.Sequential(mlp(), nn.Dropout(0.2))))
    for number in range(12):
        x, y = rows(20 + number, 14, 10).tensors
        plain.step([(x[start : start + 3], y[start : start + 3]) for start in range(0, 14, 3)])
    same(workers[0].state("own_rows"), plain.model)
    assert workers[0]["own_rows/losses"] == pytest.approx(plain.losses, rel=1e-10)
    assert workers[0]["own_rows/samples"] == [14] * 12
    assert any(bounds[rank] == bounds[rank + 1] for bounds in BOUNDS[2] for rank in range(2))


def test_step_with_the_same_rows_from_two_workers_is_refused(workers):
    assert workers[0]["twins/error"] == (
        None
        if len(workers) == 1
        else (
            "workers 0 and 1 passed the same rows to their first step(); seed the data of each worker differently,"
            " for example with paceline.stream_seed(seed, 0, paceline.join().rank)"
        )
    )


def test_every_row_is_loaded_once_an_epoch_in_a_custom_order(workers):
    def order(position: int, size: int, seed: int, epoch: int) -> int:
        return (7 * position + epoch) % size

    numbers = grid(range(45), 16, micro=3, count=8, order=order, collate=list)
    expected = [tuple(call) for step in numbers for call in step]
    calls = [tuple(call) for worker in workers for call in worker["rows_once/calls"]]
    # The loader may be asked for no more than the training needs: with num_workers=0 nothing is read ahead.
    assert Counter(calls) == Counter(expected)
    assert Counter(row for step in numbers[:3] for call in step for row in call) == Counter(range(45))
    for worker in workers:
        rest = iter(expected)
        assert all(tuple(call) in rest for call in worker["rows_once/calls"])  # in the order of the grid
    assert workers[0]["rows_once/samples"] == [16, 16, 13, 16, 16, 13, 16, 16]
    assert workers[0]["rows_once/epochs"] == [0, 0, 0, 1, 1, 1, 2, 2]
    assert workers[0]["rows_once/steps"] == [1, 2, 3, 4, 5, 6, 7, 8]
    plain = by_hand(built(mlp)).train(grid(rows(8, 45, 10), 16, micro=3, count=8, order=order))
    same(workers[0].state("rows_once"), plain.model)


def test_random_augmentation_does_not_depend_on_the_loading_worker(workers, alone):
    drawn = sorted(tuple(row) for worker in workers for row in worker["augmentation/drawn"])
    assert drawn == sorted(map(tuple, alone["augmentation/drawn"]))
    assert [int(row[0]) for row in drawn] == sorted([*range(45), *range(45)])
    for generator in (1, 2, 3):  # every row of every epoch has noise of its own
        assert len({row[generator] for row in drawn}) == 90
    assert apart(workers[0].state("augmentation"), alone.state("augmentation")) <= TOLERANCE


def test_iterable_dataset_is_divided_by_row_number(workers, alone):
    data = rows(11, 45, 10)
    steps = []
    for epoch in range(3):  # set_epoch turns the order
        turned = [data[(row + 7 * epoch) % 45] for row in range(45)]
        steps += grid(turned, 16, order=in_order)
    state = workers[0].state("streams")
    plain = by_hand(built(mlp)).train(steps)
    same({name: state[f"plain {name}"] for name in plain.model.state_dict()}, plain.model)
    assert workers[0]["streams/plain samples"] == [16, 16, 13] * 3
    assert workers[0]["streams/noisy ahead samples"] == [16, 16, 13] * 3
    assert apart(state, alone.state("streams")) <= TOLERANCE
    read = {kind: {name: state[f"{kind} {name}"] for name in plain.model.state_dict()} for kind in public.READINGS}
    assert apart(read["noisy ahead"], read["noisy"]) <= TOLERANCE
    assert apart(read["noisy"], read["plain"]) > 1e-3


def test_batchnorm_of_every_kind_trains_as_one_process(workers):
    """Running statistics too: cumulative, called twice in a forward, at rest, run again by checkpointing."""
    plain = by_hand(built(lambda: Normalised().double())).train(grid(rows(9, 62, 10), 16, count=9))
    mine = workers[0].state("normalised")
    same(mine, plain.model)
    for name, value in plain.model.state_dict().items():
        assert torch.allclose(mine[name].double(), value.double(), rtol=1e-11, atol=1e-13), name
    assert int(mine["again.num_batches_tracked"]) == int(mine["twice.num_batches_tracked"])
    assert int(mine["resting.num_batches_tracked"]) == 0


def test_changing_buffer_is_refused_by_name_on_several_workers(workers):
    for worker in workers:
        if len(workers) > 1:
            assert worker["changing_buffer/error"] == (
                "ChangingBufferError: the forward changes the buffer 'body.linear.calls', which would then "
                "differ between workers; declare with paceline.buffer how to merge it, or train with one worker"
            )
            same(worker.state("changing_buffer"), built(lambda: Counting().double()))  # nothing was applied
            continue
        assert worker["changing_buffer/error"] is None
        plain = by_hand(built(lambda: Counting().double())).train(grid(rows(9, 40, 10), 16, epochs=2))
        same(worker.state("changing_buffer"), plain.model)
        assert float(worker.state("changing_buffer")["body.linear.calls"]) == 2 * 20


def test_parameter_written_by_the_forward_is_refused_by_name_on_several_workers(workers):
    start = built(public.renormed)
    assert float(start[0].weight.detach().norm(dim=1).min()) > 0.5
    plain = by_hand(start).train(grid(public.words(), 16, epochs=2))
    for worker in workers:
        if len(workers) > 1:
            assert worker["changing_parameter/error"] == (
                "ChangingBufferError: the forward changes the parameter '0.weight', which would then differ "
                "between workers; change it in the training loop instead, or train with one worker"
            )
            assert worker["changing_parameter/done"] == 0
            continue
        assert worker["changing_parameter/error"] is None
        same(worker.state("changing_parameter"), plain.model)


def test_rarely_used_and_unused_parameters_train_as_one_process(workers):
    plain = by_hand(built(lambda: Rarely().double()), public.adam).train(grid(rows(10, 60, 10), 16, epochs=3))
    same(workers[0].state("rarely"), plain.model)
    start = built(lambda: Rarely().double()).state_dict()
    assert torch.equal(workers[0].state("rarely")["never.weight"], start["never.weight"])
    assert not torch.equal(workers[0].state("rarely")["rare.weight"], start["rare.weight"])


def test_gradient_penalty_trains_as_one_process(workers):
    plain = by_hand(built(mlp), loss=public.steep, forward=public.slope)
    same(workers[0].state("penalised"), plain.train(grid(rows(10, 45, 10), 16, epochs=2)).model)


def test_parameters_frozen_for_some_steps_train_as_one_process(workers):
    plain = by_hand(built(mlp))
    for done, step in enumerate(grid(rows(12, 50, 10), 16, epochs=4), 1):
        plain.step(step)
        plain.model[0].requires_grad_(not 3 <= done < 8)
    same(workers[0].state("toggled"), plain.model)


def test_micro_batches_are_not_merged_once_the_model_draws_random_numbers(workers):
    """Before, it ran in pieces of four micro-batches, several of them a step: none of them may be used."""
    plain = by_hand(built(lambda: Late().double()))
    for done, step in enumerate(grid(rows(13, 160, 10), 32, micro=2, count=9), 1):
        plain.step(step)
        plain.model.draws = done >= 6
    same(workers[0].state("late"), plain.model)
    pieces = {1: [[8, 8, 8, 8]], 2: [[8, 8], [8, 8]], 3: [[8, 8], [6], [6, 4]]}[len(workers)]
    for worker, merged in zip(workers, pieces, strict=True):
        single = [2] * (sum(merged) // 2)
        # Sizes are compared in alternating steps.
        assert merged in worker["late/sizes"][1:6]
        assert all(sum(sizes) == sum(merged) for sizes in worker["late/sizes"][1:6])
        first, *rest = worker["late/sizes"][6]
        assert first > 2  # the first piece showed it and was not used
        assert rest == single
        assert worker["late/sizes"][7:] == [single] * 2


@pytest.mark.parametrize("moment", Cramped.MOMENTS)
def test_out_of_memory_goes_on_with_smaller_merged_micro_batches(workers, moment):
    """Each for itself, in the same step: nothing of the piece that failed may be used."""
    plain = by_hand(built(lambda: Cramped(None))).train(grid(rows(13, 160, 10), 32, micro=2, count=5))
    same(workers[0].state(f"cramped_{moment}"), plain.model)
    tried = {16: [16], 8: [16], 5: [10], 3: []}  # of so many micro-batches of two rows
    smaller = {16: [8] * 4, 8: [8] * 2, 5: [6, 4], 3: [6]}
    for worker, share in zip(workers, {1: [16], 2: [8, 8], 3: [8, 3, 5]}[len(workers)], strict=True):
        second = tried[share] + [2] * share if tried[share] else smaller[share]
        begin, sizes = [2] * share + second, worker[f"cramped_{moment}/sizes"]
        assert sizes[: len(begin)] == begin
        rest = sizes[len(begin) :]  # in alternating steps, also with fewer at a time
        assert sum(rest) == 3 * 2 * share
        assert max(rest) <= max(smaller[share])


def test_random_numbers_of_the_forward_are_those_of_one_process(workers):
    plain = by_hand(built(lambda: Shaky().double())).train(grid(rows(14, 40, 10), 16, epochs=2))
    same(workers[0].state("shaky"), plain.model)


def test_random_generators_of_the_script_are_left_as_they_were(workers):
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    expected = [torch.rand(()).item()]
    for _ in range(4):
        expected += [torch.rand(()).item(), random.random(), np.random.rand()]
    for worker in workers:
        assert worker["own_stream/drawn"] == expected


# -- evaluation, collectives, the loop --------------------------------------------------------------------------


def metrics_by_hand(model: nn.Module, data: Any) -> dict[str, float]:
    x, y = default_collate(list(data))
    with torch.no_grad():
        output = model.eval()(x)
    return {
        "loss": float(F.cross_entropy(output, y)),
        "first": float(output[y == 0].sum() / (y == 0).sum()),
        "nothing": math.nan,
        "n": len(x),
    }


def test_evaluate_counts_every_row_once_in_eval_mode(workers, alone):
    model = built(lambda: nn.Sequential(mlp(), nn.Dropout(0.5)))
    torch.manual_seed(3)
    other = nn.Sequential(nn.Linear(10, 4), nn.Dropout(0.5)).double()
    for name, used, data in (
        ("all", model, rows(16, 45, 10)),
        ("three rows", model, rows(16, 3, 10)),
        ("iterable", model, Stream(noisy=False)),
        ("other model", other, rows(16, 45, 10)),
    ):
        expected = metrics_by_hand(used, data)
        assert workers[0][f"evaluation/{name}"] == pytest.approx(expected, rel=1e-12, nan_ok=True), name
        assert repr(workers[0][f"evaluation/{name}"]) == repr(alone[f"evaluation/{name}"]), name
    assert repr(workers[0]["evaluation/again"]) == repr(workers[0]["evaluation/all"])
    assert workers[0]["evaluation/modes"] == [True, True]


def test_evaluate_refuses_metric_names_that_differ_between_rows(workers):
    for worker in workers:
        assert (
            worker["evaluation/error"]
            == "MetricError: the metric returned ['even'] for some rows, but ['odd'] for others; return the same"
            " names for all rows, with count 0 where there is nothing to count"
        )


def test_team_collectives(workers):
    size = len(workers)
    for rank, worker in enumerate(workers):
        found = {key.removeprefix("collectives/"): value for key, value in worker.values.items()}
        total = size * (size - 1) / 2
        assert found["place"] == [rank, size]
        assert found["sum"] == [size, total]
        assert found["integers"] == size * 2**40 + total
        assert found["columns"] == [[total, total]] * 3
        assert found["broadcast"] == [[0.5]]
        assert found["gathered"] == [
            [[10 * k + 2.0 * row, 10 * k + 2.0 * row + 1] for row in range(k + 1)] for k in range(size)
        ]
        assert found["empty"] == [[0, 3]] * size
        assert found["scalars"] == list(range(size))
        assert found["turned"] == [[[k, k + 3], [k + 1, k + 4], [k + 2, k + 5]] for k in range(size)]
        assert found["any"] == [size > 1, False, True]
        assert found["untouched"]
        for dtype in ("bool", "int16", "bfloat16", "uint16", "complex64"):
            assert found[f"gather torch.{dtype}"] == [[[k, 1], f"torch.{dtype}"] for k in range(size)]
            assert found[f"broadcast torch.{dtype}"] == f"torch.{dtype}"
        assert found["seen"] == [rank > 0] * 2  # main_first: worker 0 did its part before any other began


def test_steps_loops_one_after_another_and_stop(workers, alone):
    seen = workers[0]["reports/seen"]
    assert [line[:2] for line in seen] == [[1, 0], [2, 0], [3, 0], [4, 1], [5, 2], [6, 3], [7, 3], [8, 3]]
    for line, other in zip(seen, alone["reports/seen"], strict=True):
        assert line == pytest.approx(other, rel=1e-10)
    assert [line[4] for line in seen[:4]] == [16, 16, 8, 16]
    assert workers[0]["reports/after"] == []
    assert workers[0]["reports/done"] == 8
    assert workers[0]["reports/complete"]
    assert workers[0]["reports/nan"] == "nan"
    assert apart(workers[0].state("reports"), alone.state("reports")) <= TOLERANCE


# -- other launchers --------------------------------------------------------------------------------------------

UNDER_TORCHRUN = """
from pathlib import Path
import paceline
from cases import cross_entropy, mlp, rows
from public import adam, sgd
team = paceline.join()
one = paceline.Trainer(mlp, cross_entropy, sgd, global_batch=16)
two = paceline.Trainer(mlp, cross_entropy, adam, global_batch=8)
for first, second in zip(one.steps(rows(1, 40, 10), count=6), two.steps(rows(2, 40, 10), count=6)):
    if second.step == 6:
        break
one.export("one.safetensors")
two.export("two.safetensors")
Path(f"worker {team.rank} of {team.size}").touch()
"""


def start_with_torchrun(script: Path, **env: str) -> None:
    command = [*("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"), script]
    with Process([sys.executable, *command], environment(**env), cwd=script.parent, stderr=PIPE) as process:
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors


def start_with_variables(script: Path, **env: str) -> None:
    ended = without_an_agent(script, script, cwd=script.parent, **env)
    assert [code for code, _ in ended] == [0, 0], ended


@pytest.mark.parametrize("start", [start_with_variables, pytest.param(start_with_torchrun, marks=pytest.mark.slow)])
def test_torchrun_starts_a_script_and_a_loop_left_at_its_last_step_is_finished(start, tmp_path):
    (tmp_path / "train.py").write_text(UNDER_TORCHRUN)
    start(tmp_path / "train.py", PACELINE_RUN_DIR=str(tmp_path / "run"), CUDA_VISIBLE_DEVICES="")
    assert sorted(path.name for path in tmp_path.glob("worker *")) == ["worker 0 of 2", "worker 1 of 2"]
    for name, optimizer, data, size in (("one", public.sgd, 1, 16), ("two", public.adam, 2, 8)):
        plain = by_hand(built(mlp), optimizer).train(grid(rows(data, 40, 10), size, count=6))
        same(load_file(tmp_path / f"{name}.safetensors"), plain.model)
    events = read_journal(tmp_path / "run")
    assert [event["workers"] for event in events if event["event"] == "start"] == [2]
    assert [event["step"] for event in events if event["event"] == "finished"] == [12]
