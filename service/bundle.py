"""The contract between training and service: what a bundle is, how it is written, and how it is believed.

A bundle is a folder with encoder.onnx, decoder.onnx, perhaps encoder.int8.onnx, example.npz and manifest.json.
Tensor names, file names and the manifest's shape exist here and nowhere else; models/README.md describes them.
Needs numpy and pydantic only: whoever opens a session passes in what it found.
"""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, StringConstraints, ValidationError, model_validator

from service import graphfile

FORMAT = "capserve/1"
MANIFEST, EXAMPLE = "manifest.json", "example.npz"
EXAMPLE_LIMIT = 64 << 20  # bytes unpacked
MANIFEST_LIMIT = 4 << 20  # bytes; one of compact is 20 thousand

Array = NDArray[np.float32]
Variant = Literal["fp32", "int8"]


# Whatever a damaged zip can raise; the checksum has passed by then, so this is a bundle made wrong.
_DAMAGED = (OSError, EOFError, RuntimeError, zlib.error, zipfile.BadZipFile)
_NUMPY_TYPES = {"float": "float32", "int64": "int64"}


class BundleError(Exception):
    """A bundle that is not what it says; the text names what was expected and what was found."""


@dataclass(frozen=True)
class TensorSpec:
    """A graph's input or output. Axes are letters: N is free, C H W K D are the manifest's."""

    name: str
    dtype: Literal["float", "int64"]  # in ONNX Runtime's words
    axes: str

    def shape(self, manifest: Manifest) -> list[int | None]:
        channels, height, width = manifest.image_shape
        sizes = {"C": channels, "H": height, "W": width, "K": len(manifest.classes), "D": manifest.pose_size}
        return [sizes.get(axis) for axis in self.axes]


@dataclass(frozen=True)
class GraphSpec:
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


IMAGES = TensorSpec("images", "float", "NCHW")  # in [0, 1]
LENGTHS = TensorSpec("lengths", "float", "NK")
CAPSULES = TensorSpec("capsules", "float", "NKD")
POSES = TensorSpec("poses", "float", "ND")
CLASSES = TensorSpec("classes", "int64", "N")
RECONSTRUCTIONS = TensorSpec("reconstructions", "float", "NCHW")

ENCODER = GraphSpec(inputs=(IMAGES,), outputs=(LENGTHS, CAPSULES))
DECODER = GraphSpec(inputs=(POSES, CLASSES), outputs=(RECONSTRUCTIONS,))

ENCODER_FILES: dict[Variant, str] = {"fp32": "encoder.onnx", "int8": "encoder.int8.onnx"}
DECODER_FILE = "decoder.onnx"
FILES = frozenset((*ENCODER_FILES.values(), DECODER_FILE, EXAMPLE))
REQUIRED = FILES - {ENCODER_FILES["int8"]}

# What `boxed` pictures are fitted into, by max_objects. Of the frame's side, the longer side of what is written: of one digit; or
# of two, which lie three pixels apart in the mean when each is moved by up to four.
BOX = {1: 20 / 28, 2: 23 / 36}

# How far a replay may be from what the exporter saw: other processors and TF32 round differently, int8 kernels more so.
REPLAY_TOLERANCE: dict[Variant, float] = {"fp32": 2e-3, "int8": 2e-2}


