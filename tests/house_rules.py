"""The house rules, read from the source: the order of folders, sizes, names, docstrings, and what is forbidden.

Each rule takes the modules of the package, {dotted name: syntax tree}, and yields one line per violation. Violations
that are older than their rule are counted per module in `house_debts.json`. The counts can only shrink: a module that
has fewer violations than its count fails the test, too, until the new count is written:

    python tests/house_rules.py            # print all violations of modules, by rule
    python tests/house_rules.py --record   # write the counts
"""

from __future__ import annotations

import ast
import gc
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "paceline"
DEBTS = Path(__file__).with_name("house_debts.json")

# A file has no line limit of its own: code is split by concept.
MOST_IN_FUNCTION, MOST_PARAMETERS, MOST_PUBLIC_METHODS = 80, 9, 15
PARAMETERS = {
    "paceline.trainer.__init__": 13,  # Trainer's last parameter collects unknown names
    "paceline.integrations.horovod.optimizer.DistributedOptimizer": 10,  # Horovod's signature
}

# Root modules and folders, from the bottom to the top: each may import those before it. Imports under TYPE_CHECKING
# and inside of functions count.
ORDER = [
    "errors",
    "base",
    "plan",
    "comm",
    "compute",
    "checkpoint",
    "parallel",
    "data",
    "team",
    "observe",
    "session",
    "train",
    "local_sgd",
    "param_server",
    "evaluate",
    "build",
    "planner",
    "trainer",
    "integrations",
    "launch",
    "cli",
    "__main__",
]
ROOT_MODULES = {"errors", "plan", "build", "trainer", "__main__"}
# Public import paths: packages that only import names from elsewhere. Nothing of the package imports them.
PUBLIC_PACKAGES = {"optim", "hf", "keras", "lightning", "horovod"}

ENVIRONMENT = "paceline.base.environment"  # the only reader of environment variables
BUILD = "paceline.build"  # the only module that asks for concrete layouts
LAYOUT, LAYOUTS = "paceline.parallel.layout", {"parallel"}  # the base class, and where its kinds are

# Pronouns, adjectives, participles and words with several meanings, which say nothing as names.
DENIED_NAMES = {
    *("told", "said", "heard", "found", "place", "lead", "spread", "odd", "blank", "whole"),
    *("some", "mine", "ours", "theirs", "own", "here", "there"),
}
# Classes whose methods are a list that others have made.
INTERFACES = {
    "paceline.trainer.Trainer",  # the public interface
    "paceline.comm.c10d_backend.ProcessGroup",  # torch's ProcessGroup
    "paceline.comm.communicator.Group",  # a method for each collective
    "paceline.comm.transport.Transport",  # the same
}

TYPED_DICTS = {"TypedDict", "Journaled"}  # their fields are keys, as are the keywords of:
EVENT_WRITERS = {"write", "tell"}  # journal.write(event, key=...), world.tell(event, key=...)

# They run code that they read, or carry objects that do.
UNPICKLERS = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
UNPICKLING_CALLS = {"torch.load", "torch.save"}
OBJECT_COLLECTIVES = {"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"}
OBJECT_COLLECTIVES |= {"send_object_list", "recv_object_list", "_object_to_tensor", "_tensor_to_object"}

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
PROPERTIES = {"property", "cached_property", "setter", "deleter", "overload"}
NAME_FIELDS: dict[type[ast.AST], tuple[str, ...]] = {
    ast.Name: ("id",),
    ast.Attribute: ("attr",),
    ast.arg: ("arg",),
    ast.keyword: ("arg",),
    ast.FunctionDef: ("name",),
    ast.AsyncFunctionDef: ("name",),
    ast.ClassDef: ("name",),
    ast.alias: ("asname",),
    ast.ExceptHandler: ("name",),
    ast.MatchAs: ("name",),
}
FIRST_SENTENCE = re.compile(r"[A-Z`\"(].*?[.:!?)](\s|$)", re.DOTALL)

Modules = dict[str, ast.Module]
Rule = Callable[[Modules], Iterator[str]]
Node = TypeVar("Node", bound=ast.AST)


@cache
def walk(tree: ast.AST) -> list[ast.AST]:
    """All nodes of a file."""
    return [*ast.walk(tree)]


@cache
def _by_kind(tree: ast.AST) -> dict[type[ast.AST], list[tuple[int, ast.AST]]]:
    nodes: dict[type[ast.AST], list[tuple[int, ast.AST]]] = {}
    for place, node in enumerate(walk(tree)):
        nodes.setdefault(type(node), []).append((place, node))
    return nodes


