"""`paceline stop`, `stacks`, `profile` and `logs` for runs started elsewhere."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from paceline.base.console import Coloured, coloured, in_one_line, last_painted, printable, say
from paceline.base.environment import parse_whole
from paceline.base.journal import read_journal
from paceline.base.schema import open_file
from paceline.base.stacks import FOLDER
from paceline.base.text import plural, ranks
from paceline.base.tracebacks import named
from paceline.errors import FormatError, LaunchError, PacelineError, UsageError
from paceline.launch.coordinator_process import ADDRESS
from paceline.launch.joining import NO_TOKEN, find_run
from paceline.launch.options import LaunchOptions
from paceline.observe.profiling import FOLDER as PROFILES
from paceline.observe.profiling import profile_of
from paceline.team.coordinator_client import RefusedError, UnsignedError, Wire, ask_challenge, ask_once
from paceline.team.stack_requests import table

LOOK, AGAIN = 0.2, 0.02  # seconds between two looks at a run, or for answers
PATIENCE = 5.0  # seconds for agents to answer


def stop(run: str, token_file: str | None, wait: bool) -> int:
    """Asks a run, by its folder or HOST:PORT, to stop with a checkpoint, and waits until it has ended. UsageError: the
    run is not named correctly, or refuses. LaunchError: it does not answer.
    """
    address, token, folder = _find_run(run, token_file)
    reply = _ask(address, token, "/stop", {}, "stopped")
    done = f"has done {plural(reply['step'], 'step')}; it saves and stops after the current step"
    say(f"{in_one_line(run)} {'stops' if _is_raw(folder) else done}")
    while wait and _answers(address, token):
        time.sleep(LOOK)
    if wait:
        say(f"{in_one_line(run)} has ended{_how(folder)}")
    return 0


def stacks(run: str, token_file: str | None) -> str:
    """Describes in a table what all workers of a run do, and writes their stacks and last collectives into the run
    folder. UsageError, LaunchError: as for `stop`.
    """
    address, token, folder = _find_run(run, token_file)
    reply, end = _ask(address, token, "/stacks", {}, "asked"), time.monotonic() + PATIENCE
    while reply["waits"] and time.monotonic() < end:
        time.sleep(AGAIN)
        reply = _ask(address, token, "/stacks", {"asked": reply["asked"]}, "asked")
    where = reply["folder"] if folder is None else named(folder / FOLDER)
    lines = [f"{agent} does not answer" for agent in reply["waits"]]
    lines = [f"{plural(len(reply['workers']), 'worker')}:", *table(reply["workers"]), *lines]
    return "\n".join([*lines, f"all stacks and last collectives: {where}" + ("" if folder else f" on {address[0]}")])


def profile(run: str, steps: int, workers: str | None, token_file: str | None) -> int:
    """Profiles the next steps of some workers, or of all, and waits for the files. UsageError, LaunchError: as for
    `stop`, or the run ends before.
    """
    address, token, folder = _find_run(run, token_file)
    if _is_raw(folder):
        what = f"{in_one_line(run)} was started with --raw, and Paceline does not see the steps of its script"
        raise UsageError(what, "use torch.profiler in the script, or see `paceline stacks`")
    requested = [parse_whole("--workers ", number, 0) for number in workers.split(",")] if workers is not None else None
    reply = _ask(address, token, "/profile", {"steps": steps, "workers": requested}, "profiled")
    profiled = reply["workers"]
    say(f"profiling {plural(steps, 'step')} of {ranks(profiled)}")
    run_folder = folder or Path(reply["folder"])
    if folder is None:
        say(f"the profile will be in {run_folder / PROFILES / str(reply['asked'])} on the hosts of these workers")
        return 0
    while missing := [worker for worker in profiled if not profile_of(run_folder, reply["asked"], worker).exists()]:
        if not _answers(address, token):
            what = f"{in_one_line(run)} ended before {ranks(missing)} had written a profile"
            raise LaunchError(
                what, "profile fewer steps; profiles of workers on other hosts are in the run folders there"
            )
        time.sleep(LOOK)
    for worker in profiled:
        say(named(profile_of(run_folder, reply["asked"], worker)), sys.stdout)
    return 0


def _is_raw(folder: Path | None) -> bool:
    """Whether the run in this folder was started with --raw."""
    return folder is not None and any(event.get("raw") for event in read_journal(folder) if event["event"] == "start")


def _find_run(run: str, token_file: str | None) -> tuple[tuple[str, int], bytes, Path | None]:
    """The address of a run's coordinator, its token, and the run folder if it is on this host."""
    if Path(run).is_dir() and not (Path(run) / ADDRESS).exists():
        what = f"no run was started in {in_one_line(run)}, or its coordinator is on another host"
        raise UsageError(what, "pass the run folder on the host of its coordinator")
    return find_run(LaunchOptions(script="", join=run, token_file=token_file))