NAME = r"[a-z0-9][a-z0-9._-]{0,63}"
Name = Annotated[str, StringConstraints(pattern=f"^{NAME}$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Percentile = Annotated[str, StringConstraints(pattern=r"^(0\.0*[1-9]\d*|[1-9]\d?(\.\d+)?)$")]  # more than 0, less than 100
Percentiles = Annotated[dict[Percentile, FiniteFloat], Field(min_length=2)]  # beyond the last, verdicts go on as between two


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Routing(_Part):
    algorithm: str
    iterations: int = Field(ge=1)


class TrainingRecord(_Part):
    """How the weights came to be; `history` is a row per epoch."""

    epochs: int
    seed: int
    hardware: str
    seconds: FiniteFloat
    data: Sha256 | None = None  # of the training pictures and labels; bundles made before it was kept have none
    parameters: int
    encoder_parameters: int
    history: tuple[dict[str, FiniteFloat], ...] = ()


class ErrorRate(_Part):
    """Errors counted, and in per cent with their 95 % interval."""

    errors: int
    count: int
    percent: FiniteFloat
    low: FiniteFloat
    high: FiniteFloat


class Measured(_Part):
    """One variant on one set of pictures."""

    error: ErrorRate
    reconstruction_error: FiniteFloat  # mean squared, a pixel


class OtherSeed(_Part):
    """A network of the same config but the seed: its weights are not kept, its errors in float32 are."""

    seed: int
    test: ErrorRate


class Metrics(_Part):
    parity: FiniteFloat = Field(ge=0)  # largest difference torch against ONNX Runtime, over all outputs, same weights
    validation: dict[Variant, Measured] = {}
    test: dict[Variant, Measured] = {}  # this and the next are for `captrain evaluate --record`; export keeps the next
    other_seeds: tuple[OtherSeed, ...] = ()


class Thresholds(_Part):
    """From validation pictures: what is usual for a picture that shows one of the classes."""

    presence: FiniteFloat = Field(ge=0, le=1)  # a capsule at least this long counts as present
    lengths: Percentiles  # percentile -> length of the winning capsule, "0.5" to "50"
    margins: Percentiles  # percentile -> winner's length less the runner-up's
    reconstruction_errors: dict[str, Percentiles]  # class -> percentile, "50" to "99.9" -> error


class Histogram(_Part):
    """Share of pictures a bin; one more edge than bins."""

    edges: tuple[FiniteFloat, ...]
    shares: tuple[FiniteFloat, ...]

    @model_validator(mode="after")
    def _one_more_edge(self) -> Self:
        if len(self.edges) != len(self.shares) + 1:
            raise ValueError(f"expected {len(self.shares) + 1} edges for {len(self.shares)} shares, found {len(self.edges)}")
        return self


class References(_Part):
    """What the validation pictures looked like to this model: live traffic drifts away from it."""

    winner_length: Histogram
    reconstruction_error: Histogram
    labels: tuple[FiniteFloat, ...]  # share of each class among the predictions


class Dimension(_Part):
    """What turning one pose dimension does to a drawing, as measured; a name only where it is the same for nearly all."""

    name: str  # "stroke thickness"; empty where no measure tells
    strength: FiniteFloat  # change from -0.25 to 0.25, in standard deviations of that measure


class Manifest(_Part):
    format: Literal["capserve/1"]
    name: Name
    version: Name
    classes: tuple[str, ...] = Field(min_length=2)
    image_shape: tuple[Literal[1, 3], Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]]  # grey or RGB, height, width
    pose_size: int = Field(ge=1)
    max_objects: Literal[1, 2]
    boxed: bool = True  # trained on ink fitted into a box, as MNIST was made: normalise=auto does so too; else it scales, no more
    routing: Routing | None  # None for a plain CNN, which has nothing to route
    preset: str
    dataset: str
    config: dict[str, Any]  # the training side's own, whole
    training: TrainingRecord
    metrics: Metrics
    thresholds: Thresholds
    prototypes: tuple[tuple[FiniteFloat, ...], ...]  # (classes, pose): the mean pose of each class
    dimensions: tuple[Dimension, ...] = ()  # one for each value of a pose; none where nobody has looked
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
        expect("reference labels", len(self.classes), len(self.references.labels), ValueError)
        expect("classes with thresholds", sorted(self.classes), sorted(self.thresholds.reconstruction_errors), ValueError)
        return self

    @property
    def variants(self) -> tuple[Variant, ...]:
        return tuple(variant for variant, file in ENCODER_FILES.items() if file in self.files)

    @property
    def fingerprint(self) -> bytes:
        """Eight bytes that name this very model: a pose belongs to the graphs that made it and can draw it."""
        return fingerprint(self.files)


class Example(NamedTuple):
    """Inputs, and what the exporter's ONNX Runtime made of them with one encoder."""

    images: Array
    lengths: Array
    capsules: Array
    poses: Array
    classes: NDArray[np.int64]
    reconstructions: Array


@dataclass(frozen=True)
class Bundle:
    """A folder whose manifest is sound and whose files are the ones it names."""

    folder: Path
    manifest: Manifest

    def encoder(self, variant: Variant) -> Path:
        if variant not in self.manifest.variants:
            raise BundleError(f"{self.folder}: no {variant} encoder; this bundle has {', '.join(self.manifest.variants)}")
        return self.folder / ENCODER_FILES[variant]

    @property
    def decoder(self) -> Path:
        return self.folder / DECODER_FILE

    def example(self, variant: Variant) -> Example:
        """What example.npz expects of this variant."""
        path = self.folder / EXAMPLE
        names = [f"{name}.{variant}" if name in ("lengths", "capsules") else name for name in Example._fields]
        try:
            with zipfile.ZipFile(path) as archive:
                size = sum(entry.file_size for entry in archive.infolist())
            if size > EXAMPLE_LIMIT:
                raise ValueError(f"{size} bytes unpacked where {EXAMPLE_LIMIT} are the most")
            with np.load(path, allow_pickle=False) as arrays:
                example = Example(*(arrays[name] for name in names))
        except (*_DAMAGED, KeyError, ValueError, MemoryError) as error:
            raise BundleError(f"{path}: expected the arrays {', '.join(names)}, found {error}") from error
        for spec in (*ENCODER.inputs, *ENCODER.outputs, *DECODER.inputs, *DECODER.outputs):
            array = getattr(example, spec.name)
            shape = (len(example.images), *spec.shape(self.manifest)[1:])
            expect(f"{path}: type of {spec.name}", _NUMPY_TYPES[spec.dtype], array.dtype.name)
            expect(f"{path}: shape of {spec.name}", shape, array.shape)
        if not len(example.images):
            raise BundleError(f"{path}: expected at least one picture to replay, found none")
        return example


def read(folder: Path) -> Bundle:
    """The bundle in a folder, its manifest parsed and every file's checksum compared."""
    path = folder / MANIFEST
    try:
        size = path.stat().st_size
        if size > MANIFEST_LIMIT:
            raise BundleError(f"{path}: expected at most {MANIFEST_LIMIT} bytes, found {size}")
        values = json.loads(path.read_bytes(), parse_constant=_no_number)
    except OSError as error:
        raise BundleError(f"{folder}: no bundle there: expected a readable {MANIFEST}, found {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path}: expected JSON, found {error}") from error
    if isinstance(values, dict):
        expect(f"{path}: format", FORMAT, values.get("format"))
    try:
        manifest = Manifest.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "manifest"
        raise BundleError(f"{path}: {where}: {first['msg']} ({error.error_count()} faults in all)") from error
    for name, expected in manifest.files.items():
        expect(f"sha256 of {folder / name}", expected, checksum(folder / name))
        if name.endswith(".onnx"):
            _check_whole(folder / name)
    return Bundle(folder, manifest)


def write(folder: Path, values: Mapping[str, Any]) -> Bundle:
    """Completes a folder that holds the graphs and the example: checksums, version and manifest.json, then reads it back.

    `values` are the manifest's, less format, name, version and files, which the folder itself tells.
    """
    files = {name: checksum(folder / name) for name in sorted(FILES) if (folder / name).exists()}
    expect(f"files in {folder}", sorted(REQUIRED), sorted(REQUIRED & files.keys()))
    own = {"format": FORMAT, "name": folder.name, "version": fingerprint(files).hex(), "files": files}
    try:
        manifest = Manifest.model_validate({**values, **own})
    except ValidationError as error:
        raise BundleError(f"{folder}: cannot write the manifest: {error}") from error
    record(folder, manifest)
    return read(folder)


def record(folder: Path, manifest: Manifest) -> None:
    """Puts manifest.json in place, whole or not at all."""
    partial = folder / f"{MANIFEST}.part"
    partial.write_text(_compact(manifest.model_dump(mode="json")) + "\n")
    partial.replace(folder / MANIFEST)


class Argument(Protocol):
    """An input or output as ONNX Runtime describes it."""

    name: str
    type: str
    shape: list[Any]


def check_signature(
    spec: GraphSpec, manifest: Manifest, inputs: Iterable[Argument], outputs: Iterable[Argument], origin: Path
) -> None:
    """A graph's inputs and outputs against the contract: names, types and every fixed axis; only the batch is free."""
    for side, specs, found in (("inputs", spec.inputs, list(inputs)), ("outputs", spec.outputs, list(outputs))):
        expected = [_signature(tensor.name, f"tensor({tensor.dtype})", tensor.shape(manifest)) for tensor in specs]
        expect(f"{side} of {origin}", expected, [_signature(each.name, each.type, each.shape) for each in found])


def check_replay(
    bundle: Bundle,
    variant: Variant,
    encode: Callable[[Array], tuple[Array, Array]],
    decode: Callable[[Array, NDArray[np.int64]], Array],
) -> float:
    """Runs the example through both graphs and gives the largest difference; one beyond the tolerance is an error."""
    example, tolerance = bundle.example(variant), REPLAY_TOLERANCE[variant]
    lengths, capsules = encode(example.images)
    found = {"lengths": lengths, "capsules": capsules, "reconstructions": decode(example.poses, example.classes)}
    worst = 0.0
    for name, values in found.items():
        expected = getattr(example, name)
        expect(f"{bundle.folder}: shape of {name} in the {variant} replay", expected.shape, values.shape)
        difference = float(np.abs(values - expected).max())
        if not difference <= tolerance:  # a NaN is not
            raise BundleError(
                f"{bundle.folder}: {variant} replay of {name}: expected {EXAMPLE} within {tolerance}, found {difference:.3g} off"
            )
        worst = max(worst, difference)
    return worst


def fingerprint(files: Mapping[str, str]) -> bytes:
    return _fingerprint(files[ENCODER_FILES["fp32"]] + files[DECODER_FILE])


@lru_cache  # every answer carries it
def _fingerprint(graphs: str) -> bytes:
    return hashlib.sha256(graphs.encode()).digest()[:8]


def checksum(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BundleError(f"{path}: expected a readable file, found {error.strerror}") from error


def _check_whole(path: Path) -> None:
    """A graph may name other files for its weights, anywhere on the disk; no checksum would cover those."""
    try:
        whole = graphfile.holds_its_weights(path.read_bytes())
    except ValueError as error:
        raise BundleError(f"{path}: expected an ONNX graph, found {error}") from error
    if not whole:
        raise BundleError(f"{path}: expected all weights in this file, found some in another; export it without external data")


def check_name(name: str) -> None:
    """Before a bundle is made: its folder's name is the model's."""
    if not re.fullmatch(NAME, name):
        raise BundleError(
            f"expected a model name of up to 64 small letters, digits, dots, dashes and underscores, found {name!r}"
        )


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text}, which JSON does not have")


def expect(what: str, expected: object, found: object, error: type[Exception] = BundleError) -> None:
    if expected != found:
        raise error(f"{what}: expected {expected}, found {found}")


def _signature(name: str, dtype: str, shape: Iterable[Any]) -> str:
    axes = ["N" if not isinstance(axis, int) else str(axis) for axis in shape]
    return f"{name} {dtype}[{','.join(axes)}]"


def _compact(value: object, depth: int = 0) -> str:
    """JSON that a person can read and git can compare: an object's entries a line each, lists of numbers on one."""
    if not isinstance(value, dict) or not value or depth > 3:
        return json.dumps(value)
    indent = "  " * (depth + 1)
    entries = ",\n".join(f"{indent}{json.dumps(key)}: {_compact(entry, depth + 1)}" for key, entry in value.items())
    return "{\n" + entries + "\n" + "  " * depth + "}"
