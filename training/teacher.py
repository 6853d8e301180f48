"""A bundle that teaches: what it makes of the very pictures a network is shown, to be learned beside their labels.

Ba and Caruana 2014: a shallow network learns more from what a deeper one answers than from labels alone. Lengths say which
other digits a changed picture resembles, and how little it may look like the one it was.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from service import bundle
from service.bundle import Bundle
from service.manifest import BundleError
from training.config import Config
from training.data import DataSet
from training.errors import SettingError
from training.pairs import arrangement
from training.runtime import OnnxModel

INSTEAD = "name another bundle with --teacher, or learn from labels alone with --teacher ''"


class Teacher:
    """Answers by ONNX Runtime on the CPU, in float32, whatever the network learns on."""

    def __init__(self, config: Config, data: DataSet) -> None:
        try:
            read = bundle.read(Path(config.training.teacher))
        except BundleError as error:
            raise SettingError(f"the teacher cannot be read ({error}); {INSTEAD}") from error
        _check(read, config, data)
        self.manifest = read.manifest
        self.model = OnnxModel(read.encoder("fp32"), read.decoder)
        self.model.check(read.manifest)

    def lengths(self, images: Tensor) -> Tensor:
        """Of each class (batch, classes), for pictures on any device."""
        return self.model.classify(images.cpu().contiguous()).lengths.to(images.device)


def _check(teacher: Bundle, config: Config, data: DataSet) -> None:
    """That it answers for these pictures, and never learned from those that are held out to choose by."""
    manifest, settings = teacher.manifest, config.training
    found = (manifest.classes, tuple(manifest.image_shape), manifest.max_objects)
    expected = (data.classes, config.network.image_shape, arrangement(settings.pairs).objects)
    if found != expected:
        raise SettingError(
            f"the teacher {teacher.folder} is not for these pictures: expected classes, size and objects {expected}, "
            f"found {found}; {INSTEAD}"
        )
    held_out = Config.from_dict(manifest.config).training.validation
    if manifest.training.data == data.digest and held_out < settings.validation:
        raise SettingError(
            f"the teacher {teacher.folder} learned from all but the last {held_out} of these training pictures: expected "
            f"--validation {held_out} or less, found {settings.validation}; or {INSTEAD}"
        )
