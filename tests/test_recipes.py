"""The recipes of the documentation, as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launching import train_basics
from safetensors.torch import load_file

RECIPES = (Path(__file__).parent.parent / "docs" / "recipes.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", RECIPES, re.M | re.S)
BEFORE = """
heldout = torch.utils.data.Subset(data, range(45))
trainer = make(plan="exact micro=3")
"""
(STOPPING,) = (block for block in BLOCKS if "AveragedModel" in block)
AFTER = """
from safetensors.torch import save_file
save_file({name: tensor.contiguous() for name, tensor in mean.module.state_dict().items()}, "mean.safetensors")
trainer.export("end.safetensors")
print("stopped", trainer.steps_done, trainer.state["waited"], trainer.complete)
"""


def test_every_other_recipe_runs(tmp_path: Path) -> None:
    others = [block for block in BLOCKS if block != STOPPING]
    assert len(others) == 5
    done = train_basics(tmp_path, BEFORE + "\n".join(others), 2)
    assert "rows 0 to 2: [" in done.stdout
    assert (tmp_path / "outputs.safetensors").exists()


def test_early_stopping_and_a_mean_are_those_of_one_undisturbed_process(tmp_path: Path) -> None:
    """Through the loss of a worker, and a resume with another number of them."""
    whole, lost = tmp_path / "whole", tmp_path / "lost"
    whole.mkdir()
    lost.mkdir()
    alone = train_basics(whole, BEFORE + STOPPING + AFTER, 1).stdout
    train_basics(lost, BEFORE + STOPPING + AFTER, 3, "--steps", "9", chaos="kill:1@5.backward")
    again = train_basics(lost, BEFORE + STOPPING + AFTER, 2).stdout
    told = [re.search(r"stopped \d+ 3 True", text) for text in (alone, again)]
    assert told[0] is not None
    assert told[1] is not None
    assert told[0][0] == told[1][0]
    for name in ("mean.safetensors", "end.safetensors"):
        one, other = load_file(whole / name), load_file(lost / name)
        assert all(tensor.equal(other[key]) for key, tensor in one.items()), name
    assert not load_file(whole / "mean.safetensors")["0.weight"].equal(load_file(whole / "end.safetensors")["0.weight"])


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_recipes_fit_the_page(block: str) -> None:
    assert max(map(len, block.splitlines())) <= 120
