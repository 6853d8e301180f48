"""Muon (Jordan et al. 2024): steps of the same length in every direction, for weights that are matrices.

Adam's steps have the same length for every single weight, so a matrix moves mostly along the few directions in which its
gradient is large. Here the gradient's average is replaced by the nearest orthogonal matrix, which moves all directions alike.
torch's own Muon requires parameters that are matrices; ours are convolutions and stacks of matrices, the transformations of
capsules. Independent of networks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

MOMENTUM = 0.9
STEPS = 5
QUINTIC = 3.4445, -4.7750, 2.0315  # of the Newton-Schulz iteration, which soon brings singular values between 0.7 and 1.2


class Muon(Optimizer):
    """The optimizer; `columns` of a group says how wide its matrices are.

    It is 0 for convolutions (out, in, k, k), which are one matrix each; other weights are stacks (..., rows, m * columns) of
    matrices, m side by side.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float) -> None:
        super().__init__(groups, {"lr": lr, "columns": 0})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # takes no closure, which nothing here has
        for group in self.param_groups:
            for weights in group["params"]:
                state = self.state[weights]
                if not state:
                    state["average"] = torch.zeros_like(weights)
                average = state["average"]
                average.lerp_(weights.grad, 1 - MOMENTUM)
                weights.sub_(_direction(weights.grad.lerp(average, MOMENTUM), group["columns"]), alpha=group["lr"])


def _direction(values: Tensor, columns: int) -> Tensor:
    """The orthogonal matrix nearest to each matrix, in the shape of the weights."""
    if columns:
        apart = values.unflatten(-1, (-1, columns)).transpose(-3, -2)  # (..., m, rows, columns)
        return orthogonal(apart).transpose(-3, -2).flatten(-2)
    lying = values.movedim(1, -1)  # the order of kernels in memory
    return orthogonal(lying.flatten(1)).view(lying.shape).movedim(-1, 1)


def orthogonal(matrices: Tensor) -> Tensor:
    """Turn matrices (..., m, n), whose singular value decomposition is U S V', into about U V'.

    Every step multiplies a matrix by a polynomial of its own small Gram matrix. So all steps are computed from that one alone,
    and the matrix is multiplied once, by their product. For the large convolution of `paper` it is 81 times as wide as high.
    """
    if matrices.shape[-2] > matrices.shape[-1]:
        return orthogonal(matrices.mT).mT
    scaled = matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    gram = scaled @ scaled.mT
    one = torch.eye(gram.shape[-1], device=gram.device)
    product = step = _polynomial(gram, one)
    for _ in range(STEPS - 1):
        gram = step @ gram @ step
        step = _polynomial(gram, one)
        product = step @ product
    nearest: Tensor = product @ scaled
    return nearest


def _polynomial(gram: Tensor, one: Tensor) -> Tensor:
    first, third, fifth = QUINTIC
    return first * one + third * gram + fifth * (gram @ gram)
