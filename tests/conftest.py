"""Fixtures of all tests, and what the markers `root` and `gpu` mean."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from uuid import uuid4

import pytest
from agents import Launcher
from golden import Golden
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from paceline.session.run import Run

# How long an example takes says how much else this machine does.
USUAL = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("paceline", **USUAL)
settings.register_profile("fast", **USUAL, max_examples=40)
settings.load_profile("paceline")
# What is imported and collected stays to the end: nobody looks through it for what could go.
gc.disable()


def lacking(what: str) -> NoReturn:
    """Skips a test that needs what is missing here; fails it in CI, which must have run everything."""
    if os.environ.get("PACELINE_CI") == "1":
        pytest.fail(f"this test must run in CI, and {what}", pytrace=False)
    pytest.skip(what)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--golden", action="store_true", help="write the texts of tests/golden instead of comparing them")
    parser.addoption("--slow-part", type=part_of, metavar="K/N", help="run only part K of N of the slow tests")


def part_of(text: str) -> tuple[int, int]:
    """Reads "2/3" as (2, 3)."""
    part, parts = (int(number) for number in text.split("/"))
    if not 1 <= part <= parts:
        raise ValueError(f"a part from 1 to {parts} is expected, not {part}")
    return part, parts


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps one part of the slow tests, which has every Nth of them: so it has a share of each table."""
    if not (chosen := config.getoption("--slow-part")):
        return
    part, parts = chosen
    slow = [item for item in items if item.get_closest_marker("slow")]
    left_out = {*slow} - {*slow[part - 1 :: parts]}
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def pytest_configure(config: pytest.Config) -> None:
    """What runs in the background of a shell ignores Ctrl-C, and under nohup a hang-up, and so would all that the tests
    start.
    """
    if config.getoption("--golden") and os.environ.get("PYTEST_XDIST_WORKER"):
        raise pytest.UsageError("--golden writes files: run it without -n")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if not os.environ.get("PYTEST_XDIST_WORKER"):  # xdist's workers inherit the variable
        # Tests must not write into the user's cache: it keeps this host's failures, and corrections of predictions.
        os.environ["XDG_CACHE_HOME"] = cache = tempfile.mkdtemp(prefix="paceline-cache-")
        config.add_cleanup(partial(shutil.rmtree, cache, ignore_errors=True))
    if config.option.markexpr == "not slow":
        settings.load_profile("fast")


def pytest_collection_finish() -> None:
    """Tests run beside each other: a second thread of torch's would mostly wait, and it does so at full speed."""
    gc.freeze()
    gc.enable()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("root") and os.geteuid() != 0:
        lacking("it needs root")
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("it needs a CUDA device")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The ten slowest files: where time goes that everybody waits for."""
    seconds: Counter[str] = Counter()
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid.partition("::")[0]] += report.duration
    terminalreporter.section("the slowest files", sep="-")
    for file, taken in seconds.most_common(10):
        terminalreporter.line(f"{taken:7.1f} s  {file}")


@pytest.fixture(scope="module")
def _golden_file(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.path, request.config.getoption("--golden"))


@pytest.fixture
def golden(_golden_file: Golden) -> Callable[[str, str], None]:
    """Compares a text that a user reads with the one of that name in the golden file; see support/golden.py."""
    return _golden_file.compare


MemoryGroup = Callable[[int], Path]


@pytest.fixture
def default(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Another default dtype of torch's: the test's indirect parameter."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


@pytest.fixture
def memory_group() -> Iterator[MemoryGroup]:
    """Makes a memory cgroup (version 1 or 2) with a limit in bytes; a process enters by `enter_group`."""
    made: list[Path] = []

    def make(limit: int) -> Path:
        first = Path("/sys/fs/cgroup/memory")
        if (first / "memory.limit_in_bytes").exists():
            base, knobs = first, {"memory.limit_in_bytes": limit, "memory.memsw.limit_in_bytes": limit}
        else:
            base, knobs = first.parent, {"memory.max": limit, "memory.swap.max": 0}
        folder = base / f"paceline-test-{uuid4().hex}"
        try:
            folder.mkdir()
        except OSError as error:
            lacking(f"no memory cgroup can be made ({error})")
        made.append(folder)
        for knob, value in knobs.items():
            if (folder / knob).exists():  # the kernel may not account swap
                (folder / knob).write_text(str(value))
        if not (folder / next(iter(knobs))).exists():
            lacking(f"{folder} has no memory controller")
        return folder

    yield make
    for folder in made:
        while left := (folder / "cgroup.procs").read_text().split():  # of a test that was ended
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.05)
        folder.rmdir()


def enter_group(folder: Path) -> Callable[[], None]:
    """For a child between fork and exec: moves it into a cgroup."""
    procs = str(folder / "cgroup.procs")

    def enter() -> None:
        fd = os.open(procs, os.O_WRONLY)
        os.write(fd, b"0")
        os.close(fd)

    return enter


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    folder = tmp_path / "small"
    folder.mkdir()
    if shutil.which("mount") is None:
        lacking("there is no mount")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "paceline-test", folder], capture_output=True, text=True
    )
    if done.returncode:
        lacking(f"nothing can be mounted ({done.stderr.strip()})")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.close()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Run]:
    """The test is a script of its own, with a run folder: checkpoints are written as at home."""
    with running(tmp_path / "run", monkeypatch, request.node.get_closest_marker("gpu") is not None) as run:
        yield run


@contextmanager
def running(folder: Path, monkeypatch: pytest.MonkeyPatch, gpu: bool = False) -> Iterator[Run]:
    """This process is the only worker of a run with this folder."""
    import torch

    from paceline.base.environment import World
    from paceline.session.run import Run
    from paceline.team.team import Team

    handlers = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR2)}
    if not gpu:
        monkeypatch.setattr("paceline.trainer.device_of", lambda rank: torch.device("cpu"))
    run = Run(Team(World(run_dir=str(folder))))
    monkeypatch.setattr(Run, "_current", run)
    torch.set_num_threads(1)
    yield run
    run.close(failed=True)
    assert run.folder.lock is not None
    os.close(run.folder.lock)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def with_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's own folder is the working directory, and has a train.py."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
