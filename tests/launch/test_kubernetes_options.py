"""Labels, queues, nodes, volumes and priority of `paceline launch kubernetes`: manifests, refusals, a queued Job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from test_checkpoint_tree import refusal
from test_kubernetes_manifests import by_kind, job

from paceline.cli.main import main
from paceline.errors import UsageError
from paceline.launch.engines.manifests import LABEL, PATHS, manifests
from paceline.launch.engines.pod_options import KUEUE, PodOptions

NOTHING: dict[str, Any] = {
    **dict.fromkeys(("labels", "annotations", "node_selector", "tolerations", "pull_secrets", "volumes"), ()),
    **dict.fromkeys(("queue", "priority_class")),
}
EVERYTHING: dict[str, Any] = {
    "labels": ["team=vision", "example.com/cost-centre=42"],
    "annotations": ["example.com/note=a = b, any text"],
    "node_selector": ["kubernetes.io/arch=amd64", "gpu=h200"],
    "tolerations": ["nvidia.com/gpu:NoSchedule", "pool=train:NoExecute", "spot"],
    "pull_secrets": ["registry"],
    "priority_class": "high",
    "volumes": [
        "pvc:data:/data:ro",
        "hostPath:/scratch/a:/scratch",
        "emptyDir:10Gi:/cache",
        "emptyDir::/tmp/more",
        "secret:keys:/keys:ro",
        "configMap:settings:/etc/settings",
    ],
}


def parsed(**given: Any) -> PodOptions:
    return PodOptions.parse({**NOTHING, **given}, [*PATHS.values()])


@pytest.mark.parametrize("version", ["1.31", "1.37"])
@pytest.mark.parametrize("queue", [None, "kueue:team-a", "volcano:team-a", "kai:team-a"])
def test_manifests_with_all_options_fit_the_schemas(tmp_path: Path, version: str, queue: str | None) -> None:
    for manifest in manifests(job(tmp_path, options=parsed(**EVERYTHING, queue=queue))):
        kubernetes_validate.validate(json.loads(json.dumps(manifest)), version, strict=True)


def test_options_are_where_kubernetes_reads_them(tmp_path: Path) -> None:
    made = by_kind(manifests(job(tmp_path, options=parsed(**EVERYTHING))))
    template = made["Job"]["spec"]["template"]
    labels = {"team": "vision", "example.com/cost-centre": "42"}
    for about in (made["Job"]["metadata"], template["metadata"]):
        assert about["labels"] == {LABEL: "train-bcdfg", "app.kubernetes.io/managed-by": "paceline", **labels}
        assert about["annotations"] == {"example.com/note": "a = b, any text"}
    pod = template["spec"]
    assert pod["nodeSelector"] == {"kubernetes.io/arch": "amd64", "gpu": "h200"}
    assert pod["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "pool", "operator": "Equal", "value": "train", "effect": "NoExecute"},
        {"key": "spot", "operator": "Exists"},
    ]
    assert (pod["imagePullSecrets"], pod["priorityClassName"]) == ([{"name": "registry"}], "high")
    volumes = {volume.pop("name"): volume for volume in pod["volumes"]}
    mounts = {mount.pop("name"): mount for mount in pod["containers"][0]["volumeMounts"]}
    assert volumes.keys() == mounts.keys() >= PATHS.keys()
    assert [(volumes[f"volume-{n}"], mounts[f"volume-{n}"]) for n in range(6)] == [
        ({"persistentVolumeClaim": {"claimName": "data", "readOnly": True}}, {"mountPath": "/data", "readOnly": True}),
        ({"hostPath": {"path": "/scratch/a"}}, {"mountPath": "/scratch"}),
        ({"emptyDir": {"sizeLimit": "10Gi"}}, {"mountPath": "/cache"}),
        ({"emptyDir": {}}, {"mountPath": "/tmp/more"}),
        ({"secret": {"secretName": "keys"}}, {"mountPath": "/keys", "readOnly": True}),
        ({"configMap": {"name": "settings"}}, {"mountPath": "/etc/settings"}),
    ]
    plain = by_kind(manifests(job(tmp_path)))
    assert {kind: one for kind, one in made.items() if kind != "Job"} == {
        kind: one for kind, one in plain.items() if kind != "Job"
    }


@pytest.mark.parametrize(("shape", "kind"), [("job", "Job"), ("jobset", "JobSet"), ("trainjob", "TrainJob")])
def test_queues_are_named_as_each_of_them_reads_it(shape: str, kind: str, tmp_path: Path) -> None:
    def made(queue: str) -> tuple[dict[str, Any], dict[str, Any]]:
        *others, owner = manifests(job(tmp_path, shape=shape, options=parsed(queue=queue)))
        assert owner["kind"] == kind
        inner = owner["spec"] if shape != "trainjob" else others[-1]["spec"]["template"]["spec"]
        whole = inner if shape == "job" else inner["replicatedJobs"][0]["template"]["spec"]
        return owner, whole["template"]

    owner, template = made("kueue:team-a")
    assert owner["metadata"]["labels"][KUEUE] == "team-a"
    assert owner["spec"]["suspend"] is True
    assert KUEUE not in template["metadata"]["labels"]  # Kueue would admit each pod for itself
    owner, template = made("volcano:team-a")
    assert template["metadata"]["annotations"] == {"scheduling.volcano.sh/queue-name": "team-a"}
    assert template["spec"]["schedulerName"] == "volcano"
    assert "suspend" not in owner["spec"]
    owner, template = made("kai:team-a")
    for about in (owner["metadata"], template["metadata"]):
        assert about["labels"]["kai.scheduler/queue"] == "team-a"
    assert template["spec"]["schedulerName"] == "kai-scheduler"
    assert "suspend" not in owner["spec"]


PAIR = "is not NAME=VALUE in Kubernetes' form; use one like team=vision"
SET = "is set by Paceline or Kubernetes; use another name"
VOLUME = "is not a volume; use KIND:SOURCE:PATH[:ro], like pvc:data:/data:ro, hostPath:/scratch:/scratch, "
VOLUME += "emptyDir:10Gi:/cache, secret:keys:/keys or configMap:c:/config"
TAINT = "is not a toleration; use KEY, KEY=VALUE, KEY:EFFECT or KEY=VALUE:EFFECT; effects are NoSchedule, "
TAINT += "PreferNoSchedule, NoExecute"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"labels": ["team"]}, f"--label team {PAIR}"),
        ({"labels": ["team=a b"]}, f"--label 'team=a b' {PAIR}"),
        ({"labels": ["/x=a"]}, f"--label /x=a {PAIR}"),
        ({"labels": ["paceline/run=x"]}, f"--label paceline/run {SET}"),
        ({"annotations": ["app.kubernetes.io/managed-by=x"]}, f"--annotation app.kubernetes.io/managed-by {SET}"),
        ({"node_selector": ["gpu=-"]}, f"--node-selector gpu=- {PAIR}"),
        ({"tolerations": ["gpu:Never"]}, f"--toleration gpu:Never {TAINT}"),
        ({"tolerations": [":NoSchedule"]}, f"--toleration :NoSchedule {TAINT}"),
        ({"queue": "team-a"}, "--queue team-a is not a queue; use kueue:NAME, volcano:NAME or kai:NAME"),
        ({"queue": "slurm:a"}, "--queue slurm:a is not a queue; use kueue:NAME, volcano:NAME or kai:NAME"),
        (
            {"priority_class": "High"},
            "--priority-class High is not the name of a Kubernetes object; use lower-case letters",
        ),
        (
            {"pull_secrets": ["a/b"]},
            "--pull-secret a/b is not the name of a Kubernetes object; use lower-case letters",
        ),
        ({"volumes": ["data:/data"]}, f"--volume data:/data {VOLUME}"),
        ({"volumes": ["nfs:a:/data"]}, f"--volume nfs:a:/data {VOLUME}"),
        ({"volumes": ["pvc::/data"]}, f"--volume pvc::/data {VOLUME}"),
        ({"volumes": ["pvc:a:data"]}, f"--volume pvc:a:data {VOLUME}"),
        ({"volumes": ["pvc:a:/a/../b"]}, f"--volume pvc:a:/a/../b {VOLUME}"),
        ({"volumes": ["pvc:a:/a:rw"]}, f"--volume pvc:a:/a:rw {VOLUME}"),
        ({"volumes": ["hostPath:a:/a"]}, f"--volume hostPath:a:/a {VOLUME}"),
        ({"volumes": ["emptyDir:much:/a"]}, f"--volume emptyDir:much:/a {VOLUME}"),
        (
            {"volumes": ["pvc:a:/mnt/run"]},
            "--volume: the path /mnt/run is used twice; use another path for one of the volumes",
        ),
    ],
)
def test_options_that_kubernetes_would_refuse(given: dict[str, Any], said: str) -> None:
    assert refusal(UsageError, parsed, **given) == said


@pytest.mark.usefixtures("with_a_script")
def test_dry_run_prints_what_the_options_ask_for(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["launch", "kubernetes", "-N", "2", "--image", "i", "--claim", "runs", "--dry-run"]
    words += ["--label", "team=vision", "--annotation", "a=b", "--queue", "kueue:team-a", "--node-selector", "gpu=h200"]
    words += ["--toleration", "spot", "--pull-secret", "r", "--priority-class", "high", "--volume", "pvc:data:/data"]
    assert main([*words, "train.py"]) == 0
    made = by_kind(json.loads(capsys.readouterr().out)["items"])["Job"]
    assert made["metadata"]["labels"][KUEUE] == "team-a"
    assert made["spec"]["suspend"] is True
    pod = made["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"gpu": "h200"}
    assert pod["volumes"][-1] == {"name": "volume-0", "persistentVolumeClaim": {"claimName": "data"}}
