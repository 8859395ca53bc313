"""Pretrains a small mixture of experts, a Mixtral of transformers, on the functions of this very Python's standard
library, packed into rows. Nothing is downloaded; it takes one or two minutes. The first three give the same training:

paceline run --workers 1 examples/experts.py
paceline run --workers 2 examples/experts.py                     # each worker has all experts
paceline run --workers 2 --plan expert=2 examples/experts.py     # each worker has half of the experts
paceline run --workers 4 --plan expert=4 examples/experts.py --train-steps 3000 --width 256 --layers 6 --experts 16
"""

import argparse
import ast
import math
import sysconfig
import textwrap
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers.implementations import ByteLevelBPETokenizer
from transformers import MixtralConfig, MixtralForCausalLM

import paceline
from paceline.data import PackedDocuments

LENGTH, BATCH, WORDS = 256, 8, 1024  # tokens of a row, rows of a step, tokens in the vocabulary
options = argparse.ArgumentParser()
for name, default in {"train-steps": 200, "width": 128, "layers": 3, "experts": 8}.items():
    options.add_argument(f"--{name}", type=int, default=default)
args = options.parse_args()


def functions(files):
    """The source of each function and method."""
    for text in (file.read_text() for file in files):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                lines = text.splitlines(keepends=True)[node.lineno - 1 : node.end_lineno]
                yield textwrap.dedent("".join(lines))


def packed(texts):
    return PackedDocuments([[*encoding.ids, END] for encoding in tokenizer.encode_batch([*texts])], LENGTH)


def surprise(output, batch):
    """The sum of the negative log-likelihoods of the tokens that follow and count, and these tokens."""
    following = batch["labels"][:, 1:].flatten()
    total = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), following, reduction="sum")
    return total, following[following != -100]


def loss(output, batch):
    """With the auxiliary loss, which is least if all experts get equally many tokens."""
    total, following = surprise(output, batch)
    return total + 0.02 * len(following) * output.aux_loss, len(following)


def bits(output, batch):
    total, following = surprise(output, batch)
    return {"bits_per_byte": (total / math.log(2), SIZES.to(following.device)[following].sum())}


@torch.no_grad()
def go_on(text, length=200):
    """Writes tokens after `text` up to the end of a document. All workers call it, and draw the same tokens."""
    model, written, chance = trainer.model.eval(), tokenizer.encode(text).ids, torch.Generator().manual_seed(0)
    while len(written) < length and written[-1] != END:
        seen = torch.tensor([written], dtype=torch.int64, device=trainer.device)
        chances = F.softmax(model(input_ids=seen).logits[0, -1].float().cpu() / 0.7, dim=0)
        written.append(torch.multinomial(chances, 1, generator=chance).item())
    return tokenizer.decode(written)


modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
texts = [*functions(file for number, file in enumerate(modules) if number % 20)]
tokenizer = ByteLevelBPETokenizer()
tokenizer.train_from_iterator(texts, WORDS, special_tokens=["<end>"], show_progress=False)
sizes = [0, *(len(tokenizer.id_to_token(word)) for word in range(1, WORDS))]  # bytes of each token
END, SIZES = 0, torch.tensor(sizes, dtype=torch.int64)
training, held_out = packed(texts), [*packed(functions(modules[::20]))][::4]
config = MixtralConfig(
    vocab_size=WORDS,
    hidden_size=args.width,
    intermediate_size=3 * args.width // 2,  # of each expert
    num_hidden_layers=args.layers,
    num_attention_heads=4,
    num_key_value_heads=4,
    num_local_experts=args.experts,
    num_experts_per_tok=2,
    output_router_logits=True,  # for the auxiliary loss
    max_position_embeddings=LENGTH,
    use_cache=False,  # so that documents do not see each other
)
trainer = paceline.Trainer(
    model=lambda: MixtralForCausalLM(config),
    forward=lambda model, batch: model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]),
    loss=loss,
    optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.05),
    global_batch=BATCH,
    schedule=paceline.cosine(args.train_steps, warmup=args.train_steps // 10),
    clip_norm=1.0,
)
for report in trainer.steps(training, count=args.train_steps, order=training.order(BATCH)):
    if report.step % 40 == 0:
        trainer.evaluate(held_out, bits)
result = trainer.evaluate(held_out, bits)
trainer.export("experts.safetensors")
trainer.log(sample=(sample := go_on("def get_")))
print(f"{result['bits_per_byte']:.2f} bits per byte on modules that it has not seen; it writes:\n\n{sample}\n")
