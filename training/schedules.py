"""The learning rate as a function of progress in a cycle; it has no state, so resuming needs none.

Each cycle of a run rises to the highest rate again and ends in a network that can be used: the warm restarts of
Loshchilov and Hutter 2017.
"""

import math
from collections.abc import Callable

from training.config import Training

WARM_UP, FIRST, LAST = 0.25, 0.04, 0.0005  # one_cycle: share of a cycle spent rising; factors at start and end


def one_cycle(progress: float, config: Training) -> float:
    """Smith 2018: up along a cosine for a quarter of the cycle, then down along another to nearly nothing."""
    if progress < WARM_UP:
        return _cosine(FIRST, 1.0, progress / WARM_UP)
    return _cosine(1.0, LAST, (progress - WARM_UP) / (1 - WARM_UP))


def exponential(progress: float, config: Training) -> float:
    """`decay` per epoch, as the public capsule repositories do."""
    return math.pow(config.decay, progress * config.epochs)


def constant(progress: float, config: Training) -> float:
    return 1.0


SCHEDULES: dict[str, Callable[[float, Training], float]] = {
    "one_cycle": one_cycle,
    "exponential": exponential,
    "constant": constant,
}


def _cosine(start: float, end: float, progress: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * progress)) / 2
