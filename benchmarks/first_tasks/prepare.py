"""Makes the files that the first tasks read, in the working folder, offline.

    python benchmarks/first_tasks/prepare.py [--rows 2000]

lines/      lines of the standard library: label 1 in a docstring, 0 in code (JSON)
source/     modules of the standard library, for pretraining (text)
questions/  questions about functions of the standard library, and answers (JSON)
shapes/     images with up to three squares, discs and crosses, boxes and classes
bert/       a small BERT with random weights and its tokenizer, for one to download
llama/, detector/  a small language model and a small RT-DETR, likewise

Each has training and held-out rows.
"""

from __future__ import annotations

import argparse
import ast
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers.implementations import BertWordPieceTokenizer, ByteLevelBPETokenizer
from transformers import (
    BertConfig,
    BertModel,
    BertTokenizerFast,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    RTDetrConfig,
    RTDetrForObjectDetection,
    RTDetrResNetConfig,
)

WORDS, SIZE, MOST = 2000, 64, 3


def lines(file: Path) -> Iterator[dict[str, Any]]:
    """Lines of code with label 0, lines of docstrings with label 1."""
    text = file.read_text()
    prose = set[int]()
    for node in ast.walk(ast.parse(text)):
        value = getattr(node, "value", None)
        if isinstance(node, ast.Expr) and isinstance(
            getattr(value, "value", None), str
        ):
            prose.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for number, line in enumerate(text.splitlines(), 1):
        if len(line.strip()) > 20 and not line.strip().startswith("#"):
            yield {"text": line.strip(), "label": int(number in prose)}


def questions(file: Path) -> Iterator[dict[str, str]]:
    """A question about each function with a docstring, and its first sentences."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
            question = f"What does {node.name} of {file.stem} do?\n"
            yield {"question": question, "answer": text.split("\n\n")[0]}


def shapes(rows: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Images of one channel; boxes are centre x, centre y, width, height, in 0 to 1."""
    draw = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    made = []
    for _ in range(rows):
        image = 0.2 * torch.rand(SIZE, SIZE, generator=draw)
        count = int(torch.randint(1, MOST + 1, (), generator=draw))
        radius = torch.randint(6, 12, (count, 1), generator=draw)
        room = SIZE - 2 * radius
        middle = radius + torch.rand(count, 2, generator=draw) * room
        labels = torch.randint(3, (count,), generator=draw)
        for (across, down), size, label in zip(middle, radius, labels, strict=True):
            right, below = (x - across).abs(), (y - down).abs()
            square = (right <= size) & (below <= size)
            disc = right**2 + below**2 <= size**2
            cross = square & ((right < 3) | (below < 3))
            image[[square, disc, cross][int(label)]] = 0.8
        boxes = torch.cat([middle, 2 * radius.expand(-1, 2)], 1) / SIZE
        made.append({"image": image[None], "boxes": boxes, "class_labels": labels})
    return made


def write_rows(path: Path, rows: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_models(texts: list[str]) -> None:
    """Models of a fraction of a million parameters, and tokenizers of these texts."""
    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "hidden_size": 64, "intermediate_size": 128}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4}
    words = BertWordPieceTokenizer()
    words.train_from_iterator(texts, WORDS, show_progress=False)
    tokenizer = BertTokenizerFast(
        tokenizer_object=words._tokenizer, model_max_length=64
    )
    tokenizer.save_pretrained("bert")
    BertModel(BertConfig(max_position_embeddings=64, **sizes)).save_pretrained("bert")
    pairs = ByteLevelBPETokenizer()
    special = {"eos_token": "<|endoftext|>", "pad_token": "<|pad|>"}
    pairs.train_from_iterator(
        texts, WORDS, special_tokens=list(special.values()), show_progress=False
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pairs._tokenizer, **special)
    tokenizer.save_pretrained("llama")
    config = LlamaConfig(max_position_embeddings=256, **sizes)
    LlamaForCausalLM(config).save_pretrained("llama")
    write_detector()


def write_detector() -> None:
    """An RT-DETR of a third of a million parameters, for images of one channel."""
    features = {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 48, 64]}
    stages = ["stage2", "stage3", "stage4"]
    network = RTDetrResNetConfig(
        num_channels=1,
        embedding_size=16,
        layer_type="basic",
        out_features=stages,
        **features,
    )
    encoder = {
        "encoder_hidden_dim": 32,
        "encoder_in_channels": features["hidden_sizes"][1:],
    }
    encoder |= {"encoder_ffn_dim": 64, "encoder_attention_heads": 4}
    decoder = {
        "d_model": 32,
        "decoder_in_channels": [32, 32, 32],
        "decoder_ffn_dim": 64,
    }
    decoder |= {"decoder_layers": 2, "decoder_attention_heads": 4}
    queries = {"num_queries": 20, "num_denoising": 20, "num_labels": 3}
    config = RTDetrConfig(backbone_config=network, **encoder, **decoder, **queries)
    RTDetrForObjectDetection(config).save_pretrained("detector")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rows", type=int, default=2000, help="of training, of each part"
    )
    rows = parser.parse_args().rows
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    held_out = modules[::20]
    training = [file for file in modules if file not in held_out]
    parts = (("train", training, rows), ("test", held_out, rows // 4))
    for number, (part, files, count) in enumerate(parts):
        labelled = [line for file in files for line in lines(file)]
        step = max(1, len(labelled) // count)
        write_rows(Path("lines", f"{part}.jsonl"), labelled[::step][:count])
        asked = [question for file in files for question in questions(file)]
        write_rows(Path("questions", f"{part}.jsonl"), asked[:count])
        Path("source", part).mkdir(parents=True, exist_ok=True)
        for file in files[: max(1, count // 20)]:
            Path("source", part, f"{file.stem}.txt").write_text(file.read_text())
        Path("shapes").mkdir(exist_ok=True)
        torch.save(shapes(count, seed=number), f"shapes/{part}.pt")
    write_models([line["text"] for file in training[::5] for line in lines(file)])


if __name__ == "__main__":
    main()
