"""`paceline`, a backend of torch.distributed: ``init_process_group("paceline")`` and all of torch's parts run over it.

CPU tensors travel over our own channel, CUDA tensors over NCCL. Here c10d's calls are only taken apart: into flat
tensors, and what to copy where at the end.
"""
# Torch's stubs also offer its classes' older calling conventions, which none of its parts uses.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from paceline.comm.channel import Channel
from paceline.comm.engine import Operation, Steps
from paceline.comm.hosts import interface_of
from paceline.comm.shared import Arena
from paceline.errors import PeerLostError
from paceline.world import offer_nccl_interface

Op: Any = dist.ReduceOp.RedOpType
REDUCTIONS: dict[Any, Any] = {
    Op.SUM: torch.add,
    Op.AVG: torch.add,
    Op.PRODUCT: torch.mul,
    Op.MIN: torch.minimum,
    Op.MAX: torch.maximum,
    Op.BAND: torch.bitwise_and,
    Op.BOR: torch.bitwise_or,
    Op.BXOR: torch.bitwise_xor,
}
Tensors = Sequence[torch.Tensor]
Back = list[tuple[torch.Tensor, torch.Tensor]]  # what to copy where at the end
_BYTE = torch.uint8


def _collective(options: Any) -> Callable[[Callable[..., dist.Work]], Callable[..., dist.Work]]:
    """A collective whose last argument is of the class `options`. Where tensors are CUDA's, NCCL does it."""

    def wrap(method: Callable[..., dist.Work]) -> Callable[..., dist.Work]:
        arguments = method.__code__.co_argcount - 2

        @functools.wraps(method)
        def call(self: ProcessGroup, *given: Any, opts: Any = None) -> dist.Work:
            tensors = given[:arguments]
            opts = opts or (given[arguments] if len(given) > arguments else options())
            if any(_are_cuda(tensor) for tensor in tensors):
                return getattr(self.nccl(), method.__name__)(*tensors, opts)  # type: ignore[no-any-return]
            return method(self, *tensors, opts)

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

    def _start(self, kind: str, like: torch.Tensor, detail: int, make: Any, opts: Any, outcome: Any) -> Operation:
        operation = self.channel.start(kind, like.numel(), like.dtype, detail, make, opts.asyncOp)
        operation.outcome = outcome
        return operation

    # -- reductions ---------------------------------------------------------------------------------------------

    @_collective(c10d.AllreduceOptions)
    def allreduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        (tensor,) = tensors
        if tensor.is_sparse:
            return self._sparse_all_reduce(tensor, opts)
        flat, back = _flat(_real(tensor))
        return self._all_reduce(flat, back, opts, list(tensors))

    @_collective(c10d.AllreduceCoalescedOptions)
    def allreduce_coalesced(self, tensors: Tensors, opts: Any) -> dist.Work:
        targets = [_real(tensor).detach() for tensor in tensors]
        flat = torch.cat([target.reshape(-1) for target in targets])
        parts = flat.split([target.numel() for target in targets])
        back = [(target, part.view(target.shape)) for target, part in zip(targets, parts, strict=True)]
        return self._all_reduce(flat, back, opts, list(tensors))

    @_collective(c10d.ReduceOptions)
    def reduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        target = _real(tensors[0]).detach()
        whole = target.reshape(-1).clone()
        back = [(target, whole.view(target.shape))] if self._rank == opts.rootRank else []
        return self._all_reduce(whole, back, opts, list(tensors), opts.rootRank + 1)

    def _all_reduce(self, flat: torch.Tensor, back: Back, opts: Any, outcome: Any, root: int = 0) -> dist.Work:
        op, reduction = _reduction(opts, flat.dtype)
        arena = self.channel.in_arena(flat)

        def steps(fp: int) -> Steps:
            yield from self.channel.hosts.all_reduce(flat, _summed(op), reduction, fp, arena)
            self._finish(op, flat, back)

        detail = int(op) * (self._size + 1) + root
        return self._start("reduce" if root else "all_reduce", flat, detail, steps, opts, outcome)

    def _finish(self, op: Any, flat: torch.Tensor, back: Back) -> None:
        if op == Op.AVG:
            flat.div_(self._size)
        _write(back)

    def _sparse_all_reduce(self, tensor: torch.Tensor, opts: Any) -> dist.Work:
        """The sum of sparse tensors: everybody's entries side by side, coalesced."""
        if opts.reduceOp.op != Op.SUM:
            raise RuntimeError("sparse tensors can only be summed")
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

        return self._start("all_reduce (sparse)", mine, 0, steps, opts, [tensor])

    @_collective(c10d.ReduceScatterOptions)
    def reduce_scatter(self, outs: Tensors, tensors: Sequence[list[torch.Tensor]], opts: Any) -> dist.Work:
        flat, back = _flat(_real(outs[0]))
        parts = [_flat(_real(part))[0] for part in tensors[0]]
        return self._reduce_scatter(flat, parts, back, opts, list(outs))

    @_collective(c10d.ReduceScatterOptions)
    def reduce_scatter_single(self, out: torch.Tensor, tensor: torch.Tensor, opts: Any) -> dist.Work:
        flat, back = _flat(_real(out))
        whole, _ = _flat(_real(tensor))
        parts = _rows(whole, self._size)
        own = parts[self._rank].data_ptr() == flat.data_ptr()
        arena = self.channel.in_arena(whole) if own else None
        return self._reduce_scatter(flat, parts, back, opts, [out], arena)

    def _reduce_scatter(
        self, flat: torch.Tensor, parts: Tensors, back: Back, opts: Any, outcome: Any, arena: Arena | None = None
    ) -> Operation:
        op, reduction = _reduction(opts, flat.dtype)
        lengths = [len(part) for part in parts]
        _fits("reduce_scatter", flat, lengths, self._rank)
        uneven = torch.cat(list(parts)) if len(set(lengths)) > 1 else None

        def steps(fp: int) -> Steps:
            if uneven is None:
                yield from self.channel.hosts.reduce_scatter(flat, parts, _summed(op), reduction, fp, arena)
            else:
                yield from self.channel.hosts.all_reduce(uneven, _summed(op), reduction, fp)
                flat.copy_(uneven.split(lengths)[self._rank])
            self._finish(op, flat, back)

        return self._start("reduce_scatter", flat if uneven is None else uneven, int(op), steps, opts, outcome)

    @_collective(c10d.ReduceScatterOptions)
    def reduce_scatter_single_coalesced(self, outs: Tensors, tensors: Tensors, opts: Any) -> dist.Work:
        return self._each(self.reduce_scatter_single, zip(outs, tensors, strict=True), opts)

    # -- what only moves ----------------------------------------------------------------------------------------

    @_collective(c10d.BroadcastOptions)
    def broadcast(self, tensors: Tensors, opts: Any) -> dist.Work:
        flat, back = _flat(tensors[0])
        root = opts.rootRank

        def steps(fp: int) -> Steps:
            yield from self.channel.hosts.broadcast(flat, root, fp)
            _write(back)

        return self._start("broadcast", flat, root, steps, opts, list(tensors))

    @_collective(c10d.AllgatherOptions)
    def allgather(self, outs: Sequence[list[torch.Tensor]], tensors: Tensors, opts: Any) -> dist.Work:
        return self._gather("all_gather", outs[0], tensors[0], opts, list(outs))

    @_collective(c10d.AllgatherOptions)
    def all_gather_single(self, out: torch.Tensor, tensor: torch.Tensor, opts: Any) -> dist.Work:
        flat, back = _flat(out)
        return self._gather("all_gather", _rows(flat, self._size), tensor, opts, [out], back=back)

    @_collective(c10d.AllgatherOptions)
    def allgather_coalesced(self, outs: Sequence[list[torch.Tensor]], tensors: Tensors, opts: Any) -> dist.Work:
        rows = [[[out[number] for out in outs]] for number in range(len(tensors))]  # `outs` has a list per rank
        return self._each(self.allgather, zip(rows, ([tensor] for tensor in tensors), strict=True), opts)

    @_collective(c10d.AllgatherOptions)
    def all_gather_single_coalesced(self, outs: Tensors, tensors: Tensors, opts: Any) -> dist.Work:
        return self._each(self.all_gather_single, zip(outs, tensors, strict=True), opts)

    @_collective(c10d.GatherOptions)
    def gather(self, outs: Sequence[list[torch.Tensor]], tensors: Tensors, opts: Any) -> dist.Work:
        return self._gather("gather", outs[0] if outs else [], tensors[0], opts, list(outs), opts.rootRank)

    def _gather(
        self,
        kind: str,
        outs: Tensors,
        tensor: torch.Tensor,
        opts: Any,
        outcome: Any,
        root: int = -1,
        back: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
    ) -> dist.Work:
        """Everybody's tensor into `outs`, which is empty on workers that only give."""
        flat, _ = _flat(tensor)
        pairs = [_flat(out) for out in outs]
        lengths = [len(out) for out, _ in pairs]
        back = [*(pair for _, own in pairs for pair in own), *back]
        if lengths:
            _fits(kind, flat, lengths, self._rank, even=root >= 0)  # a root alone knows the lengths
        if len(set(lengths)) > 1:
            takes, gives = [out.view(_BYTE) for out, _ in pairs], [flat.view(_BYTE)] * self._size
            whole = torch.empty(sum(lengths), dtype=flat.dtype, device="meta")
            return self._exchange(kind, whole, root, takes, gives, back, opts, outcome)

        def steps(fp: int) -> Steps:
            yield from self.channel.hosts.all_gather([out for out, _ in pairs], flat, fp)
            _write(back)

        return self._start(kind, flat, root, steps, opts, outcome)

    @_collective(c10d.ScatterOptions)
    def scatter(self, outs: Tensors, tensors: Sequence[list[torch.Tensor]], opts: Any) -> dist.Work:
        """An all-to-all where only the root has something to give."""
        flat, back = _flat(outs[0])
        none = torch.empty(0, dtype=_BYTE)
        gives = [_flat(part)[0].view(_BYTE) for part in tensors[0]] if tensors else [none] * self._size
        takes = [flat.view(_BYTE) if rank == opts.rootRank else none for rank in range(self._size)]
        return self._exchange("scatter", flat, opts.rootRank, takes, gives, back, opts, list(outs))

    @_collective(c10d.AllToAllOptions)
    def alltoall(self, outs: Tensors, tensors: Tensors, opts: Any) -> dist.Work:
        pairs = [_flat(out) for out in outs]
        takes = [out.view(_BYTE) for out, _ in pairs]
        gives = [_flat(part)[0].view(_BYTE) for part in tensors]
        back = [pair for _, own in pairs for pair in own]
        return self._exchange(
            "all_to_all", torch.empty(0, dtype=outs[0].dtype), 0, takes, gives, back, opts, list(outs)
        )

    def all_to_all_single(
        self, out: torch.Tensor, tensor: torch.Tensor, out_splits: list[int], splits: list[int], opts: Any = None
    ) -> dist.Work:
        opts = opts or c10d.AllToAllOptions()
        if tensor.is_cuda:
            return self.nccl().all_to_all_single(out, tensor, out_splits, splits, opts)  # type: ignore[no-any-return]
        flat, back = _flat(out)
        gives = [
            _flat(part)[0].view(_BYTE) for part in (tensor.split(splits) if splits else _chunks(tensor, self._size))
        ]
        shares = out.split(out_splits) if out_splits else _chunks(out, self._size)
        takes = [part.view(_BYTE) for part in flat.split([share.numel() for share in shares])]
        if len(takes) != self._size or len(gives) != self._size:
            raise ValueError(f"all_to_all of {len(gives)} parts into {len(takes)} among {self._size} workers")
        return self._exchange("all_to_all", torch.empty(0, dtype=out.dtype), 1, takes, gives, back, opts, [out])

    def _exchange(
        self,
        kind: str,
        like: torch.Tensor,
        detail: int,
        takes: Tensors,
        gives: Tensors,
        back: Back,
        opts: Any,
        outcome: Any,
    ) -> dist.Work:
        def steps(fp: int) -> Steps:
            yield from self.channel.hosts.all_to_all(takes, gives, fp)
            _write(back)

        return self._start(kind, like, detail, steps, opts, outcome)

    def _each(self, method: Callable[..., dist.Work], pairs: Iterable[tuple[Any, Any]], opts: Any) -> dist.Work:
        """Several collectives as one: they go in order, so the last one's end is the end of all."""
        asynchronous, opts.asyncOp = opts.asyncOp, True
        works = [method(out, tensor, opts) for out, tensor in pairs]
        if not asynchronous:
            works[-1].wait()
        return works[-1]

    # -- barriers -----------------------------------------------------------------------------------------------

    def barrier(self, opts: Any = None) -> dist.Work:
        opts = opts or c10d.BarrierOptions()
        if self._nccl is not None and opts.device is not None and opts.device.type == "cuda":
            return self._nccl.barrier(opts)  # type: ignore[no-any-return]
        return self._start("barrier", torch.empty(0, dtype=_BYTE), 0, self.channel.hosts.barrier, opts, [])

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
        data = _flat(tensors[0])[0].view(_BYTE)
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
        flat, back = _flat(tensors[0])
        source: list[int] = []

        def steps() -> Steps:
            source.append((yield from self.channel.mailbox.receive(flat.view(_BYTE), sources, tag)))
            _write(back)

        operation = self.channel.message(name, queue, steps(), flat.nbytes)
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


