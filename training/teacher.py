"""A bundle that teaches: what it makes of the very pictures a network is shown, to be learned beside their labels.

Ba and Caruana 2014: a shallow network learns more from what a deeper one answers than from labels alone. Lengths say which
other digits a changed picture resembles, and how little it may look like the one it was.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from service import bundle
from training.errors import SettingError
from training.runtime import OnnxModel


class Teacher:
    """Answers by ONNX Runtime on the CPU, in float32, whatever the network learns on."""

    def __init__(self, folder: Path, image_shape: tuple[int, ...], objects: int, classes: tuple[str, ...]) -> None:
        read = bundle.read(folder)
        manifest = read.manifest
        self.version = manifest.version
        self.model = OnnxModel(read.encoder("fp32"), read.decoder)
        self.model.check(manifest)
        found = (manifest.classes, tuple(manifest.image_shape), manifest.max_objects)
        expected = (classes, image_shape, objects)
        if found != expected:
            raise SettingError(
                f"the teacher {folder} must answer for the pictures to be learned: expected classes, picture size and "
                f"objects {expected}, found {found}"
            )

    def lengths(self, images: Tensor) -> Tensor:
        """Of each class (batch, classes), for pictures on any device."""
        return self.model.classify(images.cpu().contiguous()).lengths.to(images.device)
