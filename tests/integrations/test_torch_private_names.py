"""The private names of torch that the package uses: each is listed, and each exists in the installed torch; and what is
said of a torch that is newer than any that was tested.
"""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from house_rules import PACKAGE, ROOT, Modules, dotted, of_kinds
from launching import train_basics
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from paceline.comm.torch_private import NAMES, TESTED, PrivateName, untested

HOME = "paceline.comm.torch_private"


def fsdp_state() -> Any:
    """The state that fully_shard() keeps for a module, from a group of one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
        return model._get_fsdp_state()  # type: ignore[attr-defined]
    finally:
        dist.destroy_process_group()


class Subclass(torch.Tensor):
    """Tensors that torch does not turn into instances of nn.Parameter."""


def scheduled() -> tuple[Any, Any, Any]:
    """An optimizer that has stepped, a scheduler of it, and a scheduler that has that one inside."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    inner = [torch.optim.lr_scheduler.ConstantLR(optimizer) for _ in range(2)]
    optimizer.step()
    return optimizer, inner[0], torch.optim.lr_scheduler.SequentialLR(optimizer, inner, [1])


# An instance of each class that has attributes which the class itself lacks, by how a path begins.
INSTANCES: dict[str, Callable[[], Any]] = {
    "torch.autograd.Node()": lambda: torch.ones(1, requires_grad=True).exp().grad_fn,
    "torch._subclasses.fake_tensor.FakeTensorMode()": lambda: torch._subclasses.fake_tensor.FakeTensorMode(),
    "torch.compiler.disable()": lambda: torch.compiler.disable(lambda: None),
    "torch.nn.Module()": nn.Module,
    "torch.nn.Parameter()": lambda: nn.Parameter(torch.ones(1).as_subclass(Subclass)),
    "torch.nn.MultiheadAttention()": lambda: nn.MultiheadAttention(2, 1),
    "torch.nn.utils.parametrizations._SpectralNorm()": lambda: spectral_norm(nn.Linear(2, 2)).parametrizations.weight[
        0
    ],  # type: ignore[union-attr, index]
    "torch.optim.Optimizer()": lambda: scheduled()[0],
    "torch.optim.lr_scheduler.LRScheduler()": lambda: scheduled()[1],
    "torch.optim.lr_scheduler.SequentialLR()": lambda: scheduled()[2],
    "torch.distributed.fsdp.FSDPModule()": fsdp_state,
    "torch.distributed.ProcessGroupGloo._Options()": lambda: dist.ProcessGroupGloo._Options(),  # type: ignore[attr-defined]
    "torch.distributed.ProcessGroupNCCL.Options()": lambda: dist.ProcessGroupNCCL.Options(),
}


def look_up(path: str) -> Any:
    """The object at a path: of modules, of attributes, and of attributes of an instance."""
    start = next((prefix for prefix in INSTANCES if path.startswith(f"{prefix}.")), None)
    if start is not None:
        found, rest = INSTANCES[start](), path[len(start) + 1 :].split(".")
    else:
        parts = path.split(".")
        found, rest = importlib.import_module("torch"), parts[1:]
        for number in range(1, len(parts)):
            try:
                found, rest = importlib.import_module(".".join(parts[: number + 1])), parts[number + 1 :]
            except ImportError:
                break
    for name in rest:
        found = getattr(found, name)
    return found


def missing(names: list[PrivateName], version: str) -> Iterator[str]:
    """A line for each name that should exist in this version of torch, and does not."""
    minor = ".".join(version.split(".")[:2])
    for name in names:
        newest = TESTED[-1] in name.checked and minor not in TESTED
        there = dist.is_nccl_available() or ".ProcessGroupNCCL" not in name.path
        if there and (minor in name.checked or newest):
            try:
                look_up(name.path)
            except (AttributeError, ImportError) as error:
                yield f"torch {version} has no {name.path} ({error}); Paceline uses it for this: {name.purpose}"


def test_private_names_of_torch_exist() -> None:
    assert list(missing(NAMES, torch.__version__)) == []


def test_private_name_that_disappeared_is_named() -> None:
    gone = [PrivateName("torch.Tensor._gone", "see it"), PrivateName("torch._gone.thing", "see it", ("2.12",))]
    assert list(missing(gone, "2.13.1")) == [
        "torch 2.13.1 has no torch.Tensor._gone (type object 'Tensor' has no attribute '_gone'); "
        "Paceline uses it for this: see it"
    ]


# -- what the source touches ----------------------------------------------------------------------------------------

# Private names of others than torch, by whose they are.
OTHERS = {
    "Python": {"_exit", "_getframe", "_current_frames", "_replace", "_fields", "_resource_tracker", "_fd", "_registry"},
    "C": {"_ZSt13set_terminatePFvvE", "__cxa_atexit"},
    "numpy": {"_bit_generator", "_rand"},
    "torchmetrics": {"_reductions", "_defaults", "_filter_kwargs", "_computed", "_to_sync", "_update_count"},
    "transformers": {"_tp_plan"},
    "pyspark": {"_jsc", "_gateway"},
    "the package": {"_last", "_names_of"},
}


