"""`paceline launch kubernetes`: runs a Job with one pod per host.

Kubernetes restarts lost pods; all requests go through kubectl. The objects are described in `manifests`. No torch.
"""

from __future__ import annotations

import json
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from paceline.base.console import Passing, command_line, say, shown
from paceline.base.exit_codes import INTERRUPTED, LEFT_OUT, STOPPED
from paceline.base.polling import can_read
from paceline.base.schema import read_json
from paceline.base.text import spans
from paceline.checkpoint.storage import is_url
from paceline.errors import LaunchError, UsageError
from paceline.launch.engines.engine import split_options
from paceline.launch.engines.manifests import (
    CONTAINER,
    INDEX,
    LABEL,
    PASSING,
    PATHS,
    RUNS,
    SCRIPTS,
    TOKEN,
    Manifest,
    PodJob,
    manifests,
    placeholder,
    run_name,
)
from paceline.launch.engines.pod_options import PodOptions
from paceline.launch.local import signals

LOOK = 1.0  # seconds between two looks
FAREWELL = 15.0  # seconds for the other hosts to end after the first one
LINES = 50  # lines that are shown of another host that failed
KINDS = "job,service,secret,configmap,networkpolicy"
OWNERS = {"job": "", "jobset": "jobset,", "trainjob": "trainjob,trainingruntime,"}  # further kinds, by the shape
FLAGS = (
    *("max_time", "save_every", "keep", "checkpoints", "mirror", "log_to"),
    *("verify_steps", "max_restarts", "min_workers", "exclude_after", "hang_timeout"),
)
SWITCHES = ("heal", "cold_start", "quiet", "verbose")
Pod = Mapping[str, Any]


