"""Measures a forward and backward of a model block by block, with the values of one block in memory at a time.

The script's own forward runs once. Each block that it calls runs its backward right after its forward, from a gradient
of ones, and hands on an output without history. So neither the activations of two blocks nor, where the model was built
without memory, their parameters have to be in memory together.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from paceline.comm.torch_private import pytree
from paceline.compute.blocks import by_block
from paceline.compute.expert_modules import inputs_of, is_experts
from paceline.compute.forward_backward import Loss
from paceline.compute.microbatches import Chunk, tensors_of
from paceline.errors import UsageError
from paceline.parallel.parallel_job import ParallelJob
from paceline.parallel.pipeline.stage_forward import form_of


@dataclass
class BlockFigures:
    """What a block took for a micro-batch: seconds, and bytes. The first block includes what precedes it, and each the
    code after it up to the next one.
    """

    forward: float = 0.0
    backward: float = 0.0
    saved: int = 0  # for the backward
    passes: int = 0  # handed on to the next block, with gradients
    routed: float = 0.0  # sent to experts and back, in the forward
    expert_parameters: int = 0
    form: Any = None  # of its result, as the messages of a pipeline have it


class BlockProbe:
    """Measures the blocks with these `names` in the model of a job. Their parameters may have no values."""

    def __init__(self, job: ParallelJob, names: Sequence[str]) -> None:
        modules = dict(job.model.named_modules())
        self._job, self._blocks = job, [modules[name] for name in names]
        *self._names_of_blocks, rest = by_block([name for name, _ in job.model.named_parameters()], names)
        if names == ("",):  # the model is one block
            self._names_of_blocks, rest = [[name for name, _ in job.model.named_parameters()]], []
        self._rest_names = rest
        self._rest = [param for name, param in job.model.named_parameters() if name in {*rest} and param.requires_grad]
        self._seen: dict[int, Any] = {}  # storages that are counted, by identity
        self.figures: list[BlockFigures] = []

    def largest_block(self) -> list[nn.Parameter]:
        """Returns the parameters of the block that has most elements."""
        params = dict(self._job.model.named_parameters())
        blocks = [[params[name] for name in names] for names in self._names_of_blocks]
        return max(blocks, key=lambda block: sum(param.numel() for param in block))

    def run(self, chunk: Chunk, counts_bytes: bool = False) -> list[BlockFigures]:
        """Computes a chunk forward and backward. Returns the seconds of each block, and the bytes if `counts_bytes`,
        which takes time.
        """
        job = self._job
        self.figures = [BlockFigures() for _ in self._blocks]
        self._current, self._counts_bytes, self._outputs = 0, counts_bytes, list[torch.Tensor]()
        forwards = [(block, vars(block).get("forward"), block.forward) for block in self._blocks]
        for number, (block, _, forward) in enumerate(forwards):
            vars(block)["forward"] = partial(self._call, number, block, forward)
        try:
            with self._values(self._rest_names), self._experts(), torch.enable_grad(), job.autocast():
                self._see_parameters()
                with self._counting():
                    self._start()
                    result = job.loss(job.forward(job.model, chunk.batch), chunk.batch)
                    loss = Loss.of(result, chunk, trainable=True).total
                    self._stop("forward")
                self._differentiate([loss], [*self._rest, *self._outputs])
        finally:
            for block, replaced, _ in forwards:
                if replaced is None:
                    del vars(block)["forward"]
                else:
                    vars(block)["forward"] = replaced
            self._outputs.clear()
            self._seen.clear()
        return self.figures

    def _call(self, number: int, block: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls a block, runs its backward, and returns its output without history."""
        self._stop("forward")  # of what precedes it
        leaves, structure = pytree.tree_flatten((args, kwargs))
        given = {n: x for n, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.requires_grad}
        if number > self._current:
            self.figures[self._current].passes = sum(x.nbytes for x in given.values())
        self._current = number
        inputs = {n: x.detach().requires_grad_() for n, x in given.items()}
        args, kwargs = pytree.tree_unflatten([inputs.get(n, leaf) for n, leaf in enumerate(leaves)], structure)
        with self._values(self._names_of_blocks[number]):
            self._see_parameters()
            with self._counting():
                for x in inputs.values():
                    self._save(x)
                self._start()
                output = forward(*args, **kwargs)
                self._stop("forward")
            params = [param for param in block.parameters() if param.requires_grad]
            outputs = [x for x in tensors_of(output) if x.requires_grad]
            grads = self._differentiate(outputs, [*params, *inputs.values()])[len(params) :]
        if number == 0 and self._rest:  # what precedes the first block
            sources = [(x, grad) for x, grad in zip(given.values(), grads, strict=True) if grad is not None]
            self._differentiate([x for x, _ in sources], self._rest, [grad for _, grad in sources])
        handed_on = {x.untyped_storage()._cdata for x in tensors_of(output)}
        self._seen = {key: storage for key, storage in self._seen.items() if key in handed_on}
        self._see_parameters()
        if self._counts_bytes:
            self.figures[number].form = _form(output)
        output = pytree.tree_map_only(torch.Tensor, _without_history, output)
        self._outputs = [x for x in tensors_of(output) if x.requires_grad]
        self._start()
        return output

    def _differentiate(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], grads: Sequence[torch.Tensor] = ()
    ) -> Sequence[torch.Tensor | None]:
        """Computes gradients, and adds the seconds to the backward of the present block."""
        if not outputs or not inputs:
            return [None] * len(inputs)
        ones = grads or [torch.ones_like(x) for x in outputs]
        self._start()
        result = torch.autograd.grad(outputs, inputs, ones, allow_unused=True, retain_graph=bool(grads))
        self._stop("backward")
        return result

    # -- seconds ----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._since = time_on(self._job.device)

    def _stop(self, kind: str) -> None:
        figures, now = self.figures[self._current], time_on(self._job.device)
        setattr(figures, kind, getattr(figures, kind) + now - self._since)

    # -- bytes ------------------------------------------------------------------------------------------------------

    def _values(self, names: Sequence[str]) -> AbstractContextManager[None]:
        values = self._job.values
        return nullcontext() if values is None else values.lent(names)

    def _counting(self) -> AbstractContextManager[Any]:
        return saved_tensors_hooks(self._save, lambda x: x) if self._counts_bytes else nullcontext()

    def _see_parameters(self) -> None:
        """Leaves the memory of parameters out of what is counted."""
        for param in self._job.model.parameters() if self._counts_bytes else ():
            storage = param.untyped_storage()
            self._seen[storage._cdata] = storage

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        """Counts the memory of a tensor that is kept for the backward, once."""
        storage = tensor.untyped_storage()
        if self._counts_bytes and storage._cdata not in self._seen:
            self._seen[storage._cdata] = storage
            self.figures[self._current].saved += storage.nbytes()
        return tensor.detach()

    @contextmanager
    def _experts(self) -> Iterator[None]:
        """Counts what layers of experts would exchange."""

        def note(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
            tokens, indices, weights = inputs_of(module, args, kwargs)
            token = tokens.element_size() * tokens.shape[-1]
            figures = self.figures[self._current]
            # A pair of a token and an expert: the token, its weight and the expert's number there, the result back.
            figures.routed += indices.numel() * (2 * token + weights.element_size() + NUMBER)
            figures.expert_parameters += sum(param.numel() for param in module.parameters())

        modules = [module for module in self._job.model.modules() if is_experts(module)] if self._counts_bytes else []
        hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in modules]
        yield
        for hook in hooks:
            hook.remove()


NUMBER = 4  # bytes of the number of an expert


def _form(output: Any) -> Any:
    try:
        return form_of(output, "a block")
    except UsageError:  # which a pipeline refuses
        return None


def _without_history(x: torch.Tensor) -> torch.Tensor:
    return x.detach().requires_grad_() if x.requires_grad else x


def time_on(device: torch.device) -> float:
    """Returns the time in seconds when the device has computed all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
