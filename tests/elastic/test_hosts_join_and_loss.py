"""Several hosts, each with its agent: joins, losses of hosts, links and coordinators. The weights are always those of
an undisturbed run, to the byte.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from clusters import Cluster, same, worker_of
from clusters import cluster as cluster
from clusters import undisturbed as undisturbed
from launching import SCRIPTS, paceline
from networks import hosts as hosts
from oracle import apart
from safetensors.torch import load_file

from paceline.observe.summary import Summary
from paceline.observe.team_table import members
from paceline.team.fault_injection import read_log

pytestmark = pytest.mark.root


def test_host_joins_and_leaves(cluster: Callable[[int], Cluster], undisturbed: Path) -> None:
    here = cluster(2)
    here.spread(1, 2)
    assert sorted(here.status()["members"]) == sorted(here.status(host=1)["members"]) == [0, 1, 2]
    without = here.network.hosts[1].command("curl", "--silent", "http://10.77.0.1:29400/status")
    said = json.loads(subprocess.run(without, capture_output=True, text=True, check=True).stdout)
    assert said == {
        "refused": "a request for /status from another host needs the key in the file reading_key of the run folder"
    }
    here.stop(1)
    here.members(1)
    here.end(0, 75)
    same(here, undisturbed)
    assert "\nworker 1 has joined: " in here.agents[0].text
    assert re.search(r"^worker 2 left as requested: 1 worker goes on$", here.agents[0].text, re.M)
    (gives,) = here.agents[0].events("gives")  # the other one takes it from this one
    assert gives["worker"] in (1, 2)
    assert gives["bytes"] < gives["whole"] / 4, "most of it had gone ahead, and came out the same"
    left = f"paceline run --join 10.77.0.1:29400 --token-file {here.folder / 'run-0' / 'token'} --workers 2 "
    assert f"left the run, which continues without this host\nrejoin with: {left}" in here.agents[1].text


@pytest.mark.slow
def test_network_cut_of_a_host_that_comes_back(cluster: Callable[[int], Cluster], undisturbed: Path) -> None:
    """Two workers and four: those that cannot reach the coordinator wait, also where they are more."""
    here = cluster(2)
    here.spread(2, 4)
    here.network.hosts[1].cut()
    here.members(2)
    time.sleep(2.0)
    assert "the coordinator at 10.77.0.1:29400 does not answer" in here.agents[1].text
    here.network.hosts[1].mend()
    here.members(6)
    here.end(0, 0)
    same(here, undisturbed)
    (lost,) = here.agents[0].events("lost")
    assert sorted(lost["workers"]) == [2, 3, 4, 5]
    assert re.fullmatch(r"are lost \(the agent on nowhere-2 has been silent for \d\.\d s\)", str(lost["why"]))
    formed = [event["workers"] for event in here.agents[1].events("formed")]
    assert formed == [], "a side without the coordinator made a generation"


@pytest.mark.slow
def test_host_that_is_stopped_during_a_network_cut_leaves(cluster: Callable[[int], Cluster], undisturbed: Path) -> None:
    """What the coordinator wants of it meanwhile, to start its workers again, is over then."""
    here = cluster(2)
    here.spread(2, 2)
    here.network.hosts[1].cut()
    here.members(2)
    here.stop(1)
    time.sleep(1.0)
    here.network.hosts[1].mend()
    here.end(0, 75)
    same(here, undisturbed)
    formed = [event["workers"] for event in here.agents[0].events("formed")]
    assert formed[-2:] == [[0, 1, 2, 3], [0, 1]]  # before that they may have come one by one


LARGE = """
from basics import *
import sys, time
big = lambda: nn.Sequential(nn.Linear(10, 512), nn.ReLU(), nn.Linear(512, 512), nn.Linear(512, 2)).double()
trainer = paceline.Trainer(big, cross_entropy, torch.optim.AdamW, global_batch=24, plan={plan!r})
for report in trainer.steps(data, count={count}):
    time.sleep({pause})
