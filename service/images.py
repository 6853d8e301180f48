"""Converts bytes <-> pictures <-> float arrays: reads PNG, JPEG, WebP and BMP, writes PNG.

Knows no HTTP, and of a model only what its manifest says about pictures. `read` trusts nothing: the size in the header is
checked before pixels are decoded, and whatever Pillow raises about damaged data becomes one of our errors.
"""

from __future__ import annotations

import math
import re
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import BmpImagePlugin, ExifTags, Image, JpegImagePlugin, WebPImagePlugin
from PIL.ImageFile import ImageFile

from service import pngfile
from service.bundle import Array
from service.errors import NotAnImage, ServiceError, TooLarge, Unprocessable
from service.manifest import Manifest
from service.pictures import captions
from service.pictures import normalise as normalising


@dataclass(frozen=True)
class Format:
    """A format we read. Its plugin is called directly: Image.open would warn about large pictures, and try other formats."""

    name: str
    open: Callable[[BytesIO], ImageFile]


class _JpegFile(JpegImagePlugin.JpegImageFile):
    def _read_dpi_from_exif(self) -> None:
        """Does nothing: nobody here needs the resolution, and it may hold a million fractions."""


PNG = Format("PNG", pngfile.PngFile)
JPEG = Format("JPEG", _JpegFile)
WEBP = Format("WebP", WebPImagePlugin.WebPImageFile)
BMP = Format("BMP", BmpImagePlugin.BmpImageFile)

# Pillow warns about odd metadata, which we do not use. Set once for the process: catch_warnings is not thread-safe.
warnings.filterwarnings("ignore", module=r"PIL\.")

MARKER = re.compile(rb"\xff([^\x00\xd0-\xd7\xff])")  # of a JPEG; in compressed data 0xff is followed by one of the excluded bytes
STRETCH = 1 << 16  # bytes that are searched for a marker at a time: meanwhile no other thread runs
LOWEST_WITH_LENGTH, START_OF_IMAGE, END_OF_IMAGE, START_OF_SCAN = 0xC0, 0xD8, 0xD9, 0xDA
MOST_MARKERS = 1_000  # a phone's picture has a few dozen; while one thread looks at them all others wait
# Segments before the first scan that Pillow parses in Python: frames and tables, Photoshop's, and Exif's, which it also joins
# piece by piece. The limit is in bytes of all of them: cameras write tens of thousands, Photoshop hundreds of thousands.
PARSED_MARKERS, APP1, MOST_PARSED = {*range(0xC0, 0xD0), 0xDB, 0xDE, 0xED}, 0xE1, 1 << 21
MOST_PADDING = 1 << 16  # bytes before the first scan that belong to no segment: Pillow steps over each in Python
MOST_SCANS = 100  # a progressive JPEG has about ten; each costs a pass over all pixels, and takes as little as 42 bytes
MOST_SCANNED_PIXELS, MOST_FULL_SCANS = 1 << 29, 20  # pixels in all scans together, or, if more, so many scans of max_pixels
LARGEST_RLE = 1 << 18  # bytes and pixels of a run-length-encoded BMP: Pillow unpacks it in Python, partly byte by byte

LONGEST_SIDE = 20_000  # pixels per side: each row costs bookkeeping too, Pillow's and our own, however short it is
SHORTEST_SIDE = 3  # pixels per side: the smallest digits of any typeface are 3x5
DRAFT = (512, 512)  # pixels: a JPEG is decoded at the smallest of its own scales that is still this large
EXIF, RAW_EXIF = "exif", "Raw profile type exif"
ORIENTATION_KEYS = (EXIF, RAW_EXIF, "XML:com.adobe.xmp")  # where a PNG may store its orientation
MOST_EXIF = 1 << 16  # bytes of Exif that are parsed, in Python: the orientation is among the first
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

NO_LOCK = nullcontext()


def decoded(
    data: bytes, max_pixels: int, manifest: Manifest, normalise: bool, lock: AbstractContextManager[Any] = NO_LOCK
) -> Array:
    """Turns a picture's bytes into a network's input, (C, H, W) in [0, 1]. Threads decode in parallel, normalise under `lock`."""
    picture = read(data, max_pixels, whole=not normalise)
    if normalise and min(picture.size) < SHORTEST_SIDE:
        raise Unprocessable(
            f"expected a picture at least {SHORTEST_SIDE} pixels wide and high, found {picture.width}x{picture.height}; "
            "that shows no digit: send it larger"
        )
    with lock:
        return prepare(picture, manifest.image_shape, normalise, manifest.max_objects, manifest.boxed)


