"""Routing by agreement: votes (batch, out, in, pose) -> capsules (batch, out, pose).

Functions here are pure. `iterations` is a Python int, so export unrolls the loop.
To add an algorithm: write it, list it in ROUTINGS; the tests find it there.

Every step is a batched matrix product over (batch, out), except the first, since couplings start uniform.
`voices` (batch, in), if given, say how loud each input speaks: as if its votes were multiplied, but without changing them.
Gradients flow through the last iteration only, as in many public copies, but not in the authors' own code: the couplings are an
answer to "who agrees?", not something to learn through.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # the command line's help lists ROUTINGS, and should not wait for torch
    from torch import Tensor

    Squash = Callable[[Tensor], Tensor]


class Routing(Protocol):
    def __call__(self, votes: Tensor, iterations: int, squash: Squash, voices: Tensor | None = None) -> Tensor: ...


# Added under the square root of every length, so that a zero vector causes no division by zero and has a finite gradient.
# The exporter's optimizer would take 1e-8 for zero and leave it out.
EPSILON = 1e-7


def lengths(capsules: Tensor) -> Tensor:
    """Capsules (..., size) -> lengths (...): for class capsules, how sure each is that its class is present."""
    return (capsules.square().sum(dim=-1) + EPSILON).sqrt()


def dynamic(votes: Tensor, iterations: int, squash: Squash, voices: Tensor | None = None) -> Tensor:
    """Sabour et al. 2017, Procedure 1: agreement with the squashed capsules accumulates in the logits."""
    detached = votes.detach()
    sums, logits = _uniform(detached if iterations > 1 else votes, voices), None
    for step in range(1, iterations):
        agreement = _agreement(detached, squash(sums), voices)
        logits = agreement if logits is None else logits + agreement
        sums = _weighted(_couplings(logits), votes if step == iterations - 1 else detached, voices)
    return squash(sums)


def agreement(votes: Tensor, iterations: int, squash: Squash, voices: Tensor | None = None) -> Tensor:
    """Su 2018: logits are the agreement with the last sums' direction, replaced at each step; squash comes once, at the end."""
    detached = votes.detach()
    sums = _uniform(detached if iterations > 1 else votes, voices)
    for step in range(1, iterations):
        logits = _agreement(detached, sums / lengths(sums).unsqueeze(-1), voices)
        sums = _weighted(_couplings(logits), votes if step == iterations - 1 else detached, voices)
    return squash(sums)


ROUTINGS: dict[str, Routing] = {"dynamic": dynamic, "agreement": agreement}


def _uniform(votes: Tensor, voices: Tensor | None) -> Tensor:
    """Sum votes with equal couplings, 1 / out each: (b, o, p).

    Inputs are moved to the front first, where the product that made the votes had them: ONNX Runtime cancels the two
    transpositions. Everything else here is a product, which can read transposed votes in place; a sum over the third axis made
    ONNX Runtime write them out.
    """
    out = votes.shape[1]
    if voices is None:
        return votes.movedim(2, 0).sum(dim=0) / out
    return _weighted(voices.new_ones(1, out, 1) / out, votes, voices)


def _agreement(votes: Tensor, capsules: Tensor, voices: Tensor | None) -> Tensor:
    """Scalar product of each vote with its capsule: (b, o, 1, p) x (b, o, p, i) -> (b, o, i)."""
    agreement = (capsules.unsqueeze(2) @ votes.mT).squeeze(2)
    return agreement if voices is None else agreement * voices.unsqueeze(1)


def _couplings(logits: Tensor) -> Tensor:
    """How each input divides its vote between the outputs, 1 in all: softmax over the outputs, (b, o, i) -> (b, o, i).

    Written out, since for a softmax over any axis but the last ONNX Runtime transposes and transposes back: twice the time.
    """
    powers = (logits - logits.amax(dim=1, keepdim=True)).exp()
    return powers / powers.sum(dim=1, keepdim=True)


def _weighted(couplings: Tensor, votes: Tensor, voices: Tensor | None) -> Tensor:
    """Sum votes weighted by couplings, normalised over the *outputs* (Eq. 3): (b, o, 1, i) x (b, o, i, p) -> (b, o, p)."""
    if voices is not None:
        couplings = couplings * voices.unsqueeze(1)
    return (couplings.unsqueeze(2) @ votes).squeeze(2)
