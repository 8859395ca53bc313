"""`paceline.hf`: a `transformers.Trainer` gives the same with Paceline as by itself, on any number of workers."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from agents import until
from doc_pages import blocks_of
from launching import free_port, paceline
from paths import DOCS, SCRIPTS
from safetensors.torch import load_file
from warm import Process, environment

from paceline.errors import UsageError
from paceline.integrations.huggingface import arguments
from paceline.integrations.huggingface.callbacks import check_callbacks
from paceline.integrations.huggingface.training import refuse_overridden

CASES = SCRIPTS / "hf_cases.py"
# Imported once: what the scripts import.
WARM = {"WARM_WITH": " ".join(f"transformers.{name}" for name in ("trainer", "models.llama.modeling_llama"))}
# One micro-batch per step: transformers itself adds the means of several where a loss ignores `num_items_in_batch`.
SINGLE = {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 8}
BEST = {
    **SINGLE,
    "max_steps": -1,
    "num_train_epochs": 9,
    "dataloader_drop_last": True,
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "logging_strategy": "epoch",
    "load_best_model_at_end": True,
    "greater_is_better": False,
    "patience": 1,
}


def plain(kind: str, folder: Path, **words: Any) -> dict[str, Any]:
    """What transformers itself does, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(CASES), kind, "plain", str(folder / "plain"), json.dumps(words)])
        runpy.run_path(str(CASES))
    return read(folder / "plain")


def read(path: Path) -> dict[str, Any]:
    result = json.loads(Path(f"{path}.json").read_text())
    names = [name for name in ("model.safetensors", "adapter_model.safetensors") if (path / name).exists()]
    return result | {"files": names, "weights": load_file(path / names[0])}


def train(kind: str, folder: Path, workers: int, *options: str, code: int = 0, **words: Any) -> Any:
    """The same by Paceline."""
    given = ("run", "--workers", str(workers), "--run-dir", folder / "run", *options, CASES, kind, "paceline")
    return paceline(*given, folder / "paceline", json.dumps(words), cwd=folder, code=code, timeout=240, **WARM)


def same(folder: Path, expected: dict[str, Any], off: float = 1e-5, evaluated: float = 1e-5) -> None:
    """Compares the log of all steps, the evaluations, the predictions and the weights."""
    found = read(folder / "paceline")
    assert [line["step"] for line in found["log"]] == [line["step"] for line in expected["log"]]
    for mine, other in zip(found["log"], expected["log"], strict=True):
        assert mine.keys() == other.keys()
        for name, value in other.items():
            assert mine[name] == pytest.approx(value, rel=evaluated if name == "eval_loss" else off), (name, other)
    assert found["steps"] == expected["steps"]
    assert found["loss"] == pytest.approx(expected["loss"], rel=off)
    assert torch.allclose(torch.tensor(found["logits"]), torch.tensor(expected["logits"]), atol=10 * off)
    assert found["files"] == expected["files"]
    assert found["weights"].keys() == expected["weights"].keys()
    for name, value in expected["weights"].items():
        assert float((found["weights"][name] - value).norm()) <= off * float(value.norm()) + 1e-7, name


# Other rows have other numbers of tokens: transformers averages means of evaluation batches, Paceline tokens.
BY_TOKEN = 1e-3


def test_model_of_a_folder_trains_as_by_transformers(tmp_path: Path) -> None:
    expected = plain("folder", tmp_path)
    train("folder", tmp_path, 2)
    same(tmp_path, expected, evaluated=BY_TOKEN)


@pytest.mark.slow
def test_stopped_training_resumes_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """Two workers, stopped in the middle of an epoch; three resume. The log goes on as if nothing had happened."""
    expected = plain("causal", tmp_path)
    stopped = train("causal", tmp_path, 2, "--steps", "7")
    assert "stopped after step 7" in stopped.stderr
    assert not (tmp_path / "paceline.json").exists()
    resumed = train("causal", tmp_path, 3)
    assert "resuming from step 7" in resumed.stderr
    same(tmp_path, expected, evaluated=BY_TOKEN)


