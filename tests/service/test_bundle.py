"""The contract, broken in each way it can be: the error names what was expected and what was found."""

import errno
import io
import json
import os
import resource
import shutil
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from service import bundle
from service.bundle import DECODER, ENCODER, Array, Bundle, Example
from service.manifest import (
    EXAMPLE,
    FILES,
    MANIFEST,
    MANIFEST_LIMIT,
    REQUIRED,
    BundleError,
    Dimension,
    check_name,
    write_manifest,
)
from tests.service.bundles import external, signed

TINY = Path(__file__).parents[1] / "bundles" / "tiny"
MODELS = Path(__file__).parents[2] / "models"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY, tmp_path / "tiny"))


def altered(folder: Path, **values: Any) -> Path:
    """Changes entries of the bundle's manifest; `a__b` is entry b of a."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    for key, value in values.items():
        *parents, last = key.split("__")
        inner = manifest
        for parent in parents:
            inner = inner[parent]
        inner[last] = value
    path.write_text(json.dumps(manifest))
    return folder


def test_tiny_is_small_and_sound() -> None:
    made = bundle.read(TINY)
    assert made.manifest.name == "tiny"
    assert made.manifest.variants == ("fp32", "int8")
    assert sum(path.stat().st_size for path in TINY.iterdir()) < 100_000


def test_a_sheet_row_title_names_the_dimension_and_its_strength() -> None:
    assert Dimension(name="slant", strength=3.34).title(1) == "slant 1 (+3.3 SD)"
    assert Dimension(name="width", strength=-0.52).title(0) == "width 0 (-0.5 SD)"
    assert Dimension(name="width", strength=-0.52).title(0, strength=False) == "width 0"
    assert Dimension(name="", strength=-0.2).title(7) == "7"


def test_every_shipped_bundle_is_sound_and_small() -> None:
    folders = [path.parent for path in MODELS.glob("*/manifest.json")]
    for folder in folders:
        assert bundle.read(folder).manifest.name == folder.name
    sizes = [path.stat().st_size for path in MODELS.rglob("*") if path.is_file()]
    assert max(sizes, default=0) < 16e6
    assert sum(sizes) < 48e6


@pytest.mark.parametrize("name", sorted(REQUIRED))
def test_a_changed_byte_fails_the_checksum(copy: Path, name: str) -> None:
    path = copy / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(BundleError, match=rf"sha256 of .*{name}: expected [0-9a-f]{{64}}, found [0-9a-f]{{64}}"):
        bundle.read(copy)


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_missing_file_is_named(copy: Path, name: str) -> None:
    (copy / name).unlink()
    with pytest.raises(BundleError, match=rf"{name}: expected a readable file, found No such file"):
        bundle.read(copy)


@pytest.mark.parametrize("name", [*sorted(FILES), "manifest.json"])
def test_pipes_and_devices_are_not_read(copy: Path, name: str) -> None:
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        (copy / name).unlink(missing_ok=True)
        make(copy / name)
        with pytest.raises(BundleError, match=f"{name}: expected a file, found a pipe or a device"):
            bundle.read(copy)


@pytest.mark.parametrize("name", [*sorted(REQUIRED), "manifest.json"])
def test_a_file_without_permission_is_named(copy: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    look = os.stat

    def refuse(path: Path, **options: bool) -> os.stat_result:
        if Path(path).name == name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return look(path, **options)

    monkeypatch.setattr(os, "stat", refuse)
    with pytest.raises(BundleError, match=f"expected a readable .*{name}|{name}: expected a readable file.*Permission denied"):
        bundle.read(copy)


def test_a_graph_that_can_no_longer_be_read_is_named(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, because it was replaced after its checksum was taken."""
    read = Path.read_bytes

    def fail(path: Path) -> bytes:
        return read(path.with_name("gone") if path.suffix == ".onnx" else path)

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(BundleError, match=r"coder\.onnx: expected .*, found .*No such file"):
        bundle.read(copy)


