"""The `paceline` backend of torch.distributed.

CPU tensors travel over our own channel, CUDA tensors over NCCL. Here c10d's calls are only taken apart: into flat
tensors, and what to copy where at the end. What cannot be done is refused before anything is sent (c10d_arguments.py).
"""
# Torch's stubs also offer its classes' older calling conventions, which none of its parts uses.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from paceline.base.text import plural
from paceline.comm.c10d_arguments import (
    Back,
    CollectiveRequest,
    Op,
    Reduction,
    Tensors,
    bits,
    check_reduction,
    check_request,
    check_sparse,
    flat,
    numbers,
    outside_inference,
    write,
)
from paceline.comm.host_staging import carry
from paceline.comm.progress_engine import Operation, Steps
from paceline.comm.shm_collectives import UnevenError
from paceline.comm.torch_private import keep_out_of_compile
from paceline.comm.transport import CallOptions, Transport
from paceline.errors import UnsupportedError

Ready = Callable[[], dist.Work]  # starts a collective whose arguments have been checked
_BYTE = torch.uint8


def _collective(options: Any) -> Callable[[Callable[..., Ready]], Callable[..., dist.Work]]:
    """Decorates a collective whose last argument is of the class `options`. NCCL runs those on CUDA tensors."""

    def wrap(method: Callable[..., Ready]) -> Callable[..., dist.Work]:
        arguments = method.__code__.co_argcount - 2

        @wraps(method)
        def call(self: ProcessGroup, *given: Any, opts: Any = None) -> dist.Work:
            tensors = given[:arguments]
            opts = opts or (given[arguments] if len(given) > arguments else options())
            device = next(filter(None, map(_cuda, tensors)), None)
            if device is not None and self.channel.nccl.shares(device):
                return carry(lambda *copies: method(self, *copies, opts), tensors)
            if device is not None:
                return getattr(self.channel.nccl.group, method.__name__)(*tensors, opts)  # type: ignore[no-any-return]
            with outside_inference():
                return method(self, *tensors, opts)()

        return call

    return wrap


def _cuda(tensors: Any) -> torch.device | None:
    """The device of the first CUDA tensor in nested lists; None if they hold none."""
    while isinstance(tensors, (list, tuple)) and tensors:
        tensors = tensors[0]
    return tensors.device if isinstance(tensors, torch.Tensor) and tensors.is_cuda else None