def of_kinds(tree: ast.AST, *kinds: type[Node]) -> list[Node]:
    """The nodes of these kinds, in the order of `walk`: most rules go through few of a file's nodes."""
    nodes: list[Any] = [node for kind in kinds for node in _by_kind(tree).get(kind, ())]
    return [node for _, node in (sorted(nodes, key=itemgetter(0)) if len(kinds) > 1 else nodes)]


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return of_kinds(tree, ast.FunctionDef, ast.AsyncFunctionDef)


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of an attribute or a name, else an empty text."""
    if isinstance(node, ast.Attribute):
        head = dotted(node.value)
        return f"{head}.{node.attr}" if head else ""
    return node.id if isinstance(node, ast.Name) else ""


def room(module: str) -> str:
    """The folder or root module that a module belongs to."""
    return module.split(".")[1] if "." in module else ""


def imports(tree: ast.AST, modules: Modules, runtime: bool) -> Iterator[tuple[int, str]]:
    """(line, module of the package) of each import, those under TYPE_CHECKING left out with `runtime`."""
    under = [node for node in of_kinds(tree, ast.If) if dotted(node.test).endswith("TYPE_CHECKING")]
    left_out = {id(inner) for node in under for inner in ast.walk(node)} if runtime else set()
    for node in of_kinds(tree, ast.Import, ast.ImportFrom):
        if isinstance(node, ast.Import) and id(node) not in left_out:
            yield from ((node.lineno, item.name) for item in node.names if item.name.startswith("paceline."))
        elif (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").startswith("paceline.")
            and id(node) not in left_out
        ):
            inner = {f"{node.module}.{item.name}" for item in node.names}
            yield from ((node.lineno, name) for name in sorted(inner & set(modules)))
            if inner - set(modules):
                yield node.lineno, str(node.module)


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
            if count > PARAMETERS.get(f"{name}.{node.name}", MOST_PARAMETERS):
                yield f"{name}:{node.lineno}: {node.name} has {count} parameters"


def imports_against_the_order(modules: Modules) -> Iterator[str]:
    """Modules whose room is not in ORDER are violations of `modules_outside_of_folders`."""
    rank = {name: number for number, name in enumerate(ORDER)}
    for name, tree in modules.items():
        for line, target in imports(tree, modules, runtime=False) if room(name) in rank else ():
            if room(target) in PUBLIC_PACKAGES or rank.get(room(target), -1) > rank[room(name)]:
                yield f"{name}:{line}: imports {target}, which stands above it"


def modules_outside_of_folders(modules: Modules) -> Iterator[str]:
    """Folders that are not in ORDER, and modules directly under the package but for a few."""
    folders = {room(name) for name in modules if name.count(".") > 1}
    for name in modules:
        if name == "paceline" or room(name) in PUBLIC_PACKAGES:
            continue
        if room(name) not in ORDER or (name.count(".") == 1 and room(name) not in folders | ROOT_MODULES):
            yield f"{name}:1: is not in one of the folders of ORDER"


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
        for node in of_kinds(tree, ast.Import, ast.ImportFrom):
            if isinstance(node, ast.Import) and any(item.name == "paceline" for item in node.names):
                yield f"{name}:{node.lineno}: import paceline"
            if isinstance(node, ast.ImportFrom) and (node.level or node.module == "paceline"):
                yield f"{name}:{node.lineno}: from {'.' * node.level}{node.module or ''} import"


def environment_read_elsewhere(modules: Modules) -> Iterator[str]:
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    for name, tree in modules.items():
        for node in of_kinds(tree, ast.Attribute, ast.ImportFrom) if name != ENVIRONMENT else ():
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
        for node in of_kinds(tree, ast.Call):
            called = dotted(node.func)
            if called in made and all(word.arg != "dtype" for word in node.keywords):
                yield f"{name}:{node.lineno}: {called} without dtype="


def broad_excepts(modules: Modules) -> Iterator[str]:
    for name, tree in modules.items():
        for node in of_kinds(tree, ast.ExceptHandler, ast.Call):
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
        for node in tree.body if room(name) in LAYOUTS else ():
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
        for node in of_kinds(tree, ast.Call, ast.MatchClass) if name != BUILD else ():
            asked: list[ast.AST] = []
            if isinstance(node, ast.Call) and dotted(node.func) in ("isinstance", "issubclass"):
                asked = [part for argument in node.args[1:] for part in ast.walk(argument)]
            elif isinstance(node, ast.MatchClass):
                asked = [node.cls]
            kinds = {dotted(part).split(".")[-1] for part in asked} & set(concrete)
            if kinds:
                yield f"{name}:{node.lineno}: asks for {', '.join(sorted(kinds))}"  # type: ignore[attr-defined]


def layouts_that_import_layouts(modules: Modules) -> Iterator[str]:
    homes = set(layouts_of(modules).values()) - {LAYOUT}
    for name in homes:
        for line, target in imports(modules[name], modules, runtime=False):
            if target != name and target in homes | {BUILD}:
                yield f"{name}:{line}: imports {target}"


def weights_only_loads(tree: ast.AST) -> set[int]:
    """The nodes of calls of torch's weights-only loader, which runs no code."""
    calls = [node for node in of_kinds(tree, ast.Call) if dotted(node.func) == "torch.load"]
    pairs = [(call, word) for call in calls for word in call.keywords if word.arg == "weights_only"]
    safe = [(call, word) for call, word in pairs if isinstance(word.value, ast.Constant) and word.value.value is True]
    return {id(node) for call, word in safe for node in (call.func, word)}


