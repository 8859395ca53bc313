"""The command line: what it refuses, in one line; options after the script; modules; signals before any worker runs."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from agents import SOURCE, until
from launching import paceline
from warm import Process, environment

from paceline.base.environment import read_world
from paceline.checkpoint.storage import storage_at
from paceline.cli.main import main
from paceline.errors import UsageError
from paceline.launch.joining import likeness
from paceline.launch.local import FILES
from paceline.launch.modules import find_module
from paceline.launch.options import LaunchOptions

RANGE = "from {} to 999,999,999,999; write it in digits"
EMPTY = "is empty; give a value: perhaps a variable of the shell is not set"
LONG = "a" * 5000
UNUSABLE = f"{'a' * 80}... cannot be used (File name too long); correct that, or give another path"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a script that would be seen to run."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import sys\nprint(*sys.argv)\n")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        # Numbers: of any size, below what makes sense, in digits that only int() knows.
        (["run", "--workers", "9" * 20, "train.py"], f"--workers {'9' * 20} is not a whole number {RANGE.format(1)}"),
        (["run", "--workers", "0", "train.py"], f"--workers 0 is not a whole number {RANGE.format(1)}"),
        (["run", "--workers", "٤", "train.py"], f"--workers '٤' is not a whole number {RANGE.format(1)}"),
        (["run", "--workers", "1_0", "train.py"], f"--workers 1_0 is not a whole number {RANGE.format(1)}"),
        (["run", "--workers", "", "train.py"], f"--workers '' is not a whole number {RANGE.format(1)}"),
        (["run", "--workers", "9" * 5000], f"--workers {'9' * 80}... is not a whole number {RANGE.format(1)}"),
        (["run", "--steps", "0", "train.py"], f"--steps 0 is not a whole number {RANGE.format(1)}"),
        (["run", "--steps", "-3", "train.py"], f"--steps -3 is not a whole number {RANGE.format(1)}"),
        (["run", "--steps", "1e3", "train.py"], f"--steps 1e3 is not a whole number {RANGE.format(1)}"),
        (["run", "--max-restarts", "-1", "train.py"], f"--max-restarts -1 is not a whole number {RANGE.format(0)}"),
        (["run", "--min-workers", "0", "train.py"], f"--min-workers 0 is not a whole number {RANGE.format(1)}"),
        (["run", "--keep", "0", "train.py"], f"--keep 0 is not a whole number {RANGE.format(1)}"),
        (["run", "--mirror", "0", "train.py"], f"--mirror 0 is not a whole number {RANGE.format(1)}"),
        (["run", "--debug", "-1", "train.py"], f"--debug -1 is not a whole number {RANGE.format(0)}"),
        (["check", "--workers", "0", "train.py"], f"--workers 0 is not a whole number {RANGE.format(1)}"),
        (["check", "--steps", "0", "train.py"], f"--steps 0 is not a whole number {RANGE.format(1)}"),
        (["chaos", "--losses", "-1", "train.py"], f"--losses -1 is not a whole number {RANGE.format(1)}"),
        (["chaos", "--steps", "0", "train.py"], f"--steps 0 is not a whole number {RANGE.format(1)}"),
        (["chaos", "--seed", "-1", "train.py"], f"--seed -1 is not a whole number {RANGE.format(0)}"),
        (["tokenize", "--workers", "0", "x"], f"--workers 0 is not a whole number {RANGE.format(1)}"),
        (["tokenize", "--shard-tokens", "-1", "x"], f"--shard-tokens -1 is not a whole number {RANGE.format(1)}"),
        (["export", "--step", "-1", "a", "b"], f"--step -1 is not a whole number {RANGE.format(0)}"),
        (["import", "--trainer", "-1", "a", "b"], f"--trainer -1 is not a whole number {RANGE.format(0)}"),
        (["inspect", "--step", "x", "a"], f"--step x is not a whole number {RANGE.format(0)}"),
        (
            ["run", "--shares", "٣,1", "train.py"],
            "shares '٣,1' are not numbers; give one number per worker, for example 3,1",
        ),
        (
            ["run", "--save-every", "٦s", "train.py"],
            "--save-every '٦s' is not an interval; give seconds as 60s, steps as 100, or auto",
        ),
        (
            ["run", "--listen", "10.0.0.7:٢٩", "train.py"],
            "'10.0.0.7:٢٩' is not an address; use HOST:PORT, for example 10.0.0.7:29400",
        ),
        (
            ["run", "--listen", "é..:1", "train.py"],
            "'é..:1' is not an address; use HOST:PORT, for example 10.0.0.7:29400",
        ),
        (
            ["run", "--store", "etcd://a:٢/x", "train.py"],
            (
                "--store needs the form etcd://HOST:PORT/NAME, got 'etcd://a:٢/x'; pass the address of "
                "etcd, and a name for this run"
            ),
        ),
        (
            ["export", "--max-file", "9" * 400, "a", "b"],
            f"'{'9' * 400}' is not a size in bytes; write a number and a unit, for example 500MB or 5GB",
        ),
        (
            ["run", "--workers", "9" * 12, "train.py"],
            (
                "999,999,999,999 workers need more open files than the limit of this process; "
                "use at most {most} workers on this host, or raise `ulimit -n`"
            ),
        ),
        # A variable of the shell that is not set.
        (["run", "--run-dir", "", "train.py"], f"--run-dir {EMPTY}"),
        (["run", "--join", "", "train.py"], f"--join {EMPTY}"),
        (["run", "--token-file", "", "train.py"], f"--token-file {EMPTY}"),
        (["run", "--listen", "", "train.py"], f"--listen {EMPTY}"),
        (["run", "--against", "", "train.py"], f"--against {EMPTY}"),
        (["run", "--checkpoints", "", "train.py"], f"--checkpoints {EMPTY}"),
        (["run", "--take-over", ""], f"--take-over {EMPTY}"),
        (["run", ""], f"SCRIPT {EMPTY}"),
        (["check", ""], f"SCRIPT {EMPTY}"),
        (["tokenize", "--out", "", "x"], f"--out {EMPTY}"),
        (["export", "", "b"], f"RUN {EMPTY}"),
        (["explain", ""], f"RUN|PLAN {EMPTY}"),
        # Paths that the system refuses.
        (["run", LONG], UNUSABLE),
        (["run", "--against", LONG, "train.py"], UNUSABLE),
        (["run", "--join", LONG, "train.py"], UNUSABLE),
        (["run", "--take-over", LONG], UNUSABLE),
        (["explain", LONG], UNUSABLE),
        (["report", LONG], UNUSABLE),
        (
            ["run", "--checkpoints", "ftp://127.0.0.1:1/y", "train.py"],
            (
                "checkpoints cannot be stored at ftp://127.0.0.1:1/y (Connection refused); "
                "check that this host can reach the URL and that it needs no further settings, or use a folder"
            ),
        ),
        # What other launchers call it.
        (["run", "-n", "4", "train.py"], "unknown option -n; use --workers 4"),
        (["run", "-np", "4", "train.py"], "unknown option -np; use --workers 4"),
        (
            ["run", "--nproc-per-node", "4", "train.py"],
            "unknown option --nproc-per-node; use --workers 4",
        ),
        (["run", "--nproc_per_node=4", "train.py"], "unknown option --nproc_per_node; use --workers 4"),
        (["run", "--nproc-per-node=gpu", "train.py"], "unknown option --nproc-per-node; use --workers N"),
        (["check", "-n"], "unknown option -n; use --workers N"),
        (["run", "--plan", "bf16", "train.py"], "unknown plan word 'bf16'; use precision=bf16"),
        (
            ["run", "-m", "train.py"],
            (
                "the module train.py does not exist or cannot be run; "
                "use a name that `python -m` accepts, for example package.train; to run a file, leave -m out"
            ),
        ),
        (["run", "--workers", "2"], "no script was given; pass the path of a Python training script"),
    ],
)
def test_one_line_says_what_is_wrong(
    arguments: list[str], message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    most = f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0] // FILES:,}"
    assert main(arguments) == 2
    assert capsys.readouterr() == ("", f"paceline: {message.format(most=most)}\n")
    assert [path.name for path in here.iterdir()] == ["train.py"]


def test_a_place_that_a_url_alone_does_not_reach() -> None:
    with pytest.raises(UsageError) as caught:
        storage_at("reference://x/y")
    assert re.fullmatch(
        r"checkpoints cannot be stored at reference://x/y \(.* missing 1 required positional argument: 'fo'\); "
        "check that this host can reach the URL and that it needs no further settings, or use a folder",
        str(caught.value),
    )


@pytest.mark.parametrize(
    ("name", "text", "least"),
    [
        ("PACELINE_MAX_STEPS", "0", 1),
        ("PACELINE_MAX_STEPS", "-3", 1),
        ("PACELINE_KEEP", "0", 1),
        ("PACELINE_JOIN_TIMEOUT", "0", 1),
        ("PACELINE_RANK", "-1", 0),
    ],
)
def test_variables_have_the_bounds_of_the_options(name: str, text: str, least: int) -> None:
    place = {"PACELINE_WORLD_SIZE": "2", "PACELINE_STORE": "127.0.0.1:1"}
    with pytest.raises(UsageError) as caught:
        read_world({**place, name: text})
    assert str(caught.value) == f"{name}={text} is not a whole number {RANGE.format(least)}"


# ---- options after the script


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["train.py", "--workers", "4", "--lr", "3"], "--workers"),
        (["train.py", "--workers=4", "--save-every", "9", "--workers", "2"], "--workers, --save-every"),
        (["train.py", "--own", "4"], ""),  # the script knows it, if it is one of ours
        (["--", "train.py", "--lr", "3"], ""),
        (["train.py", "--", "--workers", "4"], ""),  # said on purpose
        (["--quiet", "train.py", "--workers", "4"], "--workers"),
    ],
)
def test_options_of_ours_after_the_script_are_pointed_out(
    arguments: list[str], names: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--keep", "1", "--shares", "x", *arguments]) == 2  # so that nothing starts
    refused = "paceline: shares 'x' are not numbers; give one number per worker, for example 3,1"
    if names:
        them = "them" if ", " in names else "it"
        refused = f"paceline: {names} after train.py would go to the script; put {them} before train.py, "
        refused += f"or write -- after train.py to pass {them} on"
    assert capsys.readouterr().err.splitlines() == [refused]


def test_options_that_the_script_has_as_well_are_its_own(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text("parser.add_argument('--workers')\n")
    assert main(["run", "--shares", "x", "train.py", "--workers", "4", "--steps", "3"]) == 2
    assert capsys.readouterr().err.startswith("paceline: --steps after train.py would go to the script;")


def test_the_script_gets_what_stands_after_it(here: Path) -> None:
    done = paceline("run", "--run-dir", "run", "train.py", "--", "--workers", "4", cwd=here)
    assert done.stdout == "train.py --workers 4\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rnu", "train.py"], "unknown command rnu; did you mean paceline run?"),
        (["torchrun", "train.py"], "unknown command torchrun; did you mean paceline run?"),
        (["zebra"], "unknown command zebra; see `paceline --help`"),
        (["run", "--gpus", "4", "train.py"], "unknown option --gpus of paceline run; use --workers N"),
        (["run", "--run_dir", "a", "train.py"], "unknown option --run_dir of paceline run; use --run-dir"),
        (
            ["run", "--nnodes=2", "train.py"],
            "unknown option --nnodes=2 of paceline run; "
            "start the first host with --listen ADDR and each other host with --join, or use paceline launch",
        ),
        (
            ["run", "--master_port", "1", "train.py"],
            "unknown option --master_port of paceline run; "
            "use --listen ADDR:PORT on the first host and --join ADDR:PORT on the others",
        ),
        (["check", "train.py", "--gpus", "4"], "unknown option --gpus of paceline check; use --workers N"),
        (["run", "--save-every", "5m", "train.py"], "--save-every '5m' is not an interval; use 300s"),
    ],
)
def test_names_of_other_launchers(
    words: list[str], message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err == f"paceline: {message}\n"


# ---- modules


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Packages, with and without __init__.py, and a module outside of them."""
    monkeypatch.chdir(tmp_path)
    for name in ("pkg/__init__", "pkg/train", "pkg/sub/__main__", "ns/deep/train", "ns/both", "ns/both/data", "alone"):
        path = Path(f"{name}.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("print(__file__)\n")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("pkg.train", "pkg/train.py"),
        ("pkg.sub", "pkg/sub/__main__.py"),
        ("ns.deep.train", "ns/deep/train.py"),
        ("ns.both", "ns/both.py"),
        ("alone", "alone.py"),
    ],
)
def test_a_module_is_found_as_python_finds_it(name: str, file: str, modules: Path) -> None:
    before = {*sys.modules}
    assert find_module(name) == file
    assert {*sys.modules} == before, "packages are not imported: they may do anything"
    ran = subprocess.run([sys.executable, "-m", name], capture_output=True, text=True, check=True).stdout
    assert ran.splitlines()[-1] == str(modules / file)


