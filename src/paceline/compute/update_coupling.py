"""Finds whether an optimizer updates elements, parameters or all parameters independently.

The user's optimizers are made once more for small float64 parameters and tried over several steps: all parameters
together, each parameter without the others, and the halves of parameters in optimizers of their own.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence, Sized
from contextlib import redirect_stdout
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.compute.state_dict import PROBE_ERRORS, marked, marks_of
from paceline.errors import UsageError, first_line

Make = Callable[[dict[str, nn.Parameter]], Sequence[Optimizer]]
Half = tuple[int, int]  # of each tensor: along the first (0) or the last (-1) dimension the first (0) or second (1)

# The scale of the gradients of each step: large and small ones, since some optimizers clip or skip by a threshold.
_SCALES = (1.0, 1.0, 0.3, 1e-2, 3.0, 1.0, 30.0, 0.1, 1.0, 1e-4, 1e3, 1.0)
_MOST = 100  # steps: what an optimizer does every so many, or from then on, is waited for up to here
_EACH = 2  # of the parameters of a group that have equally many dimensions, and of groups with equal options
_SIDES = (8, 8, 2)  # elements along the first dimensions of a parameter at most, and along each further one
_RATES = ("params", "param_names", "lr", "initial_lr", "weight_decay")  # groups that differ in these count as equal


class Scope(IntEnum):
    """What the update of one element of a parameter depends on."""

    ELEMENT = 0
    PARAMETER = 1
    ALL = 2


@dataclass(frozen=True)
class Coupling:
    """The largest scope among the optimizers of a trainer, the class of an optimizer that has it, and the reason."""

    scope: Scope
    kind: str = ""
    why: str = ""


def find_coupling(
    made: Sequence[Optimizer],
    params: Mapping[str, nn.Parameter],
    shapes: Mapping[str, Sequence[int]],
    make: Make,
    device: torch.device,
    sparse: Collection[str] = (),
) -> Coupling:
    """Tries optimizers like those `made` of `params`, which have these `shapes` where they are whole.

    `make` is the user's function, whose small tensors lie on the `device`. The gradients of the `sparse` parameters are
    sparse tensors. Optimizers that cannot be tried count as depending on all parameters.
    """
    held = {id(param): name for name, param in params.items()}
    groups = {
        held[id(param)]: (number, group_index)
        for number, one in enumerate(made)
        for group_index, group in enumerate(one.param_groups)
        for param in group["params"]
    }
    why = ""
    for build in (make, lambda tiny: _made_alike(made, groups, tiny)):
        trial = _Trial(made, groups, params, shapes, build, device, sparse)
        try:
            with redirect_stdout(io.StringIO()):  # the user's function may print, and is called many times
                return trial.judge()
        except (*PROBE_ERRORS, UsageError) as error:
            why = why or first_line(error)
    kinds = ", ".join(dict.fromkeys(type(one).__name__ for one in made))
    return Coupling(Scope.ALL, kinds, f"could not be tried on small tensors ({why})")


def _made_alike(
    made: Sequence[Optimizer], groups: Mapping[str, tuple[int, int]], tiny: Mapping[str, nn.Parameter]
) -> list[Optimizer]:
    """Optimizers of the same classes and options, for a user's function that does not make them of small tensors."""
    alike = []
    for number, one in enumerate(made):
        options = [{k: v for k, v in group.items() if k not in ("params", "param_names")} for group in one.param_groups]
        for group_index, group in enumerate(options):
            group["params"] = [tiny[name] for name, where in groups.items() if where == (number, group_index)]
        alike.append(type(one)(options, **one.defaults))
        _refuse_unlike(one, alike[-1])
    return alike


def _refuse_unlike(one: Optimizer, other: Optimizer) -> None:
    """Raises TypeError where one optimizer has more than its class and options give the other, as hooks."""
    kept = [{k: v for k, v in vars(made).items() if k not in ("state", "param_groups")} for made in (one, other)]
    sizes = [{k: len(v) if isinstance(v, Sized) else 0 for k, v in attributes.items()} for attributes in kept]
    if sizes[0] != sizes[1]:
        raise TypeError(f"{type(one).__name__} is made by more than its class and options")