def _reduction(opts: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    op = opts.reduceOp.op
    if op not in REDUCTIONS:
        raise RuntimeError(f"{op} is not supported by the paceline backend on CPU")
    if op in (Op.BAND, Op.BOR, Op.BXOR) and dtype.is_floating_point:
        raise RuntimeError(f"{op} needs whole numbers, not {dtype}")
    return op, REDUCTIONS[op]


def _summed(op: Any) -> Any:
    """What gloo is asked for: a mean is divided here."""
    return dist.ReduceOp(Op.SUM if op == Op.AVG else op)


def _flat(tensor: torch.Tensor) -> tuple[torch.Tensor, Back]:
    """A flat contiguous tensor of the same elements, and what to copy back at the end unless it is the same memory."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor.view(-1), []
    dense = tensor.contiguous()
    return dense.view(-1), [(tensor, dense)]


def _write(back: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for target, source in back:
        target.copy_(source)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor


def _fits(kind: str, flat: torch.Tensor, lengths: list[int], rank: int, even: bool = False) -> None:
    """A worker's own tensor must be as long as its part of a list, and where they are `even`, as all parts."""
    if lengths[rank : rank + 1] != [len(flat)] or (even and len(set(lengths)) > 1):
        raise ValueError(f"{kind} of {len(flat)} elements with tensors of {', '.join(map(str, lengths))}")


def _rows(flat: torch.Tensor, count: int) -> list[torch.Tensor]:
    """A flat tensor in `count` equal stretches."""
    if len(flat) % count:
        raise ValueError(f"{len(flat)} elements do not divide among {count} workers")
    return list(flat.view(count, -1).unbind(0))


def _chunks(tensor: torch.Tensor, count: int) -> Tensors:
    if len(tensor) % count:
        raise ValueError(f"{len(tensor)} rows do not divide among {count} workers")
    return tensor.split(max(1, len(tensor) // count)) if len(tensor) else [tensor] * count
