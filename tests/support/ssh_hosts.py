"""Hosts with sshd, one in each network namespace, and a launcher that reaches them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from agents import until
from clusters import processes
from launching import SCRIPTS, piped
from networks import Network

SSHD = """
ListenAddress {address}
HostKey {folder}/host
PidFile none
AuthorizedKeysFile {folder}/client.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
StrictModes no
UsePAM no
"""
CLIENT = """
Host *
  User root
  IdentityFile {folder}/client
  IdentitiesOnly yes
  StrictHostKeyChecking yes
  UserKnownHostsFile {folder}/known
"""


class Shore:
    """Hosts a, b, ... behind sshd, which know each other by no name; the last one is where the launcher runs."""

    def __init__(self, network: Network, folder: Path, engine: str) -> None:
        self.engine, self.folder, self.here, self.hosts = engine, folder, network.hosts[-1], network.hosts[:-1]
        self.part = network.part
        self.started: list[subprocess.Popen[str]] = []
        Path("/run/sshd").mkdir(exist_ok=True)
        for key in ("host", "client"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
        public = (folder / "host.pub").read_text()
        (folder / "known").write_text("".join(f"{host.address} {public}" for host in self.hosts))
        names = [f"Host {name}\n  HostName {host.address}\n" for name, host in zip("abc", self.hosts, strict=False)]
        (folder / "config").write_text("".join(names) + CLIENT.format(folder=folder))
        self.servers = [self.serve(number) for number in range(len(self.hosts))]

    def serve(self, number: int, more: str = "") -> subprocess.Popen[bytes]:
        host = self.hosts[number]
        conf = self.folder / f"sshd-{number}"
        conf.write_text(SSHD.format(address=host.address, folder=self.folder) + more)
        log = (self.folder / f"sshd-{number}.log").open("ab")
        server = subprocess.Popen(host.command("/usr/sbin/sshd", "-D", "-e", "-f", conf), stderr=log)
        log.close()
        until(lambda: "Server listening" in (self.folder / f"sshd-{number}.log").read_text())
        return server

    def start(self, *words: str | Path) -> subprocess.Popen[str]:
        config = f"-F {self.folder / 'config'}"
        if self.engine == "mpi":
            network = f"{self.here.address.rpartition('.')[0]}.0/24"
            ways = (f"--mca {kind}_tcp_if_include {network}" for kind in ("oob", "btl"))
            config = f'--allow-run-as-root --mca plm_rsh_agent "ssh {config}" {" ".join(ways)}'
        command = [sys.executable, "-m", "paceline", "launch", self.engine, f"--engine={config}"]
        variables = ["--env=OMP_NUM_THREADS=1", "--env=CUDA_VISIBLE_DEVICES", f"--env=PYTHONPATH={SCRIPTS}"]
        options = ("--cwd", self.folder, "--workers-per-host", "1", *variables, *words)
        process = piped(self.here.command(*command, *options), self.folder, devices="-1")
        self.started.append(process)
        return process

    def nobody(self) -> bool:
        """Whether no process of a run is left, here or there."""
        return not [one for one in processes() if "paceline" in (one.info["cmdline"] or ()) and self.ours(one.info)]

    def ours(self, info: dict[str, object]) -> bool:
        return info["cwd"] == str(self.folder)

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate()
        for server in self.servers:
            server.terminate()
            server.wait(20)
