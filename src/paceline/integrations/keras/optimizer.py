"""Runs an optimizer of Keras as a torch optimizer: its own update, on the parameters that Paceline gives it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.errors import UsageError

# Options of Keras' optimizers that Paceline does itself, or for which it has another way.
GLOBAL_OPTIONS = ("global_clipnorm", "loss_scale_factor", "gradient_accumulation_steps")
_COMMON = "common"  # the key of the state that belongs to no single parameter


class _FirstValues:
    """The values that an optimizer's variables had when it was built. Most are constant, and take no memory."""

    def __init__(self) -> None:
        self._values: dict[int, torch.Tensor] = {}  # by the variable's identity

    def keep(self, variable: Any) -> None:
        """Remembers the value of a variable."""
        value = variable._value.detach()
        first = value.flatten()[:1]
        self._values[id(variable)] = first.clone() if bool((value == first).all()) else value.clone()

    def of(self, variable: Any) -> torch.Tensor:
        """A new tensor with the first value of a variable."""
        first, shape = self._values[id(variable)], variable._value.shape
        return (first.expand(shape) if len(shape) else first.reshape(shape)).clone()


class KerasUpdate(Optimizer):
    """A torch optimizer whose step is `apply()` of a Keras optimizer.

    Keras' own code computes the update, so epsilon, bias correction, weight decay, clipping by `clipnorm` or
    `clipvalue`, averages (`use_ema`), constraints and learning-rate schedules are Keras'. What Keras keeps for each
    variable is the state of the parameter here, so that checkpoints hold it under the parameter's name.

    Subclasses made by `bound_to` name the Keras optimizer.

    Args:
        params: Parameters, or (name, parameter) pairs.
        lr: The learning rate, if it is a number.
    """

    source: Any  # the Keras optimizer of the model
    known: dict[str, Any]  # the model's trainable variables, by the names of the parameters

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self._inner: Any = None
        self._variables: list[Any] = []
        self._slots: list[tuple[nn.Parameter, str, Any]] = []
        self._common: dict[str, Any] = {}
        self._shares_source = False
        self._first_values = _FirstValues()

    def _build(self) -> None:
        """Makes the Keras optimizer and its variables for the parameters, in the first step."""
        params = [param for group in self.param_groups for param in group["params"]]
        names = [name for group in self.param_groups for name in group.get("param_names", [""] * len(group["params"]))]
        originals = [self.known.get(name) for name in names]
        is_model = all(one is not None and one._value is param for one, param in zip(originals, params, strict=True))
        if is_model and len(params) == len(self.known) and not vars(self.source).get("_paceline_used"):
            self._inner, self._variables, self._shares_source = self.source, originals, True
            vars(self.source)["_paceline_used"] = True
            if not self.source.built:
                self.source.build([*self.known.values()])
        else:
            self._inner = copy_of(self.source)
            self._variables = [variable_of(param, like) for param, like in zip(params, originals, strict=True)]
            pairs = [(new, old) for new, old in zip(self._variables, originals, strict=True) if old is not None]
            self._inner._exclude_from_weight_decay_cache = {
                id(new): self.source._use_weight_decay(old) for new, old in pairs
            }
            self._inner.build(self._variables)
        self._sort_variables(params)

    def _sort_variables(self, params: list[nn.Parameter]) -> None:
        """Finds which of the optimizer's variables belong to one parameter: those with its name, and its shape."""
        param_of = {id(variable): param for variable, param in zip(self._variables, params, strict=True)}
        slots = set[int]()
        for name, held in vars(self._inner).items():
            variables = held if isinstance(held, list) else []
            if name in ("_variables", "_trainable_variables") or len(variables) != len(
                self._inner._trainable_variables
            ):
                continue
            for variable, slot in zip(self._inner._trainable_variables, variables, strict=True):
                if hasattr(slot, "assign") and tuple(slot.shape) == tuple(variable.shape):
                    self._slots.append((param_of[id(variable)], name.strip("_"), slot))
                    slots.add(id(slot))
        learning_rate = self._inner._learning_rate
        for number, variable in enumerate(all_variables(self._inner)):
            if id(variable) not in slots and variable is not learning_rate:
                self._common[f"{number}.{variable.name}"] = variable
        for variable in [*(slot for _, _, slot in self._slots), *self._common.values()]:
            self._first_values.keep(variable)

    def _bind(self) -> None:
        """Makes Keras' variables refer to the tensors of this optimizer's state.

        A checkpoint may have filled the state. Where it is empty, as in a new island of ``local=``, it starts from the
        variables' first values.
        """
        for param, name, slot in self._slots:
            state = self.state[param]
            if name not in state:
                state[name] = self._first_values.of(slot)
            slot._value = state[name]
        common = self.state.setdefault(_COMMON, {})  # type: ignore[call-overload]
        for name, variable in self._common.items():
            if name not in common:
                common[name] = self._first_values.of(variable)
            variable._value = common[name] = common[name].to(variable._value)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Makes one update from the gradients of the parameters."""
        with torch.no_grad():
            if self._inner is None:
                self._build()
            self._bind()
            inner, group = self._inner, self.param_groups[0]
            if is_number(inner):
                inner.learning_rate = group["lr"]
            params = [param for one in self.param_groups for param in one["params"]]
            pairs = [(p.grad, v) for p, v in zip(params, self._variables, strict=True) if p.grad is not None]
            if pairs:
                with without_global_options(inner):
                    inner.apply([grad for grad, _ in pairs], [variable for _, variable in pairs])
            for one in self.param_groups:
                one["lr"] = group["lr"] if is_number(inner) else float(inner._get_current_learning_rate())

    @property
    def counts_steps(self) -> bool:
        """Whether the model's Keras optimizer itself makes the steps, and counts them."""
        return self._shares_source

    def finish(self) -> None:
        """Puts averaged weights into the model at the end of a fit, if the optimizer was made with `use_ema`."""
        if self._inner is not None and self._inner.use_ema:
            if not self._shares_source:
                raise UsageError("use_ema=True needs full parameters on each worker", "use a plan with data= only")
            with torch.no_grad():
                self._inner.finalize_variable_values(self._variables)


