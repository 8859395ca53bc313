"""The background thread that negotiates named collectives and carries them out."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from paceline.base.console import say
from paceline.base.environment import variable
from paceline.base.heartbeat import HEARTBEAT
from paceline.base.text import ranks as workers
from paceline.comm.transport import Transport
from paceline.errors import PacelineError, PeerLostError
from paceline.integrations.horovod import collectives
from paceline.integrations.horovod.collectives import Members, dtype_of
from paceline.integrations.horovod.exceptions import HorovodArgumentError, HorovodInternalError, not_initialized
from paceline.integrations.horovod.negotiation import (
    ADD,
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    BARRIER,
    BROADCAST,
    GLOBAL,
    JOIN,
    REDUCESCATTER,
    REMOVE,
    AgreedCollective,
    CycleMessage,
    Key,
    Negotiation,
    Request,
    describe,
)
from paceline.integrations.horovod.timeline import CollectiveTimeline
from paceline.team.team import Team

IDLE, LONG_IDLE, QUIET = 5e-3, 2e-2, 1.0  # seconds between cycles without submissions; the longer ones after QUIET
ROW = 504  # bytes of a worker's part of a cycle's exchange; longer messages follow in a second exchange
_HEAD = 4  # bytes of a message's length
LOOK = 0.1  # seconds between two searches for the reason of a long wait
_REASONS = (PacelineError, RuntimeError, ValueError, TypeError, LookupError, OSError)


def number_of(name: str, default: float, least: float = 0.0) -> float:
    """The number in one of Horovod's environment variables. HorovodArgumentError: it has another value."""
    text = variable(name)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value >= least:
        raise HorovodArgumentError(
            f"{name}={text} is not a number from {least:g} on", "write it in digits, or unset it"
        )
    return value


@dataclass(eq=False)
class Entry:
    """A collective that this worker has submitted.

    `inputs` and `outputs` are its tensors; collectives that make new tensors fill `outputs` at their end. `site` is the
    line of the script. `done` is set at the end; `error` is then why it failed. `number` is the result of a join, or
    the id of a new process set.
    """

    request: Request
    inputs: Sequence[torch.Tensor] = ()
    outputs: list[torch.Tensor] = field(default_factory=list)
    site: str = ""
    done: threading.Event = field(default_factory=threading.Event)
    error: HorovodInternalError | None = None
    number: int = -1
    received: list[int] = field(default_factory=list)
    ready: torch.cuda.Event | None = None

    def end(self, error: HorovodInternalError | None = None) -> None:
        """Ends the collective."""
        self.error = error
        self.done.set()


