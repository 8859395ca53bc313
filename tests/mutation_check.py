"""Checks that the tests find mistakes: makes the mistakes of `mutations.toml` one at a time, in a copy of the tree.

    python tests/mutation_check.py --list                               print the mistakes
    python tests/mutation_check.py                                      check all of them, which takes an hour or two
    python tests/mutation_check.py --only stale_divisor exit_code_lost  check two of them
    python tests/mutation_check.py --record runs/mutations.json         also write the results, each when it is known

For each mistake the tests that reach its lines run until one fails: those of different files first, and short ones
before long ones. A test counts if it fails again by itself, and passes without the mistake. The exit code is 1 if the
tests missed a mistake.

Which tests reach a line is found by one run of all fast tests, on a copy in which every place of a mistake notes the
test that comes by. This takes as long as `make test`, and the result is kept in `runs/`: renew it with --probe after
tests were moved or written.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
RECORDS = Path(__file__).with_name("mutations.toml")
REACH = ROOT / "runs" / "mutation-reach.json"
# These read the source: they would find any change, and not what is wrong with it.
EXCLUDED = {"tests/unit/test_house_rules.py", "tests/unit/test_mutation_check.py"}
TIMEOUT = 200  # seconds of one test
# Environment variables of the plugin, which is this module: the tests to run, its reports, and notes for the probe.
SELECTED, REPORTS, NOTES = "MUTATION_CHECK_SELECTED", "MUTATION_CHECK_REPORTS", "MUTATION_CHECK_NOTES"
_PROBE = Path(__file__).with_name("mutation_probe.py")
_CALL = '__import__("paceline.mutation_probe", fromlist=[""]).reached'
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of linux/prctl.h


@dataclass(frozen=True)
class Mutation:
    """A mistake: in a `file` of the repository the text `before`, which occurs once, becomes `after`."""

    name: str
    mistake: str
    file: str
    before: str
    after: str

    def applied(self, text: str) -> str:
        """The file's text with the mistake. Raises ValueError unless `before` occurs once in it."""
        if (times := text.count(self.before)) != 1:
            raise ValueError(f"{self.name}: {self.file} has the text of `before` {times} times; mend {RECORDS.name}")
        return text.replace(self.before, self.after)

    def line(self, text: str) -> int:
        """The number of the first line that changes, from 1."""
        pairs = zip(text.splitlines(), [*self.applied(text).splitlines(), ""], strict=False)
        return next(number for number, (old, new) in enumerate(pairs, start=1) if old != new)


def mutations() -> list[Mutation]:
    """All records of `mutations.toml`."""
    return [Mutation(**record) for record in tomllib.loads(RECORDS.read_text())["mutation"]]


# -- the probe -------------------------------------------------------------------------------------------------------


def statement(text: str, line: int) -> ast.stmt:
    """The innermost statement with this line, of a function, in front of which a line can be inserted."""
    lines, found, in_function = text.splitlines(), None, False
    node: ast.AST | None = ast.parse(text)
    while node is not None:
        if in_function and isinstance(node, ast.stmt):
            begin = lines[node.lineno - 1]
            if not begin[: node.col_offset].strip() and not begin.lstrip().startswith("elif "):
                found = node
        in_function |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        inner = (one for one in ast.iter_child_nodes(node) if isinstance(one, ast.stmt | ast.ExceptHandler))
        node = next((one for one in inner if one.lineno <= line <= (one.end_lineno or 0)), None)
    if found is None:
        raise ValueError(f"line {line} is in no statement of a function")
    return found


def probed(text: str, places: Iterable[Mutation]) -> str:
    """The file's text in which the place of each mistake notes its name when it is reached."""
    lines = text.splitlines()
    at = [(statement(text, one.line(text)), one.name) for one in places]
    for found, name in sorted(at, key=lambda pair: -pair[0].lineno):
        lines.insert(found.lineno - 1, f'{" " * found.col_offset}{_CALL}("{name}")')
    return "\n".join([*lines, ""])


