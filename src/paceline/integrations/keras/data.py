"""The inputs of `fit`, `evaluate` and `predict` as datasets of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

from paceline.data.order import in_order, sample_index
from paceline.data.sampler_order import options_of
from paceline.errors import DatasetError, UsageError

Order = Callable[[int, int, int, int], int]


class RowDataset:
    """A dataset of rows as flat tuples of tensors, and the nesting that they have in Keras.

    Args:
        dataset: A dataset with a length, whose rows are flat tuples of tensors.
        structure: The nesting of a batch: a tuple of x, y and weights, of which the last two may be missing.
        order: The order of rows without shuffling, and with it.
        loader: Options of torch's DataLoader.
    """

    def __init__(
        self, dataset: Any, structure: Any, order: tuple[Order, Order], loader: dict[str, Any] | None = None
    ) -> None:
        self.dataset, self.structure, self.orders, self.loader = dataset, structure, order, loader or {}

    def __len__(self) -> int:
        return len(self.dataset)

    def order(self, shuffle: bool) -> Order:
        """The order of the rows."""
        return self.orders[bool(shuffle)]

    def unpack(self, batch: Sequence[torch.Tensor]) -> tuple[Any, Any, Any]:
        """Returns x, y and weights of a collated batch, nested as Keras expects them."""
        import keras

        parts = keras.tree.pack_sequence_as(self.structure, list(batch))
        return (*parts, None, None)[:3]

    def first(self, count: int = 2) -> Any:
        """The first rows as one batch, nested: Keras builds its layers, losses and metrics for their shapes."""
        rows = [self.dataset[number] for number in range(min(count, len(self)))]
        return self.unpack([torch.stack(column) for column in zip(*rows, strict=True)])


_ORDERS: tuple[Order, Order] = (in_order, sample_index)


def rows_from(x: Any, y: Any = None, weights: Any = None, class_weight: Any = None, what: str = "x") -> RowDataset:
    """The rows of what Keras accepts as input.

    Args:
        x: Arrays, tensors, a `keras.utils.PyDataset`, a torch Dataset or DataLoader.
        y: Targets, for arrays and tensors.
        weights: Sample weights, for arrays and tensors.
        class_weight: As in `fit`.
        what: The name of the argument, for messages.

    Raises:
        UsageError: The input has no rows by number.
    """
    import keras

    if isinstance(x, keras.utils.PyDataset | DataLoader | Dataset) and (y is not None or weights is not None):
        given = "y" if y is not None else "sample_weight"
        cure = f"leave {given} out, and return (inputs, targets, weights) from the dataset"
        raise UsageError(f"{given}= was given with a {type(x).__name__}", cure)
    if isinstance(x, keras.utils.PyDataset):
        return batches_as_rows(x, class_weight, what)
    if isinstance(x, DataLoader):
        return loader_as_rows(x, class_weight, what)
    if isinstance(x, Dataset):
        return torch_rows(x, _ORDERS, class_weight, what, None)
    return array_rows(x, y, weights, class_weight, what)


def array_rows(x: Any, y: Any, weights: Any, class_weight: Any, what: str) -> RowDataset:
    """The rows of arrays or tensors, nested in any way."""
    import keras
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter, can_convert_arrays

    if x is None or not can_convert_arrays((x, y, weights)):
        kind = type(x).__name__
        cure = "pass arrays, tensors, a keras.utils.PyDataset, or a torch Dataset, whose rows have numbers"
        if any("tensorflow" in one.__module__ for one in type(x).__mro__):
            cure = "pass the arrays of list(dataset.unbatch().as_numpy_iterator()), or a keras.utils.PyDataset"
        raise UsageError(f"{what} is a {kind}, which has no rows by number", cure)
    adapter = ArrayDataAdapter(x, y, sample_weight=weights, class_weight=class_weight)
    structure = adapter._inputs if isinstance(adapter._inputs, tuple) else (adapter._inputs,)
    flat = [tensor_of(one) for one in keras.tree.flatten(structure)]
    if any(one is None for one in flat):
        raise UsageError(f"a part of {what} is None", "leave missing inputs out of the nesting")
    return RowDataset(TensorDataset(*[one for one in flat if one is not None]), structure, _ORDERS)


def tensor_of(array: Any) -> torch.Tensor | None:
    """An array as a tensor on the CPU; fractions get the width of `keras.config.floatx()`, as in Keras."""
    import keras
    import numpy as np

    if array is None:
        return None
    tensor = array.detach().cpu() if isinstance(array, torch.Tensor) else torch.as_tensor(np.asarray(array))
    return tensor.to(getattr(torch, keras.config.floatx())) if tensor.is_floating_point() else tensor


class _FlatRows(Dataset[Any]):
    """The rows of a torch dataset as flat tuples of tensors; class weights become sample weights."""

    def __init__(self, dataset: Any, class_weight: Any) -> None:
        self._dataset, self._class_weight = dataset, class_weight

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        import keras

        row = with_class_weights(as_parts(self._dataset[index]), self._class_weight, is_row=True)
        return tuple(tensor for tensor in map(tensor_of, keras.tree.flatten(row)) if tensor is not None)


def torch_rows(dataset: Any, orders: tuple[Order, Order], class_weight: Any, what: str, loader: Any) -> RowDataset:
    """The rows of a torch dataset: (x, y) or (x, y, weight)."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        cure = "pass a dataset with __len__ and __getitem__; then a resumed run does not read earlier rows again"
        raise UsageError(f"{what} is {type(dataset).__name__}, an iterable dataset without row numbers", cure)
    if not len(dataset):
        raise DatasetError(f"{what} has no rows", "check how it was created")
    structure = with_class_weights(as_parts(dataset[0]), class_weight, is_row=True)
    return RowDataset(_FlatRows(dataset, class_weight), structure, orders, loader)


