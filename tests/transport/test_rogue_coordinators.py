"""Whoever has a coordinator's address without the run's token can make nobody believe anything."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from agents import journal, until
from clusters import PORT, Cluster, same
from clusters import cluster as cluster
from clusters import undisturbed as undisturbed
from launching import paceline, piped
from networks import hosts as hosts
from paths import SUPPORT
from rogues import Rogue
from test_coordinator_link import RUN

from paceline.team.join_options import TermsError, check_terms

SCRIPT = """
open("trained", "w").close()
"""
SLOWLY = """
from basics import *
import time
for report in make().steps(data, epochs=1000):
    time.sleep(0.02)
"""
CURE = "check whether the run is still running there, or copy the file token of its run folder here again"
WHOLE = ("takes", "refuses", "differs", "text", "deep", "noise", "endless")
QUICK = ("takes", "endless")


def make_token(folder: Path) -> Path:
    token = folder / "token"
    token.write_text(64 * "7")
    token.chmod(0o600)
    return token


def unsigned(rogue: Rogue) -> str:
    return f"paceline: the program at 127.0.0.1:{rogue.port} does not know this run's token; {CURE}\n"


@pytest.mark.parametrize("how", [pytest.param(how, marks=[] if how in QUICK else pytest.mark.slow) for how in WHOLE])
def test_who_joins_takes_nothing_from_another_program(tmp_path: Path, how: str) -> None:
    """It executes nothing, trains nothing, and what it prints is its own sentence."""
    (tmp_path / "train.py").write_text(SCRIPT)
    token = make_token(tmp_path)
    with Rogue(how) as rogue:
        command = ("run", "--join", f"127.0.0.1:{rogue.port}", "--token-file", token, "train.py")
        done = paceline(*command, cwd=tmp_path, code=2)
        assert (done.stdout, done.stderr) == ("", unsigned(rogue))
        assert {*rogue.asked} == {"/challenge"}, "nothing of what is wanted was signed for it"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs", "token", "train.py"]


def test_who_joins_takes_only_options_from_one_that_has_the_token(tmp_path: Path) -> None:
    """A run of another user's, or of a host that was taken over."""
    (tmp_path / "train.py").write_text(SCRIPT)
    token = make_token(tmp_path)
    with Rogue("takes", token=token.read_text()) as rogue:
        where = f"127.0.0.1:{rogue.port}"
        done = paceline("run", "--join", where, "--token-file", token, "train.py", cwd=tmp_path, code=2)
        what = f"the run at {where} cannot be joined: its answer has the unknown field 'arguments'"
        cure = "use the same version of Paceline as the run"
        assert (done.stdout, done.stderr) == ("", f"paceline: {what}; {cure}\n")
        assert rogue.asked == ["/challenge", "/join"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs", "token", "train.py"]


@pytest.mark.slow
def test_another_program_that_refuses_or_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    token = make_token(tmp_path)
    for how, what in (
        ("wrong", "the run at {} rejects this token; copy the file token of its run folder here again"),
        ("silent", "no run answers at {} (no answer); check whether the run is still running"),
        ("drips", "no run answers at {} (no answer); check whether the run is still running"),
    ):
        with Rogue(how) as rogue:
            where = f"127.0.0.1:{rogue.port}"
            done = paceline("run", "--join", where, "--token-file", token, "train.py", cwd=tmp_path, code=2)
            assert (done.stdout, done.stderr) == ("", f"paceline: {what.format(where)}\n")


@pytest.mark.slow
def test_who_comes_back_to_a_run_believes_no_other_program(tmp_path: Path) -> None:
    token = make_token(tmp_path)
    with Rogue("takes") as rogue:
        where = f"127.0.0.1:{rogue.port}"
        for command in ("stop", "stacks", "profile"):
            done = paceline(command, where, "--token-file", token, cwd=tmp_path, code=2)
            assert (done.stdout, done.stderr) == ("", unsigned(rogue))
        assert {*rogue.asked} == {"/challenge"}


def test_who_watches_shows_nothing_of_another_program_and_gives_no_key_away(tmp_path: Path) -> None:
    key = tmp_path / "reading_key"
    key.write_text(64 * "7")
    for how, what in (
        ("text", "the server at {} does not know this reading key"),
        ("refuses", "the server at {} does not know this reading key"),
        ("wrong", "the run at {} has a different reading key"),
    ):
        with Rogue(how) as rogue:
            where = f"127.0.0.1:{rogue.port}"
            done = paceline("watch", "--once", where, "--key-file", key, cwd=tmp_path, code=2)
            told = f"paceline: {what.format(where)}; use the file reading_key from its run folder\n"
            assert (done.stdout, done.stderr) == ("", told)
            assert not any(64 * "7" in signed for signed in rogue.signed)


@pytest.mark.slow
def test_what_a_coordinator_answered_before_is_no_answer(tmp_path: Path) -> None:
    """One that stands between hears all, and replays it while the run goes on and when its port is free."""
    (tmp_path / "train.py").write_text(SLOWLY)
    run = piped([sys.executable, "-m", "paceline", "run", "--run-dir", "run", "train.py"], tmp_path)
    until(lambda: (tmp_path / "run/journal.jsonl").exists() and journal(tmp_path / "run", "step"))
    port = json.loads((tmp_path / "run/coordinator.json").read_text())["port"]
    options = ("--token-file", tmp_path / "run/token")
    with Rogue("relays", to=port) as rogue:
        where = f"127.0.0.1:{rogue.port}"
        paceline("stacks", where, *options, cwd=tmp_path)
        paceline("profile", where, "--steps", "1", *options, cwd=tmp_path)
        paceline("stop", where, *options, "--no-wait", cwd=tmp_path)
        assert {"/challenge", "/stacks", "/profile", "/stop"} == {*rogue.kept}
        rogue.how = "replays"
        run.communicate(timeout=60)
        for command in ("stop", "stacks", "profile"):
            done = paceline(command, where, *options, cwd=tmp_path, code=2)
            assert (done.stdout, done.stderr) == ("", unsigned(rogue))
    with Rogue("replays", port=port) as after:
        after.kept = rogue.kept
        done = paceline("stop", "run", cwd=tmp_path, code=2)
        assert (done.stdout, done.stderr) == ("", unsigned(after))
        assert paceline("logs", "-f", "run", cwd=tmp_path, timeout=30).returncode == 0, "the run has ended"


@pytest.mark.slow
def test_a_run_that_is_stopped_has_ended_whoever_has_its_port_then(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SLOWLY)
    run = piped([sys.executable, "-m", "paceline", "run", "--run-dir", "run", "train.py"], tmp_path)
    until(lambda: (tmp_path / "run/journal.jsonl").exists() and journal(tmp_path / "run", "step"))
    port = json.loads((tmp_path / "run/coordinator.json").read_text())["port"]
    with Rogue("relays", to=port) as rogue:
        where = ("stop", f"127.0.0.1:{rogue.port}", "--token-file", "run/token")
        stop = piped([sys.executable, "-m", "paceline", *where], tmp_path)
        until(lambda: "/stop" in rogue.kept)
        rogue.how = "takes"
        told = stop.communicate(timeout=60)[1]
    assert stop.returncode == 0
    assert told.endswith(f"{where[1]} has ended\n")
    run.communicate(timeout=60)


def test_a_joiner_takes_a_fixed_list_of_options_and_of_each_its_own_form() -> None:
    joined = {"session": 32 * "1", "numbers": [0], "epoch": 1, "run": RUN}
    check_terms(joined)

    def refusal(**changed: object) -> str:
        run = {**RUN, "given": {**RUN["given"], **changed.pop("given", {})}, **changed}  # type: ignore[dict-item]
        with pytest.raises(TermsError) as caught:
            check_terms({**joined, "run": run})
        return str(caught.value)

    assert refusal(module="http.server") == "its answer has the unknown field 'module'"
    assert refusal(given={"module": "http.server"}) == "its answer has the unknown field 'module'"
    assert refusal(given={"notify": "touch owned"}) == "its answer has the unknown field 'notify'"
    assert refusal(given={"plan": ["data=1"]}) == "its answer has the invalid value plan=['data=1']"
    assert refusal(given={"plan": "\x1b[31m"}) == "its answer has the invalid value plan='\\x1b[31m'"
    assert refusal(given={"keep": "2"}) == "its answer has the invalid value keep='2'"
    assert refusal(given={"keep": True}) == "its answer has the invalid value keep=True"
    assert refusal(given={"shares": "a"}) == "its answer has the invalid value shares='a'"
    assert refusal(given={"save_every": "soon"}) == "its answer has the invalid value save_every='soon'"
    assert refusal(trial=[0, 5.0]) == "its answer has the invalid value trial=[0, 5.0]"
    assert refusal(workers=-1) == "its answer has the invalid value workers=-1"
    assert refusal(store="http://x") == "its answer has the invalid value store='http://x'"
    assert refusal(served=["x", None, "run"]) == "its answer has the invalid value served=['x', None, 'run']"


@pytest.mark.slow
@pytest.mark.root
def test_workers_of_a_lost_coordinator_wait_whatever_has_its_address(
    cluster: Callable[[int], Cluster], undisturbed: Path
) -> None:
    """The other host hears that the run is over, from one without the token, and that is no word of the coordinator."""
    here = cluster(2)
    here.spread(1, 2)
    here.agents[0].kill()
    here.until(lambda: not here.coordinators())
    host = here.network.hosts[0]
    command = host.command(sys.executable, SUPPORT / "rogues.py", host.address, str(PORT), "takes")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as rogue:
        try:
            assert rogue.stdout is not None
            assert rogue.stdout.readline() == f"{PORT}\n"
            waits = "does not know this run's token; the workers of this host wait"
            here.until(lambda: waits in here.agents[1].text)
            time.sleep(1.0)  # in which it answers what it is asked
            assert "owned" not in here.agents[1].text
            assert here.agents[1].process.poll() is None
            done = paceline("run", "--take-over", here.agents[1].folder, cwd=here.folder)
            assert done.stdout == "this host runs the coordinator now; the other hosts connect to it by themselves\n"
            here.members(2, agent=1)
            here.end(-9, 0)
        finally:
            rogue.kill()
    same(here, undisturbed, first=1)
