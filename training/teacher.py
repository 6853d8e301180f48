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
from training.errors import SettingError, TrainingError
from training.pairs import arrangement
from training.runtime import OnnxModel

INSTEAD = "name another bundle with --teacher, or learn from labels alone with --teacher ''"


class Teacher:
    """Answers by ONNX Runtime on the CPU, in float32, whatever the network learns on.

    `version` is the one that the run has learned from so far; none of a run that begins.
    """

    def __init__(self, config: Config, data: DataSet, version: str = "") -> None:
        folder = Path(config.training.teacher)
        here = f"name with --teacher where version {version} lies now, from which this run has learned" if version else INSTEAD
        try:
            read = bundle.read(folder)
        except BundleError as error:
            raise SettingError(f"the teacher cannot be read ({error}); {here}") from error
        if version and read.manifest.version != version:
            found = read.manifest.version
            raise SettingError(f"the teacher {folder} is version {found}; {here}, or start anew in another --out")
        _check_pictures(read, config, data)
        _check_held_out(read, config, data)
        self.manifest = read.manifest
        self.model = OnnxModel(read.encoder("fp32"), read.decoder)
        self.model.check(read.manifest)

    def lengths(self, images: Tensor) -> Tensor:
        """Of each class (batch, classes), for pictures on any device."""
        return self.model.classify(images.cpu().contiguous()).lengths.to(images.device)


def _check_pictures(teacher: Bundle, config: Config, data: DataSet) -> None:
    manifest = teacher.manifest
    found = (manifest.classes, tuple(manifest.image_shape), manifest.max_objects)
    expected = (data.classes, config.network.image_shape, arrangement(config.training.pairs).objects)
    if found != expected:
        raise SettingError(
            f"the teacher {teacher.folder} is not for these pictures: expected classes, size and objects {expected}, "
            f"found {found}; {INSTEAD}"
        )


def _check_held_out(teacher: Bundle, config: Config, data: DataSet) -> None:
    """That it never learned from those that are held out to choose by. Old bundles do not say what they learned from."""
    if teacher.manifest.training.data not in (None, data.digest):
        return
    try:
        learned = Config.from_dict(teacher.manifest.config).training
    except TrainingError as error:
        raise SettingError(f"what the teacher {teacher.folder} held out cannot be read: {error}; {INSTEAD}") from error
    if learned.validation < config.training.validation:
        raise SettingError(
            f"the teacher {teacher.folder} learned from all but the last {learned.validation} training pictures: expected "
            f"--validation {learned.validation} or less, found {config.training.validation}; or {INSTEAD}"
        )
