"""The house rules, read from the source: sizes, the direction of imports, and what may not be done anywhere.

Each rule takes the modules of the package, {dotted name: syntax tree}, and yields one line per violation. The last
part of this file feeds every rule a snippet that breaks it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "paceline"
# A file has no limit of its own: code is split by concept. A commit that raises the package's limit says why.
ALLOWED = {"paceline.trainer.__init__": 13}  # parameters: of the Trainer's, the last takes what is none of them
MOST_LINES, MOST_IN_FUNCTION, MOST_PARAMETERS = 53_700, 80, 9

# A room may import those of its own row and of the rows above.
ROWS = [
    {
        "console",
        "plan",
        "mesh",
        "pieces",
        "errors",
        "world",
        "greeting",
        "polling",
        "pulse",
        "flight",
        "step",
        "schema",
        "forms",
    },
    {"comm"},
    {"strategies"},
    {"data", "checkpoint", "team", "observe"},
    {
        *{
            "run",
            "saving",
            "stepping",
            "portions",
            "inner",
            "islands",
            "lateness",
            "fragments",
            "rounds",
            "backed",
            "dealing",
            "holding",
            "served",
            "serving",
            "tickets",
            "loops",
            "ended",
            "arguments",
            "hints",
            "agreement",
            "descriptions",
            "script",
            "telling",
        },
        *{"evaluate", "predict", "metrics", "best", "following", "schedules", "optim"},
    },
    {"trainer"},
    {"planner"},
    {"launch"},
    {"cli", "cli_runs", "__main__"},
]
# They run code that they read, or carry objects that do.
UNPICKLERS = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
UNPICKLING_CALLS = {"torch.load", "torch.save"}
OBJECT_COLLECTIVES = {"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"}
OBJECT_COLLECTIVES |= {"send_object_list", "recv_object_list", "_object_to_tensor", "_tensor_to_object"}

Modules = dict[str, ast.Module]
Rule = Callable[[Modules], Iterator[str]]


@cache
def walk(tree: ast.AST) -> list[ast.AST]:
    """All nodes of a file, which each rule goes through."""
    return [*ast.walk(tree)]


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from (node for node in walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of an attribute or a name, else an empty text."""
    if isinstance(node, ast.Attribute):
        head = dotted(node.value)
        return f"{head}.{node.attr}" if head else ""
    return node.id if isinstance(node, ast.Name) else ""


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def imports(tree: ast.AST, modules: Modules, runtime: bool) -> Iterator[tuple[int, str]]:
    """(line, module of the package) of each import, those under TYPE_CHECKING left out with `runtime`."""
    for node in ast.iter_child_nodes(tree):
        if runtime and isinstance(node, ast.If) and dotted(node.test).endswith("TYPE_CHECKING"):
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, item.name) for item in node.names if item.name.startswith("paceline."))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("paceline."):
            inner = {f"{node.module}.{item.name}" for item in node.names}
            yield from ((node.lineno, name) for name in sorted(inner & set(modules)))
            if inner - set(modules):
                yield node.lineno, str(node.module)
        else:
            yield from imports(node, modules, runtime)


def long_functions(modules: Modules) -> Iterator[str]:
    for name, tree in modules.items():
        for node in functions(tree):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines > MOST_IN_FUNCTION:
                yield f"{name}:{node.lineno}: {node.name} has {lines} lines"


def many_parameters(modules: Modules) -> Iterator[str]:
    for name, tree in modules.items():
        for node in functions(tree):
            args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            args += [arg for arg in (node.args.vararg, node.args.kwarg) if arg]
            count = len(args) - bool(args and args[0].arg in ("self", "cls"))
            if count > ALLOWED.get(f"{name}.{node.name}", MOST_PARAMETERS):
                yield f"{name}:{node.lineno}: {node.name} has {count} parameters"


def imports_against_the_direction(modules: Modules) -> Iterator[str]:
    row_of = {name: number for number, row in enumerate(ROWS) for name in row}
    for name, tree in modules.items():
        if name == "paceline":
            continue
        if room(name) not in row_of:
            yield f"{name}: the room {room(name)!r} has no place in ROWS"
            continue
        for line, target in imports(tree, modules, runtime=False):
            if row_of.get(room(target), len(ROWS)) > row_of[room(name)]:
                yield f"{name}:{line}: imports {target}, which stands above it"


