"""The agent, with real processes. The scripts play a worker's part, so that nothing here waits for torch."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from agents import MAIN, SOURCE, WORKER, Launcher, until
from conftest import MemoryGroup, enter_group

from paceline.checkpoint.lock import hold_lock
from paceline.errors import LaunchError
from paceline.launch.output import ranks


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.close()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def journal(folder: Path, kind: str) -> list[dict[str, object]]:
    events = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] == kind]


AGAIN = "paceline run --workers 2 --run-dir run train.py"

# ---- the plain case


def test_a_script_that_joins_and_ends(launcher: Launcher) -> None:
    ended = launcher.run("""
        event("join")
        print("out", RANK)
        print("err", RANK, file=sys.stderr)
        """)
    assert (ended.code, ended.stdout) == (0, "out 0\n")
    assert ended.stderr == "2 workers, run folder run\nerr 0\n"
    for rank in range(2):
        assert sorted(ended.log(rank).splitlines()) == [f"err {rank}", f"out {rank}"]


def test_the_environment_of_a_worker(launcher: Launcher) -> None:
    options = {"workers": 3, "plan": "micro=4", "shares": "2,1,0", "save_every": "100", "max_steps": 7}
    ended = launcher.run(
        """
        event("join")
        names = [name for name in os.environ if name.startswith("PACELINE_")] + ["OMP_NUM_THREADS", "X"]
        json.dump({name: os.environ[name] for name in names}, open(f"{RUN}/env-{RANK}", "w"))
        if RANK == 0:
            import socket
            store = socket.socket(fileno=int(os.environ["PACELINE_STORE_FD"]))
            assert store.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            assert "%s:%d" % store.getsockname() == os.environ["PACELINE_STORE"]
        assert os.getsid(0) == os.getpid()
        assert sys.stdin.read() == ""
        assert sys.argv == ["train.py", "--lr", "a b"]
        """,
        **options,
        arguments=["--lr", "a b"],
        environment={"X": "1"},
    )
    assert ended.code == 0, ended.stderr
    environments = [json.loads((ended.folder / f"env-{rank}").read_text()) for rank in range(3)]
    assert len({environment.pop("PACELINE_STORE") for environment in environments}) == 1
    for rank, environment in enumerate(environments):
        assert environment.pop("PACELINE_EVENTS_FD").isdigit()
        assert environment.pop("OMP_NUM_THREADS") == str(max(1, len(os.sched_getaffinity(0)) // 3))
        assert ("PACELINE_STORE_FD" in environment) == (rank == 0)
        environment.pop("PACELINE_STORE_FD", None)
        assert environment == {
            "PACELINE_RANK": str(rank),
            "PACELINE_WORLD_SIZE": "3",
            "PACELINE_LOCAL_RANK": str(rank),
            "PACELINE_LOCAL_SIZE": "3",
            "PACELINE_RUN_DIR": str(ended.folder),
            "PACELINE_PLAN": "micro=4",
            "PACELINE_SHARES": "2,1,0",
            "PACELINE_SAVE_EVERY": "100",
            "PACELINE_MAX_STEPS": "7",
            "X": "1",
        }


def test_a_users_number_of_threads_stays(launcher: Launcher) -> None:
    ended = launcher.run('event("join"); print(os.environ["OMP_NUM_THREADS"])', env={"OMP_NUM_THREADS": "17"})
    assert ended.stdout == "17\n"


def test_a_new_run_folder(launcher: Launcher) -> None:
    for _ in range(2):
        ended = launcher.run('event("join")', run_dir=None)
        assert ended.code == 0
    folders = sorted((launcher.folder / "runs").iterdir())
    assert len(folders) == 2
    for folder in folders:
        assert re.fullmatch(r"train-\d{8}-\d{6}(-2)?", folder.name)
        assert folder.stat().st_mode & 0o777 == 0o700
        assert (folder / "logs").stat().st_mode & 0o777 == 0o700
        for file in (folder / "logs" / "worker-1.log", folder / "lock", folder / "journal.jsonl"):
            assert file.stat().st_mode & 0o777 == 0o600


def test_the_second_start_appends_to_the_logs(launcher: Launcher) -> None:
    for _ in range(2):
        ended = launcher.run('event("join"); print("hello")')
    assert re.fullmatch(r"hello\n\n---- started again at [-\d]+ [:\d]+ ----\nhello\n", ended.log(1))


def test_events_reach_the_console(launcher: Launcher) -> None:
    ended = launcher.run("""
        event("join")
        os.write(int(os.environ["PACELINE_EVENTS_FD"]), b"no JSON\\n[1]\\n{}\\n")
        event("phase", steps=10, text="global batch 8 = 2 workers x 4 rows")
        if RANK == 0:
            event("line", text="resumed from step 5")
        else:
            event("line", text="never shown")
        event("step", step=6, loss=0.5, samples=8, seconds=0.1, time={})
        event("stopped", step=6, checkpoint=None)
        """)
    assert ended.code == 0
    assert "global batch 8 = 2 workers x 4 rows\n" in ended.stderr
    assert "resumed from step 5\n" in ended.stderr
    assert "step 6/10" in ended.stderr
    assert "never shown" not in ended.stderr


def test_quiet(launcher: Launcher) -> None:
    ended = launcher.run(
        """
        event("join"); event("phase", text="grid"); event("line", text="line"); print("out")
        warnings.warn("careful"); print("err", file=sys.stderr)
        event("finished", step=1, already=False)
        """,
        quiet=True,
    )
    assert (ended.code, ended.stdout, ended.stderr) == (0, "", "")
    assert "out\n" in ended.log(0)


def test_a_finished_run_is_reported(launcher: Launcher) -> None:
    earlier = launcher.folder / "one"
    earlier.mkdir()
    start = {"event": "start", "workers": 1}
    steps = [
        {
            "event": "step",
            "trainer": 0,
            "step": at,
            "steps": 1,
            "samples": 10,
            "seconds": 100.0 if at == 1 else 0.5,
        }
        for at in range(1, 21)
    ]
    (earlier / "journal.jsonl").write_text("".join(json.dumps(event) + "\n" for event in [start, *steps]))
    ended = launcher.run(
        """
        event("join"); event("phase", text="grid")
        if RANK == 0:
            with open(f"{RUN}/journal.jsonl", "a") as journal:
                step = {"step": 8, "steps": 8, "samples": 80, "seconds": 2, "loss": 1.5}
                for record in (
                    {"event": "start", "workers": 2, "script": "train.py", "at": 1.0},
                    {"event": "step", "trainer": 0, **step},
                    {"event": "finished", "step": 8, "at": 3.0},
                ):
                    journal.write(json.dumps(record) + "\\n")
        event("finished", step=8, already=False)
        """,
        against="one",
    )
    assert ended.code == 0, ended.stderr
    assert journal(ended.folder, "compare")[0]["samples_per_second"] == 20.0
    assert journal(ended.folder, "compare")[0]["workers"] == 1
    assert "2.00 times as fast as 1 worker" in ended.stderr
    assert "run/report.html" in ended.stderr
    assert (ended.folder / "report.html").exists()


def test_a_run_that_was_finished_before_keeps_its_report(launcher: Launcher) -> None:
    ended = launcher.run('event("join"); event("phase"); event("finished", step=8, already=True)')
    assert (ended.code, ended.stderr) == (0, "2 workers, run folder run\n")
    assert not (ended.folder / "report.html").exists()


# ---- what cannot start


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"script": "gone.py"},
            "the script gone.py does not exist; give the path of the Python file that trains\n",
        ),
        ({"script": "."}, "the script . is not a file; give the path of the Python file that trains\n"),
        ({"workers": 0}, "0 workers cannot train; give --workers 1 or more\n"),
        ({"debug": 2}, "there is no worker 2 to debug; give 0 to 1\n"),
        (
            {"shares": "1,2,3"},
            "shares '1,2,3' do not fit 2 workers; give one weight per worker, none negative, not all zero\n",
        ),
        (
            {"against": "gone"},
            "gone is no run folder: it has no journal.jsonl; name one that --run-dir made\n",
        ),
    ],
)
def test_options_that_cannot_work(launcher: Launcher, options: dict[str, object], message: str) -> None:
    ended = launcher.run("", **options)
    assert (ended.code, ended.stdout, ended.stderr) == (2, "", message)
    assert not ended.folder.exists()


def test_two_runs_in_one_folder(launcher: Launcher) -> None:
    script = 'event("join"); mark("up"); wait_for("go", 9)'
    first = launcher.start(script)
    launcher.wait_for("up")
    second = launcher.run(script)
    host = os.uname().nodename
    assert second.code == 2
    assert second.stderr == (
        f"the run folder run is in use by process {first.pid} on {host}; "
        "wait for that run to end, stop it, or give another --run-dir\n"
    )
    (launcher.folder / "run" / "go-9").touch()
    assert launcher.end(first).code == 0
    assert launcher.run(script).code == 0


def test_a_folder_that_cannot_be_made(launcher: Launcher) -> None:
    (launcher.folder / "file").touch()
    ended = launcher.run("", run_dir="file/run")
    assert ended.code == 2
    assert ended.stderr == (
        "the run folder cannot be made ([Errno 20] Not a directory: 'file/run'); give another --run-dir\n"
    )


def test_the_lock_of_a_dead_holder_whose_child_is_still_ending(tmp_path: Path) -> None:
    """A forked loader child shares the lock; who starts again at once must not be refused for it."""
    code = (
        "import os, sys, time, pathlib; from paceline.checkpoint.lock import hold_lock\n"
        "hold_lock(pathlib.Path(sys.argv[1]))\n"
        "if os.fork() == 0: os.close(1); time.sleep(1)\n"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path], env={**os.environ, "PYTHONPATH": str(SOURCE)}, check=True)
    os.close(hold_lock(tmp_path))


def test_the_lock_of_a_living_holder(tmp_path: Path) -> None:
    lock = hold_lock(tmp_path / "run")
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    with pytest.raises(LaunchError) as caught:
        hold_lock(tmp_path / "run")
    assert f"in use by process {os.getpid()} on {os.uname().nodename};" in str(caught.value)
    os.close(lock)
    os.close(hold_lock(tmp_path / "run"))


# ---- never used paceline


def test_several_workers_without_paceline(launcher: Launcher) -> None:
    ended = launcher.run("", workers=4)
    assert ended.code == 1
    assert ended.stderr == (
        "4 workers, run folder run\n"
        "train.py ended without using paceline: no Trainer was made and paceline.join() was not called, so 4 "
        "workers did the same work 4 times; make a paceline.Trainer, or run it with plain python\n"
    )


def test_one_worker_without_paceline(launcher: Launcher) -> None:
    ended = launcher.run("print(1)", workers=1)
    assert (ended.code, ended.stdout) == (0, "1\n")
    note = "note: train.py ended without using paceline, which trained and saved nothing\n"
    assert ended.stderr == "1 worker, run folder run\n" + note


def test_a_trainer_without_steps(launcher: Launcher) -> None:
    ended = launcher.run('event("join", trainer=True)')
    assert ended.code == 0
    assert ended.stderr.endswith("note: train.py made a Trainer and never asked it for steps\n")


# ---- output


def test_much_output_and_odd_bytes(launcher: Launcher) -> None:
    ended = launcher.run("""
        event("join")
        sys.stdout.write("x" * 300_000 + "\\n")
        os.write(1, b"caf\\xe9 \\xff\\n")
        for number in range(3000):
            print(number, "y" * 100, file=sys.stderr)
        os.write(1, b"no newline")
        """)
    assert ended.code == 0
    expected = "x" * 300_000 + "\ncaf\udce9 \udcff\nno newline"
    assert ended.stdout == expected
    lines = [f"{number} {'y' * 100}" for number in range(3000)]
    assert ended.stderr.splitlines()[1:] == lines
    assert len(ended.log(1)) == len(expected) + sum(len(line) + 1 for line in lines)


def test_standard_error_without_a_newline_and_with_odd_bytes(launcher: Launcher) -> None:
    ended = launcher.run("""
        event("join")
        os.write(2, b"10 %\\r50 %\\r100 %\\n")
        os.write(2, b"caf\\xe9")
        """)
    assert ended.stderr.splitlines()[1:] == ["100 %", "caf\N{REPLACEMENT CHARACTER}"]
    assert ended.log(0) == "10 %\n50 %\n100 %\ncaf\udce9"  # read back with universal newlines


def test_warnings_once_with_their_workers(launcher: Launcher) -> None:
    ended = launcher.run(
        """
        event("join")
        meet("up")
        warnings.warn("all of us")
        if RANK in (0, 2, 3):
            warnings.warn("some of us", FutureWarning)
        meet("then")
        if RANK == 1:
            warnings.simplefilter("always")
            for _ in range(3):
                warnings.warn("only me")
        print("from", RANK, file=sys.stderr)
        """,
        workers=4,
    )
    shown = re.sub(r"/\S*train.py:\d+", "train.py:N", ended.stderr).splitlines()
    assert sorted(shown[1:]) == [
        "[worker 1] UserWarning: only me (train.py:N)",
        "[workers 0, 2-3] FutureWarning: some of us (train.py:N)",
        "[workers 0-3] UserWarning: all of us (train.py:N)",
        "from 0",
    ]
    assert 'warnings.warn("only me")' in ended.log(1)


def test_a_traceback_that_was_not_the_end_is_shown(launcher: Launcher) -> None:
    ended = launcher.run("""
        import traceback
        event("join")
        try:
            1 / 0
        except ZeroDivisionError:
            traceback.print_exc()
        print("went on", file=sys.stderr)
        """)
    assert ended.code == 0
    shown = ended.stderr.splitlines()[1:]
    assert shown[0] == "Traceback (most recent call last):"
    assert shown[-2:] == ["ZeroDivisionError: division by zero", "went on"]


def test_a_traceback_is_shown_when_the_script_goes_on(launcher: Launcher) -> None:
    process = launcher.start("""
        event("join")
        print("Traceback (most recent call last):", file=sys.stderr)
        print("ValueError: caught", file=sys.stderr)
        wait_for("go", 9)
        """)
    assert process.stderr is not None
    shown = [process.stderr.readline() for _ in range(3)]
    assert shown[1:] == ["Traceback (most recent call last):\n", "ValueError: caught\n"]
    (launcher.folder / "run" / "go-9").touch()
    assert launcher.end(process).code == 0


def test_names_of_workers() -> None:
    assert ranks([2]) == "worker 2"
    assert ranks([3, 0, 2]) == "workers 0, 2-3"
    assert ranks(range(16)) == "workers 0-15"


def test_a_reader_that_goes_away_ends_nothing(launcher: Launcher) -> None:
    process = launcher.start("""
        event("join")
        mark("up")
        wait_for("go", 9)
        for number in range(1000):
            print(number, flush=True)
            print(number, file=sys.stderr)
        mark("done")
        """)
    launcher.wait_for("up")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.stderr.close()
    (launcher.folder / "run" / "go-9").touch()
    assert process.wait(60) == 0
    launcher.wait_for("done")


def on_terminal(launcher: Launcher, script: str, keys: list[bytes], **options: object) -> tuple[int, str]:
    """(exit code, what a terminal received); each time pdb asks, the next of `keys` is typed."""
    (launcher.folder / "train.py").write_text(WORKER + textwrap.dedent(script))
    given = {"script": "train.py", "workers": 2, "run_dir": "run", **options}
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(launcher.folder)
        environment = {**os.environ, "PYTHONPATH": str(SOURCE), "TERM": "xterm", "COLUMNS": "200"}
        os.execve(sys.executable, [sys.executable, "-c", MAIN, json.dumps(given)], environment)
    seen, typed = b"", 0
    with suppress(OSError):  # the other side is closed at the end
        while piece := os.read(terminal, 4096):
            seen += piece
            if typed < min(seen.count(b"(Pdb)"), len(keys)):
                os.write(terminal, keys[typed])
                typed += 1
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), seen.decode()


def test_a_breakpoint_in_one_worker(launcher: Launcher) -> None:
    script = """
        event("join")
        answer = 41
        if RANK == 1:
            breakpoint()
        print("hello from", RANK)
        """
    code, seen = on_terminal(launcher, script, [b"p answer + 1\n", b"c\n"], debug=1)
    assert code == 0, seen
    assert "42\r\n" in seen
    assert "hello from 0\r\n" in seen
    assert "hello from 1\r\n" in seen


def test_output_does_not_tear_the_progress_line(launcher: Launcher) -> None:
    script = """
        event("join")
        event("phase", trainer=0, steps=200)
        for step in range(1, 201):
            event("step", trainer=0, step=step, steps=1, loss=0.5, samples=8, seconds=0.01, time={})
            print(f"[red]said {step}[/red]")
            time.sleep(0.005)
        event("failed", kind="ValueError", step=200)
        raise ValueError("boom")
        """
    code, seen = on_terminal(launcher, script, [], workers=1)
    assert code == 1
    assert "step 200/200" in seen
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen).replace("\r", "\n").split("\n")
    assert [line for line in lines if "said" in line and "|" not in line] == [
        f"[red]said {step}[/red]" for step in range(1, 201)
    ]
    assert re.search(r"\x1b\[1;31mworker 0 failed \(host [^\n]*, after step 200\)\x1b\[0m", seen)


@pytest.mark.root
def test_a_full_disk_does_not_end_the_training(launcher: Launcher, full_disk: Path) -> None:
    ended = launcher.run(
        """
        event("join")
        print("x" * 2_000_000)
        """,
        run_dir=str(full_disk / "run"),
        workers=1,
    )
    assert ended.code == 0
    assert len(ended.stdout) == 2_000_001
    assert "the workers' logs are incomplete (No space left on device); free space on that disk\n" in ended.stderr


# ---- failures


def test_an_exception_in_one_worker(launcher: Launcher) -> None:
    ended = launcher.run("""
        def loss(batch):
            raise ValueError(f"no labels in {batch}")
        event("join")
        print("working")
        meet("up")
        if RANK == 1:
            event("failed", kind="ValueError", step=812)
            loss("batch 7")
        time.sleep(600)
        """)
    number = (launcher.folder / "train.py").read_text().splitlines().index(
        '    raise ValueError(f"no labels in {batch}")'
    ) + 1
    path = launcher.folder / "train.py"
    assert ended.code == 1
    assert ended.block == (
        "worker 1 failed (host H, pid P, after step 812)\n"
        "  ValueError: no labels in batch 7\n"
        f'  at train.py:{number} in loss: raise ValueError(f"no labels in {{batch}}")\n'
        "the end of run/logs/worker-1.log:\n"
        "  | working\n"
        "  | Traceback (most recent call last):\n"
        f'  |   File "{path}", line {number + 6}, in <module>\n'
        '  |     loss("batch 7")\n'
        f'  |   File "{path}", line {number}, in loss\n'
        '  |     raise ValueError(f"no labels in {batch}")\n'
        "  | ValueError: no labels in batch 7\n"
        "the others were stopped by us: worker 0\n"
        "logs: run/logs/\n"
        f"next: fix the cause; then run `{AGAIN}`: it starts anew: no checkpoint was written"
    )
    (event,) = journal(ended.folder, "failed")
    assert (event["worker"], event["cause"], event["code"]) == (1, "ValueError: no labels in batch 7", 1)
    assert event["host"] == os.uname().nodename
    assert str(event["text"]).endswith("no checkpoint was written")


def test_the_users_frame_is_named_and_the_traceback_shown_once(launcher: Launcher) -> None:
    ended = launcher.run(
        """
        event("join"); event("step", step=3)
        os.makedirs(RUN + "/checkpoints/step-000000000002")
        os.makedirs(RUN + "/checkpoints/.step-000000000003.tmp")
        import json.decoder
        json.loads("{")  # the library raises
        """,
        workers=1,
        plan="micro=4",
        arguments=["--lr", "a b"],
    )
    lines = (launcher.folder / "train.py").read_text().splitlines()
    number = next(at for at, line in enumerate(lines, 1) if "the library raises" in line)
    block = ended.block.splitlines()
    assert block[0] == "worker 0 failed (host H, pid P, after step 3)"
    assert block[1].startswith("  json.decoder.JSONDecodeError: Expecting property name")
    assert block[2] == f'  at train.py:{number} in <module>: json.loads("{{")  # the library raises'
    assert block[-1] == (
        "next: fix the cause; then run `paceline run --workers 1 --run-dir run --plan micro=4 train.py "
        "--lr 'a b'`: it continues from step 2"
    )
    assert ended.stderr.count("Traceback (most recent call last)") == 1  # in the block


@pytest.mark.parametrize(
    ("status", "code", "what", "cure"),
    [
        ("sys.exit(3)", 3, "ended with exit code 3", "see its log"),
        ("sys.exit('no data')", 1, "ended with exit code 1", "see its log"),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            137,
            "killed by SIGKILL: somebody, or a job manager, ended it",
            "find out who sent the signal",
        ),
        (
            "os.kill(os.getpid(), signal.SIGTERM)",
            143,
            "ended by SIGTERM: somebody, or a job manager, asked it to end",
            "find out who sent the signal",
        ),
        ("os.kill(os.getpid(), signal.SIGUSR1)", 138, "ended by SIGUSR1", "find out who sent the signal"),
        ("os.kill(os.getpid(), 40)", 168, "ended by signal 40", "find out who sent the signal"),
    ],
)
def test_other_ends(launcher: Launcher, status: str, code: int, what: str, cure: str) -> None:
    ended = launcher.run(f"""
        event("join")
        meet("up")
        if RANK == 0:
            {status}
        time.sleep(600)
        """)
    assert ended.code == code
    block = ended.block.splitlines()
    assert block[:2] == ["worker 0 failed (host H, pid P)", f"  {what}"]
    assert block[-3] == "the others were stopped by us: worker 1"
    assert block[-1].startswith(f"next: {cure}; then run `{AGAIN}`")


@pytest.mark.parametrize(
    ("crash", "code", "what"),
    [
        (
            "ctypes.string_at(8)",
            139,
            "crashed with SIGSEGV: compiled code touched memory that is not its own",
        ),
        ("os.abort()", 134, "aborted with SIGABRT: compiled code gave up"),
        (
            "os.kill(os.getpid(), signal.SIGBUS)",
            135,
            "crashed with SIGBUS: shared memory or a mapped file ended early; is /dev/shm full?",
        ),
    ],
)
def test_a_crash_in_compiled_code(launcher: Launcher, crash: str, code: int, what: str) -> None:
    ended = launcher.run(f"""
        import ctypes
        def work():
            {crash}  # here
        event("join")
        work() if RANK == 1 else time.sleep(600)
        """)
    lines = (launcher.folder / "train.py").read_text().splitlines()
    number = next(at for at, line in enumerate(lines, 1) if "# here" in line)
    assert ended.code == code
    assert ended.block.splitlines()[1:3] == [f"  {what}", f"  at train.py:{number} in work: {crash}  # here"]


def test_a_script_that_does_not_compile(launcher: Launcher) -> None:
    ended = launcher.run("event('join'\n")
    lines = (launcher.folder / "train.py").read_text().splitlines()
    block = ended.block.splitlines()
    assert ended.code == 1
    assert block[1:3] == ["  SyntaxError: '(' was never closed", f"  at train.py:{len(lines)}: event('join'"]
    assert "worker 1 failed in the same way" in block


def test_a_plan_error_is_usage(launcher: Launcher) -> None:
    ended = launcher.run("""
        event("join")
        event("failed", kind="PlanError", step=0)
        class PlanError(Exception): pass
        raise PlanError("unknown word; take another")
        """)
    assert ended.code == 2
    assert ended.block.splitlines()[1] == "  PlanError: unknown word; take another"


def test_lost_peers_are_a_consequence(launcher: Launcher) -> None:
    ended = launcher.run(
        """
        class PeerLostError(Exception): pass
        event("join")
        meet("up")
        if RANK == 3:
            time.sleep(600)
        if RANK == 1:
            wait_for("lost", 0, 2)
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        event("failed", kind="PeerLostError", step=11)
        mark("lost")
        raise PeerLostError("the connection to worker 1 broke")
        """,
        workers=4,
    )
    assert ended.code == 137
    block = ended.block.splitlines()
    assert block == [
        "worker 1 failed (host H, pid P)",
        "  killed by SIGKILL: somebody, or a job manager, ended it",
        "workers 0, 2 ended because of it",
        "the others were stopped by us: worker 3",
        "logs: run/logs/",
        "next: find out who sent the signal; then run `paceline run --workers 4 --run-dir run train.py`: it "
        "starts anew: no checkpoint was written",
    ]
    assert "PeerLostError" not in ended.stderr
    assert "PeerLostError: the connection to worker 1 broke" in ended.log(0)


def test_lost_peers_without_a_cause(launcher: Launcher) -> None:
    ended = launcher.run("""
        class PeerLostError(Exception): pass
        event("join")
        event("failed", kind="PeerLostError", step=2)
        raise PeerLostError(f"the connection broke")
        """)
    assert ended.code == 1
    assert ended.block.splitlines()[1] == "  PeerLostError: the connection broke"
    assert "worker 1 failed in the same way" in ended.block


def test_a_mismatch_names_both_and_own_failures_come_first(launcher: Launcher) -> None:
    script = """
        class CollectiveMismatchError(Exception): pass
        event("join")
        meet("up")
        if RANK == OWN:
            wait_for("failed", 0)
            raise KeyError("label")
        if RANK:
            wait_for("failed", 0)
        event("failed", kind="CollectiveMismatchError", step=2)
        mark("failed")
        raise CollectiveMismatchError(f"worker {RANK} is in save()")
        """
    ended = launcher.run("OWN = 9\n" + script.replace("\n        ", "\n"))
    assert ended.block.splitlines()[1] == "  CollectiveMismatchError: worker 0 is in save()"
    assert "worker 1 failed too: CollectiveMismatchError: worker 1 is in save() at train.py" in ended.block.replace(
        "__main__.", ""
    )
    ended = launcher.run("OWN = 1\n" + script.replace("\n        ", "\n"), run_dir="other")
    assert ended.block.splitlines()[0].startswith("worker 1 failed")
    assert ended.block.splitlines()[1] == "  KeyError: 'label'"
    assert "worker 0 ended because of it" in ended.block


def test_two_that_fail_by_themselves(launcher: Launcher) -> None:
    ended = launcher.run(
        """
        event("join")
        meet("up")
        if RANK == 2:
            event("failed", kind="KeyError", step=1)
            mark("first")
            raise KeyError("label")
        wait_for("first", 2)
        if RANK == 0:
            time.sleep(0.2)
            raise OSError("disk")
        time.sleep(600)
        """,
        workers=3,
    )
    lines = (launcher.folder / "train.py").read_text().splitlines()
    number = next(at for at, line in enumerate(lines, 1) if "disk" in line)
    block = ended.block.splitlines()
    assert block[:2] == ["worker 2 failed (host H, pid P, after step 1)", "  KeyError: 'label'"]
    assert block[-4:-2] == [
        f'worker 0 failed too: OSError: disk at train.py:{number} in <module>: raise OSError("disk")',
        "the others were stopped by us: worker 1",
    ]


def test_one_that_fails_and_does_not_end(launcher: Launcher) -> None:
    """A thread that is not a daemon keeps the interpreter alive after the exception."""
    ended = launcher.run("""
        import threading
        event("join")
        if RANK == 1:
            threading.Thread(target=time.sleep, args=(600,)).start()
            event("failed", kind="ValueError", step=4)
            raise ValueError("stuck")
        time.sleep(600)
        """)
    assert ended.code == 1
    assert ended.block.splitlines()[:2] == [
        "worker 1 failed (host H, pid P, after step 4)",
        "  ValueError: stuck",
    ]


def test_a_loader_childs_exception_names_the_users_line(launcher: Launcher) -> None:
    """torch's DataLoader raises in the worker with the child's traceback in the message."""
    ended = launcher.run(
        """
        import traceback
        event("join")
        def item(index):
            return [][index]
        try:
            item(3)
        except IndexError:
            text = traceback.format_exc()
        raise IndexError(f"Caught IndexError in DataLoader worker process 0.\\nOriginal {text}")
        """,
        workers=1,
    )
    block = ended.block.splitlines()
    assert block[1] == "  IndexError: list index out of range"
    assert block[2].endswith("in item: return [][index]")


@pytest.mark.root
def test_out_of_memory(launcher: Launcher, memory_group: MemoryGroup) -> None:
    group = memory_group(200 << 20)
    ended = launcher.run(
        """
        event("join")
        meet("up")
        if RANK == 1:
            hoard = []
            while True:
                hoard.append(bytearray(os.urandom(1 << 20)))
        time.sleep(600)
        """,
        preexec=enter_group(group),
    )
    counter = next(file for file in (group / "memory.oom_control", group / "memory.events") if file.exists())
    assert re.search(r"^oom_kill 1$", counter.read_text(), re.MULTILINE)
    assert ended.code == 137
    assert ended.block.splitlines() == [
        "worker 1 failed (host H, pid P)",
        "  killed by the kernel's out-of-memory killer (SIGKILL)",
        "the others were stopped by us: worker 0",
        "logs: run/logs/",
        "next: give it less to hold: a smaller micro= in the plan, fewer workers on this host, fewer loader "
        f"workers; then run `{AGAIN}`: it starts anew: no checkpoint was written",
    ]


# ---- stopping

POLITE = """
event("join")
stop = []
signal.signal(signal.SIGUSR1, lambda *_: stop.append(1))
mark("up")
while not stop:
    time.sleep(0.01)
