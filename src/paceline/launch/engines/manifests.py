"""The Kubernetes manifests of a run.

Its fields are those of Kubernetes 1.31 (https://kubernetes.io/docs/reference/kubernetes-api/), of JobSet's v1alpha2
(https://jobset.sigs.k8s.io/docs/reference/) and of Kubeflow Trainer's v1alpha1 (https://github.com/kubeflow/trainer).
No torch.
"""

from __future__ import annotations

import base64
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.base.exit_codes import LEFT_OUT, STOPPED
from paceline.base.schema import read_file
from paceline.launch.engines.pod_options import PodOptions
from paceline.launch.local import PORT

LABEL = "paceline/run"  # label of all objects of a run; its value is the name of the run
INDEX = "batch.kubernetes.io/job-completion-index"  # annotation with the number of a pod
CONTAINER = HOSTS = "node"  # name of a JobSet's Job and of its container, which Kubeflow Trainer and its tools expect
TRAINER = "trainer.kubeflow.org"
RUNS, TOKEN, SCRIPTS = "/mnt/run", "/mnt/paceline", "/mnt/script"  # paths in the container
PATHS = {"run": RUNS, "token": TOKEN, "memory": "/dev/shm", "script": SCRIPTS}  # by the name of the volume
USER = 1000
GRACE = 120  # seconds for a checkpoint, the same as before a time limit of Slurm
KEPT = 86_400  # seconds that an ended Job is kept if no launcher follows it
# Exit codes after which Kubernetes restarts a pod: stopped with a checkpoint, killed by SIGKILL or SIGTERM, and on a
# node that is left out.
PASSING = (STOPPED, 137, 143, LEFT_OUT)
AVOIDED = "paceline/left-out"  # label of the pods that keep the run's further pods away from a node
PLACEHOLDER = "..."  # printed instead of a value of the Secret
Manifest = dict[str, Any]


@dataclass(frozen=True)
class PodJob:
    """A run as a Job of `hosts` pods of `image`. Each pod runs `command` (its first word is a program of the image) in
    the folder `cwd`, after the shell lines of `setup`. `script` is a local file that is sent along; `values` are
    environment variables for the workers; `again` is the command that continues the run. The run folder is on the
    volume of `claim`, if that is given. `resources` are those of a container. `shape`: a plain Job, or the Job of a
    JobSet or of a TrainJob. `options` are what the user adds to the Job and its pods. `excludes`: nodes that fail are
    left out.
    """

    name: str
    namespace: str | None
    image: str
    hosts: int
    command: Sequence[str]
    token: str = field(repr=False)
    values: Mapping[str, str] = field(default_factory=dict, repr=False)
    script: Path | None = None
    cwd: str | None = None
    setup: str = ""
    claim: str | None = None
    resources: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    restarts: int = 10
    again: str = ""
    shape: str = "job"
    options: PodOptions = field(default_factory=PodOptions)
    excludes: bool = False

    @property
    def job(self) -> str:
        """The name of the Job, which begins the names of its pods. A JobSet forms it from its own name and a number."""
        return self.name if self.shape == "job" else f"{self.name}-{HOSTS}-0"


def run_name(stem: str) -> str:
    """A new name for all objects of a run: a label of DNS (RFC 1035), short enough for suffixes such as `-0`."""
    text = re.sub("[^a-z0-9]+", "-", stem.lower()).strip("-")[:30].strip("-")
    text = text if text[:1].isalpha() else f"run-{text}".strip("-")
    return f"{text}-{''.join(secrets.choice('bcdfghjklmnpqrstvwxz2456789') for _ in range(5))}"


def manifests(job: PodJob, shown: bool = False) -> list[Manifest]:
    """All manifests of a run; the last one owns the others. `shown`: the Secret's values are left out."""
    supporting = [_secret(job, shown), *([] if job.script is None else [_script(job, job.script)]), _service(job)]
    shapes = {
        "job": lambda: [_job(job)],
        "jobset": lambda: [_set(job)],
        "trainjob": lambda: [_runtime(job), _train(job)],
    }
    made = [*supporting, _policy(job), *shapes[job.shape]()]
    _mark(made[-1], job.options)
    return made


def _mark(owner: Manifest, options: PodOptions) -> None:
    """Gives the object that owns the others the user's labels and annotations, and lets it wait for its queue."""
    owner["metadata"]["labels"] |= {**options.labels, **options.owner_labels}
    if options.annotations:
        owner["metadata"]["annotations"] = dict(options.annotations)
    if options.waits_for:
        owner["spec"]["suspend"] = True


