"""Runs a script on other hosts for `paceline plan --hosts`, and returns what it answers."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.base.exit_codes import INTERRUPTED, STOPPED
from paceline.errors import UsageError
from paceline.launch.engines.engine import Host, parse_hosts, read_variables, split_options
from paceline.launch.engines.launcher import HostJob, Launcher
from paceline.launch.engines.ssh import Ssh
from paceline.launch.options import LaunchOptions

WAIT = 60.0  # seconds in which all hosts must answer


@dataclass(frozen=True)
class HostRehearsal:
    """Runs scripts on `hosts`, which ssh reaches with the words `engine`, by `python` in the folder `cwd` of each."""

    hosts: Sequence[Host]
    engine: Sequence[str]
    python: str
    cwd: str
    setup: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of workers of each host: one, where it is not given."""
        return tuple(host.workers or 1 for host in self.hosts)

    @property
    def workers(self) -> int:
        """The number of workers on all hosts."""
        return sum(self.counts)

    def run(self, folder: Path, options: LaunchOptions, request: dict[str, Any]) -> tuple[int, Any]:
        """Runs the script in a fresh run folder of each host. With fewer workers than the hosts have, the first host
        runs all of them. All workers begin together: one that joined the others would hold their state twice for a
        moment. Returns the exit code, and the answer to the request, or None without an answer. SystemExit:
        the run was asked to stop.
        """
        hosts = [Host(host.name, host.workers or 1) for host in self.hosts]
        if options.workers < self.workers:
            hosts = [Host(hosts[0].name, options.workers)]
        given = {
            "script": options.script,
            "arguments": options.arguments,
            "module": options.module,
            "plan": options.plan,
            "shares": options.shares,
            "max_restarts": options.max_restarts,
            "run_dir": f"/tmp/{folder.parent.name}-{os.getpid()}/{folder.name}",
            "begin": options.workers,
            "quiet": True,
            "temporary": True,
            "environment": {**self.environment, "PACELINE_CHECK": json.dumps(request)},
        }
        engine = Ssh(hosts, self.engine)
        try:
            launcher = Launcher(engine, HostJob(given, self.python, self.cwd, self.setup, wait=WAIT, together=True))
            code = launcher.run()
        finally:
            engine.close()
        if code in (INTERRUPTED, STOPPED):
            raise SystemExit(code)
        return code, json.loads(launcher.value) if launcher.value else None


def rehearsal_on(
    hosts: str,
    workers: int | None,
    python: str | None,
    cwd: str | None,
    setup: str | None,
    env: Sequence[str],
    engine: str,
) -> HostRehearsal:
    """Returns the rehearsal for the options of `paceline plan`. UsageError: one of them is wrong."""
    variables = read_variables(env)
    where = HostRehearsal(
        [host for host in parse_hosts(hosts) if not host.spare],
        split_options(engine),
        python or sys.executable,
        cwd or os.getcwd(),
        setup or "",
        variables,
    )
    if workers not in (None, where.workers):
        what = f"--workers {workers} is another number than that of --hosts, which is {where.workers}"
        raise UsageError(what, "leave --workers out: HOST:N sets the number of workers of a host")
    return where