def test_an_invalid_graph_with_a_valid_checksum_is_named(copy: Path) -> None:
    (copy / "decoder.onnx").write_bytes(b"no graph")
    with pytest.raises(BundleError, match=r"decoder\.onnx: expected an ONNX graph, found "):
        bundle.read(signed(copy))


def test_a_folder_without_a_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"no bundle there: expected a readable manifest\.json, found No such file"):
        bundle.read(tmp_path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"format": "capserve/2"}, "format: expected capserve/1, found capserve/2"),
        ({"pose_size": 5}, "values in a prototype: expected 5, found 6"),
        ({"classes": ["0"] * 10}, "manifest: different class names: expected 10, found 1$"),
        ({"classes": ["", *"123456789"]}, "classes.0: String should have at least 1 character"),
        ({"classes": ["x" * 65, *"123456789"]}, "classes.0: String should have at most 64 characters"),
        ({"classes": ["0"]}, "classes: Tuple should have at least 2 items"),
        ({"max_objects": 3}, "max_objects"),
        ({"max_objects": "x" * 600}, 'max_objects: .*, found "x{59}$'),
        ({"max_objects": 3, "pose_size": 0}, r"pose_size: .*, found 0 \(2 faults in all\)$"),
        ({"pose_size": 0}, "pose_size: Input should be greater than or equal to 1"),
        ({"routing__iterations": 0}, "routing.iterations: Input should be greater than or equal to 1"),
        ({"name": "../../etc"}, r"name: String should match pattern '.*', found \"\.\./\.\./etc\"$"),
        ({"files": {"encoder.onnx": "0" * 64}}, r"files: expected \['decoder.onnx', .*\], found \['encoder.onnx'\]"),
        ({"files__evil.sh": "0" * 64}, r"files other than a bundle's: expected \[\], found \['evil.sh'\]"),
        ({"files__decoder.onnx": "0" * 65}, "files.decoder.onnx: String should match pattern"),
        ({"surprise": 1}, "surprise: not known here; if a newer captrain made this bundle, a service as new can serve it$"),
        ({"thresholds__presence": float("nan")}, "expected JSON, found NaN"),
        ({"thresholds__presence": -5}, "thresholds.presence"),
        ({"thresholds__presence": 1.5}, "thresholds.presence: Input should be less than or equal to 1"),
        ({"thresholds__lengths": {"lol": 1}}, "thresholds.lengths"),
        ({"thresholds__lengths": {}}, "thresholds.lengths: Dictionary should have at least 2 items"),
        ({"thresholds__margins": {"0": 0.1, "50": 0.2}}, "thresholds.margins"),
        ({"thresholds__margins": {"50": 0.1, f"99.{'9' * 20}": 0.2}}, "thresholds.margins"),  # which is 100 as a float
        ({"thresholds__margins": {f"0.{'0' * 330}1": 0.1, "50": 0.2}}, "thresholds.margins"),  # which is 0
        ({"thresholds__margins": {"5": 0.2, "10": 0.1}}, "thresholds.margins: .*rise with their percentages, found 0.2, 0.1"),
        ({"thresholds__reconstruction_errors__3": {"50": 0.1, "90": 0.2}}, r"percentiles of 3's errors: expected \['50'"),
        ({"thresholds__reconstruction_errors": {"3": {"50": 0.1, "90": 0.2}}}, "classes with thresholds: expected .*'0'"),
        ({"image_shape": [2, 28, 28]}, "image_shape.0: Input should be 1 or 3"),
        ({"image_shape": [1, 0, 28]}, "image_shape.1: Input should be greater than or equal to 1"),
        ({"image_shape": [1, 28, 0]}, "image_shape.2: Input should be greater than or equal to 1"),
        ({"dimensions": [{"name": "x" * 65, "strength": 1}]}, "dimensions.0.name: String should have at most 64 characters"),
        ({"dimensions": [{"name": "", "strength": 1e300}]}, "dimensions.0.strength: Input should be less than or equal to 1000"),
        ({"dimensions": [{"name": "", "strength": -1e300}]}, "dimensions.0.strength: .* greater than or equal to -1000"),
        ({"dimensions": [{"name": "", "strength": 1}]}, "dimensions: expected 6, found 1"),
        ({"metrics__parity": -1}, "metrics.parity"),
        ({"version": "other"}, "version, the fingerprint: expected [0-9a-f]{16}, found other"),
        ({"references__winner_length__edges": [0, 1]}, "expected 21 edges for 20 shares, found 2"),
        ({"references__winner_length__edges": [*range(20), 5]}, "expected edges that rise, found 0.0, 1.0"),
        ({"references__winner_length__edges": [*range(20), 19]}, "expected edges that rise, found 0.0, 1.0"),
        ({"references__winner_length__shares": [-0.5, *[0.075] * 19]}, "references.winner_length.shares.0"),
        ({"references__winner_length__shares": [0] * 20}, "expected shares that add up to 1, found 0"),
        ({"references__winner_length__shares": [0.0501] * 20}, "expected shares that add up to 1, found 1.002"),
        ({"prototypes": [[1e300] * 6] * 10}, "prototypes.0.0: Input should be less than or equal to 65504"),
        ({"prototypes": [[-1e300] * 6] * 10}, "prototypes.0.0: Input should be greater than or equal to -65504"),
        ({"prototypes": [[0] * 6] * 9}, "prototypes: expected 10, found 9"),
        ({"prototypes": [*[[0] * 6] * 9, [0]]}, "values in a prototype: expected 6, found 1"),
    ],
)
def test_an_error_for_an_invalid_manifest_says_where(copy: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(BundleError, match=message):
        bundle.read(altered(copy, **values))


def without(folder: Path, *names: str) -> Path:
    path = folder / "manifest.json"
    path.write_text(json.dumps({name: value for name, value in json.loads(path.read_text()).items() if name not in names}))
    return folder


def test_old_manifests_get_defaults_and_missing_fields_are_named(copy: Path) -> None:
    manifest = bundle.read(without(copy, "boxed", "dimensions")).manifest
    assert (manifest.boxed, manifest.dimensions) == (True, ())
    with pytest.raises(BundleError, match=r"manifest\.json: preset: Field required$"):
        bundle.read(without(copy, "preset"))


def test_a_failed_manifest_write_keeps_the_previous_manifest(copy: Path) -> None:
    """A real failing write: the process may write no file over 100 bytes."""
    manifest = bundle.read(copy).manifest
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(
            BundleError, match=r"could not write .*manifest\.json: File too large; the one before, if any, is whole"
        ):
            write_manifest(copy, manifest)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert bundle.read(copy).manifest == manifest
    assert {each.name for each in copy.iterdir()} == {*FILES, "manifest.json"}


@pytest.mark.parametrize("part", ["training", "metrics", "metrics__validation__fp32", "metrics__validation__fp32__error"])
def test_unknown_notes_of_a_newer_captrain_are_accepted_and_kept(copy: Path, part: str) -> None:
    made = bundle.read(altered(copy, **{f"{part}__surprise": 1}))
    before = (copy / MANIFEST).read_text()
    write_manifest(copy, made.manifest)
    assert (copy / MANIFEST).read_text().count('"surprise": 1') == before.count('"surprise": 1') == 1


DEEP = json.loads("[" * 300 + "]" * 300)


@pytest.mark.parametrize("values", [{"preset": "\ud800"}, {"training__hardware": "\udfff"}, {"config": {"deep": DEEP}}])
def test_a_manifest_that_cannot_be_rewritten_as_json_is_refused(copy: Path, values: dict[str, Any]) -> None:
    """/models writes it as JSON again, and so does the hash for ETags."""
    with pytest.raises(BundleError, match="manifest.json: expected what can be told in JSON again"):
        bundle.read(altered(copy, **values))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'"text"', b"null", b"\xff\xfe", b"[" * 200_000])
