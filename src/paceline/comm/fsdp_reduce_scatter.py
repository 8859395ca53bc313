"""Reduce-scatters gradients block by block during backward (ZeRO 2 and 3).

What a block's parameters got in one micro-batch is scattered as soon as it is whole and added up where it belongs; the
memory that it travelled in is the next block's. So no more whole gradients exist at a time than are under way.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from paceline.base.sharding import RowShards
from paceline.comm.checked_collectives import TransferChecks
from paceline.comm.communicator import Group
from paceline.comm.gradient_buckets import Bucket, Buckets, error_in_two_parts
from paceline.comm.gradient_memory import Allocate, Wires, lay_out, zeros
from paceline.errors import UsageError

UNDER_WAY = 1  # blocks, before the backward waits for them


@dataclass
class _Stage:
    """Memory for one block's gradients in one micro-batch, by shard and level; `written` has the parameters that have
    one.
    """

    flat: torch.Tensor
    wires: list[Wires]
    taken: bool = False  # by a block that has not arrived yet
    written: set[int] = field(default_factory=set)


@dataclass
class _Pool:
    """The stages of blocks that are laid out alike, which use them in turn, in the same order on all workers.

    `used` counts the blocks before this micro-batch, `gone` those that have left in it.
    """

    stages: list[_Stage]
    blocks: int = 0
    used: int = 0
    gone: int = 0


@dataclass
class _Block:
    """The numbers of the parameters whose gradients travel together; `turn` is its position in its pool.

    It has run in `calls` that backward has yet to pass, or backward has `left` it.
    """

    members: list[int]
    pool: _Pool
    turn: int
    landed: set[int] = field(default_factory=set)
    stage: _Stage | None = None
    calls: int = 0
    left: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether no more gradients come for it in this micro-batch."""
        return self.left or len(self.landed) == len(self.members)

    @property
    def departure_stage(self) -> _Stage:
        """The stage that it is sent from."""
        return self.pool.stages[(self.pool.used + self.turn) % len(self.pool.stages)]


