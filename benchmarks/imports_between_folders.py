"""Counts top-level folders and root modules of the package, imports between them, cycles, and the longest chain.

    python benchmarks/imports_between_folders.py            # this working tree
    python benchmarks/imports_between_folders.py COMMIT     # a commit of this repository
    python benchmarks/imports_between_folders.py --edges    # every import between two folders, with file and line
    python benchmarks/imports_between_folders.py --concepts # lines, functions and classes, and those with one user

A *room* is a folder or a module directly under `src/paceline`. An import counts wherever it stands, under TYPE_CHECKING
and inside of functions too. Rooms that import each other form a cycle; the longest chain is counted over the rooms with
each cycle taken as one.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = "src/paceline/"
Edges = dict[tuple[str, str], list[str]]


def read_tree(commit: str | None) -> dict[str, str]:
    """{path below src/paceline: text} of all Python files."""
    if commit is None:
        top = ROOT / SOURCE
        return {str(path.relative_to(top)): path.read_text() for path in sorted(top.rglob("*.py"))}

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout

    names = [name for name in git("ls-tree", "-r", "--name-only", commit, SOURCE).splitlines() if name.endswith(".py")]
    return {name.removeprefix(SOURCE): git("show", f"{commit}:{name}") for name in names}


PUBLIC = {"optim"}  # packages that only import names from elsewhere do not count


def room_of(path: str) -> str:
    return path.split("/")[0].removesuffix(".py")


def imports_between(files: dict[str, str]) -> Edges:
    """{(room, room that it imports): places}."""
    rooms = {room_of(path) for path in files}
    edges: Edges = defaultdict(list)
    for path, text in files.items():
        room = room_of(path)
        if room == "__init__" or room in PUBLIC:  # public names
            continue
        for node in ast.walk(ast.parse(text)):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [item.name for item in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{item.name}" for item in node.names]
            for name in names:
                parts = name.split(".")
                if parts[0] == "paceline" and len(parts) > 1 and parts[1] in rooms - {room}:
                    edges[room, parts[1]].append(f"{path}:{node.lineno}: {name}")  # type: ignore[attr-defined]
    return edges


def find_cycles(rooms: set[str], edges: Edges) -> list[set[str]]:
    """The sets of rooms that reach each other (Tarjan, "Depth-first search and linear graph algorithms", 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(room: str) -> None:
        index[room] = low[room] = len(index)
        stack.append(room)
        for start, end in edges:
            if start == room and end not in index:
                visit(end)
                low[room] = min(low[room], low[end])
            elif start == room and end in stack:
                low[room] = min(low[room], index[end])
        if low[room] == index[room]:
            position = stack.index(room)
            found.append(set(stack[position:]))
            del stack[position:]

    for room in sorted(rooms):
        if room not in index:
            visit(room)
    return found


def longest_chain(components: list[set[str]], edges: Edges) -> list[set[str]]:
    """Of components that import one another, from the top to the bottom."""
    chains: list[list[set[str]]] = []  # components come after all that they import
    for component in components:
        below = [chain for chain in chains if any((start, end) in edges for start in component for end in chain[0])]
        chains.append([component, *max(below, key=len, default=[])])
    return max(chains, key=len)


def count_concepts(files: dict[str, str]) -> dict[str, int]:
    """Lines, functions and classes of the package, and how many of them are used once in it.

    Uses are counted by name: a name that two functions share counts for both. Methods that begin and end with two
    underscores are not functions here.
    """
    functions: list[str] = []
    classes: list[str] = []
    uses: Counter[str] = Counter()
    for text in files.values():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("__"):
                functions.append(node.name)
            elif isinstance(node, ast.ClassDef):
                classes.append(node.name)
            elif isinstance(node, ast.Name):
                uses[node.id] += 1
            elif isinstance(node, ast.Attribute):
                uses[node.attr] += 1
    return {
        "lines": sum(len(text.splitlines()) for text in files.values()),
        "functions": len(functions),
        "functions with one caller": sum(uses[name] == 1 for name in functions),
        "classes": len(classes),
        "classes with one user": sum(uses[name] == 1 for name in classes),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", help="a commit instead of the working tree")
    parser.add_argument("--edges", action="store_true", help="print every import between two rooms")
    parser.add_argument("--concepts", action="store_true", help="print lines, functions and classes")
    given = parser.parse_args()
    files = read_tree(given.commit)
    rooms = {room_of(path) for path in files} - {"__init__"} - (PUBLIC if "compute" in map(room_of, files) else set())
    edges = imports_between(files)
    components = find_cycles(rooms, edges)
    cycles = [sorted(component) for component in components if len(component) > 1]
    chain = longest_chain(components, edges)
    if given.edges:
        for (start, end), places in sorted(edges.items()):
            print(f"{start} -> {end}: {len(places)}")
            for place in places:
                print(f"    {place}")
    if given.concepts:
        print(", ".join(f"{count:,} {name}" for name, count in count_concepts(files).items()))
    print(f"{len(rooms)} folders and root modules, {len(edges)} arrows between them, chain of {len(chain)}")
    print(f"{len(cycles)} cycles" + "".join(f"\n    {' '.join(cycle)}" for cycle in cycles))
    print("longest chain: " + " > ".join("+".join(sorted(one)) for one in chain))


if __name__ == "__main__":
    main()
