"""The code blocks of docs/recipes.md as they stand, on several workers, beside plain PyTorch written by hand."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from basics import data, net
from by_hand import built, grid
from doc_pages import python_blocks
from launching import METRICS, equal_bytes, train_basics
from oracle import apart
from paths import DOCS
from safetensors.torch import load_file
from torch import nn

from paceline import sample_index, stream_seed
from paceline.team.fault_injection import read_log

PAGE = DOCS / "recipes.md"
BEFORE = """
from functools import partial
Net = net
def first(output, batch):
    return F.cross_entropy(output, batch[1])
def second(output, batch):
    return F.cross_entropy(output, (batch[0][:, 0] < 0).long())
"""
STEPS = 12  # of each recipe
Tensors = dict[str, torch.Tensor]
UNEQUAL = {2: "3,1", 3: "1,0,2", 5: "3,1,1,2,1"}


def code_block(title: str) -> str:
    """The code block below a heading."""
    _, section = PAGE.read_text().split(f"\n### {title}\n")
    return python_blocks(section)[0]


def whole_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [tuple(batch) for (batch,) in grid(data, 24, 24, epochs=3)]


def noisy() -> Tensors:
    model = built(net)
    update = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step, (x, y) in enumerate(whole_batches()):
        update.zero_grad()
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for number, param in enumerate(model.parameters()):
            torch.manual_seed(stream_seed(7, step, number))
            param.grad += torch.randn(param.shape, dtype=param.dtype) * (0.01 / (1 + step) ** 0.55) ** 0.5
        update.step()
    return dict(model.state_dict())


def operated() -> Tensors:
    """Algorithm 1 of the paper, of two losses, on flat gradients of one network."""
    model, momentum, against = built(net), 0.0, 0
    params = list(model.parameters())
    for x, y in whole_batches():
        losses = F.cross_entropy(model(x), y), F.cross_entropy(model(x), (x[:, 0] < 0).long())
        g, h = (torch.cat([part.flatten() for part in torch.autograd.grad(loss, params)]) for loss in losses)
        against += int(g @ h < 0)
        mine, its = (a - (a @ b) / (b @ b) * b if a @ b < 0 else a for a, b in ((g, h), (h, g)))
        momentum = 0.9 * momentum + mine + its
        with torch.no_grad():
            nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(params) - 0.1 * momentum, params)
    assert against > 1  # else there was no surgery
    one, other = ({f"{copy}.{name}": value for name, value in model.state_dict().items()} for copy in ("one", "other"))
    return one | other


def towers() -> Tensors:
    made: dict[str, Any] = {"net": net}
    exec(code_block("Two towers").split("trainer =")[0], made)
    model = built(lambda: made["Towers"]().double())
    made["trainer"], update = SimpleNamespace(model=model), torch.optim.AdamW(model.parameters(), lr=0.01)
    for x, _ in whole_batches():
        update.zero_grad()
        made["clip"](model(x), None).backward()
        update.step()
    return dict(model.state_dict())


def scaled() -> Tensors:
    model = built(net)
    update = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (x, y) in enumerate(whole_batches()):
        update.zero_grad()
        F.cross_entropy(model(x * (1 - 0.8 ** (1 + step))), y).backward()
        update.step()
    return dict(model.state_dict())


def staged(
    model: nn.Module,
    loops: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]],
    batch: int,
) -> Tensors:
    """Four steps of SGD for each loop, over batches of its rows; each loop begins with a new epoch."""
    update, epoch = torch.optim.SGD(model.parameters(), lr=0.1), 0
    for rows in loops:
        begun = 0
        for step in range(4):
            each = len(rows) // batch  # steps of an epoch
            begun, position = step // each + 1, step % each * batch
            numbers = [sample_index(position + i, len(rows), 0, epoch + step // each) for i in range(batch)]
            x, y = (torch.cat(parts) for parts in zip(*(rows[number] for number in numbers), strict=True))
            update.zero_grad()
            F.cross_entropy(model(x), y).backward()
            update.step()
        epoch += begun
    return dict(model.state_dict())


def singles(rows: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(x[None], y[None]) for x, y in rows]


def growing_batch() -> Tensors:
    x, y = data.tensors
    stacks = [[(x[row :: 96 // size], y[row :: 96 // size]) for row in range(96 // size)] for size in (1, 2, 4)]
    assert [len(one) for one, _ in (rows[0] for rows in stacks)] == [1, 2, 4]
    return staged(built(net), stacks, 6)


def growing_sequences() -> Tensors:
    made: dict[str, Any] = {"torch": torch}
    exec(code_block("Growing sequences").split("trainer =")[0], made)
    return staged(built(made["Reader"]), [singles((x[:length], y) for x, y in data) for length in (2, 5, 10)], 24)


def from_easy() -> Tensors:
    order = sorted(range(96), key=lambda row: float(data[row][0].abs().max()))
    return staged(built(net), [singles(data[row] for row in order[:count]) for count in (24, 48, 96)], 24)


def plain() -> Tensors:
    return staged(built(net), [singles(data)] * 3, 24)


RECIPES: dict[str, Callable[[], Tensors]] = {
    "A curriculum": scaled,
    "A growing batch": growing_batch,
    "Growing sequences": growing_sequences,
    "From easy to difficult rows": from_easy,
    "Two towers": towers,
    "Norms of layers": plain,
    "Gradient noise": noisy,
    "Gradient surgery": operated,
}
UNEQUAL_RUNS = [pytest.param(workers, marks=[] if workers == 3 else pytest.mark.slow) for workers in (1, 2, 3, 5)]


@pytest.mark.parametrize("workers", UNEQUAL_RUNS)
def test_recipes_give_the_weights_of_plain_pytorch_after_kills(workers: int, tmp_path: Path) -> None:
    """One script trains by one recipe after the other, on unequal shares; in each recipe a worker is killed."""
    script, kills = BEFORE + "trainers = []\n", []
    for number, title in enumerate(RECIPES):
        script += code_block(title) + "trainers.append(trainer)\n"
        kills.append(f"kill:{number % workers}@{STEPS * number + 5}.backward")
    script += "for number, trainer in enumerate(trainers): trainer.export(f'{number}.safetensors')\n"
    several = workers > 1
    shares = ["--shares", UNEQUAL[workers]] if several else []
    train_basics(tmp_path, script, workers, *shares, chaos=",".join(kills) if several else "")
    if several:
        assert [entry["fault"] for entry in read_log(tmp_path / "out")] == kills
    for number, by_hand in enumerate(RECIPES.values()):
        trained = load_file(tmp_path / f"{number}.safetensors")
        assert apart(trained, by_hand()) <= 1e-12
        for name, value in trained.items():
            assert value.equal(trained[name.replace("one.", "other.")])  # the copies of gradient surgery


@pytest.mark.slow
@pytest.mark.parametrize("title", RECIPES)
def test_recipe_has_equal_bytes_with_exact(title: str, tmp_path: Path) -> None:
    equal_bytes(tmp_path, BEFORE + code_block(title) + "trainer.export('out.safetensors')\n", 3, "")


# ---- on `trainer.state`, and beside training

BLOCKS = python_blocks(PAGE.read_text().partition("\n## Gradients\n")[0])
STATE = """
heldout = torch.utils.data.Subset(data, range(45))
trainer = paceline.Trainer(
    net, cross_entropy, lambda params: torch.optim.SGD(params, lr=1.0), global_batch=24, plan="exact micro=8"
)
"""
OTHERS = (
    BEFORE
    + STATE
    + """
