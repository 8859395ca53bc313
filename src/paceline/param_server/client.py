"""The worker's side of parameter servers: pushes gradients and pulls weights.

Whole parameters are spread over the servers. In a step each worker pushes the sums of its own micro-batches; a server
adds them up in the order of ranks and tells everybody their squares, of which the norm is made. That all servers have
told them is the vote: only then workers tell them to apply the step, which each does once, whoever asks.
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
from paceline.comm.bucket_reducer import BucketReducer, OnReduced
from paceline.comm.communicator import Group
from paceline.comm.compression import Codec, add_codes, coded_sum, pack_codes
from paceline.comm.gradient_buckets import Bucket, levels_of, zeros
from paceline.comm.message_reader import damaged, read_told
from paceline.compute.job import StepOptions, StepSums
from paceline.compute.microbatches import MicroBatch
from paceline.compute.sparse_grads import pack_gradients, put_weights
from paceline.errors import UsageError
from paceline.parallel.layout import Layout
from paceline.parallel.parallel_job import ParallelJob
from paceline.param_server.protocol import Connection, Key, Kind, Message, exchange
from paceline.train.replica import Replica, mean_norm

At = tuple[str, int, str]  # host, port, and the salt of the key that is asked for there
WorkerReport = Callable[[int, int], bytes]  # what is said of a part to a server
MEET = 10.0  # seconds for a connection to come
RANKED = struct.Struct("<ii")  # of who asks for squares: its rank, and how many workers push


def spread(sizes: Sequence[int], servers: int) -> list[int]:
    """The server of each parameter of so many bytes: large ones first, each to who has least."""
    loads, owners = [0] * servers, [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        owners[number] = min(range(servers), key=lambda server: (loads[server], server))
        loads[owners[number]] += sizes[number]
    return owners


class ServerClient:
    """A worker's connections to `count` servers. What each keeps so many others have `copies` of: of those that hold a
    part, and live, the first counts. `find` tells where servers are, and `key` what both ends of a connection have;
    `look` raises where it is of no use to wait.
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
        self._said: dict[int, bool] = {}  # whether it has the state
        self._given: set[int] = set()
        self._told: dict[tuple[int, int], list[tuple[Any, ...]]] = {}  # since a step began, by server and trainer
        # Since then, by trainer: by server, kind and contribution.
        self._replies: dict[int, dict[tuple[int, int, Key], Message]] = {}
        self._generation = 0  # that of `used`
        self._reading: dict[int, Key] = {}  # by trainer: which weights are asked for

    # -- whom there is ----------------------------------------------------------------------------------------------

    def meet(self, seconds: float, gives: bool) -> None:
        """Connects with all that there are, in so many seconds; or, where this worker gives the state, until one is
        empty.
        """
        end = time.monotonic() + seconds

        def done() -> bool:
            wanted = self.find() if self.met else range(self.count)
            return (gives and bool(self.empty)) or self.here.issuperset(wanted) or time.monotonic() > end

        self._wait(done)

    @property
    def here(self) -> set[int]:
        """Those that have the state of the training."""
        found = self.find()
        return {server for server, has in self._said.items() if has and self._at[server] == found.get(server)}

    @property
    def empty(self) -> list[int]:
        """Those that have not, and were not given it."""
        return [server for server, has in self._said.items() if not has and server not in self._given]

    def give(self, server: int, state: torch.Tensor) -> None:
        """What it is to begin with."""
        self._given.add(server)
        self.links[server].put(Kind.STATE, content=[state])

    def use(self, servers: Iterable[int], generation: int) -> None:
        """All workers have met these."""
        self.used, self._generation = {server: self._at[server] for server in sorted(servers)}, generation
        for server in self.used:
            self._tell_used(server)

    def _tell_used(self, server: int) -> None:
        text = json.dumps(self.used).encode()
        self.links[server].put(Kind.USED, key=(self._generation, 0, 0), content=text)

    def counts(self, part: int) -> int | None:
        """The server that counts for the part of one."""
        return next((server for server in holders(part, self.count, self.copies) if server in self.used), None)

    @property
    def whole(self) -> bool:
        """Whether somebody has each part."""
        return all(self.counts(part) is not None for part in range(self.count))

    # -- what is said -----------------------------------------------------------------------------------------------

    def put(self, server: int, kind: int, trainer: int, key: Key, *content: Any) -> None:
        """Over a connection that is lost meanwhile it goes again over the next one: servers heed it once."""
        self._replies.get(trainer, {}).pop((server, kind, key), None)
        self._told.setdefault((server, trainer), []).append((kind, trainer, key, *content))
        self.links[server].put(kind, trainer, key, *content)

    def begin(self, trainer: int) -> None:
        """A trainer begins a step: what it told of the one before is not told again."""
        self._replies.pop(trainer, None)
        for server in range(self.count):
            self._told.pop((server, trainer), None)

    def advance(self) -> None:
        """Sends what goes without waiting."""
        for link in self.links.values():
            if link.sending:
                link.advance()

    def answers(self, kind: int, trainer: int, key: Key) -> dict[int, Message]:
        """What all that live answer to what they were asked of this step, once they have."""
        replies = self._replies.setdefault(trainer, {})
        self._wait(lambda: self.whole and all((server, kind, key) in replies for server in self.used))
        return {server: replies[server, kind, key] for server in self.used}

    def of_first(self, kind: int, trainer: int, key: Key, *content: Any) -> bytearray:
        """What the first that lives answers."""
        asked: list[int] = []
        replies = self._replies.setdefault(trainer, {})

        def came() -> bool:
            first = min(self.used) if self.whole else None
            if first is not None and first not in asked:
                asked.append(first)
                self.put(first, kind, trainer, key, *content)
            return (first, kind, key) in replies

        self._wait(came)
        return replies[asked[-1], kind, key].text

    def ask(self, kind: int, trainer: int, key: Key, said: WorkerReport) -> dict[int, int]:
        """Asks for something of each part who counts for it, and says what is to be `said` of it; the third number of
        the key is the part's. Whom.
        """
        asked = dict[int, int]()
        if kind == Kind.READ:
            self._reading[trainer] = key
        self._ask_further(asked, kind, trainer, key, said)
        return asked

    def hear(self, asked: dict[int, int], kind: int, trainer: int, key: Key, said: WorkerReport) -> list[Message]:
        """What those who were asked answer, by part. Who comes to count meanwhile is asked then."""
        replies = self._replies.setdefault(trainer, {})

        def came() -> bool:
            self._ask_further(asked, kind, trainer, key, said)
            return self.whole and all((server, kind, (*key[:2], part)) in replies for part, server in asked.items())

        self._wait(came)
        return [replies[asked[part], kind, (*key[:2], part)] for part in range(self.count)]

    def rows(self, asked: Mapping[int, int], trainer: int, key: Key) -> list[bytearray]:
        """What has come before those answers, by part: of weights of which only some rows travel."""
        replies = self._replies[trainer]
        return [replies[asked[part], Kind.ROWS, (*key[:2], part)].text for part in range(self.count)]

    def _ask_further(self, asked: dict[int, int], kind: int, trainer: int, key: Key, said: WorkerReport) -> None:
        for part in range(self.count):
            server = self.counts(part)
            if server is not None and asked.get(part) != server:
                asked[part] = server
                self.put(server, kind, trainer, (*key[:2], part), (), said(part, server))

    def _wait(self, until: Callable[[], bool]) -> None:
        def heard() -> bool:
            for server, link in self.links.items():
                while link.inbox:
                    self._hear(server, link.inbox.popleft())
            return until()

        exchange(lambda: [*self.links.values()], heard, self._tend)

    def _tend(self) -> None:
        self.look()
        found = self.find()
        for server in [server for server, at in self.used.items() if found.get(server) != at]:
            self._lose(server)
        for server, at in found.items():
            if server not in self.links or self.links[server].broken or self._at[server] != at:
                self._connect(server, at)

    def _lose(self, server: int) -> None:
        """It is not heard any more, whatever it may have sent."""
        del self.used[server]
        self.links.pop(server).close()
        self._said.pop(server, None)
        for other, trainer in [*self._told]:
            if other == server:
                del self._told[other, trainer]
        for other in self.used:
            self._tell_used(other)

    def _connect(self, server: int, at: At) -> None:
        with suppress(OSError):  # it is gone again
            called = socket.create_connection(way_to(*at[:2]), MEET)
            link = Connection(called, self._place, self._key(at[2]), lambda link: f"{self.worker} {link.memory}")
            if server in self.links:
                self.links[server].close()
            self.links[server], self._at[server] = link, at
            if server in self.used:
                self._tell_used(server)
            for (other, _), told in self._told.items():
                for frame in told if other == server else ():
                    link.put(*frame)
            self._said.pop(server, None)
            self._given.discard(server)

    def _place(self, frame: Message) -> list[torch.Tensor]:
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
            self._said[server] = has == "1"
            self.links[server].borrow(memory)
        else:
            if frame.lent is not None and self._is_wanted(frame):
                landing = self.landings[frame.trainer]
                for number, lent in zip(frame.numbers, frame.lent.tensors, strict=True):
                    # Memory that is pinned is what a GPU takes it from.
                    landing[number] = landing[number].copy_(lent) if landing[number].is_pinned() else lent
            self._replies.setdefault(frame.trainer, {})[server, frame.kind, frame.key] = frame


