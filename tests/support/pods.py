"""A Kubernetes on this machine: a real API server, controller manager and scheduler, and stand-ins for kubelets.

A stand-in runs a pod's one container as a process of its own user, hostname, /etc/hosts and mounts, as its manifest
says, serves its log, and tells the API server what becomes of it. The one that `.ci/kubernetes` builds is 1.20, which
drops the newer fields of a Job without a word: `completionMode` (so the stand-in numbers the pods, the lowest free
number first, once who had it is gone), `podFailurePolicy`, `successPolicy`, `suspend`: for `kubernetes-validate`.
"""

from __future__ import annotations

import base64
import json
import os
import re
import secrets
import signal
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import parse_qs, urlparse

import psutil
from agents import until
from certificates import self_signed
from launching import free_port

from paceline.launch.engines.manifests import CONTAINER, INDEX, LABEL

SERVERS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "etcd", "kubectl")
IMAGE = "here"  # the one image there is: this interpreter
LOOK = 0.2
Thing = dict[str, Any]
CONFIG = """
apiVersion: v1
kind: Config
clusters: [{{name: c, cluster: {{server: "https://127.0.0.1:{port}", insecure-skip-tls-verify: true}}}}]
users: [{{name: u, user: {{token: admin-token}}}}]
contexts: [{{name: x, context: {{cluster: c, user: u}}}}]
current-context: x
"""
INSIDE = """
set -e
mount -t tmpfs tmpfs /mnt
while read -r from to; do mkdir -p "$to"; mount --bind "$from" "$to"; done < "$1"
mount --bind "$2" /etc/hosts
hostname "$3"
cd "$4"
shift 4
may=-all,+dac_read_search  # the interpreter may lie in a folder of root's
exec setpriv --reuid 1000 --regid 1000 --groups 1000 --inh-caps=$may --ambient-caps=$may --bounding-set=$may \
    --no-new-privs "$@"
"""


def expanded(text: str, values: dict[str, str]) -> str:
    """``$(NAME)`` as the kubelet replaces it, and ``$$`` as it escapes it."""
    return re.sub(
        r"\$(\$|\(([-._a-zA-Z0-9]+)\))",
        lambda found: "$" if found[1] == "$" else values.get(found[2], found[0]),
        text,
    )


@dataclass
class Container:
    """A pod's, on this machine."""

    name: str
    number: int
    process: subprocess.Popen[bytes]
    log: Path
    asked: float = 0.0  # when it was told to end

    @property
    def code(self) -> int | None:
        status = self.process.poll()
        return status if status is None or status >= 0 else 128 - status


