"""`paceline launch slurm`: submits a batch job and starts agents with srun.

Slurm's notice (USR1, USR2 or TERM, to the script or to the steps) stops the run with a checkpoint. The job is then
requeued, and continues in the same run folder. No torch.
"""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.base.console import Passing, in_one_line, say, shown
from paceline.base.environment import outside_of_slurm, slurm_job, worker_environment
from paceline.base.exit_codes import INTERRUPTED, STOPPED
from paceline.errors import LaunchError, UsageError
from paceline.launch.engines.engine import End, Engine, Host, split_options
from paceline.launch.engines.launcher import HostJob

LOOK = 2.0  # seconds between two looks at the queue
NOTICE = 120  # seconds before the time limit
LOST = ("NODE_FAIL", "DOWN", "NOT_RESPONDING", "FAIL")
# Options that select the nodes of a job or set their number.
OF_NODES = ("-w", "--nodelist", "-F", "--nodefile", "-N", "--nodes", "-n", "--ntasks", "--ntasks-per-node")


def _output_of(*command: str) -> str:
    """The output of a Slurm command; empty if it fails, for example while Slurm's controller is away, or is missing."""
    with suppress(FileNotFoundError):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""
    return ""


class Slurm(Engine):
    """The nodes of the allocation `job`. `restarts`: how often it was requeued. `batch`: it has a batch script.
    `asked`: the options with which Slurm was asked for the nodes. Nodes that replace others come from further jobs.
    """

    name = "slurm"

    def __init__(
        self, hosts: Sequence[Host], given: Sequence[str], job: str, restarts: int, batch: bool, asked: Sequence[str]
    ) -> None:
        super().__init__(hosts, given)
        self._job, self._batch, self._asked = job, batch, list(asked)
        self._avoided = [host.name for host in hosts]  # nodes that are of the run, or were
        self._further: dict[str, str] = {}  # names of the jobs of further nodes, by host
        if restarts:
            say(f"job {job} continues: restart {restarts}")

    def command(self, host: Host) -> list[str]:
        """Runs one task with srun on the host, at the same time as the other steps of the job."""
        one_task = ["--nodes=1", "--ntasks=1", "--cpu-bind=none", "--unbuffered"]
        if (name := self._further.get(host.name)) is None:
            return ["srun", *one_task, f"--nodelist={host.name}", "--overlap", "--job-name=paceline", *self.given, "sh"]
        about = _output_of("scontrol", "show", "job", self._job)
        nodes = dict.fromkeys([*excluded_nodes(self._asked, about), *self._avoided])
        avoided, unset = f"--exclude={','.join(nodes)}", map("--unset={}".format, outside_of_slurm())
        return ["env", *unset, "srun", *one_task, *of_any_node(self._asked), avoided, f"--job-name={name}", "sh"]

    def request_replacement(self, host: Host) -> Host | None:
        """Asks Slurm for a job of one node, which is none of those that the run has or had."""
        if (name := self._further.get(host.name)) is not None:
            self._avoided += _output_of("squeue", "--noheader", "--states=all", f"--name={name}", "--format=%N").split()
        new = Host(f"further-{len(self._further) + 1}", host.workers)
        self._further[new.name] = f"paceline-{self._job}-{new.name}"
        return new

    def stop(self, host: Host) -> None:
        """Ends the job of a further node, which Slurm keeps if srun was killed."""
        if (name := self._further.get(host.name)) is not None:
            _output_of("scancel", f"--name={name}")

    def why_silent(self, host: Host) -> str:
        """The node's state and its reason, as sinfo prints them."""
        return _output_of("sinfo", "--noheader", "--Node", f"--nodes={host.name}", "--format=%T %E")

    def why_ended(self, host: Host, code: int, last_line: str) -> End | None:
        """``lost`` if srun reports a failed node or connection, or sinfo a node that is down."""
        if "srun: error" not in last_line and "slurmstepd" not in last_line:
            return None
        state = _output_of("sinfo", "--noheader", "--Node", f"--nodes={host.name}", "--format=%T").upper()
        if any(word in last_line.upper() for word in ("NODE FAIL", "NODE_FAIL", "COMMUNICATION", "TIMED OUT")):
            return End("lost", f"the node is {state.lower() or 'gone'}")
        if any(state.startswith(word) for word in LOST):
            return End("lost", f"the node is {state.lower()}")
        return None

    def exit_code(self, code: int, stop_signal: int | None) -> int:
        """Requeues a job that was stopped by a notice of Slurm's."""
        if code != STOPPED or not self._batch or stop_signal == signal.SIGHUP:
            return code
        if "JobState=CANCELLED" in _output_of("scontrol", "show", "job", self._job):
            return code
        done = subprocess.run(["scontrol", "requeue", self._job], capture_output=True, text=True, check=False)
        how = "and was requeued" if done.returncode == 0 else f"but cannot be requeued: {done.stderr.strip()}"
        say(f"job {self._job} was preempted or is near its time limit, {how}")
        return code


