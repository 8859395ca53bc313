"""`paceline launch`: turns options into an engine, hosts and a job."""

from __future__ import annotations

import hashlib
import io
import json
import os
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.base.console import command_line, quoted, say
from paceline.base.text import plural
from paceline.errors import LaunchError, UsageError
from paceline.launch.engines.engine import Engine, Host, parse_hosts, read_hosts, read_variables, split_options
from paceline.launch.engines.kubernetes import launch_pods
from paceline.launch.engines.launcher import HostJob, Launcher
from paceline.launch.engines.mpi import Mpi, pbs_hosts
from paceline.launch.engines.ray import Ray, bundles
from paceline.launch.engines.ray import driver_request as ray_request
from paceline.launch.engines.slurm import allocation, submit
from paceline.launch.engines.spark import Spark
from paceline.launch.engines.spark import driver_request as spark_request
from paceline.launch.engines.ssh import Ssh
from paceline.launch.modules import find_module

MOST = 200_000_000  # bytes that --sync copies at most


def launch_on(where: str, words: Sequence[str], given: Mapping[str, Any], options: dict[str, Any]) -> int:
    """Runs a script on the hosts of the engine `where` and returns the exit code. `words`: the command line. `given`:
    the options of `paceline launch`. `options`: those of the run. UsageError: an option is missing or wrong.
    LaunchError: the hosts cannot begin.
    """
    script = options["script"]
    if script is None:
        raise UsageError("no script was given", "pass the path of a Python training script")
    module = script if options["module"] else None
    in_image = where == "kubernetes" and (module is not None or script.startswith("/"))
    options |= {"script": find_module(script) if module and not in_image else script, "module": module}
    if not in_image and not Path(options["script"]).is_file():
        raise UsageError(f"the script {script} does not exist", "pass the path of a Python training script")
    environment = read_variables(given["env"])
    again: list[str] = _without_values(words)
    if options["run_dir"] is None:
        stem = module or Path(script).stem
        options["run_dir"] = f"runs/{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
        again[3:3] = ["--run-dir", str(options["run_dir"])]
    if given["tunnel"] and (given["detach"] or given["listen"]):
        what = "--tunnel keeps this process between the hosts and cannot be combined with --detach or --listen"
        raise UsageError(what, "leave out --tunnel or the other option")
    if where == "kubernetes":
        return launch_pods(given, options, environment, command_line(again))
    options |= {"environment": environment, "again": command_line(again)}
    job = HostJob(
        options,
        given["python"] or sys.executable,
        given["cwd"] or (_folder() if given["sync"] else os.getcwd()),
        given["setup"] or "",
        given["workers_per_host"],
        given["listen"],
        archive() if given["sync"] else b"",
        bool(given["detach"]),
        preflight=not (given["no_preflight"] or given["tunnel"]),
    )
    engine: Engine | None
    if where == "ray":
        named = given["hosts"] is not None or given["hostfile"] is not None
        asked = ray_request(given, _requested_hosts(where, given["hosts"], given["hostfile"]) if named else [])
        if given["dry_run"]:
            group = json.dumps(bundles({**asked, "nodes": asked["nodes"] or 1}, []))
            say(f'placement_group({group}, strategy="STRICT_SPREAD"): sh <<< {quoted(job.script)}', sys.stdout)
            return 0
        engine = Ray(asked)
    elif where == "spark":
        asked = spark_request(given, job.python)
        if given["dry_run"]:
            tasks = plural(asked["nodes"], "barrier task")
            say(f"spark-submit {command_line(asked['submit'])}: {tasks}: sh <<< {quoted(job.script)}", sys.stdout)
            return 0
        engine = Spark(asked)
    elif where != "slurm":
        hosts, engine_options = (
            _requested_hosts(where, given["hosts"], given["hostfile"]),
            split_options(given["engine"]),
        )
        engine = Mpi(hosts, engine_options) if where == "mpi" else Ssh(hosts, engine_options, bool(given["tunnel"]))
    else:
        engine = allocation(split_options(given["engine"]))
        if engine is None:
            return submit(job, again, given, environment)
    try:
        if given["dry_run"]:
            for host in engine.hosts:
                say(f"{command_line(engine.command(host))} <<< {quoted(job.script)}", sys.stdout)
            return 0
        launcher = Launcher(engine, job)
        return engine.exit_code(launcher.run(), launcher.stop_signal)
    finally:
        engine.close()


def _requested_hosts(where: str, hosts: str | None, file: Path | None) -> list[Host]:
    if where == "mpi" and hosts is None and file is None:
        return pbs_hosts()
    if (hosts is None) == (file is None):
        what = "the hosts are missing" if hosts is None else "--hosts and --hostfile cannot be combined"
        raise UsageError(what, "pass --hosts a,b:2 or --hostfile FILE")
    return parse_hosts(hosts) if hosts is not None else read_hosts(file or Path())


def _without_values(words: Sequence[str]) -> list[str]:
    """The command line without secrets: ``--env NAME=VALUE`` becomes ``--env NAME``."""
    shown_words = ["paceline"]
    for word in words:
        env_entry = (
            word.removeprefix("--env=") if word.startswith("--env=") else word if shown_words[-1] == "--env" else None
        )
        shown_words += (
            [word]
            if env_entry is None
            else (["--env"] if shown_words[-1] != "--env" else []) + [env_entry.partition("=")[0]]
        )
    return shown_words


def _folder() -> str:
    """The remote folder for copied files, a different one for each local folder."""
    cwd = Path.cwd()
    return f"~/paceline-sync/{cwd.name}-{hashlib.sha256(f'{socket.gethostname()}:{cwd}'.encode()).hexdigest()[:8]}"


def archive() -> bytes:
    """A tar archive of the files that git tracks or would track; without git, of all but run folders and environments.
    LaunchError: they are too large.
    """
    git = subprocess.run(["git", "ls-files", "-coz", "--exclude-standard"], capture_output=True, check=False)
    if git.returncode == 0:
        paths = [Path(os.fsdecode(name)) for name in git.stdout.split(b"\0") if name]
    else:
        apart = {path.parent for path in Path().rglob("pyvenv.cfg")} | {Path("runs")}
        paths = [path for path in Path().rglob("*") if not apart.intersection(path.parents)]
    files = [path for path in paths if path.is_file() and path.name != "token" and "__pycache__" not in path.parts]
    if (size := sum(path.stat().st_size for path in files)) > MOST:
        largest = max(files, key=lambda path: path.stat().st_size)
        what = f"--sync would copy {size / 1e6:,.0f} MB; the largest file is {largest}"
        raise LaunchError(what, "move data to another folder, or list it in .gitignore: at most 200 MB are copied")
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for path in files:
            archive.add(path, recursive=False)
    return data.getvalue()
