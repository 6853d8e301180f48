"""Every fact about a network and its training, in frozen dataclasses with named PRESETS.

The config travels inside the checkpoint and the bundle, so nothing has to be typed again to load either.
Command-line flags of `captrain train` are the fields of `Training`; knows no torch.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from training.errors import SettingError, TrainingError, chosen
from training.sources import SOURCES


class _Part:
    """What it has no field for is an error where a config is read: another captrain wrote it, and meant something by it."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class Conv(_Part):
    """One convolution of the stem, with ReLU, then perhaps average pooling."""

    channels: int
    kernel: int
    stride: int = 1
    padding: int = 0
    norm: bool = False  # batch norm between convolution and ReLU
    pool: int = 1


@dataclass(frozen=True)
class Primary(_Part):
    """How the stem's features become the first capsules: `kinds` of them at each place, `size` values each."""

    kinds: int
    size: int
    kernel: int = 0  # 0: no convolution, the stem's channels at one place are the capsules
    stride: int = 1
    depthwise: bool = False
    squash: bool = True


@dataclass(frozen=True)
class Decoder(_Part):
    """Draws the picture back from one class capsule: the others masked with zeros, or its pose alone."""

    hidden: tuple[int, ...] = (512, 1024)
    sees_class: bool = True  # False: Rajasegaran et al. 2019, a dimension of the pose means the same for every class


@dataclass(frozen=True)
class CapsuleNet(_Part):
    """Stem -> primary capsules -> votes -> routing -> class capsules."""

    stem: tuple[Conv, ...]
    primary: Primary
    routing: str = "dynamic"
    iterations: int = 3
    squash: str = "paper"
    dropout: float = 0.0  # share of the primary capsules that have no say in the class in a training step
    share_transforms: bool = False  # one transformation for all input capsules: any image size works
    transform_scale: float = 1.0  # of the transformations' first values: hundreds of votes of full size begin as sure capsules
    pose_size: int = 16
    decoder: Decoder = Decoder()
    image_shape: tuple[int, int, int] = (1, 28, 28)
    classes: int = 10
    kind: Literal["capsules"] = "capsules"

    def __post_init__(self) -> None:
        if not self.stem:
            raise SettingError("expected at least one convolution in the stem, found none")
        if not 1 <= self.iterations <= 100:
            raise SettingError(f"iterations must be from 1 to 100, got {self.iterations}")
        if not 0 < self.transform_scale <= 10:  # at 0 all votes would stay alike; a NaN is not
            raise SettingError(f"transform_scale must be above 0 and at most 10, got {self.transform_scale}")


@dataclass(frozen=True)
class PlainNet(_Part):
    """A CNN to compare with. Its capsules are one-dimensional, the class score itself, so it serves like the others."""

    stem: tuple[Conv, ...]
    hidden: tuple[int, ...]
    output: Literal["softmax", "sigmoid"]
    dropout: float = 0.0
    global_pool: bool = False
    decoder: Decoder = Decoder(hidden=())
    image_shape: tuple[int, int, int] = (1, 28, 28)
    classes: int = 10
    kind: Literal["plain"] = "plain"

    @property
    def pose_size(self) -> int:
        return 1


def _flag(default: Any, note: str = "", low: float | None = None, high: float | None = None) -> Any:
    """A field of Training with its help and, for numbers, the range that makes sense: low and high included."""
    return field(default=default, metadata={"help": note, "low": low, "high": high})


