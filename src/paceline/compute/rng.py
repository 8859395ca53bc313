"""Seeds, saves and restores the global random generators that user code draws from."""

from __future__ import annotations

import base64
import ctypes
import json
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_PYTHON: Any = getattr(random.getstate, "__self__", None)  # Python's global generator
_Words = ctypes.c_uint32 * 625  # of a Mersenne Twister, with the number of those that are used up


def _find_python_words() -> Any:
    """Returns the memory of Python's global generator: the number of used words, then the words. None if the memory is
    not laid out as in CPython.
    """
    if sys.implementation.name != "cpython" or type(_PYTHON) is not random.Random:
        return None
    _, (*words, used), _ = _PYTHON.getstate()
    in_memory = _Words.from_address(id(_PYTHON) + object.__basicsize__)
    return in_memory if in_memory[:] == [used, *words] else None


class _Numpy:
    """Reads and writes the state of numpy's global generator.

    Numpy's own functions convert each word to a Python number; this class copies the words from the generator's memory
    if possible. The second normal of a pair, which numpy keeps for the next draw, is not in that memory: it is read by
    drawing a normal, which either returns it or uses words.
    """

    def __init__(self) -> None:
        self._generator: Any = None
        self._words: Any = None

    def _look(self, generator: Any) -> None:
        """Finds the words of a generator: numpy's first one, or one that the script has set."""
        self._generator, self._words = generator, None
        if (state := generator.state)["bit_generator"] == "MT19937":
            words = _Words.from_address(generator.ctypes.state_address)
            self._words = words if words[:] == [*state["state"]["key"], state["state"]["pos"]] else None

    def snapshot(self, rand: Any) -> Any:
        """Returns the generator's state, for `has_changed` and `restore`."""
        if rand._bit_generator is not self._generator:
            self._look(rand._bit_generator)
        if self._words is None:
            return json.dumps(rand.get_state(legacy=False), default=lambda array: array.tolist())
        words = bytes(self._words)
        left = rand.standard_normal()
        if bytes(self._words) == words:  # it was the second normal of a pair
            self.restore(rand, (words, left))
            return words, left
        rand.standard_normal()  # the second normal of the pair
        ctypes.memmove(self._words, words, len(words))
        return words, None

    def has_changed(self, rand: Any, mark: Any) -> bool:
        """Whether anything was drawn since `snapshot`. Every draw uses words, unless a second normal was left."""
        if rand._bit_generator is not self._generator:
            self._look(rand._bit_generator)
        if isinstance(mark, str) or mark[1] is not None or self._words is None:
            return bool(self.snapshot(rand) != mark)
        return bool(bytes(self._words) != mark[0])

    def restore(self, rand: Any, mark: Any) -> None:
        """Sets the generator to a state that `snapshot` returned."""
        if rand._bit_generator is not self._generator:
            self._look(rand._bit_generator)
        if isinstance(mark, str):
            rand.set_state(json.loads(mark))
        elif mark[1] is None and self._words is not None:
            now = bytes(self._words)
            rand.standard_normal()
            if bytes(self._words) != now:  # no second normal was left before, but there is one now
                rand.standard_normal()
            ctypes.memmove(self._words, mark[0], len(mark[0]))
        else:
            *key, used = _Words.from_buffer_copy(mark[0])
            rand.set_state(("MT19937", key, used, int(mark[1] is not None), mark[1] or 0.0))


_NUMPY = _Numpy()
_PYTHON_WORDS = _find_python_words()


