"""Runs the user's forward on a stage, with placeholders for missing activations.

Code before the stage's first block runs on stand-ins: tensors of the right shape, dtype and device that are NaN
everywhere and take no memory. Each stand-in is known by the number of the call that made it, counted from 0 after each
block: all stages run the same code, hence count the same calls. Where the stage's blocks or later code use a stand-in,
it is replaced by the value that an earlier stage computed and sent. An exception ends the forward after the stage's
last block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, handle_torch_function

from paceline.comm.torch_private import innermost_function_mode, pytree, without_innermost_mode
from paceline.compute.state_dict import refuse_state
from paceline.errors import UsageError, a
from paceline.parallel.pipeline.block_hooks import BlockHooks, HookedOutput
from paceline.parallel.tensor_parallel.redistribute import Redistributor
from paceline.parallel.tensor_parallel.script_view import call_without_script_view
from paceline.parallel.tensor_parallel.sharded_mode import MADE, Tensor, placement_of, set_placement, tensors_in

# Identifies a value on all stages: how many blocks had been called, which call since then made it, and which of the
# call's results it is. Calls of hooks inside of the last block are counted apart, from HOOK times the hook's number on.
# For a parameter: PARAM, its number, and 0.
Key = tuple[int, int, int]
PARAM = -1
HOOK = -(1 << 20)

# Functions that read only metadata of a tensor, which a stand-in has as well.
_ASKS = {
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "is_floating_point", "is_complex"),
    *("get_device", "element_size", "__len__", "__hash__", "__repr__", "is_inference", "is_neg", "is_conj"),
    *("data_ptr", "storage_offset", "is_same_size", "type", "__format__"),
}
_READS = {
    *("item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "nonzero"),
    *("__bool__", "__int__", "__float__", "__complex__", "__index__", "__contains__", "__array__", "__dlpack__"),
}
_DRAWS = ("rand", "normal", "bernoulli", "multinomial", "dropout", "uniform", "exponential", "poisson", "gumbel")


ANOTHER_WAY = (
    "the forward makes other calls than in its first run, and a pipeline stage lacks a value that these calls need",
    "make the same calls for all rows in the forward, or leave pipeline= out",
)


class StageBoundaryError(BaseException):
    """Ends the user's forward after the stage's last block. A BaseException, so that user code does not catch it."""


@dataclass
class StageInputs:
    """The values that a stage receives from the stages before it.

    `forms` is the structure of the results of their blocks, `drawn` the changes of the random generators, and `values`
    the tensors that this stage or later ones need.
    """

    forms: list[Any] = field(default_factory=list)
    drawn: list[Any] = field(default_factory=list)
    values: dict[Key, Tensor] = field(default_factory=dict)


class StageForwardMode(TorchFunctionMode):
    """Runs one forward through the stage that has the blocks `local_blocks`, with these `hooks` inside of blocks.

    `stand_ins` replace the parameters of earlier stages. `on_first_block` is called before the stage's first block.
    Afterwards, `kept` has those of the stage's results that are in `wanted`. With `surveys`, missing values are noted
    in `needs` instead of raising an error.
    """

    stays_innermost = True  # also under modes that run calls in other ways: all stages must count the same calls

    def __init__(
        self,
        local_blocks: range,
        inputs: StageInputs,
        stand_ins: Mapping[int, Key],
        wanted: frozenset[Key],
        on_first_block: Callable[[], None],
        device: torch.device,
        hooks: BlockHooks,
        surveys: bool = False,
    ) -> None:
        super().__init__()
        self._hooks = hooks
        self.local_blocks, self.inputs, self.wanted = local_blocks, inputs, wanted
        self.surveys, self._device, self._on_first_block = surveys, device, on_first_block
        # Stand-ins by identity. The tensor is kept so that no other one gets its identity.
        self._without_values = dict[int, tuple[Tensor | None, Key]]()
        self._without_values.update({identity: (None, key) for identity, key in stand_ins.items()})
        self._next, self._calls = 0, 0  # the next block's number, and the calls since the last block
        self._is_paused = False  # whether calls are neither counted nor followed
        self.in_stage = local_blocks.start == 0  # whether the stage's first block was reached
        self.forms: list[Any] = list(inputs.forms)  # structure of the results of all blocks up to the stage's end
        self.kept_outputs: dict[Key, Tensor] = {}  # results of blocks that are wanted
        self.needs: set[Key] = set()
        self.later: Mapping[int, str] = {}  # names of parameters that later stages have, by identity
        self.redistributors: list[Redistributor] = []  # which send nothing for calls on stand-ins

    # -- blocks -------------------------------------------------------------------------------------------------------

    def block(self, number: int, name: str, forward: Callable[..., Any], given: Any, named: Any) -> Any:
        """Runs a call of a block by the user's code, or returns stand-ins for the results of an earlier stage's."""
        if number == self.local_blocks.stop:
            raise StageBoundaryError
        if number < self._next:
            what = f"one forward calls {name} twice, but pipeline= runs each block once"
            cure = "if the forward calls a model twice, pass both inputs in one call (torch.cat)"
            raise UsageError(what, f"{cure}, or leave pipeline= out")
        if number > self._next:
            what = f"{name} is called before earlier blocks of its list, but pipeline= runs blocks in list order"
            cure = 'name a list whose blocks are called in order: pipeline_blocks="path"'
            raise UsageError(what, f"{cure}, or leave pipeline= out")
        self._next, self._calls = self._next + 1, 0
        if number < self.local_blocks.start:
            form, hooked = self.inputs.forms[number]
            with self._uncounted():
                made = made_like(form, self._device, stands_in=True)
                noted = [
                    HookedOutput(call, module, made_like(output, self._device, stands_in=True))
                    for call, module, output in hooked
                ]
            self._mark_without_values([made, noted])
            self._hooks.repeat(number, noted, self._counted_hook)
            return made
        if not self.in_stage:
            self.in_stage = True
            with self._uncounted():
                self._on_first_block()
        given, named = self.real((given, named))
        with self._uncounted(), self._hooks.noting(number, self._counted_hook) as noted:
            made = forward(*given, **named)
        hooked = [(one, form) for one in noted if (form := _form_if_plain(one.output)) is not None]
        self.forms.append([form_of(made, name), [[*one[:-1], form] for one, form in hooked]])
        self._keep_wanted([made, [one for one, _ in hooked]])
        return made

    @contextlib.contextmanager
    def _uncounted(self) -> Iterator[None]:
        """Neither counts nor follows the calls made while the context is active, such as those inside of a block."""
        self._is_paused = True
        try:
            if innermost_function_mode() is self:
                with without_innermost_mode():
                    yield
            else:
                yield
        finally:
            self._is_paused = False

    @contextlib.contextmanager
    def _counted_hook(self, number: int) -> Iterator[None]:
        """Counts and follows the calls of a hook inside of a block while the context is active."""
        before, self._is_paused, self._calls = (self._is_paused, self._calls), False, HOOK * number
        try:
            with contextlib.nullcontext() if innermost_function_mode() is self else self:
                yield
        finally:
            self._is_paused, self._calls = before

    # -- calls outside of blocks --------------------------------------------------------------------------------------

    def __torch_function__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        if self._is_paused:
            return function(*given, **(named or {}))
        self._is_paused = True  # else it would also count what a mode that was entered later calls
        try:
            return self._follow(function, given, named or {})
        finally:
            self._is_paused = False

    def _follow(self, function: Any, given: Any, named: Any) -> Any:
        name = function.__name__
        if name == "__get__":
            name = function.__self__.__name__
            reads_metadata = name not in MADE
        else:
            reads_metadata = name in _ASKS or name == "__set__"
        if reads_metadata:
            return function(*given, **named)
        self._calls += 1
        if self.surveys and self.later:
            self._refuse_later(tensors_in((*given, *named.values())))
        if self.in_stage:
            if self._without_values:
                given, named = self.real((given, named))
            output = function(*given, **named)
            self._keep_wanted(given[0] if output is None and given else output)
            return output
        takes_stand_in = any(id(tensor) in self._without_values for tensor in tensors_in((*given, *named.values())))
        if takes_stand_in and name in _READS:
            what = f"the forward reads a value ({name.strip('_')}) that another stage of the pipeline computes"
            cure = "do not let values computed by a block decide what the forward does, or leave pipeline= out"
            raise UsageError(what, cure)
        draws = self._next > 0 and any(word in name for word in _DRAWS)
        with self._sending_if(not takes_stand_in):
            output = function(*given, **named)
        if takes_stand_in or draws:
            self._mark_without_values(given[0] if output is None and given else output)
        return output

    @contextlib.contextmanager
    def _sending_if(self, sends: bool) -> Iterator[None]:
        """Lets layers that `tensor=` has divided send messages only if they have values to send."""
        for redistributor in self.redistributors:
            redistributor.sends = sends
        try:
            yield
        finally:
            for redistributor in self.redistributors:
                redistributor.sends = True

    def _refuse_later(self, tensors: Iterator[Tensor]) -> None:
        """Raises UsageError if a parameter outside of blocks is used on a stage before the first stage that has it."""
        name = next((self.later[id(tensor)] for tensor in tensors if id(tensor) in self.later), None)
        if name is not None and self._next:
            what = f"the forward uses {name} between two blocks or without calling all of them"
            raise UsageError(what, f"call all blocks in order and use {name} after them, or leave pipeline= out")
        if name is not None:
            what = f"{name} is created after the blocks but used before them; pipeline= assigns it to the last stage"
            raise UsageError(what, f"create {name} before the blocks in __init__, or leave pipeline= out")

    def _mark_without_values(self, made: Any) -> None:
        """Notes that the results of the last call are stand-ins."""
        for number, tensor in enumerate(tensors_in([made])):
            self._without_values[id(tensor)] = tensor, (self._next, self._calls, number)

    def _keep_wanted(self, made: Any) -> None:
        for number, tensor in enumerate(tensors_in([made])) if self.wanted else ():
            key = self._next, self._calls, number
            if key in self.wanted:
                self.kept_outputs[key] = tensor

    def real(self, values: Any) -> Any:
        """Replaces the stand-ins in `values` by the tensors that earlier stages have sent."""
        if not any(id(tensor) in self._without_values for tensor in tensors_in([values])):
            return values
        return pytree.tree_map_only(Tensor, self._value, values)

    def _value(self, tensor: Tensor) -> Tensor:
        entry = self._without_values.get(id(tensor))
        if entry is None:
            return tensor
        value = self.inputs.values.get(entry[1])
        if value is not None:
            return value
        if not self.surveys:
            raise UsageError(*ANOTHER_WAY)
        self.needs.add(entry[1])
        return tensor


def form_of(made: Any, name: str) -> Any:
    """Returns the structure of a block's result as JSON: shapes and dtypes instead of tensors. `name` is the block's.

    Raises UsageError for objects other than tensors, plain values, and tuples, lists and dicts of them.
    """
    if isinstance(made, Tensor):
        return {"tensor": [str(made.dtype).removeprefix("torch."), list(made.shape)]}
    if made is None or isinstance(made, (bool, int, float, str)):
        return {"value": made}
    if type(made) in (tuple, list):
        return {type(made).__name__: [form_of(value, name) for value in made]}
    if type(made) is dict and all(isinstance(key, str) for key in made):
        return {"dict": {key: form_of(value, name) for key, value in made.items()}}
    what = f"{name} returns {a(type(made).__name__)}, which pipeline= cannot send to the worker of the next block"
    raise UsageError(what, "return tensors, or tuples, lists or dicts of tensors, or leave pipeline= out")


def _form_if_plain(made: Any) -> Any:
    try:
        return form_of(made, "")
    except UsageError:
        return None


def made_like(form: Any, device: torch.device, stands_in: bool = False) -> Any:
    """Returns a result of this structure, with uninitialised tensors, or with placeholders if it `stands_in`."""
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
    """Returns a tensor that takes no memory and is NaN everywhere, so that a use of its values is noticed."""
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), value, dtype=dtype, device=device).expand(tuple(shape))


def one_call(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a module's forward so that it counts as one call, however many calls it makes inside."""
    params = ((owner, key, param) for owner in module.modules() for key, param in owner._parameters.items())
    slots = [(owner, key) for owner, key, param in params if param is not None]

    def call(weights: Sequence[Tensor], *given: Any, **named: Any) -> Any:
        current = [owner._parameters[key] for owner, key in slots]
        if all(weight is param for weight, param in zip(weights, current, strict=True)):
            return forward(*given, **named)
        for weight, param in zip(weights, current, strict=True):  # received weights are the same shards
            set_placement(weight, placement_of(param))
        with placed([(*slot, cast(nn.Parameter, weight)) for slot, weight in zip(slots, weights, strict=True)]):
            return forward(*given, **named)

    def counted(*given: Any, **named: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or not isinstance(innermost_function_mode(), StageForwardMode):
            return forward(*given, **named)
        weights = [cast(nn.Parameter, owner._parameters[key]) for owner, key in slots]
        return handle_torch_function(call, (), weights, *given, **named)

    return counted


def replace_forward(module: nn.Module, forward: Callable[..., Any], in_stages: bool, whose: str) -> None:
    """Replaces the forward of a module with sharded weights, on this object only, and refuses its `state_dict()`.

    Where the model is `in_stages`, the forward counts as one call. `whose` describes the module for errors.
    """
    call = partial(call_without_script_view, forward)
    vars(module)["forward"] = one_call(module, call) if in_stages else call
    refuse_state(module, whose)


@contextlib.contextmanager
def placed(slots: Sequence[tuple[nn.Module, str, nn.Parameter | None]]) -> Iterator[None]:
    """Puts other parameters into modules while the context is active."""
    before = [(module, name, module._parameters[name]) for module, name, _ in slots]
    try:
        for module, name, param in slots:
            module._parameters[name] = param
        yield
    finally:
        for module, name, param in before:
            module._parameters[name] = param
