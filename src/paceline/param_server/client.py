"""The worker's side of parameter servers: pushes gradients and pulls weights.

Whole parameters are spread over the servers. In a step each worker pushes the sums of its own micro-batches; a server
adds them up in the order of ranks, and sends their squares to all workers, which compute the norm. These answers are a
vote: only when all servers have answered do workers ask them to apply the step. Each server applies it once.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from paceline.base.batching import Agreed
from paceline.base.environment import World, way_to
from paceline.base.mesh import Mesh, holders
from paceline.comm.bucket_reducer import OnReduced
from paceline.comm.communicator import Group
from paceline.comm.compression import Codec, add_codes, coded_sum, pack_codes
from paceline.comm.gradient_buckets import Bucket
from paceline.comm.gradient_memory import levels_of, zeros
from paceline.comm.message_reader import damaged, decode_message
from paceline.compute.job import StepOptions, StepSums
from paceline.compute.microbatches import MicroBatch
from paceline.compute.sparse_grads import pack_gradients, put_weights
from paceline.errors import UsageError
from paceline.parallel.layout import Layout
from paceline.parallel.parallel_job import ParallelJob
from paceline.param_server.protocol import Connection, Key, Kind, Message, exchange
from paceline.train.replica import Replica, mean_norm

At = tuple[str, int, str]  # host, port, and the salt of the key that is asked for there
WorkerReport = Callable[[int, int], bytes]  # makes the text of a request, from the part and the server
MEET = 10.0  # seconds for a connection to come
RANKED = struct.Struct("<ii")  # of who asks for squares: its rank, and how many workers push


def assign_parameters(sizes: Sequence[int], servers: int) -> list[int]:
    """Assigns parameters of these sizes (bytes) to servers: the largest first, each to the least loaded server."""
    loads, owners = [0] * servers, [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        owners[number] = min(range(servers), key=lambda server: (loads[server], server))
        loads[owners[number]] += sizes[number]
    return owners


class ServerClient:
    """A worker's connections to `count` servers.

    Each server's part is also held by `copies` other servers; the first live holder of a part counts. `find` returns
    the servers' addresses, `key` makes the shared key of a connection from its salt, and `look` raises if waiting is
    of no use.
    """

    def __init__(
        self,
        count: int,
        copies: int,
        worker: int,
        find: Callable[[], Mapping[int, At]],
        key: Callable[[str], bytes],
        look: Callable[[], None],
    ) -> None:
        self.count, self.copies, self.worker, self.find, self.look = count, copies, worker, find, look
        self._key = key
        self.links: dict[int, Connection] = {}
        self.used: dict[int, At] = {}  # those that all workers have met in this generation, and that are not lost since
        self.met = False  # all have had the state of this run
        self.landings: dict[int, dict[int, torch.Tensor]] = {}  # by trainer and number: where weights arrive
        self._at: dict[int, At] = {}  # where the links go
        self._has_state: dict[int, bool] = {}  # by server: whether it has the training state
        self._given: set[int] = set()
        self._sent: dict[
            tuple[int, int], list[tuple[Any, ...]]
        ] = {}  # messages since a step began, by server and trainer
        # Since then, by trainer: by server, kind and contribution.
        self._replies: dict[int, dict[tuple[int, int, Key], Message]] = {}
        self._generation = 0  # that of `used`
        self._reading: dict[int, Key] = {}  # by trainer: which weights are asked for

    # -- whom there is ----------------------------------------------------------------------------------------------

    def meet(self, seconds: float, gives: bool) -> None:
        """Connects with all servers, for at most `seconds`; a worker that gives the state stops once a server
        needs it.
        """
        end = time.monotonic() + seconds

        def done() -> bool:
            wanted = self.find() if self.met else range(self.count)
            return (gives and bool(self.empty)) or self.ready_servers.issuperset(wanted) or time.monotonic() > end

        self._wait(done)

    @property
    def ready_servers(self) -> set[int]:
        """The connected servers that have the training state."""
        addresses = self.find()
        return {server for server, has in self._has_state.items() if has and self._at[server] == addresses.get(server)}

    @property
    def empty(self) -> list[int]:
        """The connected servers that neither have the training state nor were sent it."""
        return [server for server, has in self._has_state.items() if not has and server not in self._given]

    def give(self, server: int, state: torch.Tensor) -> None:
        """Sends a server the training state that it begins with."""
        self._given.add(server)
        self.links[server].put(Kind.STATE, content=[state])

    def use(self, servers: Iterable[int], generation: int) -> None:
        """Begins to use these servers, which all workers are connected with."""
        self.used, self._generation = {server: self._at[server] for server in sorted(servers)}, generation
        for server in self.used:
            self._tell_used(server)

    def _tell_used(self, server: int) -> None:
        text = json.dumps(self.used).encode()
        self.links[server].put(Kind.USED, key=(self._generation, 0, 0), content=text)

    def counts(self, part: int) -> int | None:
        """The first live server that holds a part, or None."""
        return next((server for server in holders(part, self.count, self.copies) if server in self.used), None)

    @property
    def has_all_parts(self) -> bool:
        """Whether each part has a live server."""
        return all(self.counts(part) is not None for part in range(self.count))

    # -- what is said -----------------------------------------------------------------------------------------------

    def put(self, server: int, kind: int, trainer: int, key: Key, *content: Any) -> None:
        """Sends a message. If the connection is lost, the next one repeats it; servers act on it once."""
        self._replies.get(trainer, {}).pop((server, kind, key), None)
        self._sent.setdefault((server, trainer), []).append((kind, trainer, key, *content))
        self.links[server].put(kind, trainer, key, *content)

    def begin(self, trainer: int) -> None:
        """Begins a step of a trainer: messages of the step before are not repeated any more."""
        self._replies.pop(trainer, None)
        for server in range(self.count):
            self._sent.pop((server, trainer), None)

    def advance(self) -> None:
        """Sends as much as is possible without waiting."""
        for link in self.links.values():
            if link.sending:
                link.advance()

    def answers(self, kind: int, trainer: int, key: Key) -> dict[int, Message]:
        """Waits for the replies of all live servers to a message of this step, and returns them by server."""
        replies = self._replies.setdefault(trainer, {})
        self._wait(lambda: self.has_all_parts and all((server, kind, key) in replies for server in self.used))
        return {server: replies[server, kind, key] for server in self.used}

    def of_first(self, kind: int, trainer: int, key: Key, *content: Any) -> bytearray:
        """Asks the first live server, and returns the text of its reply."""
        asked: list[int] = []
        replies = self._replies.setdefault(trainer, {})

        def came() -> bool:
            first = min(self.used) if self.has_all_parts else None
            if first is not None and first not in asked:
                asked.append(first)
                self.put(first, kind, trainer, key, *content)
            return (first, kind, key) in replies

        self._wait(came)
        return replies[asked[-1], kind, key].text

    def ask(self, kind: int, trainer: int, key: Key, make_report: WorkerReport) -> dict[int, int]:
        """Sends a request about each part to the server that counts for it, with the text that `make_report` makes.

        The third number of the message's key is the part. Returns the server asked, by part.
        """
        asked = dict[int, int]()
        if kind == Kind.READ:
            self._reading[trainer] = key
        self._ask_further(asked, kind, trainer, key, make_report)
        return asked

    def hear(
        self, asked: dict[int, int], kind: int, trainer: int, key: Key, make_report: WorkerReport
    ) -> list[Message]:
        """Waits for the replies, and returns them by part. If another server takes over a part, asks that one."""
        replies = self._replies.setdefault(trainer, {})

        def came() -> bool:
            self._ask_further(asked, kind, trainer, key, make_report)
            return self.has_all_parts and all(
                (server, kind, (*key[:2], part)) in replies for part, server in asked.items()
            )

        self._wait(came)
        return [replies[asked[part], kind, (*key[:2], part)] for part in range(self.count)]

    def rows(self, asked: Mapping[int, int], trainer: int, key: Key) -> list[bytearray]:
        """The packed rows of tables that came before those replies, by part."""
        replies = self._replies[trainer]
        return [replies[asked[part], Kind.ROWS, (*key[:2], part)].text for part in range(self.count)]

    def _ask_further(self, asked: dict[int, int], kind: int, trainer: int, key: Key, make_report: WorkerReport) -> None:
        for part in range(self.count):
            server = self.counts(part)
            if server is not None and asked.get(part) != server:
                asked[part] = server
                self.put(server, kind, trainer, (*key[:2], part), (), make_report(part, server))

    def _wait(self, until: Callable[[], bool]) -> None:
        def handle_inboxes() -> bool:
            for server, link in self.links.items():
                while link.inbox:
                    self._hear(server, link.inbox.popleft())
            return until()

        exchange(lambda: [*self.links.values()], handle_inboxes, self._tend)

    def _tend(self) -> None:
        self.look()
        addresses = self.find()
        for server in [server for server, at in self.used.items() if addresses.get(server) != at]:
            self._lose(server)
        for server, at in addresses.items():
            if server not in self.links or self.links[server].broken or self._at[server] != at:
                self._connect(server, at)

    def _lose(self, server: int) -> None:
        """Drops a lost server, and ignores all that it has sent."""
        del self.used[server]
        self.links.pop(server).close()
        self._has_state.pop(server, None)
        for other, trainer in [*self._sent]:
            if other == server:
                del self._sent[other, trainer]
        for other in self.used:
            self._tell_used(other)

    def _connect(self, server: int, at: At) -> None:
        with suppress(OSError):  # it is gone again
            called = socket.create_connection(way_to(*at[:2]), MEET)
            link = Connection(called, self._tensors_for, self._key(at[2]), lambda link: f"{self.worker} {link.memory}")
            if server in self.links:
                self.links[server].close()
            self.links[server], self._at[server] = link, at
            if server in self.used:
                self._tell_used(server)
            for (other, _), messages in self._sent.items():
                for frame in messages if other == server else ():
                    link.put(*frame)
            self._has_state.pop(server, None)
            self._given.discard(server)

    def _tensors_for(self, frame: Message) -> list[torch.Tensor]:
        landing = self.landings.get(frame.trainer, {})
        if not self._is_wanted(frame):
            landing = {number: torch.empty_like(landing[number]) for number in frame.numbers}
        return [landing[number] for number in frame.numbers]

    def _is_wanted(self, frame: Message) -> bool:
        """Whether weights are not late, and were asked for again."""
        return frame.key[:2] == self._reading.get(frame.trainer, frame.key)[:2]

    def _hear(self, server: int, frame: Message) -> None:
        if frame.kind == Kind.WELCOME:
            has, _, memory = frame.text.decode(errors="replace").partition(" ")
            self._has_state[server] = has == "1"
            self.links[server].borrow(memory)
        else:
            if frame.lent is not None and self._is_wanted(frame):
                landing = self.landings[frame.trainer]
                for number, lent in zip(frame.numbers, frame.lent.tensors, strict=True):
                    # Memory that is pinned is what a GPU takes it from.
                    landing[number] = landing[number].copy_(lent) if landing[number].is_pinned() else lent
            self._replies.setdefault(frame.trainer, {})[server, frame.kind, frame.key] = frame


class ServerReplica(Replica):
    """A copy of a model whose optimizer runs on `servers`, for the trainer with this `number`.

    `key` identifies the gradients that it pushes.
    """

    servers: ServerClient
    number: int

    def __init__(
        self, job: ParallelJob, group: Group, mesh: Mesh, count: int, codec: Codec | None, team: Group | None = None
    ) -> None:
        outer = (team or group).subgroup("data", "context", mesh=mesh)
        super().__init__(job, Layout(job, zeros), group, outer, mesh, team=team)
        self.owners = assign_parameters([param.nbytes for param in job.named.values()], count)
        self.reducer, self.send_bucket = None, self.push_bucket  # servers sum the gradients and compute their squares
        self.error_feedback.coded, self.error_feedback.to = codec, "servers"
        self.code = None if codec is None else coded_sum(codec.word).code
        self.key: Key = (0, 0, 0)

    def account(self, size: int, full_size: int = 0) -> None:
        """Records that `size` bytes were sent to servers; `full_size` is what they take without a codec."""
        entry = self.team.ledger.setdefault("servers", [0, 0.0, 0.0])
        entry[0], entry[1] = entry[0] + 1, entry[1] + size
        if self.error_feedback.coded is not None and full_size:
            self.error_feedback.coded.sent += size
            self.error_feedback.coded.full += full_size

    def push_bucket(self, bucket: Bucket) -> None:
        """Pushes a bucket's gradients to all servers that hold their parts."""
        servers = self.servers
        levels = levels_of(self.job.dense[bucket.members[0]].dtype) if self.job.exact else 1
        rows = bucket.local_shard.cpu().view(levels, -1)
        places = zip(bucket.members, bucket.shapes, bucket.starts, strict=True)
        gradients = {n: rows[:, start : start + shape.numel()].reshape(-1) for n, shape, start in places}
        for part in range(servers.count):
            numbers = [number for number in bucket.members if self.owners[number] == part]
            tensors = [gradients[number] for number in numbers]
            pushed = tensors if self.code is None else [pack_codes(self.code, tensors)]
            for server in holders(part, servers.count, servers.copies) if numbers else ():
                if server in servers.used:
                    servers.put(server, Kind.PUSH, self.number, self.key, numbers, pushed)
                    self.account(*(sum(tensor.nbytes for tensor in group) for group in (pushed, tensors)))
        servers.advance()

    def push_rows(self) -> None:
        """Pushes the gradients of tables, which are complete now, as rows."""
        servers, first = self.servers, len(self.job.dense)
        for server in servers.used if self.job.sparse else ():
            held = parts_of(server, servers.count, servers.copies)
            params = {n: param for n, param in enumerate(self.job.in_rows, first) if self.owners[n] in held}
            servers.put(server, Kind.ROWS, self.number, self.key, (), text := pack_gradients(params))
            self.account(len(text))
        servers.advance()

    def prepare(self) -> None:
        """Allocates the memory that weights arrive in, for a new generation."""
        self.servers.landings[self.number] = {
            number: torch.empty(param.numel(), dtype=param.dtype, pin_memory=param.is_cuda)
            for number, param in enumerate(self.job.dense)
        }

    def met(self, generation: int) -> None:
        """Drops the local optimizer state once all servers have it."""
        self.servers.met = True
        for optimizer in self.job.optimizers:
            optimizer.state.clear()

    @torch.no_grad()
    def take_weights(self) -> None:
        """Copies the weights that have arrived into the model."""
        landing = self.servers.landings[self.number]
        for number, param in enumerate(self.job.dense):
            param.copy_(landing[number].view(param.shape))

    def take_rows(self, asked: Mapping[int, int], key: Key) -> None:
        """Copies the rows of tables that came with the requested weights into the model."""
        for text in self.servers.rows(asked, self.number, key) if self.job.sparse else ():
            put_weights(text, [*self.job.named.values()])

    def follow_schedule(self, agreed: Agreed) -> None:
        """Moves the schedules on after an update that servers made."""
        for optimizer in self.job.optimizers:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # or torch warns: it steps elsewhere
        self.updater.follow_schedule(agreed)

    def optimizer_state(self) -> list[bytearray]:
        """Returns the packed optimizer state of each part, from the servers."""
        about = Kind.KEPT, self.number, self.key, lambda *_: b""
        return [frame.text for frame in self.servers.hear(self.servers.ask(*about), *about)]

    def load(self, state: Mapping[str, Any]) -> None:
        """Loads a checkpoint's state. Raises UsageError if it has residuals of a codec, which servers cannot take."""
        if state.get("owed"):
            what = "the checkpoint contains unsent gradient sums of a codec, which server= cannot use"
            raise UsageError(what, "first resume the checkpoint without codec= and server= for one step")
        super().load(state)


