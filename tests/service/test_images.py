"""Every kind of picture is read like any other, everything else is refused with a sentence, and PNGs are written correctly."""

from __future__ import annotations

import struct
import subprocess
import sys
import textwrap
import threading
import tracemalloc
import warnings
import zlib
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from service import images
from service.errors import NotAnImage, TooLarge, Unprocessable
from tests import drawings

LIMIT = 25_000_000
SEVEN = drawings.written("7", np.random.default_rng(0), side=64)
PICTURE = drawings.grey(SEVEN, 0.1, 0.9)


def levels(picture: Image.Image) -> np.ndarray:
    return images.prepare(picture, (1, picture.height, picture.width), normalise=False)[0]


def interlaced(picture: Image.Image) -> bytes:
    """Makes an Adam7 PNG, which Pillow cannot write."""
    pixels, lines = np.asarray(picture), b""
    for top, left, down, across in (
        (0, 0, 8, 8),
        (0, 4, 8, 8),
        (4, 0, 8, 4),
        (0, 2, 4, 4),
        (2, 0, 4, 2),
        (0, 1, 2, 2),
        (1, 0, 2, 1),
    ):
        lines += b"".join(b"\0" + row.tobytes() for row in pixels[top::down, left::across] if row.size)
    header = struct.pack(">IIBBBBB", picture.width, picture.height, 8, 0, 0, 0, 1)
    return png(header, zlib.compress(lines))


def png(header: bytes, data: bytes, **before: bytes) -> bytes:
    chunks = ((b"IHDR", header), *((kind.encode(), body) for kind, body in before.items()), (b"IDAT", data), (b"IEND", b""))
    parts = (struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def animated(form: str) -> bytes:
    others = [Image.new("L", PICTURE.size, 255 * (index % 2)) for index in range(3)]
    return drawings.encoded(PICTURE, form, save_all=True, append_images=others, lossless=True)


READ = {
    "grey png": drawings.encoded(PICTURE),
    "rgb png": drawings.encoded(PICTURE.convert("RGB")),
    "palette png": drawings.encoded(PICTURE.quantize(200)),
    "16 bits": drawings.encoded(Image.fromarray(np.asarray(PICTURE).astype(np.uint16) * 257)),
    "interlaced png": interlaced(PICTURE),
    "alpha": drawings.encoded(PICTURE.convert("LA")),
    "jpeg": drawings.encoded(PICTURE, "JPEG", quality=95),
    "progressive jpeg": drawings.encoded(PICTURE, "JPEG", quality=95, progressive=True),
    "cmyk jpeg": drawings.encoded(PICTURE.convert("CMYK"), "JPEG", quality=95),
    "lossy webp": drawings.encoded(PICTURE.convert("RGB"), "WEBP", quality=95),
    "lossless webp": drawings.encoded(PICTURE.convert("RGB"), "WEBP", lossless=True),
    "webp with alpha": drawings.encoded(PICTURE.convert("RGBA"), "WEBP", lossless=True, exact=True),
    "bmp": drawings.encoded(PICTURE, "BMP"),
    "rgb bmp": drawings.encoded(PICTURE.convert("RGB"), "BMP"),
    "animated png": animated("PNG"),
    "animated webp": animated("WEBP"),
}


@pytest.mark.parametrize("data", READ.values(), ids=READ.keys())
def test_every_supported_format_is_read_alike(data: bytes) -> None:
    picture = images.read(data, LIMIT)
    assert picture.size == PICTURE.size
    assert np.abs(levels(picture) - levels(PICTURE)).mean() < 0.02


def test_a_one_bit_picture_is_read() -> None:
    picture = images.read(drawings.encoded(PICTURE.point(lambda level: 255 * (level > 128)).convert("1")), LIMIT)
    assert set(np.unique(levels(picture))) == {0.0, 1.0}


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_exif_orientation_is_applied(orientation: int, form: str) -> None:
    back = {1: None, 2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}[orientation]  # Image.Transpose: what the camera did to it
    wide = PICTURE.resize((64, 40))
    stored = wide if back is None else wide.transpose(Image.Transpose(back))
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture = images.read(drawings.encoded(stored.convert("RGB"), form, exif=exif, quality=95), LIMIT)
    assert picture.size == wide.size
    assert np.abs(levels(picture) - levels(wide)).mean() < 0.02


def test_a_large_jpeg_is_decoded_at_reduced_size() -> None:
    picture = images.read(drawings.encoded(PICTURE.resize((4000, 3000)), "JPEG"), LIMIT)
    assert 512 <= min(picture.size) < 1024


@pytest.mark.parametrize("where", ["Raw profile type exif", "XML:com.adobe.xmp"])
def test_png_orientation_is_read_from_text_and_xmp_chunks(where: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    profile = f"\nexif\n{len(exif.tobytes())}\n{exif.tobytes().hex()}"
    said = PngInfo()
    said.add_itxt(where, profile if "Raw" in where else '<rdf:Description tiff:Orientation="6"/>')
    picture = images.read(drawings.encoded(PICTURE, "PNG", pnginfo=said), LIMIT)
    assert picture.tobytes() == PICTURE.transpose(Image.Transpose.ROTATE_270).tobytes()


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "text"])
def test_orientation_is_applied_despite_much_other_exif_data(form: str) -> None:
    """The same metadata hold the maker's note, in which a camera may put any amount of data."""
    exif = Image.Exif()
    exif[0x0112] = 6
    exif[0x927C] = bytes(65_000 if form == "JPEG" else 400_000)
    said, raw = PngInfo(), exif.tobytes()
    digits = "\n".join(textwrap.wrap(raw.hex(), 72))
    said.add_text("Raw profile type exif", f"\nexif\n{len(raw)}\n{digits}\n", zip=True)
    told = {"pnginfo": said} if form == "text" else {"exif": exif}
    picture = images.read(drawings.encoded(PICTURE, "PNG" if form == "text" else form, **told), LIMIT)
    assert picture.size == (PICTURE.height, PICTURE.width)
    assert np.abs(levels(picture) - levels(PICTURE.transpose(Image.Transpose.ROTATE_270))).mean() < 0.02


