"""The package keeps the house rules, and each rule finds what breaks it."""

from __future__ import annotations

import ast
import re

import pytest
from house_rules import (
    INDEBTED,
    ORDER,
    RULES,
    Rule,
    broad_excepts,
    classes_of_one_name,
    counted,
    debts,
    denied_names,
    environment_read_elsewhere,
    import_cycles,
    imports_against_the_order,
    imports_of_the_package_itself,
    layouts_of,
    layouts_that_import_layouts,
    long_functions,
    many_parameters,
    many_public_methods,
    members_of_classes,
    missing_captions,
    missing_docstrings,
    modules_outside_of_folders,
    package,
    questions_about_layouts,
    tensors_of_the_default_dtype,
    unpickling,
    violations,
    waits_with_select,
)
from tree_page import PAGE, budgets, page, sizes


def test_package_keeps_house_rules_and_documents_name_members_and_files_that_exist() -> None:
    """Younger rules have counts of older violations, which are exact, so that they shrink with each one that goes.

    One test, because the syntax trees of the package are made once per process.
    """
    broken = violations(package())
    assert {rule: lines for rule, lines in broken.items() if lines and rule not in INDEBTED} == {}
    for rule in sorted(INDEBTED):
        now, recorded = counted(broken[rule]), debts().get(rule, {})
        changed = {name: (recorded.get(name, 0), now.get(name, 0)) for name in {*now, *recorded}}
        changed = {name: counts for name, counts in changed.items() if counts[0] != counts[1]}
        assert not changed, f"{rule}: {changed}; mend what is new, then run python tests/house_rules.py --record"
    assert unknown_names_in_documents() == []
    assert len(layouts_of(package())) > 1, "were the base class renamed, two rules would find nothing to forbid"


def test_house_debts_are_of_indebted_rules() -> None:
    assert {*debts()} <= INDEBTED


# Each rule on snippets that break it, and on the nearest thing that does not.

