"""Several trainers in one script: what they have to do with one another, on one, two and three workers."""

from __future__ import annotations

import json
from functools import partial

import dcgan
import pytest
import torch
from by_hand import Plain, built, grid
from cases import rows
from launching import SCRIPTS, paceline
from once import once
from oracle import apart
from public import judge, noise, real_and_fake, sgd
from safetensors.torch import load_file

from paceline.base.journal import read_journal

TEAMS = {
    "1 worker": ["--workers", "1"],
    "2 unequal workers": ["--workers", "2", "--shares", "3,1"],
    "3 unequal workers": ["--workers", "3", "--shares", "4,1,3"],
}


@pytest.fixture(
    scope="module",
    params=["2 unequal workers", *(pytest.param(team, marks=pytest.mark.slow) for team in (*TEAMS,)[::2])],
)
def gan(request, tmp_path_factory):
    """(weights, figures, decisions, number of workers)"""
    torch.set_num_threads(1)
    command = ("run", *TEAMS[request.param], "--run-dir", "run", SCRIPTS / "dcgan.py", "out")
    train = partial(paceline, *command, CUDA_VISIBLE_DEVICES="")
    folder = once(tmp_path_factory, f"dcgan on {request.param}", lambda folder: train(cwd=folder))
    said = [event for event in read_journal(folder / "run") if event["event"] == "decision"]
    figures = json.loads((folder / "out.json").read_text())
    return load_file(folder / "out.safetensors"), figures, said, int(TEAMS[request.param][1])


SHARDED = """
import torch, paceline

class Net(torch.nn.Linear):
    pass

def train():
    trainer = paceline.Trainer(lambda: Net(4, 4), lambda output, batch: output.pow(2).mean(),
                               lambda params: torch.optim.SGD(params, lr=0.1), global_batch=8, plan="shard=2 zero=3")
    for _ in trainer.steps(torch.utils.data.TensorDataset(torch.ones(32, 4)), count=1):
        pass
    return trainer

first, second = train(), train()
"""


def test_sharded_models_are_called_by_their_class_in_the_script(tmp_path):
    """So that curves of runs under several plans have the same names."""
    (tmp_path / "train.py").write_text(SHARDED)
    paceline("run", "--workers", "2", "--run-dir", "run", "train.py", cwd=tmp_path)
    models = [event["model"] for event in read_journal(tmp_path / "run") if event["event"] == "grid"]
    assert models == ["Net", "Net"]


@pytest.mark.parametrize("loss", dcgan.LOSSES)
@pytest.mark.parametrize("generator", dcgan.GENERATORS)
def test_batchnorm_statistics_of_another_trainer_are_those_of_one_process(gan, generator, loss):
    weights, figures, _, _ = gan
    g, d = built(lambda: dcgan.GENERATORS[generator]().double()), built(lambda: dcgan.Discriminator().double())
    of_d = Plain(d, judge, [sgd(d.named_parameters())], forward=real_and_fake(g))
    of_g = Plain(g, dcgan.LOSSES[loss](d), [sgd(g.named_parameters())], forward=lambda model, batch: model(batch))
    for number, step in enumerate(grid(rows(6, 48, 10), 16, epochs=5, micro=4), 1):
        of_d.step(step)
        of_g.step(noise(number).split(4))
    expected = {f"d.{name}": value for name, value in d.state_dict().items()}
    expected |= {f"g.{name}": value for name, value in g.state_dict().items()}
    title = f"{generator}, {loss}"
    mine = {key.split("/")[1]: value for key, value in weights.items() if key.startswith(title)}
    for name in [name for name in expected if "tracked" in name]:  # large, and would outweigh the rest
        assert int(mine.pop(name)) == int(expected.pop(name)), name
    assert apart(mine, expected) <= 1e-12
    statistics = [{name: value for name, value in one.items() if "running" in name} for one in (mine, expected)]
    assert apart(*statistics) <= 1e-12
    losses = [loss for pair in zip(of_d.losses, of_g.losses, strict=True) for loss in pair]
    assert figures[title] == pytest.approx(losses, rel=1e-10)


def test_batchnorm_of_another_trainer_prevents_merging_of_micro_batches(gan):
    """As soon as it was seen to run in training mode, also where the trained model has none; at rest it does not."""
    _, _, said, workers = gan
    in_training, at_rest = (
        {event["why"] for event in said if event.get("trainer") == number and "fused" not in event["why"]}
        for number in (4, 6)
    )
    assert in_training == {"BatchNorm normalises each micro-batch"}
    if workers < 3:  # of three, each has one micro-batch
        assert at_rest >= {
            "the forward drew no random numbers and changed no buffers, and the loss of two micro-batches was the sum "
            "of their losses"
        }


def test_changing_buffer_of_another_trainer_is_refused_by_name(gan):
    _, figures, _, workers = gan
    assert figures["refused"] == (
        None
        if workers == 1
        else "ChangingBufferError: the forward changes the buffer 'layers.4.calls' of another trainer's model, which "
        "would then differ between workers; declare with paceline.buffer how to merge it, put that model into eval "
        "mode for the call, or train with one worker"
    )