def test_a_manifest_that_is_not_a_json_object_is_refused(copy: Path, content: bytes) -> None:
    (copy / "manifest.json").write_bytes(content)
    with pytest.raises(BundleError, match=r"manifest\.json"):
        bundle.read(copy)


def test_a_huge_manifest_is_not_parsed(copy: Path) -> None:
    for size, message in ((0, "expected JSON"), (1, "expected at most 4194304 bytes, found 4194305")):
        (copy / "manifest.json").write_bytes(b" " * (MANIFEST_LIMIT + size))
        with pytest.raises(BundleError, match=message):
            bundle.read(copy)


def test_asking_for_a_missing_int8_encoder_lists_the_variants(copy: Path) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    del manifest["files"]["encoder.int8.onnx"]
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match="no int8 encoder; this bundle has fp32"):
        bundle.read(copy).encoder("int8")


def test_pickles_are_not_loaded(copy: Path) -> None:
    arrays = dict(np.load(copy / EXAMPLE))
    np.savez(copy / EXAMPLE, allow_pickle=True, **{**arrays, "images": np.array([object()], dtype=object)})
    made = Bundle(copy, bundle.read(TINY).manifest)
    with pytest.raises(BundleError, match="Object arrays cannot be loaded when allow_pickle=False"):
        made.example("fp32")


