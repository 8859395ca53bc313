"""Finds whether an optimizer updates elements, parameters or all parameters independently.

The user's optimizers are made once more for small float64 parameters and tried over several steps: all parameters
together, each parameter without the others, and the halves of parameters in optimizers of their own. Two courses of
gradients are tried: random ones of several scales, and those of a bowl whose bottom is far, since some optimizers
couple elements only while gradients agree from step to step. Torch's optimizers with elementwise updates need no trial.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence, Sized
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.comm.torch_private import has_global_optimizer_hooks
from paceline.compute.state_dict import PROBE_ERRORS, marked, marks_of, placeholder
from paceline.errors import UsageError, first_line

Make = Callable[[dict[str, nn.Parameter]], Sequence[Optimizer]]
Half = tuple[int, int]  # of each tensor: along the first (0) or the last (-1) dimension the first (0) or second (1)

# The scale of the gradients of each step: large and small ones, since some optimizers clip or skip by a threshold.
_SCALES = (1.0, 1.0, 0.3, 1e-2, 3.0, 1.0, 30.0, 0.1, 1.0, 1e-4, 1e3, 1.0)
_MOST = 100  # steps: options of an optimizer up to this number count as intervals that the trial waits for
_EACH = 2  # of the parameters of a group that have equally many dimensions, and of groups with equal options
_SIDES = (64, 48, 2)  # elements along the first dimensions of a parameter at most, and along each further one
_RATES = ("params", "param_names", "lr", "initial_lr", "weight_decay")  # groups that differ in these count as equal
_FAR = 1e3  # the distance of the bowl's bottom, in lengths of the gradient

# Optimizers of torch that update each element by itself, with any of their options.
ELEMENTWISE = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
    torch.optim.SparseAdam,
)


class Scope(IntEnum):
    """What the update of one element of a parameter depends on."""

    ELEMENT = 0
    PARAMETER = 1
    ALL = 2


@dataclass(frozen=True)
class Coupling:
    """The largest scope among the optimizers of a trainer, the class of an optimizer that has it, and the reason.

    `names` are the parameters whose optimizers may have this scope. The other parameters have elementwise optimizers.
    `takes_empty` says whether the optimizers treat an empty tensor as a parameter of this scope, with state of its
    shape: then each worker can hold some full parameters, and empty tensors in place of the others.
    """

    scope: Scope
    kind: str = ""
    why: str = ""
    names: frozenset[str] = frozenset()
    takes_empty: bool = False


def find_coupling(
    made: Sequence[Optimizer],
    params: Mapping[str, nn.Parameter],
    shapes: Mapping[str, Sequence[int]],
    make: Make,
    device: torch.device,
    sparse: Collection[str] = (),
) -> Coupling:
    """Tries optimizers like those `made` of `params`, whose full shapes are `shapes`.

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
    unknown = [number for number, one in enumerate(made) if not is_elementwise(one)]
    names = frozenset(name for name, (number, _) in groups.items() if number in unknown)
    if not names:
        return Coupling(Scope.ELEMENT)
    why = ""
    for build in (make, lambda tiny: _made_alike(made, groups, tiny)):
        trial = _Trial(made, groups, params, shapes, build, device, sparse, names)
        try:
            with redirect_stdout(io.StringIO()):  # the user's function may print, and is called many times
                return replace(trial.judge(), names=names)
        except (*PROBE_ERRORS, UsageError) as error:
            why = why or first_line(error)
    kinds = ", ".join(dict.fromkeys(type(made[number]).__name__ for number in unknown))
    return Coupling(Scope.ALL, kinds, f"could not be tested on small tensors ({why})", names)


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether an optimizer is one of torch's `ELEMENTWISE` ones, without hooks or methods that the script added."""
    if type(optimizer) not in ELEMENTWISE or has_global_optimizer_hooks():
        return False
    try:
        _refuse_unlike(
            optimizer, type(optimizer)([nn.Parameter(torch.zeros(1, dtype=torch.float32))], **optimizer.defaults)
        )
    except PROBE_ERRORS:
        return False
    return True


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
    """Raises TypeError if an optimizer has attributes (such as hooks) that its class and options do not create."""
    kept = [{k: v for k, v in vars(made).items() if k not in ("state", "param_groups")} for made in (one, other)]
    sizes = [{k: len(v) if isinstance(v, Sized) else 0 for k, v in attributes.items()} for attributes in kept]
    if sizes[0] != sizes[1]:
        raise TypeError(f"{type(one).__name__} has state or hooks that its class and options do not create")


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
        names: frozenset[str],
    ) -> None:
        self.made, self.groups, self.build, self.sparse = made, groups, build, sparse
        self.drawn = [device] if device.type == "cuda" else []  # devices whose random numbers the optimizers may draw
        device = torch.device("cpu") if device.type == "mps" else device  # which has no float64
        self.marks = {name: marks_of(param) for name, param in params.items()}
        chance = torch.Generator().manual_seed(0)
        self.values: dict[str, torch.Tensor] = {}
        self.slopes: dict[str, torch.Tensor] = {}
        self.others: dict[str, nn.Parameter] = {}
        tried = names & _representatives(made, groups, shapes)
        for name, param in params.items():
            sides = [*_SIDES[:2], *[_SIDES[2]] * len(shapes[name])]
            shape = [min(size, side) for size, side in zip(shapes[name], sides, strict=False)]
            dtype = torch.complex128 if param.is_complex() else torch.float64
            if name in tried:
                self.values[name] = torch.randn(shape, generator=chance, dtype=dtype).to(device)
                self.slopes[name] = torch.randn(shape, generator=chance, dtype=dtype).to(device)
            else:
                self.others[name] = placeholder(torch.empty(0, dtype=dtype, device=device), shape, self.marks[name])

    def judge(self) -> Coupling:
        """The largest scope. Raises one of PROBE_ERRORS where the trial fails."""
        names, coupling = [*self.values], None
        if not names:
            return Coupling(Scope.ELEMENT)
        for steps, in_bowl in self._courses():
            together, reshaped = self._run(names, steps, in_bowl=in_bowl)
            if on_others := self._depends_on_others(names, together, steps, in_bowl):
                return on_others
            coupling = coupling or self._depends_on_parameter(names, together, steps, in_bowl)
            coupling = coupling or self._keeps_other_shapes(reshaped)
        if coupling and (needs_all := self._needs_all_gradients(names)):
            return needs_all
        return replace(coupling, takes_empty=self._takes_empty(names)) if coupling else Coupling(Scope.ELEMENT)

    def _courses(self) -> list[tuple[int, bool]]:
        """The numbers of steps to try, and whether gradients are those of a bowl."""
        steps = len(_SCALES)
        numbers = {self.groups[name][0] for name in self.values}
        tried = [one for number, one in enumerate(self.made) if number in numbers]
        options = [value for one in tried for values in (vars(one), *one.param_groups) for value in values.values()]
        waits = [value for value in options if type(value) is int and steps - 2 < value <= _MOST]
        return [(steps, False), (steps, True), *([(max(waits) + 3, False)] if waits else [])]

    def _depends_on_others(
        self, names: Sequence[str], together: Mapping[str, torch.Tensor], steps: int, in_bowl: bool
    ) -> Coupling | None:
        for name in names if len(names) > 1 else ():
            alone, _ = self._run([name], steps, in_bowl=in_bowl)
            if _apart(together[name], alone[name]):
                return Coupling(Scope.ALL, self._kind(name), "updates each parameter depending on the others")
        return None

    def _depends_on_parameter(
        self, names: Sequence[str], together: Mapping[str, torch.Tensor], steps: int, in_bowl: bool
    ) -> Coupling | None:
        shapes = {name: self.values[name].shape for name in names if name not in self.sparse}
        for dim in (0, -1):
            cut = [name for name, shape in shapes.items() if len(shape) > -dim and shape[dim] > 1]
            halves = [self._run(cut, steps, (dim, which), in_bowl) for which in (0, 1)] if cut else []
            for name in cut:
                both = [half[name] for half, _ in halves]
                if _apart(together[name], torch.cat(both, dim or 1)):
                    return Coupling(
                        Scope.PARAMETER, self._kind(name), "updates each element depending on the full parameter"
                    )
            if coupling := self._keeps_other_shapes([one for _, reshaped in halves for one in reshaped]):
                return coupling
        return None

    def _needs_all_gradients(self, names: Sequence[str]) -> Coupling | None:
        """Tries each parameter beside others without gradients, as on a worker that updates some of the parameters."""
        together, _ = self._run(names, steps := len(_SCALES))
        for name in names if len(names) > 1 else ():
            why = "is not updated like that if other parameters have no gradients"
            try:
                alone, _ = self._run([name], steps, beside_others=True)
                if not _apart(together[name], alone[name]):
                    continue
            except PROBE_ERRORS as error:
                why = f"cannot be updated if other parameters have no gradients ({first_line(error)})"
            return Coupling(Scope.ALL, self._kind(name), f"updates each parameter in a way that {why}")
        return None

    def _takes_empty(self, names: Sequence[str]) -> bool:
        """Tries empty tensors in place of the parameters: their state must have the same keys and kinds of shapes."""
        if any(name in self.sparse or not self.values[name].dim() for name in names):
            return False
        kinds = []
        for rows in (None, 0):
            tiny = {name: marked(self.values[name][:rows].clone(), self.marks[name]) for name in names}
            with torch.random.fork_rng(devices=self.drawn):
                try:
                    optimizers = self._built(tiny, False)
                    for _ in _SCALES:
                        for name, param in tiny.items():
                            param.grad = self.slopes[name][:rows].clone()
                        for one in optimizers:
                            one.step()
                except PROBE_ERRORS:
                    return False
            kinds.append([_kinds_of_state(one, param) for param in tiny.values() for one in optimizers])
        return kinds[0] == kinds[1] and not any("other" in kind.values() for kind in kinds[0])

    def _keeps_other_shapes(self, reshaped: Sequence[str]) -> Coupling | None:
        if not reshaped:
            return None
        return Coupling(
            Scope.PARAMETER, self._kind(reshaped[0]), "keeps state whose shape differs from its parameter's"
        )

    def _kind(self, name: str) -> str:
        return type(self.made[self.groups[name][0]]).__name__

    def _run(
        self,
        names: Sequence[str],
        steps: int,
        half: Half | None = None,
        in_bowl: bool = False,
        beside_others: bool = False,
    ) -> tuple[dict[str, torch.Tensor], list[str]]:
        """Runs a trial of these parameters, or of a half of each. Every run draws the same random numbers.

        The others are absent, or are there without gradients. Returns how far each has moved after each step, and the
        parameters with state of another shape.
        """
        tiny = {name: marked(_half(self.values[name], half), self.marks[name]) for name in names}
        moved: dict[str, list[torch.Tensor]] = {name: [] for name in names}
        chance = torch.Generator()
        with torch.random.fork_rng(devices=self.drawn):
            optimizers = self._built(tiny, beside_others)
            start = {name: param.detach().clone() for name, param in tiny.items()}
            for step in range(steps):
                for name, param in tiny.items():
                    slope = self.slopes[name]
                    if in_bowl:
                        grad = _half(slope, half) + (param.detach() - start[name]) / _FAR
                    else:
                        # A common slope, as in training: quantities that only grow would stay as they are without it.
                        chance.manual_seed(1 + step)
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
            raise ArithmeticError("its updates are not finite")
        return courses, reshaped

    def _built(self, tiny: Mapping[str, nn.Parameter], beside_others: bool) -> list[Optimizer]:
        """Builds optimizers that hold only these parameters, or all. Raises ValueError if the groups differ from the
        user's.
        """
        everything = {name: tiny.get(name) for name in self.marks}
        for name, param in everything.items():
            if param is None:
                like = self.others[name] if name in self.others else self.values[name]
                everything[name] = placeholder(like, like.shape, self.marks[name])
        params = {name: param for name, param in everything.items() if param is not None}
        optimizers = [*self.build(params)]
        held = {id(param): name for name, param in params.items()}
        membership = Counter[tuple[str, int, int]]()
        for number, one in enumerate(optimizers):
            for group_index, group in enumerate(one.param_groups):
                membership.update((held[id(param)], number, group_index) for param in group["params"])
        if membership != Counter((name, *where) for name, where in self.groups.items()):
            raise ValueError("the function makes other groups for small tensors")
        if beside_others:
            return optimizers
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


def _kinds_of_state(optimizer: Optimizer, param: nn.Parameter) -> dict[str, str]:
    """By key: whether the state of a parameter is a "number", has the parameter's "shape", or is something "other"."""

    def kind(value: object) -> str:
        if isinstance(value, torch.Tensor):
            return "number" if value.dim() == 0 else "shape" if value.shape == param.shape else "other"
        return "number" if value is None or isinstance(value, (bool, int, float, str)) else "other"

    return {str(key): kind(value) for key, value in optimizer.state.get(param, {}).items()}


def _apart(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two courses of a parameter, a step a row, differ by more than rounding does."""
    if not one.numel():
        return False
    furthest, gap = (course.abs().reshape(len(course), -1).amax(1) for course in (one, one - other))
    return bool((gap > 1e-9 * furthest + 1e-13).any())