def loader_as_rows(loader: Any, class_weight: Any, what: str) -> RowDataset:
    """The rows of a DataLoader's dataset. Its batch size is replaced by the global batch."""
    from torch.utils.data import default_collate

    if loader.collate_fn is not default_collate:
        what = f"{what} is a DataLoader with a collate_fn"
        raise UsageError(what, "pass the dataset, and let its rows be tensors of equal shapes")
    batches = loader.batch_sampler  # also without batch_sampler=, of the sampler
    sampler: Any = batches.sampler if type(batches) is BatchSampler else batches
    kind = type(sampler)
    is_known = kind in (RandomSampler, SequentialSampler) and not getattr(sampler, "replacement", False)
    if not isinstance(loader.dataset, IterableDataset) and (not is_known or len(sampler) != len(loader.dataset)):
        cure = "pass the dataset itself, and say shuffle= in fit()"
        raise UsageError(f"{what} is a DataLoader with the sampler {kind.__name__}", cure)
    order = sample_index if kind is RandomSampler else in_order
    return torch_rows(loader.dataset, (order, order), class_weight, what, options_of(loader))


def as_parts(item: Any) -> tuple[Any, ...]:
    """A row or batch as a tuple of x, y and weights: a tuple or list is that already, all else is x."""
    return tuple(item) if isinstance(item, tuple | list) else (item,)


def with_class_weights(parts: tuple[Any, ...], class_weight: Any, is_row: bool = False) -> tuple[Any, ...]:
    """Adds the sample weights that `class_weight` gives to the targets, by Keras' own function."""
    if class_weight is None:
        return parts
    from keras.src.trainers.data_adapters.data_adapter_utils import class_weight_to_sample_weights

    if len(parts) != 2:
        raise UsageError(f"class_weight= was given for rows of {len(parts)} parts", "let rows be (inputs, targets)")
    import numpy as np

    x, y = parts
    targets = np.asarray(y)
    weights = class_weight_to_sample_weights(targets[None] if is_row else targets, class_weight)
    return x, y, np.asarray(weights)[0] if is_row else np.asarray(weights)


class _BatchRows(Dataset[Any]):
    """The rows of a `keras.utils.PyDataset` by number; its last few batches are kept."""

    def __init__(self, dataset: Any, class_weight: Any) -> None:
        self._dataset, self._class_weight = dataset, class_weight
        self._batches, self._read = len(dataset), lru_cache(4)(self._batch)
        self.size = len(self._read(0)[0])
        self._count = (self._batches - 1) * self.size + len(self._read(self._batches - 1)[0])

    def _batch(self, number: int) -> list[torch.Tensor]:
        import keras

        parts = with_class_weights(as_parts(self._dataset[number]), self._class_weight)
        return [tensor for tensor in map(tensor_of, keras.tree.flatten(parts)) if tensor is not None]

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        number, at = divmod(index, self.size)
        batch = self._read(number)
        if len(batch[0]) != self.size and number != self._batches - 1:
            what = f"batch {number} of the PyDataset has {len(batch[0])} rows, but batch 0 has {self.size}"
            raise DatasetError(what, "let all batches but the last one have the same number of rows")
        return tuple(column[at] for column in batch)

    def order(self, position: int, size: int, seed: int, epoch: int) -> int:
        """The order with shuffling: complete batches in random order, then a last smaller one; rows within stay."""
        full = size // self.size
        number, at = divmod(position, self.size)
        return position if number >= full else sample_index(number, full, seed, epoch) * self.size + at


def batches_as_rows(dataset: Any, class_weight: Any, what: str) -> RowDataset:
    """The rows of a `keras.utils.PyDataset` with a length."""
    import keras

    if dataset.num_batches is None:
        raise UsageError(f"{what} is an endless PyDataset", "give it a __len__; fit() has steps_per_epoch=")
    for name in ("on_epoch_begin", "on_epoch_end"):
        if getattr(type(dataset), name) is not getattr(keras.utils.PyDataset, name):
            what = (
                f"{type(dataset).__name__}.{name}() changes the dataset between epochs, and Paceline does not call it"
            )
            raise UsageError(what, "remove it, and use shuffle=True")
    rows = _BatchRows(dataset, class_weight)
    structure = with_class_weights(as_parts(dataset[0]), class_weight)
    return RowDataset(rows, structure, (in_order, rows.order))


def split_rows(x: Any, y: Any, weights: Any, fraction: float) -> tuple[Any, Any]:
    """Divides arrays into training and validation data, by Keras' own function."""
    from keras.src.trainers.data_adapters import array_slicing

    return array_slicing.train_validation_split((x, y, weights), validation_split=fraction)  # type: ignore[no-any-return]
