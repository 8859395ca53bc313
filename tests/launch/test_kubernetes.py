"""`paceline launch kubernetes`: what it says, what it refuses, and on a real API server what becomes of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agents import journal, until
from clusters import in_no_process, processes, worker_of
from conftest import lacking
from launching import SCRIPTS, in_short_folder, paceline, piped
from oracle import as_one_worker
from pods import IMAGE, SERVERS, Cluster, Container
from real_engines import DIGITS, SLOWLY, weights
from test_kubernetes_manifests import HIDDEN, TOKEN, by_kind

from paceline.base.journal import read_journal
from paceline.cli.main import main
from paceline.errors import UsageError
from paceline.launch.engines.kubernetes import code, missing, newest
from paceline.launch.engines.manifests import AVOIDED, INDEX, LABEL, PASSING
from paceline.team.auth import read_token

real = [pytest.mark.slow, pytest.mark.root, pytest.mark.timeout(500)]


KUBECTL = """#!{python}
import json, os, sys
path = os.environ["THINGS"]
things = json.load(open(path)) if os.path.exists(path) else dict()
words = [word for word in sys.argv[1:] if not word.startswith("--")]
verb = words[0]
if verb == "create":
    given = json.load(sys.stdin)
    for one in given["items"] if given["kind"] == "List" else [given]:
        name = one["metadata"]["name"]
        if one["kind"] == "TrainJob" and "trainingruntime/" + one["spec"]["runtimeRef"]["name"] not in things:
            sys.exit("specified trainingRuntime must be created before the TrainJob is created")
        things[one["kind"].lower() + "/" + name] = one
elif verb == "get":
    print("uid-of-" + things["/".join(words[1:3])]["metadata"]["name"], end="")
else:
    for part, change in json.loads(words[3]).items():
        things["/".join(words[1:3])][part].update(change)