def unpickling(modules: Modules) -> Iterator[str]:
    for name, tree in modules.items():
        safe = weights_only_loads(tree)
        nodes = of_kinds(tree, ast.Import, ast.ImportFrom, ast.Attribute, ast.keyword)
        for node in nodes if name != "paceline.launch.function" else ():  # a function that its caller sends
            used: list[str] = []
            if id(node) in safe:
                continue
            if isinstance(node, ast.Import):
                used = [item.name for item in node.names if item.name.split(".")[0] in UNPICKLERS]
            elif isinstance(node, ast.ImportFrom):
                whole = [f"{node.module}.{item.name}" for item in node.names if item.name != "UnpicklingError"]
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
        for node in of_kinds(tree, ast.ClassDef):
            if node.name in found:
                yield f"{name}:{node.lineno}: {node.name} is a class of {found[node.name]}, too"
            found.setdefault(node.name, name)


def waits_with_select(modules: Modules) -> Iterator[str]:
    """`select` takes no file descriptor from 1024 on; `paceline.base.polling` takes them all."""
    for name, tree in modules.items():
        for node in of_kinds(tree, ast.Attribute, ast.ImportFrom):
            taken = isinstance(node, ast.ImportFrom) and node.module == "select"
            if dotted(node) == "select.select" or (taken and "select" in {item.name for item in node.names}):  # type: ignore[attr-defined]
                yield f"{name}:{node.lineno}: select.select"  # type: ignore[attr-defined]