class GradientPusher(BucketReducer):
    """Buckets leave for the servers of their parameters."""

    def __init__(self, replica: ServerReplica) -> None:
        super().__init__(replica.team, [])
        self._replica = replica

    def send(self, bucket: Bucket) -> None:
        replica, servers = self._replica, self._replica.servers
        levels = levels_of(replica.job.dense[bucket.members[0]].dtype) if replica.job.exact else 1
        rows = bucket.local_shard.cpu().view(levels, -1)
        places = zip(bucket.members, bucket.shapes, bucket.starts, strict=True)
        gradients = {n: rows[:, start : start + shape.numel()].reshape(-1) for n, shape, start in places}
        for part in range(servers.count):
            mine = [number for number in bucket.members if replica.owners[number] == part]
            whole = [gradients[number] for number in mine]
            pushed = whole if replica.code is None else [pack_codes(replica.code, whole)]
            for server in holders(part, servers.count, servers.copies) if mine else ():
                if server in servers.used:
                    servers.put(server, Kind.PUSH, replica.number, replica.key, mine, pushed)
                    replica.account(*(sum(tensor.nbytes for tensor in some) for some in (pushed, whole)))
        servers.advance()

    def squares(self) -> float | None:
        return None


class ServerReplica(Replica):
    """A copy of a model whose optimizer is kept by `servers`, of the trainer with this `number`. What it contributes is
    known by its `key`.
    """

    servers: ServerClient
    number: int

    def __init__(
        self, job: ParallelJob, group: Group, mesh: Mesh, count: int, codec: Codec | None, team: Group | None = None
    ) -> None:
        outer = (team or group).along("data", "context", mesh=mesh)
        super().__init__(job, Layout(job, zeros), group, outer, mesh, team=team)
        self.owners = spread([param.nbytes for param in job.named.values()], count)
        self.transit = GradientPusher(self)
        self.own.coded, self.own.to = codec, "servers"
        self.code = None if codec is None else coded_sum(codec.word).code
        self.key: Key = (0, 0, 0)

    def account(self, size: int, whole: int = 0) -> None:
        """So many bytes go to servers, maybe as codes of so many."""
        entry = self.team.ledger.setdefault("servers", [0, 0.0, 0.0])
        entry[0], entry[1] = entry[0] + 1, entry[1] + size
        if self.own.coded is not None and whole:
            self.own.coded.sent += size
            self.own.coded.full += whole

    def push_rows(self) -> None:
        """Of gradients in rows, which are whole now."""
        servers, first = self.servers, len(self.job.dense)
        for server in servers.used if self.job.sparse else ():
            held = parts_of(server, servers.count, servers.copies)
            mine = {n: param for n, param in enumerate(self.job.in_rows, first) if self.owners[n] in held}
            servers.put(server, Kind.ROWS, self.number, self.key, (), text := pack_gradients(mine))
            self.account(len(text))
        servers.advance()

    def prepare(self) -> None:
        """In a new generation: there is room for what will come."""
        self.servers.landings[self.number] = {
            number: torch.empty(param.numel(), dtype=param.dtype, pin_memory=param.is_cuda)
            for number, param in enumerate(self.job.dense)
        }

    def met(self, generation: int) -> None:
        """All servers have the state of the training: they alone keep the optimizers' from now on."""
        self.servers.met = True
        for optimizer in self.job.optimizers:
            optimizer.state.clear()

    @torch.no_grad()
    def take_weights(self) -> None:
        """As they have arrived."""
        landing = self.servers.landings[self.number]
        for number, param in enumerate(self.job.dense):
            param.copy_(landing[number].view(param.shape))

    def take_rows(self, asked: Mapping[int, int], key: Key) -> None:
        """Those that came with what was asked for."""
        for text in self.servers.rows(asked, self.number, key) if self.job.sparse else ():
            put_weights(text, [*self.job.named.values()])

    def follow_schedule(self, agreed: Agreed) -> None:
        """After an update of the servers."""
        for optimizer in self.job.optimizers:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # or torch warns: it steps elsewhere
        self.updater.follow_schedule(agreed)

    def kept(self) -> list[bytearray]:
        """What optimizers keep of each part, packed."""
        about = Kind.KEPT, self.number, self.key, lambda *_: b""
        return [frame.text for frame in self.servers.hear(self.servers.ask(*about), *about)]

    def load(self, state: Mapping[str, Any]) -> None:
        if state.get("owed"):
            what = "the checkpoint holds sums that a codec had not sent yet, and server= has no place for them"
            raise UsageError(what, "resume it once without codec= and server=, for a step")
        super().load(state)


