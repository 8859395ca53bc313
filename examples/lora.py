"""LoRA with peft on packed conversations: a frozen base model learns to answer questions about functions of Python's
standard library; only its small adapters are trained and saved. Nothing is downloaded: a first training makes the base
model, from the documentation that Python comes with. Each of these gives the same training:

paceline run --workers 1 examples/lora.py
paceline run --workers 2 examples/lora.py
paceline run --workers 2 --plan "shard=2 zero=3" examples/lora.py
"""

import ast
import sysconfig
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tokenizers.implementations import ByteLevelBPETokenizer
from torch.utils.data import default_collate
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import paceline
from paceline.data import PackedDocuments

LENGTH, BATCH, WORDS, BASE_STEPS, STEPS = 256, 8, 1024, 200, 80
CONFIG = LlamaConfig(
    vocab_size=WORDS,
    hidden_size=128,
    intermediate_size=352,
    num_hidden_layers=4,
    num_attention_heads=4,
    max_position_embeddings=LENGTH,
    use_cache=False,  # so that documents do not see each other
)
LORA = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"])
TEMPLATE = """{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.role == 'assistant' %}{% generation %}
{{- m.content + '<|end|>' }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"""


def conversations(files):
    """Two questions about each function that has a docstring, and their answers."""
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
                yield [
                    {"role": "user", "content": f"What does {node.name} of {file.stem} do?"},
                    {"role": "assistant", "content": text.split("\n\n")[0]},
                    {"role": "user", "content": "How is it called?"},
                    {"role": "assistant", "content": f"{node.name}({ast.unparse(node.args)})"},
                ]


def document(conversation):
    """The tokens of a conversation, of which only those of answers count in the loss."""
    tokens = tokenizer.apply_chat_template(conversation, return_dict=True, return_assistant_tokens_mask=True)
    pairs = zip(tokens["input_ids"], tokens["assistant_masks"], strict=True)
    return {"input_ids": tokens["input_ids"], "labels": [word if counts else -100 for word, counts in pairs]}


def forward(model, batch):
    return model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits


def loss(logits, batch):
    """The sum over the tokens that follow and count, and their number."""
    following = batch["labels"][:, 1:].flatten()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), following, reduction="sum"), (following != -100).sum()


def train(model, rows, steps, rate):
    trainer = paceline.Trainer(
        model, loss, lambda params: torch.optim.AdamW(params, lr=rate), global_batch=BATCH, forward=forward,
        schedule=paceline.cosine(steps, warmup=steps // 10), clip_norm=1.0,
    )  # fmt: skip
    for _ in trainer.steps(rows, count=steps, order=rows.order(BATCH)):
        pass
    result = trainer.evaluate(held_out, lambda logits, batch: {"loss": loss(logits, batch)})
    print(f"loss of held-out answers: {result['loss']:.3f}")
    return trainer


def base():
    """The base model. For a real one: AutoModelForCausalLM.from_pretrained("...", use_cache=False).train()."""
    model = LlamaForCausalLM(CONFIG)
    model.load_state_dict(load_file("base.safetensors"))
    return model


modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
chats = [*conversations(file for number, file in enumerate(modules) if number % 20)]
texts = [*topics.values(), *(message["content"] for chat in chats for message in chat)]
words = ByteLevelBPETokenizer()
words.train_from_iterator(texts, WORDS, special_tokens=["<|end|>", "<|user|>", "<|assistant|>"], show_progress=False)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words._tokenizer, chat_template=TEMPLATE)
held_out = PackedDocuments([document(chat) for chat in conversations(modules[::20])], LENGTH)

rows = PackedDocuments([tokenizer(text)["input_ids"] for text in texts], LENGTH)
train(lambda: LlamaForCausalLM(CONFIG), rows, BASE_STEPS, 3e-3).export("base.safetensors")
rows = PackedDocuments([document(chat) for chat in chats], LENGTH)
trainer = train(lambda: get_peft_model(base(), LORA), rows, STEPS, 1e-2)
trainer.export("all.safetensors")
if trainer.main:  # one worker writes adapter_config.json and adapter_model.safetensors, without base weights
    trainer.model.save_pretrained("adapter", state_dict=load_file("all.safetensors"))
    loaded, batch = PeftModel.from_pretrained(base(), "adapter").eval(), default_collate([*held_out])
    with torch.no_grad():
        total, count = loss(forward(loaded, batch), batch)
    print(f"with the adapter loaded from adapter/: {total / count:.3f}")
