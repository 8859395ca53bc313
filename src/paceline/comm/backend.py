"""`paceline`, a backend of torch.distributed: ``init_process_group("paceline")`` and all of torch's parts run over it.

CPU tensors travel over our own channel, CUDA tensors over NCCL. Here c10d's calls are only taken apart: into flat
tensors, and what to copy where at the end. What cannot be done is refused before anything is sent (tensors.py).
"""
# Torch's stubs also offer its classes' older calling conventions, which none of its parts uses.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from paceline.comm.channel import Channel
from paceline.comm.collectives import UnevenError
from paceline.comm.engine import Operation, Steps
from paceline.comm.hosts import interface_of
from paceline.comm.shared import Arena
from paceline.comm.tensors import (
    Asked,
    Back,
    Op,
    Reduction,
    Tensors,
    asked,
    asked_sparse,
    bits,
    flat,
    numbers,
    outside_inference,
    reducing,
    write,
)
from paceline.errors import PeerLostError, UnsupportedError
from paceline.world import offer_nccl_interface

Ready = Callable[[], dist.Work]  # begins a collective that can be done
_BYTE = torch.uint8


def _collective(options: Any) -> Callable[[Callable[..., Ready]], Callable[..., dist.Work]]:
    """A collective whose last argument is of the class `options`. Where tensors are CUDA's, NCCL does it."""

    def wrap(method: Callable[..., Ready]) -> Callable[..., dist.Work]:
        arguments = method.__code__.co_argcount - 2

        @functools.wraps(method)
        def call(self: ProcessGroup, *given: Any, opts: Any = None) -> dist.Work:
            tensors = given[:arguments]
            opts = opts or (given[arguments] if len(given) > arguments else options())
            if any(_are_cuda(tensor) for tensor in tensors):
                return getattr(self.nccl(), method.__name__)(*tensors, opts)  # type: ignore[no-any-return]
            with outside_inference():
                return method(self, *tensors, opts)()

        return call

    return wrap


def _are_cuda(tensors: Any) -> bool:
    """Whether a nesting of lists holds CUDA's tensors, by the first."""
    while isinstance(tensors, (list, tuple)) and tensors:
        tensors = tensors[0]
    return isinstance(tensors, torch.Tensor) and tensors.is_cuda