def import_cycles(modules: Modules) -> Iterator[str]:
    graph = {name: {to for _, to in imports(tree, modules, runtime=True)} for name, tree in modules.items()}
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> Iterator[str]:
        if name in path:
            yield " > ".join([*path[path.index(name) :], name])
        elif name not in done:
            for target in sorted(graph.get(name, ())):
                yield from visit(target, [*path, name])
            done.add(name)

    for name in sorted(graph):
        yield from visit(name, [])


def imports_of_the_package_itself(modules: Modules) -> Iterator[str]:
    """``import paceline`` runs into a half-initialised package; relative imports would hide from these rules."""
    for name, tree in modules.items():
        for node in walk(tree):
            if isinstance(node, ast.Import) and any(item.name == "paceline" for item in node.names):
                yield f"{name}:{node.lineno}: import paceline"
            if isinstance(node, ast.ImportFrom) and (node.level or node.module == "paceline"):
                yield f"{name}:{node.lineno}: from {'.' * node.level}{node.module or ''} import"


def environment_outside_world(modules: Modules) -> Iterator[str]:
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    for name, tree in modules.items():
        for node in walk(tree) if name != "paceline.world" else ():
            used = {node.attr} if isinstance(node, ast.Attribute) else set()
            if isinstance(node, ast.ImportFrom) and node.module in ("os", "posix"):
                used = {item.name for item in node.names}
            if used & names:
                yield f"{name}:{node.lineno}: {', '.join(used & names)}"  # type: ignore[attr-defined]


def tensors_of_the_default_dtype(modules: Modules) -> Iterator[str]:
    """A script may set another default dtype than float32."""
    made = {f"torch.{kind}" for kind in ("empty", "zeros", "ones", "full", "tensor", "arange", "linspace", "eye")}
    made |= {"torch.rand", "torch.randn", "torch.normal", "torch.scalar_tensor"}
    for name, tree in modules.items():
        for node in walk(tree):
            called = dotted(node.func) if isinstance(node, ast.Call) else ""
            if called in made and all(word.arg != "dtype" for word in node.keywords):  # type: ignore[attr-defined]
                yield f"{name}:{node.lineno}: {called} without dtype="  # type: ignore[attr-defined]


def broad_excepts(modules: Modules) -> Iterator[str]:
    for name, tree in modules.items():
        for node in walk(tree):
            kinds: list[ast.AST | None] = []
            if isinstance(node, ast.ExceptHandler):
                kinds = [*node.type.elts] if isinstance(node.type, ast.Tuple) else [node.type]
            elif isinstance(node, ast.Call) and dotted(node.func) in ("suppress", "contextlib.suppress"):
                kinds = [*node.args]
            if any(kind is None or dotted(kind).split(".")[-1] in ("Exception", "BaseException") for kind in kinds):
                yield f"{name}:{node.lineno}: catches everything"  # type: ignore[attr-defined]


def layouts_of(modules: Modules) -> dict[str, str]:
    """{class: module} of the layouts: `Layout`, and all that derive from it."""
    bases, homes = {}, {}
    for name, tree in modules.items():
        for node in tree.body if room(name) == "strategies" else ():
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {dotted(base).split(".")[-1] for base in node.bases}
                homes[node.name] = name
    found = {"Layout"}
    while more := {kind for kind, of in bases.items() if of & found} - found:
        found |= more
    return {kind: homes[kind] for kind in found if kind in homes}


def questions_about_layouts(modules: Modules) -> Iterator[str]:
    concrete = layouts_of(modules)
    for name, tree in modules.items():
        for node in walk(tree) if name != "paceline.strategies.nest" else ():
            asked: list[ast.AST] = []
            if isinstance(node, ast.Call) and dotted(node.func) in ("isinstance", "issubclass"):
                asked = [part for argument in node.args[1:] for part in ast.walk(argument)]
            elif isinstance(node, ast.MatchClass):
                asked = [node.cls]
            kinds = {dotted(part).split(".")[-1] for part in asked} & set(concrete)
            if kinds:
                yield f"{name}:{node.lineno}: asks for {', '.join(sorted(kinds))}"  # type: ignore[attr-defined]


def layouts_that_import_layouts(modules: Modules) -> Iterator[str]:
    homes = set(layouts_of(modules).values()) - {"paceline.strategies.layout"}
    for name in homes:
        for line, target in imports(modules[name], modules, runtime=False):
            if target != name and target in homes | {"paceline.strategies.nest"}:
                yield f"{name}:{line}: imports {target}"


