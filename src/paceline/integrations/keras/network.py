"""A torch module around a Keras model: clean names, moving averages as buffers, random draws of the micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from paceline.compute.buffers import buffer
from paceline.errors import UsageError


class Network(nn.Module):
    """Holds the variables of a Keras model under the names of their paths, and runs the model.

    Trainable variables, and frozen ones of layers with ``trainable=False``, are parameters. Variables that layers make
    with ``trainable=False``, such as moving averages, are buffers. Torch modules in a
    `keras.layers.TorchModuleWrapper` are submodules. Keras' own variables refer to the same tensors.

    Args:
        model: The Keras model, which must be built.
    """

    keras_model: Any

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.__dict__["keras_model"] = model  # not as a submodule, or its parameters would have two names
        self._holders: list[tuple[Any, nn.Module, str]] = []  # of each variable: the module and the name in it
        self.variables: dict[str, Any] = {}  # Keras' trainable variables, by the names of the parameters
        self._add_torch_modules()
        for layer in model._flatten_layers():
            for variable in layer._trainable_variables:
                self._add_parameter(variable)
            for variable in layer._non_trainable_variables:
                self._add_buffer(variable)
        for layer in model._flatten_layers():
            self._declare(layer)
        by_tensor = {id(param): name for name, param in self.named_parameters()}
        for variable in model.trainable_variables:
            self.variables[by_tensor[id(variable._value)]] = variable

    def forward(self, inputs: Any) -> Any:
        """Calls the Keras model, in training mode if this module is in it."""
        self.bind()
        model = self.keras_model
        if model._call_has_training_arg:
            return model(inputs, training=self.training)
        return model(inputs)

    def train(self, mode: bool = True) -> Network:
        """Sets the mode of this module, and of the Keras model."""
        super().train(mode)
        if "keras_model" in vars(self):
            self.keras_model.train(mode)
        return self

    def bind(self) -> None:
        """Makes Keras' variables refer to the tensors that this module holds now."""
        for variable, holder, name in self._holders:
            held = holder._parameters.get(name)
            variable._value = holder._buffers[name] if held is None else held

    def _add_torch_modules(self) -> None:
        import keras

        for layer in self.keras_model._flatten_layers():
            if isinstance(layer, keras.layers.TorchModuleWrapper):
                self.add_module(free_name(self, layer.name), layer.module)

    def _add_parameter(self, variable: Any) -> None:
        if any(param is variable._value for param in self.parameters()):
            return  # of a wrapped torch module, or shared by two layers
        holder, name = self._holder_of(variable.path)
        holder.register_parameter(name, variable._value)
        self._holders.append((variable, holder, name))

    def _add_buffer(self, variable: Any) -> None:
        if any(one is variable for one, _, _ in self._holders):
            return
        if any(param is variable._value for param in self.parameters()):
            return  # a frozen parameter of a wrapped torch module
        holder, name = self._holder_of(variable.path)
        holder.register_buffer(name, variable._value.detach())
        self._holders.append((variable, holder, name))

    def _holder_of(self, path: str) -> tuple[nn.Module, str]:
        """Returns the module that holds the variable with this path, made where it is missing, and its name there."""
        *folders, last = path.split("/")
        holder: nn.Module = self
        for folder in folders:
            inner = holder._modules.get(plain_name(folder))
            if inner is None:
                inner = nn.Module()
                holder.add_module(free_name(holder, folder), inner)
            holder = inner
        return holder, free_name(holder, last)

    def _declare(self, layer: Any) -> None:
        """Declares how the buffers of a layer that its call changes are merged."""
        import keras

        if not isinstance(layer, keras.layers.BatchNormalization):
            return
        if layer.renorm:
            what = f"the layer {layer.name} is a BatchNormalization(renorm=True), whose corrections depend on the order"
            raise UsageError(f"{what} of the micro-batches", "leave renorm=True out")
        averages = [layer.moving_mean, layer.moving_variance]
        for variable, holder, name in self._holders:
            if any(variable is one for one in averages):
                buffer(holder, name, merge="affine", factor=layer.momentum)


def plain_name(text: str) -> str:
    """A name of Keras as a name in a torch module, which cannot have a dot."""
    return text.replace(".", "_")


def free_name(holder: nn.Module, text: str) -> str:
    """A name that the module does not have yet: the text, or with a number."""
    name = plain_name(text) or "variable"
    number, candidate = 1, name
    while hasattr(holder, candidate):
        candidate, number = f"{name}_{number}", number + 1
    return candidate


@contextmanager
def draws_of_the_micro_batch() -> Iterator[None]:
    """In the context, seed generators of Keras draw their seeds from torch's global generator.

    Paceline seeds that one for each micro-batch, so a random layer draws the same numbers on whichever worker computes
    the micro-batch. The states of the seed generators do not change.
    """
    import keras

    kind = keras.random.SeedGenerator
    before = kind.next

    def draw(generator: Any, ordered: bool = True) -> torch.Tensor:
        state = generator.state.value
        return torch.randint(0, 2**31 - 1, (2,), dtype=torch.int64).to(state)

    kind.next = draw
    try:
        yield
    finally:
        kind.next = before