BODY = "    x = 1\n"
LAYOUTS = {
    "parallel.layout": "class Layout: ...",
    "parallel.rows": "from paceline.parallel.layout import Layout\nclass Rows(Layout): ...\nclass Note: ...",
    "parallel.watch": "class Watch: ...",
    "build": "from paceline.parallel.rows import Rows\nisinstance(x, Rows)",
}
SHARD = "parallel.shard"
BREACHES: list[tuple[Rule, str | dict[str, str], list[str]]] = [
    (long_functions, f"def f():\n{BODY * 80}", ["plan:1: f has 81 lines"]),
    (long_functions, f"async def f():\n{BODY * 80}", ["plan:1: f has 81 lines"]),
    (long_functions, f"def f():\n{BODY * 79}", []),
    (many_parameters, "def f(a, b, c, d, e, /, f, g, h, i, j): ...", ["plan:1: f has 10 parameters"]),
    (many_parameters, "def f(a, b, c, d, e, f, g, *h, i=1, **j): ...", ["plan:1: f has 10 parameters"]),
    (many_parameters, "class C:\n  def f(self, a, b, c, d, e, f, *, g, h, i): ...", []),
    (
        imports_against_the_order,
        {"comm.group": "from paceline.data.order import sample_index"},
        ["comm.group:1: imports paceline.data.order, which stands above it"],
    ),
    (
        imports_against_the_order,
        "def f():\n  import paceline.cli.main",
        ["plan:2: imports paceline.cli.main, which stands above it"],
    ),
    (
        imports_against_the_order,
        "if TYPE_CHECKING:\n  from paceline.comm import group",
        ["plan:2: imports paceline.comm, which stands above it"],
    ),
    (
        imports_against_the_order,
        {"optim": "from paceline.compute.optimizers import LARS", "trainer": "import paceline.optim"},
        ["trainer:1: imports paceline.optim, which stands above it"],
    ),
    (
        imports_against_the_order,
        {"plan": "from paceline.errors import PlanError", "evaluate.sums": "from paceline.data import order"},
        [],
    ),
    (
        modules_outside_of_folders,
        {"attic.box": "", "run": ""},
        ["attic.box:1: is not in one of the folders of ORDER", "run:1: is not in one of the folders of ORDER"],
    ),
    (modules_outside_of_folders, {"plan": "", "comm": "", "comm.gloo": "", "optim": "", "cli": "", "cli.main": ""}, []),
    (
        import_cycles,
        {
            "plan": "from paceline.base.environment import World",
            "base.environment": "def f():\n  from paceline.plan import Plan",
        },
        ["base.environment > paceline.plan > paceline.base.environment"],
    ),
    (
        import_cycles,
        {"comm.a": "from paceline.comm import b, c", "comm.b": "import paceline.comm.a", "comm.c": ""},
        ["comm.a > paceline.comm.b > paceline.comm.a"],
    ),
    (
        import_cycles,
        {
            "plan": "from paceline.base.environment import World",
            "base.environment": "if TYPE_CHECKING:\n  from paceline.plan import Plan",
        },
        [],
    ),
    (imports_of_the_package_itself, "def f():\n  import paceline", ["plan:2: import paceline"]),
    (imports_of_the_package_itself, "from paceline import world", ["plan:1: from paceline import"]),
    (imports_of_the_package_itself, "from . import world", ["plan:1: from . import"]),
    (imports_of_the_package_itself, "from .world import World", ["plan:1: from .world import"]),
    (imports_of_the_package_itself, "from paceline.base.environment import World", []),
    (environment_read_elsewhere, "os.environ['A']\nos.getenv('A')", ["plan:1: environ", "plan:2: getenv"]),
    (environment_read_elsewhere, "from os import environ as e", ["plan:1: environ"]),
    (environment_read_elsewhere, {"base.environment": "os.environ['A']", "plan": "environ = os.getpid()"}, []),
    (broad_excepts, "try: ...\nexcept: ...", ["plan:2: catches everything"]),
    (broad_excepts, "try: ...\nexcept (OSError, Exception): ...", ["plan:2: catches everything"]),
    (broad_excepts, "try: ...\nexcept* builtins.BaseException: ...", ["plan:2: catches everything"]),
    (broad_excepts, "with suppress(Exception): ...", ["plan:1: catches everything"]),
    (broad_excepts, "try: ...\nexcept (OSError, KeyError): ...\nwith suppress(OSError): ...", []),
    (tensors_of_the_default_dtype, "torch.zeros(3)", ["plan:1: torch.zeros without dtype="]),
    (tensors_of_the_default_dtype, "torch.zeros(3, dtype=some)\ntorch.zeros_like(other)", []),
    (questions_about_layouts, LAYOUTS | {"run": "isinstance(x, (int, rows.Rows))"}, ["run:1: asks for Rows"]),
    (questions_about_layouts, LAYOUTS | {"run": "issubclass(x, int | Layout)"}, ["run:1: asks for Layout"]),
    (questions_about_layouts, LAYOUTS | {"run": "match x:\n  case Rows(): ..."}, ["run:2: asks for Rows"]),
    (questions_about_layouts, LAYOUTS | {"run": "isinstance(x, Other | Note)"}, []),
    (
        layouts_that_import_layouts,
        LAYOUTS | {SHARD: "from paceline.parallel.rows import Rows\nclass Shard(Layout): ..."},
        ["parallel.shard:1: imports paceline.parallel.rows"],
    ),
    (
        layouts_that_import_layouts,
        LAYOUTS | {SHARD: "import paceline.build\nclass Shard(Rows): ..."},
        ["parallel.shard:1: imports paceline.build"],
    ),
    (
        layouts_that_import_layouts,
        LAYOUTS | {SHARD: "from paceline.compute.batchnorm import Watch\nclass Shard(Layout): ..."},
        [],
    ),
    (
        many_public_methods,
        "class C:\n" + "".join(f"  def m{number}(self): ...\n" for number in range(16)),
        ["plan:1: C has 16 public methods"],
    ),
    (
        many_public_methods,
        "class C:\n  def _m(self): ...\n  @property\n  def p(self): ...\n"
        + "".join(f"  def m{number}(self): ...\n" for number in range(15)),
        [],
    ),
    (denied_names, "told = 1", ["plan:1: told"]),
    (denied_names, "def mine(_own, *, here=1): ...", ["plan:1: mine", "plan:1: _own", "plan:1: here"]),
    (denied_names, "f(place=1).odd\nimport some as Some", ["plan:1: odd", "plan:2: Some", "plan:1: place"]),
    (denied_names, "class Theirs: ...", ["plan:1: Theirs"]),
    (denied_names, "class A(TypedDict):\n  told: int\njournal.write('x', told=1)", []),
    (denied_names, "class A:\n  told: int\nf(told=1)", ["plan:2: told", "plan:3: told"]),
    (denied_names, "placement = own_rows = 'told'  # mine", []),
    (missing_captions, "'What it is.\\n\\nMore.'", []),
    (missing_captions, "'What it\\nis.'", ["plan:1: the docstring does not begin with a line that is a sentence"]),
    (missing_docstrings, "class _C: ...", ["plan:1: _C has no docstring"]),
    (missing_docstrings, "class C:\n  'A thing.'\n  def f(self): ...", ["plan:3: f has no docstring"]),
    (missing_docstrings, "def f():\n  'what it is'", ["plan:1: the docstring of f does not begin with a sentence"]),
    (
        missing_docstrings,
        "class A:\n  'An owner.'\n  def save(self):\n    'Saves it.'\n"
        "class B(A):\n  'Another one.'\n  def save(self): ...\n  def _hidden(self): ...\n"
        "  @property\n  def size(self):\n    def g(): ...",
        [],
    ),
    (waits_with_select, "select.select([a], [], [])", ["plan:1: select.select"]),
    (waits_with_select, "from select import poll, select", ["plan:1: select.select"]),
    (waits_with_select, "select.poll()\nselectors.DefaultSelector().select()", []),
    (unpickling, "import pickle, json, marshal", ["plan:1: pickle, marshal"]),
    (unpickling, "from pickle import loads", ["plan:1: pickle.loads"]),
    (unpickling, "from torch import load", ["plan:1: torch.load"]),
    (unpickling, "torch.load(path)\ntorch.save(x, path)", ["plan:1: torch.load", "plan:2: torch.save"]),
    (unpickling, "dist.all_gather_object(a, b)", ["plan:1: all_gather_object"]),
    (
        unpickling,
        "from torch.distributed import broadcast_object_list as f",
        ["plan:1: torch.distributed.broadcast_object_list"],
    ),
    (unpickling, "numpy.load(path, allow_pickle=True)", ["plan:1: allow_pickle"]),
    (unpickling, {"checkpoint.sources.torch_file": "torch.load(path, weights_only=True)"}, []),
    (
        unpickling,
        {"checkpoint.sources.torch_file": "torch.load(path, weights_only=x)\nfrom pickle import load"},
        [
            "checkpoint.sources.torch_file:2: pickle.load",
            "checkpoint.sources.torch_file:1: torch.load",
            "checkpoint.sources.torch_file:1: weights_only",
        ],
    ),
    (
        classes_of_one_name,
        {"plan": "class Cost: ...", "mesh": "class Cost: ...\nclass Other: ..."},
        ["mesh:1: Cost is a class of paceline.plan, too"],
    ),
    (unpickling, "torch.load(path, weights_only=False)", ["plan:1: torch.load", "plan:1: weights_only"]),
    (unpickling, "torch.load(path, weights_only=True)\nfrom pickle import UnpicklingError", []),
    (unpickling, "json.load(file)\nctypes.py_object(x)\nsafetensors.torch.load_file(path)", []),
]