class FsdpReduceScatter:
    """A gradient sink (gradient_sinks.py) that takes full gradients of parameters of these `shapes` and sums this
    worker's rows of each in the buckets `grad_buffers`.

    `blocks` has every parameter's number once; blocks leave in this order on all workers of `group`. Blocks that are
    laid out alike share memory. `ended` is called at the end of each backward, before the remaining blocks leave; what
    it starts is waited for afterwards. Unless it is `patient`, a backward never waits for the gradients of other
    workers, which may wait for it in a gather: it allocates more memory instead.
    """

    def __init__(
        self,
        grad_buffers: Buckets,
        shapes: Sequence[torch.Size],
        blocks: Sequence[Sequence[int]],
        group: Group,
        ended: Callable[[], dist.Work | None] = lambda: None,
        patient: bool = True,
    ) -> None:
        self.grad_buffers, self.group, self._ended, self._patient = grad_buffers, group, ended, patient
        self.shards = RowShards(group.size, group.rank)
        self._shapes = shapes
        self._pools: dict[tuple[Any, ...], _Pool] = {}
        self.blocks: list[_Block] = []
        for members in blocks:
            kind = tuple((shapes[number], grad_buffers.params[number].dtype) for number in members)
            pool = self._pools.setdefault(kind, _Pool([]))
            self.blocks.append(_Block(list(members), pool, pool.blocks))
            pool.blocks += 1
        self._of = {  # each parameter's block, and its index in that block
            number: (block_index, index)
            for block_index, block in enumerate(self.blocks)
            for index, number in enumerate(block.members)
        }
        self._works: deque[tuple[dist.Work | None, _Block, _Stage, bool]] = deque()
        self._begun = self._open = self._last = self._is_dummy = self._waits = False
        self._next = 0
        self._weight: float | None = None
        self._used: set[int] = set()
        # While it is a dictionary, full gradients are added up in it, and nothing is sent.
        self.captured: dict[int, torch.Tensor] | None = None
        self.checks: TransferChecks | None = None  # in a verified step

    @staticmethod
    def bytes(
        shapes: Sequence[Sequence[int]], element_bytes: Sequence[int], blocks: Sequence[Sequence[int]], shards: int
    ) -> int:
        """The most bytes that stages take, for parameters of these shapes with `element_bytes` per element."""
        pools = Counter(tuple((tuple(shapes[n]), element_bytes[n]) for n in block) for block in blocks if block)
        rows = RowShards(shards)
        return sum(
            min(count, UNDER_WAY + 1) * shards * sum(rows.width(shape) * size for shape, size in members)
            for members, count in pools.items()
        )

    def release(self) -> list[torch.Tensor]:
        """Gives up gradients, stages and hooks; returns the memory that was allocated for sums."""
        memory = [stage.flat for pool in self._pools.values() for stage in pool.stages]
        for pool in self._pools.values():
            pool.stages.clear()
        return memory + self.grad_buffers.release()

    def rebind(self, allocate: Allocate) -> None:
        """Allocates fresh memory for all stages."""
        for pool in self._pools.values():
            pool.stages.clear()
        for block in self.blocks:
            if len(block.pool.stages) <= UNDER_WAY:
                block.pool.stages.append(self._make(block.members, allocate))

    # -- a step -----------------------------------------------------------------------------------------------------

    def begin(self, ready: Callable[[Bucket], None], micro_batches: int = 1) -> None:
        """Starts a step."""
        self.grad_buffers.begin(ready, micro_batches)
        self._used.clear()
        self._forget_calls()  # of a script's own forwards
        self._begun = True

    def begin_backward(self, last: bool, is_dummy: bool = False, weight: float | None = None) -> None:
        """Begins the next backward."""
        if self.captured is not None:
            return
        self._open, self._last, self._is_dummy, self._next, self._weight = True, last, is_dummy, 0, weight
        self._waits = self._patient

    def land(self, number: int, param: torch.Tensor) -> None:
        """Takes the gradient of a parameter, which autograd has just made."""
        assert param.grad is not None
        grad, param.grad = param.grad.detach(), None
        if self.captured is not None:
            before = self.captured.get(number)
            self.captured[number] = grad if before is None else before + grad
            return
        if not self._open and self._begun:
            what = "a forward or loss calls backward() itself, and its gradients would be lost"
            raise UsageError(what, "compute these gradients with torch.autograd.grad()")
        if not self._open:  # a backward in the body of a loop
            return
        block_index, index = self._of[number]
        block = self.blocks[block_index]
        if block_index < self._next:
            raise error_in_two_parts(param)
        # To experts come other workers' tokens, also while this worker's own micro-batch is a dummy.
        if not self._is_dummy or number in self.grad_buffers.divided:
            self._used.add(number)
            stage = self._stage(block)
            grad = grad if self._weight is None else grad * self._weight
            self.grad_buffers.write(number, grad, stage.wires[index], number not in stage.written)
            stage.written.add(number)
        block.landed.add(number)
        self._advance()

    def call(self, number: int) -> None:
        """Takes note that a forward runs the block of a parameter."""
        self.blocks[self._of[number][0]].calls += 1

    def leave(self, number: int) -> None:
        """Takes note that backward has passed such a call.

        After the last call a block leaves without the gradients of parameters that got none, such as those of experts
        that were not used: workers wait for each other's blocks.
        """
        block = self.blocks[self._of[number][0]]
        if not self._open:  # one in the forward: a later one may go through it again
            return
        block.calls -= 1
        if not block.calls:
            block.left = True
            self._advance()

    def end_backward(self) -> None:
        """Ends the present backward: sends the remaining blocks."""
        if self.captured is not None:
            self._forget_calls()
            return
        ended, self._waits = self._ended(), True
        while self._next < len(self.blocks):
            self._send()
        self.group.finish(ended)
        for pool in self._pools.values():
            pool.used, pool.gone = pool.used + pool.blocks, 0
        self._forget_calls()
        self._open = False

    def flush(self) -> set[int]:
        """Waits for all blocks and hands on the buckets; returns the numbers of parameters without a gradient."""
        while self._works:
            self._arrive()
        self._begun = False
        self.grad_buffers.flush()
        return set(range(len(self._shapes))) - self._used

    def abandon(self, again: bool = False) -> None:
        """Ends a step whose backward failed, or which begins `again`."""
        self.group.abandon([work for work, *_ in self._works])
        if self.checks is not None:
            self.checks.abandon()
        self._works.clear()
        for block in self.blocks:
            block.landed.clear()
            block.stage = None
        self._forget_calls()
        self._begun = False
        for pool in self._pools.values():
            pool.used, pool.gone = 0, 0
            for stage in pool.stages:
                stage.taken = False
        self._open = False
        self.grad_buffers.abandon(again)

    def memory(self) -> int:
        """Bytes that gradients and stages take."""
        return self.grad_buffers.memory() + sum(s.flat.nbytes for pool in self._pools.values() for s in pool.stages)

    # -- on the way -----------------------------------------------------------------------------------------------

    def _stage(self, block: _Block) -> _Stage:
        """The stage that the block's gradients of this micro-batch are written into."""
        if block.stage is None:
            departure = block.departure_stage
            while self._waits and departure.taken and any(stage is departure for _, _, stage, _ in self._works):
                self._arrive()
            # Gradients may come before those of blocks that leave earlier, while another block holds the stage.
            early = departure.taken or block.turn - block.pool.gone >= len(block.pool.stages)
            block.stage = self._make(block.members, zeros) if early else departure
            block.stage.taken = True
            block.stage.written.clear()
        return block.stage

    def _make(self, members: Sequence[int], allocate: Allocate) -> _Stage:
        like = self.grad_buffers.params[members[0]]
        shapes = [self._shapes[number] for number in members]
        stretches, wires = lay_out(shapes, like, self.shards, allocate, self.grad_buffers.exact is not None)
        return _Stage(stretches.view(-1), wires)

    def _forget_calls(self) -> None:
        for block in self.blocks:
            block.calls, block.left = 0, False

    def _advance(self) -> None:
        """Sends complete blocks, in order, as far as is possible now."""
        while self._next < len(self.blocks) and self.blocks[self._next].is_complete:
            self._take_in()
            block = self.blocks[self._next]
            free = block.stage is block.departure_stage or not block.departure_stage.taken
            if not self._waits and not (free and len(self._works) <= UNDER_WAY):
                return
            self._send()

    def _take_in(self) -> None:
        """Takes in blocks that have arrived; waits while too many are under way."""
        while self._works and ((self._waits and len(self._works) > UNDER_WAY) or _over(self._works[0][0])):
            self._arrive()

    def _send(self) -> None:
        """Sends the next block."""
        block = self.blocks[self._next]
        self._next += 1
        stage, departure = self._stage(block), block.departure_stage
        for number, wires in zip(block.members, stage.wires, strict=True):
            if number not in stage.written:
                for wire in (wire for levels in wires for wire in levels):
                    wire.zero_()
        if stage is not departure:
            while departure.taken:
                self._arrive()
            departure.flat.copy_(stage.flat)
            departure.taken = True
        block.landed.clear()
        block.stage = None
        block.pool.gone += 1
        if self.checks is None:
            work = self.group.start_scatter(departure.flat)
        else:
            work = self.checks.start_scatter(self.group, departure.flat, block.members)
        self._works.append((work, block, departure, self._last))
        self._take_in()

    def _arrive(self) -> None:
        """Waits for the first block under way, adds it to the buckets and frees its stage."""
        work, block, stage, last = self._works[0]
        self.group.finish(work)
        self._works.popleft()
        if self.checks is not None:
            self.checks.finish_scatter()
        for number, wires in zip(block.members, stage.wires, strict=True):
            self.grad_buffers.add(number, wires[self.shards.me])
        stage.taken = False
        for number in block.members if last else ():
            self.grad_buffers.complete(number)


def _over(work: dist.Work | None) -> bool:
    return work is None or work.is_completed()
