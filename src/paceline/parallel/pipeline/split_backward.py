"""Splits a backward in two: first the gradients of the inputs, later those of the weights (zero bubble).

The stage before waits only for the gradients of the inputs, so a worker computes those of the weights when it would
otherwise wait (Qi, Wan, Huang, Lin, "Zero Bubble Pipeline Parallelism", 2023). Autograd can be run in two parts because
an operation computes only those gradients that are asked for. In the graph, the *input path* is the set of operations
that lead to an input. The first part runs along it and notes the gradient that reaches each operation which also has a
weight; the second part runs each of these operations once more, for its weights alone. A weight that several of these
operations use (tied layers) gets its gradient in the first part, as the second would count some ways twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node


class SplitBackward:
    """The backward of one micro-batch through one stage. `outputs` and `grads` are its roots; `inputs` and `weights`
    are leaves. `run_inputs` fills the `grad` of the inputs, and `run_weights`, once after it, that of the weights.
    """

    def __init__(
        self,
        outputs: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
    ) -> None:
        self._outputs, self._grads, self._inputs = list(outputs), list(grads), list(inputs)
        self._weights = {id(weight): weight for weight in weights}
        self._arrived: dict[Node, tuple[torch.Tensor | None, ...]] = {}  # the gradients that reach an operation
        # The weights of each operation of the input path; under None, those of outputs that lead to no input.
        self._later: dict[Node | None, list[torch.Tensor]] = {}
        self._aside: list[tuple[torch.Tensor, torch.Tensor]] = []  # outputs that lead to no input, and their gradients
        self._early: list[tuple[torch.Tensor, torch.Tensor | None]] = []  # weights, and gradients of the first part

    def run_inputs(self) -> None:
        """Computes the gradients of the inputs, and of weights that several operations use."""
        if not self._inputs or not self._outputs:
            return
        self._later, several = self._operations_with_weights()
        handles = [node.register_prehook(self._noting(node)) for node in self._later if node is not None]
        leaves = [*self._inputs, *several]
        try:
            made = torch.autograd.grad(self._outputs, leaves, self._grads, retain_graph=True, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        for tensor, grad in zip(self._inputs, made, strict=False):
            tensor.grad = grad
        self._early = [*zip(several, made[len(self._inputs) :], strict=True)]

    def run_weights(self) -> None:
        """Computes the gradients of the weights; hooks of the weights see them as after any backward."""
        if not self._outputs:
            return
        if not self._inputs:
            torch.autograd.backward(self._outputs, self._grads)
            return
        for weight, grad in self._early:
            if grad is not None:
                torch.autograd.backward([weight], [grad])
        for node, weights in self._later.items():
            if node is None:
                roots, grads = zip(*self._aside, strict=True)
                torch.autograd.backward(roots, grads, inputs=weights)
                continue
            arrived = [(number, grad) for number, grad in enumerate(self._arrived.pop(node, ())) if grad is not None]
            if arrived:
                edges = [GradientEdge(node, number) for number, _ in arrived]
                torch.autograd.backward(edges, [grad for _, grad in arrived], inputs=weights)
        self._later.clear()
        self._outputs.clear()

    def _noting(self, node: Node) -> Any:
        def note(grads: tuple[torch.Tensor | None, ...]) -> None:
            self._arrived[node] = grads

        return note

    def _operations_with_weights(self) -> tuple[dict[Node | None, list[torch.Tensor]], list[torch.Tensor]]:
        """Returns the weights that each operation of the input path uses alone, and those that several use."""
        on_path = self._input_path()
        pairs = zip(self._outputs, self._grads, strict=True)
        self._aside = [(output, grad) for output, grad in pairs if not on_path.get(_node(output), False)]
        users: dict[int, list[Node | None]] = {}
        below: dict[Node | None, list[Node]] = {None: [_node(output) for output, _ in self._aside]}
        below |= {
            node: [following for following, _ in node.next_functions if following and not on_path[following]]
            for node, leads in on_path.items()
            if leads
        }
        for node, beside in below.items():
            for number in {id(weight) for weight in self._weights_below(beside)}:
                users.setdefault(number, []).append(node)
        alone: dict[Node | None, list[torch.Tensor]] = {}
        for number, nodes in users.items():
            if len(nodes) == 1:
                alone.setdefault(nodes[0], []).append(self._weights[number])
        return alone, [self._weights[number] for number, nodes in users.items() if len(nodes) > 1]

    def _input_path(self) -> dict[Node, bool]:
        """Returns for each operation below the outputs whether it leads to an input."""
        inputs, leads = {id(tensor) for tensor in self._inputs}, dict[Node, bool]()
        stack = [_node(output) for output in self._outputs]
        entered = set[Node]()
        while stack:
            node = stack[-1]
            following = [function for function, _ in node.next_functions if function is not None]
            if node in leads:
                stack.pop()
            elif node in entered:
                leads[node] = id(_leaf(node)) in inputs or any(leads[function] for function in following)
                stack.pop()
            else:
                entered.add(node)
                stack += [function for function in following if function not in leads]
        return leads

    def _weights_below(self, nodes: Sequence[Node]) -> Iterator[torch.Tensor]:
        """Yields the weights that operations outside of the input path lead to."""
        stack, seen = [*nodes], set[Node]()
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            if id(leaf := _leaf(node)) in self._weights:
                yield leaf
            stack += [function for function, _ in node.next_functions if function is not None]


def _node(tensor: torch.Tensor) -> Node:
    """Returns the operation that made a tensor; for a leaf, the node that accumulates its gradient."""
    return torch.autograd.graph.get_gradient_edge(tensor).node


def _leaf(node: Node) -> Any:
    """Returns the leaf whose gradient a node accumulates; None for other nodes."""
    return getattr(node, "variable", None)
