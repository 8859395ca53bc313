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
from contextlib import suppress
from pathlib import Path

import pytest
from agents import AGAIN, MAIN, SOURCE, WORKER, Launcher, alive, family, journal, until

from paceline.base.text import ranks
from paceline.checkpoint.lock import hold_lock
from paceline.errors import LaunchError


@pytest.fixture(autouse=True)
def cold_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Launcher, "cold_start", True)


# ---- the plain case


def test_output_of_worker_0_is_shown_and_all_is_logged(launcher: Launcher) -> None:
    ended = launcher.run("""
        event("join")
        print("out", RANK)
        print("err", RANK, file=sys.stderr)
        """)
    assert (ended.code, ended.stdout) == (0, "out 0\n")
    assert ended.stderr == "2 workers, run folder run\nerr 0\n"
    for rank in range(2):
        assert sorted(ended.log(rank).splitlines()) == [f"err {rank}", f"out {rank}"]


def test_worker_environment_variables(launcher: Launcher) -> None:
    options = {"workers": 3, "plan": "micro=4", "shares": "2,1,0", "save_every": "100", "max_steps": 7}
    ended = launcher.run(
        """
        event("join")
        from_outside = ("PACELINE_CI", "PACELINE_COLD_START")
        ours = [name for name in os.environ if name.startswith("PACELINE_") and name not in from_outside]
        names = [*ours, "OMP_NUM_THREADS", "X"]
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
    began = environments[0]["PACELINE_BEGAN"]
    for rank, environment in enumerate(environments):
        assert environment.pop("PACELINE_EVENTS_FD").isdigit()
        assert environment.pop("OMP_NUM_THREADS") == str(max(1, len(os.sched_getaffinity(0)) // 3))
        assert environment.pop("PACELINE_STORE_FD").isdigit()
        assert environment.pop("PACELINE_COMMANDS_FD").isdigit()
        assert environment.pop("PACELINE_PULSE_FD").isdigit()
        assert environment.pop("PACELINE_AGENT").isdigit()
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
            "PACELINE_BEGAN": began,
            "X": "1",
        }


def test_omp_num_threads_of_the_user_stays(launcher: Launcher) -> None:
    script = 'event("join"); print(os.environ["OMP_NUM_THREADS"])'
    ended = launcher.run(script, env={"OMP_NUM_THREADS": "17"}, cold_start=True)
    assert ended.stdout == "17\n"


def test_new_run_folder_is_private(launcher: Launcher) -> None:
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


def test_second_start_appends_to_the_logs(launcher: Launcher) -> None:
    for _ in range(2):
        ended = launcher.run('event("join"); print("hello")')
    assert re.fullmatch(r"hello\n\n---- started again at [-\d]+ [:\d]+ ----\nhello\n", ended.log(1))


def test_worker_events_reach_the_console(launcher: Launcher) -> None:
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


def test_quiet_shows_nothing_and_logs_all(launcher: Launcher) -> None:
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


def test_finished_run_has_a_report_and_a_comparison(launcher: Launcher) -> None:
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
    assert "2.00x the speed of 1 worker" in ended.stderr
    assert "run/report.html" in ended.stderr
    assert (ended.folder / "report.html").exists()


def test_run_that_was_finished_before_writes_no_report(launcher: Launcher) -> None:
    ended = launcher.run('event("join"); event("phase"); event("finished", step=8, already=True)')
    assert (ended.code, ended.stderr) == (0, "2 workers, run folder run\n")
    assert not (ended.folder / "report.html").exists()


# ---- what cannot start


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"script": "gone.py"},
            "the script gone.py does not exist; pass the path of a Python training script\n",
        ),
        ({"script": "."}, "the script . is not a file; pass the path of a Python training script\n"),
        ({"debug": 2}, "--debug 2 does not name a worker; use 0 to 1\n"),
        (
            {"shares": "1,2,3"},
            (
                "shares '1,2,3' do not fit 2 workers; give one number per worker; none may be negative, and not"
                " all may be zero\n"
            ),
        ),
        (
            {"against": "gone"},
            "gone is not a run folder: it does not contain journal.jsonl; pass a folder made by --run-dir\n",
        ),
    ],
)
def test_options_that_cannot_work_are_usage_errors(
    launcher: Launcher, options: dict[str, object], message: str
) -> None:
    ended = launcher.run("", **options)
    assert (ended.code, ended.stdout, ended.stderr) == (2, "", message)
    assert not ended.folder.exists()


def test_second_run_in_a_used_folder_is_refused(launcher: Launcher) -> None:
    script = 'event("join"); mark("up"); wait_for("go", 9)'
    first = launcher.start(script)
    launcher.wait_for("up")
    second = launcher.run(script)
    host = os.uname().nodename
    assert second.code == 2
    assert second.stderr == (
        f"the run folder run is in use by process {first.pid} on {host}; "
        "wait for that run to end, stop it, or use another --run-dir\n"
    )
    (launcher.folder / "run" / "go-9").touch()
    assert launcher.end(first).code == 0
    assert launcher.run(script).code == 0


def test_run_folder_that_cannot_be_made(launcher: Launcher) -> None:
    (launcher.folder / "file").touch()
    ended = launcher.run("", run_dir="file/run")
    assert ended.code == 2
    assert ended.stderr == (
        "the run folder cannot be created ([Errno 20] Not a directory: 'file/run'); choose another --run-dir\n"
    )


def test_lock_of_a_dead_process_whose_child_is_still_ending(tmp_path: Path) -> None:
    """A forked loader child shares the lock; who starts again at once must not be refused for it."""
    code = (
        "import os, sys, time, pathlib; from paceline.checkpoint.lock import hold_lock\n"
        "hold_lock(pathlib.Path(sys.argv[1]))\n"
        "if os.fork() == 0: os.close(1); time.sleep(1)\n"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path], env={**os.environ, "PYTHONPATH": str(SOURCE)}, check=True)
    os.close(hold_lock(tmp_path))


def test_lock_of_a_living_process_is_refused(tmp_path: Path) -> None:
    lock = hold_lock(tmp_path / "run")
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    with pytest.raises(LaunchError) as caught:
        hold_lock(tmp_path / "run")
    assert f"in use by process {os.getpid()} on {os.uname().nodename};" in str(caught.value)
    os.close(lock)
    os.close(hold_lock(tmp_path / "run"))


# ---- never used paceline


def test_several_workers_without_paceline_exit_code_1(launcher: Launcher) -> None:
    ended = launcher.run("", workers=4)
    assert ended.code == 1
    assert ended.stderr == (
        "4 workers, run folder run\n"
        "train.py ended without using paceline: no Trainer was created and paceline.join() was not called, so 4 "
        "workers did the same work 4 times; create a paceline.Trainer, add --raw if the script uses "
        "torch.distributed, or run it with plain python\n"
    )


def test_workers_that_do_not_use_paceline_for_long_are_noted(launcher: Launcher) -> None:
    note = (
        "note: no worker has used paceline yet: no Trainer was created and paceline.join() was not called; "
        "unless train.py does this, each worker does the same work on its own\n"
    )
    soon = {"UNUSED": 0.3}
    assert launcher.run("time.sleep(1.5)", seconds=soon).stderr.count(note) == 1
    assert note not in launcher.run("event('join'); time.sleep(1.5); event('ended')", seconds=soon, run_dir="b").stderr


def test_hosts_without_paceline_exit_code_1(launcher: Launcher) -> None:
    """Also where each of them has one worker."""
    script = "mark('up')\nwait_for('up', 0, 1)\nif RANK == 0:\n    time.sleep(1)"
    first = launcher.start(script, workers=1, begin=2)
    until(lambda: (launcher.folder / "run/coordinator.json").exists())
    joined = launcher.end(launcher.start(script, workers=1, join="run"))
    ended = launcher.end(first)
    what = "train.py ended without using paceline: no Trainer was created and paceline.join() was not called"
    cure = "create a paceline.Trainer, add --raw if the script uses torch.distributed, or run it with plain python\n"
    assert (ended.code, joined.code) == (1, 1)
    assert f"{what}, so 2 workers did the same work 2 times; {cure}" in ended.stderr
    assert f"{what}, so each worker did the same work on its own; {cure}" in joined.stderr


def test_init_process_group_in_a_worker_has_a_hint(launcher: Launcher) -> None:
    """A script that hides the call is not refused before it starts."""
    script = "import torch.distributed as dist\ngetattr(dist, 'init_process_' + 'group')('gloo')"
    ended = launcher.run(script, cold_start=False)
    assert ended.code == 1
    assert (
        "\nnext: `paceline run` sets RANK and MASTER_ADDR only with --raw: add --raw before the script, or create a "
        f"paceline.Trainer, which needs no process group of torch.distributed; then run `{AGAIN}`: it starts over"
    ) in ended.stderr


def test_one_worker_without_paceline_is_a_note(launcher: Launcher) -> None:
    ended = launcher.run("print(1); time.sleep(1.5)", workers=1, seconds={"UNUSED": 0.3})  # one may do without for long
    assert (ended.code, ended.stdout) == (0, "1\n")
    note = "note: train.py ended without using paceline, so Paceline trained and saved nothing\n"
    assert ended.stderr == "1 worker, run folder run\n" + note


def test_trainer_without_steps_is_a_note(launcher: Launcher) -> None:
    ended = launcher.run('event("join", trainer=True); event("ended")')
    assert ended.code == 0
    assert ended.stderr.endswith("note: train.py created a Trainer but ran no training step\n")
    again = 'event("join", trainer=True); event("finished", step=8, already=True); event("ended")'
    assert "never asked" not in launcher.run(again).stderr


# ---- output


def test_large_output_and_invalid_utf8(launcher: Launcher) -> None:
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


def test_output_of_an_ended_worker_is_read_to_its_end(launcher: Launcher) -> None:
    process = launcher.start(
        """
        import fcntl
        event("join")
        fcntl.fcntl(1, fcntl.F_SETPIPE_SZ, 1 << 20)
        with open(f"{RUN}/pids-{RANK}", "w") as file:
            file.write(str(os.getpid()))
        mark("up")
        wait_for("go", 9)
        os.write(1, b"x" * 1_000_000)
        """,
        workers=1,
    )
    launcher.wait_for("up", workers=1)
    process.send_signal(signal.SIGSTOP)
    (launcher.folder / "run" / "go-9").touch()
    (pid,) = family(launcher, workers=1)
    until(lambda: not alive(pid))
    process.send_signal(signal.SIGCONT)
    ended = launcher.end(process)
    assert (ended.code, len(ended.stdout), len(ended.log(0))) == (0, 1_000_000, 1_000_000)


def test_standard_error_without_newline_and_invalid_utf8(launcher: Launcher) -> None:
    ended = launcher.run("""
        event("join")
        os.write(2, b"10 %\\r50 %\\r100 %\\n")
        os.write(2, b"caf\\xe9")
        """)
    assert ended.stderr.splitlines()[1:] == ["100 %", "caf\N{REPLACEMENT CHARACTER}"]
    assert ended.log(0) == "10 %\n50 %\n100 %\ncaf\udce9"  # read back with universal newlines


def test_equal_warnings_of_workers_are_shown_once(launcher: Launcher) -> None:
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


def test_printed_traceback_of_a_handled_exception_is_shown(launcher: Launcher) -> None:
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


def test_printed_traceback_is_shown_while_the_script_runs(launcher: Launcher) -> None:
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


def test_ranks_text() -> None:
    assert ranks([2]) == "worker 2"
    assert ranks([3, 0, 2]) == "workers 0, 2-3"
    assert ranks(range(16)) == "workers 0-15"


def test_closed_output_pipe_does_not_end_the_run(launcher: Launcher) -> None:
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
    given = {"script": "train.py", "workers": 2, "run_dir": "run", "cold_start": True, **options}
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


def test_debug_option_gives_a_breakpoint_the_terminal(launcher: Launcher) -> None:
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


def test_progress_line_on_a_terminal_keeps_output_whole(launcher: Launcher) -> None:
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
def test_full_disk_does_not_end_the_training(launcher: Launcher, full_disk: Path) -> None:
    """The coordinator is there before the disk is full, and has written its key."""
    ended = launcher.run(
        f"""
        import pathlib, time
        while not pathlib.Path({str(full_disk / "run" / "reading_key")!r}).exists():
            time.sleep(0.01)
        event("join")
        print("x" * 2_000_000)
        """,
        run_dir=str(full_disk / "run"),
        workers=1,
    )
    assert ended.code == 0
    assert len(ended.stdout) == 2_000_001
    assert (
        "the logs of the workers are incomplete (No space left on device); free some space on that disk\n"
        in ended.stderr
    )