def squares_of(squares: Mapping[str, list[float]], part: int, who: str) -> list[float]:
    """A part's squares in a server's reply. Raises FormatError if they are missing."""
    if str(part) not in squares:
        raise damaged("squares", who, f"the squares of part {part} are missing")
    return squares[str(part)]


class SyncReplica(ServerReplica):
    """A replica whose workers all push to the same step; its key is the step, the generation, and the attempt in it."""

    def __init__(self, job: ParallelJob, group: Group, mesh: Mesh, count: int, codec: Codec | None) -> None:
        super().__init__(job, group, mesh, count, codec)
        self._round = 0, 0  # the generation, and the attempt in it
        self._owed: tuple[Key, Agreed] | None = None  # of an update whose weights have not all come

    def met(self, generation: int) -> None:
        """Begins a generation: its rounds are counted from 0."""
        super().met(generation)
        self._round = generation, 0

    def run(
        self, micro_batches: Sequence[MicroBatch], options: StepOptions, on_reduced: OnReduced | None = None
    ) -> StepSums:
        """Computes this worker's micro-batches and pushes their gradients."""
        self.key = (options.step, *self._round)
        self.servers.begin(self.number)
        sums = super().run(micro_batches, options)
        self.push_rows()
        return sums

    def _add_up_rows(self, options: StepOptions) -> None:
        """Does nothing: servers add up the rows."""

    def norm(self, agreed: Agreed, options: StepOptions) -> float:
        """The norm of the mean gradient, from the squares that servers send once they have all pushes."""
        servers, request = self.servers, RANKED.pack(self.team.rank, self.team.size)
        if (exact := self.grad_buffers.exact) is not None:
            request += json.dumps([options.micro_batches, exact.largest]).encode()
        for server_number in servers.used:
            servers.put(server_number, Kind.SQUARES, self.number, self.key, (), request)
        replies = servers.answers(Kind.SQUARES, self.number, self.key)
        squares = list[float]()
        for part in range(servers.count):
            server = servers.counts(part)
            assert server is not None
            who = f"server {server}"
            squares += squares_of(decode_message(replies[server].text, "squares", who), part, who)
        return mean_norm(squares, agreed, options)

    def update(self, sums: StepSums, agreed: Agreed, options: StepOptions, norm: float) -> None:
        """Tells the servers to apply the step; `complete` reads the new weights."""
        self.runner.guard.carried.merge(sums.records)
        commit = {"count": agreed.count, "loss": agreed.loss, "unused": agreed.unused, "rates": self._rates()}
        text = json.dumps({**commit, "expected": options.expected, "norm": norm}).encode()
        for server in self.servers.used:
            self.servers.put(server, Kind.COMMIT, self.number, self.key, (), text)
        self.servers.advance()
        self._owed = self.key, agreed

    def _rates(self) -> list[list[float]] | None:
        """The learning rates of the step, where they follow values that servers know nothing of."""
        if not any(isinstance(one, ReduceLROnPlateau) for one in self.job.schedulers):
            return None
        return [[float(group["lr"]) for group in one.param_groups] for one in self.job.optimizers]

    def complete(self) -> None:
        """Reads the weights that the servers' update made."""
        if self._owed is None:
            return
        key, agreed = self._owed
        about = Kind.READ, self.number, (key[0] + 1, key[1], 0), lambda *_: str(key[0]).encode()
        asked = self.servers.ask(*about)
        replies = self.servers.hear(asked, *about)
        self._owed = None
        if self.code is None:
            self.take_weights()
        for part, frame in enumerate(replies if self.code is not None else ()):
            self._change(part, frame.text)
        self.take_rows(asked, about[2])
        if self.grad_buffers.exact is not None:
            self.grad_buffers.exact.keep()
        self.follow_schedule(agreed)

    @torch.no_grad()
    def _change(self, part: int, codes: bytearray) -> None:
        """Applies the coded change of a part's weights, as its server did."""
        params = [param for number, param in enumerate(self.job.dense) if self.owners[number] == part]
        assert self.code is not None
        if codes:
            add_codes(self.code, torch.frombuffer(codes, dtype=torch.uint8), params)

    def abort(self, again: bool = False) -> None:
        """Drops the step; with `again` its next attempt gets another key."""
        super().abort(again)
        self._round = self._round[0], self._round[1] + again


