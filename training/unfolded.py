"""A convolution with large kernels as one product of matrices: the sums of nn.Conv2d, for a processor made for such products.

What a kernel sees at each of its places is copied into a row, and the row's dot product with each kernel is what the
convolution gives there. A CPU's tiles (AMX) multiply bfloat16 so fast that the copies are worth it, above all backwards: the
kernels' gradient is one product more, the picture's another, whose rows are added where they were copied from.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def convolve(images: Tensor, kernels: Tensor, stride: int) -> Tensor:
    """(batch, in, H, W), (out, in, k, k) -> (batch, out, h, w), as F.conv2d does without padding."""
    batch, _, height, width = images.shape
    size = kernels.shape[-1]
    pixels, weights = images.permute(0, 2, 3, 1), kernels.permute(0, 2, 3, 1)  # (batch, H, W, in), (out, k, k, in)
    found: Tensor = _Products.apply(pixels, weights.flatten(1), size, stride)  # type: ignore[no-untyped-call]
    return found.view(batch, (height - size) // stride + 1, (width - size) // stride + 1, -1).permute(0, 3, 1, 2)


class _Products(torch.autograd.Function):
    """(batch, H, W, in), (out, k * k * in) -> (batch * h * w, out). By hand: autograd would keep each copy apart."""

    @staticmethod
    def forward(ctx: Any, pixels: Tensor, weights: Tensor, size: int, stride: int) -> Tensor:
        rows = pixels.new_empty(_shape(pixels.shape, size, stride))
        for (y, x), seen in _windows(pixels, size, stride):
            rows[:, y, x] = seen
        rows = rows.flatten(3).flatten(0, 2)
        ctx.save_for_backward(rows, weights)
        ctx.shape, ctx.size, ctx.stride = pixels.shape, size, stride
        products: Tensor = rows @ weights.mT
        return products

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        rows, weights = ctx.saved_tensors
        spread = None
        if ctx.needs_input_grad[0]:
            parts = (gradient @ weights).view(_shape(ctx.shape, ctx.size, ctx.stride))
            spread = torch.zeros(ctx.shape, dtype=torch.float32)  # a pixel is in many rows: their sum is not rounded each time
            for (y, x), seen in _windows(spread, ctx.size, ctx.stride):
                seen += parts[:, y, x]
            spread = spread.to(rows.dtype)
        return spread, gradient.mT @ rows, None, None


def _shape(pixels: torch.Size, size: int, stride: int) -> tuple[int, ...]:
    """Of all that kernels see: (batch, h, w, k, k * in)."""
    batch, height, width, channels = pixels
    return batch, (height - size) // stride + 1, (width - size) // stride + 1, size, size * channels


def _windows(pixels: Tensor, size: int, stride: int) -> Any:
    """What a kernel sees at each place (y, x): (batch, k, k * in), in long runs, since channels lie innermost."""
    _, high, wide, _, run = _shape(pixels.shape, size, stride)
    lines, step = pixels.flatten(2), stride * pixels.shape[3]  # (batch, H, W * in)
    for y in range(high):
        for x in range(wide):
            yield (y, x), lines[:, y * stride : y * stride + size, x * step : x * step + run]