def _ask(address: tuple[str, int], token: bytes, path: str, what: Any, to_be: str) -> Any:
    """Sends a signed request to a coordinator and returns its answer. `to_be`: the participle for error messages, such
    as "stopped".
    """
    where = f"{address[0]}:{address[1]}"
    try:
        with Wire(address, token) as wire:
            return ask_once(wire, path, what, 0)
    except RefusedError as refused:
        raise UsageError(f"the run at {where} cannot be {to_be}: {refused}", "see the console of the run") from None
    except UnsignedError as error:
        if error.code == 401:
            cure = "copy the file token of its run folder here again"
            raise UsageError(f"the run at {where} cannot be {to_be}: the token is wrong", cure) from None
        raise LaunchError(str(error), NO_TOKEN) from None
    except FormatError as error:
        raise LaunchError(error.what, error.cure) from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "no answer"
        cure = "if the run has ended, `paceline report RUN` shows how"
        raise LaunchError(f"no run answers at {where} ({why})", cure) from error


def _answers(address: tuple[str, int], token: bytes) -> bool:
    """Whether the run's coordinator answers; another program at its port does not count."""
    try:
        with Wire(address, token) as wire:
            ask_challenge(wire)
        return True
    except (OSError, ValueError, RefusedError, FormatError):
        return False


def _how(folder: Path | None) -> str:
    ends = [] if folder is None else [e for e in read_journal(folder) if e["event"] in ("stopped", "finished")]
    return f": {ends[-1]['event']} at step {ends[-1].get('step')}" if ends else ""


def logs(run: str, follow: bool, lines: int | None) -> int:
    """Prints the logs of all workers, each line with the name of its worker; with `follow` until the run has ended.
    UsageError: there is no such folder.
    """
    folder = Path(run)
    if not (folder / "logs").is_dir():
        what = f"{in_one_line(folder)} contains no logs"
        raise UsageError(what, "pass the folder of a run that was started on this host")
    read: dict[Path, int] = {}
    while True:
        ended = not (follow and _runs(folder))
        for path in sorted([*folder.glob("logs/*.log"), *folder.glob("hosts/*/logs/*.log")]):
            host = "" if path.parent.parent == folder else f"{path.parent.parent.name} "
            _show(path, f"{host}{path.stem.removeprefix('worker-')} | ", read, lines)
        if ended:
            return 0
        time.sleep(LOOK)


def _show(path: Path, whose: str, read: dict[Path, int], lines: int | None) -> None:
    """Prints the complete lines that are new since the last call; at the first call, at most the last `lines`."""
    with open_file(path) as file:
        file.seek(read.get(path, 0))
        data = file.read()
    complete_lines = data[: data.rfind(b"\n") + 1]
    new_lines = complete_lines.split(b"\n")[:-1]
    if path not in read and lines is not None:
        new_lines = new_lines[len(new_lines) - min(lines, len(new_lines)) :]
    read[path] = read.get(path, 0) + len(complete_lines)
    for line in new_lines:
        say(Coloured(printable(whose) + coloured(last_painted(line))), sys.stdout)


def _runs(folder: Path) -> bool:
    try:
        address, token, _ = find_run(LaunchOptions(script="", join=str(folder)))
    except PacelineError:
        return False
    return _answers(address, token)