def read(data: bytes, max_pixels: int, whole: bool = False) -> Image.Image:
    """Decodes the first frame and turns it as its EXIF says; scales a large JPEG down, unless it is wanted whole."""
    form = _detect_format(data)
    with _translated_errors(form):
        if form is WEBP:  # the only one whose decoder allocates the canvas when it is opened
            _refuse_large(_webp_size(data), max_pixels)
        if form is PNG:
            pngfile.expect_few_chunks(data)
        scans = _count_scans(data) if form is JPEG else 0
        picture = form.open(BytesIO(data))
        _refuse_large(picture.size, max_pixels)
        if form is JPEG:
            _refuse_many_scans(scans, math.prod(picture.size), max_pixels)
        if form is BMP and picture.tile[0].codec_name == "bmp_rle" and len(data) + math.prod(picture.size) > LARGEST_RLE:
            raise Unprocessable("this run-length-encoded BMP is too large to unpack in time; save it as PNG")
        if isinstance(picture, pngfile.PngFile):  # its metadata may follow the pixels
            picture.load()
            pngfile.expect_complete(picture, data)
        # A PNG without such metadata, our hottest path, needs no look at its orientation.
        plain = form is PNG and picture.info.keys().isdisjoint(ORIENTATION_KEYS)
        turn = None if plain else _orientation(picture)
        if form is JPEG and not whole:
            picture.draft(None, DRAFT)
        picture.load()
        upright = picture if turn is None else picture.transpose(turn)
        if upright.mode != "P":
            return upright
        # Still inside the `with`: a damaged palette is the sender's fault too.
        return upright.convert("RGBA" if "transparency" in upright.info else "RGB")


