"""Trains a small model that a `transformers.Trainer` describes: HOW is "plain" (by transformers) or "paceline".

hf_cases.py KIND HOW OUT [words of TrainingArguments as JSON]

Writes the log and results to OUT.json, and the model's folder to OUT.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
warnings.simplefilter("ignore")

import torch  # noqa: E402
import transformers  # noqa: E402
from hf_tiny import tiny_llama  # noqa: E402

if sys.argv[2] == "paceline":
    import paceline
from transformers import LlamaForCausalLM, T5Config, TrainingArguments  # noqa: E402

KIND, HOW, OUT = sys.argv[1:4]
WORDS = json.loads(sys.argv[4]) if len(sys.argv) > 4 else {}
VOCABULARY, LENGTH = 97, 12
transformers.logging.set_verbosity_error()
torch.manual_seed(0)
generator = torch.Generator().manual_seed(1)


def llama(kind: type = LlamaForCausalLM, **words: object) -> torch.nn.Module:
    return kind(tiny_llama(VOCABULARY, **words))


def tokens(length: int) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (length,), generator=generator)


def causal() -> dict[str, object]:
    """A causal language model; the labels of a third of the positions are masked, in other rows in other numbers."""
    rows = []
    for number in range(45):
        words = tokens(LENGTH)
        rows.append(
            {"input_ids": words, "labels": torch.where(torch.arange(LENGTH) % (2 + number % 3) == 0, -100, words)}
        )
    return {"model": llama(), "train_dataset": rows[:35], "eval_dataset": rows[35:], "compute_metrics": right_tokens}


def folder() -> dict[str, object]:
    """The causal model, read from a folder in which transformers has written it in several files."""
    made, path = causal(), Path(OUT).parent / "pretrained"
    if HOW == "plain":
        made["model"].save_pretrained(path, max_shard_size="8KB")
    assert len([*path.glob("*.safetensors")]) > 1
    return made | {"model": LlamaForCausalLM.from_pretrained(path)}


def right_tokens(found: transformers.EvalPrediction) -> dict[str, float]:
    following = found.label_ids[:, 1:]
    return {"accuracy": float((found.predictions[:, :-1].argmax(-1) == following)[following >= 0].mean())}


def pad(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Pads to the longest row of the micro-batch, so that each has another shape."""
    words = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    return {
        "input_ids": words,
        "attention_mask": (words > 0).long(),
        "labels": torch.stack([r["labels"] for r in rows]),
    }


def classes() -> dict[str, object]:
    """Sequence classification with rows of other lengths."""
    rows = [{"input_ids": tokens(3 + number % 9), "labels": torch.tensor(number % 3)} for number in range(56)]
    model = llama(transformers.LlamaForSequenceClassification, num_labels=3)
    metric = lambda found: {"right": float((found.predictions.argmax(-1) == found.label_ids).mean())}
    return {
        "model": model,
        "train_dataset": rows[:40],
        "eval_dataset": rows[40:],
        "data_collator": pad,
        "compute_metrics": metric,
    }


def pairs() -> dict[str, object]:
    """A sequence-to-sequence model, whose loss does not shift its labels."""
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=4,
        d_ff=32,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
        use_cache=False,
    )
    rows = []
    for number in range(40):
        labels = tokens(6)
        labels[4 + number % 3 :] = -100
        rows.append({"input_ids": tokens(LENGTH), "labels": labels})
    return {
        "model": transformers.T5ForConditionalGeneration(config),
        "train_dataset": rows[:32],
        "eval_dataset": rows[32:],
    }


def adapters() -> dict[str, object]:
    """LoRA adapters on a frozen base."""
    from peft import LoraConfig, get_peft_model

    made = causal()
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return made | {"model": get_peft_model(made["model"], lora)}


def own() -> dict[str, object]:
    """A loss and an optimizer of the script's own, and a model that transformers did not make."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))

        def forward(self, features: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            logits = self.layers(features)
            loss = torch.nn.functional.cross_entropy(logits, labels)
            return {"loss": loss, "logits": logits}

    features = torch.randn(50, 6, generator=generator)
    rows = [{"features": x, "labels": torch.tensor(number % 3)} for number, x in enumerate(features)]
    model = Net()
    optimizer = torch.optim.SGD(
        [{"params": list(model.layers[0].parameters()), "lr": 0.05}, {"params": list(model.layers[2].parameters())}],
        lr=0.2,
        momentum=0.9,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return {"model": model, "train_dataset": rows[:40], "eval_dataset": rows[40:], "optimizers": (optimizer, schedule)}


ARGUMENTS = {
    "output_dir": OUT,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_steps": 12,
    "learning_rate": 1e-2,
    "weight_decay": 0.1,
    "warmup_steps": 2,
    "logging_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 6,
    "save_strategy": "no",
    "report_to": "none",
    "seed": 3,
    "use_cpu": True,
}
CASES = {"causal": causal, "folder": folder, "classes": classes, "pairs": pairs, "adapters": adapters, "own": own}
given = CASES[KIND]()


class Kill(transformers.TrainerCallback):
    """Kills the process of the last worker of the team after a step, once."""

    def on_step_end(self, args, state, control, **more):
        mark = Path(OUT).parent / "killed"
        if state.global_step == KILL_AT and paceline.join().rank == 2 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


KILL_AT = WORDS.pop("kill_at", None)
callbacks = [transformers.EarlyStoppingCallback(int(WORDS.pop("patience")))] if "patience" in WORDS else []
if KILL_AT is not None:
    callbacks.append(Kill())
arguments = TrainingArguments(**{**ARGUMENTS, **WORDS})
trainer = transformers.Trainer(args=arguments, callbacks=callbacks, **given)
if HOW == "plain":
    done = trainer.train()
else:
    done = paceline.hf.train(trainer)
trainer.save_model(OUT)
last = trainer.evaluate()
predicted = trainer.predict(given["eval_dataset"])
if trainer.is_world_process_zero():
    times = ("_runtime", "_per_second", "total_flos", "_time")
    log = [{k: v for k, v in line.items() if not k.endswith(times)} for line in trainer.state.log_history]
    logits = predicted.predictions[0] if isinstance(predicted.predictions, tuple) else predicted.predictions
    result = {
        "log": log,
        "loss": done.training_loss,
        "steps": done.global_step,
        "logits": logits.tolist(),
        "best": trainer.state.best_metric,
        "evaluated": last["eval_loss"],
    }
    Path(f"{OUT}.json").write_text(json.dumps(result))
