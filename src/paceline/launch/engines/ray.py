"""`paceline launch ray`: one agent on each of several Ray nodes.

Ray itself runs in a process of its own, `ray_driver`, which keeps a placement group with an actor that runs `sh` in
each of its bundles.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.base.console import shown
from paceline.base.environment import variable
from paceline.base.text import plural
from paceline.errors import UsageError
from paceline.launch.engines.driver_engine import DriverEngine, start_driver
from paceline.launch.engines.engine import Host

SEVERAL = 8  # nodes that are named at most, if some have too few free resources
Resources = dict[str, float]


class Ray(DriverEngine):
    """The bundles of a placement group, one per host, as `asked` describes it (see `driver_request`)."""

    name, title, host_prefix = "ray", "Ray", "bundle"

    def __init__(self, asked: Mapping[str, Any]) -> None:
        super().__init__([Host(name, count) for name, count in asked["hosts"]], *start_driver("ray_driver", asked))
        self._placed_hosts = len(self.hosts)

    def request_replacement(self, host: Host) -> Host:
        """Asks Ray for a bundle on another node. The driver waits for it when the command of the new host runs."""
        new = Host(f"further-{len(self.hosts) - self._placed_hosts + 1}", host.workers)
        self.hosts.append(new)
        return new


def driver_request(given: Mapping[str, Any], hosts: Sequence[Host]) -> dict[str, Any]:
    """The request to the driver. `hosts` are nodes by their addresses; if there are none, Ray chooses. UsageError: the
    options contradict each other, or one is wrong.
    """
    address = given["address"] or variable("RAY_ADDRESS") or "auto"
    if address.startswith("ray://"):
        cure = "run this on a node of the cluster, for example with `ray job submit -- paceline launch ray ...`"
        raise UsageError(f"{shown(address)} is an address of the Ray client, which is not supported", cure)
    if hosts and given["nodes"] is not None:
        raise UsageError("--nodes contradicts --hosts", "leave one out; without --hosts, Ray chooses the nodes")
    if spare := next((host.name for host in hosts if host.spare), None):
        raise UsageError(f"{shown(spare)}:spare: `launch ray` has no spare hosts", f"use {shown(spare)}")
    address_match = re.fullmatch(r"([^:/]+):([0-9]{1,5})", address)
    if address != "auto" and (address_match is None or int(address_match[2]) > 65535):
        raise UsageError(f"--address {shown(address)} is not an address", "use HOST:PORT, for example 10.0.0.7:6379")
    return {
        "address": address,
        "nodes": given["nodes"],
        "hosts": [(host.name, host.workers or given["workers_per_host"]) for host in hosts],
        "workers": given["workers_per_host"],
        "resources": parse_resources(given["engine"]),
        "wait": given["wait"],
    }


def parse_resources(text: str) -> Resources:
    """Reads ``CPU=8 GPU=4``, the resources that one host requests from Ray. UsageError: a word is not a resource."""
    resources = {}
    for word in text.split():
        name, _, number = word.partition("=")
        if not name or not re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,4})?", number):
            raise UsageError(f"--engine {shown(word)} is not a Ray resource", "use --engine='CPU=8 GPU=4', for example")
        resources[name] = float(number)
    return resources


def bundles(asked: Mapping[str, Any], nodes: Sequence[Resources]) -> list[Resources]:
    """The bundles to request from Ray, one per host: a CPU for each worker, and a GPU for each worker if some of the
    `nodes` have GPUs. Without a number of workers, a host takes as many GPUs as all of the chosen nodes have. Without a
    number of hosts, there are as many as nodes that can hold the bundle.
    """
    gpus = sorted((node["GPU"] for node in nodes if node.get("GPU")), reverse=True)
    most = gpus[min(asked["nodes"] or len(asked["hosts"]) or len(gpus), len(gpus)) - 1] if gpus else 0.0
    host_bundles = []
    for name, workers in asked["hosts"] or [(None, asked["workers"])]:
        count = float(workers or most or 1)
        each = {"CPU": count, "GPU": count if gpus else 0.0, **asked["resources"]}
        each = {resource: amount for resource, amount in each.items() if amount}
        host_bundles.append(each if name is None else {**each, f"node:{name}": 0.001})
    if asked["hosts"]:
        return host_bundles
    fit = sum(all(node.get(name, 0.0) >= amount for name, amount in host_bundles[0].items()) for node in nodes)
    return host_bundles * (asked["nodes"] or max(1, fit))


def replacement_bundle(asked: Mapping[str, Any], nodes: Sequence[Resources]) -> Resources:
    """The bundle of a node that replaces another one: the first one's, on any node."""
    return {name: most for name, most in bundles(asked, nodes)[0].items() if not name.startswith("node:")}


def why_pending(wanted: Sequence[Resources], nodes: Mapping[str, tuple[Resources, Resources]]) -> str:
    """Why bundles are not placed yet. `nodes`: by the name of each live node, its free and its total resources."""
    for bundle in wanted:
        for name in bundle:
            if name.startswith("node:") and not any(name in total for _, total in nodes.values()):
                return f"the node {name.removeprefix('node:')} is not alive"
    each = {name: most for name, most in wanted[0].items() if not name.startswith("node:")}
    lacks = {}
    for node, (free, total) in nodes.items():
        short = [name for name, most in each.items() if free.get(name, 0.0) < most]
        lacks[node] = " and ".join(f"{free.get(name, 0.0):g} of {total.get(name, 0.0):g} {name} free" for name in short)
    ready = sum(not lack for lack in lacks.values())
    what = " and ".join(f"{most:g} {name}" for name, most in each.items())
    text = f"{plural(len(wanted), 'node')} with {what} each {'is' if len(wanted) == 1 else 'are'} needed"
    named = [f"{node} has {lack}" for node, lack in lacks.items() if lack][:SEVERAL]
    text += f"; {ready} of {plural(len(nodes), 'live node')} can provide that"
    return ": ".join([text, *filter(None, ["; ".join(named)])])
