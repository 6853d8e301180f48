"""Routing by agreement: votes (batch, out, in, pose) -> capsules (batch, out, pose).

Functions here are pure. `iterations` is a Python int, so export unrolls the loop.
To add an algorithm: write it, list it in ROUTINGS; the tests find it there.

Every step is a batched matrix product over (batch, out), and the first one needs none: couplings start uniform.
Gradients flow through the last iteration only, as in the authors' own description: the couplings are an answer
to "who agrees?", not something to learn through.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the command line's help names what is here, and need not wait for torch
    from torch import Tensor

    Squash = Callable[[Tensor], Tensor]
    Routing = Callable[[Tensor, int, Squash], Tensor]

EPSILON = 1e-8  # under the root of every length: a zero vector then divides nothing by nought, and its gradient is finite


def dynamic(votes: Tensor, iterations: int, squash: Squash) -> Tensor:
    """Sabour et al. 2017, Procedure 1: agreement with the squashed capsules accumulates in the logits."""
    seen = votes.detach()
    sums, logits = _uniform(seen if iterations > 1 else votes), None
    for step in range(1, iterations):
        agreement = _agreement(seen, squash(sums))
        logits = agreement if logits is None else logits + agreement
        sums = _weighted(logits, votes if step == iterations - 1 else seen)
    return squash(sums)


def agreement(votes: Tensor, iterations: int, squash: Squash) -> Tensor:
    """Su 2018: logits are the agreement with the last sums' direction, replaced at each step; squash comes once, at the end."""
    seen = votes.detach()
    sums = _uniform(seen if iterations > 1 else votes)
    for step in range(1, iterations):
        logits = _agreement(seen, sums / (sums.square().sum(dim=-1, keepdim=True) + EPSILON).sqrt())
        sums = _weighted(logits, votes if step == iterations - 1 else seen)
    return squash(sums)


ROUTINGS: dict[str, Routing] = {"dynamic": dynamic, "agreement": agreement}


def _uniform(votes: Tensor) -> Tensor:
    """The sums under equal couplings, 1 / out each: (b, o, p).

    Over inputs moved to the front, where the product that made them had them: ONNX Runtime cancels the two transpositions.
    All else here are products, which read transposed votes as they lie; a sum over the third axis had them written out.
    """
    return votes.movedim(2, 0).sum(dim=0) / votes.shape[1]


def _agreement(votes: Tensor, capsules: Tensor) -> Tensor:
    """Scalar product of each vote with its capsule: (b, o, i, p) x (b, o, p, 1) -> (b, o, i)."""
    return (votes @ capsules.unsqueeze(-1)).squeeze(-1)


def _weighted(logits: Tensor, votes: Tensor) -> Tensor:
    """Votes summed by couplings, which each input spends over the *outputs* (Eq. 3): (b, o, 1, i) x (b, o, i, p) -> (b, o, p)."""
    couplings = logits.softmax(dim=1)
    return (couplings.unsqueeze(2) @ votes).squeeze(2)