@pytest.mark.parametrize(("rule", "snippets", "found"), BREACHES)
def test_house_rule_finds_its_violation(rule: Rule, snippets: str | dict[str, str], found: list[str]) -> None:
    named = {"plan": snippets} if isinstance(snippets, str) else snippets
    modules = {f"paceline.{name}": ast.parse(text) for name, text in named.items()}
    assert list(rule(modules)) == [f"paceline.{line}" for line in found]


def test_every_house_rule_has_a_snippet_that_breaks_it() -> None:
    assert {rule for rule, _, found in BREACHES if found} == set(RULES)


def unknown_names_in_documents() -> list[str]:
    """`Class.member` of a class of the package, and `folder/module.py`."""
    root, members, wrong = PAGE.parent.parent, members_of_classes(package()), list[str]()
    for document in [*root.glob("docs/**/*.md"), root / "README.md", root / "CONTRIBUTING.md"]:
        for quoted in re.findall(r"`([^`\n]+)`", document.read_text()):
            wrong += [
                f"{document.name}: {name}.{member}"
                for name, member in re.findall(r"\b([A-Z]\w+)\.([a-z_]\w*)", quoted)
                if name in members and member not in members[name]
            ]
            if re.fullmatch(r"\w+(/\w+)+\.py", quoted) and quoted != "parallel/NAME.py":
                paths = root / quoted, root / "src" / "paceline" / quoted
                wrong += [] if any(path.exists() for path in paths) else [f"{document.name}: {quoted}"]
    return wrong


def test_source_names_modules_that_exist() -> None:
    """As `forked_worker.py` or `base/text.py`."""
    root = PAGE.parent.parent
    modules = {path.name for folder in ("src", "tests", "benchmarks") for path in (root / folder).rglob("*.py")}
    others = {"train.py", "process.py", "dataloader.py", "version.py"}  # users' files, Python's and torch's
    wrong = [
        f"{path.relative_to(root)}: {name}"
        for path in (root / "src").rglob("*.py")
        for name in re.findall(r"\b[a-z_0-9]+\.py\b", path.read_text())
        if name not in modules | others
    ]
    assert wrong == []


def test_folders_and_root_modules_keep_their_line_budgets() -> None:
    allowed = budgets()
    assert {name: lines for name, lines in sizes().items() if lines > allowed.get(name, 0)} == {}
    assert {*allowed} == {*sizes()}, "docs/tree.md has rows of folders that are gone"


def test_tree_page_shows_the_source_tree() -> None:
    text = PAGE.read_text()
    assert page(text, ORDER) == text, "run python tests/tree_page.py"
    assert "cli/  " in text
