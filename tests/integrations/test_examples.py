"""The examples do what their first lines promise, with two workers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launching import paceline
from paths import EXAMPLES
from safetensors.torch import load_file

from paceline.base.journal import read_journal


@pytest.mark.parametrize("epochs", [3, pytest.param(15, marks=pytest.mark.slow)])
def test_example_digits_reaches_its_accuracy(epochs, tmp_path):
    """In a fifth of the epochs, too."""
    text = (EXAMPLES / "digits.py").read_text()
    assert "EPOCHS, BATCH = 15, 128" in text
    (tmp_path / "digits.py").write_text(text.replace("EPOCHS, BATCH = 15", f"EPOCHS, BATCH = {epochs}"))
    output = paceline("run", "--workers", "2", "digits.py", cwd=tmp_path, WARM_WITH="sklearn.datasets").stdout
    (accuracy,) = re.findall(r"accuracy on 360 held-out digits: ([\d.]+)%", output)
    assert float(accuracy) > 97
    assert load_file(tmp_path / "digits.safetensors")


@pytest.mark.slow
def test_example_cartpole_reaches_its_return(tmp_path):
    output = paceline("run", "--workers", "2", EXAMPLES / "cartpole.py", cwd=tmp_path).stdout
    (mean_return,) = re.findall(r"mean return is (\d+) of 500", output)
    assert int(mean_return) > 350


@pytest.mark.slow
def test_example_gpt_lowers_its_loss(tmp_path):
    """A minute of training is the demo's business; here 10 steps must lower the loss from 8 bits to under 6."""
    options = ("--workers", "2", "--run-dir", "out", "--steps", "10")
    done = paceline("run", *options, EXAMPLES / "gpt.py", cwd=tmp_path, timeout=280)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stderr)]
    assert 7.5 < losses[0] < 9  # 256 equally likely bytes need 8 bits
    assert losses[-1] < 6


@pytest.mark.slow
def test_example_recommend_sends_touched_rows_only(tmp_path):
    """The loss of each step is that of whole gradients, as is what comes of it; bytes are a twentieth at most."""
    said, sent = [], []
    for kind, plan in (("dense", "data=2"), ("sparse", "data=2"), ("sparse", "server=2")):
        options = ("--workers", "2", "--run-dir", f"{kind} {plan}", "--plan", plan)
        done = paceline("run", *options, EXAMPLES / "recommend.py", kind, cwd=tmp_path)
        said.append(re.findall(r"right for .*|loss        .*", done.stdout + done.stderr))
        (figures,) = (event for event in read_journal(tmp_path / f"{kind} {plan}") if event["event"] == "figures")
        sent.append(sum(figures["measured"][0]["sent"].values()))
    assert len(said[0]) == 2
    assert said == said[:1] * 3
    assert max(sent[1:]) < 0.05 * sent[0]


@pytest.mark.slow
def test_example_llama_lowers_its_loss_in_shards(tmp_path):
    options = ("--workers", "2", "--run-dir", "out", "--plan", "shard=2 recompute=blocks", "--steps", "30")
    done = paceline("run", *options, EXAMPLES / "llama.py", cwd=tmp_path, timeout=280)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stderr)]
    assert 7.5 < losses[0] < 9
    assert losses[-1] < 6


@pytest.mark.slow
def test_example_experts_trains_alike_under_each_plan(tmp_path):
    losses, options = [], ("--train-steps", "12", "--width", "32", "--layers", "2")
    for plan in ("data=2", "expert=2"):
        command = ("run", "--workers", "2", "--run-dir", plan, "--plan", plan)
        done = paceline(*command, EXAMPLES / "experts.py", *options, cwd=tmp_path, timeout=280)
        assert "bits per byte on modules that it has not seen; it writes:\n\ndef get_" in done.stdout
        losses.append([event["loss"] for event in read_journal(tmp_path / plan) if event["event"] == "step"])
    assert len(losses[0]) == 12
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][-1] < losses[0][0] - 0.2


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["data=2", "shard=2 zero=3", "tensor=2"])
def test_adapter_of_example_lora_is_loaded_with_its_loss(plan, tmp_path):
    """In a tenth of the steps; the loss falls, too."""
    text = (EXAMPLES / "lora.py").read_text()
    assert "BASE_STEPS, STEPS = 256, 8, 1024, 200, 80" in text
    (tmp_path / "lora.py").write_text(text.replace("200, 80", "20, 8"))
    output = paceline("run", "--workers", "2", "--plan", plan, "lora.py", cwd=tmp_path, timeout=280).stdout
    base, tuned = map(float, re.findall(r"loss of held-out answers: ([\d.]+)", output))
    (loaded,) = re.findall(r"with the adapter loaded from adapter/: ([\d.]+)", output)
    assert tuned < base
    assert float(loaded) == pytest.approx(tuned, abs=1e-3)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size < 1_000_000


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["clip", "simclr"])
def test_example_contrastive_finds_the_right_pairs(kind, tmp_path):
    output = paceline("run", "--workers", "2", EXAMPLES / "contrastive.py", kind, cwd=tmp_path).stdout
    (right,) = re.findall(r"the nearest of 256 is the right one for ([\d.]+)%", output)
    assert float(right) > 80
    assert "scale" in load_file(tmp_path / f"{kind}.safetensors")


def test_examples_are_shorter_than_110_lines():
    for path in EXAMPLES.glob("*.py"):
        most = 180 if path.name == "detection.py" else 110  # which has a detector, its loss and its measure
        assert len(path.read_text().splitlines()) < most, path.name


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_shapes_are_detected(tmp_path: Path) -> None:
    """In a third of the epochs; with `exact` the average precision is that of one worker, in each digit."""
    text = (EXAMPLES / "detection.py").read_text()
    assert "EPOCHS, BATCH = 12, 64" in text
    (tmp_path / "detection.py").write_text(text.replace("EPOCHS, BATCH = 12", "EPOCHS, BATCH = 4"))
    options = {"cwd": tmp_path, "timeout": 580}
    lines = [
        paceline("run", "--workers", workers, "--plan", "exact", "detection.py", **options).stdout
        for workers in ("1", "2")
    ]
    (precision,) = re.findall(r"held-out images: ([\d.]+) ", lines[0])
    assert float(precision) > 0.6
    assert lines[0] == lines[1]
