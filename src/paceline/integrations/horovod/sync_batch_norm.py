"""BatchNorm whose statistics are those of all workers' batches."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.integrations.horovod.context import size
from paceline.integrations.horovod.operations import Sum, allreduce_async_, synchronize


def _summed(tensor: torch.Tensor, name: str) -> torch.Tensor:
    result: torch.Tensor = synchronize(allreduce_async_(tensor, name=f"sync_batch_norm.{name}", op=Sum))
    return result


def _per_channel(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.view(1, -1, *[1] * (like.dim() - 2)).to(like.dtype)


class _SyncFunction(torch.autograd.Function):
    """Normalizes with the mean and variance of all workers' batches.

    Statistics are computed in two passes in float64: means first, then the squares of the deviations from them.
    """

    @staticmethod
    def forward(ctx: Any, batch: torch.Tensor, weight: Any, bias: Any, eps: float) -> Any:
        """Returns the normalized batch, and mean, variance and count."""
        channels = batch.shape[1]
        over = [dim for dim in range(batch.dim()) if dim != 1]
        rows = batch.numel() // channels
        sums = torch.cat([batch.double().sum(over), torch.tensor([rows], dtype=torch.float64, device=batch.device)])
        sums = _summed(sums, "sum")
        count = sums[-1]
        mean = sums[:-1] / count
        deviation = batch.double() - mean.view(1, -1, *[1] * (batch.dim() - 2))
        variance = _summed(deviation.square().sum(over), "squares") / count
        inverse = torch.rsqrt(variance + eps)
        normalized = (deviation * inverse.view(1, -1, *[1] * (batch.dim() - 2))).to(batch.dtype)
        ctx.save_for_backward(normalized, weight, inverse, count)
        ctx.over, ctx.has_bias = over, bias is not None
        output = normalized if weight is None else normalized * _per_channel(weight, batch)
        output = output if bias is None else output + _per_channel(bias, batch)
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(batch.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """The gradients of batch, weight and bias; those of weight and bias are this worker's, as in Horovod."""
        normalized, weight, inverse, count = ctx.saved_tensors
        grad = grads[0].double()
        shape = (1, -1, *[1] * (grad.dim() - 2))
        of_bias = grad.sum(ctx.over)
        of_weight = (grad * normalized.double()).sum(ctx.over)
        sums = _summed(torch.cat([of_bias, of_weight]), "gradients") / count
        mean_grad, mean_product = sums.view(2, -1)
        scale = inverse if weight is None else inverse * weight.double()
        inner = grad - mean_grad.view(shape) - normalized.double() * mean_product.view(shape)
        of_batch = (inner * scale.view(shape)).to(grads[0].dtype)
        return (
            of_batch,
            None if weight is None else of_weight.to(weight.dtype),
            of_bias.to(grads[0].dtype if weight is None else weight.dtype) if ctx.has_bias else None,
            None,
        )


class HorovodSyncBatchNorm(_BatchNorm):
    """BatchNorm over any number of dimensions, whose statistics are those of all workers' batches, on CPU or GPU.

    Args:
        num_features: The number of channels, the second dimension of the input.
        eps: A value that is added to the variance.
        momentum: The weight of a batch in the moving averages; None for the mean of all batches.
        affine: Whether there are a weight and a bias per channel.
        track_running_stats: Whether there are moving averages, which `eval()` uses.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm needs an input with 2 dimensions or more, got {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 (as in torch)
        """Normalizes a batch."""
        self._check_input_dim(input)
        uses_batch = self.training or self.running_mean is None
        if not uses_batch or size() == 1:
            return super().forward(input)
        function: Any = _SyncFunction
        output, mean, variance, count = function.apply(input, self.weight, self.bias, self.eps)
        if self.training and self.running_mean is not None and self.running_var is not None:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            with torch.no_grad():
                unbiased = variance * (count / (count - 1).clamp(min=1))
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)
        result: torch.Tensor = output
        return result
