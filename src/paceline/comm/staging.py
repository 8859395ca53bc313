"""Gradients on their way to the workers that own their rows, block by block, while their backward goes on.

What a block's parameters got in one micro-batch is scattered as soon as it is whole and added up where it belongs; the
memory that it travelled in is the next block's. So no more whole gradients exist at a time than are under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from paceline.comm.buckets import Allocate, Bucket, Buckets, Wires, in_two_parts, zeros
from paceline.comm.group import Group
from paceline.comm.places import Places

UNDER_WAY = 2  # blocks, before the backward waits for them


@dataclass
class _Stage:
    """The gradients of a block in one micro-batch: by place and level, and which parameters have written theirs."""

    flat: torch.Tensor
    wires: list[Wires]
    shared: bool
    written: set[int] = field(default_factory=set)


@dataclass
class _Block:
    """The numbers of the parameters whose gradients travel together, and the stages that are free."""

    members: list[int]
    free: list[_Stage]
    landed: set[int] = field(default_factory=set)
    stage: _Stage | None = None

    @property
    def whole(self) -> bool:
        return len(self.landed) == len(self.members)


class Staging:
    """Takes whole gradients of parameters of these `shapes` and adds up the own rows of each in the buckets `home`.

    `blocks` has every parameter's number once; they leave in this order, on all workers of `group`. What one needs
    another that is laid out alike can use.
    """

    def __init__(
        self, home: Buckets, shapes: Sequence[torch.Size], blocks: Sequence[Sequence[int]], group: Group
    ) -> None:
        self.home, self.group = home, group
        home.elements = [shape.numel() for shape in shapes]
        self.places = Places(group.size, group.rank)
        self._shapes = shapes
        alike: dict[tuple[torch.Size, ...], list[list[int]]] = {}
        for members in blocks:
            alike.setdefault(tuple(shapes[number] for number in members), []).append(list(members))
        pools = {
            key: [self._make(some[0], group.allocate) for _ in range(min(len(some), UNDER_WAY + 1))]
            for key, some in alike.items()
        }
        self._blocks = [_Block(list(members), pools[tuple(shapes[number] for number in members)]) for members in blocks]
        self._of = {number: place for place, block in enumerate(self._blocks) for number in block.members}
        self._works: deque[tuple[dist.Work | None, _Block, _Stage, bool]] = deque()
        self._open = self._last = self._blank = False
        self._next = 0
        self._used: set[int] = set()

    # -- as buckets are used --------------------------------------------------------------------------------------

    def begin(self, ready: Callable[[Bucket], None], micro_batches: int = 1) -> None:
        self.home.begin(ready, micro_batches)
        self._used.clear()

    def open(self, last: bool, blank: bool = False) -> None:
        """The next backward begins, the `last` of the step or not; what comes of a `blank` one counts nothing."""
        self._open, self._last, self._blank, self._next = True, last, blank, 0

    def land(self, number: int, param: torch.Tensor) -> None:
        """Takes the gradient of a parameter, which autograd has just made."""
        assert param.grad is not None
        grad, param.grad = param.grad.detach(), None
        if not self._open:  # a backward of the user's own
            return
        place = self._of[number]
        block = self._blocks[place]
        if place < self._next:
            raise in_two_parts(param)
        if not self._blank:
            self._used.add(number)
            stage = self._stage(block)
            self.home.put(number, grad, stage.wires[block.members.index(number)], first=number not in stage.written)
            stage.written.add(number)
        block.landed.add(number)
        while self._next < len(self._blocks) and self._blocks[self._next].whole:
            self._send()

    def close(self) -> None:
        """The backward has ended: what got no gradient in it goes as zeros."""
        while self._next < len(self._blocks):
            self._send()
        self._open = False

    def flush(self) -> set[int]:
        """All micro-batches are done: waits for what is under way. Returns the numbers of the parameters that got no
        gradient here.
        """
        while self._works:
            self._arrive()
        self.home.flush()
        return set(range(len(self._shapes))) - self._used

    def abandon(self, again: bool = False) -> None:
        self.group.abandon([work for work, *_ in self._works])
        self._works.clear()
        for block in self._blocks:
            block.landed.clear()
            block.stage = None
        self._open = False
        self.home.abandon(again)

    # -- on the way -----------------------------------------------------------------------------------------------

    def _stage(self, block: _Block) -> _Stage:
        """Where the block's gradients of this micro-batch are written."""
        if block.stage is None:
            block.stage = self._free(block) or self._make(block.members, zeros)
            block.stage.written.clear()
        return block.stage

    def _free(self, block: _Block) -> _Stage | None:
        """A stage that is free, maybe after a wait; None: all are held by blocks that are not whole yet."""
        while not block.free and any(other.free is block.free for _, other, _, _ in self._works):
            self._arrive()
        return block.free.pop() if block.free else None

    def _make(self, members: Sequence[int], allocate: Allocate) -> _Stage:
        like = self.home.params[members[0]]
        shapes = [self._shapes[number] for number in members]
        stretches, wires = self.home.lay_out(shapes, self.places, allocate, like.dtype, like.device)
        return _Stage(stretches.view(-1), wires, shared=allocate is not zeros)

    def _send(self) -> None:
        """The next block leaves."""
        block = self._blocks[self._next]
        self._next += 1
        stage = self._stage(block)
        for number, wires in zip(block.members, stage.wires, strict=True):
            if number not in stage.written:
                for wire in (wire for levels in wires for wire in levels):
                    wire.zero_()
        block.landed.clear()
        block.stage = None
        if not stage.shared:
            stage = self._shared(block, stage)
        self._works.append((self.group.start_scatter(stage.flat), block, stage, self._last))
        while self._works and (len(self._works) > UNDER_WAY or _over(self._works[0][0])):
            self._arrive()

    def _shared(self, block: _Block, stage: _Stage) -> _Stage:
        """The same in memory that the workers of a host share: all send from the same kind. What is not whole yet gives
        its own up, if need be.
        """
        if (found := self._free(block)) is not None:
            found.flat.copy_(stage.flat)
            return found
        holder = next(
            other for other in self._blocks if other.free is block.free and other.stage and other.stage.shared
        )
        assert holder.stage is not None
        found, held = holder.stage, holder.stage.flat.clone()
        found.flat.copy_(stage.flat)
        stage.flat.copy_(held)
        stage.written, holder.stage = set(found.written), stage
        return found

    def _arrive(self) -> None:
        """The first of those under way is there: its memory is free."""
        work, block, stage, last = self._works[0]
        self.group.finish(work)
        self._works.popleft()
        for number, wires in zip(block.members, stage.wires, strict=True):
            self.home.add(number, wires[self.places.me])
        block.free.append(stage)
        for number in block.members if last else ():
            self.home.complete(number)


def _over(work: dist.Work | None) -> bool:
    return work is None or work.is_completed()
