"""Sparse gradients of embeddings: only touched rows travel.

Each worker sums the gradients of its own rows and sends them to the others; all add them up in the order of ranks.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.comm.communicator import Group
from paceline.comm.message_reader import damaged, decode_message
from paceline.comm.shared_memory import raw_bytes

_DENSE = -1  # instead of row indices: the gradient is dense, because the script also uses the parameter in another way


def tables(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the parameters with sparse gradients, by the names of their modules."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            yield name, module.weight


def rows_of(params: Iterable[Parameter]) -> list[torch.Tensor]:
    """The values of summed gradients: the stored rows of sparse ones, all of dense ones."""
    grads = [param.grad for param in params if param.grad is not None]
    return [grad._values() if grad.is_sparse else grad for grad in grads]


def add_up(params: Iterable[Parameter], group: Group) -> None:
    """Replaces the gradients by their sums over all workers. Part of the entered collective."""
    for param in params:
        param.grad = _summed(param, group)


def _summed(param: Parameter, group: Group) -> torch.Tensor | None:
    indices, values = _local_rows(param)
    rows = group.gather(indices)
    if any(map(_is_dense, rows)):
        return group.sum(torch.zeros_like(param) if param.grad is None else param.grad.to_dense())
    return combined(param, rows, group.gather(values) if any(map(len, rows)) else [])


def _local_rows(param: Parameter) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of the stored rows of a parameter's gradient, each once, and their values, flat."""
    grad, none = param.grad, param.new_empty(0)
    if grad is None:
        return none.long(), none
    if not grad.is_sparse:
        return none.new_full((1,), _DENSE, dtype=torch.int64), grad.flatten()
    grad = grad.coalesce()
    return grad.indices()[0], grad.values().flatten()


def _is_dense(rows: torch.Tensor) -> bool:
    return len(rows) == 1 and int(rows[0]) == _DENSE


def combined(param: Parameter, rows: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The sum of all workers' gradients, from row indices and values, in rank order; None if no worker has rows."""
    if not any(map(len, rows)):
        return None
    union, positions, length = None, rows, len(param)
    if not any(map(_is_dense, rows)):
        union, at = torch.cat([*rows]).unique(return_inverse=True)
        positions, length = at.split([len(one) for one in rows]), len(union)
    total = param.new_zeros(length, *param.shape[1:])
    for indices, part in zip(positions, parts, strict=True):
        values = part.view(-1, *param.shape[1:])
        if _is_dense(indices):
            total.add_(values)
        else:
            total.index_add_(0, indices, values)
    if union is None:
        return total
    return torch.sparse_coo_tensor(union[None], total, param.shape, is_coalesced=True, check_invariants=False)


def pack_gradients(params: Mapping[int, Parameter]) -> bytes:
    """Gradients of parameters by number, as they travel to a server."""
    return _packed({number: _local_rows(param) for number, param in params.items()})


def pack_weights(params: Mapping[int, tuple[Parameter, torch.Tensor | None]]) -> bytes:
    """Values of the given rows of parameters by number, or of all rows (None), as they travel to a worker."""
    rows_and_values = {
        number: (param.new_full((1,), _DENSE, dtype=torch.int64), param.detach().flatten())
        if rows is None
        else (rows, param.detach()[rows].flatten())
        for number, (param, rows) in params.items()
    }
    return _packed(rows_and_values)


def _packed(rows_and_values: Mapping[int, tuple[torch.Tensor, torch.Tensor]]) -> bytes:
    header = json.dumps([[number, len(rows), len(values)] for number, (rows, values) in rows_and_values.items()])
    tensors = (tensor.cpu().contiguous() for pair in rows_and_values.values() for tensor in pair)
    return b"".join([header.encode(), b"\n", *(raw_bytes(tensor).numpy().tobytes() for tensor in tensors)])


def unpack(data: bytearray, params: Sequence[Parameter], who: str) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Row indices and flat values by parameter number, from what `who` sent. Raises FormatError for damaged data."""
    start, unpacked = data.find(b"\n") + 1, {}
    header = decode_message(data[: max(0, start - 1)], "rows", who)
    if wrong := next((number for number, _, _ in header if number >= len(params)), None):
        raise damaged("rows", who, f"parameter {wrong} does not exist")
    size = sum(8 * count + params[number].dtype.itemsize * length for number, count, length in header)
    if size != len(data) - start:
        raise damaged("rows", who, f"expected {size} bytes, got {len(data) - start}")
    rest = torch.frombuffer(data, dtype=torch.uint8)[start:].clone()  # numbers lie where they may
    for number, count, length in header:
        dtype = params[number].dtype
        rows, values, rest = rest.split(
            [8 * count, dtype.itemsize * length, len(rest) - 8 * count - dtype.itemsize * length]
        )
        unpacked[number] = rows.clone().view(torch.int64), values.clone().view(dtype)
    return unpacked


@torch.no_grad()
def put_weights(data: bytearray, params: Sequence[Parameter]) -> None:
    """Writes the values that `pack_weights` packed into the parameters."""
    for number, (rows, values) in unpack(data, params, "a server").items():
        param = params[number]
        if _is_dense(rows):
            param.copy_(values.view_as(param))
        else:
            param[rows.to(param.device)] = values.view(-1, *param.shape[1:]).to(param.device)


def steps_rows_alone(optimizer: Optimizer) -> bool:
    """Whether the optimizer changes only the rows that are in a gradient."""
    plain = all(not group.get("momentum") and not group.get("weight_decay") for group in optimizer.param_groups)
    return type(optimizer) in (torch.optim.SparseAdam, torch.optim.Adagrad, torch.optim.SGD) and plain


class TouchedRows:
    """The rows of a table that each of the last updates changed, from update `first` on.

    It forgets the oldest updates when it would hold more row indices than the table has rows (`length`).
    """

    def __init__(self, length: int, first: int) -> None:
        self._length, self._first, self._total = length, first, 0
        self._log = deque[tuple[int, torch.Tensor]]()

    def note(self, update: int, rows: torch.Tensor | None, oldest: int) -> None:
        """Records the rows that an update changed (None: any row), and forgets updates before `oldest`."""
        if rows is None:
            rows, oldest = torch.empty(0, dtype=torch.int64), update + 1
        self._log.append((update, rows))
        self._total += len(rows)
        while self._log and (self._log[0][0] < oldest or self._total > self._length):
            number, gone = self._log.popleft()
            self._first, self._total = number + 1, self._total - len(gone)

    def since(self, update: int) -> torch.Tensor | None:
        """The rows changed by this update and all later ones; None if any row may have changed."""
        changed = [rows for _, rows in takewhile(lambda one: one[0] >= update, reversed(self._log))]
        return None if update < self._first else torch.cat([torch.empty(0, dtype=torch.int64), *changed]).unique()