class ProcessGroup(dist.ProcessGroup):
    """One group of workers, over a `channel`: the object whose methods torch calls."""

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta, channel: Transport | None = None
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._rank, self._size = rank, size
        self._name = self._description = ""
        self.meet(store, channel or Transport(store, rank, size, timeout))

    def meet(self, store: dist.Store, channel: Transport) -> None:
        """Connects the same workers through another channel, at the start and after `abort`."""
        self.channel, self._store = channel, store
        self._barriers = 0

    # -- reductions ---------------------------------------------------------------------------------------------

    @_collective(c10d.AllreduceOptions)
    def allreduce(self, tensors: Tensors, opts: Any) -> Ready:
        """Reduces a tensor in place on all workers."""
        (tensor,) = tensors
        if tensor.is_sparse:
            return self._sparse_all_reduce(tensor, opts)
        request, reduction = check_reduction("all_reduce", tensors, opts.reduceOp.op, into=tensors)
        return self._all_reduce(request, reduction, *flat(numbers(tensor)), opts, list(tensors))

    @_collective(c10d.AllreduceCoalescedOptions)
    def allreduce_coalesced(self, tensors: Tensors, opts: Any) -> Ready:
        """Reduces several tensors in place on all workers, in one collective."""
        request, reduction = check_reduction("all_reduce", tensors, opts.reduceOp.op, into=tensors)
        targets = [numbers(tensor) for tensor in tensors]
        joined = torch.cat([target.reshape(-1) for target in targets])
        parts = joined.split([target.numel() for target in targets])
        back = [(target, part.view(target.shape)) for target, part in zip(targets, parts, strict=True)]
        return self._all_reduce(request, reduction, joined, back, opts, list(tensors))

    @_collective(c10d.ReduceOptions)
    def reduce(self, tensors: Tensors, opts: Any) -> Ready:
        """Reduces a tensor in place on the root alone."""
        request, reduction = check_reduction("reduce", tensors, opts.reduceOp.op, into=tensors)
        target = numbers(tensors[0])
        copy = target.reshape(-1).clone()
        back = [(target, copy.view(target.shape))] if self._rank == opts.rootRank else []
        return self._all_reduce(request, reduction, copy, back, opts, list(tensors), opts.rootRank)

    def _all_reduce(
        self,
        request: CollectiveRequest,
        reduction: Reduction,
        data: torch.Tensor,
        back: Back,
        opts: Any,
        outcome: Any,
        root: int = -1,
    ) -> Ready:
        then = partial(self._finish, reduction, data, back)
        return lambda: self.channel.all_reduce(data, reduction, request, CallOptions(then, opts.asyncOp, outcome), root)

    def _finish(self, reduction: Reduction, data: torch.Tensor, back: Back) -> None:
        if reduction.op == Op.AVG:
            data.div_(self._size)
        write(back)

    def _sparse_all_reduce(self, tensor: torch.Tensor, opts: Any) -> Ready:
        """Sums sparse tensors: gathers the entries of all workers and coalesces them."""
        request = check_sparse("sparse all_reduce", tensor, opts.reduceOp.op)
        local, hosts = tensor.detach().coalesce(), self.channel.hosts

        def steps(fp: int) -> Steps:
            parts = local.indices().t().contiguous(), local.values()
            counts = [torch.empty(1, dtype=torch.int64) for _ in range(self._size)]
            yield from hosts.all_gather(counts, torch.tensor([len(parts[0])], dtype=torch.int64), fp)
            most = max(int(count) for count in counts)
            gathered = []
            for part in parts:
                padded = torch.zeros(most, *part.shape[1:], dtype=part.dtype)
                padded[: len(part)] = part
                outs = [torch.empty_like(padded) for _ in counts]
                yield from hosts.all_gather([out.view(-1) for out in outs], padded.view(-1), fp)
                gathered.append(torch.cat([out[: int(count)] for out, count in zip(outs, counts, strict=True)]))
            with torch.no_grad():
                tensor.copy_(torch.sparse_coo_tensor(gathered[0].t(), gathered[1], local.shape).coalesce())

        return lambda: self.channel.start(request, local.numel(), 0, steps, CallOptions(None, opts.asyncOp, [tensor]))

    @_collective(c10d.ReduceScatterOptions)
    def reduce_scatter(self, outs: Tensors, tensors: Sequence[list[torch.Tensor]], opts: Any) -> Ready:
        """Reduces a list of tensors; each worker gets the one at its rank."""
        request, reduction = check_reduction("reduce_scatter", [*outs, *tensors[0]], opts.reduceOp.op, into=outs)
        request.one_each(tensors[0], self._size)
        out, back = flat(numbers(outs[0]))
        parts = [flat(numbers(part))[0] for part in tensors[0]]
        return self._reduce_scatter(request, reduction, out, parts, back, opts, list(outs))

    @_collective(c10d.ReduceScatterOptions)
    def reduce_scatter_single(self, out: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Ready:
        """Reduces a tensor; each worker gets the rows at its rank."""
        return self._reduce_scatter_single(out, tensor, opts)

    @_collective(c10d.ReduceScatterOptions)
    def reduce_scatter_single_coalesced(self, outs: Tensors, tensors: Tensors, opts: Any) -> Ready:
        """Reduces several tensors as `reduce_scatter_single` does."""
        return self._each("reduce_scatter", self._reduce_scatter_single, outs, tensors, opts)

    def _reduce_scatter_single(self, out: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Ready:
        request, reduction = check_reduction("reduce_scatter", [out, tensor], opts.reduceOp.op, into=[out])
        local, back = flat(numbers(out))
        full, _ = flat(numbers(tensor))
        parts = request.rows(full, local, self._size)
        is_in_place = parts[self._rank].data_ptr() == local.data_ptr()
        return self._reduce_scatter(request, reduction, local, parts, back, opts, [out], full if is_in_place else None)

    def _reduce_scatter(
        self,
        request: CollectiveRequest,
        reduction: Reduction,
        out: torch.Tensor,
        parts: Tensors,
        back: Back,
        opts: Any,
        outcome: Any,
        full: torch.Tensor | None = None,
    ) -> Ready:
        lengths = [len(part) for part in parts]
        request.fits(len(out), lengths[self._rank])
        then = partial(self._finish, reduction, out, back)
        if len(set(lengths)) == 1:
            return lambda: self.channel.reduce_scatter(
                out, parts, reduction, request, CallOptions(then, opts.asyncOp, outcome), full
            )
        uneven = torch.cat(list(parts))

        def steps(fp: int) -> Steps:
            yield from self.channel.hosts.all_reduce(uneven, reduction, fp)
            out.copy_(uneven.split(lengths)[self._rank])

        options = CallOptions(then, opts.asyncOp, outcome)
        return lambda: self.channel.start(request, len(uneven), int(reduction.op), steps, options)

    # -- what only moves ----------------------------------------------------------------------------------------

    @_collective(c10d.BroadcastOptions)
    def broadcast(self, tensors: Tensors, opts: Any) -> Ready:
        """Overwrites a tensor on all workers with that of the root."""
        request = check_request("broadcast", tensors, into=tensors)
        data, back = flat(bits(tensors[0]))
        options = CallOptions(partial(write, back), opts.asyncOp, list(tensors))
        return lambda: self.channel.broadcast(data, opts.rootRank, request, options)

    @_collective(c10d.AllgatherOptions)
    def allgather(self, outs: Sequence[list[torch.Tensor]], tensors: Tensors, opts: Any) -> Ready:
        """Gathers the tensor of all workers into a list."""
        return self._all_gather(outs[0], tensors[0], opts)

    @_collective(c10d.AllgatherOptions)
    def all_gather_single(self, out: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Ready:
        """Gathers the tensor of all workers into the rows of one tensor."""
        return self._all_gather_single(out, tensor, opts)

    @_collective(c10d.AllgatherOptions)
    def allgather_coalesced(self, outs: Sequence[list[torch.Tensor]], tensors: Tensors, opts: Any) -> Ready:
        """Gathers the tensors of all workers into a list per rank."""
        longest = max(map(len, outs), default=0)  # `outs` has a list per rank
        rows = [[out[number] for out in outs if number < len(out)] for number in range(longest)]
        return self._each("all_gather", self._all_gather, rows, tensors, opts)

    @_collective(c10d.AllgatherOptions)
    def all_gather_single_coalesced(self, outs: Tensors, tensors: Tensors, opts: Any) -> Ready:
        """Gathers several tensors as `all_gather_single` does."""
        return self._each("all_gather", self._all_gather_single, outs, tensors, opts)

    def _all_gather(self, outs: list[torch.Tensor], tensor: torch.Tensor, opts: Any) -> Ready:
        request = check_request("all_gather", [*outs, tensor], into=outs)
        request.one_each(outs, self._size)
        return self._gather(request, [flat(bits(out)) for out in outs], tensor, opts, [outs])

    def _all_gather_single(self, out: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Ready:
        request = check_request("all_gather", [out, tensor], into=[out])
        full, back = flat(bits(out))
        rows = request.rows(full, flat(bits(tensor))[0], self._size)
        pairs: list[tuple[torch.Tensor, Back]] = [(row, []) for row in rows]
        pairs[-1] = rows[-1], back
        return self._gather(request, pairs, tensor, opts, [out])

    @_collective(c10d.GatherOptions)
    def gather(self, outs: Sequence[list[torch.Tensor]], tensors: Tensors, opts: Any) -> Ready:
        """Gathers the tensor of all workers into a list on the root."""
        local_outs = outs[0] if outs else []
        request = check_request("gather", [*local_outs, *tensors], into=local_outs)
        if self._rank == opts.rootRank:
            request.one_each(local_outs, self._size)
            for out in local_outs:  # the others do not know the list
                request.fits(tensors[0].numel(), out.numel())
        return self._gather(
            request, [flat(bits(out)) for out in local_outs], tensors[0], opts, list(outs), opts.rootRank
        )

    def _gather(
        self,
        request: CollectiveRequest,
        pairs: Sequence[tuple[torch.Tensor, Back]],
        tensor: torch.Tensor,
        opts: Any,
        outcome: Any,
        root: int = -1,
    ) -> Ready:
        """Gathers the tensor of all workers into the tensors of `pairs`; workers that only give have none."""
        data, _ = flat(bits(tensor))
        outs, back = [out for out, _ in pairs], [pair for _, copies in pairs for pair in copies]
        if outs:
            request.fits(len(data), len(outs[self._rank]))
        if len({len(out) for out in outs}) > 1:
            numel = sum(map(len, outs))
            return self._exchange(request, numel, root, outs, [data] * self._size, back, opts, outcome)
        options = CallOptions(partial(write, back), opts.asyncOp, outcome)
        return lambda: self.channel.all_gather(outs, data, request, options, root)

    @_collective(c10d.GatherOptions)
    def gather_single(self, out: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Ready:
        """Gathers the tensor of all workers into one tensor, which is empty on all workers but the root.

        Torch 2.15 and newer call it.
        """
        request = check_request("gather", [out, tensor], into=[out])
        if self._rank != opts.rootRank:
            return self._gather(request, [], tensor, opts, [out], opts.rootRank)
        full, back = flat(bits(out))
        rows = request.rows(full, flat(bits(tensor))[0], self._size)
        pairs: list[tuple[torch.Tensor, Back]] = [(row, []) for row in rows]
        pairs[-1] = rows[-1], back
        return self._gather(request, pairs, tensor, opts, [out], opts.rootRank)

    @_collective(c10d.ScatterOptions)
    def scatter(self, outs: Tensors, tensors: Sequence[list[torch.Tensor]], opts: Any) -> Ready:
        """Sends each worker a tensor of the root's list: an all-to-all where only the root has something to give."""
        given = tensors[0] if tensors else []
        request = check_request("scatter", [*outs, *given], into=outs)
        if self._rank == opts.rootRank:
            request.one_each(given, self._size)
        out, back = flat(bits(outs[0]))
        none = out[:0]
        gives = [flat(bits(part))[0] for part in given] or [none] * self._size
        takes = [out if rank == opts.rootRank else none for rank in range(self._size)]
        return self._exchange(request, len(out), opts.rootRank, takes, gives, back, opts, list(outs))

    @_collective(c10d.AllToAllOptions)
    def alltoall(self, outs: Tensors, tensors: Tensors, opts: Any) -> Ready:
        """Sends each worker the tensor at its rank, and receives one from each."""
        request = check_request("all_to_all", [*outs, *tensors], into=outs)
        for parts in (outs, tensors):
            request.one_each(parts, self._size)
        pairs = [flat(bits(out)) for out in outs]
        gives = [flat(bits(part))[0] for part in tensors]
        back = [pair for _, copies in pairs for pair in copies]
        return self._exchange(request, 0, 0, [out for out, _ in pairs], gives, back, opts, list(outs))

    @_collective(c10d.AllToAllOptions)
    def all_to_all_single(
        self, out: torch.Tensor, tensor: torch.Tensor, out_splits: list[int], splits: list[int], opts: Any
    ) -> Ready:
        """Sends each worker its rows of a tensor, and receives rows from each."""
        request = check_request("all_to_all", [out, tensor], into=[out])
        taken, back = flat(bits(out))
        takes = taken.split(request.split(out, out_splits, self._size))
        gives = flat(bits(tensor))[0].split(request.split(tensor, splits, self._size))
        return self._exchange(request, 0, 1, takes, gives, back, opts, [out])

    def _exchange(
        self,
        request: CollectiveRequest,
        numel: int,
        detail: int,
        takes: Tensors,
        gives: Tensors,
        back: Back,
        opts: Any,
        outcome: Any,
    ) -> Ready:
        into, given = [take.view(_BYTE) for take in takes], [give.view(_BYTE) for give in gives]

        def steps(fp: int) -> Steps:
            try:
                yield from self.channel.hosts.all_to_all(into, given, fp)
            except UnevenError as error:  # the same on all workers, who have exchanged nothing
                source, target = (f"worker {self.channel.side.names[rank]}" for rank in (error.source, error.target))
                width = request.dtype.itemsize
                count = plural(error.given // width, "element")
                why = f"{source} sends {count} to {target}, which expects {error.taken // width}"
                raise request.refuse(why, "use the same split sizes on both workers") from None

        options = CallOptions(partial(write, back), opts.asyncOp, outcome)
        return lambda: self.channel.start(request, numel, detail, steps, options)

    def _each(self, kind: str, make: Callable[..., Ready], outs: Sequence[Any], tensors: Tensors, opts: Any) -> Ready:
        """Runs several collectives as one. They go in order, so the last one's end is the end of all."""
        if not tensors or len(outs) != len(tensors):
            raise UnsupportedError(
                f"{kind} got {plural(len(tensors), 'input')} and {plural(len(outs), 'output')}",
                "pass as many outputs as inputs, and at least one",
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
        """Waits until all workers have come to it."""
        opts = opts or c10d.BarrierOptions()
        nccl = self.channel.nccl
        if nccl.made and opts.device is not None and opts.device.type == "cuda":
            return nccl.group.barrier(opts)  # type: ignore[no-any-return]
        return self.channel.barrier(CallOptions(None, opts.asyncOp, []))

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

    def _over_nccl(self, tensor: torch.Tensor, rank: int) -> bool:
        return tensor.is_cuda and not self.channel.nccl.shares(tensor.device, rank)

    def send(self, tensors: Tensors, rank: int, tag: int = 0) -> dist.Work:
        """Sends a tensor to worker `rank`."""
        if self._over_nccl(tensors[0], rank):
            return self.channel.nccl.group.send(tensors, rank, tag)  # type: ignore[no-any-return]
        check_request("send", tensors)
        with outside_inference():
            data = flat(bits(tensors[0].cpu()))[0].view(_BYTE)
        operation = self.channel.send(data, rank, tag)
        operation.outcome = list(tensors)
        return operation

    def recv(self, tensors: Tensors, rank: int, tag: int = 0) -> dist.Work:
        """Receives a tensor from worker `rank`."""
        if self._over_nccl(tensors[0], rank):
            return self.channel.nccl.group.recv(tensors, rank, tag)  # type: ignore[no-any-return]
        return self._receive(tensors, rank, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        """Receives a tensor from any worker."""
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: Tensors, rank: int | None, tag: int) -> dist.Work:
        check_request("recv", tensors, into=tensors)
        with outside_inference():
            room, back = flat(bits(tensors[0]))
            if room.is_cuda:
                host = torch.empty_like(room, device="cpu")
                room, back = host, [(room, host), *back]
            operation = self.channel.receive(room.view(_BYTE), rank, tag, partial(write, back))
        operation.outcome = list(tensors)
        return operation

    # -- the group ----------------------------------------------------------------------------------------------

    def get_backend(self, device: torch.device) -> ProcessGroup:
        """The backend for tensors on `device`. A group of torch's own class has one registered per device; a class
        derived from it, such as this one, has none registered and is its own backend.
        """
        return self

    # Optional features of a backend. Torch asks for them before it uses them, and takes another way without them.
    supports_coalescing = supports_splitting = supports_shrinking = False
    supports_reconfigure = supports_window = supports_abort_hooks = supports_completion_hooks = False
    _supports_time_estimate = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether the backend has memory of its own to give for tensors, as NCCL has."""
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets how long the collectives of this group wait from now on."""
        self.channel.timeout = timeout.total_seconds()

    def abort(self) -> None:
        """Ends the group for good, and all of its collectives."""
        self.channel.abort()

    def shutdown(self) -> None:
        """Closes the group's connections."""
        self.channel.close()

    def rank(self) -> int:
        """This worker's rank."""
        return self._rank

    def size(self) -> int:
        """The number of workers."""
        return self._size

    def name(self) -> str:
        """The backend's name."""
        return "paceline"

    def getGroupName(self) -> str:  # noqa: N802
        """The name that torch gave the group."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Sets the name that torch gives the group."""
        self._name, self.channel.label = name, f"torch {name}"

    def getGroupDesc(self) -> str:  # noqa: N802
        """The description that torch gave the group."""
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Sets the description that torch gives the group."""
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
    _get_backend = get_backend
    gather_into_tensor = gather_single
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


keep_out_of_compile(ProcessGroup)
keep_out_of_compile(Operation)