trainer.export("out.safetensors")
"""


def large(folder: Path, pause: float, count: int, plan: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Path]:
    """A script whose state takes a while to hand over, and what one worker gives with it."""
    monkeypatch.setenv("PYTHONPATH", str(SCRIPTS))
    code = LARGE.format(pause=pause, count=count, plan=plan)
    alone = folder / "alone"
    alone.mkdir()
    (alone / "other.py").write_text(code.replace(f"time.sleep({pause})", "pass"))
    paceline("run", "other.py", cwd=alone)
    return code, alone / "out.safetensors"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mbit", "pause", "count", "plan"), [(100, 1.5, 14, "exact"), (100, 1.5, 14, "micro=3"), (20, 0.3, 30, "exact")]
)
def test_join_with_a_state_that_takes_seconds_to_send(
    cluster: Callable[[int], Cluster],
    tmp_path: Path,
    mbit: int,
    pause: float,
    count: int,
    plan: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """6 MB, of whose changes a step has 2: beside training where the link takes that, else in one announced wait."""
    code, alone = large(tmp_path, pause, count, plan, monkeypatch)
    here = cluster(2)
    for host in here.network.hosts:
        host.cap(mbit)
    here.start(0, 1, code=code)
    here.until(lambda: here.status().get("step", 0) > 2)
    here.start(1, 1, code=code)
    here.end(0, 0)
    if plan == "exact":
        assert (tmp_path / "out.safetensors").read_bytes() == alone.read_bytes()
    assert apart(load_file(tmp_path / "out.safetensors"), load_file(alone)) < 1e-12
    assert [event["workers"] for event in here.agents[0].events("formed")] == [[0, 1]]
    (gives,) = here.agents[0].events("gives")
    told = re.search(
        r"^training pauses for about (\S+) s: sending 6\.\d+ MB of state to worker 1$",
        here.agents[0].text,
        re.M,
    )
    if mbit == 100:
        assert gives["bytes"] < gives["whole"] / 100
        assert told is None
    else:
        assert gives["bytes"] == gives["whole"]
        assert told is not None


@pytest.mark.slow
def test_kill_of_the_worker_that_sends_the_state_to_a_joining_host(
    cluster: Callable[[int], Cluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another takes its place, or the newcomer is given all of it when it is admitted."""
    code, alone = large(tmp_path, 2.0, 16, "exact", monkeypatch)
    here = cluster(2)
    for host in here.network.hosts:
        host.cap(20)
    here.start(0, 2, code=code)
    here.until(lambda: here.status().get("step", 0) > 2)
    here.start(1, 1, code=code)
    here.until(lambda: here.status()["workers"].get("2", {}).get("state") == "waiting")
    os.kill(worker_of(here.agents[0].folder, 0), signal.SIGKILL)
    here.end(0, 0)
    assert (tmp_path / "out.safetensors").read_bytes() == alone.read_bytes()
    assert [event["workers"] for event in here.agents[0].events("lost")] == [[0]]
    assert {2} <= set(here.agents[0].events("formed")[-1]["workers"])


@pytest.mark.slow
def test_network_cut_between_two_halves(cluster: Callable[[int], Cluster], undisturbed: Path) -> None:
    here = cluster(2)
    here.spread(3, 3)
    here.network.hosts[0].cut()
    here.until(
        lambda: len(here.agents[0].events("formed")) > 0 and here.agents[0].events("formed")[-1]["workers"] == [0, 1, 2]
    )
    before = here.agents[0].events("formed")[-1]["step"]
    here.until(lambda: here.agents[0].events("step")[-1]["step"] > before)
    here.network.hosts[0].mend()
    here.members(6)
    here.end(0, 0)
    same(here, undisturbed)


@pytest.mark.slow
def test_killed_host_joins_again(cluster: Callable[[int], Cluster], undisturbed: Path) -> None:
    here = cluster(3)
    here.spread(2, 2, 2)
    here.agents[1].kill()
    here.members(4)
    here.start(1, 2)
    here.members(6)
    here.end(0, -9, 0, 0)
    same(here, undisturbed)
    (lost,) = here.agents[0].events("lost")
    assert lost["why"] == "are lost (the agent on nowhere-2 disconnected)"


