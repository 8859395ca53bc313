"""Compiles modules that compute with shards (tensor=, context=).

torch.compile traces the user's code as if all tensors were full: an input that is a shard, and the output of a split
layer, show their full shapes, through operators that exist only in that trace. The backend then runs the traced
functions under the modes that run them on shards, while torch's own compiler traces what they compute, collectives
included. So compiled code computes what the modes compute without it. A *unit* is a module that is compiled this way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import fx, nn

from paceline.comm.torch_private import backend_of_compile, pytree
from paceline.compute.blocks import blocks_of, summarize_blocks
from paceline.errors import UsageError
from paceline.parallel.tensor_parallel.collective_ops import tracing
from paceline.parallel.tensor_parallel.redistribute import ShardPlacement
from paceline.parallel.tensor_parallel.sharded_mode import (
    ShardedTensorMode,
    modes_off,
    set_placement,
    tensors_in,
)

if TYPE_CHECKING:
    from paceline.parallel.sequence_parallel import SequenceParallel
    from paceline.parallel.tensor_parallel.layers import TensorCut

Tensor = torch.Tensor
_NOT_COMPILED = object()  # the output of a call that torch.compile leaves to Python
_ADVICE = "leave compile out"
COMPILER = "inductor"  # torch's backend that compiles the second trace


# ---- operators of the first trace, which change the shape that is shown. The second trace replaces them.


@torch.library.custom_op("paceline::split_layer", mutates_args=())
def _split_layer(x: Tensor, weight: Tensor, bias: Tensor | None, kind: int, width: int) -> Tensor:
    raise NotImplementedError


@_split_layer.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, kind: int, width: int) -> Tensor:
    if not x.is_floating_point():  # the numbers of entries of an embedding
        return weight.new_empty((*x.shape, width))
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    return x.new_empty((*x.shape[:-1], width), dtype=dtype)


@torch.library.custom_op("paceline::show_full", mutates_args=())
def _show_full(x: Tensor, dim: int, count: int) -> Tensor:
    raise NotImplementedError


@_show_full.register_fake
def _(x: Tensor, dim: int, count: int) -> Tensor:
    return x.new_empty([size * count if n == dim else size for n, size in enumerate(x.shape)])


@torch.library.custom_op("paceline::leave", mutates_args=())
def _leave(x: Tensor) -> Tensor:
    raise NotImplementedError


@_leave.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


_OPERATORS: Any = torch.ops.paceline


def call_split_layer(x: Tensor, weight: Tensor, bias: Tensor | None, kind: int, width: int) -> Tensor:
    """Returns the output of a split layer in the first trace, with its full shape.

    `kind` is the number by which `run_layer` of the backend knows the layer, `width` the last dimension of the output.
    """
    output: Tensor = _split_layer(x, weight, bias, kind, width)
    return output


def _run_shown(forward: Callable[..., Any], shards: Mapping[Any, Any], args: Any, kwargs: Any) -> Any:
    """Runs a forward in the first trace. `shards` has the dimension and the number of shards of inputs that are shards,
    by position or keyword. Outputs may be shards.
    """
    if not torch.compiler.is_dynamo_compiling():
        return _NOT_COMPILED
    args = [_show_full(x, *shards[n]) if n in shards else x for n, x in enumerate(args)]
    kwargs = {key: _show_full(x, *shards[key]) if key in shards else x for key, x in kwargs.items()}
    return pytree.tree_map_only(Tensor, _leave, forward(*args, **kwargs))


class _SecondTrace(fx.Interpreter):
    """Runs a graph of the first trace on shards."""

    def __init__(self, graph: fx.GraphModule, backend: ShardedBackend) -> None:
        super().__init__(graph)
        self._backend = backend
        self.leaving: list[Tensor] = []  # the outputs of the unit, which may be shards

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Runs a function of the graph."""
        if isinstance(target, torch._ops.HigherOrderOperator):
            function = {
                "tag_activation_checkpoint": "torch.utils.checkpoint",
                "autograd_function_apply": "a torch.autograd.Function",
            }.get(str(target), str(target))
            problem = f"compile with {self._backend.words} does not work with {function}, which {{where}} uses"
            raise UsageError(problem.format(where=self._backend.where), _ADVICE)
        if target in (_OPERATORS.split_layer, _OPERATORS.split_layer.default):
            return self._backend.run_layer(*args)
        if target in (_OPERATORS.show_full, _OPERATORS.show_full.default):
            x, dim, count = args
            with torch._C.DisableTorchFunction(), self._backend.modes[0].using_own_attribute():
                return set_placement(x.view_as(x), ShardPlacement(dim, (x.shape[dim] * count,), count))
        if target in (_OPERATORS.leave, _OPERATORS.leave.default):
            (x,) = args
            with torch._C.DisableTorchFunction():
                output = x.view_as(x)
                vars(output).update(self._backend.marks(x))
            self.leaving.append(output)
            return output
        return super().call_function(target, args, kwargs)


