"""Computes a convolution with large kernels by products of spectra: nn.Conv2d's results for less than a third of the work.

A convolution with stride s is the sum of s * s ordinary ones, each between every s-th row and column of picture and kernel
(their phases). In the Fourier domain each of these is one product per frequency; real pictures need only half of the
frequencies, and Gauss's trick makes a complex product from three real ones. So everything is a matrix: `reads` and `weighs` map
picture and kernel to the points where they are multiplied, `writes` maps the products to the convolution's result. For the
second convolution of `paper` (20x20, kernel 9, stride 2) that is 4 phases x 148 points = 592 products instead of 36 places x 81
= 2,916. In bfloat16 spectra are rounded too, and results and gradients are twice as far from float32's as nn.Conv2d's are.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def convolve(images: Tensor, kernels: Tensor, stride: int) -> Tensor:
    """(batch, in, H, H), (out, in, k, k) -> (batch, out, h, h), as F.conv2d does without padding."""
    batch, size, out, kernel = len(images), images.shape[-1], len(kernels), kernels.shape[-1]
    places = (size - kernel) // stride + 1
    pictures, weights = phases(images, stride), phases(kernels, stride)  # (n * n, batch, in * s * s), (k * k, out, in * s * s)
    reads, weighs, writes = (matrix.to(images.dtype) for matrix in points(math.isqrt(len(pictures)), math.isqrt(len(weights))))
    spectra = (reads @ pictures.flatten(1)).unflatten(1, (batch, -1))  # (points, batch, in * s * s)
    filters = (weighs @ weights.flatten(1)).unflatten(1, (out, -1))  # (points, out, in * s * s)
    products: Tensor = _Products.apply(spectra, filters)  # type: ignore[no-untyped-call]
    output = writes @ products.flatten(1)  # (m * m, batch * out)
    side = math.isqrt(len(output))
    return output.view(side, side, batch, out)[:places, :places].permute(2, 3, 0, 1)


def phases(tensor: Tensor, stride: int) -> Tensor:
    """(a, b, H, H) -> (n * n, a, s * s * b): the s x s values at each of n x n places; zeros fill up the last ones."""
    places = tensor.movedim(1, 3)  # (a, H, H, b), the order in memory, which their gradient then has too
    count = -(-places.shape[1] // stride)
    missing = count * stride - places.shape[1]
    if missing:
        places = F.pad(places, (0, 0, 0, missing, 0, missing))
    parts = places.unflatten(2, (count, stride)).unflatten(1, (count, stride))  # (a, n, s, n, s, b)
    gathered: Tensor = parts.permute(1, 3, 0, 2, 4, 5).reshape(count * count, len(tensor), -1)
    return gathered


@functools.cache
def points(size: int, kernel: int) -> tuple[Tensor, Tensor, Tensor]:
    """Matrices (P, size^2), (P, kernel^2), (m^2, P) for size x size pictures, kernel x kernel weights and m = size - kernel + 1.

    Multiplying at the P points makes a correlation that is circular with period `size`; its first m places do not wrap around.
    """
    along = torch.arange(size, dtype=torch.float64)
    places = size - kernel + 1
    reads, weighs, writes = [], [], []
    for row in range(size):
        for column in range(size):
            mirrored = (-row % size, -column % size)  # where a real picture has the complex conjugate
            if mirrored < (row, column):
                continue
            angle = 2 * math.pi / size * (row * along[:, None] + column * along)
            cosine, sine = angle.cos(), angle.sin()
            if mirrored == (row, column):  # a real frequency: the sine is zero
                pairs = [(cosine, cosine, cosine)]
            else:  # (a - ib)(c + id) = ac + bd + i(ad - bc), by Gauss's three products, doubled for the mirrored one
                pairs = [
                    (cosine - sine, cosine, 2 * (cosine - sine)),
                    (cosine, sine - cosine, -2 * sine),
                    (-sine, cosine + sine, -2 * cosine),
                ]
            for read, weigh, write in pairs:
                reads.append(read.flatten())
                weighs.append(weigh[:kernel, :kernel].flatten())
                writes.append(write[:places, :places].flatten() / size**2)
    return torch.stack(reads).float(), torch.stack(weighs).float(), torch.stack(writes, dim=1).float()


class _Products(torch.autograd.Function):
    """(p, batch, in), (p, out, in) -> (p, batch, out).

    Gradients are written by hand, since autograd would transpose the filters' gradient in memory.
    """

    @staticmethod
    def forward(ctx: Any, spectra: Tensor, filters: Tensor) -> Tensor:
        ctx.save_for_backward(spectra, filters)
        products: Tensor = spectra @ filters.mT
        return products

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        spectra, filters = ctx.saved_tensors
        return gradient @ filters, gradient.mT @ spectra
