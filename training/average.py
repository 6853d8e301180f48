"""An exponential moving average of a network's weights, which generalises better than the last step's.

Written by hand because torch.optim.swa_utils reads its counter from the GPU at every step, and waits for it.
"""

from __future__ import annotations

import copy

import torch

from training.networks import Network


class Average:
    def __init__(self, network: Network, decay: float) -> None:
        self.network = copy.deepcopy(network).requires_grad_(False)
        self.decay = decay

    def update(self, network: Network, step: int) -> None:
        """Average in the new weights; batch norm's counters are copied.

        The decay warms up, else the average of a short run would still contain its random start.
        """
        decay = min(self.decay, (1 + step) / (10 + step))
        mine, theirs = self.network.state_dict().values(), network.state_dict().values()
        pairs = [(own, new) for own, new in zip(mine, theirs, strict=True) if own.is_floating_point()]
        torch._foreach_lerp_([own for own, _ in pairs], [new for _, new in pairs], 1 - decay)
        for own, new in zip(mine, theirs, strict=True):
            if not own.is_floating_point():
                own.copy_(new)