def npy() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(3))
    return buffer.getvalue()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x80\x04N.", npy()])
def test_a_damaged_example_is_an_error(copy: Path, content: bytes) -> None:
    (copy / EXAMPLE).write_bytes(content)
    with pytest.raises(BundleError, match=r"example\.npz: expected the arrays images, lengths"):
        Bundle(copy, bundle.read(TINY).manifest).example("fp32")


def test_a_damaged_example_raises_only_bundle_errors(copy: Path) -> None:
    """With three random bytes overwritten, three hundred times, it is read or raises a BundleError."""
    made, whole, errors = Bundle(copy, bundle.read(TINY).manifest), (TINY / EXAMPLE).read_bytes(), 0
    generator = np.random.default_rng(0)
    for _ in range(300):
        content = bytearray(whole)
        for place in generator.integers(len(content), size=3):
            content[place] = generator.integers(256)
        (copy / EXAMPLE).write_bytes(content)
        try:
            made.example("fp32")
        except BundleError:
            errors += 1
    assert errors > 200


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        (
            "images",
            np.zeros((2, 1, 28, 28), np.float32),
            r"shape of lengths.fp32|shape of lengths: expected \(2, 10\), found \(3, 10\)",
        ),
        ("images", np.zeros((3, 1, 28, 27), np.float32), r"shape of images: expected \(3, 1, 28, 28\), found \(3, 1, 28, 27\)"),
        ("images", np.zeros((3, 1, 28, 28)), "type of images: expected float32, found float64"),
        ("classes", np.zeros(3, np.int32), "type of classes: expected int64, found int32"),
        ("reconstructions", np.zeros((3, 28, 28), np.float32), r"shape of reconstructions: expected \(3, 1, 28, 28\)"),
        ("images", np.zeros((1 << 16, 28, 28), np.float32), "bytes unpacked, more than 67108864"),
    ],
)
def test_an_example_of_wrong_shape_type_or_size_is_refused(copy: Path, name: str, values: NDArray[Any], message: str) -> None:
    np.savez_compressed(copy / EXAMPLE, allow_pickle=False, **{**dict(np.load(TINY / EXAMPLE)), name: values})
    with pytest.raises(BundleError, match=message):
        Bundle(copy, bundle.read(TINY).manifest).example("fp32")