class ProcessGroup(dist.ProcessGroup):
    """One group of workers, over a `channel`. What torch calls, it calls on this."""

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta, channel: Channel | None = None
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._rank, self._size = rank, size
        self._name = self._description = ""
        self.meet(store, channel or Channel(store, rank, size, timeout))

    def meet(self, store: dist.Store, channel: Channel) -> None:
        """From now on, and after `abort`, the same workers are connected through this."""
        self.channel, self._store = channel, store
        self._nccl: Any = None
        self._barriers = 0

    def _ready(
        self, what: Asked, numel: int, detail: int, steps: Callable[[int], Steps], opts: Any, outcome: Any
    ) -> Ready:
        def start() -> dist.Work:
            operation = self.channel.start(what.kind, numel, what.dtype, detail, steps, opts.asyncOp)
            operation.outcome = outcome
            return operation

        return start

    # -- reductions ---------------------------------------------------------------------------------------------

    @_collective(c10d.AllreduceOptions)
    def allreduce(self, tensors: Tensors, opts: Any) -> Ready:
        (tensor,) = tensors
        if tensor.is_sparse:
            return self._sparse_all_reduce(tensor, opts)
        what, reduction = reducing("all_reduce", tensors, opts.reduceOp.op, into=tensors)
        return self._all_reduce(what, reduction, *flat(numbers(tensor)), opts, list(tensors))

    @_collective(c10d.AllreduceCoalescedOptions)
    def allreduce_coalesced(self, tensors: Tensors, opts: Any) -> Ready:
        what, reduction = reducing("all_reduce", tensors, opts.reduceOp.op, into=tensors)
        targets = [numbers(tensor) for tensor in tensors]
        whole = torch.cat([target.reshape(-1) for target in targets])
        parts = whole.split([target.numel() for target in targets])
        back = [(target, part.view(target.shape)) for target, part in zip(targets, parts, strict=True)]
        return self._all_reduce(what, reduction, whole, back, opts, list(tensors))

    @_collective(c10d.ReduceOptions)
    def reduce(self, tensors: Tensors, opts: Any) -> Ready:
        what, reduction = reducing("reduce", tensors, opts.reduceOp.op, into=tensors)
        target = numbers(tensors[0])
        whole = target.reshape(-1).clone()
        back = [(target, whole.view(target.shape))] if self._rank == opts.rootRank else []
        return self._all_reduce(what, reduction, whole, back, opts, list(tensors), opts.rootRank + 1)

    def _all_reduce(
        self,
        what: Asked,
        reduction: Reduction,
        whole: torch.Tensor,
        back: Back,
        opts: Any,
        outcome: Any,
        root: int = 0,
    ) -> Ready:
        arena = self.channel.in_arena(whole)

        def steps(fp: int) -> Steps:
            yield from self.channel.hosts.all_reduce(whole, reduction, fp, arena)
            self._finish(reduction, whole, back)

        detail = int(reduction.op) * (self._size + 1) + root
        return self._ready(what, len(whole), detail, steps, opts, outcome)

    def _finish(self, reduction: Reduction, whole: torch.Tensor, back: Back) -> None:
        if reduction.op == Op.AVG:
            whole.div_(self._size)
        write(back)

    def _sparse_all_reduce(self, tensor: torch.Tensor, opts: Any) -> Ready:
        """The sum of sparse tensors: everybody's entries side by side, coalesced."""
        what = asked_sparse("sparse all_reduce", tensor, opts.reduceOp.op)
        mine, hosts = tensor.detach().coalesce(), self.channel.hosts

        def steps(fp: int) -> Steps:
            parts = mine.indices().t().contiguous(), mine.values()
            counts = [torch.empty(1, dtype=torch.int64) for _ in range(self._size)]
            yield from hosts.all_gather(counts, torch.tensor([len(parts[0])]), fp)
            most = max(int(count) for count in counts)
            gathered = []
            for part in parts:
                padded = torch.zeros(most, *part.shape[1:], dtype=part.dtype)
                padded[: len(part)] = part
                outs = [torch.empty_like(padded) for _ in counts]
                yield from hosts.all_gather([out.view(-1) for out in outs], padded.view(-1), fp)
                gathered.append(torch.cat([out[: int(count)] for out, count in zip(outs, counts, strict=True)]))
            with torch.no_grad():
                tensor.copy_(torch.sparse_coo_tensor(gathered[0].t(), gathered[1], mine.shape).coalesce())

        return self._ready(what, mine.numel(), 0, steps, opts, [tensor])

    @_collective(c10d.ReduceScatterOptions)
    def reduce_scatter(self, outs: Tensors, tensors: Sequence[list[torch.Tensor]], opts: Any) -> Ready:
        what, reduction = reducing("reduce_scatter", [*outs, *tensors[0]], opts.reduceOp.op, into=outs)
        what.one_each(tensors[0], self._size)
        out, back = flat(numbers(outs[0]))
        parts = [flat(numbers(part))[0] for part in tensors[0]]
        return self._reduce_scatter(what, reduction, out, parts, back, opts, list(outs))

    @_collective(c10d.ReduceScatterOptions)
    def reduce_scatter_single(self, out: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Ready:
        return self._reduce_scatter_single(out, tensor, opts)

    @_collective(c10d.ReduceScatterOptions)
    def reduce_scatter_single_coalesced(self, outs: Tensors, tensors: Tensors, opts: Any) -> Ready:
        return self._each("reduce_scatter", self._reduce_scatter_single, outs, tensors, opts)

    def _reduce_scatter_single(self, out: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Ready:
        what, reduction = reducing("reduce_scatter", [out, tensor], opts.reduceOp.op, into=[out])
        own, back = flat(numbers(out))
        whole, _ = flat(numbers(tensor))
        parts = what.rows(whole, own, self._size)
        here = parts[self._rank].data_ptr() == own.data_ptr()
        arena = self.channel.in_arena(whole) if here else None
        return self._reduce_scatter(what, reduction, own, parts, back, opts, [out], arena)

    def _reduce_scatter(
        self,
        what: Asked,
        reduction: Reduction,
        out: torch.Tensor,
        parts: Tensors,
        back: Back,
        opts: Any,
        outcome: Any,
        arena: Arena | None = None,
    ) -> Ready:
        lengths = [len(part) for part in parts]
        what.fits(len(out), lengths[self._rank])
        uneven = torch.cat(list(parts)) if len(set(lengths)) > 1 else None

        def steps(fp: int) -> Steps:
            if uneven is None:
                yield from self.channel.hosts.reduce_scatter(out, parts, reduction, fp, arena)
            else:
                yield from self.channel.hosts.all_reduce(uneven, reduction, fp)
                out.copy_(uneven.split(lengths)[self._rank])
            self._finish(reduction, out, back)

        numel = len(out) if uneven is None else len(uneven)
        return self._ready(what, numel, int(reduction.op), steps, opts, outcome)

    # -- what only moves ----------------------------------------------------------------------------------------

    @_collective(c10d.BroadcastOptions)
    def broadcast(self, tensors: Tensors, opts: Any) -> Ready:
        what = asked("broadcast", tensors, into=tensors)
        data, back = flat(bits(tensors[0]))
        root = opts.rootRank

        def steps(fp: int) -> Steps:
            yield from self.channel.hosts.broadcast(data, root, fp)
            write(back)

        return self._ready(what, len(data), root, steps, opts, list(tensors))

    @_collective(c10d.AllgatherOptions)
    def allgather(self, outs: Sequence[list[torch.Tensor]], tensors: Tensors, opts: Any) -> Ready:
        return self._all_gather(outs[0], tensors[0], opts)

    @_collective(c10d.AllgatherOptions)
    def all_gather_single(self, out: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Ready:
        return self._all_gather_single(out, tensor, opts)

    @_collective(c10d.AllgatherOptions)
    def allgather_coalesced(self, outs: Sequence[list[torch.Tensor]], tensors: Tensors, opts: Any) -> Ready:
        longest = max(map(len, outs), default=0)  # `outs` has a list per rank
        rows = [[out[number] for out in outs if number < len(out)] for number in range(longest)]
        return self._each("all_gather", self._all_gather, rows, tensors, opts)

    @_collective(c10d.AllgatherOptions)
    def all_gather_single_coalesced(self, outs: Tensors, tensors: Tensors, opts: Any) -> Ready:
        return self._each("all_gather", self._all_gather_single, outs, tensors, opts)

    def _all_gather(self, outs: list[torch.Tensor], tensor: torch.Tensor, opts: Any) -> Ready:
        what = asked("all_gather", [*outs, tensor], into=outs)
        what.one_each(outs, self._size)
        return self._gather(what, [flat(bits(out)) for out in outs], tensor, opts, [outs])

    def _all_gather_single(self, out: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Ready:
        what = asked("all_gather", [out, tensor], into=[out])
        whole, back = flat(bits(out))
        rows = what.rows(whole, flat(bits(tensor))[0], self._size)
        pairs: list[tuple[torch.Tensor, Back]] = [(row, []) for row in rows]
        pairs[-1] = rows[-1], back
        return self._gather(what, pairs, tensor, opts, [out])

    @_collective(c10d.GatherOptions)
    def gather(self, outs: Sequence[list[torch.Tensor]], tensors: Tensors, opts: Any) -> Ready:
        mine = outs[0] if outs else []
        what = asked("gather", [*mine, *tensors], into=mine)
        if self._rank == opts.rootRank:
            what.one_each(mine, self._size)
            for out in mine:  # the others do not know the list
                what.fits(tensors[0].numel(), out.numel())
        return self._gather(what, [flat(bits(out)) for out in mine], tensors[0], opts, list(outs), opts.rootRank)

    def _gather(
        self,
        what: Asked,
        pairs: Sequence[tuple[torch.Tensor, Back]],
        tensor: torch.Tensor,
        opts: Any,
        outcome: Any,
        root: int = -1,
    ) -> Ready:
        """Everybody's tensor into the tensors of `pairs`, of which workers that only give have none."""
        data, _ = flat(bits(tensor))
        outs, back = [out for out, _ in pairs], [pair for _, own in pairs for pair in own]
        if outs:
            what.fits(len(data), len(outs[self._rank]))
        if len({len(out) for out in outs}) > 1:
            numel = sum(map(len, outs))
            return self._exchange(what, numel, root, outs, [data] * self._size, back, opts, outcome)

        def steps(fp: int) -> Steps:
            yield from self.channel.hosts.all_gather(outs, data, fp)
            write(back)

        return self._ready(what, len(data), root, steps, opts, outcome)

    @_collective(c10d.ScatterOptions)
    def scatter(self, outs: Tensors, tensors: Sequence[list[torch.Tensor]], opts: Any) -> Ready:
        """An all-to-all where only the root has something to give."""
        given = tensors[0] if tensors else []
        what = asked("scatter", [*outs, *given], into=outs)
        if self._rank == opts.rootRank:
            what.one_each(given, self._size)
        out, back = flat(bits(outs[0]))
        none = out[:0]
        gives = [flat(bits(part))[0] for part in given] or [none] * self._size
        takes = [out if rank == opts.rootRank else none for rank in range(self._size)]
        return self._exchange(what, len(out), opts.rootRank, takes, gives, back, opts, list(outs))

    @_collective(c10d.AllToAllOptions)
    def alltoall(self, outs: Tensors, tensors: Tensors, opts: Any) -> Ready:
        what = asked("all_to_all", [*outs, *tensors], into=outs)
        for parts in (outs, tensors):
            what.one_each(parts, self._size)
        pairs = [flat(bits(out)) for out in outs]
        gives = [flat(bits(part))[0] for part in tensors]
        back = [pair for _, own in pairs for pair in own]
        return self._exchange(what, 0, 0, [out for out, _ in pairs], gives, back, opts, list(outs))

    @_collective(c10d.AllToAllOptions)
    def all_to_all_single(
        self, out: torch.Tensor, tensor: torch.Tensor, out_splits: list[int], splits: list[int], opts: Any
    ) -> Ready:
        what = asked("all_to_all", [out, tensor], into=[out])
        taken, back = flat(bits(out))
        takes = taken.split(what.split(out, out_splits, self._size))
        gives = flat(bits(tensor))[0].split(what.split(tensor, splits, self._size))
        return self._exchange(what, 0, 1, takes, gives, back, opts, [out])

    def _exchange(
        self, what: Asked, numel: int, detail: int, takes: Tensors, gives: Tensors, back: Back, opts: Any, outcome: Any
    ) -> Ready:
        into, given = [take.view(_BYTE) for take in takes], [give.view(_BYTE) for give in gives]

        def steps(fp: int) -> Steps:
            try:
                yield from self.channel.hosts.all_to_all(into, given, fp)
            except UnevenError as error:  # the same on all workers, who have exchanged nothing
                source, target = (f"worker {self.channel.side.names[rank]}" for rank in (error.source, error.target))
                width = what.dtype.itemsize
                why = f"{source} gives {error.given // width} elements to {target}, which takes {error.taken // width}"
                raise what.refuse(why, "give and take as many") from None
            write(back)

        return self._ready(what, numel, detail, steps, opts, outcome)

    def _each(self, kind: str, make: Callable[..., Ready], outs: Sequence[Any], tensors: Tensors, opts: Any) -> Ready:
        """Several collectives as one: they go in order, so the last one's end is the end of all."""
        if not tensors or len(outs) != len(tensors):
            raise UnsupportedError(
                f"{kind} of {len(tensors)} tensors into {len(outs)}", "give as many, and at least one"
            )
        ready = [make(out, tensor, opts) for out, tensor in zip(outs, tensors, strict=True)]

        def start() -> dist.Work:
            asynchronous, opts.asyncOp = opts.asyncOp, True
            works = [begin() for begin in ready]
            if not asynchronous:
                works[-1].wait()
            return works[-1]

        return start

    # -- barriers -----------------------------------------------------------------------------------------------

    def barrier(self, opts: Any = None) -> dist.Work:
        opts = opts or c10d.BarrierOptions()
        if self._nccl is not None and opts.device is not None and opts.device.type == "cuda":
            return self._nccl.barrier(opts)  # type: ignore[no-any-return]
        return self._ready(Asked("barrier", _BYTE), 0, 0, self.channel.hosts.barrier, opts, [])()

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that names the ranks which do not come within `timeout`."""
        seconds = self.channel.timeout if timeout is None else timeout.total_seconds()
        self._barriers += 1
        name = f"monitored/{self._barriers}"
        self._store.set(f"{name}/{self._rank}", "1")
        deadline, missing = time.monotonic() + seconds, list(range(self._size))
        while missing and time.monotonic() < deadline:
            missing = [rank for rank in missing if not self._store.check([f"{name}/{rank}"])]
            time.sleep(0.002 if missing else 0)
        if missing:
            named = f"Ranks {', '.join(map(str, missing))}" if wait_all_ranks else f"Rank {missing[0]}"
            raise RuntimeError(f"{named} failed to pass monitoredBarrier in {1000 * seconds:.0f} ms")

    # -- messages -----------------------------------------------------------------------------------------------

    def send(self, tensors: Tensors, rank: int, tag: int = 0) -> dist.Work:
        if tensors[0].is_cuda:
            return self.nccl().send(tensors, rank, tag)  # type: ignore[no-any-return]
        asked("send", tensors)
        with outside_inference():
            data = flat(bits(tensors[0]))[0].view(_BYTE)
        steps = self.channel.mailbox.send(data, rank, tag)
        operation = self.channel.message(f"send to worker {rank}", ("send", rank), steps, len(data))
        operation.outcome = list(tensors)
        return operation

    def recv(self, tensors: Tensors, rank: int, tag: int = 0) -> dist.Work:
        if tensors[0].is_cuda:
            return self.nccl().recv(tensors, rank, tag)  # type: ignore[no-any-return]
        return self._receive(f"recv from worker {rank}", ("recv", rank, tag), tensors, [rank], tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        others = [rank for rank in range(self._size) if rank != self._rank]
        return self._receive("recv from any worker", ("recv", -1, tag), tensors, others, tag)

    def _receive(self, name: str, queue: tuple[Any, ...], tensors: Tensors, sources: list[int], tag: int) -> dist.Work:
        asked("recv", tensors, into=tensors)
        with outside_inference():
            room, back = flat(bits(tensors[0]))
            data = room.view(_BYTE)
        source: list[int] = []

        def steps() -> Steps:
            source.append((yield from self.channel.mailbox.receive(data, sources, tag)))
            write(back)

        operation = self.channel.message(name, queue, steps(), len(data))
        operation.outcome, operation.source = list(tensors), source
        return operation

    # -- the group ----------------------------------------------------------------------------------------------

    def nccl(self) -> Any:
        """NCCL's group of the same workers, made with the first CUDA tensor."""
        if self._nccl is None:
            offer_nccl_interface(interface_of(self.channel.hosts.address))
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(days=7)
            self._nccl = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", self._store), self._rank, self._size, options)
        return self._nccl

    def abort(self) -> None:
        self.channel.interrupt(PeerLostError("the group was aborted", "make a new one"))
        if self._nccl is not None:
            self._nccl.abort()
        self.shutdown()

    def shutdown(self) -> None:
        self.channel.close()
        self._nccl = None

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return "paceline"

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description

    def _get_sequence_number_for_group(self) -> int:
        return self.channel.sequence

    def _set_sequence_number_for_group(self) -> None:
        self.channel.sequence = 0

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)
    getRank, getSize, getBackendName = rank, size, name  # noqa: N815
    # Names that older and newer parts of torch use for the same.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _leave_alone(kind: type) -> None:
    """Keeps ``torch.compile`` out of a class's methods: it stumbles over classes derived from torch's compiled ones."""
    from torch._C._dynamo import eval_frame

    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    for method in vars(kind).values():
        while inspect.isfunction(method):
            method._torchdynamo_disable = True  # type: ignore[attr-defined]
            eval_frame.set_code_exec_strategy(method.__code__, skip)
            method = getattr(method, "__wrapped__", None)


_leave_alone(ProcessGroup)
_leave_alone(Operation)
