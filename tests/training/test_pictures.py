from __future__ import annotations

import itertools
import os
import shutil
import unicodedata
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image

from service import bundle
from tests.training import drawn
from tests.training.test_cli import FLAGS, called
from training import pictures as training_pictures
from training.data import DataSet, load
from training.errors import DataError
from training.sources import PARTS


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    return drawn.write_pictures(tmp_path / "pictures")


def test_folders_of_pictures_load_like_idx_files(pictures: Path, data: DataSet) -> None:
    found = load("folder", pictures)
    assert found.classes == data.classes
    for mine, theirs in ((found.train, data.train), (found.test, data.test)):
        assert mine.images.shape == theirs.images.shape
        assert sorted(map(key, mine.images, mine.labels)) == sorted(map(key, theirs.images, theirs.labels))
    assert load("folder", pictures).digest == found.digest
    found.split(60)  # all classes are among the last, whatever the files are called


def test_class_names_are_normalised_to_unicode_nfc(pictures: Path) -> None:
    """Archives made on a Mac separate it from its letter: such folders look as if they had one name, but programs see two."""
    first = min((pictures / PARTS[0]).iterdir()).name
    for part, form in zip(PARTS, ("NFD", "NFC"), strict=True):
        (pictures / part / first).rename(pictures / part / unicodedata.normalize(form, "étoile"))
    found = load("folder", pictures)
    assert found.classes[-1] == unicodedata.normalize("NFC", "étoile")
    assert len(found.classes) == len(found.train.labels.unique()) == len(found.test.labels.unique())


