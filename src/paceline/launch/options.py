"""The options of `paceline run`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from paceline.launch.fork_server import Kept

# Options of a run that those who join it take over. Its workers get them as PACELINE_PLAN and so on.
GIVEN = ("plan", "shares", "save_every", "keep", "checkpoints", "max_steps", "tensorboard", "heal")


@dataclass(frozen=True)
class LaunchOptions:
    """What `paceline run` was asked for.

    `script`: the file that trains; `module`: its name, where it is to run as ``python -m`` runs it. `against`: the
    folder of a run to compare the speed with. `debug`: the rank whose standard streams are the terminal's own, for pdb
    (its log stays empty). `quiet`: the console shows only how the run ended, and that only where it did not finish;
    `verbose`: it ends with all figures of the report.
    `cold_start`: each worker imports for itself what it needs; `kept`: where a run leaves its warm process for the next
    one of the same command. `checkpoints`: a folder or URL for them, other than the run folder's own; of which the
    newest `keep` stay; `mirror`: steps between two copies of a lone worker's state in memory; `tensorboard`: whether
    its files are written; `heal`: whether workers take a majority's weights; `metrics`, `page`: where Prometheus
    scrapes the run, and its live page; `notify`: a shell command that hears of a failure, a hang and the end.
    `environment`: further variables for the workers. `max_restarts`: how often workers that were lost to one cause are
    started again; 0: any loss ends the run. With fewer than `min_workers` it pauses, and until there were `begin` once.
    `hang_timeout`: seconds after which a worker that does nothing is ended; 0: never, None: as the console is. `join`:
    the run folder or HOST:PORT of a run that these workers are to join, `token_file` its token; `listen`: the address
    at which other hosts reach this one; `store`: the etcd that decides who keeps the coordinator. `nodes`: ``auto``
    where each node starts by itself; `token`: the run's own, where no file holds it; `patience`: seconds in which the
    run to join may begin; `on_listening` is called with the coordinator's address once it listens; `again`: the command
    that continues this run, if it is not `paceline run`; `temporary`: whether the run folder is removed at the end, as
    that of a rehearsal; `epoch`: of the coordinator that begins, higher than that of an earlier one which agents may
    still know by its name. `address` and `size` (workers that the run began with) are determined by the agent.
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
    tensorboard: str | None = None
    heal: str | None = None
    against: str | None = None
    metrics: str | None = None
    page: str | None = None
    notify: str | None = None
    debug: int | None = None
    quiet: bool = False
    verbose: bool = False
    kept: Kept | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    cold_start: bool = False
    max_restarts: int = 10
    hang_timeout: int | None = None
    min_workers: int = 1
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
    temporary: bool = False
    epoch: int = 1
    address: str = "127.0.0.1"
    size: int = 0

    @property
    def program(self) -> list[str]:
        """What the interpreter is given."""
        return [*(["-m", self.module] if self.module else [self.script]), *self.arguments]
