"""What `paceline launch kubernetes` asks a cluster for, beside the schemas of what takes it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pods import expanded

from paceline.launch.engines.manifests import LABEL, PLACEHOLDER, PodJob, literal, manifests, placeholder, run_name

TOKEN, HIDDEN = 64 * "a", "hidden-value"
FULL = {"values": {"KEY": HIDDEN}, "claim": "runs", "setup": "umask 007", "cwd": "/app"}
LIMITED = {"resources": {"requests": {"cpu": "8", "nvidia.com/gpu": "2"}, "limits": {"nvidia.com/gpu": "2"}}}


def job(folder: Path, **more: Any) -> PodJob:
    script = folder / "train.py"
    script.write_text("print('here')\n")
    return PodJob("train-bcdfg", "lab", "image:1", 3, ["python", "$(X)"], TOKEN, **{"script": script, **more})


def by_kind(made: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {one["kind"]: one for one in made}


@pytest.mark.parametrize("more", [{}, {"script": None}, {**FULL, **LIMITED}], ids=["few", "image", "all"])
@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_manifests_fit_the_kubernetes_schemas(tmp_path: Path, version: str, more: dict[str, Any]) -> None:
    for shown in (False, True):
        for manifest in manifests(job(tmp_path, **more), shown):
            kubernetes_validate.validate(json.loads(json.dumps(manifest)), version, strict=True)


@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_pods_avoid_nodes_that_are_left_out(tmp_path: Path, version: str) -> None:
    """A pod on such a node has the label that the pods of the run avoid, may be on any node, and belongs to the Job."""
    excluding = job(tmp_path, **FULL, excludes=True)
    *_, owner = manifests(excluding)
    made = placeholder(excluding, "node-7", 1, {"metadata": {"name": owner["metadata"]["name"], "uid": "1-2-3"}})
    for manifest in (owner, made):
        kubernetes_validate.validate(json.loads(json.dumps(manifest)), version, strict=True)
    affinity = owner["spec"]["template"]["spec"]["affinity"]["podAntiAffinity"]
    (avoided,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]
    assert avoided["labelSelector"]["matchLabels"].items() <= made["metadata"]["labels"].items()
    assert avoided["topologyKey"] == "kubernetes.io/hostname"
    assert LABEL not in made["metadata"]["labels"], "it is no pod of the run"
    assert (made["spec"]["nodeName"], made["spec"]["tolerations"]) == ("node-7", [{"operator": "Exists"}])
    (own,) = made["metadata"]["ownerReferences"]
    assert (own["kind"], own["name"], own["uid"]) == ("Job", owner["metadata"]["name"], "1-2-3")
    assert "affinity" not in manifests(job(tmp_path, **FULL))[-1]["spec"]["template"]["spec"]


def test_manifests_have_secrets_in_the_secret_only(tmp_path: Path) -> None:
    made = manifests(job(tmp_path, **FULL))
    assert [one["kind"] for one in made if TOKEN in json.dumps(one)] == ["Secret"]
    assert [one["kind"] for one in made if HIDDEN in json.dumps(one)] == ["Secret"]
    shown = manifests(job(tmp_path, **FULL), shown=True)
    assert TOKEN not in json.dumps(shown)
    assert HIDDEN not in json.dumps(shown)
    assert by_kind(shown)["Secret"]["stringData"] == {"token": PLACEHOLDER, "env.KEY": PLACEHOLDER}
    assert shown[1:] == made[1:]
    assert TOKEN not in repr(job(tmp_path))


def test_manifest_of_pods_rights_and_failure_policy(tmp_path: Path) -> None:
    found = by_kind(manifests(job(tmp_path, **FULL, restarts=4)))
    spec = found["Job"]["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 3, 3)
    ignored, stopped, failed = spec["podFailurePolicy"]["rules"]
    assert ignored == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert (stopped["action"], stopped["onExitCodes"]["values"]) == ("Ignore", [75, 79])
    assert (failed["action"], failed["onExitCodes"]["values"]) == ("FailJob", [75, 79, 137, 143])
    assert (failed["onExitCodes"]["operator"], spec["backoffLimit"]) == ("NotIn", 4)
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    assert pod["subdomain"] == found["Service"]["metadata"]["name"]
    assert container["command"] == ["sh", "-c", 'umask 007\nexec "$$@"', "sh", "python", "$$(X)"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["token"]["secret"]["defaultMode"] == 0o400
    assert volumes["memory"]["emptyDir"] == {"medium": "Memory"}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
    assert found["Service"]["spec"]["clusterIP"] == "None"
    assert found["Service"]["spec"]["publishNotReadyAddresses"] is True
    labels = spec["template"]["metadata"]["labels"].items()
    own = found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]
    assert own.items() <= labels
    assert found["NetworkPolicy"]["spec"]["ingress"] == [{"from": [{"podSelector": {"matchLabels": own}}]}]
    assert found["Service"]["spec"]["selector"].items() <= labels
    assert found["ConfigMap"]["data"] == {"script": "print('here')\n"}


def the_same_job(jobs: dict[str, Any], alone: dict[str, Any], **labels: str) -> None:
    """What a JobSet holds is that Job, with these labels besides, whose first pod has another name."""
    assert jobs["network"] == {"enableDNSHostnames": False}
    (inner,) = jobs["replicatedJobs"]
    template = inner.pop("template")
    assert inner == {"name": "node", "replicas": 1}
    whole = {"apiVersion": "batch/v1", "kind": "Job", **template}
    kubernetes_validate.validate(json.loads(json.dumps(whole)), "1.37", strict=True)
    assert template["metadata"]["labels"] == {**alone["metadata"]["labels"], **labels}
    variables = template["spec"]["template"]["spec"]["containers"][0]["env"]
    assert {"name": "PACELINE_FIRST", "value": "train-bcdfg-node-0-0.train-bcdfg"} in variables
    text = json.dumps(template["spec"]).replace("-node-0-0.", "-0.")
    assert json.loads(text) == {k: v for k, v in alone["spec"].items() if k != "ttlSecondsAfterFinished"}


def test_job_set_holds_the_same_job(tmp_path: Path) -> None:
    """Its schema is not here: the fields that are used are written down, and the Job in it is held by its own."""
    alone = by_kind(manifests(job(tmp_path, **FULL, **LIMITED)))
    found = by_kind(manifests(job(tmp_path, **FULL, **LIMITED, shape="jobset")))
    set_ = found.pop("JobSet")
    assert found == {kind: one for kind, one in alone.items() if kind != "Job"}
    assert (set_["apiVersion"], set_["metadata"]) == ("jobset.x-k8s.io/v1alpha2", alone["Job"]["metadata"])
    assert set_["spec"].keys() == {"replicatedJobs", "network", "ttlSecondsAfterFinished"}
    the_same_job(set_["spec"], alone["Job"])


def fields(required: str = "", **properties: Any) -> dict[str, Any]:
    """A structural schema of an object that has no other fields."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