def squares_of(told: Mapping[str, list[float]], part: int, who: str) -> list[float]:
    """Those of a part, of what a server has told. FormatError: it has none."""
    if str(part) not in told:
        raise damaged("squares", who, f"those of part {part} are missing")
    return told[str(part)]


class SyncReplica(ServerReplica):
    """All workers push to the same step. A contribution is known by the step, the generation, and the attempt in it."""

    def __init__(self, job: ParallelJob, group: Group, mesh: Mesh, count: int, codec: Codec | None) -> None:
        super().__init__(job, group, mesh, count, codec)
        self._round = 0, 0  # the generation, and the attempt in it
        self._owed: tuple[Key, Agreed] | None = None  # of an update whose weights have not all come

    def met(self, generation: int) -> None:
        super().met(generation)
        self._round = generation, 0

    def run(
        self, micro_batches: Sequence[MicroBatch], options: StepOptions, heard: OnReduced | None = None
    ) -> StepSums:
        self.key = (options.step, *self._round)
        self.servers.begin(self.number)
        sums = super().run(micro_batches, options)
        self.push_rows()
        return sums

    def add_up_rows(self, options: StepOptions) -> None:
        """Servers do."""

    def norm(self, agreed: Agreed, options: StepOptions) -> float:
        servers, said = self.servers, RANKED.pack(self.team.rank, self.team.size)
        if self.job.exact:
            said += json.dumps([options.micro_batches, self.home.largest]).encode()
        for one in servers.used:
            servers.put(one, Kind.SQUARES, self.number, self.key, (), said)
        told = servers.answers(Kind.SQUARES, self.number, self.key)
        found = list[float]()
        for part in range(servers.count):
            server = servers.counts(part)
            assert server is not None
            who = f"server {server}"
            found += squares_of(read_told(told[server].text, "squares", who), part, who)
        return mean_norm(found, agreed, options)

    def update(self, sums: StepSums, agreed: Agreed, options: StepOptions, norm: float) -> None:
        self.runner.carried.merge(sums.records)
        told = {"count": agreed.count, "loss": agreed.loss, "unused": agreed.unused, "rates": self._rates()}
        text = json.dumps({**told, "expected": options.expected, "norm": norm}).encode()
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
        """The weights that servers have made of the step."""
        if self._owed is None:
            return
        key, agreed = self._owed
        about = Kind.READ, self.number, (key[0] + 1, key[1], 0), lambda *_: str(key[0]).encode()
        asked = self.servers.ask(*about)
        heard = self.servers.hear(asked, *about)
        self._owed = None
        if self.code is None:
            self.take_weights()
        for part, frame in enumerate(heard if self.code is not None else ()):
            self._change(part, frame.text)
        self.take_rows(asked, about[2])
        self.home.applied()
        self.follow_schedule(agreed)

    @torch.no_grad()
    def _change(self, part: int, codes: bytearray) -> None:
        """As the server has changed its own."""
        mine = [param for number, param in enumerate(self.job.dense) if self.owners[number] == part]
        assert self.code is not None
        if codes:
            add_codes(self.code, torch.frombuffer(codes, dtype=torch.uint8), mine)

    def abort(self, again: bool = False) -> None:
        super().abort(again)
        self._round = self._round[0], self._round[1] + again