def unpickling(modules: Modules) -> Iterator[str]:
    for name, tree in modules.items():
        for node in walk(tree) if name != "paceline.launch.function" else ():  # a function that its caller sends
            used: list[str] = []
            if isinstance(node, ast.Import):
                used = [item.name for item in node.names if item.name.split(".")[0] in UNPICKLERS]
            elif isinstance(node, ast.ImportFrom):
                whole = [f"{node.module}.{item.name}" for item in node.names]
                used = [text for text in whole if text.split(".")[0] in UNPICKLERS or text in UNPICKLING_CALLS]
                used += [text for text in whole if text.split(".")[-1] in OBJECT_COLLECTIVES]
            elif isinstance(node, ast.Attribute):
                used = [text for text in [dotted(node)] if text in UNPICKLING_CALLS]
                used += [node.attr] if node.attr in OBJECT_COLLECTIVES else []
            elif isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "weights_only"):
                used = [node.arg]
            if used:
                yield f"{name}:{node.lineno}: {', '.join(used)}"  # type: ignore[attr-defined]


def classes_of_one_name(modules: Modules) -> Iterator[str]:
    found: dict[str, str] = {}
    for name, tree in modules.items():
        for node in (node for node in walk(tree) if isinstance(node, ast.ClassDef)):
            if node.name in found:
                yield f"{name}:{node.lineno}: {node.name} is a class of {found[node.name]}, too"
            found.setdefault(node.name, name)


def missing_captions(tree: str, package: Path) -> Iterator[str]:
    """Every room, a folder or a module at the top of the package, has its line in docs/tree.md."""
    for path in sorted(package.iterdir()):
        text = f"{path.name}/" if path.is_dir() else path.name
        if path.name in ("__pycache__", "__init__.py", "py.typed") or path.name.startswith("."):
            continue
        if not any(line.split("#")[0].strip(" │├└─").startswith(text) for line in tree.splitlines()):
            yield f"docs/tree.md: no line begins with {text}"


def waits_with_select(modules: Modules) -> Iterator[str]:
    """`select` takes no file descriptor from 1024 on; `paceline.polling` takes them all."""
    for name, tree in modules.items():
        for node in walk(tree):
            taken = isinstance(node, ast.ImportFrom) and node.module == "select"
            if dotted(node) == "select.select" or (taken and "select" in {item.name for item in node.names}):  # type: ignore[attr-defined]
                yield f"{name}:{node.lineno}: select.select"  # type: ignore[attr-defined]


RULES: list[Rule] = [
    long_functions,
    many_parameters,
    imports_against_the_direction,
    import_cycles,
    imports_of_the_package_itself,
    environment_outside_world,
    tensors_of_the_default_dtype,
    broad_excepts,
    questions_about_layouts,
    layouts_that_import_layouts,
    unpickling,
    classes_of_one_name,
    waits_with_select,
]


@cache
def package() -> Modules:
    modules = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text())
    return modules


def source_files() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*")) if path.is_file() and "__pycache__" not in path.parts]


def test_the_source_is_readable_in_a_weekend() -> None:
    lines = {path: len(path.read_text().splitlines()) for path in source_files()}
    assert sum(lines.values()) <= MOST_LINES


def test_the_package_keeps_the_rules() -> None:
    """All in one test: each process of tests that has one reads the whole package first."""
    broken = {rule.__name__: [*rule(package())] for rule in RULES}
    assert {name: found for name, found in broken.items() if found} == {}
    assert len(layouts_of(package())) > 1, "were the base class renamed, two rules would find nothing to forbid"


def test_the_readme_shows_every_room() -> None:
    assert list(missing_captions((ROOT / "docs" / "tree.md").read_text(), PACKAGE)) == []


# Each rule on snippets that break it, and on the nearest thing that does not.