json.dump(things, open(path, "w"))
"""


@pytest.mark.parametrize(("shape", "kind"), [("job", "Job"), ("jobset", "JobSet"), ("trainjob", "TrainJob")])
@pytest.mark.usefixtures("with_a_script")
def test_kubernetes_objects_belong_to_one_job_that_starts_last(
    shape: str, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl = Path("bin", "kubectl")
    kubectl.parent.mkdir()
    kubectl.write_text(KUBECTL.format(python=sys.executable))
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{kubectl.parent.absolute()}:/usr/bin:/bin")
    monkeypatch.setenv("THINGS", str(Path("things.json").absolute()))
    assert main(["launch", "kubernetes", "--as", shape, *ALL, "--detach", "train.py"]) == 0
    things = json.loads(Path("things.json").read_text())
    (owner,) = [one for one in things.values() if one["kind"] == kind]
    assert owner["spec"]["suspend"] is False
    name = owner["metadata"]["name"]
    expected = [{"apiVersion": owner["apiVersion"], "kind": kind, "name": name, "uid": f"uid-of-{name}"}]
    others = [one for one in things.values() if one is not owner]
    assert [one["metadata"].get("ownerReferences") for one in others] == [expected] * len(others)
    assert {one["kind"] for one in others} == {"Secret", "ConfigMap", "Service", "NetworkPolicy"} | (
        {"TrainingRuntime"} if shape == "trainjob" else set()
    )
    assert f"to stop it with a checkpoint: kubectl delete {shape} {name}\n" in capsys.readouterr().err


# ---- what it says of pods


def pod(number: int, made: int = 0, state: dict[str, Any] | None = None, **status: Any) -> dict[str, Any]:
    about = {
        "name": f"t-{number}-{made}",
        "creationTimestamp": f"2026-01-01T00:00:0{made}Z",
        "annotations": {INDEX: str(number)},
    }
    statuses = {"containerStatuses": [{"name": "node", "state": state}]} if state is not None else {}
    return {"metadata": about, "status": {"phase": "Pending", **statuses, **status}}


def event(name: str, reason: str, message: str) -> dict[str, Any]:
    return {"involvedObject": {"name": name}, "reason": reason, "message": message, "lastTimestamp": "2026-01-01"}


UNSCHEDULABLE = {
    "conditions": [
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
        }
    ]
}
BACK_OFF = {"waiting": {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "none:1"'}}
CREATING = {"waiting": {"reason": "ContainerCreating"}}


def test_kubernetes_missing_hosts_and_reasons() -> None:
    pods = [pod(0, state={"running": {}}), pod(1, **UNSCHEDULABLE), pod(2, **UNSCHEDULABLE), pod(3, state=BACK_OFF)]
    assert missing("t", 4, newest(pods), []) == (
        "waiting for hosts 1-2 (Unschedulable: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu.); "
        'host 3 (ImagePullBackOff: Back-off pulling image "none:1")'
    )
    mount = event("t-0-0", "FailedMount", 'MountVolume.SetUp failed for volume "run" : mount failed\n')
    assert missing("t", 1, newest([pod(0, state=CREATING)]), [mount]) == (
        'waiting for host 0 (FailedMount: MountVolume.SetUp failed for volume "run" : mount failed)'
    )
    assert missing("t", 1, newest([pod(0, state=CREATING)]), []) == "waiting for host 0 (ContainerCreating)"
    quota = event("t", "FailedCreate", "pods is forbidden: exceeded quota: lab")
    assert (
        missing("t", 2, {}, [quota]) == "waiting for hosts 0-1 (FailedCreate: pods is forbidden: exceeded quota: lab)"
    )
    assert missing("t", 2, {}, []) == "waiting for hosts 0-1 (no pod was created yet)"
    assert missing("t", 1, newest(pods), []) == ""


def test_kubernetes_newest_pod_of_a_host_counts() -> None:
    ended = pod(0, 1, state={"terminated": {"exitCode": 75}})
    assert newest([pod(0, 2), ended, pod(0, 0)])[0]["metadata"]["name"] == "t-0-2"
    assert (code(ended), code(pod(0)), code(pod(0, state={"running": {}}))) == (75, None, None)
    assert code(pod(0, phase="Failed", reason="Evicted")) in PASSING
    assert code(None) in PASSING


# ---- what cannot be asked for

ALL = ["-N", "2", "--image", "i", "--claim", "runs"]


def test_kubernetes_without_kubectl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "train.py").touch()
    assert main(["launch", "kubernetes", *ALL, "train.py"]) == 2
    told = (
        "paceline: kubectl cannot be started (No such file or directory); install "
        "it, or apply the output of --dry-run\n"
    )
    assert capsys.readouterr().err == told


def test_kubernetes_dry_run_hides_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("pass\n")
    words = ["--gpus", "2", "--memory", "16Gi", "--env", f"KEY={HIDDEN}", "--plan", "shard=2", "--steps", "9"]
    words += ["--heal", "--verify-steps", "1%"]
    again = [
        "launch",
        "kubernetes",
        "--run-dir",
        "runs/a",
        *ALL,
        *words,
        "--dry-run",
        "--quiet",
        "train.py",
        "--lr",
        "1",
    ]
    assert main(again) == 0
    out = capsys.readouterr().out
    assert HIDDEN not in out
    pod = by_kind(json.loads(out)["items"])["Job"]["spec"]["template"]["spec"]
    assert "podAntiAffinity" in pod["affinity"]  # a host that computes wrongly twice is left out
    (container,) = pod["containers"]
    expected = (
        "python -m paceline run --nodes auto --token-file /mnt/paceline/token --workers 2 --run-dir /mnt/run/runs/a"
    )
    expected += " --plan shard=2 --steps 9 --verify-steps 1% --max-restarts 10 --min-workers 1 --heal --quiet"
    expected += " /mnt/script/train.py --lr 1"
    assert container["command"] == expected.split()
    limits = {"memory": "16Gi", "nvidia.com/gpu": "2"}
    assert container["resources"] == {"requests": {"cpu": "2", **limits}, "limits": limits}
    variables = {one["name"]: one for one in container["env"]}
    assert variables["PACELINE_AGAIN"]["value"].endswith(
        "--env KEY --plan shard=2 --steps 9 --heal --verify-steps 1% --dry-run --quiet train.py --lr 1"
    )
    for shape, last in (("jobset", ["NetworkPolicy", "JobSet"]), ("trainjob", ["TrainingRuntime", "TrainJob"])):
        assert main(["launch", "kubernetes", "--as", shape, *again[2:]]) == 0
        assert [one["kind"] for one in json.loads(capsys.readouterr().out)["items"]][-2:] == last
    for script in (["/app/train.py"], ["-m", "train.it"]):
        assert main(["launch", "kubernetes", *ALL, "--dry-run", *script]) == 0
        found = by_kind(json.loads(capsys.readouterr().out)["items"])
        assert "ConfigMap" not in found
        command = found["Job"]["spec"]["template"]["spec"]["containers"][0]["command"]
        assert command[-len(script) :] == script


@pytest.mark.root
def test_token_file_of_root_may_be_readable_by_its_group() -> None:
    """As a Secret's file is, whatever mode was asked for, where a pod has an fsGroup."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        path = Path(folder, "token")
        path.write_text(TOKEN)
        os.chown(path, 0, 1000)
        for mode, user, told in ((0o440, 0, 3), (0o440, 1000, 0), (0o444, 1000, 3), (0o460, 1000, 3)):
            path.chmod(mode)
            if not (child := os.fork()):
                os.setgroups([1000])
                os.setresuid(user, user, user)
                try:
                    read_token(path)
                except UsageError as error:
                    os._exit(
                        3
                        if str(error) == f"the token file {path} can be read by other users; run chmod 600 {path}"
                        else 4
                    )
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == told, (oct(mode), user)