def literal(text: str) -> str:
    """Escapes a word, so that Kubernetes does not replace ``$(NAME)`` in it."""
    return text.replace("$", "$$")


def _thing(job: PodJob, kind: str, version: str = "v1", **more: Any) -> Manifest:
    about = {"name": job.name, "labels": {LABEL: job.name, "app.kubernetes.io/managed-by": "paceline"}}
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": about | ({"namespace": job.namespace} if job.namespace else {}),
        **more,
    }


def _secret(job: PodJob, shown: bool) -> Manifest:
    held = {"token": job.token, **{_key(name): value for name, value in job.values.items()}}
    return _thing(job, "Secret", type="Opaque", stringData=dict.fromkeys(held, PLACEHOLDER) if shown else held)


def _key(name: str) -> str:
    return f"env.{name}"  # a variable may be called token


def _script(job: PodJob, path: Path) -> Manifest:
    data = read_file(path)
    try:
        return _thing(job, "ConfigMap", data={"script": data.decode()})
    except UnicodeDecodeError:
        return _thing(job, "ConfigMap", binaryData={"script": base64.b64encode(data).decode()})


def _service(job: PodJob) -> Manifest:
    """The Service that gives the first pod its DNS name, even before it is ready: the other pods wait for it."""
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {LABEL: job.name}}
    return _thing(job, "Service", spec={**spec, "ports": [{"name": "coordinator", "port": PORT}]})


def _policy(job: PodJob) -> Manifest:
    """The NetworkPolicy: only the run's own pods reach its pods. Outgoing connections (data, checkpoints, DNS) are
    free.
    """
    run_pods = {"podSelector": {"matchLabels": {LABEL: job.name}}}
    spec = {**run_pods, "policyTypes": ["Ingress"], "ingress": [{"from": [run_pods]}]}
    return _thing(job, "NetworkPolicy", "networking.k8s.io/v1", spec=spec)


def _job(job: PodJob) -> Manifest:
    """The Job. Kubernetes replaces a lost pod; this counts as a failure only if the pod was killed for no reason that
    Kubernetes knows. A failed run is not started again. The Job is complete when its first host ends with 0.
    """
    rules: list[Manifest] = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {
            "action": "Ignore",
            "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [STOPPED, LEFT_OUT]},
        },
        {
            "action": "FailJob",
            "onExitCodes": {"containerName": CONTAINER, "operator": "NotIn", "values": sorted(PASSING)},
        },
    ]
    spec = {
        "completionMode": "Indexed",
        "completions": job.hosts,
        "parallelism": job.hosts,
        "backoffLimit": job.restarts,
        "podFailurePolicy": {"rules": rules},
        "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
        "ttlSecondsAfterFinished": KEPT,
    }
    about: Manifest = {"labels": {LABEL: job.name, "app.kubernetes.io/managed-by": "paceline", **job.options.labels}}
    about |= {"annotations": dict(job.options.annotations)} if job.options.annotations else {}
    return _thing(job, "Job", "batch/v1", spec={**spec, "template": {"metadata": about, "spec": _pod(job)}})


def _set(job: PodJob) -> Manifest:
    """A JobSet of this one Job, which fails with the Job. Our own Service provides the DNS names."""
    return _thing(job, "JobSet", "jobset.x-k8s.io/v1alpha2", spec={**_jobs(job), "ttlSecondsAfterFinished": KEPT})


def _jobs(job: PodJob, **labels: str) -> Manifest:
    """The spec of a JobSet that holds the Job with additional labels."""
    inner = _job(job)
    del inner["spec"]["ttlSecondsAfterFinished"]  # another one would be made
    template = {"metadata": {"labels": {**inner["metadata"]["labels"], **labels}}, "spec": inner["spec"]}
    jobs = [{"name": HOSTS, "replicas": 1, "template": template}]
    return {"replicatedJobs": jobs, "network": {"enableDNSHostnames": False}}


