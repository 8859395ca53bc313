"""Models as people have them, from one unchanged script each: the bytes of one worker under every plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launching import SCRIPTS, TRANSFORMERS, paceline
from safetensors.torch import load_file

PLANS = ("", "shard=3 zero=1", "shard=3 zero=2", "shard=3", "shard=3 recompute=blocks")
KINDS = ("llama", "llama-tied", "gpt2", "vit", "resnet")


def train(folder: Path, kind: str, workers: int, plan: str) -> Path:
    """The weights that the script exports."""
    options = ("--workers", str(workers), "--run-dir", "run", "--plan", f"exact {plan}")
    paceline("run", *options, SCRIPTS / "zoo.py", kind, cwd=folder, **TRANSFORMERS)
    return folder / "out.safetensors"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_hugging_face_models_have_equal_bytes_under_every_plan(kind: str, tmp_path: Path) -> None:
    found = {}
    for number, (workers, plan) in enumerate([(1, ""), *((3, plan) for plan in PLANS)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        found[workers, plan] = train(folder, kind, workers, plan).read_bytes()
    assert {case for case, data in found.items() if data != found[1, ""]} == set()


@pytest.mark.slow
def test_hugging_face_folder_import_and_export(tmp_path: Path) -> None:
    """What transformers has written, in several files, begins a run in shards, and it reads what that exports."""
    from transformers import LlamaConfig, LlamaForCausalLM  # which takes a second

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=97, num_key_value_heads=2, **sizes)
    torch.manual_seed(5)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "theirs", max_shard_size="40KB")
    assert len([*(tmp_path / "theirs").glob("*.safetensors")]) > 1
    found = []
    for workers, plan in ((1, ""), (2, "shard=2")):
        folder = tmp_path / str(workers)
        folder.mkdir()
        paceline("import", tmp_path / "theirs", "run", cwd=folder)
        found.append(train(folder, "llama", workers, plan))
    assert found[0].read_bytes() == found[1].read_bytes()
    paceline("export", "run", "ours", "--max-file", "40KB", cwd=tmp_path / "2")
    assert len([*(tmp_path / "2" / "ours").glob("*.safetensors")]) > 1
    config.save_pretrained(tmp_path / "2" / "ours")
    read, whole = LlamaForCausalLM.from_pretrained(tmp_path / "2" / "ours"), load_file(found[1])
    assert all(torch.equal(tensor, whole[name]) for name, tensor in read.state_dict().items())
