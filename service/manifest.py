"""What a bundle says of itself: manifest.json, which files there are, and the error if something is not as expected.

The manifest's structure and the files' names exist here and nowhere else; models/README.md describes them. Needs only pydantic.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticSerializationError

FORMAT = "capserve/1"
MANIFEST, EXAMPLE = "manifest.json", "example.npz"
REACH = 0.25  # how far the paper moves a pose dimension either way, as sheets and the playground's sliders do too
STRONGEST = 1_000  # standard deviations: the largest strength that a dimension may have
MANIFEST_LIMIT = 4 << 20  # bytes; compact's has 14 thousand

Variant = Literal["fp32", "int8"]
ENCODER_FILES: dict[Variant, str] = {"fp32": "encoder.onnx", "int8": "encoder.int8.onnx"}
DECODER_FILE = "decoder.onnx"
FILES = frozenset((*ENCODER_FILES.values(), DECODER_FILE, EXAMPLE))
REQUIRED = FILES - {ENCODER_FILES["int8"]}

NAME = r"[a-z0-9][a-z0-9._-]{0,63}"
Name = Annotated[str, StringConstraints(pattern=f"^{NAME}$")]
ROUNDING_TOLERANCE = 1e-3  # how far the sum of rounded shares may be from 1
LONGEST_SHOWN = 60  # characters that are shown of a value that was not expected
LONGEST_NAME = 64  # characters: of a class, which requests may name, or of what a dimension does
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
# More than 0 and less than 100, also when read as floats.
Percentile = Annotated[str, StringConstraints(pattern=r"^(0\.0{0,5}[1-9]\d{0,5}|[1-9]\d?(\.\d{1,6})?)$")]


def _checked_rising(percentiles: dict[str, float]) -> dict[str, float]:
    ranked = [percentiles[each] for each in sorted(percentiles, key=float)]
    if ranked != sorted(ranked):
        raise ValueError(f"expected values that rise with their percentages, found {', '.join(map(str, ranked))}")
    return percentiles


# At least two: verdicts extrapolate beyond the last.
Percentiles = Annotated[dict[Percentile, FiniteFloat], Field(min_length=2), AfterValidator(_checked_rising)]
PoseValue = Annotated[FiniteFloat, Field(ge=-65504, le=65504)]  # what a token can carry: float16's largest


class BundleError(Exception):
    """A bundle that is not what it says; the text names what was expected and what was found."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _Note(_Part):
    """A part on which no answer depends: fields that a newer captrain adds are kept, and its bundle is served."""

    model_config = ConfigDict(frozen=True, extra="allow")


class Routing(_Part):
    algorithm: str
    iterations: int = Field(ge=1)


class TrainingRecord(_Note):
    """How the weights came to be; `history` is a row per epoch."""

    epochs: int
    seed: int
    hardware: str
    software: str = ""  # bundles made before it was kept have none
    seconds: FiniteFloat
    data: Sha256 | None = None  # of the training pictures and labels; bundles made before it was kept have none
    parameters: int
    encoder_parameters: int
    history: tuple[dict[str, FiniteFloat], ...] = ()


class ErrorRate(_Note):
    """The number of errors, and their rate in per cent with its 95 % interval."""

    errors: int
    count: int
    percent: FiniteFloat
    low: FiniteFloat
    high: FiniteFloat


class Measured(_Note):
    """One variant on one set of pictures."""

    error: ErrorRate
    reconstruction_error: FiniteFloat  # mean squared, per pixel


class OtherSeed(_Note):
    """A network of the same config except for the seed: its weights are not kept, its errors in float32 are."""

    seed: int
    test: ErrorRate


class Metrics(_Note):
    parity: FiniteFloat = Field(ge=0)  # largest difference between torch and ONNX Runtime, same weights, all outputs
    validation: dict[Variant, Measured] = {}
    test: dict[Variant, Measured] = {}  # `captrain evaluate --record` writes this and other_seeds; export keeps other_seeds
    other_seeds: tuple[OtherSeed, ...] = ()