def test_an_empty_example_is_an_error(copy: Path) -> None:
    np.savez(copy / EXAMPLE, allow_pickle=False, **{key: values[:0] for key, values in np.load(TINY / EXAMPLE).items()})
    with pytest.raises(BundleError, match="at least one picture to replay"):
        Bundle(copy, bundle.read(TINY).manifest).example("fp32")


def test_the_size_limit_of_an_example_counts_all_its_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(TINY / EXAMPLE) as archive:
        size = sum(entry.file_size for entry in archive.infolist())
    monkeypatch.setattr(bundle, "EXAMPLE_LIMIT", size)
    assert len(bundle.read(TINY).example("fp32").images) > 1
    monkeypatch.setattr(bundle, "EXAMPLE_LIMIT", size - 1)
    with pytest.raises(BundleError, match=f"{size} bytes unpacked, more than {size - 1}"):
        bundle.read(TINY).example("fp32")


@pytest.mark.parametrize("name", ["MyNet", "", "a/b", "-x", ".x", "_x", "x" * 65])
def test_an_invalid_model_name_is_refused_with_the_rule(name: str) -> None:
    with pytest.raises(BundleError, match="model name of up to 64 small letters"):
        check_name(name)


@pytest.mark.parametrize("name", ["x", "0", "a.b_c-d.", "x" * 64])
def test_a_valid_model_name_passes(name: str) -> None:
    check_name(name)


class Argument(NamedTuple):
    name: str
    type: str
    shape: list[Any]


IMAGES = Argument("images", "tensor(float)", ["N", 1, 28, 28])
OUTPUTS = [Argument("lengths", "tensor(float)", ["N", 10]), Argument("capsules", "tensor(float)", ["N", 10, 6])]


def test_a_graph_with_the_expected_signature_passes() -> None:
    bundle.check_signature(ENCODER, bundle.read(TINY).manifest, [IMAGES], OUTPUTS, TINY)


def test_height_and_width_must_be_in_the_manifests_order() -> None:
    wide = bundle.read(TINY).manifest.model_copy(update={"image_shape": (1, 28, 56)})
    bundle.check_signature(ENCODER, wide, [IMAGES._replace(shape=["N", 1, 28, 56])], OUTPUTS, TINY)
    with pytest.raises(BundleError, match=r"expected .*\[N,1,28,56\]'\], found .*\[N,1,56,28\]"):
        bundle.check_signature(ENCODER, wide, [IMAGES._replace(shape=["N", 1, 56, 28])], OUTPUTS, TINY)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (IMAGES._replace(name="x"), "x tensor"),
        (IMAGES._replace(type="tensor(double)"), "double"),
        (IMAGES._replace(shape=[1, 1, 28, 28]), r"expected \['images tensor\(float\)\[N,1,28,28\]'\], found .*\[1,1,28,28\]"),
        (IMAGES._replace(shape=["N", 1, 28, "W"]), r"28,N\]"),
    ],
)
def test_a_wrong_signature_names_expected_and_found(image: Argument, message: str) -> None:
    with pytest.raises(BundleError, match=message):
        bundle.check_signature(ENCODER, bundle.read(TINY).manifest, [image], OUTPUTS, TINY)


def test_missing_outputs_and_inputs_are_refused() -> None:
    with pytest.raises(BundleError, match="outputs of"):
        bundle.check_signature(ENCODER, bundle.read(TINY).manifest, [IMAGES], OUTPUTS[:1], TINY)
    with pytest.raises(
        BundleError, match=r"inputs of .*expected \['poses tensor\(float\)\[N,6\]', 'classes tensor\(int64\)\[N\]'\]"
    ):
        bundle.check_signature(DECODER, bundle.read(TINY).manifest, [], [], TINY)


def replay(example: Example, lengths: Array) -> float:
    def decode(poses: Array, classes: NDArray[np.int64]) -> Array:
        return example.reconstructions

    return bundle.check_replay(bundle.read(TINY), "fp32", lambda images: (lengths, example.capsules), decode)


