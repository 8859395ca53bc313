"""Compression of tensors on their way between workers."""

from __future__ import annotations

from typing import Any

import torch


class Compressor:
    """The interface of a compression: derive from it for one of your own."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Returns the compressed tensor, and what `decompress` needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Returns the tensor that `compress` took."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Returns the tensor."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Returns the tensor."""
        return tensor


class FP16Compressor(Compressor):
    """Sends floating-point tensors as float16; sums are computed in float16, too."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Returns the tensor in float16, and its dtype."""
        return (tensor.half() if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Returns the tensor in its dtype before."""
        return tensor.to(ctx)


class Compression:
    """The compressions: `none` and `fp16`."""

    none: type[Compressor] = NoneCompressor
    fp16: type[Compressor] = FP16Compressor
