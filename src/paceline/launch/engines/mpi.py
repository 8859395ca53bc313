"""`paceline launch mpi`: starts agents with mpirun.

Each agent is an MPI job of its own with one process, so a lost agent does not end others. Scripts do not need mpi4py.
"""

from __future__ import annotations

from paceline.base.console import in_one_line
from paceline.base.environment import variable
from paceline.base.schema import read_file
from paceline.errors import UsageError
from paceline.launch.engines.engine import Host, parse_hosts
from paceline.launch.engines.ssh import Ssh


class Mpi(Ssh):
    """Starts agents with mpirun, whose exit code is that of its ssh if ssh cannot connect."""

    name = "mpi"

    def command(self, host: Host) -> list[str]:
        """Runs one process with mpirun on the host, not bound to a core."""
        return ["mpirun", "-q", "-n", "1", "--host", host.name, "--bind-to", "none", *self.given, "sh"]


def pbs_hosts() -> list[Host]:
    """The hosts of the PBS or Torque job in which we run, each once (its node file has one line per core)."""
    path = variable("PBS_NODEFILE")
    if not path:
        what = "the hosts are missing"
        raise UsageError(what, "pass --hosts a,b:2 or --hostfile FILE, or run this command in a PBS job")
    try:
        lines = read_file(path).decode().split()
    except OSError as error:
        what = f"PBS_NODEFILE={in_one_line(path)} cannot be read ({error.strerror})"
        raise UsageError(what, "pass --hosts a,b:2 or --hostfile FILE") from error
    return parse_hosts(",".join(dict.fromkeys(lines)))
