"""All settings of a network and its training, as frozen dataclasses, with named PRESETS.

The config is stored in the checkpoint and the bundle, so neither needs any setting again when it is loaded.
The fields of `Training` are the command-line flags of `captrain train`. Does not import torch.
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
    """Base of all parts; reading an unknown field is an error, since another version of captrain wrote it for a purpose."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class Conv(_Part):
    """One convolution of the stem, with ReLU, then optional average pooling."""

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
    """Draws the picture from one class capsule: it sees all capsules with the others set to zero, or this one's pose alone."""

    hidden: tuple[int, ...] = (512, 1024)
    sees_class: bool = True  # False as in Rajasegaran et al. 2019: a pose dimension means the same for every class


@dataclass(frozen=True)
class CapsuleNet(_Part):
    """Stem -> primary capsules -> votes -> routing -> class capsules."""

    stem: tuple[Conv, ...]
    primary: Primary
    routing: str = "dynamic"
    iterations: int = 3
    squash: str = "paper"
    dropout: float = 0.0  # share of the primary capsules that a training step ignores for the class
    share_transforms: bool = False  # one transformation for all input capsules: any image size works
    transform_scale: float = 1.0  # of the initial transformations: hundreds of full-size votes start as long capsules
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
        if not 0 < self.transform_scale <= 10:  # at 0 all votes would stay equal; NaN fails too
            raise SettingError(f"transform_scale must be above 0 and at most 10, got {self.transform_scale}")


@dataclass(frozen=True)
class PlainNet(_Part):
    """A CNN to compare with; its capsules are one-dimensional, the class scores, so it is served like the others."""

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
    """A field of Training with its help and, for numbers, the allowed range, which includes low and high."""
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
            if low is not None and not low <= value <= (math.inf if high is None else high):  # NaN fails too
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
        """List where two configs differ, such as `training.epochs: 30 against 1`."""
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

# Halves the picture early, so that the costly convolutions see few pixels: 28x28 -> 128 maps of 8x8, 36x36 -> 128 of 12x12.
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
        # Sabour, Frosst and Hinton 2017: 6x6 places x 32 kinds = 1,152 capsules of 8D, 10 of 16D. The training is not theirs but
        # `compact`'s at a lower rate: one cycle, averaged weights, dropout, strong augmentation, fourfold weight on drawings.
        # Its large matrices are trained with Muon: the error on 20,000 held-out digits was 0.56 % after ten epochs, with Adam
        # 0.65 %. A rate that ends at a tenth, shifts of one pixel and more epochs made no difference. Exponential decay, as in
        # public copies, gave 0.44 % on 5,000 held-out digits (mean of three seeds), and so did one cycle with Adam. Batch size
        # and averaging are `compact`'s. 16 epochs take 45 minutes on one core.
        Config(
            "paper",
            CapsuleNet(stem=(Conv(256, kernel=9),), primary=Primary(kinds=32, size=8, kernel=9, stride=2), dropout=0.3),
            Training(epochs=16, learning_rate=0.002, muon=0.02, transform_rate=0.5, augment="strong", reconstruction=0.002),
        ),
        # 4x4 places x 16 kinds = 256 capsules to route, 565 thousand encoder parameters. It would overfit: hence dropout and
        # strong augmentation. These blur drawings: hence four times the paper's weight on them. Its decoder sees the pose alone,
        # so that a dimension means the same for every digit, at no cost in accuracy. Transformations start with the largest
        # values of all matrices: hence four times the rate for them. 27 epochs, since a schedule of 60 without dropout was best
        # after 26. One cycle, with weights averaged over some 1,000 steps, which are two epochs: a rate that ends at a tenth and
        # averages over 2,000 steps gave the same. Batches of 128, since those of 32 take 1.7 times as long.
        # models/README.md lists what else was tried.
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
        # Efficient-CapsNet's stem and its depthwise primary capsules: sixteen in all, 161 thousand encoder parameters.
        Config(
            "compact16",
            CapsuleNet(stem=_EFFICIENT_STEM, primary=Primary(kinds=16, size=8, kernel=9, depthwise=True)),
            Training(epochs=40, learning_rate=0.003),
        ),
        # Two digits per picture, as in the paper: 6x6 places x 16 kinds = 576 capsules. Pairs are never the same twice, so their
        # shifts are the only augmentation. To tell one digit's strokes from the other's a capsule must see more than one digit:
        # two convolutions more than in `compact` widen its receptive field from 19 to 27 pixels. Smaller initial transformations
        # learn faster: 17.4 % errors after one short cycle, 20.1 % at full scale. Drawings weigh four times as much as in the
        # paper. In the last epoch it made nearly as many errors on training pairs as on held-out ones: it might learn still more.
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
        # The paper's own baseline: 35.4 million parameters, against 8.2 million of its CapsNet.
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
    """Return a preset as a checkpoint would load it: lists written in place of tuples become tuples."""
    return Config.from_dict(chosen("preset", name, PRESETS).to_dict())