# -- a plugin of pytest ----------------------------------------------------------------------------------------------


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Runs the selected tests, in their order."""
    if file := os.environ.get(SELECTED):
        order = {test: number for number, test in enumerate(json.loads(Path(file).read_text()))}
        others = [item for item in items if item.nodeid not in order]
        items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])
        config.hook.pytest_deselected(items=others)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Writes each report of a test as a line, in the process that has them all."""
    if (file := os.environ.get(REPORTS)) and "PYTEST_XDIST_WORKER" not in os.environ:
        lines = [line for line in str(report.longrepr or "").splitlines() if line.startswith("E  ")]
        why = (lines or str(report.longrepr or "").splitlines()[-1:] or [""])[0].removeprefix("E").strip()
        row = {"test": report.nodeid, "when": report.when, "seconds": report.duration, "failed": report.failed}
        with open(file, "a") as reports:
            reports.write(json.dumps({**row, "why": why[:300] if report.failed else ""}) + "\n")


def _note(test: str) -> None:
    """Tells the probe, here and in all processes that this one starts, which test runs now."""
    if folder := os.environ.get(NOTES):
        note = Path(folder) / str(os.getpid())
        note.with_suffix(".new").write_text(test)
        note.with_suffix(".new").replace(note)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _note(item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any, request: Any) -> Iterator[Any]:
    """What a fixture of many tests reaches, all tests of its file may find."""
    if fixturedef.scope == "function" or not os.environ.get(NOTES):
        return (yield)
    item = request._pyfuncitem.nodeid
    _note(item.partition("::")[0])
    try:
        return (yield)
    finally:
        _note(item)


# -- runs in a copy --------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What a run of tests came to: seconds by test, and why a test failed."""

    seconds: Counter[str] = field(default_factory=Counter)
    failed: dict[str, str] = field(default_factory=dict)


class Copy:
    """A copy of the tree, with an environment in which its package is the one that is imported."""

    _times = count(int(time.time()))  # modification times; two within a second would leave compiled files as they were

    def __init__(self, folder: Path, jobs: int) -> None:
        self.folder, self._jobs = folder, jobs
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        venv.create(folder / ".venv", with_pip=False, symlinks=True)
        (packages,) = (folder / ".venv").glob("lib/python*/site-packages")
        paths = [str(folder / "src"), *(path for path in sys.path if path.endswith("site-packages"))]
        (packages / "here.pth").write_text("\n".join(paths))
        self._python = folder / ".venv" / "bin" / "python"
        for script in Path(sys.executable).parent.iterdir():  # such as paceline, which shall be that of the copy
            if not script.is_dir() and script.read_bytes().startswith(f"#!{sys.executable}\n".encode()):
                made = self._python.with_name(script.name)
                made.write_text(script.read_text().replace(sys.executable, str(self._python), 1))
                made.chmod(0o755)

    def write(self, file: str, text: str) -> None:
        """Replaces a file."""
        (self.folder / file).write_text(text)
        now = next(self._times)
        os.utime(self.folder / file, (now, now))

    @contextmanager
    def with_mistake(self, mutation: Mutation) -> Iterator[None]:
        """Makes a mistake, and mends it afterwards."""
        text = (self.folder / mutation.file).read_text()
        self.write(mutation.file, mutation.applied(text))
        try:
            yield
        finally:
            self.write(mutation.file, text)

    def run(self, tests: Sequence[str] | None, *options: str, **environment: str) -> Outcome:
        """Runs these tests, in their order, or all fast ones; what they leave behind is ended."""
        reports, selected = self.folder / "reports.jsonl", self.folder / "selected.json"
        reports.write_text("")
        variables = {**os.environ, **environment, "PYTHONPATH": str(self.folder / "tests"), REPORTS: str(reports)}
        variables.pop("PYTHONDONTWRITEBYTECODE", None)
        files = ["tests"]
        if tests is not None:
            selected.write_text(json.dumps(tests))
            variables[SELECTED] = str(selected)
            files = [name for name in dict.fromkeys(map(file_of, tests)) if (self.folder / name).exists()]
        command = [str(self._python), "-m", "pytest", "-p", "mutation_check", "-m", "not slow", "--no-header", *options]
        command += [] if tests is None else ["--timeout", str(TIMEOUT)]
        jobs = min(self._jobs, len(tests) if tests is not None else self._jobs)
        command += ["-n", str(jobs), "--maxschedchunk", "1"] if jobs > 1 else []
        with (self.folder / "output.txt").open("w") as output:
            try:
                subprocess.run([*command, *files], cwd=self.folder, env=variables, stdout=output, stderr=output)
            finally:
                _end_children()
        outcome = Outcome()
        for row in map(json.loads, reports.read_text().splitlines()):
            outcome.seconds[row["test"]] += row["seconds"]
            if row["failed"]:
                outcome.failed.setdefault(row["test"], row["why"])
        if not outcome.seconds:
            raise RuntimeError(f"no test ran:\n{(self.folder / 'output.txt').read_text()[-3000:]}")
        return outcome


