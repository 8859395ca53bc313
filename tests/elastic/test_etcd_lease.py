"""Who keeps the coordinator, where an etcd decides: a real one, and hosts that lose it, each other, or their life."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from agents import until
from clusters import Cluster, processes, same
from clusters import cluster as cluster
from clusters import undisturbed as undisturbed
from conftest import lacking
from launching import SCRIPTS, free_port, paceline
from networks import hosts as hosts

from paceline.errors import LaunchError, UsageError
from paceline.team.etcd_lease import LASTS, Lease, parse_store

CLIENTS, PEERS = 2379, 2380


@pytest.mark.parametrize(
    "text",
    ["etcd://", "etcd://host:2379", "etcd://host:2379/", "http://host:2379/run", "etcd://host/run", "etcd:///run"],
)
def test_wrong_etcd_address_is_refused(text):
    with pytest.raises(UsageError) as error:
        parse_store(text)
    cure = "pass the address of etcd, and a name for this run"
    assert str(error.value) == f"--store needs the form etcd://HOST:PORT/NAME, got {text!r}; {cure}"


def test_run_refuses_a_wrong_etcd_address(tmp_path):
    assert parse_store("etcd://a:1,b:2/my/run") == (["a:1", "b:2"], "my/run")
    (tmp_path / "train.py").write_text("")
    done = paceline("run", "--store", "etcd://host/run", "train.py", cwd=tmp_path, code=2)
    assert done.stderr.startswith("paceline: --store needs the form etcd://HOST:PORT/NAME, got 'etcd://host/run'; ")


def test_etcd_that_does_not_answer_is_refused(tmp_path):
    where = f"127.0.0.1:{free_port()}"
    done = paceline("run", "--store", f"etcd://{where}/run", SCRIPTS / "survivor.py", "out", "5", cwd=tmp_path, code=2)
    assert done.stderr.splitlines()[-1] == (
        f"paceline: etcd does not answer at {where} ([Errno 111] Connection refused); "
        "check that etcd is running and that this host can reach it"
    )


def etcd(folder: Path, address: str, enter: Callable[..., list[str]]) -> subprocess.Popen[bytes]:
    """A real one, whose data stays in `folder`/store."""
    folder = folder / "store"
    folder.mkdir(exist_ok=True)
    if shutil.which("etcd") is None:
        lacking("there is no etcd: run .ci/servers")
    clients, peers = f"http://{address}:{CLIENTS}", f"http://{address}:{PEERS}"
    where = ["--data-dir", str(folder / "data"), "--listen-client-urls", clients, "--advertise-client-urls", clients]
    where += ["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers]
    with (folder / "etcd.log").open("ab") as log:
        started = subprocess.Popen(
            enter("etcd", *where, "--initial-cluster", f"default={peers}"), stdout=log, stderr=log, cwd=folder
        )
    until(lambda: answers(address, enter))
    return started


def answers(address: str, enter: Callable[..., list[str]]) -> bool:
    asked = enter("curl", "--silent", "--max-time", "1", f"http://{address}:{CLIENTS}/health")
    return b"true" in subprocess.run(asked, capture_output=True).stdout


@pytest.fixture
def server(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    started = etcd(tmp_path, "127.0.0.1", lambda *command: list(command))
    yield started
    started.kill()
    started.wait()


@pytest.mark.slow
def test_etcd_lease_has_one_holder_at_a_time(server):
    store = f"etcd://127.0.0.1:{CLIENTS}/run"
    first, second = Lease(store, ("10.0.0.1", 1)), Lease(store, ("10.0.0.2", 2))
    assert first.begin() == 1
    with pytest.raises(LaunchError) as error:
        second.begin()
    assert str(error.value) == (
        "a run named run has its coordinator at 10.0.0.1:1; join or stop that run, use another name, or wait 5 s if "
        "its host is lost"
    )
    first.start()
    second.start()
    second.wanted = True
    time.sleep(2 * LASTS)
    assert first.held
    assert (second.epoch, second.holder) == (None, ("10.0.0.1", 1))
    server.send_signal(signal.SIGSTOP)
    until(lambda: not first.held)
    server.send_signal(signal.SIGCONT)
    until(lambda: first.held or second.held)
    holder, other = (first, second) if first.held else (second, first)
    assert not other.held
    epoch = holder.epoch
    other.wanted = True
    holder.close()
    until(lambda: other.held)
    assert other.epoch == epoch + 1
    other.close()
    assert Lease(store, ("10.0.0.3", 3)).begin() == epoch + 2


@pytest.fixture
def stored(
    cluster: Callable[[int], Cluster], tmp_path: Path
) -> Iterator[tuple[Cluster, list[subprocess.Popen[bytes]], list[str]]]:
    """Three hosts with workers, and an etcd on a fourth; with how the run has to be started."""
    here = cluster(4)
    there = here.network.hosts[3]
    servers = [etcd(tmp_path, there.address, there.command)]
    yield here, servers, ["--store", f"etcd://{there.address}:{CLIENTS}/run"]
    for started in servers:
        started.kill()
        started.wait()


def etcds(folder: Path) -> list[int]:
    found = [one.info for one in processes() if one.info["cwd"] == str(folder / "store")]
    return [info["pid"] for info in found if (info["cmdline"] or [""])[0] == "etcd"]


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "cut"])
def test_take_over_by_etcd_lease_after_a_kill(stored, undisturbed, how):
    here, _, options = stored
    here.spread(2, 2, 2, options=options)
    if how == "kill":
        here.agents[0].kill()
    else:
        here.network.hosts[0].cut()
    taken = lambda: [
        n for n in (1, 2) if "this host takes over the coordinator, as etcd decided" in here.agents[n].text
    ]
    here.until(taken)
    (who,) = taken()
    here.members(4, agent=who)
    assert here.status(who)["epoch"] == 2
    if how == "cut":
        waits = "etcd does not answer, or assigned the run to another host; the workers of this host wait"
        assert waits in here.agents[0].text
        here.network.hosts[0].mend()
        here.members(6, agent=who)
        assert "has taken over; the workers of this host join it as new workers" in here.agents[0].text
    here.end(-9 if how == "kill" else 0, 0, 0)
    same(here, undisturbed, first=who)


@pytest.mark.root
@pytest.mark.slow
def test_training_waits_while_etcd_is_away(stored, undisturbed):
    here, servers, options = stored
    here.spread(2, 1, options=options)
    for pid in etcds(here.folder):
        subprocess.run(["kill", "-9", str(pid)], check=True)
    servers[0].wait()
    here.until(lambda: "the workers of this host wait" in here.agents[0].text)
    time.sleep(2.0)  # the step under way is over
    before = here.agents[0].events("step")[-1]["step"]
    time.sleep(2.0)
    assert here.agents[0].events("step")[-1]["step"] == before
    there = here.network.hosts[3]
    servers.append(etcd(here.folder, there.address, there.command))
    here.until(lambda: "etcd answers again" in here.agents[0].text)
    here.members(3)
    here.end(0, 0)
    same(here, undisturbed)
    assert here.agents[0].events("lost") == []