def allocation(given: Sequence[str]) -> Slurm | None:
    """The allocation in which we run, if any. LaunchError: Slurm does not name its nodes."""
    job = slurm_job()
    if job is None:
        return None
    nodes = _output_of("scontrol", "show", "hostnames", job.nodes).split()
    if not nodes:
        raise LaunchError(f"the nodes of job {job.number} are not known", "check `scontrol show hostnames`")
    used = [] if job.batch else given  # sbatch has used them already
    return Slurm([Host(node) for node in nodes], used, job.number, job.restarts, job.batch, given)


def excluded_nodes(asked: Sequence[str], about: str) -> list[str]:
    """The nodes that the user excludes: with the options `asked`, of which the last one counts, and in the job that
    ``scontrol show job`` prints `about`. Slurm would forget them for a further job that excludes nodes, too.
    """
    nodes = re.findall(r"\bExcNodeList=(?!\(null\))(\S+)", about)
    values, _ = _take_options(asked, ("-x", "--exclude"))
    named = values[-1] if values else ""
    if "/" in named:  # a file of names
        with suppress(OSError):
            named = ",".join(Path(named).read_text().split())
    return [*nodes, *filter(None, [named])]


def of_any_node(asked: Sequence[str]) -> list[str]:
    """Removes the options that select nodes or set their number from `asked`, so that any node may replace one that was
    left out.
    """
    _, others = _take_options(asked, OF_NODES)
    return others