class Thresholds(_Part):
    """What is usual for a picture that shows one of the classes, from validation pictures."""

    presence: FiniteFloat = Field(ge=0, le=1)  # a capsule at least this long counts as present
    lengths: Percentiles  # percentile -> length of the winning capsule, "0.1" to "50"
    margins: Percentiles  # percentile -> winner's length less the runner-up's
    reconstruction_errors: dict[str, Percentiles]  # class -> percentile, "50" to "99.9" -> error


class Shares(_Part):
    """Share of pictures per bin; there is one more edge than bins."""

    edges: tuple[FiniteFloat, ...]
    shares: tuple[Annotated[FiniteFloat, Field(ge=0)], ...]

    @model_validator(mode="after")
    def _check_edges(self) -> Self:
        if len(self.edges) != len(self.shares) + 1:
            raise ValueError(f"expected {len(self.shares) + 1} edges for {len(self.shares)} shares, found {len(self.edges)}")
        if any(right <= left for left, right in pairwise(self.edges)):
            raise ValueError(f"expected edges that rise, found {', '.join(map(str, self.edges))}")
        if abs(sum(self.shares) - 1) > ROUNDING_TOLERANCE:
            raise ValueError(f"expected shares that add up to 1, found {sum(self.shares):g}")
        return self


class References(_Part):
    """What the validation pictures looked like to this model: live traffic drifts away from it."""

    winner_length: Shares
    reconstruction_error: Shares


class Dimension(_Part):
    """What moving one pose dimension does to a drawing, as measured; named only if it is the same for nearly all drawings."""

    name: str = Field(max_length=LONGEST_NAME)  # "stroke thickness"; empty if no measure tells
    strength: float = Field(ge=-STRONGEST, le=STRONGEST)  # change from -REACH to REACH, in standard deviations of that measure

    def title(self, number: int, strength: bool = True) -> str:
        """The title of the dimension's row in a sheet: `slant 1 (+3.3 SD)`, or only its number."""
        if not self.name:
            return str(number)
        return f"{self.name} {number}" + (f" ({self.strength:+.1f} SD)" if strength else "")


class Manifest(_Part):
    format: Literal["capserve/1"]
    name: Name
    version: Name
    classes: tuple[Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)], ...] = Field(min_length=2)
    image_shape: tuple[Literal[1, 3], Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]]  # grey or RGB, height, width
    pose_size: int = Field(ge=1)
    max_objects: Literal[1, 2]
    boxed: bool = True  # trained on ink fitted into a box, as in MNIST: normalise=auto does the same; otherwise it only scales
    routing: Routing | None  # None for a plain CNN, which has nothing to route
    preset: str
    dataset: str
    config: dict[str, Any]  # the training side's whole config
    training: TrainingRecord
    metrics: Metrics
    thresholds: Thresholds
    prototypes: tuple[tuple[PoseValue, ...], ...]  # (classes, pose): the mean pose of each class
    dimensions: tuple[Dimension, ...] = ()  # one for each value of a pose; none if not measured
    references: References
    files: dict[str, Sha256]

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        expect("files", sorted(REQUIRED), sorted(REQUIRED & self.files.keys()), ValueError)
        expect("files other than a bundle's", [], sorted(self.files.keys() - FILES), ValueError)
        expect("version, the fingerprint", fingerprint(self.files).hex(), self.version, ValueError)
        expect("different class names", len(self.classes), len(set(self.classes)), ValueError)
        expect("prototypes", len(self.classes), len(self.prototypes), ValueError)
        for prototype in self.prototypes:
            expect("values in a prototype", self.pose_size, len(prototype), ValueError)
        if self.dimensions:
            expect("dimensions", self.pose_size, len(self.dimensions), ValueError)
        errors = self.thresholds.reconstruction_errors
        expect("classes with thresholds", sorted(self.classes), sorted(errors), ValueError)
        for name in self.classes:
            expect(f"percentiles of {name}'s errors", sorted(errors[self.classes[0]]), sorted(errors[name]), ValueError)
        return self

    @property
    def variants(self) -> tuple[Variant, ...]:
        return tuple(variant for variant, file in ENCODER_FILES.items() if file in self.files)

    @property
    def fingerprint(self) -> bytes:
        """Eight bytes that identify this very model: a pose belongs to the graphs that made it and can draw it."""
        return bytes.fromhex(self.version)


