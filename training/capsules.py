"""The parts of a capsule network: squash, primary capsules, votes. routing.py turns votes into capsules."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn

from training.config import CapsuleNet, Primary
from training.convolution import LargeConv2d
from training.errors import SettingError, chosen
from training.routing import EPSILON, ROUTINGS

SQUASH_CONSTANTS = {
    "paper": 1.0,  # Sabour et al. 2017, Eq. 1
    "half": 0.5,  # Su 2018: short vectors are shrunk less
}


class Squash(nn.Module):
    """Scales a vector of length n to the length n^2 / (c + n^2), which is in [0, 1), and keeps its direction."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.constant = chosen("squash", name, SQUASH_CONSTANTS)

    def forward(self, vectors: Tensor) -> Tensor:  # (..., size)
        squared = vectors.square().sum(dim=-1)  # (...), not (..., 1): ONNX Runtime adds ten times slower along a last axis of one
        factors = (squared + EPSILON).sqrt() / (self.constant + squared)
        return vectors * factors.unsqueeze(-1)


class PrimaryCapsules(nn.Module):
    """Feature maps -> capsules (batch, places * kinds, size).

    A capsule is `size` channels at one place: the channels of each place are split into kinds.
    """

    def __init__(self, channels: int, config: Primary, squash: str) -> None:
        super().__init__()
        self.size = config.size
        outputs = config.kinds * config.size
        if not config.kernel and outputs != channels:
            raise SettingError(
                f"primary capsules without a convolution are the stem's channels: expected {config.kinds} kinds x {config.size} "
                f"= {outputs} of them, found {channels}"
            )
        if config.depthwise and outputs % channels:
            raise SettingError(
                f"a depthwise convolution makes as many channels from each: expected {config.kinds} kinds x {config.size} = "
                f"{outputs} to be a multiple of the stem's {channels}"
            )
        self.convolution: nn.Module = nn.Identity()
        if config.kernel:
            groups = channels if config.depthwise else 1
            self.convolution = LargeConv2d(channels, outputs, config.kernel, config.stride, groups=groups)
        self.squash: nn.Module = Squash(squash) if config.squash else nn.Identity()

    def forward(self, features: Tensor) -> Tensor:  # (batch, channels, H, W)
        places = self.convolution(features).flatten(2).transpose(1, 2)  # (batch, places, kinds * size)
        capsules = places.shape[1] * places.shape[2] // self.size  # an int, so that export leaves only the batch dynamic
        squashed: Tensor = self.squash(places.reshape(-1, capsules, self.size).float())
        return squashed


class ClassCapsules(nn.Module):
    """Input capsules (batch, in, size) -> class capsules (batch, out, pose): routing combines the inputs' votes for a class."""

    def __init__(self, inputs: int, config: CapsuleNet) -> None:
        super().__init__()
        self.routing, self.iterations = chosen("routing", config.routing, ROUTINGS), config.iterations
        self.classes, self.pose_size, self.shared = config.classes, config.pose_size, config.share_transforms
        size, outputs = config.primary.size, self.classes * self.pose_size
        shape = (size, outputs) if self.shared else (inputs, size, outputs)
        # Glorot's rule for each transformation size -> pose. Initial couplings of 1 / out keep the sum over a few inputs small;
        # with hundreds of inputs it takes `transform_scale` too.
        scale = config.transform_scale * (2.0 / (size + self.pose_size)) ** 0.5
        self.transforms = nn.Parameter(torch.randn(shape) * scale)
        self.squash = Squash(config.squash)

    def votes(self, capsules: Tensor) -> Tensor:
        """One batched matrix product: (batch, in, size) -> (batch, out, in, pose)."""
        with full_precision(capsules):
            votes: Tensor
            if self.shared:
                votes = (capsules @ self.transforms).unflatten(2, (self.classes, self.pose_size))
                return votes.transpose(1, 2).contiguous()  # from (batch, in, out, pose)
            votes = (capsules.transpose(0, 1) @ self.transforms).unflatten(2, (self.classes, self.pose_size))
            return votes.permute(1, 2, 0, 3).contiguous()  # from (in, batch, out, pose)

    def forward(self, votes: Tensor, voices: Tensor | None = None) -> Tensor:
        with full_precision(votes):
            return self.routing(votes, self.iterations, self.squash, voices)


def full_precision(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Keep routing in float32 under autocast, since it depends on small differences between many votes."""
    device = tensor.device.type
    if torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()