@dataclass(frozen=True)
class Kubectl:
    """Runs kubectl with the user's options, in a session of its own, so that Ctrl-C reaches only the launcher."""

    namespace: str | None
    given: Sequence[str]

    def command(self, *words: str) -> list[str]:
        """The command line of kubectl with these words."""
        return ["kubectl", *self.given, *(["--namespace", self.namespace] if self.namespace else []), *words]

    def __call__(self, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Runs kubectl with these words. LaunchError: kubectl cannot be started."""
        command, pipe = self.command(*words), subprocess.PIPE
        try:
            return subprocess.run(
                command, input=stdin, stdout=pipe, stderr=pipe, text=True, check=False, start_new_session=True
            )
        except OSError as error:
            cure = "install it, or apply the output of --dry-run"
            raise LaunchError(f"kubectl cannot be started ({error.strerror})", cure) from error

    def items(self, *words: str) -> list[Any] | None:
        """The items of a list of Kubernetes objects; None if kubectl fails."""
        done = self(*words, "--output=json")
        if done.returncode != 0:
            return None
        from paceline.launch.engines.message_types import ITEMS  # needs msgspec

        what, cure = f"the output of kubectl {words[0]}", "check the output when you run it yourself"
        return list(read_json(done.stdout.encode(), ITEMS, what, cure)["items"])


def launch_pods(given: Mapping[str, Any], options: Mapping[str, Any], values: Mapping[str, str], again: str) -> int:
    """Creates a Job and follows its first pod to the end. Returns the run's exit code, or 0 with `--detach`. `values`:
    environment variables for the workers. UsageError: options do not fit. LaunchError: Kubernetes refuses.
    """
    job = pod_job(given, options, values, again)
    if given["dry_run"]:
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests(job, shown=True)}, indent=2)
        say(text, sys.stdout)
        return 0
    kubectl = Kubectl(job.namespace, split_options(given["engine"]))
    *others, owner = manifests(job)
    with signals() as wakeup, ExitStack() as made:
        follower = Follower(kubectl, job, wakeup)
        owner["spec"]["suspend"] = True  # until the other objects exist
        prerequisites = [others.pop()] if job.shape == "trainjob" else []  # a trainjob is refused without its runtime
        for number, manifest in enumerate([*prerequisites, owner]):
            create(kubectl, manifest)
            if not number:
                made.callback(follower.remove)
        own_objects(kubectl, owner, others, prerequisites, bool(job.options.waits_for))
        say(f"job {job.name}, {spans('host', range(job.hosts))}, run folder {options['run_dir']}")
        if not given["detach"]:
            return follower.run()
        made.pop_all()
    selector = f"-l {LABEL}={job.name},{INDEX}=0"
    say(f"the run continues without this command; its output: {command_line(kubectl.command('logs', '-f'))} {selector}")
    say(f"to stop it with a checkpoint: {command_line(kubectl.command('delete', owner['kind'].lower(), job.name))}")
    return 0


def pod_job(given: Mapping[str, Any], options: Mapping[str, Any], values: Mapping[str, str], again: str) -> PodJob:
    """Makes a job description from the options. UsageError: an option is missing or wrong."""
    if given["nodes"] is None:
        raise UsageError("the number of hosts is missing", "pass -N HOSTS")
    if given["image"] is None:
        raise UsageError("the image is missing", "pass --image IMAGE, an image with Python and Paceline")
    checkpoint_url = options["checkpoints"] or ""
    if given["claim"] is None and not is_url(checkpoint_url):
        what = "checkpoints need a volume or a URL, because the files of a pod are deleted with it"
        raise UsageError(what, "pass --claim NAME, a volume that all hosts can write, or --checkpoints URL")
    if "@" in checkpoint_url.partition("://")[2].partition("/")[0]:
        raise UsageError("--checkpoints contains a password", "remove it from the URL, and pass it with --env")
    if PurePosixPath(options["run_dir"]).is_absolute():
        what = f"--run-dir {options['run_dir']} is not a path on the volume"
        raise UsageError(what, "use a path that does not begin with /")
    amount = "[0-9]+(?:[.][0-9]+)?"
    for name, units in {"cpus": "m?", "memory": "(?:[kMGTPE]|[KMGTPE]i)?"}.items():
        if given[name] is not None and not re.fullmatch(amount + units, given[name]):
            raise UsageError(f"--{name} {shown(given[name])} is not a quantity", "use one like 8, 500m or 16Gi")
    workers = given["workers_per_host"] or given["gpus"] or 1
    local_script = None if options["module"] or options["script"].startswith("/") else Path(options["script"])
    limits = {"memory": given["memory"], "nvidia.com/gpu": str(given["gpus"]) if given["gpus"] else None}
    limits = {name: amount for name, amount in limits.items() if amount}
    return PodJob(
        name=run_name(options["module"] or Path(options["script"]).stem),
        namespace=given["namespace"],
        image=given["image"],
        hosts=given["nodes"],
        command=_command(given["python"] or "python", workers, options, local_script),
        token=secrets.token_hex(32),
        values=values,
        script=local_script,
        cwd=given["cwd"],
        setup=given["setup"] or "",
        claim=given["claim"],
        shape=given["shape"],
        resources={"requests": {"cpu": given["cpus"] or str(workers), **limits}, "limits": limits},
        restarts=options["max_restarts"],
        again=again,
        options=PodOptions.parse(given, [*PATHS.values()]),
        excludes=options["exclude_after"] is not None or options["verify_steps"] is not None,
    )


def _command(python: str, workers: int, options: Mapping[str, Any], local_script: Path | None) -> list[str]:
    """The command that each pod runs."""
    words = [python, "-m", "paceline", "run", "--nodes", "auto", "--token-file", f"{TOKEN}/token"]
    words += ["--workers", str(workers), "--run-dir", f"{RUNS}/{options['run_dir']}"]
    option_values = {"--plan": options["plan"], "--steps": options["max_steps"]}
    option_values |= {f"--{name.replace('_', '-')}": options[name] for name in FLAGS}
    words += [word for name, value in option_values.items() if value is not None for word in (name, str(value))]
    words += [f"--{name.replace('_', '-')}" for name in SWITCHES if options[name]]
    words += ["--tensorboard"] if options["tensorboard"] else []
    words += (
        ["-m", options["module"]]
        if options["module"]
        else [f"{SCRIPTS}/{local_script.name}" if local_script else options["script"]]
    )
    return [*words, *(["--"] if options.get("separated") else []), *options["arguments"]]


def create(kubectl: Kubectl, manifest: Mapping[str, Any]) -> None:
    """Creates an object. It does not use `apply`, which would keep a copy of the Secret in an annotation. LaunchError:
    Kubernetes refuses.
    """
    _checked(kubectl("create", "--validate=warn", "--filename=-", stdin=json.dumps(manifest)))


def own_objects(
    kubectl: Kubectl, job: Manifest, others: Sequence[Manifest], prerequisites: Sequence[Manifest], queued: bool
) -> None:
    """Creates `others` as objects that the Job owns, and makes it the owner of `prerequisites`, which exist: Kubernetes
    deletes all of them with the Job. Then the Job begins, unless it is `queued`: then the queue lets it begin.
    """
    kind, name = str(job["kind"]).lower(), job["metadata"]["name"]
    made = kubectl("get", kind, name, "--output=jsonpath={.metadata.uid}")
    owners = [{"apiVersion": job["apiVersion"], "kind": job["kind"], "name": name, "uid": made.stdout}]
    for other in others:
        other["metadata"]["ownerReferences"] = owners
    create(kubectl, {"apiVersion": "v1", "kind": "List", "items": others})
    changes: list[tuple[Manifest, Manifest]] = [
        (one, {"metadata": {"ownerReferences": owners}}) for one in prerequisites
    ]
    if not queued:
        changes.append((job, {"spec": {"suspend": False}}))
    for manifest, change in changes:
        which = str(manifest["kind"]).lower(), manifest["metadata"]["name"]
        _checked(kubectl("patch", *which, "--type=merge", "--patch", json.dumps(change)))


def _checked(done: subprocess.CompletedProcess[str]) -> None:
    """Shows the server's warnings, but not kubectl's own log. LaunchError: the command failed."""
    warnings = [line for line in done.stderr.splitlines() if not re.match("[IW][0-9]{4} ", line)]
    if done.returncode:
        why = " ".join(warnings) or f"exit code {done.returncode}"
        raise LaunchError(f"Kubernetes rejects the job ({why})", "check --engine='...' and --dry-run")
    for line in warnings:
        say(line)


# ---- the state of pods


def newest(pods: Iterable[Pod]) -> dict[int, Pod]:
    """The newest pod of each host, by the host's number."""
    made = sorted(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))
    numbers = ((pod["metadata"].get("annotations", {}).get(INDEX), pod) for pod in made)
    return {int(number): pod for number, pod in numbers if number is not None}