def bound_to(source: Any, known: dict[str, Any]) -> type[KerasUpdate]:
    """The class of torch optimizers for a Keras optimizer, and for the trainable variables of its model."""
    return type(type(source).__name__, (KerasUpdate,), {"source": source, "known": known})


def is_number(optimizer: Any) -> bool:
    """Whether the learning rate is a number, and not a schedule or a function."""
    return hasattr(optimizer._learning_rate, "assign")


def first_rate(optimizer: Any) -> float:
    """The learning rate of the next step."""
    return float(optimizer._get_current_learning_rate())


def all_variables(optimizer: Any) -> Iterator[Any]:
    """Yields the variables of a Keras optimizer, each once, those included that it does not track."""
    seen = set[int]()
    lists = [one for one in vars(optimizer).values() if hasattr(one, "assign") and hasattr(one, "_value")]
    trained = {id(one) for one in optimizer._trainable_variables}
    for variable in [*optimizer.variables, *lists]:
        if id(variable) not in seen and id(variable) not in trained:
            seen.add(id(variable))
            yield variable


def copy_of(source: Any) -> Any:
    """A Keras optimizer with the same options and no state."""
    config = {**source.get_config(), "learning_rate": 0.0, **dict.fromkeys(GLOBAL_OPTIONS)}
    made = type(source).from_config(config)
    if not is_number(source):
        made._untrack_variable(made._learning_rate)
        made._learning_rate = source._learning_rate
    return made


def variable_of(param: nn.Parameter, like: Any) -> Any:
    """A variable of Keras that holds this parameter, with the name and the constraint of the model's variable."""
    from keras.src import backend

    made = backend.Variable(param, name="parameter" if like is None else like.name)
    made._value = param
    if like is not None:
        made._path, made._constraint = like.path, like.constraint
    return made


@contextmanager
def without_global_options(optimizer: Any) -> Iterator[None]:
    """In the context, the optimizer does not do what Paceline does: clip by the global norm, scale or accumulate."""
    before = {name: getattr(optimizer, name) for name in GLOBAL_OPTIONS}
    for name in before:
        setattr(optimizer, name, None)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(optimizer, name, value)