def torch_names(tree: ast.Module) -> dict[str, str]:
    """{name in this file: dotted name in torch} of its imports."""
    found = {}
    for node in of_kinds(tree, ast.Import, ast.ImportFrom):
        if isinstance(node, ast.Import):
            found |= {i.asname or "torch": i.name if i.asname else "torch" for i in node.names if i.name[:5] == "torch"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found |= {item.asname or item.name: f"{node.module}.{item.name}" for item in node.names}
    return found


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name != "_"


def defined(tree: ast.Module) -> set[str]:
    """What a file defines or assigns itself: functions, classes, variables, and attributes of `self`."""
    found = set()
    for node in of_kinds(tree, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Name, ast.Attribute):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and dotted(node.value) == "self":
            found.add(node.attr)
    return found


def unlisted_names_of_torch(modules: Modules, names: list[PrivateName]) -> Iterator[str]:
    """A line for each private name that is neither the file's own nor in the list."""
    listed = {name.path.replace("()", "") for name in names}
    leaves = {part for path in listed for part in path.split(".") if is_private(part)}
    leaves |= set().union(*OTHERS.values())
    for module, tree in modules.items():
        if module == HOME or module.startswith("paceline.integrations."):  # those of other libraries: see their tests
            continue
        ours, theirs = defined(tree), torch_names(tree)
        for node in of_kinds(tree, ast.Import, ast.ImportFrom, ast.Attribute, ast.Call):
            used: list[str] = []
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
                used = [f"{node.module}.{item.name}" for item in node.names]
            elif isinstance(node, ast.Import):
                used = [item.name for item in node.names if item.name.split(".")[0] == "torch"]
            elif isinstance(node, ast.Attribute):
                root, _, rest = dotted(node).partition(".")
                if root in theirs:
                    used = [f"{theirs[root]}.{rest}"]
                elif is_private(node.attr) and root not in ("self", "cls"):
                    used = [] if node.attr in ours | leaves else [node.attr]
            elif isinstance(node, ast.Call) and dotted(node.func) in ("getattr", "hasattr", "setattr"):
                name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
                used = [] if name in ours | leaves else [str(name)]
            for path in (one for one in used if any(map(is_private, one.split(".")))):
                if not any(f"{path}.".startswith(f"{p}.") or p.startswith(f"{path}.") for p in listed):
                    yield f"{module}:{node.lineno}: {path} is not in NAMES of {HOME}"  # type: ignore[attr-defined]


# What a file has in its text that uses a private name of others: only such a file is worth its syntax tree.
SUSPECT = re.compile(
    r"(?<!\bself)(?<!\bcls)\.\s*_[^_]|\b(get|has|set)attr\(|\bfrom\s+torch[\w.]*\s+import\s+(\([^)]*\b_|[^(\n]*\b_)"
)


def suspects() -> Modules:
    """The modules of the package that may use a private name of torch."""
    texts = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    return {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): ast.parse(text)
        for path, text in texts.items()
        if SUSPECT.search(text)
    }


def test_private_names_of_torch_are_all_listed() -> None:
    of_datasets = "_ex_iterable"  # of Hugging Face's datasets: how one of its streams reads
    unlisted = [one for one in unlisted_names_of_torch(suspects(), NAMES) if f": {of_datasets} " not in one]
    assert unlisted == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch\ntorch._new(1)", "2: torch._new"),
        ("import torch.distributed as dist\ndist.Work._new", "2: torch.distributed.Work._new"),
        ("from torch._new import this", "1: torch._new.this"),
        ("from torch.nn import _new", "1: torch.nn._new"),
        ("import torch._new", "1: torch._new"),
        ("tensor._new()", "1: _new"),
        ("getattr(tensor, '_new', None)", "1: _new"),
        ("import torch\ntorch._listed\nx._listed\nself._new\nx.__len__", ""),
        ("class A:\n  def _new(self): ...\nA()._new()", ""),
    ],
)
def test_search_for_private_names(source: str, found: str) -> None:
    names = [PrivateName("torch._listed", "test it")]
    assert SUSPECT.search(source) or not found
    lines = [f"paceline.plan:{found} is not in NAMES of {HOME}"] if found else []
    assert list(unlisted_names_of_torch({"paceline.plan": ast.parse(source)}, names)) == lines


# -- the versions ---------------------------------------------------------------------------------------------------


def test_required_torch_versions_are_tested_ones() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    major, minor = map(int, TESTED[-1].split("."))
    assert f"torch>={TESTED[0]},<{major}.{minor + 1}" in project["dependencies"]


@pytest.mark.parametrize("version", ["2.16.0", "2.16.0a0+git1234", "2.16.0.dev20270101+cpu", "3.0.1"])
def test_newer_torch_is_noted(version: str) -> None:
    assert untested(version) == (
        f"torch {version} is newer than 2.15, the newest version that Paceline is tested with; "
        "if something fails, try: pip install 'torch<2.16'"
    )


@pytest.mark.parametrize("version", ["2.13.0+cpu", "2.15.9", "2.9.1", "unknown", torch.__version__])
def test_tested_torch_is_not_noted(version: str) -> None:
    assert untested(version) == ""


def test_run_on_a_newer_torch_has_one_note(tmp_path: Path) -> None:
    body = """
torch.__version__ = "2.16.1"
for number in range(2):
    for _ in make(seed=number).steps(data, count=1): pass
"""
    lines = train_basics(tmp_path, body, 2).stderr.splitlines()
    assert [line.removeprefix("paceline: ") for line in lines if "2.16.1" in line] == [untested("2.16.1")]