def state(pod: Pod) -> Mapping[str, Any]:
    """The state of a pod's container: its one key is ``waiting``, ``running`` or ``terminated``. Empty before the
    container exists.
    """
    statuses = [status for status in pod["status"].get("containerStatuses", []) if status["name"] == CONTAINER]
    return dict(statuses[0]["state"]) if statuses else {}


def code(pod: Pod | None) -> int | None:
    """A pod's exit code; None while it runs. A missing pod, or one that failed without a code, counts as killed."""
    if pod is None:
        return PASSING[1]
    if ended := state(pod).get("terminated"):
        return int(ended["exitCode"])
    return PASSING[1] if pod["status"].get("phase") == "Failed" else None


def why(pod: Pod, events: Iterable[Mapping[str, Any]]) -> str:
    """Why a pod does not run yet, in Kubernetes' words."""
    for condition in pod["status"].get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"{condition.get('reason', 'Unschedulable')}: {condition.get('message', '')}"
    waits = state(pod).get("waiting", {})
    if waits.get("message"):
        return f"{waits['reason']}: {waits['message']}"
    pod_events = [event for event in events if event["involvedObject"]["name"] == pod["metadata"]["name"]]
    last = max(pod_events, key=lambda event: str(event.get("lastTimestamp")), default=None)
    return f"{last['reason']}: {last['message']}" if last else str(waits.get("reason", "Pending"))


def missing(job: str, hosts: int, pods: Mapping[int, Pod], events: Sequence[Mapping[str, Any]]) -> str:
    """The hosts that do not run yet, with the reasons; empty if all have begun. `events`: warnings of Kubernetes."""
    reasons: dict[str, list[int]] = {}
    refused = [event for event in events if event["involvedObject"]["name"] == job]
    no_pod = f"{refused[-1]['reason']}: {refused[-1]['message']}" if refused else "no pod was created yet"
    for number in range(hosts):
        pod = pods.get(number)
        if pod is None or state(pod).keys() <= {"waiting"}:
            reasons.setdefault(no_pod if pod is None else why(pod, events), []).append(number)
    reason_texts = [f"{spans('host', numbers)} ({' '.join(reason.split())})" for reason, numbers in reasons.items()]
    return f"waiting for {'; '.join(reason_texts)}" if reason_texts else ""