def exif_with_an_odd_orientation() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 77
    return drawings.encoded(PICTURE, "JPEG", exif=exif)


def corrupt_exif() -> bytes:
    data = drawings.encoded(PICTURE, "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x05\x01\x12\0\x03")
    return data


def invalid_apng() -> bytes:
    """A PNG that states its number of frames twice, at which Pillow warns."""
    plain, body = drawings.encoded(PICTURE), struct.pack(">II", 0, 0)
    chunk = struct.pack(">I", 8) + b"acTL" + body + struct.pack(">I", zlib.crc32(b"acTL" + body))
    return plain[:33] + chunk + chunk + plain[33:]


def text_that_is_no_exif() -> bytes:
    said = PngInfo()
    said.add_text("Raw profile type exif", "\nexif\n1\n7")
    return drawings.encoded(PICTURE, pnginfo=said)


@pytest.mark.parametrize(
    "data",
    [exif_with_an_odd_orientation(), corrupt_exif(), invalid_apng(), text_that_is_no_exif()],
    ids=["odd", "corrupt", "apng", "text"],
)
def test_damaged_metadata_is_ignored_without_warnings(data: bytes) -> None:
    program = "import sys; from service import images; print(images.read(sys.stdin.buffer.read(), 10**6).size)"
    done = subprocess.run([sys.executable, "-W", "always", "-c", program], input=data, capture_output=True)
    assert (done.stdout.decode().strip(), done.stderr) == (str(PICTURE.size), b"")