class RngState:
    """The global generators of torch (CPU and one device), `random`, and numpy if it is imported."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            torch.cuda.init()
            index = device.index if device.index is not None else torch.cuda.current_device()
            self._generators.append(torch.cuda.default_generators[index])
        elif device.type == "mps":
            self._generators.append(torch.mps._get_default_mps_generator())

    def __reduce__(self) -> tuple[Any, ...]:
        return RngState, (self._device,)  # a spawned loader process has global generators of its own

    def seed(self, seed: int) -> None:
        """Seeds every generator."""
        for generator in self._generators:
            generator.manual_seed(seed)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)

    def snapshot(self) -> tuple[Any, ...]:
        """Returns the generators' state, for `has_changed` and `restore`."""
        marks: list[Any] = [generator.get_state() for generator in self._generators]
        if _PYTHON_WORDS is None:
            marks.append(random.getstate())
        else:
            marks.append((bytes(_PYTHON_WORDS), _PYTHON.gauss_next))
        if "numpy" in sys.modules:
            marks.append(_NUMPY.snapshot(sys.modules["numpy"].random.mtrand._rand))
        return tuple(marks)

    def has_changed(self, mark: tuple[Any, ...]) -> bool:
        """Whether anything was drawn since `snapshot`; also true if numpy was imported since."""
        count = len(self._generators)
        for generator, state in zip(self._generators, mark, strict=False):
            if not torch.equal(generator.get_state(), state):
                return True
        python = mark[count]
        if _PYTHON_WORDS is None:
            moved = random.getstate() != python
        else:
            moved = bytes(_PYTHON_WORDS) != python[0] or _PYTHON.gauss_next != python[1]
        if moved or (len(mark) > count + 1) != ("numpy" in sys.modules):
            return True
        return len(mark) > count + 1 and _NUMPY.has_changed(sys.modules["numpy"].random.mtrand._rand, mark[count + 1])

    def restore(self, mark: tuple[Any, ...]) -> None:
        """Sets all generators to a state that `snapshot` returned."""
        count = len(self._generators)
        for generator, state in zip(self._generators, mark, strict=False):
            generator.set_state(state)
        words, normal = mark[count][0], mark[count][-1]
        if not isinstance(words, bytes):  # from random.getstate()
            random.setstate(mark[count])
        elif _PYTHON_WORDS is not None:
            ctypes.memmove(_PYTHON_WORDS, words, len(words))
            _PYTHON.gauss_next = normal
        else:  # the state of another worker that reads the memory
            used, *numbers = _Words.from_buffer_copy(words)
            random.setstate((random.Random.VERSION, (*numbers, used), normal))
        if len(mark) > count + 1:
            _NUMPY.restore(sys.modules["numpy"].random.mtrand._rand, mark[count + 1])

    def changes_since(self, before: tuple[Any, ...]) -> list[Any]:
        """Returns the generators that have drawn since `snapshot`: pairs of number and current state, for JSON."""
        pairs = enumerate(zip(self.snapshot(), before, strict=False))
        return [[number, _encode_state(now)] for number, (now, old) in pairs if not _same(now, old)]

    def apply_changes(self, changes: list[Any]) -> None:
        """Sets generators to the states in `changes`, which another worker with the same seed returned."""
        if changes:
            marks = list(self.snapshot())
            for number, encoded in changes:
                marks[number] = _decode_state(encoded)
            self.restore(tuple(marks))

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restores the generators after the context, so that draws inside do not affect the user's own streams."""
        mark = self.snapshot()
        try:
            yield
        finally:
            self.restore(mark)


def _same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def _encode_state(state: Any) -> Any:
    """A generator's state as JSON values, which `_decode_state` reads."""
    if isinstance(state, torch.Tensor):
        return {"tensor": base64.b64encode(state.numpy().tobytes()).decode()}
    if isinstance(state, bytes):
        return {"bytes": base64.b64encode(state).decode()}
    return {"tuple": [_encode_state(inner) for inner in state]} if isinstance(state, tuple) else state


def _decode_state(encoded: Any) -> Any:
    if not isinstance(encoded, dict):
        return encoded
    ((kind, value),) = encoded.items()
    if kind == "tuple":
        return tuple(map(_decode_state, value))
    data = base64.b64decode(value)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if kind == "tensor" else data
