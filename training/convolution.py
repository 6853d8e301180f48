"""nn.Conv2d for large kernels, which computes another way while it trains on a CPU, where that is less work.

In float32 with spectra (spectral.py), in bfloat16 as one product of matrices (unfolded.py).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from training import spectral, unfolded

LARGE, MOST = 7, 40  # kernels from here on; pictures up to here, whose spectra still fit into memory
COPIES = 10  # a pixel is seen by fewer kernels than this, or its copies would cost more than they save


class LargeConv2d(nn.Conv2d):
    """nn.Conv2d without padding."""

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
        kernel, stride = self.kernel_size[0], self.stride[0]
        height, width = images.shape[2:]
        places = ((height - kernel) // stride + 1) * ((width - kernel) // stride + 1)
        return kernel * kernel * places < COPIES * height * width