BODY = "    x = 1\n"
LAYOUTS = {
    "strategies.layout": "class Layout: ...",
    "strategies.rows": "from paceline.strategies.layout import Layout\nclass Rows(Layout): ...\nclass Note: ...",
    "strategies.watch": "class Watch: ...",
    "strategies.nest": "from paceline.strategies.rows import Rows\nisinstance(x, Rows)",
}
SHARD = "strategies.shard"
BREACHES: list[tuple[Rule, str | dict[str, str], list[str]]] = [
    (long_functions, f"def f():\n{BODY * 80}", ["plan:1: f has 81 lines"]),
    (long_functions, f"async def f():\n{BODY * 80}", ["plan:1: f has 81 lines"]),
    (long_functions, f"def f():\n{BODY * 79}", []),
    (many_parameters, "def f(a, b, c, d, e, /, f, g, h, i, j): ...", ["plan:1: f has 10 parameters"]),
    (many_parameters, "def f(a, b, c, d, e, f, g, *h, i=1, **j): ...", ["plan:1: f has 10 parameters"]),
    (many_parameters, "class C:\n  def f(self, a, b, c, d, e, f, *, g, h, i): ...", []),
    (
        imports_against_the_direction,
        {"comm.group": "from paceline.data.order import sample_index"},
        ["comm.group:1: imports paceline.data.order, which stands above it"],
    ),
    (
        imports_against_the_direction,
        "def f():\n  import paceline.cli",
        ["plan:2: imports paceline.cli, which stands above it"],
    ),
    (
        imports_against_the_direction,
        "if TYPE_CHECKING:\n  from paceline.comm import group",
        ["plan:2: imports paceline.comm, which stands above it"],
    ),
    (
        imports_against_the_direction,
        {"attic.box": "", "plan": "import paceline.attic.box"},
        [
            "attic.box: the room 'attic' has no place in ROWS",
            "plan:1: imports paceline.attic.box, which stands above it",
        ],
    ),
    (
        imports_against_the_direction,
        {"plan": "from paceline.errors import PlanError", "run": "from paceline.data import order"},
        [],
    ),
    (
        import_cycles,
        {"plan": "from paceline.world import World", "world": "def f():\n  from paceline.plan import Plan"},
        ["plan > paceline.world > paceline.plan"],
    ),
    (
        import_cycles,
        {"comm.a": "from paceline.comm import b, c", "comm.b": "import paceline.comm.a", "comm.c": ""},
        ["comm.a > paceline.comm.b > paceline.comm.a"],
    ),
    (
        import_cycles,
        {"plan": "from paceline.world import World", "world": "if TYPE_CHECKING:\n  from paceline.plan import Plan"},
        [],
    ),
    (imports_of_the_package_itself, "def f():\n  import paceline", ["plan:2: import paceline"]),
    (imports_of_the_package_itself, "from paceline import world", ["plan:1: from paceline import"]),
    (imports_of_the_package_itself, "from . import world", ["plan:1: from . import"]),
    (imports_of_the_package_itself, "from .world import World", ["plan:1: from .world import"]),
    (imports_of_the_package_itself, "from paceline.world import World", []),
    (environment_outside_world, "os.environ['A']\nos.getenv('A')", ["plan:1: environ", "plan:2: getenv"]),
    (environment_outside_world, "from os import environ as e", ["plan:1: environ"]),
    (environment_outside_world, {"world": "os.environ['A']", "plan": "environ = os.getpid()"}, []),
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
        LAYOUTS | {SHARD: "from paceline.strategies.rows import Rows\nclass Shard(Layout): ..."},
        ["strategies.shard:1: imports paceline.strategies.rows"],
    ),
    (
        layouts_that_import_layouts,
        LAYOUTS | {SHARD: "import paceline.strategies.nest\nclass Shard(Rows): ..."},
        ["strategies.shard:1: imports paceline.strategies.nest"],
    ),
    (
        layouts_that_import_layouts,
        LAYOUTS | {SHARD: "from paceline.strategies.side_effects import Watch\nclass Shard(Layout): ..."},
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
    (
        classes_of_one_name,
        {"plan": "class Cost: ...", "mesh": "class Cost: ...\nclass Other: ..."},
        ["mesh:1: Cost is a class of paceline.plan, too"],
    ),
    (unpickling, "json.load(file)\nctypes.py_object(x)\nsafetensors.torch.load_file(path)", []),
]


@pytest.mark.parametrize(("rule", "snippets", "found"), BREACHES)
def test_the_rule_finds_what_breaks_it(rule: Rule, snippets: str | dict[str, str], found: list[str]) -> None:
    named = {"plan": snippets} if isinstance(snippets, str) else snippets
    modules = {f"paceline.{name}": ast.parse(text) for name, text in named.items()}
    assert list(rule(modules)) == [f"paceline.{line}" for line in found]


def test_every_rule_is_shown_to_find_something() -> None:
    assert {rule for rule, _, found in BREACHES if found} == set(RULES)


def test_a_room_without_a_caption_is_found(tmp_path: Path) -> None:
    for name in ("plan.py", "__init__.py", "py.typed"):
        (tmp_path / name).touch()
    for name in ("comm", "data", "__pycache__"):
        (tmp_path / name).mkdir()
    tree = "src/paceline/\n  plan.py   the plan; comm/ is not named by this\n├── data/  which samples\n"
    assert list(missing_captions(tree, tmp_path)) == ["docs/tree.md: no line begins with comm/"]
