"""Workers that make other models, optimizers or arguments, or the same in another order, end before they train."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from launching import train_basics, without_an_agent
from safetensors.torch import load_file
from torch import nn

from paceline.compute.buffers import buffer, held_in
from paceline.launch.tuning import worker_settings

HEAD = "import json, os\nfrom basics import *\nrank = int(os.environ.get('PACELINE_RANK') or os.environ['RANK'])\n"
CASES = """
odd = rank == 1
def parts(names, width=4):
    return nn.ModuleDict({name: nn.Linear(width, 4) for name in names})
class Buffers(nn.Module):
    def __init__(self, names):
        super().__init__()
        self.head = nn.Linear(4, 4)
        for name in names:
            self.register_buffer(name, torch.zeros(2))
def plain(**options):
    return lambda: make(**options)
def frozen(at):
    model = net()
    model[at].weight.requires_grad_(False)
    return model
def grouped(params):
    one, two = params[:2], params[2:]
    both = [{"params": [p for _, p in one], "lr": 0.1}, {"params": [p for _, p in two], "lr": 0.2 if odd else 0.1}]
    return torch.optim.AdamW(both, weight_decay=0.0)
def moved(params):
    split = 1 if odd else 2
    return [torch.optim.SGD([p for _, p in some], lr=0.1) for some in (params[:split], params[split:])]
def merging(factor, order):
    model = Buffers(["mean", "scale"])
    for name in ["mean", "scale"][::order]:
        paceline.buffer(model, name, merge="affine", factor=factor)
    return model
def trainer(optimizer):
    return lambda: paceline.Trainer(net, cross_entropy, optimizer, 24)
told = {}
for name, begin in {
    "order of submodules": plain(model=lambda: parts(["charge", "spin"][:: -1 if odd else 1])),
    "order of buffers": plain(model=lambda: Buffers(["mean", "scale"][:: -1 if odd else 1])),
    "shape": plain(model=lambda: parts(["charge"], 5 if odd else 4)),
    "dtype": plain(model=lambda: net().float() if odd else net()),
    "frozen": plain(model=lambda: frozen(0 if odd else 2)),
    "one more": plain(model=lambda: parts(["charge", "spin"] if odd else ["charge"])),
    "another activation": plain(model=lambda: nn.Sequential(nn.Linear(10, 2), nn.Tanh() if odd else nn.ReLU())),
    "another dropout": plain(model=lambda: nn.Sequential(nn.Linear(10, 2), nn.Dropout(0.5 if odd else 0.1))),
    "rule of a buffer": plain(model=lambda: merging(0.5 if odd else 0.9, 1)),
    "order of rules": plain(model=lambda: merging(0.9, -1 if odd else 1)),
    "global batch": plain(global_batch=48 if odd else 24),
    "seed": plain(seed=rank),
    "plan": plain(plan="micro=3" if odd else "micro=6"),
    "learning rate": trainer(lambda params: torch.optim.SGD(params, lr=0.3 if odd else 0.1)),
    "learning rate of a group": trainer(grouped),
    "members of optimizers": trainer(moved),
}.items():
    try:
        begin()
    except paceline.errors.WorkersDifferError as error:
        told[name] = str(error)
    else:
        told[name] = "nothing"
if rank == 0:
    json.dump(told, open("told.json", "w"))