CELLS = [
    ("causal", 1, "data=1", {}, BY_TOKEN),
    ("causal", 2, "data=2", {}, BY_TOKEN),
    ("causal", 3, "data=3", {}, BY_TOKEN),
    ("causal", 3, "shard=3", {}, BY_TOKEN),
    ("folder", 2, "shard=2", {}, BY_TOKEN),
    ("folder", 2, "tensor=2", {}, BY_TOKEN),
    ("folder", 2, "pipeline=2", {}, BY_TOKEN),
    ("causal", 2, "shard=2", {}, BY_TOKEN),
    ("causal", 2, "shard=2 zero=3", {}, BY_TOKEN),
    ("causal", 2, "tensor=2", {}, BY_TOKEN),
    ("causal", 2, "pipeline=2", {}, BY_TOKEN),
    ("causal", 3, "server=1", {"optim": "adafactor", "lr_scheduler_type": "cosine"}, BY_TOKEN),
    (
        "causal",
        2,
        "data=2",
        {"label_smoothing_factor": 0.1, "optim": "sgd", "activation_checkpointing": True},
        BY_TOKEN,
    ),
    ("classes", 2, "data=2", SINGLE, 1e-5),
    ("classes", 3, "data=3", BEST, 1e-5),
    ("classes", 2, "shard=2", BEST, 1e-5),
    ("classes", 2, "tensor=2", BEST, 1e-5),
    ("classes", 2, "pipeline=2", BEST, 1e-5),
    ("pairs", 2, "data=2", SINGLE, 1e-5),
    ("pairs", 2, "tensor=2", SINGLE, 1e-5),
    ("adapters", 3, "data=3", {}, BY_TOKEN),
    ("adapters", 2, "shard=2", {}, BY_TOKEN),
    ("adapters", 2, "tensor=2", {}, BY_TOKEN),
    ("adapters", 2, "pipeline=2", {}, BY_TOKEN),
    ("classes", 2, "tensor=2", SINGLE, 1e-5),
    ("pairs", 3, "data=3", SINGLE, 1e-5),
    ("pairs", 2, "shard=2", SINGLE, 1e-5),
    ("own", 2, "data=2", {}, 1e-5),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "workers", "plan", "words", "evaluated"), CELLS)
def test_kinds_of_models_train_as_by_transformers(
    kind: str, workers: int, plan: str, words: dict[str, Any], evaluated: float, tmp_path: Path
) -> None:
    expected = plain(kind, tmp_path, **words)
    train(kind, tmp_path, workers, "--plan", plan, **words)
    same(tmp_path, expected, evaluated=evaluated)


@pytest.mark.slow
def test_best_model_is_loaded_on_a_host_that_has_no_part_of_the_run_folder(tmp_path: Path) -> None:
    """Two agents with folders of their own, as on two machines without a shared disk."""
    expected = plain("classes", tmp_path, **BEST)
    at, (first, other) = f"127.0.0.1:{free_port()}", (tmp_path / "first", tmp_path / "other")
    command = [sys.executable, "-m", "paceline", "run", "--workers", "1", "--run-dir", "run"]
    script = [CASES, "classes", "paceline", tmp_path / "paceline", json.dumps(BEST)]
    agents = []
    for folder, more in (
        (first, ["--listen", at, "--min-workers", "2"]),
        (other, ["--join", at, "--token-file", first / "run" / "token"]),
    ):
        folder.mkdir()
        agents.append(Process([*command, *more, *script], environment(), cwd=folder))
        until((first / "run" / "token").exists, 60)
    assert [agent.wait(240) for agent in agents] == [0, 0]
    assert not (other / "run" / "checkpoints").exists()
    assert not [*(first / "run").glob(".best*")]
    same(tmp_path, expected)