def test_reading_leaves_the_warning_filters_unchanged() -> None:
    before = list(warnings.filters)
    threads = [threading.Thread(target=lambda: [images.read(corrupt_exif(), LIMIT) for _ in range(20)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(warnings.filters) == before


def test_over_a_megabyte_of_compressed_text_is_refused() -> None:
    notes, data = PngInfo(), BytesIO()
    notes.add_text("Comment", "x" * 5_000_000, zip=True)
    PICTURE.save(data, "PNG", pnginfo=notes)
    with pytest.raises(Unprocessable, match="over a megabyte of compressed text"):
        images.read(data.getvalue(), LIMIT)


TRUNCATED = ("grey png", "16 bits", "interlaced png", "jpeg", "cmyk jpeg", "lossy webp", "lossless webp", "bmp")


@pytest.mark.parametrize("kind", TRUNCATED)
@pytest.mark.parametrize("share", [0.05, 0.3, 0.7])
def test_truncated_pictures_are_refused(kind: str, share: float) -> None:
    data = READ[kind]
    with pytest.raises(Unprocessable, match="truncated or damaged"):
        images.read(data[: max(12, int(len(data) * share))], LIMIT)


def with_pixels(data: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """Changes what a PNG's compressed stream holds; the stream itself stays valid."""
    head, _, rest = data.partition(b"IDAT")
    length = int.from_bytes(head[-4:])
    stream = zlib.compress(change(zlib.decompress(rest[:length])))
    body = b"IDAT" + stream
    return head[:-4] + struct.pack(">I", len(stream)) + body + struct.pack(">I", zlib.crc32(body)) + rest[length + 4 :]


PNGS = {kind: data for kind, data in READ.items() if data.startswith(b"\x89PNG")}
PNGS |= {"one bit": drawings.encoded(PICTURE.convert("1")), "two bits": drawings.encoded(PICTURE.quantize(4))}


@pytest.mark.parametrize("data", PNGS.values(), ids=PNGS.keys())
def test_a_png_with_missing_rows_is_refused_and_a_black_one_read(data: bytes) -> None:
    for kept in (0, 300, -1):
        with pytest.raises(Unprocessable, match="truncated or damaged"):
            images.read(with_pixels(data, lambda rows, kept=kept: rows[:kept]), LIMIT)
    black = images.read(with_pixels(data, lambda rows: bytes(len(rows))), LIMIT)
    assert black.size == PICTURE.size


def test_an_incomplete_interlaced_png_with_its_last_pixel_is_refused() -> None:
    """Of 17x17 pixels the first pass has 3x3, and the picture's last pixel is one of them."""
    data = with_pixels(interlaced(Image.new("L", (17, 17), 255)), lambda rows: rows[:12])
    with pytest.raises(Unprocessable, match="truncated or damaged"):
        images.read(data, LIMIT)


@pytest.mark.parametrize("size", [(1, 1), (3, 1), (1, 3), (5, 5), (8, 9)])
def test_complete_interlaced_pngs_of_any_size_are_read(size: tuple[int, int]) -> None:
    assert images.read(interlaced(PICTURE.resize(size)), LIMIT).size == size


@pytest.mark.parametrize("lost", range(1, 16))
def test_a_png_cut_short_by_a_few_bytes_is_refused(lost: int) -> None:
    with pytest.raises(Unprocessable, match="truncated or damaged"):
        images.read(READ["grey png"][:-lost], LIMIT)


def test_a_memory_error_while_decoding_raises_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(picture: Image.Image) -> None:
        raise MemoryError

    monkeypatch.setattr(images.pngfile.PngFile, "load", short)
    with pytest.raises(TooLarge, match="not enough memory"):
        images.read(READ["grey png"], LIMIT)


@pytest.mark.parametrize("kind", READ)
def test_a_damaged_picture_is_read_or_raises_a_service_error(kind: str) -> None:
    rng = np.random.default_rng(0)
    for _ in range(60):
        data = bytearray(READ[kind])
        for place in rng.integers(2, len(data), size=rng.integers(1, 8)):
            data[place] = rng.integers(256)
        with suppress(TooLarge, NotAnImage, Unprocessable):
            picture = images.read(bytes(data), LIMIT)
            for normalise in (True, False):
                images.prepare(picture, (1, picture.height, picture.width), normalise)


FOREIGN = {
    "tiff": (drawings.encoded(PICTURE, "TIFF"), "a TIFF"),
    "gif": (drawings.encoded(PICTURE, "GIF"), "a GIF"),
    "pdf": (b"%PDF-1.7", "a PDF"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "an SVG"),
    "heic": (b"\0\0\0\x18ftypheic\0\0\0\0", "a HEIC"),
    "eps": (drawings.encoded(PICTURE.convert("L"), "EPS"), "PostScript"),
    "text": (b"seven", "text; send the picture file's content"),
    "zeros": (bytes(1000), "not a picture"),
}


@pytest.mark.parametrize(("data", "name"), FOREIGN.values(), ids=FOREIGN.keys())
def test_unsupported_formats_are_refused_and_named(data: bytes, name: str) -> None:
    with pytest.raises(NotAnImage, match=f"PNG, JPEG, WebP and BMP are read.*{name}"):
        images.read(data, LIMIT)


def test_an_empty_file_is_refused() -> None:
    with pytest.raises(Unprocessable, match="empty"):
        images.read(b"", LIMIT)


def test_an_invalid_palette_raises_unprocessable() -> None:
    """With more opacities than colours, Pillow opens the picture and fails when it is converted."""
    palette, opacities = bytes(range(256)) * 3, bytes(257)
    data = png(struct.pack(">IIBBBBB", 40, 40, 8, 3, 0, 0, 0), zlib.compress(bytes(40 * 41)), PLTE=palette, tRNS=opacities)
    with pytest.raises(Unprocessable, match="begins like a PNG file but cannot be decoded"):
        images.read(data, LIMIT)


def _scanned(count: int) -> tuple[bytes, bytes, list[bytes]]:
    """The parts of a progressive JPEG of many scans: its head, a segment that defines restarts, and the scans."""
    whole = drawings.encoded(Image.new("L", (64, 64), 77), "JPEG", progressive=True)
    first, end = whole.index(b"\xff\xda"), whole.rindex(b"\xff\xd9")
    return whole[:first], b"\xff\xdd\x00\x04\x00\x01", [whole[first:end]] * count


HIDDEN = {
    "an end marker before the picture": lambda head, restarts, scans: b"\xff\xd8\xff\xd9" + head + b"".join(scans),
    "a marker without a length": lambda head, restarts, scans: head + b"\xff\x01".join(scans),
    "a reserved marker": lambda head, restarts, scans: head[:2] + restarts + head[2:] + b"\xff\x02".join(scans),
    "fill bytes": lambda head, restarts, scans: head + b"\xff\xff\xff".join(scans),
}


@pytest.mark.parametrize("way", HIDDEN)
def test_scans_are_counted_as_a_decoder_finds_them(way: str) -> None:
    with pytest.raises(Unprocessable, match="more than 100 scans"):
        images.read(HIDDEN[way](*_scanned(200)) + b"\xff\xd9", LIMIT)


def test_a_film_after_a_jpeg_is_not_counted_as_scans() -> None:
    """Telephones append films, in which 0xff 0xda occurs by chance."""
    picture = drawings.encoded(Image.new("L", (40, 40), 77), "JPEG", progressive=True)
    film = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8).tobytes() + b"\xff\xda\x00\x02" * 200
    assert images.read(picture + film, LIMIT).getpixel((9, 9)) == 77


def vast(side: int) -> dict[str, bytes]:
    """Headers that promise side x side pixels, with hardly anything behind them."""
    bits = (side - 1) | (side - 1) << 14
    vp8x = b"VP8X" + struct.pack("<II", 10, 0) + (side - 1).to_bytes(3, "little") * 2
    bitmap = struct.pack("<2sIHHIIiiHHIIiiII", b"BM", 1000, 0, 0, 54, 40, side, side, 1, 24, 0, 0, 0, 0, 0, 0)
    lossy = struct.pack("<HH", side, side)
    jpeg = drawings.encoded(Image.new("L", (8, 8)), "JPEG")
    frame = jpeg.index(b"\xff\xc0") + 5
    return {
        "png": png(struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0), zlib.compress(bytes(1000))),
        "jpeg": jpeg[:frame] + struct.pack(">HH", side, side) + jpeg[frame + 4 :],
        "webp": b"RIFF" + struct.pack("<I", 22) + b"WEBP" + vp8x,
        "webp, lossless": b"RIFF" + struct.pack("<I", 22) + b"WEBPVP8L" + struct.pack("<IB", 10, 0x2F) + struct.pack("<I", bits),
        "webp, lossy": b"RIFF" + struct.pack("<I", 22) + b"WEBPVP8 " + struct.pack("<I", 10) + b"\x10\0\0\x9d\x01\x2a" + lossy,
        "bmp": bitmap + bytes(100),
    }


@pytest.mark.parametrize("kind", vast(16_000))
def test_too_large_pictures_are_refused_by_their_header(kind: str) -> None:
    data = vast(16_000)[kind]
    tracemalloc.start()
    try:
        with pytest.raises(TooLarge, match=r"16000x16000 pixels.*25,000,000"):
            images.read(data, LIMIT)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [(1, 24_000_000), (20_001, 1)])
def test_pictures_with_too_long_sides_are_refused_by_their_header(size: tuple[int, int]) -> None:
    header = struct.pack(">IIBBBBB", *size, 16, 0, 0, 0, 0)
    with pytest.raises(TooLarge, match=f"{size[0]}x{size[1]} pixels and at most 20,000 per side"):
        images.read(png(header, zlib.compress(bytes(1000))), LIMIT)


def test_a_picture_exactly_at_the_pixel_limit_is_read() -> None:
    data = drawings.encoded(PICTURE)
    assert images.read(data, 64 * 64).size == (64, 64)
    with pytest.raises(TooLarge):
        images.read(data, 64 * 64 - 1)


def test_normalise_none_changes_nothing() -> None:
    picture = PICTURE.resize((28, 28))
    image = images.prepare(picture, (1, 28, 28), normalise=False)
    assert image.dtype == np.float32
    np.testing.assert_allclose(image[0] * 255, np.asarray(picture), atol=1e-3)
    assert images.prepare(picture, (3, 28, 28), normalise=False).shape == (3, 28, 28)


@pytest.mark.parametrize("size", [(1, 1), (27, 28), (640, 480)])
def test_normalise_none_wants_the_right_size(size: tuple[int, int]) -> None:
    with pytest.raises(Unprocessable, match=f"28x28 pixels, and this one is {size[0]}x{size[1]}.*have it normalised"):
        images.prepare(Image.new("L", size), (1, 28, 28), normalise=False)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("picture", "clear"),
    [
        (Image.fromarray(np.array([[255, 51]], np.uint8)), 255),
        (Image.fromarray(np.array([[255, 51]], np.uint8)).convert("RGB"), (255, 255, 255)),
        (Image.fromarray(np.array([[255, 51]], np.uint8)).convert("P"), 255),
        (Image.fromarray(np.array([[65_535, 13_107]], np.uint16)), 65_535),
    ],
    ids=["grey", "colours", "palette", "16 bits"],
)
def test_the_transparent_colour_of_a_png_becomes_black(
    picture: Image.Image, clear: int | tuple[int, int, int], channels: int
) -> None:
    read = images.read(drawings.encoded(picture, transparency=clear), LIMIT)
    image = images.prepare(read, (channels, 1, 2), normalise=False)
    np.testing.assert_allclose(image, np.full((channels, 1, 2), (0, 0.2)), atol=1e-6)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_written_png_holds_the_given_pixels(channels: int) -> None:
    image = np.random.default_rng(0).random((channels, 5, 7), dtype=np.float32)
    with Image.open(BytesIO(images.png(image))) as picture:
        assert picture.mode == {1: "L", 3: "RGB"}[channels]
        seen = np.asarray(picture, dtype=np.float32).reshape(5, 7, channels).transpose(2, 0, 1)
    np.testing.assert_allclose(seen / 255, image, atol=0.5 / 255 + 1e-6)


def test_png_clips_values_outside_0_to_1() -> None:
    with Image.open(BytesIO(images.png(np.array([[[-0.5, 1.5]]], np.float32)))) as picture:
        assert np.asarray(picture).tolist() == [[0, 255]]


def test_sheet_lays_rows_and_columns() -> None:
    rows = np.zeros((2, 3, 1, 28, 28), np.float32)
    rows[1, 2] = 1
    with Image.open(BytesIO(images.sheet(rows, 56))) as picture:
        assert picture.size == (168, 112)
        seen = np.asarray(picture)
    assert seen[56:, 112:].min() == 255
    assert seen[:56].max() == 0
    assert seen[:, :112].max() == 0


def test_the_size_of_a_sheet_is_a_tiles_longer_side() -> None:
    with Image.open(BytesIO(images.sheet(np.zeros((1, 1, 1, 20, 40), np.float32), 80))) as picture:
        assert picture.size == (80, 40)