def _take_options(asked: Sequence[str], names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the values of the options with these `names`, and the words of the others. A value follows as the next
    word, or in the same word: `-x a`, `-xa`, `--exclude a` or `--exclude=a`.
    """
    values, others, words = list[str](), list[str](), iter(asked)
    for word in words:
        prefixes = (f"{name}=" if name.startswith("--") else name for name in names)
        prefix = next((one for one in prefixes if word.startswith(one)), None)
        if word in names:
            values.append(next(words, ""))
        elif prefix is not None:
            values.append(word.removeprefix(prefix))
        else:
            others.append(word)
    return values, others


def directive(word: str) -> str:
    """Quotes a word of an ``#SBATCH`` line for sbatch: in double quotes, with a backslash before special characters."""
    if re.fullmatch(r"[\w@%+=:,./-]+", word, re.ASCII):
        return word
    return '"' + re.sub(r'(["\\])', r"\\\1", word) + '"'


def check_names(job: HostJob, given: Sequence[str]) -> None:
    """Checks the names in a batch script. UsageError: one would end its line, or Slurm cannot write to that path."""
    paths = [("--run-dir", job.options["run_dir"]), ("the working folder", job.cwd)]
    names = [("the script", job.options["script"]), *paths, ("--python", job.python), *(("--engine", w) for w in given)]
    for what, name in names:
        if in_one_line(name) != name:
            why = "contains a control character, which a Slurm batch script does not allow"
            raise UsageError(f"{what} {shown(name)} {why}", "use another name")
    for what, name in paths:
        if "\\" in name:
            why = "contains a backslash, which makes Slurm write its output to another path"
            raise UsageError(f"{what} {shown(name)} {why}", "use another name")


def batch_script(job: HostJob, again: Sequence[str], nodes: int, name: str, given: Sequence[str]) -> str:
    """The batch script. It holds no secret: the variables of `--env` come with the job's environment."""
    folder = str(Path(job.cwd, job.options["run_dir"])).replace("%", "%%")  # % begins a pattern of Slurm
    options = [
        f"--job-name={name}",
        f"--nodes={nodes}",
        "--ntasks-per-node=1",
        "--requeue",
        "--open-mode=append",
        f"--signal=B:USR2@{NOTICE}",
        f"--output={folder}/slurm-%j.out",
    ]
    head = "".join(f"#SBATCH {directive(option)}\n" for option in options)
    head += f"#SBATCH {' '.join(map(directive, given))}\n" if given else ""
    setup = f"{job.setup}\n" if job.setup else ""
    words = list(again)
    if "--dry-run" in words:
        words.remove("--dry-run")
    command = shlex.join([job.python, "-m", *words])
    return f"#!/bin/sh\n{head}cd {shlex.quote(job.cwd)} || exit\n{setup}exec {command}\n"


def submit(job: HostJob, again: Sequence[str], given: Mapping[str, Any], environment: Mapping[str, str]) -> int:
    """Submits the batch script and follows the job to its end. Returns the job's exit code, or 0 with `--detach`.
    UsageError: an option is missing or wrong. LaunchError: Slurm refuses the job.
    """
    if given["nodes"] is None:
        raise UsageError("the number of nodes is missing", "pass -N NODES, or run this command inside salloc")
    given_words = split_options(given["engine"])
    check_names(job, given_words)
    name = "paceline-" + re.sub(r"[^\w.+-]", "_", Path(job.options["script"]).stem)
    text = batch_script(job, again, given["nodes"], name, given_words)
    if given["dry_run"]:
        say(text, sys.stdout, end="")
        return 0
    Path(job.options["run_dir"]).mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        done = subprocess.run(
            ["sbatch", "--parsable"],
            input=text,
            env=worker_environment(None, **environment),
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as error:
        what = f"sbatch cannot be started ({error.strerror})"
        raise LaunchError(what, "run this on a host with the Slurm commands") from error
    if done.returncode:
        raise LaunchError(f"Slurm rejects the job ({done.stderr.strip()})", "check --engine='...' and --dry-run")
    number = done.stdout.strip().partition(";")[0]
    say(f"job {number}, run folder {in_one_line(job.options['run_dir'])}")
    return 0 if given["detach"] else _follow(number, Path(job.options["run_dir"], f"slurm-{number}.out"))


def _follow(job: str, output: Path) -> int:
    """Prints the job's output and state until it ends. Ctrl-C stops the run; a second one stops it at once."""
    last_news, shown, asked = "", 0, False
    passing = Passing(sys.stdout)
    while True:
        try:
            fields = dict(
                word.partition("=")[::2] for word in _output_of("scontrol", "show", "job", job).split() if "=" in word
            )
            state, reason = fields.get("JobState", "UNKNOWN"), fields.get("Reason", "None")
            if output.exists():
                with output.open("rb") as file:
                    file.seek(shown)
                    data = file.read()
                    shown += len(data)
                sys.stderr.flush()
                passing.write(data)
            news = f"job {job} is {state.lower()}" + (f" ({reason})" if reason != "None" else "")
            if news != last_news:
                last_news = news
                say(news)
            if state not in (
                "PENDING",
                "CONFIGURING",
                "RUNNING",
                "SUSPENDED",
                "COMPLETING",
                "REQUEUED",
                "REQUEUE_HOLD",
            ):
                passing.close()
                code = fields.get("ExitCode", "1:0").partition(":")[0]
                return INTERRUPTED if asked else int(code) or (0 if state == "COMPLETED" else 1)
            time.sleep(LOOK)
        except KeyboardInterrupt:
            pending = "RUNNING" not in last_news.upper()
            how = [] if asked or pending else ["--signal=INT", "--batch"]
            asked = True
            _output_of("scancel", *how, job)
