"""`paceline launch mpi`: starts agents with mpirun.

Each agent is a job of its own of one process: one that is lost takes no other with it. No script needs mpi4py.
"""

from __future__ import annotations

from paceline.base.console import in_one_line
from paceline.base.environment import variable
from paceline.base.schema import read_file
from paceline.errors import UsageError
from paceline.launch.engines.engine import Host, parse_hosts
from paceline.launch.engines.ssh import Ssh


class Mpi(Ssh):
    """mpirun ends as its ssh does where that cannot connect."""

    name = "mpi"

    def command(self, place: Host) -> list[str]:
        return ["mpirun", "-q", "-n", "1", "--host", place.name, "--bind-to", "none", *self.given, "sh"]


def queued() -> list[Host]:
    """Hosts that PBS or Torque has given the job in which we are, each once: its file has a line for each core."""
    path = variable("PBS_NODEFILE")
    if not path:
        what = "which hosts is not said"
        raise UsageError(what, "give --hosts a,b:2 or --hostfile FILE, or run it in a job of PBS")
    try:
        lines = read_file(path).decode().split()
    except OSError as error:
        what = f"PBS_NODEFILE={in_one_line(path)} cannot be read ({error.strerror})"
        raise UsageError(what, "give --hosts a,b:2 or --hostfile FILE") from error
    return parse_hosts(",".join(dict.fromkeys(lines)))