os.makedirs(RUN + "/checkpoints/step-000000000120", exist_ok=True)
event("stopped", step=120, checkpoint="checkpoints/step-000000000120")
sys.exit(75)
"""
STOPPING = "stopping after this step and saving; press Ctrl-C again to stop at once\n"
START = "2 workers, run folder run\n"


@pytest.mark.parametrize(("number", "code"), [("SIGINT", 130), ("SIGTERM", 75), ("SIGHUP", 75)])
def test_a_polite_stop(launcher: Launcher, number: str, code: int) -> None:
    process = launcher.start(POLITE)
    launcher.wait_for("up")
    process.send_signal(signal.Signals[number])
    ended = launcher.end(process)
    assert ended.code == code
    assert ended.stderr == (
        f"{START}{STOPPING}stopped after step 120; saved run/checkpoints/step-000000000120\ncontinue with: {AGAIN}\n"
    )


def test_a_second_interrupt_stops_at_once(launcher: Launcher) -> None:
    process = launcher.start("""
        event("join")
        signal.signal(signal.SIGUSR1, lambda *_: mark("heard"))
        mark("up")
        while True:
            time.sleep(1)
        """)
    launcher.wait_for("up")
    process.send_signal(signal.SIGINT)
    launcher.wait_for("heard")
    process.send_signal(signal.SIGINT)
    ended = launcher.end(process)
    assert ended.code == 130
    assert ended.stderr == f"{START}{STOPPING}stopped at once; no checkpoint was written\nstart again with: {AGAIN}\n"


def test_a_stop_before_a_worker_is_ready(launcher: Launcher) -> None:
    """As in the seconds of `import torch`: nobody listens for the signal yet, so it ends the worker."""
    process = launcher.start("""
        if RANK == 1:
            signal.signal(signal.SIGUSR1, lambda *_: None)
        mark("up")
        for _ in range(600):
            time.sleep(1)
        """)
    launcher.wait_for("up")
    process.send_signal(signal.SIGINT)
    ended = launcher.end(process)
    assert ended.code == 130
    assert ended.stderr == f"{START}{STOPPING}stopped; no checkpoint was written\nstart again with: {AGAIN}\n"


def test_a_stop_that_the_workers_decided(launcher: Launcher) -> None:
    """A notice at one worker makes all stop; the agent was not asked."""
    ended = launcher.run('event("join"); event("stopped", step=7, checkpoint=None); sys.exit(75)')
    assert ended.code == 75
    assert ended.stderr == f"{START}stopped; no checkpoint was written\nstart again with: {AGAIN}\n"


def test_a_stop_that_comes_as_the_run_finishes(launcher: Launcher) -> None:
    process = launcher.start("""
        event("join")
        stop = []
        signal.signal(signal.SIGUSR1, lambda *_: stop.append(1))
        mark("up")
        while not stop:
            time.sleep(0.01)
        """)
    launcher.wait_for("up")
    process.send_signal(signal.SIGINT)
    assert launcher.end(process).code == 0


def test_a_failure_while_stopping_is_a_failure(launcher: Launcher) -> None:
    process = launcher.start(POLITE.replace("os.makedirs", "1 / 0; os.makedirs"))
    launcher.wait_for("up")
    process.send_signal(signal.SIGTERM)
    ended = launcher.end(process)
    assert ended.code == 1
    assert ended.block.splitlines()[1] == "  ZeroDivisionError: division by zero"


# ---- nothing stays behind

FAMILY = """
import subprocess
event("join")
child = subprocess.Popen(["sleep", "600"])
moved = subprocess.Popen(["sleep", "600"], process_group=0)
code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(600)"
stubborn = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
stubborn.stdout.readline()
with open(f"{RUN}/pids-{RANK}.new", "w") as file:
    print(os.getpid(), child.pid, moved.pid, stubborn.pid, file=file)