def _runtime(job: PodJob) -> Manifest:
    """The TrainingRuntime to which a TrainJob refers, and which must exist before it: Kubeflow Trainer makes the JobSet
    from it. A runtime of the cluster would not do: a TrainJob cannot add failure rules, a Service or a completion mode.
    """
    jobs = _jobs(job, **{f"{TRAINER}/trainjob-ancestor-step": "trainer"})
    spec = {"mlPolicy": {"numNodes": job.hosts}, "template": {"spec": jobs}}
    made = _thing(job, "TrainingRuntime", f"{TRAINER}/v1alpha1", spec=spec)
    made["metadata"]["labels"][f"{TRAINER}/framework"] = "torch"  # without it Kubeflow's SDK does not see it
    return made


def _train(job: PodJob) -> Manifest:
    """The TrainJob. It stays after its end until somebody deletes it, as TrainJobs do."""
    runtime = {"apiGroup": TRAINER, "kind": "TrainingRuntime", "name": job.name}
    return _thing(job, "TrainJob", f"{TRAINER}/v1alpha1", spec={"runtimeRef": runtime})


def _pod(job: PodJob) -> Manifest:
    claim: Manifest = {"persistentVolumeClaim": {"claimName": job.claim}} if job.claim else {"emptyDir": {}}
    token = {"secretName": job.name, "defaultMode": 0o400, "items": [{"key": "token", "path": "token"}]}
    volumes = [
        {"name": "run", **claim},
        {"name": "token", "secret": token},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},  # as large as the memory of the pod; the default is 64 MB
    ]
    if job.script is not None:
        items = [{"key": "script", "path": job.script.name}]
        volumes.append({"name": "script", "configMap": {"name": job.name, "items": items}})
    apart = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
    user = {"runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER}
    avoided = {"labelSelector": {"matchLabels": {AVOIDED: job.name}}, "topologyKey": "kubernetes.io/hostname"}
    affinity = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [avoided]}}
    return {
        **({"affinity": affinity} if job.excludes else {}),
        "restartPolicy": "Never",
        "subdomain": job.name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": GRACE,
        "topologySpreadConstraints": [{**apart, "labelSelector": {"matchLabels": {LABEL: job.name}}}],
        "securityContext": {
            **user,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(job)],
        "volumes": [*volumes, *map(dict, job.options.volumes)],
        **job.options.spec,
    }


def placeholder(job: PodJob, node: str, number: int, owner: Manifest) -> Manifest:
    """A pod that does nothing on a node that is left out. A Job's pods cannot be changed once it has begun, but all of
    the run avoid nodes with such a pod. Kubernetes deletes it with its `owner`, the Job.
    """
    made = _thing(job, "Pod")
    about = {"name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"]}
    made["metadata"] |= {
        "name": f"{job.name}-left-out-{number}",
        "labels": {AVOIDED: job.name, "app.kubernetes.io/managed-by": "paceline"},
        "ownerReferences": [{"apiVersion": "batch/v1", "kind": "Job", **about}],
    }
    restricted = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    container = {
        "name": "left-out",
        "image": job.image,
        "command": ["sleep", "infinity"],
        "securityContext": restricted,
    }
    profile = {"runAsNonRoot": True, "runAsUser": USER, "seccompProfile": {"type": "RuntimeDefault"}}
    made["spec"] = {
        "nodeName": node,
        "containers": [container],
        "tolerations": [{"operator": "Exists"}],
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 0,
        "securityContext": profile,
        **{name: value for name, value in job.options.spec.items() if name == "imagePullSecrets"},
    }
    return made


def _container(job: PodJob) -> Manifest:
    mounts = [
        {"name": name, "mountPath": path, **({"readOnly": True} if name in ("token", "script") else {})}
        for name, path in PATHS.items()
        if name != "script" or job.script is not None
    ]
    before = ["sh", "-c", f'{job.setup}\nexec "$@"', "sh"] if job.setup else []
    first = f"{job.job}-0.{job.name}"
    return {
        "name": CONTAINER,
        "image": job.image,
        "command": [literal(word) for word in (*before, *job.command)],
        "workingDir": job.cwd or RUNS,  # keeps the files that a script writes into its working folder
        "env": [
            {"name": "PACELINE_FIRST", "value": first},
            {"name": "PACELINE_ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "PACELINE_HOST", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
            {"name": "PACELINE_AGAIN", "value": literal(job.again)},
            *(
                {"name": name, "valueFrom": {"secretKeyRef": {"name": job.name, "key": _key(name)}}}
                for name in job.values
            ),
        ],
        "resources": {kind: dict(amounts) for kind, amounts in job.resources.items()},
        "volumeMounts": [*mounts, *map(dict, job.options.mounts)],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
