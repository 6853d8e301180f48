"""Muon (Jordan et al. 2024): steps as long in every direction, for weights that are matrices. Knows no network.

Adam's steps are as long for every single weight, and most of a matrix then moves along the few directions that its gradient is
large in. Here the gradient's average is replaced by the orthogonal matrix next to it, which moves all directions alike. torch's
own Muon wants parameters that are matrices; ours are stacks of them, convolutions and the transformations of capsules.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

MOMENTUM = 0.9
STEPS = 5
QUINTIC = 3.4445, -4.7750, 2.0315  # of Newton and Schulz's iteration: singular values soon are between 0.7 and 1.2


class Muon(Optimizer):
    """Of each group `columns` says how wide its matrices are: 0 for convolutions (out, in, k, k), which are one matrix each,
    else for stacks (..., rows, m * columns) of matrices, m beside each other."""

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float) -> None:
        super().__init__(groups, {"lr": lr, "columns": 0})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # without a closure, which nobody here has
        for group in self.param_groups:
            for weights in group["params"]:
                state = self.state[weights]
                if not state:
                    state["average"] = torch.zeros_like(weights)
                average = state["average"]
                average.lerp_(weights.grad, 1 - MOMENTUM)
                weights.sub_(_direction(weights.grad.lerp(average, MOMENTUM), group["columns"]), alpha=group["lr"])


def _direction(values: Tensor, columns: int) -> Tensor:
    """What is orthogonal next to each matrix, in the shape of the weights."""
    if columns:
        apart = values.unflatten(-1, (-1, columns)).transpose(-3, -2)  # (..., m, rows, columns)
        return orthogonal(apart).transpose(-3, -2).flatten(-2)
    lying = values.movedim(1, -1)  # as kernels lie in memory
    return orthogonal(lying.flatten(1)).view(lying.shape).movedim(-1, 1)


def orthogonal(matrices: Tensor) -> Tensor:
    """(..., m, n) -> the same, about U V' where they were U S V'.

    Every step multiplies a matrix by a polynomial of its own small Gram matrix. So the steps are taken with that alone, and of
    their product there is one with the matrix, which for the large convolution of `paper` is 81 times as wide as high.
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