class _Trial:
    """Small parameters in place of some of the user's, their gradients, and the optimizers that `build` makes."""

    def __init__(
        self,
        made: Sequence[Optimizer],
        groups: Mapping[str, tuple[int, int]],
        params: Mapping[str, nn.Parameter],
        shapes: Mapping[str, Sequence[int]],
        build: Make,
        device: torch.device,
        sparse: Collection[str],
    ) -> None:
        self.made, self.groups, self.build, self.sparse = made, groups, build, sparse
        self.drawn = [device] if device.type == "cuda" else []  # devices whose random numbers the optimizers may draw
        device = torch.device("cpu") if device.type == "mps" else device  # which has no float64
        self.marks = {name: marks_of(param) for name, param in params.items()}
        chance = torch.Generator().manual_seed(0)
        self.values: dict[str, torch.Tensor] = {}
        self.slopes: dict[str, torch.Tensor] = {}
        self.others: dict[str, nn.Parameter] = {}
        tried = _representatives(made, groups, shapes)
        for name, param in params.items():
            sides = [*_SIDES[:2], *[_SIDES[2]] * len(shapes[name])]
            shape = [min(size, side) for size, side in zip(shapes[name], sides, strict=False)]
            dtype = torch.complex128 if param.is_complex() else torch.float64
            if name in tried:
                self.values[name] = torch.randn(shape, generator=chance, dtype=dtype).to(device)
                self.slopes[name] = torch.randn(shape, generator=chance, dtype=dtype).to(device)
            else:
                self.others[name] = marked(torch.zeros(shape, dtype=dtype, device=device), self.marks[name])

    def judge(self) -> Coupling:
        """The largest scope. Raises one of PROBE_ERRORS where the trial fails."""
        names, steps = [*self.values], len(_SCALES)
        if not names:
            return Coupling(Scope.ELEMENT)
        together, reshaped = self._run(names, steps)
        if coupling := self._depends_on_others(names, together, steps):
            return coupling
        coupling = self._depends_on_parameter(names, together, steps) or self._keeps_other_shapes(reshaped)
        waits = [value for one in self.made for group in one.param_groups for value in group.values()]
        waits = [v for v in waits if type(v) is int and steps - 2 < v <= _MOST]
        if waits:
            steps = max(waits) + 3
            together, _ = self._run(names, steps)
            if later := self._depends_on_others(names, together, steps):
                return later
            coupling = coupling or self._depends_on_parameter(names, together, steps)
        return coupling or Coupling(Scope.ELEMENT)

    def _depends_on_others(
        self, names: Sequence[str], together: Mapping[str, torch.Tensor], steps: int
    ) -> Coupling | None:
        for name in names if len(names) > 1 else ():
            alone, _ = self._run([name], steps)
            if _apart(together[name], alone[name]):
                return Coupling(Scope.ALL, self._kind(name), "updates each parameter by what the others are")
        return None

    def _depends_on_parameter(
        self, names: Sequence[str], together: Mapping[str, torch.Tensor], steps: int
    ) -> Coupling | None:
        shapes = {name: self.values[name].shape for name in names if name not in self.sparse}
        for dim in (0, -1):
            cut = [name for name, shape in shapes.items() if len(shape) > -dim and shape[dim] > 1]
            halves = [self._run(cut, steps, (dim, which)) for which in (0, 1)] if cut else []
            for name in cut:
                both = [half[name] for half, _ in halves]
                if _apart(together[name], torch.cat(both, dim or 1)):
                    return Coupling(Scope.PARAMETER, self._kind(name), "looks at a parameter as a whole")
            if coupling := self._keeps_other_shapes([one for _, reshaped in halves for one in reshaped]):
                return coupling
        return None

    def _keeps_other_shapes(self, reshaped: Sequence[str]) -> Coupling | None:
        if not reshaped:
            return None
        return Coupling(Scope.PARAMETER, self._kind(reshaped[0]), "keeps state of other shapes than its parameters'")

    def _kind(self, name: str) -> str:
        return type(self.made[self.groups[name][0]]).__name__

    def _run(
        self, names: Sequence[str], steps: int, half: Half | None = None
    ) -> tuple[dict[str, torch.Tensor], list[str]]:
        """How far each of these parameters, or a half of it, has moved after each step, and those for which state of
        another shape is kept. Every run draws the same random numbers.
        """
        tiny = {name: marked(_half(self.values[name], half), self.marks[name]) for name in names}
        moved: dict[str, list[torch.Tensor]] = {name: [] for name in names}
        chance = torch.Generator()
        with torch.random.fork_rng(devices=self.drawn):
            optimizers = self._built(tiny)
            start = {name: param.detach().clone() for name, param in tiny.items()}
            for step in range(steps):
                for name, param in tiny.items():
                    # A common slope, as in training: quantities that only grow would stay as they are without it.
                    chance.manual_seed(1 + step)
                    slope = self.slopes[name]
                    noise = torch.randn(slope.shape, generator=chance, dtype=slope.dtype).to(slope)
                    grad = _half((slope + 0.5 * noise) * _SCALES[step % len(_SCALES)], half)
                    param.grad = grad.to_sparse(1) if name in self.sparse else grad
                for one in optimizers:
                    one.step()
                for name, param in tiny.items():
                    moved[name].append(param.detach() - start[name])
            reshaped = [name for name, param in tiny.items() if any(_has_other_shape(one, param) for one in optimizers)]
        courses = {name: torch.stack(course) for name, course in moved.items()}
        if not all(course.isfinite().all() for course in courses.values()):
            raise ArithmeticError("its steps are not finite")
        return courses, reshaped

    def _built(self, tiny: Mapping[str, nn.Parameter]) -> list[Optimizer]:
        """Optimizers that hold these parameters alone. ValueError where the groups are not those of the user's."""
        everything = {name: tiny.get(name) for name in self.marks}
        for name, param in everything.items():
            if param is None:
                zeros = self.others[name] if name in self.others else torch.zeros_like(self.values[name])
                everything[name] = marked(zeros.detach(), self.marks[name])
        params = {name: param for name, param in everything.items() if param is not None}
        optimizers = [*self.build(params)]
        held = {id(param): name for name, param in params.items()}
        membership = Counter[tuple[str, int, int]]()
        for number, one in enumerate(optimizers):
            for group_index, group in enumerate(one.param_groups):
                membership.update((held[id(param)], number, group_index) for param in group["params"])
        if membership != Counter((name, *where) for name, where in self.groups.items()):
            raise ValueError("it makes other groups of small tensors")
        keep = {id(param) for param in tiny.values()}
        for one in optimizers:
            for group in one.param_groups:
                group["params"][:] = [param for param in group["params"] if id(param) in keep]
            one.param_groups[:] = [group for group in one.param_groups if group["params"]]
        return [one for one in optimizers if one.param_groups]