def file_of(test: str) -> str:
    """The file of a test, by its name for pytest."""
    return test.partition("::")[0]


def _end_children() -> None:
    """Ends what tests have left: all that this process has adopted, see `adopt_children`."""
    while children := [pid for pid, parent in _processes() if parent == os.getpid()]:
        for pid in children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _processes() -> Iterator[tuple[int, int]]:
    """Each process and its parent."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            yield int(folder.name), int((folder / "stat").read_text().rpartition(")")[2].split()[1])


def adopt_children() -> None:
    """Makes what tests leave behind children of this process."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_SUBREAPER, 1)


# -- which tests reach what ------------------------------------------------------------------------------------------


def probe(places: Sequence[Mutation], copy: Copy) -> dict[str, Any]:
    """Runs all fast tests on a probed copy: by mistake the tests that reach it, the seconds of each test, and the tests
    that failed as things are.
    """
    notes, log = copy.folder / "notes", copy.folder / "reached.txt"
    notes.mkdir()
    by_file = defaultdict[str, list[Mutation]](list)
    for one in places:
        by_file[one.file].append(one)
    before = {file: (copy.folder / file).read_text() for file in by_file}
    for file, text in before.items():
        copy.write(file, probed(text, by_file[file]))
    settings = f"NOTES, LOG = {str(notes)!r}, {str(log)!r}\n"
    module = copy.folder / "src" / "paceline" / _PROBE.name
    module.write_text(_PROBE.read_text() + settings)
    log.touch()
    outcome = copy.run(None, **{NOTES: str(notes)})
    module.unlink()
    for file, text in before.items():
        copy.write(file, text)
    tests = [test for test in outcome.seconds if file_of(test) not in EXCLUDED]
    reached = defaultdict[str, set[str]](set)
    for line in log.read_text().splitlines():
        name, _, test = line.partition("\t")
        reached[name].add(test)
    caches = re.compile(r"^ *@(functools\.)?(lru_)?cache\b", re.MULTILINE)
    cached = {file for file in {*map(file_of, tests)} if caches.search((copy.folder / file).read_text())}
    by_mistake = {}
    for one in places:
        # A result that a test has computed and kept for others, all tests of its file may look at.
        shared = {test for test in reached[one.name] if "::" not in test}
        shared |= {file_of(test) for test in reached[one.name]} & cached
        by_mistake[one.name] = [test for test in tests if test in reached[one.name] or file_of(test) in shared]
    return {"reached": by_mistake, "seconds": dict(outcome.seconds), "failed": outcome.failed}