os.rename(f"{RUN}/pids-{RANK}.new", f"{RUN}/pids-{RANK}")
"""


def family(launcher: Launcher) -> list[int]:
    return [int(pid) for rank in range(2) for pid in (launcher.folder / "run" / f"pids-{rank}").read_text().split()]


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_no_process_is_left(launcher: Launcher, end: str) -> None:
    ended = launcher.run(FAMILY + end)
    pids = family(launcher)
    assert len(pids) == 8
    assert not [pid for pid in pids if alive(pid)]
    if not end:
        left = [line for line in ended.stderr.splitlines() if line.startswith("ended what the workers left running: ")]
        assert len(left) == 1
        assert left[0].count("sleep (") == 4


def test_workers_and_loader_children_die_with_a_killed_agent(launcher: Launcher) -> None:
    """A loader child asks for the signal itself, as the trainer's worker_init does."""
    process = launcher.start("""
        import ctypes, subprocess
        event("join")
        def loader():
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        child = os.fork()
        if child == 0:
            loader()
            mark("loader")
            time.sleep(600)
        wait_for("loader", RANK)
        with open(f"{RUN}/pids-{RANK}", "w") as file:
            print(os.getpid(), child, file=file)
        mark("up")
        while True:
            time.sleep(1)
        """)
    launcher.wait_for("up")
    pids = family(launcher)
    assert len(pids) == 4
    assert all(alive(pid) for pid in pids)
    process.kill()
    process.wait()
    until(lambda: not any(alive(pid) for pid in pids))
    assert launcher.run('event("join")').code == 0  # the folder is free at once