def _representatives(
    made: Sequence[Optimizer], groups: Mapping[str, tuple[int, int]], shapes: Mapping[str, Sequence[int]]
) -> set[str]:
    """The names of parameters that stand for all: some of each number of dimensions from groups of all kinds."""
    members: dict[tuple[int, int], list[str]] = {}
    for name, where in groups.items():
        members.setdefault(where, []).append(name)
    chosen, seen = set[str](), Counter[str]()
    for (number, group_index), names in sorted(members.items(), key=lambda one: -len(one[1])):
        options = made[number].param_groups[group_index]
        kind = repr((number, sorted((k, repr(v)) for k, v in options.items() if k not in _RATES)))
        seen[kind] += 1
        if seen[kind] > _EACH:
            continue
        taken = Counter[int]()
        for name in names:
            taken[len(shapes[name])] += 1
            if taken[len(shapes[name])] <= _EACH:
                chosen.add(name)
    return chosen


def _half(tensor: torch.Tensor, half: Half | None) -> torch.Tensor:
    if half is None or not tensor.dim():
        return tensor.clone()
    dim, which = half
    length = -(-tensor.shape[dim] // 2)
    return tensor.narrow(dim, which * length, (length, tensor.shape[dim] - length)[which]).clone()


def _has_other_shape(optimizer: Optimizer, param: nn.Parameter) -> bool:
    tensors = (value for value in optimizer.state.get(param, {}).values() if isinstance(value, torch.Tensor))
    return any(tensor.numel() != 1 and tensor.shape != param.shape for tensor in tensors)


def _apart(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two courses of a parameter, a step a row, differ by more than rounding does."""
    if not one.numel():
        return False
    furthest, gap = (course.abs().reshape(len(course), -1).amax(1) for course in (one, one - other))
    return bool((gap > 1e-9 * furthest + 1e-13).any())