t = make()
list(t.steps(data, count=3))
"""
ORDER = "register submodules, parameters and buffers in a fixed order, for example over sorted(...) instead of a set"
SAME = "create the same model on every worker: without ranks and unseeded random numbers"
ARGUMENTS = "pass the same arguments to Trainer on every worker, and create several Trainers in the same order"
GROUPS = "create the same groups with the same options in optimizer= on every worker"
TOLD = {
    "order of submodules": "the model: parameter 0 is spin.weight [4, 4] float32 on worker 1 and "
    f"charge.weight [4, 4] float32 on {{others}}; {ORDER}",
    "order of buffers": "the model: buffer 0 is scale [2] float32 on worker 1 and "
    f"mean [2] float32 on {{others}}; {ORDER}",
    "shape": "the model: parameter 0 is charge.weight [4, 5] float32 on worker 1 and "
    f"charge.weight [4, 4] float32 on {{others}}; {SAME}",
    "dtype": "the model: parameter 0 is 0.weight [16, 10] float32 on worker 1 and "
    f"0.weight [16, 10] float64 on {{others}}; {SAME}",
    "frozen": "the model: parameter 0 is 0.weight [16, 10] float64 (frozen) on worker 1 and "
    f"0.weight [16, 10] float64 on {{others}}; {SAME}",
    "one more": f"the model: parameter 2 is spin.weight [4, 4] float32 on worker 1 and not there on {{others}}; {SAME}",
    "another activation": f"the model: module 1 is 1 Tanh() on worker 1 and 1 ReLU() on {{others}}; {SAME}",
    "another dropout": "the model: module 1 is 1 Dropout(p=0.5, inplace=False) on worker 1 and "
    f"1 Dropout(p=0.1, inplace=False) on {{others}}; {SAME}",
    "rule of a buffer": "the model: buffer 0 is mean [2] float32 merged by affine, factor=0.5, pointer='', dim=0 on "
    f"worker 1 and mean [2] float32 merged by affine, factor=0.9, pointer='', dim=0 on {{others}}; {SAME}",
    "order of rules": "",
    "global batch": f"Trainer(): global_batch=48 on worker 1 and global_batch=24 on {{others}}; {ARGUMENTS}",
    "seed": f"Trainer(): seed=1 on {{later}} and seed=0 on worker 0; {ARGUMENTS}",
    "plan": f"Trainer(): plan='micro=3' on worker 1 and plan='micro=6' on {{others}}; {ARGUMENTS}",
    "learning rate": "the optimizer: group 0 of SGD with lr=0.3 on worker 1 and "
    f"group 0 of SGD with lr=0.1 on {{others}}; {GROUPS}",
    "learning rate of a group": "the optimizer: group 1 of AdamW with lr=0.2 on worker 1 and "
    f"group 1 of AdamW with lr=0.1 on {{others}}; {GROUPS}",
    "members of optimizers": "the optimizer: group 0 of SGD 0 with 0.weight on worker 1 and "
    f"group 0 of SGD 0 with 0.bias on {{others}}; {GROUPS}",
}


@pytest.mark.parametrize("workers", [*(pytest.param(count, marks=pytest.mark.slow) for count in (1, 2)), 3])
def test_workers_with_different_trainers_are_refused_by_the_first_difference(workers: int, tmp_path: Path) -> None:
    train_basics(tmp_path, HEAD.replace("from basics import *\n", "") + CASES, workers)
    told = json.loads((tmp_path / "told.json").read_text())
    if workers == 1:
        assert set(told.values()) == {"nothing"}
        return
    others, later = ("workers 0, 2", "workers 1-2") if workers == 3 else ("worker 0", "worker 1")
    expected = {
        name: f"workers disagree about {text.format(others=others, later=later)}" for name, text in TOLD.items()
    }
    expected["order of rules"] = "nothing"  # which is that of the buffers
    assert told == expected


SWAPPED = """
names = ["teacher", "student"][:: -1 if rank == 1 else 1]
trainers = {name: make(model=lambda: nn.Sequential(nn.Linear(10, 2)).double()) for name in names}
"""
USES = {
    "the first rows of steps()": "list(trainers['teacher'].steps(data, count=1))",
    "step 1 by step()": "trainers['teacher'].step([t[:8] for t in data.tensors])",
    "evaluate()": "trainers['teacher'].evaluate(data, lambda o, b: {'n': (len(o), 1)})",
    "predict()": "list(trainers['teacher'].predict(data))",
    "export()": "trainers['teacher'].export('teacher.safetensors')",
}


@pytest.mark.parametrize(
    "name", [next(iter(USES)), *(pytest.param(name, marks=pytest.mark.slow) for name in [*USES][1:])]
)
def test_trainers_made_in_another_order_are_refused(name: str, tmp_path: Path) -> None:
    stderr = train_basics(tmp_path, HEAD + SWAPPED + USES[name], 2, code=1).stderr
    assert "CollectiveMismatchError: workers called different collectives: worker 0 is in " in stderr
    assert f"worker 1 is in {name} of Trainer 1 at train.py:" in stderr


def test_workers_with_different_models_are_refused_under_torchruns_variables(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        HEAD + CASES.partition("told = {}")[0] + "plain(model=lambda: parts(['a', 'b'][:: -1 if odd else 1]))()"
    )
    for code, stderr in without_an_agent(script, script, cwd=tmp_path):
        assert code == 1
        assert "WorkersDifferError: workers disagree about the model: parameter 0 is b.weight [4, 4] float32" in stderr


SETS = """import json, os, sys
from basics import *
import torch
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict({name: nn.Linear(10, 10, dtype=torch.float64) for name in set(NAMES)})
        for name in set(NAMES):
            nn.init.constant_(self.parts[name].weight, (NAMES.index(name) + 1) / 50)
            self.register_buffer("scale_" + name, torch.full((10,), 1.0 + NAMES.index(name), dtype=torch.float64))
        self.head = nn.Linear(10, 2, dtype=torch.float64)
    def forward(self, x):
        for name in NAMES:
            x = torch.tanh(self.parts[name](x) * getattr(self, "scale_" + name))
        return self.head(x)
