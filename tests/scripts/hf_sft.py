"""Supervised fine-tuning of a LoRA adapter by TRL: hf_sft.py HOW OUT, where HOW is "plain" or "paceline"."""

from __future__ import annotations

import json
import os
import random
import sys
import warnings
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
warnings.simplefilter("ignore")

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from hf_tiny import tiny_llama  # noqa: E402
from peft import LoraConfig  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402
from trl import SFTConfig, SFTTrainer  # noqa: E402

HOW, OUT = sys.argv[1], Path(sys.argv[2])
WORDS = [f"w{number}" for number in range(60)]
vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
splits = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
splits.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=splits, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
torch.manual_seed(0)
draw = random.Random(0)


def texts() -> list[str]:
    return [" ".join(draw.choice(WORDS) for _ in range(draw.randint(3, 8))) for _ in range(40)]


trainer = SFTTrainer(
    model=LlamaForCausalLM(tiny_llama(len(vocabulary), eos_token_id=1)),
    args=SFTConfig(
        output_dir=str(OUT.parent / f"{OUT.stem}-model"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=12,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    ),
    train_dataset=Dataset.from_dict({"prompt": texts(), "completion": texts()}),
    processing_class=tokenizer,
    peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
)
if HOW == "plain":
    trainer.train()
else:
    import paceline

    paceline.hf.train(trainer)
trainer.save_model()
if trainer.is_world_process_zero():
    OUT.write_text(json.dumps(trainer.state.log_history))
