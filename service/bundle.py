"""The contract between training and service: what a bundle is, how it is written, and how it is verified.

A bundle is a folder with encoder.onnx, decoder.onnx, optionally encoder.int8.onnx, example.npz and manifest.json.
manifest.py defines the manifest; tensor names exist here and nowhere else; models/README.md describes them.
Needs only numpy and pydantic: whoever opens a session passes in the signature it has.
"""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from service import graphfile
from service.manifest import (
    DECODER_FILE,
    ENCODER_FILES,
    EXAMPLE,
    FILES,
    FORMAT,
    REQUIRED,
    BundleError,
    Manifest,
    Variant,
    expect,
    fingerprint,
    read_manifest,
    refuse_endless,
    write_manifest,
)

Array = NDArray[np.float32]
EXAMPLE_LIMIT = 64 << 20  # bytes unpacked

# What a damaged zip can raise; its checksum has been verified by then, so the bundle was made wrong.
_DAMAGE_ERRORS = (OSError, EOFError, RuntimeError, zlib.error, zipfile.BadZipFile)
DTYPES = {"float": "float32", "int64": "int64"}  # ONNX Runtime's names -> numpy's


@dataclass(frozen=True)
class TensorSpec:
    """A graph's input or output. Axes are letters: N is free, the sizes of C H W K D are in the manifest."""

    name: str
    dtype: Literal["float", "int64"]  # in ONNX Runtime's names
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

# What `boxed` pictures are fitted into, by max_objects, in pixels at the scale of MNIST's digits: the frame's shorter side, and
# the ink's longer side, of one digit or of two, which lie three apart on average, each being shifted by up to four.
FRAME = {1: 28, 2: 36}
BOX = {1: 20, 2: 23}

# How far a replay may differ from the exporter's outputs: other processors round differently, int8 kernels more so.
REPLAY_TOLERANCE: dict[Variant, float] = {"fp32": 2e-3, "int8": 2e-2}


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
        """What example.npz holds for this variant, its types and shapes checked."""
        path = self.folder / EXAMPLE
        names = [f"{name}.{variant}" if name in ("lengths", "capsules") else name for name in Example._fields]
        try:
            with zipfile.ZipFile(path) as archive:
                size = sum(entry.file_size for entry in archive.infolist())
            if size > EXAMPLE_LIMIT:
                raise ValueError(f"{size} bytes unpacked, more than {EXAMPLE_LIMIT}")
            with np.load(path, allow_pickle=False) as arrays:
                example = Example(*(arrays[name] for name in names))
        except (*_DAMAGE_ERRORS, KeyError, ValueError, MemoryError) as error:
            raise BundleError(f"{path}: expected the arrays {', '.join(names)}, found {error}") from error
        for spec in (*ENCODER.inputs, *ENCODER.outputs, *DECODER.inputs, *DECODER.outputs):
            array = getattr(example, spec.name)
            shape = (len(example.images), *spec.shape(self.manifest)[1:])
            expect(f"{path}: type of {spec.name}", DTYPES[spec.dtype], array.dtype.name)
            expect(f"{path}: shape of {spec.name}", shape, array.shape)
        if not len(example.images):
            raise BundleError(f"{path}: expected at least one picture to replay, found none")
        return example


def read(folder: Path) -> Bundle:
    """Reads the bundle in a folder: parses its manifest and verifies every file's checksum."""
    manifest = read_manifest(folder)
    for name, expected in manifest.files.items():
        expect(f"sha256 of {folder / name}", expected, checksum(folder / name))
        if name.endswith(".onnx"):
            _check_whole(folder / name)
    return Bundle(folder, manifest)


def write(folder: Path, values: Mapping[str, Any]) -> Bundle:
    """Completes a folder that holds the graphs and the example: checksums, version and manifest.json, then reads it back.

    `values` are the manifest's, except format, name, version and files, which are filled in here.
    """
    files = {name: checksum(folder / name) for name in sorted(FILES) if (folder / name).exists()}
    expect(f"files in {folder}", sorted(REQUIRED), sorted(REQUIRED & files.keys()))
    own = {"format": FORMAT, "name": folder.name, "version": fingerprint(files).hex(), "files": files}
    try:
        manifest = Manifest.model_validate({**values, **own})
    except ValidationError as error:
        raise BundleError(f"{folder}: cannot write the manifest: {error}") from error
    write_manifest(folder, manifest)
    return read(folder)


class Argument(Protocol):
    """An input or output as ONNX Runtime describes it."""

    name: str
    type: str
    shape: list[Any]


def check_signature(
    spec: GraphSpec, manifest: Manifest, inputs: Iterable[Argument], outputs: Iterable[Argument], origin: Path
) -> None:
    """Checks a graph's inputs and outputs against the contract: names, types and every fixed axis; only the batch is free."""
    for side, specs, found in (("inputs", spec.inputs, list(inputs)), ("outputs", spec.outputs, list(outputs))):
        expected = [_signature(tensor.name, f"tensor({tensor.dtype})", tensor.shape(manifest)) for tensor in specs]
        expect(f"{side} of {origin}", expected, [_signature(each.name, each.type, each.shape) for each in found])


def check_replay(
    bundle: Bundle,
    variant: Variant,
    encode: Callable[[Array], tuple[Array, Array]],
    decode: Callable[[Array, NDArray[np.int64]], Array],
) -> float:
    """Runs the example through both graphs and returns the largest difference; raises if one is beyond the tolerance."""
    example, tolerance = bundle.example(variant), REPLAY_TOLERANCE[variant]
    lengths, capsules = encode(example.images)
    found = {"lengths": lengths, "capsules": capsules, "reconstructions": decode(example.poses, example.classes)}
    worst = 0.0
    for name, values in found.items():
        expected = getattr(example, name)
        expect(f"{bundle.folder}: shape of {name} in the {variant} replay", expected.shape, values.shape)
        difference = float(np.abs(values - expected).max())
        if not difference <= tolerance:  # true of NaN too
            raise BundleError(
                f"{bundle.folder}: {variant} replay of {name}: expected {EXAMPLE} within {tolerance}, found {difference:.3g} off"
            )
        worst = max(worst, difference)
    return worst


def checksum(path: Path) -> str:
    try:
        refuse_endless(path)
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BundleError(f"{path}: expected a readable file, found {error.strerror}") from error


def _check_whole(path: Path) -> None:
    """Refuses a graph with weights in other files: these may be anywhere on the disk, and no checksum would cover them."""
    try:
        whole = graphfile.holds_its_weights(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BundleError(f"{path}: expected an ONNX graph, found {error}") from error
    if not whole:
        raise BundleError(f"{path}: expected all weights in this file, found some in another; export it without external data")


def _signature(name: str, dtype: str, shape: Iterable[Any]) -> str:
    axes = ["N" if not isinstance(axis, int) else str(axis) for axis in shape]
    return f"{name} {dtype}[{','.join(axes)}]"