NAME, COUNT, ANY = {"type": "string", "minLength": 1, "maxLength": 253}, {"type": "integer", "minimum": 1}, {}
META = fields(
    "name labels", name={**NAME, "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}, namespace=NAME, labels=ANY
)
REPLICATED = fields(
    "name template", name=NAME, replicas=COUNT, groupName=NAME, dependsOn=ANY, template=fields(metadata=ANY, spec=ANY)
)
JOBS = fields(
    replicatedJobs={"type": "array", "items": REPLICATED},
    network=fields(
        enableDNSHostnames={"type": "boolean"}, subdomain=NAME, publishNotReadyAddresses={"type": "boolean"}
    ),
    **dict.fromkeys(("successPolicy", "failurePolicy", "startupPolicy", "suspend", "coordinator", "managedBy"), ANY),
    ttlSecondsAfterFinished=COUNT,
)
TRAIN_JOB = fields(
    "runtimeRef",
    runtimeRef=fields("name", name=NAME, apiGroup=NAME, kind=NAME),
    trainer=fields(
        image=NAME, command=ANY, args=ANY, env=ANY, numNodes=COUNT, resourcesPerNode=ANY, numProcPerNode=ANY
    ),
    **dict.fromkeys(("initializer", "runtimePatches", "managedBy", "activeDeadlineSeconds"), ANY),
    suspend={"type": "boolean"},
)
RUNTIME = fields(
    mlPolicy=fields(numNodes=COUNT, torch=ANY, mpi=ANY, flux=ANY),
    podGroupPolicy=ANY,
    template=fields(metadata=ANY, spec=JOBS),
)


def test_train_job_runtime_holds_the_same_job(tmp_path: Path) -> None:
    """Kubeflow Trainer's schemas are not here: their fields are written down above, and the Job in it is held by its
    own. It takes the runtime only with one replica, and a container `node`, in the job that it is to train in.
    """
    alone = by_kind(manifests(job(tmp_path, **FULL, **LIMITED)))
    made = manifests(job(tmp_path, **FULL, **LIMITED, shape="trainjob"))
    *_, runtime, train = made
    assert made[:-2] == [one for kind, one in alone.items() if kind != "Job"]
    for one, kind, schema in ((runtime, "TrainingRuntime", RUNTIME), (train, "TrainJob", TRAIN_JOB)):
        whole = fields(
            "apiVersion kind metadata spec", apiVersion=NAME, kind={"const": kind}, metadata=META, spec=schema
        )
        jsonschema.validate(json.loads(json.dumps(one)), whole)
        assert one["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
        assert one["metadata"]["labels"].items() >= alone["Job"]["metadata"]["labels"].items()
    assert runtime["metadata"]["labels"]["trainer.kubeflow.org/framework"] == "torch"
    assert train["spec"] == {
        "runtimeRef": {
            "apiGroup": "trainer.kubeflow.org",
            "kind": "TrainingRuntime",
            "name": runtime["metadata"]["name"],
        }
    }
    assert runtime["spec"]["mlPolicy"] == {"numNodes": 3}
    jobs = runtime["spec"]["template"]["spec"]
    inner = jobs["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert [container["name"] for container in inner["containers"]] == ["node"]
    the_same_job(jobs, alone["Job"], **{"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"})


# A server for `create`, `get` and `patch`, which refuses a TrainJob without its runtime, as Kubeflow Trainer does.
def test_script_that_is_not_utf8_is_binary_data(tmp_path: Path) -> None:
    made = job(tmp_path)
    assert made.script is not None
    made.script.write_bytes(b"# -*- coding: latin-1 -*-\n'\xe4'\n")
    assert "binaryData" in by_kind(manifests(made))["ConfigMap"]


@given(st.text(alphabet="$()ABC a", max_size=12))
def test_dollar_signs_are_escaped_for_kubernetes(text: str) -> None:
    assert expanded(literal(text), {"A": "x", "B": "y"}) == text


@given(st.text(max_size=80))
def test_run_names_are_kubernetes_labels(stem: str) -> None:
    name = run_name(stem)
    assert re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", name)
    assert len(f"{name}-99999") <= 63
    assert run_name(stem) != name
