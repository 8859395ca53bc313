"""How the workers of a generation and the parameter servers find each other, and agree which servers are used."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch

from paceline.checkpoint.tree import pack, unpack
from paceline.errors import UsageError
from paceline.param_server.client import ServerClient, ServerReplica
from paceline.team.auth import handshake_key
from paceline.train.step_context import StepContext

LOOK = 0.3  # seconds between two looks at whether somebody was asked to stop


def server_replica(context: StepContext) -> ServerReplica:
    """Returns the replica of a trainer whose plan has servers."""
    return cast(ServerReplica, context.replica)


class ServerTeam:
    """The parameter servers of a run, as one trainer uses them. With `watch_team`, waiting for a server ends if the
    team is broken and another generation has to form first.
    """

    def __init__(self, context: StepContext, watch_team: bool) -> None:
        self.context = context
        run, count, copies = context.run, context.plan.server or 0, context.plan.copies or 0
        if run.servers is None:
            operations = context.transactions
            operations.ahead = False
            find, key = (lambda: operations.commands.servers), partial(handshake_key, run.team.world.run_dir)
            check = self._check_team if watch_team else _nothing
            run.servers = ServerClient(count, copies, operations.worker, find, key, check)
            run.team.world.tell("servers", count=count, copies=copies)
        elif run.servers.met or (run.servers.count, run.servers.copies) != (count, copies):
            what = "this Trainer was created after training began, but parameter servers run the script only up to then"
            cure = "create every Trainer before the first loop over steps() or the first step()"
            if (run.servers.count, run.servers.copies) != (count, copies):
                others = [
                    f"server={n}{' copies=1' * more}"
                    for n, more in ((run.servers.count, run.servers.copies), (count, copies))
                ]
                what = f"the plans of the trainers differ: one has {others[0]}, another has {others[1]}"
                cure = "use the same plan words for both"
            raise UsageError(what, cure)
        replica = server_replica(context)
        replica.servers, replica.number = run.servers, context.trainer
        context.on_new_generation = self.rebind

    def _check_team(self) -> None:
        """Raises if the team is broken and another generation has to form first."""
        channel = self.context.run.team.group.channel
        if channel is not None and channel.broken is not None:
            raise channel.broken

    def rebind(self) -> None:
        """In a new generation: waits until all servers have the training state."""
        replica = server_replica(self.context)
        replica.prepare()
        self._meet()
        replica.met(self.context.transactions.number)

    def _give(self, servers: ServerClient) -> None:
        """Sends the training state, with the optimizer state of the other servers, to servers that lack it."""
        if empty := servers.empty:
            state = pack(self.context.run.state.hand_over(self.context.transactions.done))
            for server in empty:
                servers.give(server, state)

    def _meet(self) -> None:
        """Waits until the servers have the state, without those that are lost and whose parts others hold. Ends the run
        if a worker is asked to stop before the first step.
        """
        run, group, servers = self.context.run, self.context.run.team.group, server_replica(self.context).servers
        everybody = range(servers.count)
        while True:
            servers.meet(LOOK, gives=group.rank == 0)
            if group.rank == 0:
                self._give(servers)
            ready, addresses = servers.ready_servers, servers.find()
            flags = [
                servers.met,
                run.notices.stop_signal is not None,
                *(n in ready for n in everybody),
                *(n in addresses for n in everybody),
            ]
            met, stops, *counts = group.sum(torch.tensor(flags, dtype=torch.int64)).tolist()
            used = {n for n in everybody if counts[n] == group.size}
            if all(n in used or (met and not counts[servers.count + n]) for n in everybody):
                servers.use(used, self.context.transactions.number)
                if servers.has_all_parts:
                    return
            if stops and not met:
                run.notices.end_script()


def add_server_state(context: StepContext, done: int | None) -> dict[str, Any]:
    """Returns the trainer's state, for a checkpoint with the optimizer state from the servers. `done` is the number of
    transactions; None for what all workers have.
    """
    state, servers = context.state(), context.run.servers
    if done is None or servers is None or not servers.met:
        return state
    for text in server_replica(context).optimizer_state():
        parts = unpack(torch.frombuffer(text, dtype=torch.uint8))
        for optimizer, part in zip(state["optimizers"], parts, strict=True):
            # Optimizers also change numbers in their groups, as the step size that Prodigy estimates.
            optimizer |= {**part, "state": optimizer["state"] | part["state"]}
    return state


def _nothing() -> None:
    """Looks at nothing: the loss of another worker is handled at the end of the window."""
