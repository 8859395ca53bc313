"""Runs the user's forward on a stage, with placeholders for missing activations.

What comes before the stage's first block runs on stand-ins: tensors of the right shape, dtype and device that are NaN
everywhere and take no memory. They are followed, with the number of the call that each comes from, counted anew from
each block: all stages run the same code, hence count the same calls. Where one of them, or what was made of it, meets
the stage's own blocks or what comes after, the value is taken that the stage which computed it has sent. What comes
after the stage's last block is left by an exception.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, handle_torch_function

from paceline.comm.torch_private import innermost_function_mode, pytree, without_innermost_mode
from paceline.errors import UsageError, a
from paceline.parallel.tensor_parallel.sharded_mode import MADE, Tensor, mark, part_of, tensors_in

# Of a value: how many blocks had been called, which call since then made it, and which of its results it is. For
# parameters PARAM, and which.
Key = tuple[int, int, int]
PARAM = -1

# Asked of any tensor; what they say a stand-in says as well.
_ASKS = {
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "is_floating_point", "is_complex"),
    *("get_device", "element_size", "__len__", "__hash__", "__repr__", "is_inference", "is_neg", "is_conj"),
    *("data_ptr", "storage_offset", "is_same_size", "type", "__format__"),
}
_READS = {
    *("item", "tolist", "numpy", "equal", "nonzero"),
    *("__bool__", "__int__", "__float__", "__index__", "__contains__"),
}
_DRAWS = ("rand", "normal", "bernoulli", "multinomial", "dropout", "uniform", "exponential", "poisson", "gumbel")


ANOTHER_WAY = (
    "the forward takes another way than at first, and a stage needs what no earlier one of the pipeline sends",
    "let the forward make the same calls for all rows, or leave pipeline= out",
)


class StageBoundaryError(BaseException):
    """The stage's last block is behind: what follows is another stage's. Nothing of the user's should catch it."""


@dataclass
class StageInputs:
    """What a stage is told of those before it: the results of their blocks in `forms`, what they drew as `drawn`, and
    the values that are needed from here on.
    """

    forms: list[Any] = field(default_factory=list)
    drawn: list[Any] = field(default_factory=list)
    values: dict[Key, Tensor] = field(default_factory=dict)


class StageForwardMode(TorchFunctionMode):
    """One forward through a stage that has the blocks `own`. `stand_ins` are parameters that earlier stages have. Of
    what is made here, what others `want` is in `kept` afterwards. Where it `surveys`, what would be needed of others is
    noted in `needs`.
    """

    stays_innermost = True  # also when modes are entered that carry out calls in other ways: all stages count alike

    def __init__(
        self,
        own: range,
        heard: StageInputs,
        stand_ins: Mapping[int, Key],
        want: frozenset[Key],
        arrive: Callable[[], None],
        device: torch.device,
        surveys: bool = False,
    ) -> None:
        super().__init__()
        self.own, self.heard, self.want, self.surveys, self._device = own, heard, want, surveys, device
        self._arrive = arrive
        self._void: dict[int, tuple[Tensor | None, Key]] = {known: (None, key) for known, key in stand_ins.items()}
        self._next, self._calls, self._quiet = 0, 0, False  # the next block, calls since the one before
        self.here = own.start == 0
        self.forms: list[Any] = list(heard.forms)  # of the blocks until the end of the stage
        self.kept: dict[Key, Tensor] = {}
        self.needs: set[Key] = set()
        self.later: Mapping[int, str] = {}  # parameters that later stages have, by identity: their names

    # -- blocks -------------------------------------------------------------------------------------------------------

    def block(self, number: int, name: str, forward: Callable[..., Any], given: Any, named: Any) -> Any:
        """A call of a block by the user's code."""
        if number == self.own.stop:
            raise StageBoundaryError
        if number < self._next:
            what = f"{name} is called a second time in one forward, and pipeline= passes each block once"
            cure = "where the forward calls a model twice, give it both inputs in one call (torch.cat)"
            raise UsageError(what, f"{cure}, or leave pipeline= out")
        if number > self._next:
            what = f"{name} is called before the blocks that stand before it, and pipeline= passes all in their order"
            cure = 'name a list whose blocks are called one after another: pipeline_blocks="path"'
            raise UsageError(what, f"{cure}, or leave pipeline= out")
        self._next, self._calls = self._next + 1, 0
        if number < self.own.start:
            with self._aside():
                made = made_like(self.heard.forms[number], self._device, stands_in=True)
            self._note(made)
            return made
        if not self.here:
            self.here = True
            with self._aside():
                self._arrive()
        given, named = self.real((given, named))
        with self._aside():
            made = forward(*given, **named)
        self.forms.append(form_of(made, name))
        self._keep(made)
        return made

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """A block's own calls are its own."""
        self._quiet = True
        try:
            if innermost_function_mode() is self:
                with without_innermost_mode():
                    yield
            else:
                yield
        finally:
            self._quiet = False

    # -- calls around them --------------------------------------------------------------------------------------------

    def __torch_function__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        if self._quiet:
            return function(*given, **(named or {}))
        self._quiet = True  # below a mode that was entered later, this one would see what that mode calls as well
        try:
            return self._follow(function, given, named or {})
        finally:
            self._quiet = False

    def _follow(self, function: Any, given: Any, named: Any) -> Any:
        name = function.__name__
        if name == "__get__":
            name = function.__self__.__name__
            asks = name not in MADE
        else:
            asks = name in _ASKS or name == "__set__"
        if asks:
            return function(*given, **named)
        self._calls += 1
        if self.surveys and self.later:
            self._refuse_later(tensors_in((*given, *named.values())))
        if self.here:
            if self._void:
                given, named = self.real((given, named))
            made = function(*given, **named)
            self._keep(given[0] if made is None and given else made)
            return made
        void = any(id(tensor) in self._void for tensor in tensors_in((*given, *named.values())))
        if void and name in _READS:
            what = f"the forward reads a value ({name.strip('_')}) that another stage of the pipeline computes"
            cure = "let no value that a block gave decide what the forward does, or leave pipeline= out"
            raise UsageError(what, cure)
        drawn = self._next > 0 and any(word in name for word in _DRAWS)
        made = function(*given, **named)
        if void or drawn:
            self._note(given[0] if made is None and given else made)
        return made

    def _refuse_later(self, tensors: Iterator[Tensor]) -> None:
        """A parameter outside of blocks that is used on an earlier stage than the one that has it."""
        name = next((self.later[id(tensor)] for tensor in tensors if id(tensor) in self.later), None)
        if name is not None and self._next:
            what = f"the forward uses {name} between two blocks or without calling all of them"
            raise UsageError(
                what, "let it call all blocks, one after another, and use it after them, or leave pipeline= out"
            )
        if name is not None:
            what = f"{name} is made after the blocks and used before them, and pipeline= puts it behind them"
            raise UsageError(what, "make it before the blocks in __init__, or leave pipeline= out")

    def _note(self, made: Any) -> None:
        """What the last call made has no values."""
        for number, tensor in enumerate(tensors_in([made])):
            self._void[id(tensor)] = tensor, (self._next, self._calls, number)

    def _keep(self, made: Any) -> None:
        for number, tensor in enumerate(tensors_in([made])) if self.want else ():
            key = self._next, self._calls, number
            if key in self.want:
                self.kept[key] = tensor

    def real(self, values: Any) -> Any:
        """The same with what has been sent in the place of stand-ins."""
        if not any(id(tensor) in self._void for tensor in tensors_in([values])):
            return values
        return pytree.tree_map_only(Tensor, self._value, values)

    def _value(self, tensor: Tensor) -> Tensor:
        known = self._void.get(id(tensor))
        if known is None:
            return tensor
        found = self.heard.values.get(known[1])
        if found is not None:
            return found
        if not self.surveys:
            raise UsageError(*ANOTHER_WAY)
        self.needs.add(known[1])
        return tensor


