"""Elastic training in Horovod's way: committed states, and a function that runs again when workers come and go."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator, Sized
from functools import wraps
from typing import Any

import torch

from paceline.errors import PeerLostError
from paceline.integrations.horovod.context import CONTEXT, rank, size
from paceline.integrations.horovod.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from paceline.integrations.horovod.state_broadcast import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Divides a dataset among the workers, and divides what is left of an epoch again when workers come and go.

    Add it to the `TorchState`, call `record_batch` after each batch, and `set_epoch` at the end of each epoch.

    Args:
        dataset: The dataset; its length counts.
        shuffle: Whether each epoch has another order.
        seed: The seed of the orders, equal on all workers.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch: all rows are left."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Records that each worker has processed a batch of this size; `batch_idx` has no effect."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """The epoch, and how many of its rows were processed."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Takes the position of another sampler, and divides the rows that are left."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divides the rows that are left of the epoch among the present workers."""
        self.num_replicas, self.rank = size(), rank()
        order = [*range(len(self.dataset))]
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        padded = [*self.remaining_indices]
        while padded and len(padded) < self.total_size:  # so that all workers have equally many
            padded += self.remaining_indices[: self.total_size - len(padded)]
        return iter(padded[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples


class ElasticState:
    """What the workers of an elastic training have in common. Derive from `ObjectState` or `TorchState`.

    `commit` keeps a copy, to which the workers return after a loss.
    """

    def __init__(self) -> None:
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: list[Callable[[], None]]) -> None:
        """Registers functions that are called whenever the workers have changed, for example to scale the rate."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Adapts to other workers."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Keeps the present state, and checks whether workers come or leave. All workers call it.

        Raises HostsUpdatedInterrupt, on all workers, if they do.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raises HostsUpdatedInterrupt, on all workers, if workers come or leave. All workers call it."""
        team = CONTEXT.team
        changes = [team is not None and team.is_changing, team is not None and team.only_leaves]
        is_changing, only_leaves = broadcast_object(changes, name="elastic.changes")
        if is_changing:
            raise HostsUpdatedInterrupt(only_leaves)

    def save(self) -> None:
        """Keeps the present state."""
        raise NotImplementedError

    def restore(self) -> None:
        """Returns to the state that was kept last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Gives all workers the state of rank 0."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapts to other workers, before the state is synchronized."""


class ObjectState(ElasticState):
    """Plain values: each keyword argument is an attribute.

    Args:
        bcast_object: The function that broadcasts values; `hvd.broadcast_object` by default.
        get_rank: Has no effect.
        kwargs: The values by name: dicts, lists, tuples, numbers, text, tensors and numpy arrays.
    """

    def __init__(
        self, bcast_object: Callable[[Any], Any] = broadcast_object, get_rank: Any = None, **kwargs: Any
    ) -> None:
        super().__init__()
        self._broadcast = bcast_object
        self._saved_state = kwargs
        self.restore()

    def save(self) -> None:
        """Keeps the present values."""
        self._saved_state = {name: copy.deepcopy(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        """Returns to the values that were kept last."""
        for name, value in self._saved_state.items():
            setattr(self, name, copy.deepcopy(value))

    def sync(self) -> None:
        """Gives all workers the values of rank 0."""
        if self._saved_state:
            present = {name: getattr(self, name) for name in self._saved_state}
            self._saved_state = self._broadcast(present)
            self.restore()


class StateHandler:
    """Keeps, restores and synchronizes one value with a `state_dict`. `synchronize` gives all workers rank 0's."""

    def __init__(self, value: Any, synchronize: Callable[[Any], None]) -> None:
        self.value, self._synchronize = value, synchronize
        self.save()

    def save(self) -> None:
        """Keeps the present state."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Returns to the state that was kept last."""
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Gives all workers the state of rank 0, and keeps it."""
        self._synchronize(self.value)
        self.save()


def _sync_sampler(sampler: ElasticSampler) -> None:
    sampler.load_state_dict(broadcast_object(sampler.state_dict()))


_SYNCHRONIZES: list[tuple[type, Callable[[Any], None]]] = [
    (torch.nn.Module, lambda model: broadcast_parameters(model.state_dict(), root_rank=0)),
    (torch.optim.Optimizer, lambda optimizer: broadcast_optimizer_state(optimizer, root_rank=0)),
    (ElasticSampler, _sync_sampler),
]


class TorchState(ObjectState):
    """Models, optimizers, samplers and plain values.

    Args:
        model: A model.
        optimizer: An optimizer.
        kwargs: More models, optimizers, `ElasticSampler`s and plain values, by name; each is an attribute.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        self._handlers: dict[str, StateHandler] = {}
        given = {"model": model, "optimizer": optimizer, **kwargs}
        for name, value in given.items():
            synchronize = next((how for kind, how in _SYNCHRONIZES if isinstance(value, kind)), None)
            if synchronize is not None:
                self._handlers[name] = StateHandler(value, synchronize)
                super().__setattr__(name, value)
        super().__init__(**{name: value for name, value in given.items() if name not in self._handlers})

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "_handlers" and name in self._handlers:
            self._handlers[name].value = value
            self._handlers[name].save()
        super().__setattr__(name, value)

    def save(self) -> None:
        """Keeps the present state."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Returns to the state that was kept last."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Gives all workers the state of rank 0."""
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def reset(self) -> None:
        """Divides the rows that are left among the present workers."""
        for handler in self._handlers.values():
            if isinstance(handler.value, ElasticSampler):
                handler.value.reset()


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a training function elastic: `@hvd.elastic.run`, `def train(state, ...)`.

    The function is called with a synchronized state. When a worker is lost, the others return to the last commit and
    call it again; when workers join or leave, it is called again with the present state.

    Args:
        func: The function; its first argument is a `State`.
    """

    @wraps(func)
    def elastic(state: ElasticState, *args: Any, **kwargs: Any) -> Any:
        CONTEXT.begin_elastic()
        skips_sync = False
        while True:
            lost: PeerLostError | None = None
            try:
                if not skips_sync:
                    state.sync()
                return func(state, *args, **kwargs)
            except HorovodInternalError as error:
                if not isinstance(error.__cause__, PeerLostError):
                    raise  # the same would happen again
                lost, skips_sync = error.__cause__, False
            except HostsUpdatedInterrupt as update:
                skips_sync = update.skip_sync
            CONTEXT.reset(lost)
            if lost is not None:
                state.restore()
            state.on_reset()

    return elastic