# ---- for real


@pytest.fixture(scope="module")
def pods() -> Iterator[Cluster]:
    absent = [name for name in SERVERS if shutil.which(name) is None]
    if absent:
        lacking(f"there is no {' and no '.join(absent)}: see .ci/kubernetes")
    with in_short_folder(Cluster, "pods-") as made:
        yield made


class Launched:
    """Launchers from a folder of the test's, which is also the claim that the run folder is on."""

    def __init__(self, pods: Cluster, folder: Path) -> None:
        self.pods, self.folder, self.name = pods, folder, folder.name.replace("_", "-")[-40:].strip("-")
        self.started = list[subprocess.Popen[str]]()
        os.chown(folder, 1000, 1000)
        pods.claim(self.name, folder)

    def start(self, *words: str | Path) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            "-m",
            "paceline",
            "launch",
            "kubernetes",
            f"--engine=--kubeconfig={self.pods.kubeconfig}",
        ]
        own = ["--image", IMAGE, "--claim", self.name, "--cpus=100m", "--cwd=/mnt/run"]
        path = os.pathsep.join(filter(None, [str(SCRIPTS), os.environ.get("PYTHONPATH")]))
        variables = ["--env=OMP_NUM_THREADS=1", f"--env=PYTHONPATH={path}"]
        self.started.append(piped([*command, *own, *variables, *words], self.folder))
        return self.started[-1]

    def begun(self, *words: str) -> subprocess.Popen[str]:
        """A run of `SLOWLY` on two hosts, both of which train."""
        (self.folder / "train.py").write_text(SLOWLY)
        process = self.start("-N", "2", "--run-dir", "run", "--min-workers", "2", *words, "train.py")
        run = self.folder / "run"
        until(lambda: (run / "journal.jsonl").exists() and bool(journal(run, "formed")), 200)
        return process

    def pod(self, number: int) -> Container:
        found = self.pods.pod(number)
        assert found is not None
        return found

    def another(self, before: Container) -> None:
        """In a pod's place another one has begun."""
        until(lambda: (now := self.pods.pod(before.number)) is not None and now.name != before.name, 200)

    def delete(self, pod: Container) -> None:
        self.pods.ask("DELETE", f"/api/v1/namespaces/default/pods/{pod.name}")

    def teams(self) -> list[object]:
        return [event["workers"] for event in journal(self.folder / "run", "generation")]

    def ended(self, process: subprocess.Popen[str], expected: int) -> str:
        """All that it said; nothing is left, neither here nor there."""
        out, error = process.communicate(timeout=300)
        assert process.returncode == expected, out + error
        assert self.pods.things() == []
        assert not [
            one for one in processes() if "paceline" in " ".join(one.info["cmdline"] or ()) and self.ours(one.info)
        ]
        return out + error

    def ours(self, info: dict[str, Any]) -> bool:
        told = (info["environ"] or {}).get("PACELINE_AGAIN", "")  # in our pods
        return info["cwd"] == str(self.folder) or str(self.pods.kubeconfig) in told

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate()
        for thing in self.pods.things():
            if thing.startswith("jobs/"):
                options = {"propagationPolicy": "Foreground"}
                self.pods.ask("DELETE", f"/apis/batch/v1/namespaces/default/{thing}", options)
        until(lambda: self.pods.things() == [], 200)


