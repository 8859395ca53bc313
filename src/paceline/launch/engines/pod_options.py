"""Options of `paceline launch kubernetes` for its objects and pods: labels, queues, nodes, volumes, priority."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from paceline.base.console import shown
from paceline.errors import UsageError

_NAME = "[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"  # of a label, without its prefix; and its value
_DOMAIN = "[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"  # the prefix of a label; and the name of an object
_KEY = f"({_DOMAIN}/)?{_NAME}"
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_QUANTITY = "[0-9]+([.][0-9]+)?([kMGTPE]|[KMGTPE]i)?"
_KINDS: dict[str, Callable[[str, Mapping[str, bool]], dict[str, Any]]] = {
    "pvc": lambda source, read_only: {"persistentVolumeClaim": {"claimName": source, **read_only}},
    "hostPath": lambda source, _: {"hostPath": {"path": source}},
    "emptyDir": lambda source, _: {"emptyDir": {"sizeLimit": source} if source else {}},
    "secret": lambda source, _: {"secret": {"secretName": source}},
    "configMap": lambda source, _: {"configMap": {"name": source}},
}
_RESERVED = ("paceline/", "app.kubernetes.io/managed-by", "batch.kubernetes.io/", "trainer.kubeflow.org/")
KUEUE = "kueue.x-k8s.io/queue-name"


@dataclass(frozen=True)
class PodOptions:
    """What users add to the manifests of a run.

    - `labels`, `annotations`: of the Job (JobSet, TrainJob) and its pods; `owner_labels`: of the Job alone.
    - `waits_for`: the queue that lets the suspended Job begin, or an empty text.
    - `spec`: fields of the pods' spec; `volumes`, `mounts`: those besides the volumes of the run.
    """

    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    owner_labels: Mapping[str, str] = field(default_factory=dict)
    waits_for: str = ""
    spec: Mapping[str, Any] = field(default_factory=dict)
    volumes: Sequence[Mapping[str, Any]] = ()
    mounts: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def parse(cls, given: Mapping[str, Any], taken: Sequence[str]) -> PodOptions:
        """Reads the options; `taken` are paths of volumes that every run has. UsageError: an option is wrong."""
        labels = _pairs("--label", given["labels"], f"({_NAME})?")
        annotations = _pairs("--annotation", given["annotations"], None)
        queue, name = _queue(given["queue"])
        owner_labels = {KUEUE: name} if queue == "kueue" else {}
        labels |= {"kai.scheduler/queue": name} if queue == "kai" else {}
        annotations |= {"scheduling.volcano.sh/queue-name": name} if queue == "volcano" else {}
        spec: dict[str, Any] = {}
        if scheduler := {"volcano": "volcano", "kai": "kai-scheduler"}.get(queue):
            spec["schedulerName"] = scheduler
        if given["node_selector"]:
            spec["nodeSelector"] = _pairs("--node-selector", given["node_selector"], f"({_NAME})?")
        if given["tolerations"]:
            spec["tolerations"] = [_toleration(text) for text in given["tolerations"]]
        if given["pull_secrets"]:
            spec["imagePullSecrets"] = [{"name": _object("--pull-secret", text)} for text in given["pull_secrets"]]
        if given["priority_class"]:
            spec["priorityClassName"] = _object("--priority-class", given["priority_class"])
        pairs = [_volume(number, text) for number, text in enumerate(given["volumes"])]
        paths = [*taken, *(mount["mountPath"] for _, mount in pairs)]
        for path in paths:
            if paths.count(path) > 1:
                raise UsageError(f"--volume: the path {path} is used twice", "use another path for one of the volumes")
        volumes, mounts = [volume for volume, _ in pairs], [mount for _, mount in pairs]
        return cls(labels, annotations, owner_labels, name if queue == "kueue" else "", spec, volumes, mounts)


def _pairs(option: str, texts: Sequence[str], value: str | None) -> dict[str, str]:
    """NAME=VALUE texts as a dict; `value` is the form of the values, if any is prescribed."""
    pairs: dict[str, str] = {}
    for text in texts:
        name, equals, held = text.partition("=")
        if not equals or not re.fullmatch(_KEY, name) or (value is not None and not re.fullmatch(value, held)):
            raise UsageError(
                f"{option} {shown(text)} is not NAME=VALUE in Kubernetes' form", "use one like team=vision"
            )
        if name.startswith(_RESERVED) and option != "--node-selector":
            raise UsageError(f"{option} {shown(name)} is set by Paceline or Kubernetes", "use another name")
        pairs[name] = held
    return pairs


def _object(option: str, text: str) -> str:
    if not re.fullmatch(_DOMAIN, text):
        raise UsageError(f"{option} {shown(text)} is not the name of a Kubernetes object", "use lower-case letters")
    return text


def _queue(text: str | None) -> tuple[str, str]:
    """The kind and the name of a queue, such as kueue:team-a; two empty texts without one."""
    if text is None:
        return "", ""
    kind, _, name = text.partition(":")
    if kind not in ("kueue", "volcano", "kai") or not re.fullmatch(_DOMAIN, name):
        raise UsageError(f"--queue {shown(text)} is not a queue", "use kueue:NAME, volcano:NAME or kai:NAME")
    return kind, name


def _toleration(text: str) -> dict[str, str]:
    """A toleration: KEY, KEY=VALUE, KEY:EFFECT or KEY=VALUE:EFFECT, as `kubectl taint` writes taints."""
    rest, colon, effect = text.partition(":")
    key, equals, value = rest.partition("=")
    is_right = re.fullmatch(_KEY, key) and re.fullmatch(f"({_NAME})?", value)
    if not is_right or (colon and effect not in _EFFECTS):
        cure = f"use KEY, KEY=VALUE, KEY:EFFECT or KEY=VALUE:EFFECT; effects are {', '.join(_EFFECTS)}"
        raise UsageError(f"--toleration {shown(text)} is not a toleration", cure)
    made = {"key": key, "operator": "Equal", "value": value} if equals else {"key": key, "operator": "Exists"}
    return {**made, **({"effect": effect} if effect else {})}


def _volume(number: int, text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A volume and its mount: KIND:SOURCE:PATH, and :ro for one that is only read."""
    kind, source, path, mode = [*text.split(":"), "", "", ""][:4]
    is_source = {"hostPath": source.startswith("/"), "emptyDir": not source or re.fullmatch(_QUANTITY, source)}
    is_right = kind in _KINDS and is_source.get(kind, re.fullmatch(_DOMAIN, source))
    is_path = path.startswith("/") and path != "/" and str(PurePosixPath(path)) == path and ".." not in path.split("/")
    if not is_right or not is_path or text.count(":") not in (2, 3) or mode not in ("", "ro"):
        cure = "use KIND:SOURCE:PATH[:ro], like pvc:data:/data:ro, hostPath:/scratch:/scratch, emptyDir:10Gi:/cache, "
        raise UsageError(f"--volume {shown(text)} is not a volume", f"{cure}secret:keys:/keys or configMap:c:/config")
    read_only = {"readOnly": True} if mode else {}
    name = f"volume-{number}"
    return {"name": name, **_KINDS[kind](source, read_only)}, {"name": name, "mountPath": path, **read_only}