class Runtime:
    """Negotiates and carries out the collectives of this process between `init` and `shutdown`.

    `epoch` counts the calls of `init` in this generation of the team, which must be equal on all workers.
    """

    def __init__(self, team: Team, epoch: int) -> None:
        self.rank, self.size = team.rank, team.size
        self._group, self._epoch = team.group, epoch
        hosts = team.group.hosts
        self.host_ranks = [rank for rank in range(self.size) if hosts[rank] == hosts[self.rank]]
        positions = [hosts[:rank].count(hosts[rank]) for rank in range(self.size)]
        same_position = [rank for rank in range(self.size) if positions[rank] == positions[self.rank]]
        self.local_rank, self.local_size = self.host_ranks.index(self.rank), len(self.host_ranks)
        self.cross_rank, self.cross_size = same_position.index(self.rank), len(same_position)
        self.homogeneous = len({hosts.count(host) for host in hosts}) == 1
        self.cycle = number_of("HOROVOD_CYCLE_TIME", 1.0) / 1e3
        self.fusion = number_of("HOROVOD_FUSION_THRESHOLD", 64 * 2**20)
        self._warn_after = number_of("HOROVOD_STALL_CHECK_TIME_SECONDS", 60.0)
        self._give_up_after = number_of("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0.0)
        if variable("HOROVOD_STALL_CHECK_DISABLE") == "1":
            self._warn_after = self._give_up_after = math.inf
        self.negotiation = Negotiation(self.size, self.rank)
        self.timeline: CollectiveTimeline | None = None
        everyone = tuple(range(self.size))
        self._control = team.group.connect(f"horovod {epoch}, negotiation", everyone)
        if self._control is not None:
            self._control.records = False
            self._control.declared = ("negotiation", "hvd.init", "horovod negotiation")
        self.members = {GLOBAL: Members(everyone, team.group.connect(f"horovod {epoch}", everyone))}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._submitted: list[Entry] = []
        self._entries: dict[Key, Entry] = {}
        self._counts: dict[tuple[int, str], int] = {}
        self._joins = 0  # joins that have ended: workers have different counts before each
        self._first_seen: dict[Key, float] = {}
        self._warned: set[Key] = set()
        self._stops = False
        self.failure: HorovodInternalError | None = None
        self.ended = False
        self._thread = threading.Thread(target=self._run, name="paceline-horovod", daemon=True)
        self._thread.start()

    # -- from the script's threads ------------------------------------------------------------------------------------

    def name(self, process_set: int, kind: str, name: str | None) -> str:
        """The name of a collective; one without a name is numbered among its kind."""
        if name is not None:
            return f"{kind}.{name}"
        with self._lock:
            number = self._counts[process_set, kind] = self._counts.get((process_set, kind), -1) + 1
        return f"{kind}.noname.{self._joins}.{number}"

    def submit(self, entry: Entry) -> Entry:
        """Submits a collective. HorovodArgumentError: one of its name is under way on this worker."""
        request = entry.request
        with self._lock:
            if self.failure is not None:
                raise self.failure
            if self._stops:
                raise not_initialized()
            if self.ended:
                raise self._shut_down_error()
            if request.key in self._entries:
                raise HorovodArgumentError(
                    f"{describe(request)} is submitted a second time before the first one has ended",
                    "call hvd.synchronize() on its handle first, or use another name",
                )
            self._entries[request.key] = entry
            self._submitted.append(entry)
            if self.timeline is not None:
                self.timeline.begin(request.name, f"NEGOTIATE_{request.kind.upper()}")
        self._wake.set()
        return entry

    def stop(self) -> None:
        """Shuts down on all workers: collectives that are not agreed by now fail everywhere."""
        self._stops = True
        self._wake.set()
        with HEARTBEAT.waiting():
            self._thread.join()

    def abandon(self) -> None:
        """Stops this worker's thread without the others, because this worker has failed."""
        error = PeerLostError("this worker failed", "see its error")
        for channel in (self._control, *(one.channel for one in self.members.values())):
            if channel is not None:
                channel.interrupt(error)
        self.stop()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        active = time.monotonic()
        try:
            while not self.negotiation.has_shut_down:
                waits = bool(self._entries)  # for other workers: look often
                now = time.monotonic()
                pause = self.cycle if waits else IDLE if now - active < QUIET else LONG_IDLE
                if self._wake.wait(pause) and self.size > 1:
                    time.sleep(self.cycle)  # so that several submissions are agreed together
                self._wake.clear()
                began = time.monotonic()
                if self._advance():
                    active = began
            self._end(self._shut_down_error())
        except _REASONS as error:
            lost = HorovodInternalError(
                error.what if isinstance(error, PacelineError) else f"{type(error).__name__}: {error}",
                error.cure if isinstance(error, PacelineError) else "see the other workers' logs",
            )
            lost.__cause__ = error
            self.failure = lost
            self._end(lost)
        finally:
            self.ended = True

    def _shut_down_error(self) -> HorovodInternalError:
        others = [rank for rank in self.negotiation.shut_down_by if rank != self.rank]
        who = workers(others) if others else "this worker"
        return HorovodInternalError(
            f"{who} called hvd.shutdown() or ended, so no more collectives are possible",
            "call hvd.shutdown() and end the script on all workers after the same collectives",
        )

    def _end(self, error: HorovodInternalError) -> None:
        """Ends everything that is left with an error."""
        with self._lock:
            left, self._entries, self.ended = [*self._entries.values()], {}, True
        for entry in left:
            entry.end(error)
        if self.timeline is not None:
            self.timeline.close()
            self.timeline = None

    def _advance(self) -> bool:
        """Runs one cycle; returns whether anything was agreed."""
        with self._lock:
            submitted, self._submitted = self._submitted, []
            stops = self._stops
        if self.timeline is not None:
            self.timeline.mark_cycle()
        data = self.negotiation.compose([entry.request for entry in submitted], stops).encode()
        agreed = self.negotiation.advance([CycleMessage.decode(data) for data in self._exchange(data)])
        for batch in fused(agreed, self.fusion):
            self._carry_out(batch)
        self._look_for_stalls()
        return bool(agreed)

    def _exchange(self, data: bytes) -> list[bytes]:
        """The messages of all workers in this cycle."""
        control = self._control
        if control is None:
            return [data]
        head = len(data).to_bytes(_HEAD, "little")
        rows = self._gather(control, head + data[: ROW - _HEAD], ROW)
        sizes = [int.from_bytes(row[:_HEAD], "little") for row in rows]
        if max(sizes) > ROW - _HEAD:
            rows = self._gather(control, data, max(sizes))
            return [row[:size] for row, size in zip(rows, sizes, strict=True)]
        return [row[_HEAD : _HEAD + size] for row, size in zip(rows, sizes, strict=True)]

    def _gather(self, control: Transport, data: bytes, length: int) -> list[bytes]:
        flat = torch.frombuffer(bytearray(data.ljust(length, b"\0")), dtype=torch.uint8)
        everyone = torch.empty(self.size, length, dtype=torch.uint8)
        work = control.all_gather(everyone.unbind(0), flat)
        began = looked = time.monotonic()
        while not work.is_completed():  # with pauses: the script computes meanwhile
            now = time.monotonic()
            time.sleep(min(1e-3, max(5e-5, (now - began) / 20)))
            if now - looked > LOOK:
                looked = now
                try:
                    control.check_stall(work, now - began)
                except PacelineError as error:
                    work.fail(error)
        work.wait()
        return [row.tobytes() for row in everyone.numpy()]

    def _look_for_stalls(self) -> None:
        """Names the workers that have not submitted what others submitted long ago."""
        incomplete, now = self.negotiation.incomplete(), time.monotonic()
        self._first_seen = {key: self._first_seen.get(key, now) for key in incomplete}
        self._warned &= incomplete.keys()
        for key, since in self._first_seen.items():
            if self.rank or (now - since < self._warn_after and not 0 < self._give_up_after <= now - since):
                continue
            requests, missing = incomplete[key], self.negotiation.missing(key)
            if key not in self._warned and missing:
                self._warned.add(key)
                wait = "waits" if len(requests) == 1 else "wait"
                say(
                    f"paceline: {workers(missing)} did not submit {describe(next(iter(requests.values())))} within "
                    f"{now - since:.3g} s, and {workers(list(requests))} {wait} for it"
                )
            if 0 < self._give_up_after <= now - since and missing:
                raise HorovodInternalError(
                    f"{workers(missing)} did not submit {describe(next(iter(requests.values())))} within "
                    f"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS={self._give_up_after:g}",
                    "submit the same names on all workers, or allow more time",
                )

    # -- carrying out -------------------------------------------------------------------------------------------------

    def _carry_out(self, batch: Sequence[AgreedCollective]) -> None:
        """Carries out collectives of one kind together, and ends their entries."""
        request = batch[0].request
        with self._lock:
            entries = [self._entries.get(agreed.request.key) for agreed in batch]
        if batch[0].error is not None:
            self._finish(entries, HorovodInternalError(*batch[0].error))
            return
        members = self.members.get(request.process_set)
        if members is None or self.rank not in members.ranks:
            return
        for entry in entries:
            if entry is not None and self.timeline is not None:
                self.timeline.end(entry.request.name)
                self.timeline.begin(entry.request.name, entry.request.kind.upper())
        name = request.name if len(batch) == 1 else f"{request.name} and {len(batch) - 1} more"
        site = next((entry.site for entry in entries if entry is not None), "joined")
        members.declare(name, site, f"horovod {request.kind}")
        for entry in entries:
            if entry is not None and entry.ready is not None:
                entry.ready.synchronize()
        with torch.no_grad():
            if request.kind == ALLREDUCE:
                self._allreduce(members, batch, entries)
            else:
                for agreed, entry in zip(batch, entries, strict=True):
                    self._carry_out_one(members, agreed, entry)
        HEARTBEAT.beat()
        self._finish(entries, None)

    def _finish(self, entries: Iterable[Entry | None], error: HorovodInternalError | None) -> None:
        """Ends entries, which have been carried out or have failed."""
        for entry in entries:
            if entry is not None:
                with self._lock:
                    del self._entries[entry.request.key]
                    if self.timeline is not None:
                        self.timeline.end(entry.request.name)
                if entry.ready is not None:
                    torch.cuda.synchronize(entry.inputs[0].device)
                entry.end(error)

    def _allreduce(self, members: Members, batch: Sequence[AgreedCollective], entries: Sequence[Entry | None]) -> None:
        """Reduces the tensors of several requests, those of one dtype together. Workers that joined give zeros."""
        by_dtype: dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for agreed, entry in zip(batch, entries, strict=True):
            for index, (dtype, shape) in enumerate(agreed.request.tensors):
                inputs, outputs = by_dtype.setdefault(dtype, ([], []))
                if entry is None:
                    inputs.append(torch.zeros(shape, dtype=dtype_of(dtype), device=agreed.request.device))
                    outputs.append(inputs[-1])
                else:
                    inputs.append(entry.inputs[index].detach())
                    outputs.append(entry.outputs[index].detach())
        for inputs, outputs in by_dtype.values():
            collectives.allreduce(members, batch[0].request, inputs, outputs)

    def _carry_out_one(self, members: Members, agreed: AgreedCollective, entry: Entry | None) -> None:
        request = agreed.request
        if request.kind == BARRIER and members.channel is not None:
            members.channel.barrier().wait()
        elif request.kind in (ADD, REMOVE):
            self._change_sets(agreed)
        if entry is None:
            return
        entry.number = agreed.last_joined
        if request.kind == JOIN:
            with self._lock:
                self._joins += 1
                self._counts.clear()
        if request.kind == BROADCAST:
            for tensor, output in zip(entry.inputs, entry.outputs, strict=True):
                collectives.broadcast(members, request, tensor.detach(), output.detach())
        elif request.kind == ALLGATHER:
            made = partial(collectives.allgather, members, agreed)
            entry.outputs = [made(index, tensor) for index, tensor in enumerate(entry.inputs)]
        elif request.kind == REDUCESCATTER:
            entry.outputs = [collectives.reducescatter(members, request, self.rank, one) for one in entry.inputs]
        elif request.kind == ALLTOALL:
            output, entry.received = collectives.alltoall(members, agreed, self.rank, entry.inputs[0])
            entry.outputs = [output]
        else:
            assert request.kind in (BARRIER, JOIN, ADD, REMOVE)

    def _change_sets(self, agreed: AgreedCollective) -> None:
        """Connects the members of a new process set, or closes the connections of one that is removed."""
        request = agreed.request
        if request.kind == ADD:
            number = agreed.last_joined
            members = self.members[number] = Members(request.splits)
            if self.rank in request.splits:
                members.channel = self._group.connect(f"horovod {self._epoch}, process set {number}", request.splits)
        elif (channel := self.members.pop(request.root).channel) is not None:
            channel.declared = ("the end of a process set", "hvd.remove_process_set", "horovod barrier")
            channel.barrier().wait()


def fused(agreed: Iterable[AgreedCollective], most: float) -> list[list[AgreedCollective]]:
    """Puts allreduces of the same kind together, up to `most` bytes each. Every worker makes the same batches."""
    batches: list[list[AgreedCollective]] = []
    latest: dict[tuple[object, ...], tuple[int, float]] = {}  # by what they have in common: batch and its bytes
    for one in agreed:
        request = one.request
        if request.kind != ALLREDUCE or one.error is not None:
            batches.append([one])
            continue
        joint = (request.process_set, request.op, request.before, request.after, request.device)
        size = float(sum(dtype_of(dtype).itemsize * math.prod(shape) for dtype, shape in request.tensors))
        number, before = latest.get(joint, (-1, math.inf))
        if before + size > most:
            latest[joint] = len(batches), size
            batches.append([one])
        else:
            batches[number].append(one)
            latest[joint] = number, before + size
    return batches