def refuse_endless(path: Path) -> None:
    """Refuses a pipe or a device, since reading one might never end."""
    mode = path.stat().st_mode
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
        raise BundleError(f"{path}: expected a file, found a pipe or a device")


def read_manifest(folder: Path) -> Manifest:
    """Reads a folder's manifest, without checking the files that it names."""
    path = folder / MANIFEST
    try:
        refuse_endless(path)
        size = path.stat().st_size
        if size > MANIFEST_LIMIT:
            raise BundleError(f"{path}: expected at most {MANIFEST_LIMIT} bytes, found {size}")
        values = json.loads(path.read_bytes(), parse_constant=_refuse_constant)
    except OSError as error:
        raise BundleError(
            f"{folder}: no bundle there: expected a readable {MANIFEST}, found {error.strerror}; a folder whose name begins "
            "with _ is skipped"
        ) from error
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path}: expected JSON, found {error}") from error
    if isinstance(values, dict):
        expect(f"{path}: format", FORMAT, values.get("format"))
    try:
        manifest = Manifest.model_validate(values)
        manifest.model_dump_json()
    except ValidationError as error:
        raise BundleError(f"{path}: {_first_fault(error)}") from error
    except PydanticSerializationError as error:  # half a surrogate pair, or a config that is nested a hundred deep
        raise BundleError(f"{path}: expected what can be told in JSON again, found {error}") from error
    return manifest


def _first_fault(error: ValidationError) -> str:
    first, count = error.errors()[0], error.error_count()
    where = ".".join(map(str, first["loc"])) or "manifest"
    if first["type"] == "extra_forbidden":
        return f"{where}: not known here; if a newer captrain made this bundle, a service as new can serve it"
    message = first["msg"].removeprefix("Value error, ")  # from our own validators, which say what they found
    found = "" if first["type"] in ("value_error", "missing") else json.dumps(first["input"], default=str)[:LONGEST_SHOWN]
    return f"{where}: {message}" + (f", found {found}" if found else "") + (f" ({count} faults in all)" if count > 1 else "")


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes manifest.json, whole or not at all."""
    partial = folder / f"{MANIFEST}.part"
    try:
        partial.write_text(_json_text(manifest.model_dump(mode="json")) + "\n")
        partial.replace(folder / MANIFEST)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise BundleError(f"could not write {folder / MANIFEST}: {error.strerror}; the one before, if any, is whole") from error


def fingerprint(files: Mapping[str, str]) -> bytes:
    return hashlib.sha256((files[ENCODER_FILES["fp32"]] + files[DECODER_FILE]).encode()).digest()[:8]


def check_name(name: str) -> None:
    """Checks a folder's name before a bundle is made in it: it becomes the model's name."""
    if not re.fullmatch(NAME, name):
        raise BundleError(
            f"expected a model name of up to 64 small letters, digits, dots, dashes and underscores, found {name!r}"
        )


def expect(what: str, expected: object, found: object, error: type[Exception] = BundleError) -> None:
    if expected != found:
        raise error(f"{what}: expected {expected}, found {found}")


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text}, which JSON does not have")


def _json_text(value: object, depth: int = 0) -> str:
    """JSON that people can read and git can compare: a line for each entry of an object, one line for a list."""
    if not isinstance(value, dict) or not value or depth > 3:
        return json.dumps(value)
    indent = "  " * (depth + 1)
    entries = ",\n".join(f"{indent}{json.dumps(key)}: {_json_text(entry, depth + 1)}" for key, entry in value.items())
    return "{\n" + entries + "\n" + "  " * depth + "}"