MEASURED = [("shard=2", 0.5), ("shard=2 zero=2", 0.5), ("tensor=2", 0.5), ("pipeline=2", 0.6)]


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "part"), MEASURED)
def test_worker_reads_its_part_of_a_folder(plan: str, part: float, tmp_path: Path) -> None:
    """Until the first step a worker takes memory for its part of the weights, and gradients where they are allocated
    by then: never for the complete model.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=4000, **sizes))
    model.save_pretrained(tmp_path / "large", max_shard_size="40MB")
    size = sum(param.nbytes for param in model.parameters())
    paceline("run", "--workers", "2", "--plan", plan, SCRIPTS / "hf_memory.py", "large", cwd=tmp_path)
    for worker in range(2):
        peak = int((tmp_path / f"peak-{worker}").read_text())
        gradients = 0 if plan == "pipeline=2" else part
        assert peak < (part + gradients + 0.1) * size + 32e6, f"{peak / size:.2f} of the model"


@pytest.mark.slow
def test_a_killed_worker_changes_nothing(tmp_path: Path) -> None:
    """Of adapters on a frozen base, whose checkpoints have the adapter alone."""
    expected = plain("adapters", tmp_path)
    done = train("adapters", tmp_path, 3, "--save-every", "2", kill_at=5)
    assert "was killed by SIGKILL" in done.stderr
    same(tmp_path, expected, evaluated=BY_TOKEN)
    newest = max((tmp_path / "run" / "checkpoints").glob("step-*"))
    (file,) = newest.glob("*.safetensors")
    assert not [name for name in load_file(file) if "base_layer" in name or "embed_tokens" in name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "plan"), [(2, "data=2"), (3, "data=3"), (2, "shard=2"), (2, "tensor=2"), (2, "pipeline=2")]
)
def test_supervised_fine_tuning_of_trl_trains_as_by_itself(
    workers: int, plan: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The losses, about what its own loss function records of all workers' tokens, and the adapter in plain peft."""
    from peft import PeftModel
    from transformers import LlamaForCausalLM

    script = SCRIPTS / "hf_sft.py"
    command = [sys.executable, script, "plain", tmp_path / "plain.json"]
    subprocess.run(command, env=environment(OMP_NUM_THREADS="1"), check=True, capture_output=True)
    options = ("run", "--workers", str(workers), "--plan", plan)
    paceline(*options, script, "paceline", tmp_path / "paceline.json", cwd=tmp_path, **WARM)
    mine, other = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("paceline", "plain"))
    assert len(mine) == len(other) == 13
    for ours, theirs in zip(mine[:-1], other[:-1], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-6 if plan == "data=2" else 1e-5)
        assert ours["num_tokens"] >= theirs["num_tokens"]  # a micro-batch that is computed twice counts twice
        assert ours["entropy"] == pytest.approx(theirs["entropy"], rel=1e-3)  # a mean of means of micro-batches
    assert mine[-2]["num_tokens"] <= 1.1 * other[-2]["num_tokens"]  # workers of a unit do not count twice
    assert {*mine[-1]} >= {"train_loss", "train_runtime"}
    monkeypatch.syspath_prepend(SCRIPTS)
    from hf_tiny import tiny_llama

    words, outputs = torch.arange(12).view(1, 12), []
    for folder in ("plain-model", "paceline-model"):
        torch.manual_seed(0)
        base = LlamaForCausalLM(tiny_llama(63, eos_token_id=1)).eval()
        with torch.no_grad():
            outputs.append((base(input_ids=words).logits, PeftModel.from_pretrained(base, tmp_path / folder)(words)))
    (base_logits, expected), (_, loaded) = outputs
    assert (expected.logits - base_logits).abs().max() > 1e-2
    assert torch.allclose(loaded.logits, expected.logits, atol=1e-4)


# -- what cannot be honoured is refused by name -----------------------------------------------------------------------


def test_each_training_argument_is_used_or_without_effect_or_refused() -> None:
    from transformers import TrainingArguments

    names = [field.name for field in fields(TrainingArguments)]
    for name in names:
        homes = [name in table for table in (arguments.USED, arguments.NO_EFFECT, arguments.REFUSED)]
        assert sum(homes) == 1, name
    assert {*arguments.USED, *arguments.NO_EFFECT, *arguments.REFUSED} <= {*names}


def test_the_page_shows_the_tables() -> None:
    page = (DOCS / "coming-from" / "hugging-face.md").read_text()
    for name, text in [*arguments.NO_EFFECT.items(), *arguments.REFUSED.items()]:
        assert re.search(rf"^\| `{name}`.*\| {re.escape(text)} \|$", page, re.MULTILINE), name
    assert all(f"`{name}`" in page for name in arguments.USED)


