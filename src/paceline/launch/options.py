"""The options of `paceline run`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.launch.fork_server import WarmProcessHolder

if TYPE_CHECKING:
    from paceline.planner.outlook import Now, Outlook

CONFIG_FILE = "config.json"  # in the folder of a run with --config: its effective configuration
# Options of a run that joining agents take over. Workers get them as PACELINE_PLAN and so on.
GIVEN = (
    "plan", "shares", "save_every", "keep", "checkpoints", "max_steps", "tensorboard", "log_to", "heal", "verify_steps",
    "config", "mirror",
)  # fmt: skip


@dataclass(frozen=True)
class ChosenPlan:
    """A plan that `auto` has chosen for `workers` workers, where a plan with the words `asked` was asked for.

    `workers` counts those on all hosts. `outlook`: what is known of other plans. `before`: the options with the plan
    that was changed to this one, and `now` what was measured under that.
    """

    plan: str
    asked: str
    workers: int
    what: str
    why: str
    outlook: Outlook | None = None
    before: LaunchOptions | None = None
    now: Now | None = None

    @property
    def decision(self) -> dict[str, Any]:
        """The fields of the journal's event."""
        fields = {name: getattr(self, name) for name in ("plan", "asked", "workers", "what", "why")}
        return fields if self.outlook is None else fields | self.outlook.predictions


@dataclass(frozen=True)
class LaunchOptions:
    """The options of `paceline run`.

    - `script`, `arguments`: the training script and its arguments; `module`: its name, if it runs with ``python -m``.
    - `against`: the folder of a run to compare the speed with. `debug`: the rank that gets the terminal, for pdb.
    - `quiet`: print only how the run ended, and only if it did not finish; `verbose`: print the full report at the end.
    - `cold_start`: each worker imports torch itself; `warm_holder`: passes the warm process to the next run of
      this command.
    - `checkpoints`: a folder or URL for checkpoints outside of the run folder; `keep`: how many of the newest remain;
      `mirror`: steps between two copies in memory of the state of a lone replica.
    - `tensorboard`: whether TensorBoard files are written; `log_to`: names of loggers; `progress`: plain, rich or none;
      `heal`: whether workers take the weights of a majority; `verify_steps`: the part of the steps that is computed
      twice and compared.
    - `max_time`: after which the run stops with a checkpoint.
    - `metrics`, `page`: addresses; `notify`: a shell command for failures, hangs and the end; `environment`: variables.
    - `max_restarts`: how often workers that were lost to one cause are restarted; 0: any loss ends the run.
    - `spares`: additional workers that are ready to take the place of lost ones; a host that joins may have no others.
    - `min_workers`: with fewer workers the run pauses; `begin`: it waits until there were this many workers once.
    - `raw`: the script trains by itself over torch.distributed, as one static team; `restarts`: how often all of its
      workers were restarted before.
    - `hang_timeout`: seconds without progress after which a worker is killed; 0: never; None: depends on the console.
    - `join`: the run folder or HOST:PORT of the run to join; `token_file`: the file with its token.
    - `listen`: the address at which other hosts reach this one; `store`: the etcd that assigns the coordinator.
    - `nodes`: ``auto`` if each node starts this command by itself; `token`: the token of the run, if it is in no file;
      `patience`: seconds in which the run to join may begin.
    - `on_listening`: called with the coordinator's address once it listens. `again`: the command that continues this
      run, if it is not `paceline run`. `temporary`: the run folder is removed at the end, as for a rehearsal.
    - `chosen`: what `auto` has chosen as the plan. `deadline`: the monotonic time at which `max_time` is over.
      `config`: the script's part of the configuration file, as JSON.
    - `epoch`: the epoch of the first coordinator, higher than that of an earlier one that agents may still know.
    - `address`: our address; set by the agent. `size`: the number of workers with which the run begins, on this host
      and on others that join; 0: those of this host. `port`: where the coordinator listens if `listen` names no port,
      as it did under an earlier plan of this run; 0: at any port.
    - `trial`: in a trial of a plan on several hosts, how many steps are measured, and the most seconds of them.
      `hosts`: the number of workers on each host, if they are known before the hosts join.
    """

    script: str
    arguments: list[str] = field(default_factory=list)
    workers: int = 1
    module: str | None = None
    run_dir: str | None = None
    plan: str | None = None
    shares: str | None = None
    save_every: str | None = None
    keep: int | None = None
    checkpoints: str | None = None
    mirror: int | None = None
    max_steps: int | None = None
    max_time: str | None = None
    tensorboard: str | None = None
    log_to: str | None = None
    progress: str | None = None
    heal: str | None = None
    verify_steps: str | None = None
    against: str | None = None
    metrics: str | None = None
    page: str | None = None
    notify: str | None = None
    debug: int | None = None
    quiet: bool = False
    verbose: bool = False
    warm_holder: WarmProcessHolder | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    cold_start: bool = False
    max_restarts: int = 10
    raw: bool = False
    restarts: int = 0
    hang_timeout: int | None = None
    spares: int = 0
    min_workers: int = 1
    exclude_after: int | None = None
    begin: int = 1
    join: str | None = None
    token_file: str | None = None
    listen: str | None = None
    store: str | None = None
    nodes: str | None = None
    token: bytes | None = field(default=None, repr=False)
    patience: float = 0.0
    on_listening: Callable[[tuple[str, int]], None] | None = None
    again: str | None = None
    separated: bool = False  # whether the arguments came after --
    temporary: bool = False
    chosen: ChosenPlan | None = None
    deadline: float = math.inf
    config: str | None = None
    epoch: int = 1
    address: str = "127.0.0.1"
    size: int = 0
    port: int = 0
    trial: tuple[int, float] | None = None
    hosts: tuple[int, ...] = ()

    @property
    def chooses_plan(self) -> bool:
        """Whether the run begins with trials of plans (`auto`)."""
        return "auto" in (self.plan or "").split()

    @property
    def program(self) -> list[str]:
        """The command line of the interpreter: script or module, and arguments."""
        return [*(["-m", self.module] if self.module else [self.script]), *self.arguments]