def test_a_replay_within_tolerance_passes_and_one_beyond_is_an_error() -> None:
    example = bundle.read(TINY).example("fp32")
    assert replay(example, example.lengths + np.float32(1e-3)) == pytest.approx(1e-3, rel=1e-3)
    with pytest.raises(BundleError, match=r"fp32 replay of lengths: expected example.npz within 0.002, found 0.01 off"):
        replay(example, example.lengths + np.float32(0.01))
    with pytest.raises(BundleError, match="found nan off"):
        replay(example, np.full_like(example.lengths, np.nan))
    with pytest.raises(BundleError, match="shape of lengths"):
        replay(example, example.lengths[:1])


def test_fingerprints_differ_between_models(copy: Path) -> None:
    manifest = bundle.read(copy).manifest
    assert len(manifest.fingerprint) == 8
    assert manifest.fingerprint == bundle.fingerprint(manifest.files)
    assert manifest.fingerprint != bundle.fingerprint({**manifest.files, "decoder.onnx": "0" * 64})


def test_write_needs_every_file(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"expected \['decoder.onnx', 'encoder.onnx', 'example.npz'\], found \[\]"):
        bundle.write(tmp_path, {})


def test_an_incomplete_manifest_is_not_written(copy: Path) -> None:
    before = (copy / MANIFEST).read_bytes()
    with pytest.raises(BundleError, match="cannot write the manifest: .* validation errors"):
        bundle.write(copy, {})
    assert (copy / MANIFEST).read_bytes() == before


@pytest.mark.parametrize(("variant", "near", "far"), [("fp32", 1e-3, -1e-2), ("fp32", -1e-3, 1e-2), ("int8", 1e-2, 3e-2)])
@pytest.mark.parametrize("name", ["lengths", "capsules", "reconstructions"])
def test_a_replay_looks_at_all_outputs(variant, near: float, far: float, name: str) -> None:
    made = bundle.read(TINY)
    example = made.example(variant)

    def replay(by: float) -> float:
        moved = example._replace(**{name: getattr(example, name) + np.float32(by)})
        return bundle.check_replay(made, variant, lambda _: (moved.lengths, moved.capsules), lambda *_: moved.reconstructions)

    assert replay(near) == pytest.approx(abs(near), rel=1e-2)
    with pytest.raises(BundleError, match=f"{variant} replay of {name}: expected example.npz within"):
        replay(far)


def test_an_array_that_claims_to_exceed_memory_is_refused(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(TINY, tmp_path / "tiny"))
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "<f4", "fortran_order": False, "shape": (1 << 50,)})
    with zipfile.ZipFile(folder / "example.npz", "w") as archive:
        archive.writestr("images.npy", head.getvalue())
    with pytest.raises(BundleError, match="expected the arrays images"):
        bundle.Bundle(folder, bundle.read(TINY).manifest).example("fp32")


def test_an_array_that_extends_beyond_the_archive_is_refused(copy: Path) -> None:
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "<f4", "fortran_order": False, "shape": (1 << 20,)})
    with zipfile.ZipFile(copy / EXAMPLE, "w") as archive:
        archive.writestr("images.npy", head.getvalue())
        (entry,) = archive.infolist()
        entry.file_size = entry.compress_size = 1 << 23
    with pytest.raises(BundleError, match="expected the arrays images"):
        Bundle(copy, bundle.read(TINY).manifest).example("fp32")


def test_write_reads_back_and_refuses_a_bundle_with_external_weights(tmp_path: Path) -> None:
    """`write` reads the bundle back as a service would, and refuses this one."""
    folder = external(tmp_path / "tiny")
    values = json.loads((folder / "manifest.json").read_text())
    with pytest.raises(BundleError, match="expected all weights in this file, found some in another"):
        bundle.write(folder, values)