@pytest.mark.parametrize("name", ["pkg", "pkg.gone", "gone", "sys", "pkg/train", ".train", "pkg..train", "pkg.train."])
def test_what_is_no_module(name: str, modules: Path) -> None:
    with pytest.raises(UsageError) as caught:
        find_module(name)
    assert str(caught.value) == (
        f"the module {name} does not exist or cannot be run; "
        "use a name that `python -m` accepts, for example package.train; to run a file, leave -m out"
    )


def test_who_joins_runs_the_same_module(modules: Path) -> None:
    options = LaunchOptions("pkg/train.py", module="pkg.train")
    file, module = likeness(LaunchOptions("pkg/train.py")), likeness(options)
    assert module == {**file, "module": "pkg.train"}
    Path("pkg/train.py").write_text("pass\n")
    assert likeness(options)["script"] != module["script"]


def test_the_next_command_names_the_module(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/train.py").write_text("raise ValueError('no')\n")
    done = paceline("run", "--run-dir", "run", "-m", "pkg.train", "--lr", "3", cwd=tmp_path, code=1)
    assert done.stderr.splitlines()[-1] == (
        "next: fix the cause; then run `paceline run --workers 1 --run-dir run -m pkg.train --lr 3`: "
        "it starts over, as no checkpoint was written"
    )


def test_a_run_of_a_module_goes_on_as_one(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/train.py").write_text("from basics import *\nlist(make().steps(data, count=4))[:0] or t\n")
    command = [sys.executable, "-m", "pkg.train", "--lr", "3"]
    Process(command, environment(PACELINE_RUN_DIR="run"), cwd=tmp_path, stderr=subprocess.DEVNULL).wait()
    said = paceline("explain", "run", cwd=tmp_path).stdout
    assert said.endswith("Next: paceline run --workers 1 --run-dir run -m pkg.train --lr 3\n")


# ---- signals before any worker runs


@pytest.fixture
def gate(tmp_path: Path) -> Callable[..., None]:
    """A FIFO, and what signals a process that waits for it. Nothing comes out of it, and then its end: the signal may
    have come just before the process was to wait.
    """
    os.mkfifo(tmp_path / "gate")
    ends: list[int] = []

    def opened() -> bool:
        with suppress(OSError):
            ends.append(os.open(tmp_path / "gate", os.O_WRONLY | os.O_NONBLOCK))
        return bool(ends)

    def send(process: subprocess.Popen[str], *names: str) -> None:
        until(opened)
        for name in names:
            process.send_signal(signal.Signals[name])
        os.close(ends.pop())

    return send


def join_nobody(folder: Path, *names: str, ignored: tuple[int, ...] = ()) -> subprocess.Popen[str]:
    """A command that waits for a coordinator's answer, which never comes, when these signals reach it."""
    (folder / "key").write_text("0" * 64)
    (folder / "key").chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = f"127.0.0.1:{silent.getsockname()[1]}"
        process = begin(folder, "run", "--join", where, "--token-file", "key", "train.py", ignored=ignored)
        silent.settimeout(60)
        with silent.accept()[0]:
            for name in names:
                process.send_signal(signal.Signals[name])
    return process


def begin(folder: Path, *options: str, ignored: tuple[int, ...] = ()) -> subprocess.Popen[str]:
    def dispositions() -> None:  # Tests that run in the background inherit that some are ignored.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)

    return subprocess.Popen(
        [sys.executable, "-m", "paceline", *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{folder}:{SOURCE}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=dispositions,
    )


@pytest.mark.parametrize("when", ["importing", "starting"])
@pytest.mark.parametrize(("number", "code"), [("SIGINT", 130), ("SIGTERM", 75), ("SIGHUP", 75)])
def test_a_signal_before_any_worker_runs(
    when: str, number: str, code: int, here: Path, gate: Callable[..., None]
) -> None:
    if when == "importing":  # what the command imports waits
        Path("rich").mkdir()
        Path("rich/__init__.py").write_text("open('gate').read()\n")
        process = begin(here, "run", "train.py")
        gate(process, number)
    else:
        process = join_nobody(here, number)
    assert process.communicate(timeout=60) == ("", f"paceline: stopped by {number}; the same command starts again\n")
    assert process.returncode == code


def test_who_has_read_enough_of_it(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "worker-0.log").write_text("a line\n" * 100_000)  # more than a pipe holds
    command = [sys.executable, "-m", "paceline", "logs", str(tmp_path)]
    with Process(command, environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "0 | a line\n"
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == ("", 141)  # type: ignore[union-attr]


def test_a_signal_that_is_ignored_stays_so(here: Path) -> None:
    """As under nohup."""
    process = join_nobody(here, "SIGHUP", "SIGTERM", ignored=(signal.SIGHUP,))
    assert process.communicate(timeout=60)[1] == "paceline: stopped by SIGTERM; the same command starts again\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 75, marks=pytest.mark.slow)]
)
def test_a_rehearsal_that_is_stopped_is_no_failed_one(number: int, code: int, here: Path) -> None:
    Path("train.py").write_text("import time\nopen('here', 'w')\ntime.sleep(600)\n")
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = Process([sys.executable, "-m", "paceline", "check", "train.py"], environment(), cwd=here, **streams)
    until(Path("here").exists)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert "could not be checked" not in errors
    assert process.returncode == code


@pytest.mark.parametrize("start", [[], ["--cold-start"]])
def test_a_module_runs_as_python_runs_it(tmp_path, start):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/__init__.py").write_text("print('package')\n")
    (tmp_path / "pkg/numbers.py").write_text("TWO = 2\n")
    (tmp_path / "pkg/train.py").write_text(
        "import sys\n"
        "from .numbers import TWO\n"
        "print(TWO, __name__, __package__, __spec__.name, sys.argv, sys.path[0], sys.orig_argv[1:])\n"
        "raise ValueError('to see the traceback')\n"
    )
    done = paceline("run", "--run-dir", "run", *start, "-m", "pkg.train", "--lr", "3", cwd=tmp_path, code=1)
    argv = [str(tmp_path / "pkg/train.py"), "--lr", "3"]
    words = ["-m", "pkg.train", "--lr", "3"]
    assert done.stdout == f"package\n2 __main__ pkg pkg.train {argv} {tmp_path} {words}\n"
    assert "ValueError: to see the traceback\n  at pkg/train.py:4 in <module>: raise" in done.stderr


def test_a_full_disk_ends_a_command_in_a_sentence(tmp_path: Path) -> None:
    why = "the output could not be written completely (No space left on device)"
    said = f"paceline: {why}; free some space where it goes\n"
    for env in ({"PYTHONUNBUFFERED": "1"}, {"PYTHONUNBUFFERED": ""}):
        with open("/dev/full", "w") as full:
            command = [sys.executable, "-m", "paceline", "metrics", "--rules"]
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env={**os.environ, **env})
        assert (done.returncode, done.stderr) == (2, said)
    command = [sys.executable, "-m", "paceline", "explain", "data=2", "--svg", "/dev/full"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, said)


@pytest.mark.slow
def test_a_run_that_may_have_few_open_files_ends_in_a_sentence(tmp_path: Path) -> None:
    """Wherever it meets the limit: before its workers, and between two of them."""
    (tmp_path / "train.py").touch()
    for most in (16, 28):
        limit = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (most, most))
        said = paceline("run", "--quiet", "--workers", "2", "train.py", cwd=tmp_path, code=2, preexec=limit).stderr
        what = f"the run needs more open files than the limit of this process, {most}"
        assert said == f"paceline: {what}; raise the limit first, for example with `ulimit -n 1024`\n"
