"""A convolution with large kernels as one product of matrices: the sums of nn.Conv2d, for a processor made for such products.

What a kernel sees at each of its places is copied into a row, and the row's dot product with each kernel is what the
convolution gives there. A CPU's tiles (AMX) multiply bfloat16 so fast that the copies are worth it, above all backwards: the
kernels' gradient is one product more, the picture's another, whose rows are added where they were copied from.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def places(side: int, kernel: int, stride: int) -> int:
    """Where a kernel fits along one side of a picture."""
    return (side - kernel) // stride + 1


def convolve(images: Tensor, kernels: Tensor, stride: int) -> Tensor:
    """(batch, in, H, W), (out, in, k, k) -> (batch, out, h, w), as F.conv2d does without padding."""
    size = kernels.shape[-1]
    high, wide = (places(side, size, stride) for side in images.shape[2:])
    pixels, weights = images.permute(0, 2, 3, 1), kernels.permute(0, 2, 3, 1)  # (batch, H, W, in), (out, k, k, in)
    found: Tensor = _Products.apply(pixels, weights.flatten(1), size, stride)  # type: ignore[no-untyped-call]
    return found.view(len(images), high, wide, -1).permute(0, 3, 1, 2)


class _Products(torch.autograd.Function):
    """(batch, H, W, in), (out, k * k * in) -> (batch * h * w, out). By hand: autograd would keep each copy apart."""

    @staticmethod
    def forward(ctx: Any, pixels: Tensor, weights: Tensor, size: int, stride: int) -> Tensor:
        seen = pixels.new_empty(_shape(pixels.shape, size, stride))
        for (y, x), window in _windows(pixels, size, stride):
            seen[:, y, x] = window
        rows = seen.flatten(3).flatten(0, 2)  # (batch * h * w, k * k * in)
        ctx.save_for_backward(rows, weights)
        ctx.shape, ctx.size, ctx.stride = pixels.shape, size, stride
        products: Tensor = rows @ weights.mT
        return products

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        rows, weights = ctx.saved_tensors
        kernels = gradient.mT @ rows
        if not ctx.needs_input_grad[0]:
            return None, kernels, None, None
        torch.mm(gradient, weights, out=rows)  # nobody needs the copies any more, and they are the largest of all tensors
        parts = rows.view(_shape(ctx.shape, ctx.size, ctx.stride))
        pixels = gradient.new_zeros(ctx.shape, dtype=torch.float32)  # each is in many rows: their sum is not rounded each time
        for (y, x), window in _windows(pixels, ctx.size, ctx.stride):
            window += parts[:, y, x]
        return pixels.to(rows.dtype), kernels, None, None


def _shape(pixels: torch.Size, size: int, stride: int) -> tuple[int, ...]:
    """Of all that kernels see: (batch, h, w, k, k * in)."""
    batch, height, width, channels = pixels
    return batch, places(height, size, stride), places(width, size, stride), size, size * channels


def _windows(pixels: Tensor, size: int, stride: int) -> Iterator[tuple[tuple[int, int], Tensor]]:
    """What a kernel sees at each place (y, x): (batch, k, k * in), in long runs, since channels lie innermost."""
    _, high, wide, _, run = _shape(pixels.shape, size, stride)
    lines, step = pixels.flatten(2), stride * pixels.shape[3]  # (batch, H, W * in)
    for y in range(high):
        for x in range(wide):
            yield (y, x), lines[:, y * stride : y * stride + size, x * step : x * step + run]