class Follower:
    """Shows the first host's output and the missing hosts until the run ends. `wakeup` delivers signal numbers."""

    def __init__(self, kubectl: Kubectl, job: PodJob, wakeup: socket.socket) -> None:
        self._kubectl, self._job, self._wakeup = kubectl, job, wakeup
        self._selector, self._owners = f"--selector={LABEL}={job.name}", OWNERS[job.shape]
        self._stop_signal: int | None = None  # the signal that asked for a stop
        self._at_once = False
        self._last_text = ""
        self._pods: dict[int, Pod] = {}
        self._events: list[Any] = []
        self._followed = ""  # the id of the first host's pod whose output is shown
        self._had_ended = False  # whether that pod had ended before its output was shown
        self._shown = 0  # bytes of its output that were shown
        self._output: subprocess.Popen[bytes] | None = None
        self._copies: threading.Thread | None = None
        self._avoided: list[str] = []  # nodes that are left out

    def run(self) -> int:
        """Follows the run to its end and returns the exit code. No objects are removed."""
        while True:
            self._listen(LOOK)
            items = self._kubectl.items("get", f"{self._owners}job,pods", self._selector)
            if self._at_once:
                return self._asked
            if items is None:
                self._tell("Kubernetes does not answer")
                continue
            pods = [item for item in items if item["kind"] == "Pod"]
            self._pods = newest(pods)
            jobs = [item for item in items if item["kind"] == "Job"]
            if not jobs and (
                owner_kinds := [item["kind"] for item in items if item["kind"].lower() == self._job.shape]
            ):
                self._tell(f"waiting for the {owner_kinds[0]} controller to create the job {self._job.job}")
                continue
            if not jobs:
                say(f"the job {self._job.name} was deleted")
                return self._asked
            if jobs[0]["spec"].get("suspend") and not pods and self._job.options.waits_for:
                self._tell(f"waiting for the queue {self._job.options.waits_for} to admit the job")
                continue
            self._avoid_nodes(jobs[0], pods)
            self._look_for_missing(int(jobs[0]["spec"]["parallelism"]))
            verdict = self._verdict(jobs[0], pods)
            if verdict is not None:
                return verdict
            self._follow()

    def _avoid_nodes(self, job: Manifest, pods: Sequence[Pod]) -> None:
        """Keeps further pods of the run away from the nodes of hosts that are left out."""
        for pod in pods:
            node = pod.get("spec", {}).get("nodeName")
            if node is None or node in self._avoided or code(pod) != LEFT_OUT:
                continue
            self._avoided.append(node)
            manifest = placeholder(self._job, node, len(self._avoided), job)
            done = self._kubectl("create", "--validate=warn", "--filename=-", stdin=json.dumps(manifest))
            then = "Kubernetes was asked for another one"
            if done.returncode:
                then = f"but Kubernetes may use it again ({' '.join(done.stderr.split())})"
            say(f"the node {node} is left out; {then}")

    def remove(self) -> None:
        """Removes all objects of the run and waits for their end. A second signal kills the pods at once."""
        kinds = self._owners + KINDS
        command = self._kubectl.command("delete", kinds, self._selector, "--cascade=foreground", "--ignore-not-found")
        self._followed = ""  # from now on, a signal concerns only the removal
        streams = dict.fromkeys(("stdin", "stdout"), subprocess.DEVNULL)
        with subprocess.Popen(command, **streams, start_new_session=True) as process:  # type: ignore[call-overload]
            while process.poll() is None:
                if self._at_once:
                    self._kubectl("delete", "pods", self._selector, "--grace-period=0", "--force")
                    self._at_once = False
                self._listen(LOOK / 4)
        if process.returncode:
            say(f"objects of the run are left; remove them with: {command_line(command)}")
        if self._output is not None:
            self._output.kill()
            self._output.wait()

    @property
    def _asked(self) -> int:
        return INTERRUPTED if self._stop_signal == signal.SIGINT else STOPPED

    def _tell(self, text: str) -> None:
        if text != self._last_text:
            self._last_text = text
            say(text or "all hosts are running")

    def _listen(self, seconds: float) -> None:
        """Waits for this many seconds, or until a signal arrives."""
        end = time.monotonic() + seconds
        while can_read(self._wakeup, end - time.monotonic()):
            numbers = [number for number in self._wakeup.recv(4096) if number != signal.SIGCHLD]
            for number in numbers:
                self._at_once = self._stop_signal is not None or not self._followed
                self._stop_signal = self._stop_signal or number
            if numbers and not self._at_once:
                say("stopping after this step and saving; press Ctrl-C again to stop at once")
                first = self._pods[0]["metadata"]["name"]
                self._kubectl("delete", "pod", first, "--wait=false")  # its agent stops the whole run
            if numbers:
                return

    def _look_for_missing(self, hosts: int) -> None:
        if self._stop_signal is not None:
            return
        text = missing(self._job.job, hosts, self._pods, self._events)
        if text and text != self._last_text:  # the events may tell more
            self._events = self._kubectl.items("get", "events", "--field-selector=type=Warning") or []
            text = missing(self._job.job, hosts, self._pods, self._events)
        self._tell(text)

    def _follow(self) -> None:
        """Shows the output of the first host's newest pod."""
        first = self._pods.get(0)
        if first is None or (self._output is not None and self._output.poll() is None):
            return
        uid, ended = str(first["metadata"]["uid"]), code(first) is not None
        if (
            uid == self._followed
            and self._output is not None
            and ended
            and (self._had_ended or not self._output.returncode)
        ):
            return
        if self._followed not in ("", uid):  # a new pod has taken its place, but the end of the old one comes first
            return
        if state(first).keys() & {"running", "terminated"}:
            self._shown = self._shown if uid == self._followed else 0
            self._followed, self._had_ended = uid, ended
            command = self._kubectl.command("logs", "--follow", first["metadata"]["name"], f"--container={CONTAINER}")
            self._output = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
            )
            self._copies = threading.Thread(target=self._copy, args=(self._output,), daemon=True)
            self._copies.start()

    def _copy(self, output: subprocess.Popen[bytes]) -> None:
        """Copies a pod's log to standard output, each byte once: after a broken connection the log begins again."""
        assert output.stdout is not None
        again, passing = self._shown, Passing(sys.stdout)
        while data := output.stdout.read1(1 << 16):  # type: ignore[attr-defined]
            new = data[min(again, len(data)) :]
            again -= len(data) - len(new)
            self._shown += len(new)
            passing.write(new)
        passing.close()

    def _verdict(self, job: Mapping[str, Any], pods: Sequence[Pod]) -> int | None:
        """The exit code of the run once it has ended, otherwise None."""
        if self._output is not None and self._output.poll() is None:
            return None
        if self._copies is not None:
            self._copies.join()
        followed = [pod for pod in pods if str(pod["metadata"]["uid"]) == self._followed]
        ended = code(followed[0] if followed else None) if self._followed else None
        broke = self._output is not None and bool(self._output.returncode) and not self._had_ended
        if ended is not None and broke and followed and followed[0] is self._pods.get(0):
            return None  # its output is shown once more
        conditions = job["status"].get("conditions", [])
        failed = [one for one in conditions if one["type"] == "Failed" and one["status"] == "True"]
        if ended is not None and self._stop_signal is not None:
            return self._asked
        if ended == 0:
            self._farewell()
            return 0
        if failed or ended not in (None, *PASSING):
            if failed:
                say(f"Kubernetes ended the job ({failed[0].get('reason')}: {failed[0].get('message')})")
            return self._failed(ended)
        if ended is not None:
            how = "was stopped" if ended == STOPPED else "was lost"
            say(f"host 0 {how}; Kubernetes restarts it, and the run continues from its last checkpoint")
            self._followed, self._output = "", None
        return None

    def _farewell(self) -> None:
        """Lets the other hosts end."""
        end = time.monotonic() + FAREWELL
        while any(code(pod) is None for pod in self._pods.values()) and time.monotonic() < end:
            self._listen(LOOK / 2)
            self._pods = newest(self._kubectl.items("get", "pods", self._selector) or [])

    def _failed(self, first: int | None) -> int:
        """Shows the last lines of other hosts that failed. Returns the exit code that a local run would have."""
        self._farewell()
        codes = [first or 1]
        for number, pod in sorted(self._pods.items()):
            if number and (ended := code(pod)) not in (None, 0, 2, INTERRUPTED, *PASSING):
                codes.append(ended or 1)
                done = self._kubectl("logs", pod["metadata"]["name"], f"--container={CONTAINER}", f"--tail={LINES}")
                for line in done.stdout.splitlines():
                    say(f"host {number} | {line}")
        return codes[-1] if codes[0] in (1, *PASSING) else codes[0]