class AsyncReplica(ServerReplica):
    """Training is not in step: this worker makes gradients of whole global batches by itself. A contribution is known
    by its ticket, and how often that was dealt.
    """

    def __init__(self, job: ParallelJob, group: Group, mesh: Mesh, count: int, codec: Codec | None) -> None:
        alone = Group(World(rank=group.names[group.rank]))
        alone.ledger = group.ledger
        super().__init__(job, group, mesh, count, codec, alone)
        self._asked = 0
        self._reading: tuple[dict[int, int], Key] = {}, (0, 0, 0)
        self.begin(0)

    def begin(self, done: int) -> None:
        """A window begins: all have the weights after so many updates."""
        self._have = defaultdict[tuple[int, int], int](lambda: done)

    def _since(self, part: int, server: int) -> bytes:
        """How many updates the rows of a part have that are here; below zero where they came from another server: it
        may have made updates that were lost with it.
        """
        return str(self._have[part, server]).encode()

    def deal(self, start: int, said: Mapping[str, Any]) -> dict[str, Any]:
        """What the first server deals of the window from `start` on, or says at its end; once servers are done with
        what was pushed.
        """
        self._asked += 1
        key = start, self._asked, 0
        text = json.dumps(said).encode()
        answer = self.servers.of_first(Kind.DEAL, self.number, key, (), text)
        self.servers.begin(self.number)
        about = "window" if "log" in read_told(answer, "dealing", "a server") else "ticket"
        return read_told(answer, about, "a server")  # type: ignore[no-any-return]

    def ask_weights(self, update: int) -> None:
        """Each server's, as they are after so many updates or more."""
        key = update, self._asked, 0
        self._reading = self.servers.ask(Kind.READ, self.number, key, self._since), key
        self.servers.advance()

    def await_weights(self) -> None:
        """Those that were asked for are this worker's then."""
        asked, key = self._reading
        self.servers.hear(asked, Kind.READ, self.number, key, self._since)
        self.take_weights()
        self.take_rows(asked, key)
        self._have = defaultdict(lambda: -1, dict.fromkeys(asked.items(), key[0]))

    def push(self, sums: StepSums, told: Mapping[str, Any]) -> None:
        """All of the ticket's gradients are on their way, or rows: tells of them."""
        self.push_rows()
        records = b"" if sums.records is None else sums.records.cpu().numpy().tobytes()
        text, keep = json.dumps(told).encode() + b"\n", holders(0, self.servers.count, self.servers.copies)
        for server in self.servers.used:
            self.servers.put(server, Kind.PUSHED, self.number, self.key, (), text + records * (server in keep))
        self.servers.advance()

    def buffers(self) -> bytearray:
        """As the servers have them after the last update, packed."""
        return self.servers.of_first(Kind.BUFFERS, self.number, (0, self._asked, 0))


def parts_of(server: int, servers: int, copies: int) -> list[int]:
    """What one of so many servers holds: its own part, and those that it has copies of."""
    return [(server - further) % servers for further in range(copies + 1)]
