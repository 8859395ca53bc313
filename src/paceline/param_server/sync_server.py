"""Synchronous parameter server: sums the gradients of all workers, and applies them in one update.

Each worker pushes the sums of its own micro-batches, and then asks for the squares of the step's gradients. The server
answers once all have pushed. A worker that has the answers of all servers knows that each of them can apply the step,
and tells them to commit it. Each server commits it once, however many workers ask.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import torch

from paceline.comm.compression import add_codes, pack_codes
from paceline.comm.message_reader import damaged, decode_message
from paceline.errors import PacelineError
from paceline.param_server.client import RANKED
from paceline.param_server.parameter_shard import Client, ParameterShard
from paceline.param_server.protocol import Connection, Key, Kind, Message, peer_name


class SyncServer:
    """Serves one trainer's shard. `clients` returns the connected workers; `reached` gets the names of fault points.

    `summed` is the contribution whose sums are the gradients now; `squares` has the squares of the last sums by part.
    """

    def __init__(
        self,
        shard: ParameterShard,
        reached: Callable[[str], None],
        clients: Callable[[], Sequence[tuple[Connection, Client]]],
    ) -> None:
        self.shard, self._reached, self._clients = shard, reached, clients
        self.summed: Key | None = None
        self.squares = {part: [0.0] for part in shard.parts}
        self._changes: dict[int, torch.Tensor] = {}  # with a codec: what the last step changed, in codes, by part

    def handle(self, link: Connection, client: Client, worker: int, frame: Message) -> None:
        """Handles a worker's message."""
        if frame.kind == Kind.SQUARES:
            if len(frame.text) < RANKED.size:
                raise damaged("rank", peer_name(worker), "the message is too short")
            client.asked[frame.trainer] = (frame.key, *RANKED.unpack_from(frame.text))
            self._sum(link, frame)
        elif frame.kind == Kind.COMMIT:
            self._commit(frame)
        elif frame.kind == Kind.READ:
            self._send_weights(link, frame)

    def _sum(self, link: Connection, frame: Message) -> None:
        """Sums a step's gradients once all workers have pushed, and answers them with the squares.

        A worker that asks again gets the same answer.
        """
        shard, key = self.shard, frame.key
        if shard.applied > key[0] or self.summed == key:
            link.put(Kind.SQUARES, shard.trainer, key, content=json.dumps(self.squares).encode())
            return
        pushed, size = dict[int, tuple[Connection, Client]](), 0  # by rank: a worker that connected again counts once
        for other, client in self._clients():
            if shard.trainer in client.asked and client.asked[shard.trainer][0] == key:
                _, rank, size = client.asked[shard.trainer]
                pushed[rank] = other, client
        if len(pushed) < size:
            return
        in_order = [pushed[rank][1] for rank in range(size)]
        gradients = [client.gradients(shard) for client in in_order]
        exactly = decode_message(frame.text[RANKED.size :] or b"null", "largest gradients", "a worker")
        if shard.exact is not None and exactly is not None:
            self.squares = shard.sum_exactly(gradients, *exactly)
        else:
            rows = [client.rows.get(shard.trainer, bytearray()) for client in in_order]
            self.squares = shard.sum_gradients(gradients, rows, in_place=not in_order[0].lent)
        if gone := [client for _, client in pushed.values() if not client.still_lends(shard.trainer, key)]:
            self.summed = None  # the gradients changed while they were summed: their worker has given up this step
            for client in gone:
                del client.asked[shard.trainer]
            return
        self.summed = key
        self._reached("summed")
        for other, _ in pushed.values():
            other.put(Kind.SQUARES, shard.trainer, key, content=json.dumps(self.squares).encode())

    def _commit(self, frame: Message) -> None:
        """Applies a step that all servers can apply, unless this server already has."""
        shard, key = self.shard, frame.key
        if shard.applied == key[0] and self.summed == key:
            commit = decode_message(frame.text, "step", "a worker")
            self._reached("reduced")
            before = {n: shard.params[n].detach().clone() for n in shard.all_dense} if shard.code is not None else {}
            shard.apply(commit, oldest=shard.applied)
            if shard.code is not None:
                self._round_change(before)
            self.summed = None
            self._reached("applied")
        elif shard.applied <= key[0]:
            what = f"server {shard.server} cannot apply step {key[0] + 1}, because contributions are missing"
            raise PacelineError(what, "this is a bug in Paceline: report it with the run's journal")

    @torch.no_grad()
    def _round_change(self, before: dict[int, torch.Tensor]) -> None:
        """Rounds the change of each part's weights to what workers will decode of its codes."""
        code = self.shard.code
        assert code is not None
        for part, numbers in self.shard.dense.items():
            params = [self.shard.params[number] for number in numbers]
            change = [param - before[number] for number, param in zip(numbers, params, strict=True)]
            self._changes[part] = pack_codes(code, change)
            for number, param in zip(numbers, params, strict=True):
                param.copy_(before[number])
            add_codes(code, self._changes[part], params)

    def _send_weights(self, link: Connection, frame: Message) -> None:
        """Sends a part's weights after the last step, or in codes what that step changed."""
        shard, part = self.shard, frame.key[2]
        if shard.code is None:
            numbers = shard.dense[part]
            shard.send_weights(link, frame, {n: shard.params[n].detach().contiguous() for n in numbers})
        else:
            shard.send_rows(link, frame)
            link.put(Kind.READ, frame.trainer, frame.key, content=self._changes[part].numpy().tobytes())