def in_order(tests: Iterable[str], seconds: Mapping[str, float]) -> list[str]:
    """Tests in the order in which they are tried: first one variant of each test, then the second ones, and so on; of
    these the shortest of each file, then the next ones.
    """
    variants, of_file = Counter[str](), Counter[tuple[int, str]]()
    order = []
    for test in sorted(tests, key=lambda test: (seconds.get(test, 0.0), test)):
        function = test.partition("[")[0]
        variant = variants[function]
        variants[function] += 1
        order.append((variant, of_file[variant, file_of(test)], seconds.get(test, 0.0), test))
        of_file[variant, file_of(test)] += 1
    return [test for *_, test in sorted(order)]


# -- the check -------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """What the tests made of a mistake: the test that found it (None: it was missed) and how it failed."""

    name: str
    found_by: str | None
    why: str
    tried: int  # tests that were to run
    ran: int
    seconds: float

    def __str__(self) -> str:
        about = f"{self.ran} of {self.tried} tests, {self.seconds:.0f} s"
        return f"{self.name}: {f'found by {self.found_by}' if self.found_by else 'MISSED'} ({about})"


def check(mutation: Mutation, copy: Copy, tests: Sequence[str]) -> Result:
    """Makes a mistake and runs these tests until one fails that, alone, fails again with it and not without it."""
    began, left, ran = time.monotonic(), list(tests), 0
    while left:
        with copy.with_mistake(mutation):
            outcome = copy.run(left, "-x")
        ran += len(outcome.seconds)
        for test, why in outcome.failed.items():
            with copy.with_mistake(mutation):
                again = copy.run([test]).failed
            if again and not copy.run([test]).failed:
                return Result(mutation.name, test, why, len(tests), ran, time.monotonic() - began)
        left = [test for test in left if test not in outcome.seconds] if outcome.failed else []
    return Result(mutation.name, None, "", len(tests), ran, time.monotonic() - began)


def record(file: Path, result: Result) -> None:
    """Writes a result to a JSON file, in the place of an earlier one of that mistake."""
    rows = json.loads(file.read_text()) if file.exists() else []
    rows = [row for row in rows if row["name"] != result.name] + [asdict(result)]
    file.write_text(json.dumps(rows, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME", nargs="+", help="check these mistakes")
    parser.add_argument("--list", action="store_true", help="print all mistakes, and check nothing")
    parser.add_argument("--record", metavar="FILE", type=Path, help="write each result to a JSON file")
    parser.add_argument("--probe", action="store_true", help="find out anew which tests reach which mistake")
    parser.add_argument("--most", metavar="N", type=int, help="run at most so many tests for each mistake")
    parser.add_argument("--jobs", metavar="N", type=int, default=2, help="run so many tests at a time (default 2)")
    options = parser.parse_args(arguments)
    known = mutations()
    chosen = [one for one in known if options.only is None or one.name in options.only]
    if options.list:
        for one in chosen:
            print(f"{one.name}\n    {one.mistake}\n    {one.file}")
        return 0
    if unknown := {*(options.only or ())} - {one.name for one in known}:
        parser.error(f"there is no mistake {', '.join(sorted(unknown))}: see --list")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the copy and what runs in it go, too
    adopt_children()
    results = list[Result]()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Copy(Path(folder), options.jobs)
        reach = json.loads(REACH.read_text()) if REACH.exists() and not options.probe else {"reached": {}}
        if not {one.name for one in chosen} <= reach["reached"].keys():
            print(f"finding out which tests reach the {len(known)} places ...", flush=True)
            reach = probe(known, copy)
            REACH.parent.mkdir(exist_ok=True)
            REACH.write_text(json.dumps(reach, indent=1))
        for one in chosen:
            tests = [test for test in reach["reached"][one.name] if test not in reach["failed"]]
            results.append(check(one, copy, in_order(tests, reach["seconds"])[: options.most]))
            print(results[-1], flush=True)
            if options.record is not None:
                record(options.record, results[-1])
    missed = [result.name for result in results if result.found_by is None]
    print(f"{len(results) - len(missed)} of {len(results)} mistakes were found")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
