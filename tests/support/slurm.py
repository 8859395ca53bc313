"""A Slurm of two or more nodes, each in a network namespace."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from agents import until
from networks import Host, network
from real_engines import STEPS, needs

CONF = """
ClusterName=test
SlurmctldHost=nowhere-1(10.77.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
{nodes}
PartitionName=all Nodes=ALL Default=YES OverSubscribe=FORCE
"""


class Slurm:
    """Nodes on hosts of their own, the controller on the first; commands run on the first."""

    def __init__(self, folder: Path, hosts: list[Host], stack: ExitStack) -> None:
        self.folder, self.hosts = folder, hosts
        nodes = {f"n{number}": host.address for number, host in enumerate(hosts, 1)}
        for name in ("state", *(f"spool-{node}" for node in nodes)):
            (folder / name).mkdir()
        known = "".join(f"{address} {node}\n" for node, address in nodes.items())
        hosts[0].known.write_text(f"127.0.0.1 localhost\n{known}")
        lines = "\n".join(f"NodeName={node} NodeAddr={address} CPUs=4" for node, address in nodes.items())
        (folder / "slurm.conf").write_text(CONF.format(folder=folder, nodes=lines))
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o400)
        self.env = {**os.environ, **STEPS, "SLURM_CONF": str(folder / "slurm.conf")}
        munge = {name: folder / f"munge.{name}" for name in ("socket", "key", "pid", "log", "seed")}
        files = [f"--{name}{'' if name == 'socket' else '-file'}={path}" for name, path in munge.items()]
        self._daemon(stack, "munged", "--foreground", "--force", *files)
        until(munge["socket"].exists)
        self._daemon(stack, *hosts[0].command("slurmctld", "-D"))
        for number, host in enumerate(hosts, 1):
            self._daemon(stack, *host.command("slurmd", "-D", "-N", f"n{number}"))
        until(lambda: self.run("sinfo", "-h", "-o", "%T %D").stdout == f"idle {len(hosts)}\n")

    def _daemon(self, stack: ExitStack, *command: str) -> None:
        log = (self.folder / "daemons.log").open("a")
        process = subprocess.Popen(command, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

        def end() -> None:
            process.send_signal(signal.SIGTERM)
            process.wait(30)
            log.close()

        stack.callback(end)

    def run(self, *command: str | Path, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.hosts[0].command(*command),
            cwd=cwd or self.folder,
            env={**self.env, **env},
            capture_output=True,
            text=True,
            timeout=200,
        )

    def srun(self, *arguments: str | Path, cwd: Path, **env: str) -> str:
        done = self.run("srun", *arguments, cwd=cwd, **env)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    needs("munged", "slurmctld", "slurmd", "srun")
    folder = tmp_path_factory.mktemp("slurm")
    with ExitStack() as stack:
        hosts = stack.enter_context(network(2, folder)).hosts
        yield Slurm(folder, hosts, stack)


@pytest.fixture
def slurm_of_three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    needs("munged", "slurmctld", "slurmd", "srun")
    folder = tmp_path_factory.mktemp("slurm")
    with ExitStack() as stack:
        hosts = stack.enter_context(network(3, folder)).hosts
        yield Slurm(folder, hosts, stack)