@dataclass(frozen=True)
class Training(_Part):
    """How a network is trained. Each field is a flag of `captrain train`."""

    dataset: str = _flag("mnist", f"{', '.join(SOURCES)}: idx files or folders of pictures")
    epochs: int = _flag(30, "how long the schedule runs", 1, 100_000)
    cycles: int = _flag(1, "how often the schedule runs; add one with --resume to continue a finished run", 1, 1_000)
    batch_size: int = _flag(128, "total over all processes", 1, 1_000_000)
    learning_rate: float = _flag(0.001, "highest value; the schedule varies it", 1e-8, 10)
    transform_rate: float = _flag(
        1.0,
        "rate of the transformations that make votes, as a multiple of --learning-rate, or of --muon if given",
        1e-3,
        1_000,
    )
    muon: float = _flag(
        0.0,
        "highest rate of Muon, for transformations and all convolutions but the first; 0 leaves them to Adam",
        0,
        10,
    )
    schedule: str = _flag("one_cycle", "one_cycle, exponential or constant")
    decay: float = _flag(0.9, "factor per epoch of the exponential schedule", 1e-3, 1)
    ema: float = _flag(0.999, "weight averaging per step; 0 is none", 0, 0.999999)
    augment: str = _flag(
        "affine", "none, shift (the paper's 2 pixels; overlapping pairs always 4), affine or strong (half again as much)"
    )
    pairs: str = _flag("none", "none, overlapping (36x36) or side_by_side: two digits per picture")
    loss: str = _flag("margin", "margin, contrast (which adds a cross entropy of lengths), or cross_entropy for a softmax")
    reconstruction: float = _flag(0.0005, "weight of the summed squared reconstruction error", 0, 1_000)
    precision: str = _flag("auto", "fp32, bf16, or auto: bf16 where the processor has it")
    validation: int = _flag(5_000, "hold out the last N training pictures, for all choices", 1)
    seed: int = _flag(0, "seed of all randomness", 0, 2**31 - 1)

    @property
    def all_epochs(self) -> int:
        return self.epochs * self.cycles

    def __post_init__(self) -> None:
        for entry in dataclasses.fields(self):
            value, low, high = getattr(self, entry.name), entry.metadata["low"], entry.metadata["high"]
            if low is not None and not low <= value <= (math.inf if high is None else high):  # a NaN is not
                upto = "up" if high is None else f"to {high:g}"
                raise SettingError(f"{entry.name.replace('_', '-')} must be from {low:g} {upto}, got {value}")


@dataclass(frozen=True)
class Config(_Part):
    preset: str
    network: Annotated[CapsuleNet | PlainNet, Field(discriminator="kind")]
    training: Training

    def __post_init__(self) -> None:
        if self.training.loss == "cross_entropy" and getattr(self.network, "output", "") != "softmax":
            raise SettingError(
                f"loss cross_entropy is for outputs that sum to 1, and those of {self.preset} do not: nothing would shorten the "
                "capsules of absent classes. Use margin or contrast"
            )
        if self.training.transform_rate != 1 and isinstance(self.network, PlainNet):
            raise SettingError(f"transform-rate is for the matrices that make votes, and {self.preset} has none: leave it out")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Config:
        try:
            return _CONFIG.validate_python(values)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise TrainingError(f"not a config of this version of captrain: {where}: {first['msg']}") from error

    def differences(self, other: Config) -> list[str]:
        """Where two configs part, as `training.epochs: 30 against 1`."""
        mine, theirs = _flat(self.to_dict()), _flat(other.to_dict())
        keys = sorted(mine.keys() | theirs.keys())
        return [f"{key}: {mine.get(key)} against {theirs.get(key)}" for key in keys if mine.get(key) != theirs.get(key)]


_CONFIG = TypeAdapter(Config)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


# Efficient-CapsNet's stem (Mazzia et al. 2021): small kernels and batch norm, 28x28 -> 128 maps of 9x9.
_EFFICIENT_STEM = (
    Conv(32, kernel=5, norm=True),
    Conv(64, kernel=3, norm=True),
    Conv(64, kernel=3, norm=True),
    Conv(128, kernel=3, stride=2, norm=True),
)

# The picture halved early, so that the costly convolutions see few pixels: 28x28 -> 128 maps of 8x8, 36x36 -> 128 of 12x12.
_EARLY_STEM = (
    Conv(32, kernel=3, norm=True),
    Conv(32, kernel=3, norm=True),
    Conv(64, kernel=5, stride=2, padding=2, norm=True),
    Conv(64, kernel=3, norm=True),
    Conv(128, kernel=3, norm=True),
)

# Su 2018, fully convolutional: with 28x28 it ends in 128 maps of 8x8.
_SU_STEM = (Conv(64, 3), Conv(64, 3, pool=2), Conv(128, 3), Conv(128, 3))