@pytest.mark.slow
@pytest.mark.parametrize("meanwhile", ["", "a worker", "a worker on the other host"])
def test_kill_of_the_coordinator(cluster: Callable[[int], Cluster], undisturbed: Path, meanwhile: str) -> None:
    """Training goes on meanwhile; a loss waits until it is back."""
    here = cluster(2)
    here.spread(3, 3)
    (pid,) = here.coordinators()
    os.kill(pid, signal.SIGKILL)
    if meanwhile:
        path = here.agents[0].folder if meanwhile == "a worker" else here.agents[1].folder
        os.kill(worker_of(path), signal.SIGKILL)
    here.until(lambda: "the coordinator ended (SIGKILL) and is restarted" in here.agents[0].text)
    here.members(6)
    here.end(0, 0)
    same(here, undisturbed)
    assert len(here.agents[0].events("lost")) == bool(meanwhile)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "cut"])
def test_take_over_by_another_host(cluster: Callable[[int], Cluster], undisturbed: Path, how: str) -> None:
    """The first host is lost, or only cut off: then it goes on by itself until it hears of the other coordinator."""
    here = cluster(3)
    here.spread(2, 2, 2)
    if how == "kill":
        here.agents[0].kill()
    else:
        here.network.hosts[0].cut()
    here.until(lambda: "does not answer; the workers of this host wait" in here.agents[1].text)
    here.until(lambda: "does not answer; the workers of this host wait" in here.agents[2].text)
    done = paceline("run", "--take-over", here.agents[1].folder, cwd=here.folder)
    assert done.stdout == "this host runs the coordinator now; the other hosts connect to it by themselves\n"
    here.members(4, agent=1)
    assert here.status(1)["epoch"] == 2
    if how == "cut":
        here.network.hosts[0].mend()
        here.members(6, agent=1)
        assert [event["epoch"] for event in here.agents[0].events("fenced")] == [2]
        assert "has taken over; the workers of this host join it as new workers" in here.agents[0].text
    here.end(-9 if how == "kill" else 0, 0, 0)
    same(here, undisturbed, first=1)


@pytest.mark.slow
def test_signal_to_the_host_that_took_over_stops_the_run_which_its_folder_continues(
    cluster: Callable[[int], Cluster], undisturbed: Path
) -> None:
    """The only host that is left."""
    here = cluster(2)
    here.spread(1, 2)
    here.agents[0].kill()
    here.until(lambda: "does not answer; the workers of this host wait" in here.agents[1].text)
    paceline("run", "--take-over", here.agents[1].folder, cwd=here.folder)
    here.members(2, agent=1)
    here.stop(1)
    here.end(-9, 75)
    (stopped,) = here.agents[1].events("stopped")
    again = f"paceline run --workers 2 --run-dir run-1 {SCRIPTS / 'survivor.py'} out {here.steps}"
    saved = f"saved run-1/checkpoints/step-{stopped['step']:012d}"
    assert f"stopped after step {stopped['step']}; {saved}\ncontinue with: {again}\n" in here.agents[1].text
    done = paceline(*again.split()[1:], cwd=here.folder)
    assert f"resuming from step {stopped['step']} of " in done.stdout + done.stderr
    same(here, undisturbed, first=1)


WAITS = """
if os.environ["PACELINE_RANK"] != "0":
    time.sleep(300)
trainer = paceline.Trainer("""