class AsyncReplica(ServerReplica):
    """A replica that computes the gradients of whole global batches by itself; its key is the ticket and the number of
    the ticket's assignment.
    """

    def __init__(self, job: ParallelJob, group: Group, mesh: Mesh, count: int, codec: Codec | None) -> None:
        alone = Group(World(rank=group.names[group.rank]))
        alone.ledger = group.ledger
        super().__init__(job, group, mesh, count, codec, alone)
        self._asked = 0
        self._reading: tuple[dict[int, int], Key] = {}, (0, 0, 0)
        self.begin(0)

    def begin(self, done: int) -> None:
        """Begins a window: all workers have the weights after `done` updates."""
        self._have = defaultdict[tuple[int, int], int](lambda: done)

    def _since(self, part: int, server: int) -> bytes:
        """The number of updates in this worker's rows of a part, as text. It is negative if the rows came from another
        server, which may have made updates that were lost with it.
        """
        return str(self._have[part, server]).encode()

    def deal(self, start: int, wish: Mapping[str, Any]) -> dict[str, Any]:
        """Asks the first server for work in the window that begins at `start`, once servers have applied this worker's
        last push. Returns a ticket's assignment, or the log at the end of the window.
        """
        self._asked += 1
        key = start, self._asked, 0
        text = json.dumps(wish).encode()
        answer = self.servers.of_first(Kind.DEAL, self.number, key, (), text)
        self.servers.begin(self.number)
        about = "window" if "log" in decode_message(answer, "dealing", "a server") else "ticket"
        return decode_message(answer, about, "a server")  # type: ignore[no-any-return]

    def ask_weights(self, update: int) -> None:
        """Asks all servers for their weights after at least `update` updates."""
        key = update, self._asked, 0
        self._reading = self.servers.ask(Kind.READ, self.number, key, self._since), key
        self.servers.advance()

    def await_weights(self) -> None:
        """Waits for the weights that were asked for, and copies them into the model."""
        asked, key = self._reading
        self.servers.hear(asked, Kind.READ, self.number, key, self._since)
        self.take_weights()
        self.take_rows(asked, key)
        self._have = defaultdict(lambda: -1, dict.fromkeys(asked.items(), key[0]))

    def push(self, sums: StepSums, report: Mapping[str, Any]) -> None:
        """Pushes the rows and the `report` of a ticket, whose dense gradients are on their way."""
        self.push_rows()
        records = b"" if sums.records is None else sums.records.cpu().numpy().tobytes()
        text, keep = json.dumps(report).encode() + b"\n", holders(0, self.servers.count, self.servers.copies)
        for server in self.servers.used:
            self.servers.put(server, Kind.PUSHED, self.number, self.key, (), text + records * (server in keep))
        self.servers.advance()

    def buffers(self) -> bytearray:
        """The packed buffers of the model, as the servers have them after the last update."""
        return self.servers.of_first(Kind.BUFFERS, self.number, (0, self._asked, 0))


def parts_of(server: int, servers: int, copies: int) -> list[int]:
    """The parts that a server holds: its own, and those that it has copies of."""
    return [(server - further) % servers for further in range(copies + 1)]