def many_public_methods(modules: Modules) -> Iterator[str]:
    """Properties do not count, nor do setters. Classes that offer what somebody else has named may have more."""
    for name, tree in modules.items():
        for node in of_kinds(tree, ast.ClassDef):
            if f"{name}.{node.name}" not in INTERFACES:
                methods = [one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
                public = {one.name for one in methods if not one.name.startswith("_") and not is_property(one)}
                if len(public) > MOST_PUBLIC_METHODS:
                    yield f"{name}:{node.lineno}: {node.name} has {len(public)} public methods"


def is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(dotted(one).split(".")[-1] in PROPERTIES for one in node.decorator_list)


def keys_of_formats(tree: ast.Module) -> Iterator[ast.AST]:
    """Names that are keys of a file or a message: fields of a TypedDict, and keywords of what writes an event."""
    for node in of_kinds(tree, ast.ClassDef, ast.Call):
        if isinstance(node, ast.ClassDef) and any(dotted(base).split(".")[-1] in TYPED_DICTS for base in node.bases):
            yield from (field.target for field in node.body if isinstance(field, ast.AnnAssign))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in EVENT_WRITERS:
            yield from node.keywords


def denied_names(modules: Modules) -> Iterator[str]:
    """Wherever a name is given or used: variables, parameters, attributes, functions, classes. Keys of formats stay."""
    for name, tree in modules.items():
        keys = {id(key) for key in keys_of_formats(tree)}
        for node in of_kinds(tree, *NAME_FIELDS):
            if id(node) in keys:
                continue
            used = [str(getattr(node, field)) for field in NAME_FIELDS.get(type(node), ())]
            for word in used:
                if word.strip("_").lower() in DENIED_NAMES:
                    yield f"{name}:{node.lineno}: {word}"  # type: ignore[attr-defined]


def missing_docstrings(modules: Modules) -> Iterator[str]:
    """Every class, and every public function that is not inside of another one, says in a sentence what it is or does.

    A method that overrides a documented one of the same module needs no docstring of its own, nor do properties whose
    name says all.
    """
    for name, tree in modules.items():
        for node, documented in definitions(tree):
            text = ast.get_docstring(node)
            if text is None:
                if not documented:
                    yield f"{name}:{node.lineno}: {node.name} has no docstring"
            elif not FIRST_SENTENCE.match(text):
                yield f"{name}:{node.lineno}: the docstring of {node.name} does not begin with a sentence"


def missing_captions(modules: Modules) -> Iterator[str]:
    """The first line of a module's docstring is a whole sentence: docs/tree.md is made of these lines."""
    for name, tree in modules.items():
        first = (ast.get_docstring(tree) or "").partition("\n")[0]
        if not re.match(r"[A-Z`].* .*\.$", first) and not re.match(r"`?[a-z]\w*[.\w]*`?.* .*\.$", first):
            yield f"{name}:1: the docstring does not begin with a line that is a sentence"


def definitions(tree: ast.Module) -> Iterator[tuple[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, bool]]:
    """(class or public function, whether it may do without a docstring)."""
    classes = {node.name: node for node in of_kinds(tree, ast.ClassDef)}

    def inherited(kind: ast.ClassDef, method: str) -> bool:
        for base in kind.bases:
            parent = classes.get(dotted(base).split(".")[-1])
            if parent is not None and parent is not kind:
                same = [one for one in parent.body if isinstance(one, FUNCTIONS) and one.name == method]
                if any(ast.get_docstring(one) for one in same) or inherited(parent, method):
                    return True
        return False

    def inside(body: list[ast.stmt], kind: ast.ClassDef | None) -> Iterator[tuple[Any, bool]]:
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield node, False
                yield from inside(node.body, node)
            elif isinstance(node, FUNCTIONS) and not node.name.startswith("_"):
                yield node, is_property(node) or (kind is not None and inherited(kind, node.name))

    yield from inside(tree.body, None)


# ---- violations that are older than their rule


def members_of_classes(modules: Modules) -> dict[str, set[str]]:
    """What each class defines, or takes over from a class of the package: methods, fields and attributes of `self`."""
    classes = {node.name: node for tree in modules.values() for node in of_kinds(tree, ast.ClassDef)}

    @cache
    def members(node: ast.ClassDef) -> set[str]:
        named = {one.name for one in walk(node) if isinstance(one, FUNCTIONS)}
        named |= {
            one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
        }
        named |= {one.attr for one in walk(node) if isinstance(one, ast.Attribute) and dotted(one.value) == "self"}
        bases = [dotted(getattr(base, "value", base)).split(".")[-1] for base in node.bases]
        return named.union(*(members(classes[base]) for base in bases if base in classes))

    return {name: members(node) for name, node in classes.items()}


def violations(modules: Modules) -> dict[str, list[str]]:
    """{rule: one line per violation}."""
    return {rule.__name__: [*rule(modules)] for rule in RULES}


def counted(lines: list[str]) -> dict[str, int]:
    """{module: number of violations}, sorted by name."""
    return dict(sorted(Counter(line.split(":")[0] for line in lines).items()))


def debts() -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = json.loads(DEBTS.read_text())
    return found


def main() -> None:
    broken = violations(package())
    if "--record" in sys.argv[1:]:
        counts = {rule: counted(lines) for rule, lines in broken.items() if lines and rule in INDEBTED}
        DEBTS.write_text(json.dumps(counts, indent=1, sort_keys=True) + "\n")
        return
    for rule, lines in broken.items():
        if lines:
            print(f"{rule}: {len(lines)}")
        for line in lines:
            print(f"    {line}")


RULES: list[Rule] = [
    long_functions,
    many_parameters,
    many_public_methods,
    imports_against_the_order,
    import_cycles,
    imports_of_the_package_itself,
    modules_outside_of_folders,
    environment_read_elsewhere,
    tensors_of_the_default_dtype,
    broad_excepts,
    questions_about_layouts,
    layouts_that_import_layouts,
    unpickling,
    classes_of_one_name,
    waits_with_select,
    denied_names,
    missing_captions,
    missing_docstrings,
]
# Rules that are younger than some of the code. A rule leaves this list when nothing violates it any more.
INDEBTED = {
    "many_public_methods",
    "denied_names",
    "missing_docstrings",
}


@cache
def package() -> Modules:
    """{dotted name: syntax tree} of all modules. The garbage collector would search the trees again and again."""
    modules = {}
    gc.disable()
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = tree = ast.parse(path.read_text())
        walk(tree)
    gc.freeze()
    gc.enable()
    return modules


if __name__ == "__main__":
    main()
