"""Whether a PNG holds all its rows: Pillow reads a compressed stream that ends early as a picture whose other rows are black."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

from PIL.PngImagePlugin import PngImageFile

from service.errors import Unprocessable

SIGNATURE = b"\x89PNG\r\n\x1a\n"
HEADER = struct.Struct(">IIBBBBB")  # width, height, bits per sample, colour type, two zeros, whether interlaced
CHUNK = struct.Struct(">I4s")  # length and kind; body and checksum follow
CHECKSUM = 4  # bytes
HEADER_AT, INTERLACED_AT, CHUNKS_AT = 16, 28, 33  # offsets in bytes: the header's chunk follows the signature
END_CHUNK = b"IEND\xaeB`\x82"
PIXEL_CHUNKS = (b"IDAT", b"fcTL", b"fdAT")  # of still pictures, and of animated ones
SAMPLES = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # per pixel, by colour type
PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
MOST_CHUNKS = 200  # beside the pixels: each profile, say, is inflated
MOST_PIXEL_CHUNKS = 20_000  # chunks of pixels, most often of 8 KB each: Pillow reads each in Python
MARK = 1  # a level that the last pixel of few pictures has
PIECE = 1 << 12  # bytes inflated at a time, to 4 MB at most


class PngFile(PngImageFile):
    """A PNG that shows whether its last pixel was in the file: that pixel is marked before any is read."""

    def load_prepare(self) -> None:
        super().load_prepare()
        self.im.putpixel(self._last, MARK if self.im.bands == 1 else (MARK,) * self.im.bands)
        self._mark = self.im.getpixel(self._last)

    @property
    def marked(self) -> bool:
        """Whether the mark is still there: then the last row is missing, or the pixel happens to have that level."""
        return bool(self.im.getpixel(self._last) == self._mark)

    @property
    def _last(self) -> tuple[int, int]:
        return self.width - 1, self.height - 1


def expect_complete(picture: PngFile, data: bytes) -> None:
    """Raises ValueError for a file without its last chunk, which more data may follow, or without all its rows."""
    if data.rfind(END_CHUNK) < 0 or ((picture.marked or data[INTERLACED_AT]) and not holds_all_rows(data)):
        raise ValueError("a part of a PNG")


def expect_few_chunks(data: bytes) -> None:
    """Raises Unprocessable for a file of too many chunks: profiles, texts and whatever else, or pixels a few at a time."""
    pixels = others = 0
    for kind, _, _ in _chunks(data):
        pixels += kind in PIXEL_CHUNKS
        others += kind not in PIXEL_CHUNKS
        if others > MOST_CHUNKS:
            raise Unprocessable(f"this PNG has more than {MOST_CHUNKS} chunks beside its pixels; save it again, without metadata")
        if pixels > MOST_PIXEL_CHUNKS:
            raise Unprocessable(f"this PNG has more than {MOST_PIXEL_CHUNKS:,} chunks of pixels; save it again")


def holds_all_rows(data: bytes) -> bool:
    """Inflates the stream of a file that Pillow has read once more, and counts its bytes."""
    missing, inflate = _row_bytes(data), zlib.decompressobj().decompress
    for start, end in ((start, end) for kind, start, end in _chunks(data) if kind == b"IDAT"):
        for piece in range(start, end, PIECE):
            missing -= len(inflate(data[piece : min(piece + PIECE, end)]))
            if missing <= 0:  # whatever follows need not be inflated: it may be gigabytes
                return True
    return False


def _chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yields the kind of each chunk after the header's, and where its body begins and ends."""
    at, kind = CHUNKS_AT, b""
    while at + CHUNK.size <= len(data) and kind != END_CHUNK[:4]:  # after which anything may follow
        length, kind = CHUNK.unpack_from(data, at)
        start = at + CHUNK.size
        yield kind, start, start + length
        at = start + length + CHECKSUM


def _row_bytes(data: bytes) -> int:
    """Bytes of all rows of all passes, each with the byte that names its filter."""
    width, height, bits, colour, _, _, interlaced = HEADER.unpack_from(data, HEADER_AT)
    bits *= SAMPLES[colour]
    if not interlaced:
        return int(height * (1 + (width * bits + 7) // 8))
    total = 0
    for column, row, right, down in PASSES:  # where each pass begins, and its steps
        columns, rows = -((column - width) // right), -((row - height) // down)
        if columns > 0:
            total += max(0, rows) * (1 + (columns * bits + 7) // 8)
    return total
