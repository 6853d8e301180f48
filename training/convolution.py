"""nn.Conv2d for large kernels, which computes another way while it trains on a CPU, where that is faster.

In float32 with spectra (spectral.py), in bfloat16 as one product of matrices (unfolded.py).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from training import spectral, unfolded

LARGE, MOST = 7, 40  # kernels from here on; pictures up to here, whose spectra still fit into memory
COPIES = 11  # times a picture's own memory, that its copies may take; at 28x28 and a stride of 2 they are ten and still pay


class LargeConv2d(nn.Conv2d):
    """A convolution without padding: nn.Conv2d's weights and numbers, and on anything but a CPU, or not in training, its code."""

    def __init__(self, channels: int, out: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(channels, out, kernel, stride, groups=groups)

    def forward(self, images: Tensor) -> Tensor:  # (batch, in, H, W) -> (batch, out, h, w)
        if not (self.training and images.device.type == "cpu" and self.groups == 1 and self.kernel_size[0] >= LARGE):
            return super().forward(images)
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else images.dtype
        if dtype == torch.float32 and self._suits_spectra(images):
            found = spectral.convolve(images, self.weight, self.stride[0])
        elif dtype == torch.bfloat16 and self._suits_copies(images):
            found = unfolded.convolve(images.to(dtype), self.weight.to(dtype), self.stride[0])
        else:
            return super().forward(images)
        return found if self.bias is None else found + self.bias.to(found.dtype)[:, None, None]

    def _suits_spectra(self, images: Tensor) -> bool:
        height, width = images.shape[2:]
        return 2 * self.kernel_size[0] <= height == width <= MOST

    def _suits_copies(self, images: Tensor) -> bool:
        kernel, (height, width) = self.kernel_size[0], images.shape[2:]
        high, wide = (unfolded.places(side, kernel, self.stride[0]) for side in (height, width))
        return min(high, wide) > 0 and high * wide * kernel**2 < COPIES * height * width