def test_the_shared_memory_of_a_killed_worker_is_tidied_by_its_own_tracker(launcher: Launcher) -> None:
    ended = launcher.run("""
        from multiprocessing.shared_memory import SharedMemory
        event("join")
        memory = SharedMemory(create=True, size=4096)
        with open(f"{RUN}/name-{RANK}", "w") as file:
            file.write(memory.name)
        meet("up")
        if RANK == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
        """)
    assert ended.code == 137
    names = [(ended.folder / f"name-{rank}").read_text() for rank in range(2)]
    assert not [name for name in names if Path("/dev/shm", name.lstrip("/")).exists()]


def test_the_agent_itself_leaves_nothing_open(launcher: Launcher) -> None:
    """Several launches in one process: same open files, no child, handlers as before."""
    (launcher.folder / "train.py").write_text(
        "import os\nos.write(int(os.environ['PACELINE_EVENTS_FD']), b'{\"event\": \"join\"}\\n')\n"
    )
    code = """
import os, signal
from paceline.launch.local import LaunchOptions, launch
handler = signal.getsignal(signal.SIGINT)
counts = []
for number in range(3):
    assert launch(LaunchOptions("train.py", workers=2, run_dir=f"run{number}")) == 0
    counts.append(len(os.listdir("/proc/self/fd")))
assert counts[0] == counts[1] == counts[2], counts
assert signal.getsignal(signal.SIGINT) is handler
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print("no child")
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=launcher.folder,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "no child\n"), done.stderr


def test_a_grandchild_that_keeps_the_pipes_open_holds_up_nothing(launcher: Launcher) -> None:
    """A daemon of the user's own, in a session of its own, is left alone."""
    ended = launcher.run("""
        import subprocess
        event("join")
        daemon = subprocess.Popen(["sleep", "600"], start_new_session=True)
        with open(f"{RUN}/pids-{RANK}", "w") as file:
            file.write(str(daemon.pid))
        print("done")
        """)
    pids = family(launcher)
    lives = [alive(pid) for pid in pids]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert (ended.code, ended.stdout, lives) == (0, "done\n", [True, True])