@pytest.mark.slow
def test_stop_after_a_take_over_by_a_host_without_the_state_ends_the_run(cluster: Callable[[int], Cluster]) -> None:
    """Its workers had not joined when the first host was lost, and nothing can be saved."""
    here, code = cluster(2), (SCRIPTS / "survivor.py").read_text().replace("trainer = paceline.Trainer(", WAITS)
    here.start(0, 1, code=code)
    here.members(1)
    here.start(1, 2, code=code)
    here.until(lambda: "for the run at" in here.agents[1].text)
    here.agents[0].kill()
    here.until(lambda: "does not answer; the workers of this host wait" in here.agents[1].text)
    paceline("run", "--take-over", here.agents[1].folder, cwd=here.folder)
    here.until(lambda: "and no other worker has the training state: waiting" in here.agents[1].text)
    asked = here.network.hosts[1].command(sys.executable, "-m", "paceline", "stop", "run-1")
    done = subprocess.run(asked, cwd=here.folder, capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr.endswith("run-1 has ended\n")
    here.end(-9, 75)
    ends = "no other worker has the training state, so the run stops without a checkpoint\n"
    assert f"{ends}stopped; no checkpoint was written\nstart again with: paceline run --workers 2 --run-dir run-1 " in (
        here.agents[1].text
    )


def test_joined_host_has_a_share_cannot_take_over_and_is_told_where_a_stop_saved(
    cluster: Callable[[int], Cluster], golden: Callable[[str, str], None], tmp_path: Path
) -> None:
    here = cluster(2)
    here.spread(1, 1)
    refused = paceline("run", "--take-over", here.agents[1].folder, cwd=tmp_path, code=2).stderr
    golden("take-over while the coordinator answers", refused)
    refused = paceline("run", "--take-over", tmp_path / "none", cwd=tmp_path, code=2).stderr
    golden("take-over of no run folder", refused.replace(str(tmp_path), "FOLDER"))
    here.stop(0)
    here.end(75, 75)
    (stopped,) = here.agents[0].events("stopped")
    path = f"checkpoints/step-{stopped['step']:012d}"
    assert (here.agents[0].folder / path / "manifest.json").exists()
    assert f"stopped after step {stopped['step']}; saved run-0/{path}\n" in here.agents[0].text
    assert all(member.share for member in members(Summary(here.agents[0].folder))), "also who came later has one"
    where = "on the host that started the run"
    assert f"stopped after step {stopped['step']}; saved {path} {where}\ncontinue with: paceline run --join " in (
        here.agents[1].text
    )


MOMENTS = ("loading", "forward", "backward", "reduced", "saving", "writing", "forming", "hand-over")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["link", "agent", "coordinator"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_kill_of_agent_or_coordinator_or_network_cut_at_any_moment_gives_the_undisturbed_weights(
    cluster: Callable[[int], Cluster], undisturbed: Path, kind: str, moment: str
) -> None:
    """A worker waits at the moment, while its host's link, its agent, or the coordinator is taken away. `writing`: only
    those write whose host has the first worker's run folder, so the other host goes while these do.
    """
    here = cluster(2)
    at = {"hand-over": "5@0", "writing": "0@41"}.get(moment, "4@41")
    fault = f"wait:{at}.{moment}"
    here.spread(3, faults=fault if moment == "writing" else "")
    here.start(1, 3, faults=fault)
    waits = here.agents[0 if moment == "writing" else 1]
    fired = lambda: [entry["fault"] for entry in read_log(waits.folder)] == [fault]
    if moment == "forming":  # in a generation that admits somebody, or in one that a loss makes
        here.until(lambda: fired() or here.has(6, step=41))
        if not fired():
            os.kill(worker_of(here.agents[0].folder), signal.SIGKILL)
    here.until(fired)
    if kind == "coordinator":
        (pid,) = here.coordinators()
        os.kill(pid, signal.SIGKILL)
    elif kind == "agent":
        here.agents[1].kill()
    else:
        here.network.hosts[1].cut()
    if kind != "agent" or moment == "writing":
        (waits.folder / "chaos-go").touch()
    if kind == "coordinator":
        here.until(lambda: "the coordinator ended (SIGKILL) and is restarted" in here.agents[0].text)
    else:
        here.until(
            lambda: any(3 in event["workers"] or 4 in event["workers"] for event in here.agents[0].events("lost"))
        )
        here.members(3)
    if kind == "link":
        here.network.hosts[1].mend()
    here.end(0, -9 if kind == "agent" else 0)
    same(here, undisturbed)


@pytest.mark.slow
def test_kill_below_min_workers_pauses_the_run(cluster: Callable[[int], Cluster], undisturbed: Path) -> None:
    here = cluster(2)
    here.spread(2, 1, options=["--min-workers", "2"])
    here.stop(1)
    here.until(lambda: here.agents[1].process.poll() is not None)
    os.kill(worker_of(here.agents[0].folder), signal.SIGKILL)
    here.until(lambda: "only 1 worker left, training is paused until there are 2" in here.agents[0].text)
    here.members(2)
    assert not here.status()["paused"]
    here.end(0, 75)
    same(here, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("counts", [(2, 2), (2, 1, 1)])
@pytest.mark.parametrize("what", ["link", "agent", "coordinator and worker"])
def test_loss_of_a_replica_of_several_workers_on_several_hosts(
    cluster: Callable[[int], Cluster], undisturbed: Path, counts: tuple[int, ...], what: str
) -> None:
    """The second replica is on one host or on two."""
    here = cluster(len(counts))
    here.spread(*counts, options=["--plan", "micro=2 exact shard=2"])
    codes = [0 for _ in counts]
    if what == "link":
        here.network.hosts[1].cut()
        here.members(2)
        here.network.hosts[1].mend()
    elif what == "agent":
        here.agents[1].kill()
        here.members(2)
        here.start(1, counts[1])
        codes = [0, -9, *codes[1:]]
    else:
        (pid,) = here.coordinators()
        os.kill(pid, signal.SIGKILL)
        os.kill(worker_of(here.agents[1].folder), signal.SIGKILL)
        here.until(lambda: "the coordinator ended (SIGKILL) and is restarted" in here.agents[0].text)
        here.until(lambda: here.agents[0].events("lost"))
    here.members(4)
    here.end(*codes)
    same(here, undisturbed)


# ---- who may not join


def join_refused(cluster: Cluster, code: str | None = None, **changed: str) -> str:
    """What a host is told that wants to join."""
    cluster.start(1, 1, *(word for name, value in changed.items() for word in (f"--{name}", value)), code=code)
    agent = cluster.agents.pop()
    assert agent.process.wait(60) == 2
    return agent.text


def test_join_with_another_script_plan_or_token_is_refused(
    cluster: Callable[[int], Cluster], golden: Callable[[str, str], None], tmp_path: Path
) -> None:
    here = cluster(2)
    here.spread(1, options=["--plan", "micro=4"])
    script = (SCRIPTS / "survivor.py").read_text()
    golden("another script", join_refused(here, code=script.replace("lr=1e-2", "lr=1e-3")))
    golden("another plan", join_refused(here, plan="micro=3"))
    other = tmp_path / "other-token"
    other.write_text(64 * "0")
    other.chmod(0o600)
    golden("another token", join_refused(here, **{"token-file": str(other)}))
    other.chmod(0o644)
    golden("a token that others can read", join_refused(here, **{"token-file": str(other)}).replace(str(other), "FILE"))
    what = "GET /challenge: the token is wrong, from 10.77.0.2"
    here.until(lambda: what in [event["what"] for event in here.agents[0].events("refused")])
    assert json.loads((here.agents[0].folder / "coordinator.json").read_text())["port"] == 29400


def test_join_without_a_run_is_refused(golden: Callable[[str, str], None], tmp_path: Path) -> None:
    script, token = tmp_path / "train.py", tmp_path / "token"
    script.write_text("")
    token.write_text(64 * "0")
    token.chmod(0o600)
    (tmp_path / "empty").mkdir()
    for name, words in {
        "a folder without a run": ("--join", "empty"),
        "no folder": ("--join", "none"),
        "no token": ("--join", "127.0.0.1:9"),
        "no run at an address": ("--join", "127.0.0.1:9", "--token-file", token),
        "every address": ("--listen", "0.0.0.0"),
        "an address of another host": ("--listen", "192.0.2.1"),
    }.items():
        golden(name, paceline("run", "--workers", "1", *words, script, cwd=tmp_path, code=2).stderr)