class ShardedBackend:
    """A backend of torch.compile for modules that compute with shards.

    `modes` run functions on shards, the first as the outermost; inputs of units may be shards of the first. `run_layer`
    runs a split layer, with the arguments of `call_split_layer`. `words` are those of the plan, for errors. `compiler`
    names torch's backend that compiles the second trace.
    """

    def __init__(
        self, modes: Sequence[ShardedTensorMode], run_layer: Callable[..., Tensor], words: str, compiler: str
    ) -> None:
        self.modes, self.run_layer, self.words, self._compiler = modes, run_layer, words, compiler
        self.where = ""  # the name of the unit that runs
        self.is_running = False  # whether a unit runs

    def marks(self, x: Tensor) -> dict[str, ShardPlacement]:
        """Returns the placements of a tensor by the modes' attributes."""
        return {mode.attribute: mark for mode in self.modes if (mark := vars(x).get(mode.attribute))}

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compiles a graph of the first trace. `inputs` are fake tensors and symbolic sizes.

        Outputs are full, except for those of the unit: after a graph break, the first trace knows local shapes alone.
        """
        nodes = graph.graph.find_nodes(op="placeholder")
        params = [isinstance(node.meta.get("example_value"), nn.Parameter) for node in nodes]
        # The inputs that functions of the user's code take.
        taken = [n for n, node in enumerate(nodes) if not all(_replaces_shape(user) for user in node.users)]
        marks: list[dict[str, ShardPlacement]] = []

        def run(*values: Any) -> tuple[Any, ...]:
            for value, is_param in zip(values, params, strict=True):
                if is_param:
                    value._is_param = True  # isinstance(value, nn.Parameter)
            trace.start()
            outputs = self._run_on_shards(graph, values)
            marks[:] = [self.marks(x) if isinstance(x, Tensor) else {} for x in outputs]
            return outputs

        with tracing() as trace:
            module = _module_that_calls(run, nodes, len(cast(Sequence[Any], graph.graph.output_node().args[0])))
            # Random numbers are those of uncompiled code: all workers draw the same, and comparisons are exact.
            options = {"config_patches": {"fallback_random": True}} if self._compiler == "inductor" else {}
            compiled = backend_of_compile(self._compiler)(module, inputs, **options)

        def call(*values: Any) -> Any:
            if any(isinstance(values[n], Tensor) and self.marks(values[n]) for n in taken):
                problem = f"compile with {self.words} does not work with {self.where}, which uses the weight of a "
                raise UsageError(f"{problem}split layer without calling the layer", _ADVICE)
            outputs = compiled(*values)
            for output, mark in zip(outputs, marks, strict=True):
                if mark:
                    vars(output).update(mark)
            return outputs

        return call

    def _run_on_shards(self, graph: fx.GraphModule, values: Sequence[Any]) -> tuple[Any, ...]:
        """Runs a graph of the first trace under the modes."""
        interpreter = _SecondTrace(graph, self)
        with ExitStack() as stack:
            for mode in self.modes:
                stack.enter_context(mode)
            outputs = interpreter.run(*values)
        full = tuple(x if any(x is one for one in interpreter.leaving) else self._gather(x) for x in outputs)
        for mode in self.modes:
            mode.redistributor.forget_shared()
        return full

    def _gather(self, x: Any) -> Any:
        for mode in self.modes if isinstance(x, Tensor) else ():
            with mode.using_own_attribute():
                x = mode.gather_full(x)
        return x


def _replaces_shape(node: fx.Node) -> bool:
    return node.target in (
        _OPERATORS.split_layer,
        _OPERATORS.split_layer.default,
        _OPERATORS.show_full,
        _OPERATORS.show_full.default,
    )


def _module_that_calls(run: Callable[..., tuple[Any, ...]], nodes: Sequence[fx.Node], count: int) -> fx.GraphModule:
    """Returns a module that calls a function with its inputs, which are those of `nodes`, and returns its `count`
    outputs. Torch's compilers take such a module, and trace what the function does.
    """
    graph = fx.Graph()
    for node in nodes:
        graph.placeholder(node.name).meta = dict(node.meta)
    outputs = graph.call_function(run, tuple(graph.nodes))
    graph.output(tuple(graph.call_function(_item, (outputs, index)) for index in range(count)))
    return fx.GraphModule(nn.Module(), graph)


def _item(values: Sequence[Any], index: int) -> Any:
    return values[index]


class CompiledUnit:
    """The compiled forward of a module that computes with shards.

    `is_eager` says whether a call runs without compiled code, as in comparisons. With `of_shards`, so does a call with
    full inputs, and code is refused that torch.compile cannot trace as one graph: outside of a graph, no mode would see
    how often a gradient counts. With `static`, each shape gets its own kernels.
    """

    def __init__(
        self,
        name: str,
        plain: Callable[..., Any],
        backend: ShardedBackend,
        is_eager: Callable[[], bool],
        static: bool,
        of_shards: bool,
    ) -> None:
        self.name, self.plain, self._backend, self._is_eager = name, plain, backend, is_eager
        self._of_shards = of_shards
        # Units have their own caches: torch identifies the replaced forwards inside of them.
        self._options: Any = {"dynamic": False if static else None, "fullgraph": of_shards, "isolate_recompiles": True}
        self._kernels: Any = None
        self._ranks: list[int] = []  # of this worker in the modes' units; the kernels are for these

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        shards = self._input_shards(args, kwargs)
        if shards is None or (self._of_shards and not shards) or self._backend.is_running or self._is_eager():
            return self.plain(*args, **kwargs)
        backend, before = self._backend, self._backend.where
        if self._ranks != (ranks := [mode.redistributor.unit.rank for mode in backend.modes]):
            self._ranks, self._kernels = ranks, torch.compile(_run_shown, backend=backend, **self._options)
        backend.where, backend.is_running = self.name, True
        try:
            with modes_off():
                output = self._kernels(self.plain, shards, list(args), kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            raise self._explained(error) from error
        finally:
            backend.where, backend.is_running = before, False
        return self.plain(*args, **kwargs) if output is _NOT_COMPILED else output

    def _input_shards(self, args: Any, kwargs: Any) -> dict[Any, tuple[int, int]] | None:
        """Returns the dimension and number of shards of each input that is a shard; None if compiled code cannot take
        one of them.
        """
        backend, shards = self._backend, dict[Any, tuple[int, int]]()
        for key, x in (*enumerate(args), *kwargs.items()):
            for tensor in tensors_in([x]):
                marks = backend.marks(tensor)
                if not marks:
                    continue
                mark = marks.get(backend.modes[0].attribute)
                if tensor is not x or len(marks) > 1 or mark is None or not _is_plain(mark, backend.modes[0]):
                    return None
                shards[key] = mark.dim, mark.count
        return shards

    def _explained(self, error: Exception) -> UsageError:
        cause = getattr(error, "inner_exception", None)
        if isinstance(cause, UsageError):
            return cause
        reason = next((line.strip() for line in str(cause or error).splitlines() if line.strip()), "no reason is known")
        return UsageError(f"compile with {self._backend.words} does not work with {self.name} ({reason})", _ADVICE)


def _is_plain(placement: ShardPlacement, mode: ShardedTensorMode) -> bool:
    """Whether each worker of the mode has an equal shard of one section."""
    among_all = placement.count == mode.redistributor.size and placement.group is None
    return among_all and len(placement.sections) == 1 and placement.is_even


def compile_units(
    model: nn.Module, sequences: SequenceParallel | None, layers: TensorCut | None, by_block: bool, static: bool
) -> tuple[str, str]:
    """Compiles the blocks of a model whose `sequences` or `layers` are split, or the model as one unit if it has no
    blocks. Returns the decision and its reason.
    """
    parts = [part for part in (sequences, layers) if part is not None]
    words = " ".join(part.words for part in parts)
    run_layer = layers.run_traced if layers is not None else _split_layer
    backend = ShardedBackend([part.mode for part in parts], run_layer, words, COMPILER)

    def unit(name: str, forward: Callable[..., Any]) -> CompiledUnit:
        def is_eager() -> bool:
            return any(part.is_eager() for part in parts)

        return CompiledUnit(name, forward, backend, is_eager, static, sequences is not None)

    blocks = blocks_of(model)
    if sequences is not None:
        sequences.prepare_compiled()
    if layers is not None:
        layers.prepare_compiled(backend)
        blocks = {} if any(layers.is_split(block) for block in blocks.values()) else blocks
    for name, block in blocks.items():
        block.forward = unit(name, block.forward)
    if blocks:
        what = f"{len(blocks)} blocks are compiled separately: {summarize_blocks(blocks)}"
        return what, f"code between blocks runs uncompiled with {words}"
    if layers is None or by_block:
        return "nothing is compiled", "the model has no blocks but layers"
    layers.replace_model_forward(partial(unit, type(model).__name__))
    return "the model is compiled as one unit", "it has no blocks but layers"
