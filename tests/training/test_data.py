import functools
import gzip
import hashlib
import http.client
import http.server
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.training import drawn
from training import data as reader
from training import sources
from training.data import IDX_IMAGES, IDX_LABELS, DataSet, Digits, load
from training.errors import DataError, UnknownNameError
from training.sources import FILES, SOURCES, Source


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """The four drawn files, to be damaged."""
    for name in FILES:
        (tmp_path / f"{name}.gz").write_bytes((folder / f"{name}.gz").read_bytes())
    return tmp_path


@pytest.fixture
def mirror(folder: Path) -> Iterator[str]:
    """A real web server with the four files."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def sums(folder: Path) -> tuple[str, ...]:
    return tuple(hashlib.md5(gzip.decompress((folder / f"{name}.gz").read_bytes())).hexdigest() for name in FILES)


def test_a_folder_of_idx_files_is_read(data: DataSet) -> None:
    assert (len(data.train), len(data.test)) == (400, 60)
    assert data.train.images.shape == (400, 1, 28, 28)
    assert data.classes == tuple("0123456789")
    assert data.train.labels[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]


def test_plain_files_read_like_packed_ones(copy: Path, data: DataSet) -> None:
    for name in FILES:
        packed = copy / f"{name}.gz"
        (copy / name).write_bytes(gzip.decompress(packed.read_bytes()))
        packed.unlink()
    assert load("folder", copy).train.images.equal(data.train.images)


def test_the_real_mnist_is_recognised(mnist: DataSet) -> None:
    assert (len(mnist.train), len(mnist.test)) == (60_000, 10_000)
    learn, held_out = mnist.split(5_000)
    assert len(learn) == 55_000
    assert held_out.labels.equal(mnist.train.labels[55_000:])


def test_a_wrong_magic_names_the_file_and_both_numbers(copy: Path) -> None:
    (copy / f"{FILES[0]}.gz").write_bytes((copy / f"{FILES[1]}.gz").read_bytes())
    with pytest.raises(DataError, match=r"0x00000803 \(3 dimensions of bytes, grey pictures\), found 0x00000801") as raised:
        load("folder", copy)
    assert f"{FILES[0]}.gz" in str(raised.value)


@pytest.mark.parametrize("kept", [0, 10, 5_000])
def test_a_truncated_gzip_names_the_file(copy: Path, kept: int) -> None:
    path = copy / f"{FILES[2]}.gz"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DataError, match=rf"{FILES[2]}\.gz: (not a whole gzip file|0 bytes)"):
        load("folder", copy)


def test_damaged_compressed_bytes_name_the_file(copy: Path) -> None:
    path = copy / f"{FILES[2]}.gz"
    content = bytearray(path.read_bytes())
    content[100:110] = b"\xff" * 10
    path.write_bytes(bytes(content))
    with pytest.raises(DataError, match=rf"{FILES[2]}\.gz"):
        load("folder", copy)


def test_a_truncated_idx_names_sizes(copy: Path) -> None:
    path = copy / f"{FILES[0]}.gz"
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:-7]))
    with pytest.raises(DataError, match=r"header promises 313600 bytes \(400x28x28\), found 313593"):
        load("folder", copy)


def test_classes_of_a_folder_are_the_labels_found(copy: Path) -> None:
    labels = np.array([1, 5, 9], np.uint8)
    drawn.write_idx(copy / f"{FILES[1]}.gz", labels[np.arange(400) % 3], IDX_LABELS)
    drawn.write_idx(copy / f"{FILES[3]}.gz", labels[np.arange(60) % 3], IDX_LABELS)
    found = load("folder", copy)
    assert found.classes == ("1", "5", "9")
    assert found.train.labels[:4].tolist() == [0, 1, 2, 0]
    drawn.write_idx(copy / f"{FILES[3]}.gz", np.full(60, 4, np.uint8), IDX_LABELS)
    with pytest.raises(DataError, match="t10k-labels-idx1-ubyte: label 4 is outside the 3 classes: no training picture has it"):
        load("folder", copy)


def test_classes_of_a_folder_may_have_names(copy: Path) -> None:
    labels = np.array([1, 5, 9], np.uint8)
    for name, count in ((FILES[1], 400), (FILES[3], 60)):
        drawn.write_idx(copy / f"{name}.gz", labels[np.arange(count) % 3], IDX_LABELS)
    (copy / "classes.txt").write_text("a\n\n  \u00e9 \nc d\n", encoding="utf-8-sig")
    found = load("folder", copy)
    assert found.classes == ("a", "\u00e9", "c d")
    assert found.train.labels[:4].tolist() == [0, 1, 2, 0]
    for content, message in (
        (b"a\nb\n", "expected one name per line for the 3 labels that occur, found 2"),
        (b"a\nb\na\n", "expected different names, found a more than once"),
        (b"a\n\xff\nc\n", "expected a text in UTF-8"),
    ):
        (copy / "classes.txt").write_bytes(content)
        with pytest.raises(DataError, match=message):
            load("folder", copy)


def test_one_class_is_not_enough(copy: Path) -> None:
    drawn.write_idx(copy / f"{FILES[1]}.gz", np.zeros(400, np.uint8), IDX_LABELS)
    with pytest.raises(DataError, match="expected at least two classes, found 1"):
        load("folder", copy)


def test_unpacked_files_are_rejected_if_only_packed_sums_are_known(copy: Path) -> None:
    for name in FILES:
        packed = copy / f"{name}.gz"
        (copy / name).write_bytes(gzip.decompress(packed.read_bytes()))
        packed.unlink()
    with pytest.raises(DataError, match=r"only the published \.gz of this data set can be checked"):
        load("kmnist", copy)


def test_labels_outside_the_classes_are_an_error(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOURCES, "five", Source(classes=tuple("01234")))
    with pytest.raises(DataError, match=r"train-labels-idx1-ubyte: label 5 is outside the 5 classes$"):
        load("five", copy)


def test_more_labels_than_pictures_are_an_error(copy: Path) -> None:
    drawn.write_idx(copy / f"{FILES[1]}.gz", np.zeros(401, np.uint8), IDX_LABELS)
    with pytest.raises(DataError, match="expected 400 labels, one for each picture, found 401"):
        load("folder", copy)


def test_an_altered_known_set_is_refused(copy: Path) -> None:
    with pytest.raises(
        DataError,
        match=rf"{FILES[0]}.gz: expected md5 6bbc9ace898e44ae57da46a324031adb, found .* takes files of your own",
    ):
        load("mnist", copy)


def test_another_known_sets_files_are_named_and_a_subfolder_comes_first(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOURCES, "theirs", Source(tuple("0123456789"), unpacked_sums=sums(copy)))
    monkeypatch.setitem(SOURCES, "ours", Source(tuple("0123456789"), unpacked_sums=("0",) * 4))
    monkeypatch.setenv("CAPSERVE_DATA", str(copy))
    with pytest.raises(DataError, match="expected md5 0, found .*; the file is theirs's: pass --data DIR with the right ones"):
        load("ours", copy)
    (copy / "ours").mkdir()
    for name in FILES:
        shutil.copy(copy / f"{name}.gz", copy / "ours")
    drawn.write_idx(copy / f"{FILES[0]}.gz", np.zeros((1, 28, 28), np.uint8), IDX_IMAGES)
    monkeypatch.setitem(SOURCES, "ours", Source(tuple("0123456789"), unpacked_sums=sums(copy / "ours")))
    assert len(load("ours").train) == 400


def test_a_set_known_by_its_packed_sums_is_checked_by_them(copy: Path) -> None:
    with pytest.raises(DataError, match="expected md5 bdb82020997e1d708af4cf47b453dcf7"):
        load("kmnist", copy)


def test_a_missing_file_is_named(copy: Path) -> None:
    (copy / f"{FILES[3]}.gz").unlink()
    with pytest.raises(DataError, match=f"no {FILES[3]}"):
        load("folder", copy)


def test_an_unknown_set_lists_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match="choose one of: " + ", ".join(sorted(SOURCES))):
        load("cifar")


def test_data_is_found_in_capserve_data_or_its_subfolder(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAPSERVE_DATA", str(tmp_path))
    assert reader.find("folder", None) == tmp_path
    (tmp_path / "fashion").mkdir()
    for name in FILES:
        (copy / f"{name}.gz").rename(tmp_path / "fashion" / f"{name}.gz")
    assert reader.find("fashion", None) == tmp_path / "fashion"


def test_the_data_set_folder_requires_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CAPSERVE_DATA", raising=False)
    with pytest.raises(DataError, match="pass --data DIR"):
        load("folder")


def test_a_known_set_is_downloaded_once_and_checked(
    mirror: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CAPSERVE_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    broken = "http://127.0.0.1:9/"  # nothing listens there: the next mirror serves
    monkeypatch.setitem(SOURCES, "drawn", Source(tuple("0123456789"), mirrors=(broken, mirror), unpacked_sums=sums(folder)))
    assert len(load("drawn").train) == 400
    assert "train-images-idx3-ubyte.gz" in capfd.readouterr().err  # the progress bar
    monkeypatch.setitem(SOURCES, "drawn", Source(tuple("0123456789"), mirrors=(), unpacked_sums=sums(folder)))
    assert len(load("drawn").train) == 400  # from the cache: there is no mirror any more


def test_a_download_with_another_checksum_is_not_kept(
    mirror: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CAPSERVE_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(SOURCES, "drawn", Source(tuple("0123456789"), mirrors=(mirror,), unpacked_sums=("0" * 32,) * 4))
    with pytest.raises(DataError, match=r"could not download train-images-idx3-ubyte.gz .*expected md5 0000.*pass --data DIR"):
        load("drawn")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("held_out", [0, 400, 1_000])
def test_split_rejects_sizes_that_leave_a_part_empty(data: DataSet, held_out: int) -> None:
    with pytest.raises(DataError, match=rf"between 1 and 399 of the 400 training pictures .*, got {held_out}"):
        data.split(held_out)


def test_split_rejects_a_class_without_pictures(data: DataSet) -> None:
    with pytest.raises(DataError, match=r"class 'none' has no training picture: give it at least two, one to learn from"):
        replace(data, classes=(*data.classes, "none")).split(40)


def test_split_rejects_a_class_of_one_picture(data: DataSet) -> None:
    one = torch.cat([(data.train.labels != 1).nonzero()[:, 0], (data.train.labels == 1).nonzero()[:1, 0]])
    with pytest.raises(DataError, match=r"class '1' has 1 training picture: give it at least two, .* that is held out, or"):
        replace(data, train=data.train[one]).split(40)


def test_split_rejects_a_validation_part_that_lacks_a_class(data: DataSet) -> None:
    with pytest.raises(
        DataError,
        match=r"class '0' is in none of the last 5 training pictures.*--validation, or shuffle idx files that are sorted",
    ):
        data.split(5)


def test_split_rejects_a_training_part_that_lacks_a_class(data: DataSet) -> None:
    """All classes are among the last 370 of 400, and the first 30 are all of one."""
    ordered = replace(data, train=data.train[data.train.labels.argsort(stable=True)])
    with pytest.raises(
        DataError,
        match=r"class '1' is in none of the others, to learn from; change how many are held out with --validation, or shuffle",
    ):
        ordered.split(370)


def test_boxed_ink_is_distinguished_from_pictures_that_fill_the_frame(data: DataSet, boxed: DataSet) -> None:
    assert boxed.boxed
    assert not data.boxed  # letters of many sizes
    few = boxed.train.images.clone()
    few[:60, :, 0, 0] = 255  # in three of twenty pictures
    assert not replace(data, train=replace(data.train, images=few)).boxed
    noisy = boxed.train.images + torch.randint_like(few, 20) * (boxed.train.images == 0)  # as in a JPEG, or from a scanner
    assert replace(data, train=replace(data.train, images=noisy)).boxed
    larger = boxed.train.images.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
    assert replace(data, train=replace(data.train, images=larger)).boxed
    padded = torch.nn.functional.pad(boxed.train.images, (2, 2, 2, 2))  # to 32x32, as for LeNet: 20 of 32 is another box
    assert not replace(data, train=replace(data.train, images=padded)).boxed
    assert not replace(data, train=replace(data.train, images=torch.zeros_like(few))).boxed


def test_mnist_counts_as_boxed(mnist: DataSet) -> None:
    assert mnist.boxed


def test_another_sets_files_in_capserve_data_do_not_hide_the_cache(
    copy: Path, mirror: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All sets use the same file names, and $CAPSERVE_DATA may hold one of them."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("CAPSERVE_DATA", str(copy))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    for held in (sums(copy), tuple(hashlib.md5((copy / f"{name}.gz").read_bytes()).hexdigest() for name in FILES)):
        monkeypatch.setitem(SOURCES, "theirs", Source(tuple("0123456789"), unpacked_sums=held))
        monkeypatch.setitem(SOURCES, "ours", Source(tuple("0123456789"), mirrors=(mirror,)))
        assert reader.find("ours", None) == cache / "capserve" / "ours"
    assert reader.find("folder", None) == copy


def test_folder_accepts_a_known_sets_files_but_another_set_does_not(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOURCES, "theirs", Source(tuple("0123456789"), unpacked_sums=sums(copy)))
    assert load("folder", copy, any_files=True).digest == load("folder", copy).digest
    with pytest.raises(DataError, match="found another known data set"):
        load("mnist", copy, any_files=True)


def test_changed_labels_change_the_digest(data: DataSet) -> None:
    """A run cannot be resumed after labels were corrected."""
    labels = data.train.labels.clone()
    labels[0] = (labels[0] + 1) % 10
    assert replace(data, train=Digits(data.train.images, labels)).digest != data.digest


def test_a_bundle_without_a_digest_accepts_any_pictures(data: DataSet) -> None:
    data.expect(None)


def test_a_sample_is_spread_over_the_whole_set() -> None:
    """Files may be sorted by class."""
    assert Digits(torch.zeros(100, 1, 1, 1), torch.arange(100)).sample(3).labels.tolist() == [0, 49, 99]


def test_most_pictures_decide_whether_a_grey_set_is_dark_on_light(data: DataSet) -> None:
    images = torch.zeros(10, 1, 4, 4, dtype=torch.uint8)
    images[:6] = 140
    assert replace(data, train=Digits(images, torch.arange(10))).dark_on_light
    in_colour = images.expand(-1, 3, -1, -1)
    assert not replace(data, train=Digits(in_colour, torch.arange(10))).dark_on_light


def test_colour_pictures_are_never_boxed(boxed: DataSet) -> None:
    assert boxed.boxed
    assert not replace(boxed, train=Digits(boxed.train.images.expand(-1, 3, -1, -1), boxed.train.labels)).boxed


def test_an_idx_file_with_extra_bytes_is_rejected() -> None:
    content = bytes([0, 0, 8, 1, 0, 0, 0, 2]) + b"\1\2\3"
    with pytest.raises(DataError, match=r"header promises 2 bytes .*found 3"):
        reader.read_idx(content, IDX_LABELS, Path("labels"))


def test_classes_txt_overrides_the_class_names_of_a_known_set(tmp_path: Path) -> None:
    folder = drawn.write(tmp_path, train=40, test=20)
    (folder / "classes.txt").write_text("\n".join("abcdefghij"))
    assert load("mnist", folder, any_files=True).classes == tuple("abcdefghij")


def test_a_failing_mirror_is_skipped_and_present_files_are_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def fetch(url: str) -> bytes:
        asked.append(url)
        if "first" in url:
            raise http.client.IncompleteRead(b"")
        return gzip.compress(b"x", mtime=0)

    monkeypatch.setattr(sources, "_fetch", fetch)
    unpacked = (hashlib.md5(b"x").hexdigest(),) * 4
    sources.download(Source((), mirrors=("first/", "second/"), unpacked_sums=unpacked), tmp_path)
    assert len(asked) == 8
    asked.clear()
    (tmp_path / f"{FILES[0]}.gz").unlink()
    sources.download(Source((), mirrors=("second/",), unpacked_sums=unpacked), tmp_path)
    assert asked == [f"second/{FILES[0]}.gz"]


def test_a_download_cut_short_by_a_full_disk_leaves_no_finished_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(path: Path, content: bytes) -> int:
        with path.open("wb") as file:
            file.write(content[:3])
        raise OSError("no space")

    monkeypatch.setattr(sources, "_fetch", lambda url: gzip.compress(b"x", mtime=0))
    monkeypatch.setattr(sources, "check", lambda *_, **__: None)
    monkeypatch.setattr(Path, "write_bytes", write)
    with pytest.raises(OSError, match="no space"):
        sources.download(Source((), mirrors=("one/",)), tmp_path)
    assert not (tmp_path / f"{FILES[0]}.gz").exists()


def test_a_complete_cache_is_not_downloaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be no network."""
    monkeypatch.delenv("CAPSERVE_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sources, "_fetch", lambda url: pytest.fail("downloads"))
    cache = tmp_path / "capserve" / "mnist"
    cache.mkdir(parents=True)
    for name in FILES:
        (cache / name).touch()
    assert sources.find("mnist", None) == cache


def test_a_capserve_data_that_is_not_a_folder_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAPSERVE_DATA", str(tmp_path / "nowhere"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sources, "_fetch", lambda url: pytest.fail("downloads"))
    with pytest.raises(DataError, match="expected a folder, found none; correct it"):
        sources.find("mnist", None)