class Cluster:
    """Two nodes. `kubectl` has what a launcher needs as ``--engine``."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self.logs_port = folder, free_port(), free_port()
        self.kubeconfig = folder / "kubeconfig"
        self.containers: dict[str, Container] = {}  # by uid
        self._context, self._over, self._addresses = ssl._create_unverified_context(), threading.Event(), 0
        self._processes: list[subprocess.Popen[bytes]] = []
        self._threads: list[threading.Thread] = []
        self._network = f"127.{1 + secrets.randbelow(250)}.{secrets.randbelow(250)}"  # there may be others
        self._hosts = folder / "hosts"
        self._hosts.write_text("127.0.0.1 localhost\n")
        self._start()

    # ---- the real part

    def _start(self) -> None:
        key = self.folder / "sa.key"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        self_signed(self.folder, "node", "node.key", "node.crt")
        (self.folder / "tokens.csv").write_text('admin-token,admin,1,"system:masters"\n')
        self.kubeconfig.write_text(CONFIG.format(port=self.port))
        etcd, peers = free_port(), free_port()
        urls = f"--advertise-client-urls=http://127.0.0.1:{etcd} --initial-advertise-peer-urls=http://127.0.0.1:{peers}"
        urls += f" --listen-client-urls=http://127.0.0.1:{etcd} --listen-peer-urls=http://127.0.0.1:{peers}"
        self._run("etcd", *urls.split(), "--data-dir=etcd", f"--initial-cluster=default=http://127.0.0.1:{peers}")
        self._run(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{etcd}",
            f"--secure-port={self.port}",
            "--bind-address=127.0.0.1",
            "--advertise-address=192.0.2.2",
            "--cert-dir=certs",
            "--service-account-issuer=https://kubernetes.default",
            f"--service-account-signing-key-file={key}",
            f"--service-account-key-file={key}",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--token-auth-file=tokens.csv",
            "--disable-admission-plugins=ServiceAccount",
            "--kubelet-preferred-address-types=InternalIP",
        )
        until(lambda: self.ask("GET", "/readyz", ok=(URLError, HTTPError, OSError)) is not None, 200)
        own = [f"--kubeconfig={self.kubeconfig}", "--leader-elect=false", "--port=0", "--bind-address=127.0.0.1"]
        own += ["--cert-dir=certs"]
        controllers = ["--controllers=*,-nodeipam", f"--service-account-private-key-file={key}"]
        self._run("kube-controller-manager", *own, *controllers, f"--secure-port={free_port()}")
        self._run("kube-scheduler", *own, f"--secure-port={free_port()}")
        for name in ("k1", "k2"):
            self.ask("POST", "/api/v1/nodes", {"metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}}})
        self._serve_logs()
        for what in (self._beat, self._look):
            self._threads.append(threading.Thread(target=what, daemon=True))
            self._threads[-1].start()
        account = "/api/v1/namespaces/default"
        until(lambda: self.ask("GET", account, ok=(HTTPError,)) is not None, 100)

    def _run(self, name: str, *words: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen([name, *words], cwd=self.folder, stdout=log, stderr=log)
        self._processes.append(process)

    def ask(self, method: str, path: str, said: Any = None, ok: tuple[type[Exception], ...] = ()) -> Any:
        """The API server's answer; None for errors that are `ok`."""
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        request = urllib.request.Request(
            f"https://127.0.0.1:{self.port}{path}",
            None if said is None else json.dumps(said).encode(),
            {"Authorization": "Bearer admin-token", "Content-Type": kind},
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=30, context=self._context) as answer:
                data = answer.read()
        except ok:
            return None
        return json.loads(data) if data[:1] in (b"{", b"[") else data.decode()

    def claim(self, name: str, folder: Path) -> None:
        """A volume that all nodes see, in a folder, and a claim that has it."""
        size = {"storage": "1Gi"}
        spec: Thing = {"capacity": size, "accessModes": ["ReadWriteMany"], "hostPath": {"path": str(folder)}}
        self.ask("POST", "/api/v1/persistentvolumes", {"metadata": {"name": name}, "spec": spec})
        spec = {"accessModes": ["ReadWriteMany"], "storageClassName": "", "volumeName": name}
        claims = "/api/v1/namespaces/default/persistentvolumeclaims"
        self.ask("POST", claims, {"metadata": {"name": name}, "spec": {**spec, "resources": {"requests": size}}})
        until(lambda: self.ask("GET", f"{claims}/{name}")["status"].get("phase") == "Bound", 100)

    def things(self) -> list[str]:
        """All that runs have made here."""
        core, selector = "/api/v1/namespaces/default", f"?labelSelector={LABEL}"
        paths = [f"{core}/{kind}" for kind in ("pods", "secrets", "services", "configmaps")]
        paths += [
            "/apis/batch/v1/namespaces/default/jobs",
            "/apis/networking.k8s.io/v1/namespaces/default/networkpolicies",
        ]
        found = [(path, item) for path in paths for item in self.ask("GET", path + selector)["items"]]
        return [f"{path.rpartition('/')[2]}/{item['metadata']['name']}" for path, item in found]

    # ---- the stand-ins

    def pod(self, number: int) -> Container | None:
        """The living one of a host."""
        found = [one for one in self.containers.values() if one.number == number and one.code is None]
        return found[0] if found else None

    def _beat(self) -> None:
        """Both nodes are there."""
        while not self._over.wait(2.0):
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            room = {"cpu": "2", "memory": "8Gi", "pods": "20"}
            ready = {"type": "Ready", "status": "True", "reason": "StandIn", "message": ""}
            status = {
                "capacity": room,
                "allocatable": room,
                "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
                "daemonEndpoints": {"kubeletEndpoint": {"Port": self.logs_port}},
                "conditions": [{**ready, "lastHeartbeatTime": now, "lastTransitionTime": now}],
            }
            for name in ("k1", "k2"):
                self.ask("PATCH", f"/api/v1/nodes/{name}/status", {"status": status}, ok=(OSError,))

    def _look(self) -> None:
        while not self._over.wait(LOOK):
            found = self.ask("GET", f"/api/v1/pods?labelSelector={LABEL}", ok=(OSError,))
            for pod in sorted((found or {"items": []})["items"], key=lambda one: str(one["metadata"]["name"])):
                with suppress(HTTPError):  # it is gone, or was changed meanwhile: there is a next look
                    self._tend(pod, found["items"])

    def _tend(self, pod: Thing, others: list[Thing]) -> None:
        about, uid = pod["metadata"], pod["metadata"]["uid"]
        path = f"/api/v1/namespaces/{about['namespace']}/pods/{about['name']}"
        mine = self.containers.get(uid)
        if INDEX not in about.get("annotations", {}):
            job = f"/apis/batch/v1/namespaces/{about['namespace']}/jobs/{about['ownerReferences'][0]['name']}"
            alike = [one for one in others if one["status"]["phase"] != "Failed"]
            held = {one["metadata"].get("annotations", {}).get(INDEX) for one in alike}
            free = [number for number in range(self.ask("GET", job)["spec"]["parallelism"]) if str(number) not in held]
            if not free:  # that in whose place it is still ends
                return
            about.setdefault("annotations", {})[INDEX] = str(free[0])
            self.ask("PATCH", path, {"metadata": {"annotations": {INDEX: str(free[0])}}})
        if mine is not None and mine.code is not None and pod["status"]["phase"] == "Running":
            self._tell(path, pod, "Succeeded" if mine.code == 0 else "Failed", {"terminated": {"exitCode": mine.code}})
        if about.get("deletionTimestamp"):
            if mine is not None and mine.code is None:
                grace = about["deletionGracePeriodSeconds"]
                if not mine.asked:
                    mine.asked = time.monotonic()
                    mine.process.send_signal(signal.SIGTERM)
                elif time.monotonic() > mine.asked + grace:
                    mine.process.kill()
            else:
                self.ask("DELETE", path, {"gracePeriodSeconds": 0})
        elif mine is None and pod["status"]["phase"] == "Pending" and pod["spec"].get("nodeName"):
            container = pod["spec"]["containers"][0]
            if container["image"] != IMAGE:
                why = {"reason": "ImagePullBackOff", "message": f'Back-off pulling image "{container["image"]}"'}
                self._tell(path, pod, "Pending", {"waiting": why})
                return
            self._begin(pod, container)
            self._tell(path, pod, "Running", {"running": {}})

    def _tell(self, path: str, pod: Thing, phase: str, state: Thing) -> None:
        name = pod["spec"]["containers"][0]["name"]
        status = {"name": name, "image": IMAGE, "imageID": "", "ready": phase == "Running", "restartCount": 0}
        more = {"podIP": pod["address"], "hostIP": "127.0.0.1"} if "address" in pod else {}
        self.ask(
            "PATCH",
            f"{path}/status",
            {"status": {"phase": phase, **more, "containerStatuses": [{**status, "state": state}]}},
        )

    def _begin(self, pod: Thing, container: Thing) -> None:
        """HTTPError: what it needs is not there yet."""
        about, spec = pod["metadata"], pod["spec"]
        core, number = f"/api/v1/namespaces/{about['namespace']}", int(about["annotations"][INDEX])
        folder = self.folder / "pods" / about["uid"]
        folder.mkdir(parents=True, exist_ok=True)
        volumes = {volume["name"]: self._volume(core, volume, folder / volume["name"]) for volume in spec["volumes"]}
        mounts = folder / "mounts"
        mounts.write_text("".join(f"{volumes[m['name']]} {m['mountPath']}\n" for m in container["volumeMounts"]))
        self._addresses += 1
        pod["address"] = f"{self._network}.{self._addresses}"
        job = next(owner["name"] for owner in about["ownerReferences"])
        name = f"{job}-{number}"
        values = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": "/tmp", "HOSTNAME": name}
        for one in container["env"]:
            values[one["name"]] = self._value(core, one, pod, values)
        values["JOB_COMPLETION_INDEX"] = str(number)
        lines = [line for line in self._hosts.read_text().splitlines() if f" {name} " not in line]
        self._hosts.write_text("\n".join([*lines, f"{pod['address']} {name}.{spec['subdomain']} {name} ", ""]))
        words = ["unshare", "--mount", "--uts", "sh", "-c", INSIDE, "sh", mounts, self._hosts, name]
        command = [expanded(word, values) for word in container["command"]]
        log = folder / "log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*words, container.get("workingDir", "/"), *command],
                env=values,
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
            )
        self.containers[about["uid"]] = Container(about["name"], number, process, log)

    def _volume(self, core: str, volume: Thing, folder: Path) -> Path:
        """Its folder here, with the modes and groups that a kubelet gives."""
        if "persistentVolumeClaim" in volume:
            claim = self.ask("GET", f"{core}/persistentvolumeclaims/{volume['persistentVolumeClaim']['claimName']}")
            bound = self.ask("GET", f"/api/v1/persistentvolumes/{claim['spec']['volumeName']}")
            return Path(bound["spec"]["hostPath"]["path"])
        folder.mkdir(exist_ok=True)
        if "emptyDir" in volume:
            folder.chmod(0o777)
            return folder
        kind, name = ("secrets", "secret") if "secret" in volume else ("configmaps", "configMap")
        about = volume[name]
        data = self.ask("GET", f"{core}/{kind}/{about.get('secretName') or about['name']}")["data"]
        for item in about["items"]:
            file = folder / item["path"]
            file.write_bytes(base64.b64decode(data[item["key"]]) if name == "secret" else data[item["key"]].encode())
            os.chown(file, 0, 1000)  # fsGroup, whose members may read it, whatever the mode is
            file.chmod(about.get("defaultMode", 0o644) | 0o440)
        return folder

    def _value(self, core: str, one: Thing, pod: Thing, before: dict[str, str]) -> str:
        source = one.get("valueFrom", {})
        if "secretKeyRef" in source:
            data = self.ask("GET", f"{core}/secrets/{source['secretKeyRef']['name']}")["data"]
            return base64.b64decode(data[source["secretKeyRef"]["key"]]).decode()
        if "fieldRef" in source:
            paths = {"status.podIP": pod.get("address"), "spec.nodeName": pod["spec"]["nodeName"]}
            return str(paths[source["fieldRef"]["fieldPath"]])
        return expanded(one.get("value", ""), before)

    def _serve_logs(self) -> None:
        cluster = self

        class Logs(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked = urlparse(self.path)
                _, _, _, name, container = asked.path.split("/")
                assert container == CONTAINER
                query = parse_qs(asked.query)
                pod = next(one for one in cluster.containers.values() if one.name == name)
                self.send_response(200)
                self.end_headers()
                with pod.log.open("rb") as log:
                    if tail := query.get("tailLines"):
                        self.wfile.write(b"".join(log.readlines()[-int(tail[0]) :]))
                    ended = False
                    with suppress(OSError):  # nobody listens any more
                        while not ended:
                            ended = pod.code is not None or "follow" not in query
                            self.wfile.write(log.read())
                            self.wfile.flush()
                            time.sleep(LOOK / 4)

            def log_message(self, *_: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", self.logs_port), Logs)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.folder / "node.crt", self.folder / "node.key")
        server.socket = context.wrap_socket(server.socket, server_side=True)
        server.daemon_threads = True
        self._server = server
        self._threads.append(threading.Thread(target=server.serve_forever, daemon=True))
        self._threads[-1].start()

    def close(self) -> None:
        self._over.set()
        if hasattr(self, "_server"):
            self._server.shutdown()
            self._server.server_close()
        for thread in self._threads:
            thread.join(60)
        for one in self.containers.values():
            with suppress(psutil.NoSuchProcess):
                for process in (*psutil.Process(one.process.pid).children(True), one.process):
                    process.kill()
            one.process.wait()
        for process in reversed(self._processes):
            process.terminate()
            process.wait(60)