def _orientation(picture: ImageFile) -> Image.Transpose | None:
    info = picture.info
    try:
        if EXIF in info:
            info[EXIF] = info[EXIF][:MOST_EXIF]
        if len(info.get(RAW_EXIF, "")) > 2 * MOST_EXIF:  # in lines of hexadecimal digits
            info[RAW_EXIF] = info[RAW_EXIF][: 2 * MOST_EXIF].rpartition("\n")[0]
        return TURNS.get(picture.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # Pillow fails on damaged metadata in many ways; the picture is good all the same
        return None


def prepare(
    picture: Image.Image, image_shape: tuple[int, int, int], normalise: bool, objects: int = 1, boxed: bool = True
) -> Array:
    """Turns a picture into the network's input, (C, H, W) in [0, 1], with `normalise` made to look like the training set."""
    channels, height, width = image_shape
    if normalise and not boxed:
        return normalising.scaled(picture, channels, height, width)
    if normalise:
        grey = normalising.normalise(picture, height, width, objects)
        return np.repeat(grey[None], channels, axis=0)
    if picture.size != (width, height):
        raise Unprocessable(
            f"without normalising a picture must have {width}x{height} pixels, and this one is {picture.width}x{picture.height}; "
            "scale it, or have it normalised"
        )
    return normalising.pixels(picture, channels)


def png(image: Array) -> bytes:
    """One image (C, H, W) as a PNG of the same size."""
    return sheet(image[None, None])


def sheet(rows: Array, size: int | None = None, names: Sequence[str] = ()) -> bytes:
    """Images (rows, columns, C, H, W) side by side in one PNG, names at the left; `size` is the longer side of each."""
    down, across, channels, height, width = rows.shape
    levels = np.rint(np.clip(rows, 0.0, 1.0) * 255).astype(np.uint8)
    if size is not None and size != max(height, width):
        height, width = (max(1, round(side * size / max(height, width))) for side in (height, width))
        flat = levels.reshape(-1, *levels.shape[3:])
        scaled = [np.asarray(Image.fromarray(plane).resize((width, height), Image.Resampling.BICUBIC)) for plane in flat]
        levels = np.stack(scaled).reshape(down, across, channels, height, width)
    # (rows, columns, C, H, W) -> lines of pixels (rows H, columns W C)
    lines = levels.transpose(0, 3, 1, 4, 2).reshape(down * height, across * width * channels)
    if names:
        lines = np.concatenate([captions.column(names, height).repeat(channels, axis=1), lines], axis=1)
    return _png(lines, channels)


def _png(lines: NDArray[np.uint8], channels: int) -> bytes:
    """Encodes a PNG without Pillow: in less than half the time, for the small pictures that most answers carry."""
    height, wide = lines.shape
    unfiltered = np.zeros((height, 1 + wide), np.uint8)  # each line begins with its filter type; 0 is none
    unfiltered[:, 1:] = lines
    colour = {1: 0, 3: 2}[channels]
    header = pngfile.HEADER.pack(wide // channels, height, 8, colour, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(unfiltered.tobytes(), 6)), (b"IEND", b""))
    return pngfile.SIGNATURE + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )


OTHER_FORMATS = {
    b"GIF8": "a GIF",
    b"II*\x00": "a TIFF",
    b"MM\x00*": "a TIFF",
    b"%PDF": "a PDF",
    b"%!PS": "PostScript",
    b"<svg": "an SVG",
    b"<?xm": "an SVG or other XML",
    b"PK\x03\x04": "a ZIP archive",
}
TEXT = re.compile(rb"[\t\n\r -~]+")  # printable ASCII


def _detect_format(data: bytes) -> Format:
    """The format that the first bytes indicate, whatever the sender called it."""
    if not data:
        raise Unprocessable("the picture is empty (0 bytes); send the bytes of a PNG, JPEG, WebP or BMP file")
    if data.startswith(pngfile.SIGNATURE):
        return PNG
    if data.startswith(b"\xff\xd8\xff"):
        return JPEG
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return WEBP
    if data.startswith(b"BM"):
        return BMP
    known = "PNG, JPEG, WebP and BMP are read, and"
    if kind := "a HEIC, AVIF or video file" if data[4:8] == b"ftyp" else OTHER_FORMATS.get(data[:4]):
        raise NotAnImage(f"{known} this is {kind}; convert it to PNG")
    if TEXT.fullmatch(data):
        raise NotAnImage(f"{known} these {len(data)} bytes are text; send the picture file's content, not its name or base64")
    raise NotAnImage(f"{known} these {len(data)} bytes are not a picture we know; convert it to PNG")


def _webp_size(data: bytes) -> tuple[int, int]:
    kind = data[12:16]
    if kind == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if kind == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    return int.from_bytes(data[26:28], "little") & 0x3FFF, int.from_bytes(data[28:30], "little") & 0x3FFF


def _count_scans(data: bytes) -> int:
    """Counts a JPEG's scans up to its end, after which phones put videos; beyond MOST_SCANS the exact number does not matter.

    Walks as the decoder does: an end before any scan is ignored, and of a marker without a length nothing more is skipped.
    """
    count, at, padding, parsed = 0, 0, 0, 0
    for _ in range(MOST_MARKERS):
        match = _next_marker(data, at, len(data) if count else at + MOST_PADDING + 2)
        padding += 0 if count else (match.start() if match else len(data)) - at
        if padding > MOST_PADDING:
            raise Unprocessable("this JPEG has little but padding before its picture; save it again")
        if not match or count > MOST_SCANS:
            return count
        marker, at = match[1][0], match.end()
        if marker == END_OF_IMAGE and count:
            return count
        count += marker == START_OF_SCAN
        if marker >= LOWEST_WITH_LENGTH and marker not in (START_OF_IMAGE, END_OF_IMAGE):
            length = int.from_bytes(data[at : at + 2])
            if not count and (marker in PARSED_MARKERS or (marker == APP1 and data.startswith(b"Exif", at + 2))):
                parsed += length
            at += length
        if parsed > MOST_PARSED:
            message = f"this JPEG has more than {MOST_PARSED:,} bytes of Exif, Photoshop's data and tables before its picture"
            raise Unprocessable(f"{message}; save it again without")
    raise Unprocessable(f"this JPEG has more than {MOST_MARKERS:,} markers, and no camera writes so many; save it again, as PNG")


def _next_marker(data: bytes, start: int, end: int) -> re.Match[bytes] | None:
    """The first marker within data[start:end]."""
    stretches = (MARKER.search(data, at, min(at + STRETCH + 1, end)) for at in range(start, min(end, len(data)), STRETCH))
    return next(filter(None, stretches), None)


def _refuse_many_scans(scans: int, pixels: int, max_pixels: int) -> None:
    if scans > MOST_SCANS:
        raise Unprocessable(f"this JPEG has more than {MOST_SCANS} scans; save it again, not progressive")
    if scans * pixels > max(MOST_SCANNED_PIXELS, MOST_FULL_SCANS * max_pixels):
        raise Unprocessable(f"this JPEG has {scans} scans of {pixels:,} pixels; save it again, not progressive")


def _refuse_large(size: tuple[int, int], max_pixels: int) -> None:
    width, height = size
    if max(size) > LONGEST_SIDE:
        raise TooLarge(
            f"the picture has {width}x{height} pixels and at most {LONGEST_SIDE:,} per side are read; scale it down or crop it"
        )
    if width * height > max_pixels:
        raise TooLarge(f"the picture has {width}x{height} pixels and at most {max_pixels:,} in all are read; scale it down")


@contextmanager
def _translated_errors(form: Format) -> Iterator[None]:
    """Turns whatever Pillow raises for damaged files (SyntaxError, ValueError, struct.error, zlib.error...) into our errors."""
    try:
        yield
    except ServiceError:
        raise
    except MemoryError as error:
        raise TooLarge("not enough memory to decode this picture; scale it down") from error
    except Exception as error:
        if "MAX_TEXT_CHUNK" in str(error):
            raise Unprocessable("this PNG has over a megabyte of compressed text beside the picture; save it without") from error
        raise Unprocessable(
            f"this begins like a {form.name} file but cannot be decoded: it is truncated or damaged; save it again and resend"
        ) from error