def made(**words: Any) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(output_dir="out", use_cpu=True, report_to="none", **words)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            {"auto_find_batch_size": True},
            "TrainingArguments(auto_find_batch_size=True) cannot be used with paceline.hf",
        ),
        ({"push_to_hub": True}, "TrainingArguments(push_to_hub=True) cannot be used with paceline.hf"),
        (
            {"resume_from_checkpoint": "a"},
            "TrainingArguments(resume_from_checkpoint='a') cannot be used with paceline.hf",
        ),
    ],
)
def test_argument_that_cannot_be_honoured_is_refused(words: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError) as raised:
        arguments.check_arguments(made(**words))
    assert raised.value.what == text
    assert raised.value.cure == arguments.REFUSED[next(iter(words))]


def test_usual_arguments_pass() -> None:
    arguments.check_arguments(made(eval_strategy="epoch", save_total_limit=3, ddp_bucket_cap_mb=5, seed=7))


def test_fields_that_a_subclass_adds_are_its_own() -> None:
    from transformers import Seq2SeqTrainingArguments
    from trl import SFTConfig

    usual = {"output_dir": "out", "use_cpu": True, "report_to": "none"}
    arguments.check_arguments(SFTConfig(**usual, bf16=False, max_length=77, packing=True))
    arguments.check_arguments(Seq2SeqTrainingArguments(**usual, generation_max_length=9))
    with pytest.raises(UsageError) as raised:
        arguments.check_arguments(Seq2SeqTrainingArguments(**usual, predict_with_generate=True))
    assert "predict_with_generate=True" in raised.value.what


def test_plan_words_of_training_arguments_give_way_to_the_plan() -> None:
    asks = SimpleNamespace(
        bf16=True, fp16=False, activation_checkpointing=True, gradient_checkpointing=False, torch_compile=True
    )
    assert arguments.merged_plan(asks, None) == "precision=bf16 recompute=blocks compile"
    assert arguments.merged_plan(asks, "data=2 precision=fp16") == "data=2 precision=fp16 recompute=blocks compile"


def test_callback_within_a_step_is_refused() -> None:
    from transformers import Trainer, TrainerCallback

    class Watches(TrainerCallback):
        def on_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            """Reads gradients."""

    trainer = Trainer(torch.nn.Linear(1, 1), made(), callbacks=[Watches()])
    with pytest.raises(UsageError) as raised:
        check_callbacks(trainer)
    assert raised.value.what == "the callback Watches has on_optimizer_step(), and Paceline does not call it"
    assert raised.value.cure == "use on_step_end(), on_log() or on_evaluate(), or remove the callback"


def test_subclass_with_a_loop_of_its_own_is_refused() -> None:
    from transformers import Trainer

    class Loops(Trainer):
        def _inner_training_loop(self, *given: Any, **named: Any) -> None:
            """Trains in another way."""

    class Around(Trainer):
        def train(self, *given: Any, **named: Any) -> Any:
            """Does something before and after."""
            return super().train(*given, **named)

    refuse_overridden(Around(torch.nn.Linear(1, 1), made()))
    with pytest.raises(UsageError) as raised:
        refuse_overridden(Loops(torch.nn.Linear(1, 1), made()))
    what = "Loops._inner_training_loop() replaces a part of the training loop that paceline.hf replaces, too"
    assert raised.value.what == what


def script_of_the_page(folder: Path) -> str:
    block = next(block for block in blocks_of((DOCS / "coming-from" / "hugging-face.md").read_text()) if block.file)
    assert block.file is not None
    (folder / block.file).write_text(block.text)
    return block.file


@pytest.mark.slow
def test_chaos_on_the_script_of_the_page_ends_clean(tmp_path: Path) -> None:
    """A worker is killed in a backward, and one stops answering between the sum of gradients and the update."""
    faults = ("--faults", "kill:1@5.backward,stop:2@9.reduced")
    script = script_of_the_page(tmp_path)
    done = paceline("chaos", "--workers", "3", "--steps", "20", *faults, script, cwd=tmp_path, **WARM)
    assert "20 steps counted, each exactly once" in done.stdout
    assert re.search(r"^lost +nothing$", done.stdout, re.MULTILINE), done.stdout
    assert "did not happen" not in done.stdout


@pytest.mark.slow
def test_the_script_of_the_page_runs(tmp_path: Path) -> None:
    file = script_of_the_page(tmp_path)
    done = paceline("run", "--workers", "2", file, cwd=tmp_path, timeout=240)
    assert "finished at step 30" in done.stderr
    assert (tmp_path / "finetuned" / "model.safetensors").exists()
