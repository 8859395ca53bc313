"""The process that talks to Ray: a placement group with one actor per host.

It prints lines of JSON: the resources that it ``waits`` for, and then either the addresses where the hosts were
``placed``, or ``what`` went wrong. When its standard input ends or it is killed, Ray ends the actors. It must run as
``__main__``: only then is `Shell` sent by value, so that Ray's Python does not need Paceline.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from paceline.base.polling import can_read, wait_for
from paceline.errors import first_line
from paceline.launch.engines.driver_engine import CHUNK, LOST, Asker, Bridge, check_reachable, serve_hosts
from paceline.launch.engines.ray import Resources, bundles, replacement_bundle, why_pending

LOOK = 2.0  # seconds between two checks why the hosts are not placed yet


class Shell:
    """An actor that runs `sh` on its node with pipes to us. Ray kills the actor's child processes with the actor. The
    agent must survive that and see the end of its input instead, so it is a grandchild: another `sh` is its parent.
    """

    def __init__(self) -> None:
        import ray

        with open("/proc/self/environ", "rb") as file:  # without variables that Ray adds, like OMP_NUM_THREADS
            environment = dict(word.split(b"=", 1) for word in file.read().split(b"\0") if b"=" in word)
        numbers = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        self._sh: Any = subprocess.Popen(
            ["sh", "-c", "sh; exit $?"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env={**environment, b"CUDA_VISIBLE_DEVICES": ",".join(numbers).encode()},
            start_new_session=True,
        )
        self._open: list[Any] = [self._sh.stdout, self._sh.stderr]

    def write(self, data: bytes) -> None:
        """Writes to the input of `sh`."""
        try:
            while data:
                data = data[self._sh.stdin.write(data) :]
        except BrokenPipeError:
            pass  # `read` reports its end

    def read(self) -> tuple[bytes, bytes, int | None]:
        """The output of `sh` on both streams within a second, and its exit code if it has ended."""
        output = {self._sh.stdout: b"", self._sh.stderr: b""}
        for pipe in wait_for(self._open, (), 1.0)[0]:
            output[pipe] = os.read(pipe.fileno(), 1 << 16)
            if not output[pipe]:
                self._open.remove(pipe)
        out, error = (output[pipe] for pipe in (self._sh.stdout, self._sh.stderr))
        return out, error, None if self._open else self._sh.wait()


class ActorBridge:
    """Connects the actor of a host to the standard streams of the process that asked for the host."""

    def __init__(self, actor: Any, asker: Asker) -> None:
        self._actor, self._asker = actor, asker
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._hear, self._say)]
        for thread in self._threads:
            thread.start()

    def _hear(self) -> None:
        import ray

        with (
            open(self._asker.streams[0], "rb", buffering=0) as source,
            suppress(ray.exceptions.RayError),
        ):  # `_say` reports it
            while data := source.read(CHUNK):
                ray.get(self._actor.write.remote(data))

    def _say(self) -> None:
        import ray

        code, why = None, ""
        try:
            while code is None:
                *outputs, code = ray.get(self._actor.read.remote())
                for stream, data in enumerate(outputs, 1):
                    self._asker.write(stream, data)
        except ray.exceptions.RayError as error:
            code, why = LOST, _why(error)
        except OSError:  # the launcher has ended
            code = LOST
        self._asker.finish(code, why)

    def close(self) -> None:
        """Kills the actor and closes the connection to the process that waits."""
        import ray

        ray.kill(self._actor)  # this also ends our threads
        self._asker.close()


class FurtherNode:
    """Connects a node that replaces another one, as soon as Ray provides one. `avoided` are the nodes that the run has
    or had: while Ray offers one of these, it is held, so that Ray offers the next one. What is reserved is free again
    once it is closed; all other reservations of the run are removed by Ray when this process ends.
    """

    def __init__(self, wanted: Resources, avoided: set[str], asker: Asker) -> None:
        self._wanted, self._avoided, self._asker = wanted, avoided, asker
        self._over, self._groups = threading.Event(), list[Any]()
        self._bridge: ActorBridge | None = None
        threading.Thread(target=self._find, daemon=True).start()

    def _find(self) -> None:
        import ray
        from ray.util.placement_group import placement_group, placement_group_table

        node, groups = "", self._groups
        try:
            while not node or node in self._avoided:
                groups.append(placement_group([self._wanted]))
                while not groups[-1].wait(LOOK):
                    if self._over.is_set():
                        return
                node = placement_group_table(groups[-1])["bundles_to_node_id"][0]
            self._avoided.add(node)
            self._free(1)
            if not self._over.is_set():
                actor = _actor(groups[-1], self._wanted, 0)
                self._bridge = ActorBridge(actor, self._asker)
        except ray.exceptions.RayError as error:
            self._asker.finish(LOST, _why(error))
        finally:
            if self._over.is_set():
                self._free()

    def _free(self, kept: int = 0) -> None:
        """Removes what is reserved, except for the last `kept` ones."""
        from ray.util.placement_group import remove_placement_group

        while len(self._groups) > kept:
            remove_placement_group(self._groups.pop(0))

    def close(self) -> None:
        """Ends the actor, or the search for a node."""
        self._over.set()
        if self._bridge is None:  # the search ends soon
            self._asker.close()
        else:
            self._bridge.close()
            self._free()


def _why(error: Exception) -> str:
    import ray

    if isinstance(error, ray.exceptions.ActorUnavailableError):  # raised first if a node or a process has died
        return "its actor no longer answers"
    preempted = "preempted: " if getattr(error, "preempted", False) else ""
    return preempted + [line for line in str(error).splitlines() if line and not line.startswith("\t")][-1]


def _tell(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)  # noqa: T201 (to the process that asked)


def main(asked: Mapping[str, Any]) -> int:
    """Places a group of actors and serves them until standard input ends. Returns the exit code."""
    try:
        import ray
        from ray.util.placement_group import placement_group, placement_group_table
    except ModuleNotFoundError:
        _tell(what=f"ray is not installed for {sys.executable}", cure="pip install 'paceline[ray]'")
        return 1
    address = asked["address"]
    try:
        if address != "auto":
            check_reachable(address)
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        where = "on this host" if address == "auto" else f"at {address}"
        cure = "start it with `ray start --head`, or pass --address HOST:PORT of a cluster that has a node here"
        _tell(what=f"Ray {where} cannot be reached ({first_line(error)})", cure=cure)
        return 1
    wanted = bundles(asked, [total for _, total in _nodes().values()])
    group = placement_group(wanted, strategy="STRICT_SPREAD")
    last_reason, end = "", time.monotonic() + asked["wait"]
    while not group.wait(min(LOOK, asked["wait"])):
        if can_read(0, 0.0):  # the launcher has ended
            return 1
        why = why_pending(wanted, _nodes())
        if time.monotonic() > end:
            cure = "increase --wait, request less, or check `ray status`"
            _tell(what=f"Ray has not placed the hosts within {asked['wait']} s: {why}", cure=cure)
            return 1
        if why != last_reason:
            last_reason = why
            _tell(waits=why)
    address_of_node = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    node_of_bundle = placement_group_table(group)["bundles_to_node_id"]
    placed = [address_of_node[node_of_bundle[number]] for number in range(len(wanted))]
    avoided = {node_of_bundle[number] for number in range(len(wanted))}
    replacement = replacement_bundle(asked, [total for _, total in _nodes().values()])

    def begin(number: int, asker: Asker) -> Bridge:
        if number >= len(wanted):
            return FurtherNode(replacement, avoided, asker)
        return ActorBridge(_actor(group, wanted[number], number), asker)

    serve_hosts(0, _tell, placed, begin)
    ray.shutdown()
    return 0


def _nodes() -> dict[str, tuple[Resources, Resources]]:
    import ray
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    alive = [node for node in ray.nodes() if node["Alive"]]
    names = [node["NodeManagerAddress"] for node in alive]
    return {
        (name if names.count(name) == 1 else f"{name} ({node['NodeID'][:6]})"): (
            free.get(node["NodeID"], {}),
            node["Resources"],
        )
        for name, node in zip(names, alive, strict=True)
    }


def _actor(group: Any, has: Resources, number: int) -> Any:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return (
        ray.remote(Shell)
        .options(
            num_cpus=has.get("CPU", 0),
            num_gpus=has.get("GPU", 0),
            max_concurrency=2,  # `read` and `write` run at the same time
            enable_task_events=False,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
        )
        .remote()
    )


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