import functools
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
loss = cross_entropy
def optimizer(params):
    return torch.optim.SGD(params, lr=0.1)
def accuracy(output, batch):
    return {"accuracy": ((output.argmax(1) == batch[1]).sum(), len(output))}
def training_rows(fold):
    return torch.utils.data.Subset(data, [row for row in range(96) if row % 7 != fold])
def heldout_rows(fold):
    return torch.utils.data.Subset(data, range(fold, 96, 7))
"""
)
(STOPPING,) = (block for block in BLOCKS if "AveragedModel" in block)
ENDED = """
from safetensors.torch import save_file
save_file({name: tensor.contiguous() for name, tensor in mean.module.state_dict().items()}, "mean.safetensors")
trainer.export("end.safetensors")
print("stopped", trainer.steps_done, trainer.stopping.since, trainer.complete)
"""


@pytest.mark.slow
def test_recipes_of_evaluate_predict_state_and_schedule_run(tmp_path: Path) -> None:
    others = [block for block in BLOCKS if block != STOPPING]
    assert len(others) == 15
    done = train_basics(tmp_path, OTHERS + "\n".join(others), 2, **METRICS)
    assert "rows 0 to 7: [" in done.stdout
    assert (tmp_path / "outputs.safetensors").exists()


def test_recipe_early_stopping_and_averaged_model_survive_kill_and_resume(tmp_path: Path) -> None:
    """Through the loss of a worker, and a resume with another number of them."""
    whole, lost = tmp_path / "whole", tmp_path / "lost"
    whole.mkdir()
    lost.mkdir()
    undisturbed = train_basics(whole, STATE + STOPPING + ENDED, 1).stdout
    train_basics(lost, STATE + STOPPING + ENDED, 3, "--steps", "9", chaos="kill:1@5.backward")
    again = train_basics(lost, STATE + STOPPING + ENDED, 2).stdout
    ends = [re.findall(r"stopped (\d+) 3 True", text) for text in (undisturbed, again)]
    assert ends[0] == ends[1] == ["60"], "of 80 steps"
    for name in ("mean.safetensors", "end.safetensors"):
        one, other = load_file(whole / name), load_file(lost / name)
        assert all(tensor.equal(other[key]) for key, tensor in one.items()), name
    assert not load_file(whole / "mean.safetensors")["0.weight"].equal(load_file(whole / "end.safetensors")["0.weight"])


def test_recipes_are_no_wider_than_120_characters() -> None:
    assert max(len(line) for block in BLOCKS for line in block.splitlines()) <= 120
