"""An nn.Conv2d for large kernels that multiplies spectra (spectral.py) in training on a CPU, where that is faster."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from training import spectral

SMALLEST_KERNEL, LARGEST_PICTURE = 7, 40  # pixels a side; the spectra of larger pictures may not fit into memory
PRECISIONS = (torch.float32, torch.bfloat16)


class LargeConv2d(nn.Conv2d):
    """A convolution without padding, with nn.Conv2d's weights and results, and its code except in training on a CPU."""

    def __init__(self, channels: int, out: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(channels, out, kernel, stride, groups=groups)

    def forward(self, images: Tensor) -> Tensor:  # (batch, in, H, W) -> (batch, out, h, w)
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else images.dtype
        if not (self.training and images.device.type == "cpu" and dtype in PRECISIONS and self._suits_spectra(images)):
            return super().forward(images)
        output = spectral.convolve(images.to(dtype), self.weight.to(dtype), self.stride[0])
        return output if self.bias is None else output + self.bias.to(dtype)[:, None, None]

    def _suits_spectra(self, images: Tensor) -> bool:
        kernel, (height, width) = self.kernel_size[0], images.shape[2:]
        return self.groups == 1 and kernel >= SMALLEST_KERNEL and 2 * kernel <= height == width <= LARGEST_PICTURE