NAMES = ["energy", "charge", "dipole", "spin", "mass"]
t = make(model=Net)
list(t.steps(data, count=6))
t.export(os.environ["OUT"])
"""


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "plan"), [(2, ""), (3, ""), (2, "shard=2 zero=3"), (2, "tensor=2")])
def test_sets_of_names_have_one_order_on_all_workers(workers: int, plan: str, tmp_path: Path) -> None:
    weights = []
    for count, said in ((1, ()), (workers, ("--plan", plan) if plan else ())):
        out = tmp_path / f"{count}.safetensors"
        train_basics(tmp_path, SETS, count, "--run-dir", f"out-{count}", "--cold-start", *said, OUT=str(out))
        weights.append(load_file(out))
    apart = torch.cat([(weights[0][name] - weights[1][name]).flatten() for name in weights[0]])
    assert apart.norm() <= 1e-12 * torch.cat([w.flatten() for w in weights[0].values()]).norm()


def test_hash_seed_of_the_user_is_kept() -> None:
    assert worker_settings(1, {}, [0])[0]["PYTHONHASHSEED"] == "0"
    assert "PYTHONHASHSEED" not in worker_settings(1, {"PYTHONHASHSEED": "random"}, [0])[0]


def test_a_joining_worker_with_a_different_model_is_refused(tmp_path: Path) -> None:
    body = """
import os, time
names = ["charge", "spin"][:: -1 if os.environ.get("PACELINE_NEWCOMER") else 1]
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict({name: nn.Linear(10, 10) for name in names}).double()
    def forward(self, x):
        return self.parts["spin"](torch.tanh(self.parts["charge"](x)))[:, :2]
from pathlib import Path
for report in make(model=Net).steps(data, count=400):
    if report.step > 6 and not Path("ended").exists():
        time.sleep(0.05)
        log = Path("out/logs/worker-1.log")
        if log.exists() and "WorkersDifferError" in log.read_text():
            Path("ended").touch()
    if Path("ended").exists():
        break
"""
    done = train_basics(tmp_path, body, 2, "--max-restarts", "1", chaos="kill:1@4.forward")
    assert (
        "WorkersDifferError: workers disagree about the model: parameter 0 is parts.spin.weight [10, 10] float64 on "
        f"worker 1 and parts.charge.weight [10, 10] float64 on the other workers; {ORDER}\n"
    ) in done.stderr
    assert (tmp_path / "ended").exists()


def test_declared_buffers_are_merged_in_registration_order() -> None:
    found = []
    for names in (("mean", "scale"), ("scale", "mean")):
        module = nn.Module()
        for name in ("mean", "scale"):
            module.register_buffer(name, torch.zeros(2))
        for name in names:
            buffer(module, name, merge="mean")
        found.append([held.name for held in held_in([module])])
    assert found == [["mean", "scale"]] * 2