def form_of(made: Any, name: str) -> Any:
    """What a block gave, but for values, as JSON has it."""
    if isinstance(made, Tensor):
        return {"tensor": [str(made.dtype).removeprefix("torch."), list(made.shape)]}
    if made is None or isinstance(made, (bool, int, float, str)):
        return {"value": made}
    if type(made) in (tuple, list):
        return {type(made).__name__: [form_of(value, name) for value in made]}
    if type(made) is dict and all(isinstance(key, str) for key in made):
        return {"dict": {key: form_of(value, name) for key, value in made.items()}}
    what = f"{name} gives {a(type(made).__name__)}, and the next block may be on another worker"
    raise UsageError(what, "let blocks give tensors, or tuples, lists and dicts of them, or leave pipeline= out")


def made_like(form: Any, device: torch.device, stands_in: bool = False) -> Any:
    """What has such a form: of tensors without values, or that stand in for others."""
    ((kind, value),) = form.items()
    if kind == "tensor":
        dtype, shape = getattr(torch, value[0]), value[1]
        return placeholder(shape, dtype, device) if stands_in else torch.empty(shape, dtype=dtype, device=device)
    if kind == "dict":
        return {key: made_like(inner, device, stands_in) for key, inner in value.items()}
    if kind in ("tuple", "list"):
        return (tuple if kind == "tuple" else list)(made_like(inner, device, stands_in) for inner in value)
    return value


def placeholder(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor that takes no memory, and shows every wrong use."""
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), value, dtype=dtype, device=device).expand(tuple(shape))


def one_call(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a module that counts as one call of the user's code, however many calls it makes inside."""
    slots = [(one, key) for one in module.modules() for key, param in one._parameters.items() if param is not None]

    def call(weights: Sequence[Tensor], *given: Any, **named: Any) -> Any:
        own = [one._parameters[key] for one, key in slots]
        if all(weight is param for weight, param in zip(weights, own, strict=True)):
            return forward(*given, **named)
        for weight, param in zip(weights, own, strict=True):  # those that have been sent are the same parts
            mark(weight, part_of(param))
        with placed([(*slot, cast(nn.Parameter, weight)) for slot, weight in zip(slots, weights, strict=True)]):
            return forward(*given, **named)

    def counted(*given: Any, **named: Any) -> Any:
        if not isinstance(innermost_function_mode(), StageForwardMode):
            return forward(*given, **named)
        weights = [cast(nn.Parameter, one._parameters[key]) for one, key in slots]
        return handle_torch_function(call, (), weights, *given, **named)

    return counted


@contextlib.contextmanager
def placed(slots: Sequence[tuple[nn.Module, str, nn.Parameter | None]]) -> Iterator[None]:
    """Has other parameters of modules in their places for a while."""
    before = [(module, name, module._parameters[name]) for module, name, _ in slots]
    try:
        for module, name, param in slots:
            module._parameters[name] = param
        yield
    finally:
        for module, name, param in before:
            module._parameters[name] = param