@pytest.fixture
def launched(pods: Cluster, tmp_path: Path) -> Iterator[Launched]:
    made = Launched(pods, tmp_path)
    yield made
    made.close()


class TestRealKubernetes:
    pytestmark = real

    def test_two_hosts_give_the_weights_of_one_worker(self, launched: Launched, tmp_path: Path) -> None:
        """To the byte with `exact`. The token is in no argument, environment or log, and in no thing but the Secret."""
        paceline("run", "--plan", "exact", "--steps", "12", "--run-dir", "alone", DIGITS, cwd=tmp_path)
        shutil.copy(DIGITS, tmp_path / "digits.py")
        words = (
            "-N",
            "2",
            "--min-workers",
            "2",
            "--plan",
            "exact",
            "--steps",
            "12",
            "--run-dir",
            "run",
            "--env=KEY=hidden-value",
        )
        process = launched.start(*words, "digits.py")
        token = tmp_path / "run" / "token"
        until(lambda: token.exists() and bool(journal(tmp_path / "run", "formed")), 200)
        secret = token.read_text().strip()
        in_no_process(secret)
        core = "/api/v1/namespaces/default"
        paths = [f"{core}/{kind}" for kind in ("pods", "services", "configmaps", "events")]
        paths += [
            "/apis/batch/v1/namespaces/default/jobs",
            "/apis/networking.k8s.io/v1/namespaces/default/networkpolicies",
        ]
        told = [json.dumps(launched.pods.ask("GET", path)) for path in paths]
        (kept,) = launched.pods.ask("GET", f"{core}/secrets?labelSelector=paceline/run")["items"]
        assert "annotations" not in kept["metadata"]
        assert len(launched.pods.things()) == 7
        told.append(launched.ended(process, 0))
        assert "worker 1 has joined: 2 workers" in told[-1]
        assert not [word for word in (secret, HIDDEN) for text in told if word in text]
        assert weights(tmp_path / "run") == weights(tmp_path / "alone")

    @pytest.mark.parametrize("how", ["killed", "deleted"])
    def test_kill_of_a_pod_and_its_replacement(self, launched: Launched, how: str) -> None:
        process = launched.begun()
        lost = launched.pod(1)
        if how == "killed":
            lost.process.kill()
        else:
            launched.delete(lost)
        until(lambda: launched.teams()[-1] == [0], 100)
        launched.another(lost)
        until(lambda: len(launched.teams()[-1]) == 2, 200)  # type: ignore[arg-type]
        (launched.folder / "go").touch()
        launched.ended(process, 0)
        as_one_worker(launched.folder)
        assert lost.code == (137 if how == "killed" else 75)

    @pytest.mark.parametrize("how", ["killed", "deleted"])
    def test_kill_of_the_first_pod_resumes_from_the_checkpoint(self, launched: Launched, how: str) -> None:
        """The other host's agent waits for the next one of that name, or ends and comes again."""
        process = launched.begun("--save-every", "1")
        lost = launched.pod(0)
        until(lambda: bool(journal(launched.folder / "run", "checkpoint")), 100)
        if how == "killed":
            lost.process.kill()
        else:
            launched.delete(lost)
        launched.another(lost)
        until(lambda: len(journal(launched.folder / "run", "start")) == 2, 200)
        (launched.folder / "go").touch()
        said = launched.ended(process, 0)
        assert "host 0 was" in said
        assert "Kubernetes restarts it, and the run continues from its last checkpoint\n" in said
        as_one_worker(launched.folder)
        assert lost.code == (137 if how == "killed" else 75)

    def test_another_node_is_asked_for(self, launched: Launched) -> None:
        """Instead of one on which workers were killed twice: pods avoid it, although it would be the emptier one."""
        run, name = launched.folder / "run", "/api/v1/namespaces/default/pods"
        words = ("--exclude-after", "2", "--min-workers", "1", "--env=XDG_CACHE_HOME=/mnt/run/cache")
        process = launched.begun(*words)
        nodes = lambda: {
            int(pod["metadata"]["annotations"][INDEX]): pod["spec"]["nodeName"]
            for pod in launched.pods.ask("GET", f"{name}?labelSelector={LABEL}")["items"]
            if pod["status"]["phase"] == "Running"
        }
        until(lambda: len({*nodes().values()}) == 2)
        before = nodes()
        events = lambda kind: [event for event in read_journal(run) if event["event"] == kind]
        joined = lambda: events("formed")[-1]["workers"]
        os.kill(worker_of(run / "hosts" / "node-1"), signal.SIGKILL)
        until(lambda: joined() == [0], 100)
        until(lambda: joined() == [0, 1], 200)
        os.kill(worker_of(run / "hosts" / "node-1"), signal.SIGKILL)
        until(lambda: joined() not in ([0, 1], [0]), 300)
        assert nodes() == {0: before[0], 1: before[0]}
        (launched.folder / "go").touch()
        said = launched.ended(process, 0)
        reasons = "2 failures (worker 1 was killed by SIGKILL)"
        assert f"{before[1]} is left out of the run after {reasons}\n" in said
        assert f"the node {before[1]} is left out; Kubernetes was asked for another one\n" in said
        assert [event["host"] for event in events("excluded")] == [before[1]]
        until(lambda: launched.pods.ask("GET", f"{name}?labelSelector={AVOIDED}")["items"] == [], 60)
        as_one_worker(launched.folder)

    def test_ctrl_c_saves_and_leaves_nothing(self, launched: Launched) -> None:
        process = launched.begun()
        process.send_signal(signal.SIGINT)
        said = launched.ended(process, 130)
        assert "continue with: paceline launch kubernetes " in said
        (stopped,) = journal(launched.folder / "run", "stopped")
        name = f"step-{stopped['step']:012d}"
        assert (launched.folder / "run" / "checkpoints" / name / "manifest.json").exists()

    def test_failure_on_another_host_is_shown(self, launched: Launched) -> None:
        fails = "    if report.step >= 20 and os.environ['PACELINE_RANK'] != '0':\n        raise ValueError('here')\n"
        (launched.folder / "train.py").write_text(SLOWLY.replace("trainer.export", f"{fails}trainer.export"))
        words = ("-N", "2", "--run-dir", "run", "--min-workers", "2", "--max-restarts", "1", "train.py")
        said = launched.ended(launched.start(*words), 1)
        assert re.search(r"^host 1 \| worker 1 failed \(host \S+, pid \d+, after step \d+\)$", said, re.MULTILINE), said
        assert "ValueError: here" in said

    def test_unschedulable_pods_have_reasons(self, launched: Launched) -> None:
        (launched.folder / "train.py").touch()
        lacks = "waiting for host 0 (Unschedulable: 0/2 nodes are available: 2"
        for words, told in (
            (("--cpus=64",), f"{lacks} Insufficient cpu.)\n"),
            (("--image=none:1",), 'waiting for host 0 (ImagePullBackOff: Back-off pulling image "none:1")\n'),
            (("--claim=none",), f'{lacks} persistentvolumeclaim "none" not found.)\n'),
        ):
            process = launched.start("-N", "1", *words, "train.py")
            assert process.stderr is not None
            said = [process.stderr.readline()]
            assert re.fullmatch(r"job train-\w{5}, host 0, run folder runs/train-[-0-9]+\n", said[0])
            while said[-1] != told:
                said.append(process.stderr.readline())
                assert said[-1].startswith("waiting for host 0 ("), said
            process.send_signal(signal.SIGINT)
            launched.ended(process, 130)

    def test_refusal_of_kubernetes_is_shown(self, launched: Launched) -> None:
        (launched.folder / "train.py").touch()
        process = launched.start("-N", "1", "--namespace", "none", "train.py")
        what = 'Error from server (NotFound): error when creating "STDIN": namespaces "none" not found'
        told = f"paceline: Kubernetes rejects the job ({what}); check --engine='...' and --dry-run\n"
        assert launched.ended(process, 2) == told

    def test_detached_run_goes_on(self, launched: Launched) -> None:
        (launched.folder / "train.py").write_text(SLOWLY)
        (launched.folder / "go").touch()
        process = launched.start("-N", "2", "--run-dir", "run", "--detach", "train.py")
        out, error = process.communicate(timeout=100)
        assert process.returncode == 0, error
        assert "the run continues without this command; its output: kubectl --kubeconfig=" in out + error
        until(lambda: (launched.folder / "out.safetensors").exists(), 200)
        (job,) = [thing for thing in launched.pods.things() if thing.startswith("jobs/")]
        launched.pods.ask("DELETE", f"/apis/batch/v1/namespaces/default/{job}", {"propagationPolicy": "Background"})
        until(lambda: launched.pods.things() == [], 200)  # what it has made goes with it
        as_one_worker(launched.folder)