@pytest.mark.parametrize("counts", [[3] * 26, [200, 20], [2, 7, 31]], ids=str)
def test_mixing_puts_every_class_into_both_parts_of_a_split(counts: list[int]) -> None:
    labels = [label for label, count in enumerate(counts) for _ in range(count)]
    mixed = [labels[place] for place in training_pictures._mixed_order(labels)]
    assert sorted(mixed) == labels
    for held_out in range(len(counts), len(labels) // 2):
        assert set(mixed[-held_out:]) == set(mixed[:-held_out]) == set(labels), held_out
    half = Counter(mixed[len(labels) // 2 :])
    assert all(abs(half[label] - count / 2) <= 1 for label, count in enumerate(counts))  # each has its share


def test_pictures_are_turned_as_their_exif_says(tmp_path: Path) -> None:
    """As in the service: cameras store pictures unturned, and beside them which way to turn them."""
    generator, turned = np.random.default_rng(0), tmp_path / "turned"
    for part, label, each in itertools.product(PARTS, "27", range(3)):
        shown = Image.fromarray(drawn.digit(int(label), generator))
        for folder, picture, says in ((tmp_path / "upright", shown, 1), (turned, shown.transpose(Image.Transpose.ROTATE_90), 6)):
            exif = Image.Exif()
            exif[ExifTags.Base.Orientation] = says
            (folder / part / label).mkdir(parents=True, exist_ok=True)
            picture.save(folder / part / label / f"{each}.png", exif=exif)
    assert load("folder", turned).digest == load("folder", tmp_path / "upright").digest


def key(image: object, label: object) -> tuple[int, bytes]:
    return int(label), image.numpy().tobytes()  # type: ignore[attr-defined, call-overload, no-any-return]


def test_pictures_in_colour_are_learned_exported_measured_and_drawn(tmp_path: Path) -> None:
    data = drawn.write_pictures(tmp_path / "pictures", "RGB")
    run, folder = tmp_path / "run", tmp_path / "mine"
    for arguments in (
        ["train", "--preset", "tiny", "--out", run, *FLAGS],
        ["export", run, "--bundle", folder, "--int8"],
        ["evaluate", folder, "--record"],
        ["figures", folder, "--out", tmp_path / "figures"],
    ):
        done = called(*arguments, "--data", data)
        assert done.returncode == 0, done.stderr
    manifest = bundle.read(folder).manifest
    assert manifest.image_shape == (3, 28, 28)
    assert not manifest.boxed
    assert manifest.metrics.test["int8"].error.count == 60


def test_pictures_without_colour_load_as_grey_from_any_mode(pictures: Path) -> None:
    """Many programs write grey pictures in three channels, in which ink would not be found to be in a box."""
    before = load("folder", pictures)
    for number, path in enumerate(sorted(pictures.glob("*/*/*.png"))):
        Image.open(path).convert("P" if number % 2 else "RGB").save(path)
    after = load("folder", pictures)
    assert after.train.images.shape[1] == 1
    assert (after.digest, after.boxed) == (before.digest, before.boxed)
    coloured = next((pictures / "test").glob("*/*.png"))
    picture = Image.open(coloured).convert("RGB")
    picture.putpixel((0, 0), (255, 0, 0))
    picture.save(coloured)
    assert load("folder", pictures).train.images.shape[1] == 3


@pytest.mark.parametrize("mode", ["L", "P", "RGB"])
def test_a_picture_with_transparent_parts_is_refused(mode: str, pictures: Path) -> None:
    """What colour lies below them says nothing: black ink on a transparent background would be black on black."""
    path = pictures / "train/3/3.png"
    opaque = Image.new(mode, (28, 28))
    there = {"transparency": 9} if mode != "RGB" else {"transparency": (9, 9, 9)}
    opaque.save(path, **there)
    if mode == "L":
        assert load("folder", pictures).train.images.shape[1] == 1  # no pixel has the transparent level
    opaque.save(path, transparency=0 if mode != "RGB" else (0, 0, 0))
    with pytest.raises(
        DataError, match=r"train/3/3\.png: expected a picture without transparent parts; lay it over a background"
    ):
        load("folder", pictures)


def test_faults_of_several_files_are_reported_together(pictures: Path) -> None:
    files = sorted((pictures / "train").glob("*/*.png"))[:14]
    for path in files[:2]:
        path.write_bytes(b"no picture")
    with pytest.raises(DataError) as found:
        load("folder", pictures)
    assert sorted(line.partition(":")[0] for line in str(found.value).splitlines()) == sorted(map(str, files[:2]))
    for path in files:
        path.write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"\nand 4 more$"):
        load("folder", pictures)


def broken(folder: Path) -> None:
    (folder / "train/3/3.png").write_bytes(b"no picture")


def larger(folder: Path) -> None:
    Image.new("L", (30, 28)).save(folder / "train/3/3.png")


def in_colour(folder: Path) -> None:
    Image.new("RGB", (28, 28)).save(folder / "train/3/3.png")


def for_print(folder: Path) -> None:
    Image.new("CMYK", (28, 28)).save(folder / "train/3/3.png", "TIFF")


def another_class(folder: Path) -> None:
    (folder / "test/3").rename(folder / "test/three")


def loose(folder: Path) -> None:
    (folder / "train/notes.txt").write_text("mine")


def of_one_class(folder: Path) -> None:
    for path in (folder / "train").iterdir():
        if path.name != "3":
            path.rename(folder / path.name)


def without_any(folder: Path) -> None:
    for path in (folder / "test").iterdir():
        path.rename(folder / path.name)


def named_at_length(folder: Path) -> None:
    for part in ("train", "test"):
        (folder / part / "3").rename(folder / part / ("3" * 65))


def named_in_another_code(folder: Path) -> None:
    for part in ("train", "test"):
        (folder / part / "3").rename(folder / part / os.fsdecode(b"b\xff"))


def of_another_size(folder: Path) -> None:
    for path in (folder / "test").glob("*/*"):
        Image.new("L", (30, 28)).save(path)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (broken, "train/3/3.png: expected a picture, found an unreadable file"),
        (larger, "train/3/3.png: expected grey 28x28 as others are, found grey 28x30"),
        (in_colour, "train/3/3.png: expected grey 28x28 as others are, found colour 28x28"),
        (for_print, "train/3/3.png: expected grey pictures or RGB of 8 bits, found CMYK"),
        (another_class, "test/three: no training picture is of this class; train/ has 0, 1, 2"),
        (loose, "train/notes.txt: expected a subfolder for each class, found a file"),
        (of_one_class, "train: expected a subfolder for each of at least two classes, found 1"),
        (without_any, "test: holds no pictures"),
        (named_at_length, "expected names of classes of at most 64 characters"),
        (named_in_another_code, r"expected names of classes in UTF-8, found 'b\\udcff'; rename the folder"),
        (of_another_size, "training pictures are grey 28x28, test pictures grey 28x30"),
    ],
)
def test_a_faulty_folder_of_pictures_is_rejected_with_the_reason(damage: object, told: str, pictures: Path) -> None:
    damage(pictures)  # type: ignore[operator]
    with pytest.raises(DataError, match=told):
        load("folder", pictures)


def test_idx_files_beside_folders_of_pictures_are_rejected(pictures: Path, folder: Path) -> None:
    for file in folder.iterdir():
        shutil.copy(file, pictures)
    with pytest.raises(DataError, match=r"holds idx files and folders of pictures \(train, test\); move away those"):
        load("folder", pictures)


def test_hidden_files_are_ignored(pictures: Path) -> None:
    before = load("folder", pictures).digest
    (pictures / "train/.DS_Store").write_bytes(b"a finder was here")
    (pictures / "train/3/.hidden").write_bytes(b"and here")
    assert load("folder", pictures).digest == before


def test_a_known_set_accepts_picture_folders_only_with_any_files(pictures: Path) -> None:
    with pytest.raises(DataError, match="expected the four idx files of mnist, found folders of pictures"):
        load("mnist", pictures)
    assert load("mnist", pictures, any_files=True).classes == tuple("0123456789")
