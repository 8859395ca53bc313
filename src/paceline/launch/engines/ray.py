"""`paceline launch ray`: one agent on each of several nodes of a Ray cluster. No torch.

Ray itself is in a process of its own, `ray_driver`, which keeps a placement group and in each of its bundles an actor
that runs `sh`. The command that becomes that `sh` is this module: it hands its standard streams over, and waits.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from paceline.errors import LaunchError, UsageError, shown
from paceline.launch.engines.engine import End, Engine, Host
from paceline.observe.figures import plural
from paceline.world import variable

LOST = 255
SAID = "ray: "  # begins the driver's own last word on a host
SEVERAL = 8  # nodes that are named, where not all of them have room
REACH = 5.0  # seconds for a cluster to take a connection
Resources = dict[str, float]


class Ray(Engine):
    """A placement group of `asked` (see `ask`), one bundle a host; waits until Ray has placed it. LaunchError: it
    cannot, or not in time.
    """

    name = "ray"

    def __init__(self, asked: Mapping[str, Any]) -> None:
        driver = [sys.executable, "-m", "paceline.launch.engines.ray_driver", json.dumps(asked)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._driver = subprocess.Popen(driver, **pipes, start_new_session=True)  # type: ignore[call-overload]
        with ExitStack() as stack:
            stack.callback(self.close)
            placed = self._placed()
            stack.pop_all()
        names = [name for name, _ in asked["hosts"]] or [f"bundle-{number}" for number in range(len(placed))]
        counts = [count for _, count in asked["hosts"]] or [None] * len(placed)
        super().__init__([Host(name, count) for name, count in zip(names, counts, strict=True)])
        where = ", ".join(f"{name} on {at}" for name, at in zip(names, placed, strict=True) if name != at)
        if where:
            print(f"Ray has placed {where}", file=sys.stderr, flush=True)
        self.listen = placed[0]  # where the others reach the first one

    def _placed(self) -> list[str]:
        assert self._driver.stdout is not None
        for line in self._driver.stdout:
            said = json.loads(line)
            if "waits" in said:
                print(f"waiting for Ray: {said['waits']}", file=sys.stderr, flush=True)
            elif "what" in said:
                raise LaunchError(said["what"], said["cure"])
            else:
                self._door = said["door"]
                return list(said["placed"])
        raise LaunchError(f"Ray's driver ended with exit code {self._driver.wait()}", "see what it says above")

    def command(self, place: Host) -> list[str]:
        number = [other.name for other in self.places].index(place.name)
        return [sys.executable, "-m", "paceline.launch.engines.ray", self._door, str(number)]

    def end(self, place: Host, code: int, said: str) -> End | None:
        if code != LOST or not said.startswith(SAID):
            return None
        text = said.removeprefix(SAID)
        return End("preempted" if "preempted" in text else "lost", text)

    def close(self) -> None:
        """The driver hears that nobody is here any more, and with it go actors and the placement group."""
        with self._driver:
            self._driver.stdin.close()


def ask(given: Mapping[str, Any], hosts: Sequence[Host]) -> dict[str, Any]:
    """What the driver is to bring about. `hosts` are nodes by their addresses, none where Ray is to choose. UsageError:
    it cannot be asked for.
    """
    address = given["address"] or variable("RAY_ADDRESS") or "auto"
    if address.startswith("ray://"):
        cure = "run this on a node of the cluster, as by `ray job submit -- paceline launch ray ...`"
        raise UsageError(f"{shown(address)} is for Ray's client", cure)
    if hosts and given["nodes"] is not None:
        raise UsageError("--hosts says how many nodes there are", "leave --nodes out, or let Ray choose: no --hosts")
    found = re.fullmatch(r"([^:/]+):([0-9]{1,5})", address)
    if address != "auto" and (found is None or int(found[2]) > 65535):
        raise UsageError(f"--address {shown(address)} is no address", "give HOST:PORT, as 10.0.0.7:6379")
    return {
        "address": address,
        "nodes": given["nodes"],
        "hosts": [(host.name, host.workers or given["workers_per_host"]) for host in hosts],
        "workers": given["workers_per_host"],
        "resources": parse_resources(given["engine"]),
        "wait": given["wait"],
    }


def parse_resources(text: str) -> Resources:
    """``CPU=8 GPU=4``: what one host asks Ray for."""
    found = {}
    for word in text.split():
        name, _, number = word.partition("=")
        if not name or not re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,4})?", number):
            raise UsageError(f"--engine {shown(word)} is no resource of Ray's", "give some as --engine='CPU=8 GPU=4'")
        found[name] = float(number)
    return found


def bundles(asked: Mapping[str, Any], nodes: Sequence[Resources]) -> list[Resources]:
    """What to ask Ray for, one bundle a host: a CPU for each worker; and where some of the `nodes` have GPUs, one for
    each worker, or else as many as so many nodes have. How many, if that is not said: as there are nodes with all that.
    """
    gpus = sorted((node["GPU"] for node in nodes if node.get("GPU")), reverse=True)
    most = gpus[min(asked["nodes"] or len(asked["hosts"]) or len(gpus), len(gpus)) - 1] if gpus else 0.0
    found = []
    for name, workers in asked["hosts"] or [(None, asked["workers"])]:
        count = float(workers or most or 1)
        each = {"CPU": count, "GPU": count if gpus else 0.0, **asked["resources"]}
        each = {resource: amount for resource, amount in each.items() if amount}
        found.append(each if name is None else {**each, f"node:{name}": 0.001})
    if asked["hosts"]:
        return found
    fit = sum(all(node.get(name, 0.0) >= amount for name, amount in found[0].items()) for node in nodes)
    return found * (asked["nodes"] or max(1, fit))


def pending(wanted: Sequence[Resources], nodes: Mapping[str, tuple[Resources, Resources]]) -> str:
    """Why bundles have no place yet. `nodes` are those alive: by a name what each has free, and in all."""
    for bundle in wanted:
        for name in bundle:
            if name.startswith("node:") and not any(name in total for _, total in nodes.values()):
                return f"{name.removeprefix('node:')} is no node that is alive"
    each = {name: most for name, most in wanted[0].items() if not name.startswith("node:")}
    lacks = {}
    for node, (free, total) in nodes.items():
        short = [name for name, most in each.items() if free.get(name, 0.0) < most]
        lacks[node] = " and ".join(f"{free.get(name, 0.0):g} of {total.get(name, 0.0):g} {name} free" for name in short)
    ready = sum(not lack for lack in lacks.values())
    what = " and ".join(f"{most:g} {name}" for name, most in each.items())
    text = f"{plural(len(wanted), 'node')} with {what} each {'is' if len(wanted) == 1 else 'are'} wanted"
    named = [f"{node} has {lack}" for node, lack in lacks.items() if lack][:SEVERAL]
    return ": ".join([f"{text}, and of {len(nodes)} alive {ready} can give that", *filter(None, ["; ".join(named)])])


def reach(address: str) -> None:
    """OSError: nothing listens there. Ray itself would wait for more than a minute."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), REACH).close()


def _hand_over(door: str, number: str) -> int:
    """Gives our standard streams to the driver; the exit code of what had them."""
    with socket.socket(socket.AF_UNIX) as driver, suppress(OSError):
        driver.connect(f"\0{door}")
        socket.send_fds(driver, [number.encode()], [0, 1, 2])
        if code := driver.recv(16):
            return int(code)
    print(f"{SAID}its driver has ended", file=sys.stderr, flush=True)
    return LOST


if __name__ == "__main__":
    sys.exit(_hand_over(*sys.argv[1:]))