PRESETS: dict[str, Config] = {
    preset.preset: preset
    for preset in (
        # Sabour, Frosst and Hinton 2017: 6x6 places x 32 kinds = 1,152 capsules of 8D, 10 of 16D. Not their training, but that of
        # `compact` at a lower rate: one cycle, averaged weights, dropout, strong changes, four times the weight on drawings. Its
        # large matrices learn by Muon: of 20,000 digits held out it erred on 0.56 % after ten epochs, and on 0.65 % by Adam.
        # A rate that ends at a tenth and shifts of one pixel made no difference, nor did more epochs. Exponential decay, as
        # public copies have it, came to 0.44 % of 5,000 held out in the mean of three seeds, as one cycle by Adam did. Batches
        # and averaging are `compact`'s. 16 epochs take a core 45 minutes.
        Config(
            "paper",
            CapsuleNet(stem=(Conv(256, kernel=9),), primary=Primary(kinds=32, size=8, kernel=9, stride=2), dropout=0.3),
            Training(epochs=16, learning_rate=0.002, muon=0.02, transform_rate=0.5, augment="strong", reconstruction=0.002),
        ),
        # 4x4 places x 16 kinds = 256 capsules to route, 565 thousand encoder parameters. Left alone it learns its digits by
        # heart: hence dropout and strong changes. These blur drawings: hence four times the paper's weight on them. Its decoder
        # sees the pose alone, so that a dimension means the same for every digit, and errs no more for it. Transformations begin
        # at the largest values of all matrices: hence four times the rate for them. 27 epochs, since a schedule of 60 without
        # dropout was best after 26; one cycle, and weights averaged over some 1,000 steps, two epochs of them: a rate that ends
        # at a tenth, and averages over 2,000, came to the same; batches of 128, since those of 32 take 1.7 times as long.
        # models/README.md: what else was tried.
        Config(
            "compact",
            CapsuleNet(
                stem=_EARLY_STEM,
                primary=Primary(kinds=16, size=8, kernel=2, stride=2),
                dropout=0.3,
                decoder=Decoder(sees_class=False),
            ),
            Training(epochs=27, learning_rate=0.003, transform_rate=4, augment="strong", reconstruction=0.002),
        ),
        # Efficient-CapsNet's own stem and its way to end it: sixteen capsules in all, 161 thousand encoder parameters.
        Config(
            "compact16",
            CapsuleNet(stem=_EFFICIENT_STEM, primary=Primary(kinds=16, size=8, kernel=9, depthwise=True)),
            Training(epochs=40, learning_rate=0.003),
        ),
        # Two digits a picture, as in the paper: 6x6 places x 16 kinds = 576 capsules. Pairs are never the same twice, so there is
        # no augmentation but their shifts. To tell one digit's strokes from the other's a capsule must see more than a digit:
        # two convolutions more than `compact` take its field from 19 pixels to 27. Transformations that begin smaller learn
        # sooner: 17.4 % after one short cycle, 20.1 % without. Drawings weigh four times what they do in the paper. In its last
        # epoch it erred nearly as often on the pairs it learned from as on those held out: more might still be learned.
        Config(
            "overlap",
            CapsuleNet(
                stem=(*_EARLY_STEM, *[Conv(128, kernel=3, padding=1, norm=True)] * 2),
                primary=Primary(kinds=16, size=8, kernel=2, stride=2),
                decoder=Decoder(hidden=(256, 512), sees_class=False),
                transform_scale=0.2,
                image_shape=(1, 36, 36),
            ),
            Training(
                epochs=30,
                learning_rate=0.003,
                transform_rate=4,
                loss="contrast",
                pairs="overlapping",
                augment="shift",
                reconstruction=0.002,
            ),
        ),
        Config(
            "shared",
            CapsuleNet(
                stem=_SU_STEM,
                primary=Primary(kinds=1, size=128, squash=False),
                routing="agreement",
                squash="half",
                share_transforms=True,
            ),
            Training(epochs=20),
        ),
        # The paper's own baseline: 35.4 million parameters beside a CapsNet's 8.2.
        Config(
            "baseline",
            PlainNet(
                stem=(Conv(256, 5, padding=2), Conv(256, 5, padding=2), Conv(128, 5, padding=2)),
                hidden=(328, 192),
                dropout=0.5,
                output="softmax",
            ),
            Training(epochs=20, augment="shift", loss="cross_entropy"),
        ),
        # Su's CNN: the stem of `shared`, global average pooling and ten sigmoids.
        Config(
            "pooled",
            PlainNet(stem=_SU_STEM, hidden=(128,), global_pool=True, output="sigmoid"),
            Training(epochs=20),
        ),
        # For tests and first steps: trains in seconds, its bundle is about 100 kB.
        Config(
            "tiny",
            CapsuleNet(
                stem=(Conv(8, kernel=5, stride=2, norm=True),),
                primary=Primary(kinds=2, size=8, kernel=5, stride=3),
                pose_size=6,
                decoder=Decoder(hidden=(10,)),
            ),
            Training(epochs=5, learning_rate=0.01),
        ),
    )
}


def preset(name: str) -> Config:
    """As it will be read again from a checkpoint: whoever wrote lists in place of tuples finds tuples there."""
    return Config.from_dict(chosen("preset", name, PRESETS).to_dict())
