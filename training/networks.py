"""Builds a network from a config: an encoder (images -> lengths, capsules) and a decoder (poses, classes -> images).

A bundle holds these two halves. Independent of losses, data and files.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from training.capsules import ClassCapsules, PrimaryCapsules
from training.config import CapsuleNet, Conv, PlainNet
from training.errors import SettingError
from training.routing import lengths


class Encoding(NamedTuple):
    lengths: Tensor  # (batch, classes), in [0, 1)
    capsules: Tensor  # (batch, classes, pose)


class CapsuleEncoder(nn.Module):
    def __init__(self, config: CapsuleNet) -> None:
        super().__init__()
        channels = config.image_shape[0]
        self.stem = stem(channels, config.stem)
        self.primary = PrimaryCapsules(config.stem[-1].channels, config.primary, config.squash)
        inputs = _probe(nn.Sequential(self.stem, self.primary), config.image_shape)[1]
        self.dropout = nn.Dropout(config.dropout)  # of whole capsules
        self.routed = ClassCapsules(inputs, config)

    def forward(self, images: Tensor) -> Encoding:
        votes = self.routed.votes(self.primary(self.stem(images)))
        capsules = heard = self.routed(votes)
        if self.training and self.dropout.p:
            # While some are silent the others must find the class; the pose to draw comes from all, else drawings blur.
            voices = self.dropout(votes.new_ones(votes.shape[0], votes.shape[2]))
            heard = self.routed(votes, voices)
        return Encoding(lengths(heard), capsules)


class PlainEncoder(nn.Module):
    """A CNN whose class scores stand in for capsules of one dimension."""

    def __init__(self, config: PlainNet) -> None:
        super().__init__()
        pooling: list[nn.Module] = [nn.AdaptiveAvgPool2d(1)] if config.global_pool else []
        self.stem = nn.Sequential(*stem(config.image_shape[0], config.stem), *pooling, nn.Flatten())
        width = _probe(self.stem, config.image_shape)[1]
        layers: list[nn.Module] = []
        for hidden in config.hidden:
            layers += [nn.Linear(width, hidden), nn.ReLU()]
            width = hidden
        self.head = nn.Sequential(*layers, nn.Dropout(config.dropout), nn.Linear(width, config.classes))
        self.activation = nn.Softmax(dim=1) if config.output == "softmax" else nn.Sigmoid()

    def forward(self, images: Tensor) -> Encoding:
        scores = self.activation(self.head(self.stem(images)).float())
        return Encoding(scores, scores.unsqueeze(-1))


class Decoder(nn.Module):
    """Draws a picture from one capsule's pose; all others are masked with zeros or left out."""

    labels: Tensor  # (classes,): 0, 1, 2, ...

    def __init__(self, config: CapsuleNet | PlainNet) -> None:
        super().__init__()
        self.image_shape = config.image_shape
        self.register_buffer("labels", torch.arange(config.classes), persistent=False)
        self.sees_class = config.decoder.sees_class
        width = config.pose_size * (config.classes if self.sees_class else 1)
        layers: list[nn.Module] = []
        for hidden in config.decoder.hidden:
            layers += [nn.Linear(width, hidden), nn.ReLU()]
            width = hidden
        channels, height, breadth = config.image_shape
        self.layers = nn.Sequential(*layers, nn.Linear(width, channels * height * breadth), nn.Sigmoid())

    def forward(self, poses: Tensor, classes: Tensor) -> Tensor:  # (n, pose), (n,)
        seen = self._masked(poses, classes) if self.sees_class else poses
        images: Tensor = self.layers(seen).float().unflatten(1, self.image_shape)
        return images

    def _masked(self, poses: Tensor, classes: Tensor) -> Tensor:
        mask = (classes.unsqueeze(1) == self.labels).to(poses.dtype)  # (n, classes)
        return (mask.unsqueeze(2) * poses.unsqueeze(1)).flatten(1)  # (n, classes * pose)


class Network(nn.Module):
    """Encoder and decoder, trained together."""

    def __init__(self, config: CapsuleNet | PlainNet) -> None:
        super().__init__()
        self.encoder = CapsuleEncoder(config) if isinstance(config, CapsuleNet) else PlainEncoder(config)
        self.decoder = Decoder(config)
        self.plain = isinstance(config, PlainNet)

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Encoding, Tensor]:
        """Encode images, and draw each object in `labels` (batch, objects): (batch, objects, C, H, W)."""
        encoding = self.encoder(images)
        poses = torch.take_along_dim(encoding.capsules, labels.unsqueeze(-1), dim=1).flatten(0, 1)
        if self.plain:  # a CNN to compare with must not learn from the drawing
            poses = poses.detach()
        drawings = self.decoder(poses, labels.flatten())
        return encoding, drawings.unflatten(0, labels.shape)


def stem(channels: int, convolutions: tuple[Conv, ...]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for conv in convolutions:
        layers.append(nn.Conv2d(channels, conv.channels, conv.kernel, conv.stride, conv.padding, bias=not conv.norm))
        if conv.norm:
            layers.append(nn.BatchNorm2d(conv.channels))
        layers.append(nn.ReLU())
        if conv.pool > 1:
            layers.append(nn.AvgPool2d(conv.pool))
        channels = conv.channels
    return nn.Sequential(*layers)


def transforms(module: nn.Module) -> list[nn.Parameter]:
    """The matrices that turn input capsules into votes."""
    return [part.transforms for part in module.modules() if isinstance(part, ClassCapsules)]


def convolutions(module: nn.Module) -> list[Tensor]:
    """Kernels of convolutions on features: not the first, which sees pixels, nor those of a depthwise one."""
    layers = [part for part in module.modules() if isinstance(part, nn.Conv2d)]
    return [part.weight for part in layers[1:] if part.groups == 1]


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _probe(layers: nn.Module, image_shape: tuple[int, int, int]) -> torch.Size:
    """The layers' output shape, found by running them, in eval mode so that batch norm keeps its statistics."""
    with torch.no_grad():
        try:
            out = layers.eval()(torch.zeros(1, *image_shape))
        except RuntimeError as error:
            raise SettingError(
                f"pictures of {'x'.join(map(str, image_shape))} are too small for this network: {error}"
            ) from error
    layers.train()
    shape: torch.Size = out.shape
    return shape
