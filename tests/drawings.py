"""Pictures of digits in many styles, drawn with Pillow: pens, fonts, papers, lights and file formats. Knows no service.

A mask is a float array (h, w), 1 where there is ink. MASKS make one for a character, STYLES make a picture of a mask.
"""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter, ImageFont

Mask = NDArray[np.float64]
Style = Callable[[Mask, np.random.Generator], Image.Image]

SIDE = 240  # pixels of a usual mask


def _arc(x: float, y: float, across: float, down: float, start: float, end: float) -> list[tuple[float, float]]:
    """Part of an ellipse; degrees, clockwise from the right."""
    angles = np.radians(np.linspace(start, end, 24))
    return [(x + across * np.cos(angle), y + down * np.sin(angle)) for angle in angles]


# Each digit in ways people write it; each way is some strokes; each stroke is points in a box of 1x1.
PEN: dict[str, list[list[list[tuple[float, float]]]]] = {
    "0": [[_arc(0.5, 0.5, 0.3, 0.42, -90, 270)], [_arc(0.5, 0.5, 0.22, 0.42, -110, 255)]],
    "1": [[[(0.5, 0.08), (0.5, 0.92)]], [[(0.34, 0.26), (0.54, 0.08), (0.54, 0.92)]], [[(0.6, 0.08), (0.42, 0.92)]]],
    "2": [
        [[*_arc(0.5, 0.32, 0.26, 0.24, -170, 40), (0.22, 0.9), (0.8, 0.9)]],
        [[*_arc(0.48, 0.3, 0.24, 0.22, -150, 60), (0.24, 0.88), (0.5, 0.84), (0.78, 0.88)]],
    ],
    "3": [
        [[*_arc(0.46, 0.29, 0.25, 0.21, -150, 90), *_arc(0.46, 0.7, 0.28, 0.22, -90, 150)]],
        [[(0.24, 0.1), (0.74, 0.1), (0.46, 0.42), *_arc(0.46, 0.67, 0.28, 0.25, -80, 150)]],
    ],
    "4": [
        [[(0.6, 0.92), (0.6, 0.08), (0.18, 0.64), (0.84, 0.64)]],
        [[(0.28, 0.1), (0.24, 0.52), (0.76, 0.52)], [(0.7, 0.1), (0.66, 0.92)]],
    ],
    "5": [
        [[(0.76, 0.1), (0.32, 0.1), (0.28, 0.46), *_arc(0.46, 0.66, 0.28, 0.24, -120, 150)]],
        [[(0.34, 0.1), (0.28, 0.46), *_arc(0.46, 0.66, 0.28, 0.24, -120, 150)], [(0.34, 0.1), (0.78, 0.1)]],
    ],
    "6": [
        [[(0.66, 0.08), (0.36, 0.36), *_arc(0.5, 0.68, 0.26, 0.23, -180, 180)]],
        [[(0.58, 0.06), (0.3, 0.5), *_arc(0.5, 0.7, 0.22, 0.2, -180, 200)]],
    ],
    "7": [
        [[(0.2, 0.12), (0.8, 0.12), (0.42, 0.92)]],
        [[(0.2, 0.14), (0.78, 0.12), (0.44, 0.92)], [(0.36, 0.52), (0.74, 0.5)]],
    ],
    "8": [
        [[*_arc(0.5, 0.29, 0.22, 0.2, 90, 450), *_arc(0.5, 0.71, 0.27, 0.22, -90, 270)]],
        [[*_arc(0.5, 0.28, 0.2, 0.19, 90, -270), *_arc(0.5, 0.7, 0.22, 0.22, -90, 270)]],
    ],
    "9": [
        [[*_arc(0.48, 0.32, 0.24, 0.23, 0, -360), (0.7, 0.62), (0.62, 0.92)]],
        [[*_arc(0.48, 0.3, 0.22, 0.2, -10, -360), (0.68, 0.92)]],
    ],
}


def written(digit: str, rng: np.random.Generator, width: float = 0.08, side: int = SIDE) -> Mask:
    """Writes with a pen whose point is `width` of the side wide; a digit leans, is stretched and trembles a little, at random."""
    ways = PEN[digit]
    strokes = ways[rng.integers(len(ways))]
    lean, stretch = rng.uniform(-0.1, 0.25), rng.uniform(0.85, 1.1, size=2)
    scale, radius = side * 2, side * width  # drawn at twice the size: Pillow's lines have hard edges
    canvas = Image.new("L", (scale, scale))
    draw = ImageDraw.Draw(canvas)
    for stroke in strokes:
        points = np.array(stroke) - 0.5
        points = (points + rng.normal(0, 0.006, points.shape)) * stretch * 0.8
        points[:, 0] -= lean * points[:, 1]
        line = [tuple(point) for point in (points + 0.5) * scale]
        draw.line(line, fill=255, width=round(2 * radius), joint="curve")
        for x, y in line:
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=255)
    return np.asarray(canvas.resize((side, side), Image.Resampling.BOX), dtype=np.float64) / 255


def typed(text: str, rng: np.random.Generator | None = None, side: int = SIDE, bold: int = 0) -> Mask:
    """Sets text in Pillow's own font, Aileron."""
    canvas = Image.new("L", (side, side))
    ImageDraw.Draw(canvas).text(
        (side / 2, side / 2), text, fill=255, font=ImageFont.load_default(side * 0.75), anchor="mm", stroke_width=bold
    )
    return np.asarray(canvas, dtype=np.float64) / 255


MASKS: dict[str, Callable[[str, np.random.Generator], Mask]] = {
    "pen": lambda digit, rng: written(digit, rng),
    "fine pen": lambda digit, rng: written(digit, rng, width=0.012),
    "marker": lambda digit, rng: written(digit, rng, width=0.15),
    "font": lambda digit, rng: typed(digit),
    "bold font": lambda digit, rng: typed(digit, bold=4),
}

Colour = tuple[float, float, float]


def painted(mask: Mask, ink: Colour, paper: Colour | NDArray[np.float64]) -> Image.Image:
    levels = paper + mask[..., None] * (np.array(ink) - paper)
    return Image.fromarray(np.rint(np.clip(levels, 0, 1) * 255).astype(np.uint8), "RGB")


def grey(mask: Mask, ink: float, paper: float | NDArray[np.float64]) -> Image.Image:
    levels = mask * ink + (1 - mask) * paper
    return Image.fromarray(np.rint(np.clip(levels, 0, 1, out=levels) * 255).astype(np.uint8))


def with_alpha(mask: Mask, ink: Colour) -> Image.Image:
    """Nothing but ink on a transparent sheet, whose hidden colour is black as most programs leave it."""
    solid = np.where(mask[..., None] > 0, np.array(ink), 0.0)
    return Image.fromarray(np.rint(np.dstack([solid, mask]) * 255).astype(np.uint8), "RGBA")


def margins(mask: Mask, side: int, left: float, top: float) -> Mask:
    """The mask somewhere on a larger sheet."""
    sheet = np.zeros((side, side))
    y, x = round(top * (side - mask.shape[0])), round(left * (side - mask.shape[1]))
    sheet[y : y + mask.shape[0], x : x + mask.shape[1]] = mask
    return sheet


def cropped(mask: Mask) -> Mask:
    rows, columns = np.flatnonzero(mask.max(axis=1) > 0.5), np.flatnonzero(mask.max(axis=0) > 0.5)
    return mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


def scaled(mask: Mask, side: int) -> NDArray[np.float32]:
    image = Image.fromarray(mask.astype(np.float32)).resize((side, side), Image.Resampling.BICUBIC)
    return np.clip(np.asarray(image), 0, 1)


def photographed(
    mask: Mask, rng: np.random.Generator, size: tuple[int, int], light: Callable[[Mask, Mask], Mask], desk: bool
) -> Image.Image:
    """The mask somewhere on a page (height, width), taken with a telephone; `light` is what falls on x and y from -1 to 1."""
    height, width = size
    page = np.zeros(size)
    top, left = (int(rng.integers(side // 6, side - side // 6 - part)) for side, part in zip(size, mask.shape, strict=True))
    page[top : top + mask.shape[0], left : left + mask.shape[1]] = mask
    y, x = np.meshgrid(np.linspace(-1, 1, height), np.linspace(-1, 1, width), indexing="ij")
    seen = 0.92 - 0.72 * page
    if desk:
        edge = int(rng.integers(width // 20, width // 8))
        table = np.full(size, 0.35)
        table[edge:-edge, edge:-edge] = seen[edge:-edge, edge:-edge]
        seen = table
    return jpeg(grey(np.zeros(size), 0, seen * light(x, y) + rng.normal(0, 0.03, size)), 80)


def jpeg(picture: Image.Image, quality: int) -> Image.Image:
    buffer = io.BytesIO()
    picture.convert("RGB").save(buffer, "JPEG", quality=quality)
    return Image.open(io.BytesIO(buffer.getvalue()))


def shading(shape: tuple[int, ...], rng: np.random.Generator, low: float = 0.45, high: float = 0.9) -> NDArray[np.float64]:
    """The light of a lamp to one side of the paper."""
    y, x = np.mgrid[0 : shape[0], 0 : shape[1]] / max(shape)
    angle = rng.uniform(0, 2 * np.pi)
    slope = np.cos(angle) * x + np.sin(angle) * y
    return low + (high - low) * (slope - slope.min()) / np.ptp(slope)


def _photo(mask: Mask, rng: np.random.Generator) -> Image.Image:
    mask = np.asarray(Image.fromarray((mask * 255).astype(np.uint8)).rotate(rng.uniform(-6, 6)), dtype=np.float64) / 255
    mask = margins(mask, 420, *rng.uniform(0.2, 0.8, size=2))
    light = shading(mask.shape, rng)
    levels = light * (1 - 0.75 * mask) + rng.normal(0, 0.025, mask.shape)
    tinted = np.clip(levels[..., None] * np.array([1.0, 0.96, 0.86]), 0, 1)
    picture = Image.fromarray((tinted * 255).astype(np.uint8), "RGB").filter(ImageFilter.GaussianBlur(1.2))
    return jpeg(picture, 60)


def _shadow(mask: Mask, rng: np.random.Generator) -> Image.Image:
    y, x = np.mgrid[0 : mask.shape[0], 0 : mask.shape[1]] / max(mask.shape)
    edge = np.clip((x + rng.uniform(-0.5, 0.5) * y - rng.uniform(0.3, 0.7)) * 15, 0, 1)
    light = 0.5 + 0.4 * edge
    return grey(np.zeros_like(mask), 0, light * (1 - 0.8 * mask) + rng.normal(0, 0.015, mask.shape))


def _squared(mask: Mask, rng: np.random.Generator) -> Image.Image:
    paper = np.full((*mask.shape, 3), 0.96)
    step = mask.shape[0] // 6
    for line in range(step // 2, mask.shape[0], step):
        paper[line : line + 2] = paper[:, line : line + 2] = (0.72, 0.82, 0.93)
    return painted(mask, (0.1, 0.1, 0.45), paper)


def _exercise_book(mask: Mask, rng: np.random.Generator) -> Image.Image:
    """Ruled in a blue that is not faint, with a red margin."""
    return painted(mask, (0.1, 0.1, 0.35), _ruled_with_a_margin(len(mask), int(rng.integers(len(mask) // 6)), 2))


def _seyes(mask: Mask, rng: np.random.Generator) -> Image.Image:
    """The paper of French schools: squares, and three fainter lines between theirs."""
    step = int(rng.integers(len(mask) // 5, len(mask) // 3))
    page = margins(mask, round(1.5 * len(mask)), *rng.uniform(0.25, 0.75, size=2))
    return on_seyes(page, step, first=int(rng.integers(step)))


def on_seyes(page: Mask, step: int, first: int) -> Image.Image:
    paper = np.full((*page.shape, 3), 0.98)
    for line in range(first - step, len(page), step):
        for faint in (line + part * step // 4 for part in (1, 2, 3)):
            if faint >= 0:
                paper[faint : faint + 1] = (0.75, 0.82, 0.95)
    for line in range(first, len(page), step):
        paper[line : line + 2] = paper[:, line : line + 2] = (0.5, 0.45, 0.75)
    return jpeg(painted(page, (0.1, 0.1, 0.35), paper), 85)


def _ruled_with_a_margin(side: int, first: int, wide: int) -> NDArray[np.float64]:
    paper = np.full((side, side, 3), 0.96)
    for line in range(first, side, side // 6):
        paper[line : line + 2] = (0.35, 0.5, 0.8)
    paper[:, side // 8 : side // 8 + wide] = (0.85, 0.3, 0.3)
    return paper


def ruled_with_a_margin(side: int, wide: int) -> Image.Image:
    """Ruled paper with a margin, and nothing written on it."""
    return painted(np.zeros((side, side)), (0, 0, 0), _ruled_with_a_margin(side, side // 12, wide))


def _graph_paper(mask: Mask, rng: np.random.Generator) -> Image.Image:
    """Squares in the colour of the ink, photographed by hand, so that nothing is level."""
    page = margins(mask, round(1.6 * mask.shape[0]), *rng.uniform(0.3, 0.7, size=2))
    lines = np.zeros((2 * len(page), 2 * len(page)))
    for line in range(int(rng.integers(30)), len(lines), 30):
        lines[line : line + 2] = lines[:, line : line + 2] = 1
    turned = Image.fromarray(lines.astype(np.float32)).rotate(rng.uniform(-6, 6), Image.Resampling.BILINEAR)
    start = len(page) // 2
    printed = np.asarray(turned)[start : start + len(page), start : start + len(page)]
    light = shading(page.shape, rng, 0.6, 0.95)
    seen = light * (1 - 0.8 * np.maximum(page, printed)) + rng.normal(0, 0.02, page.shape)
    return jpeg(grey(np.zeros(page.shape), 0, seen).filter(ImageFilter.GaussianBlur(0.7)), 75)


def _dusty(mask: Mask, rng: np.random.Generator) -> Image.Image:
    """A one-bit scan with specks of dust in both colours."""
    flips = rng.random(mask.shape) < 0.01
    return Image.fromarray(((mask < 0.5) ^ flips).astype(np.uint8) * 255).convert("1")


def _sixteen_bits(mask: Mask, rng: np.random.Generator) -> Image.Image:
    return Image.fromarray((40_000 - 30_000 * mask).astype(np.uint16))


def _few_bits(mask: Mask, rng: np.random.Generator) -> Image.Image:
    """As from instruments of twelve bits or fewer: all levels lie in the lowest tenth of the range."""
    return Image.fromarray((3_500 - 2_000 * mask + rng.normal(0, 20, mask.shape)).astype(np.uint16))


def _desk(mask: Mask, rng: np.random.Generator) -> Image.Image:
    """White paper that lies aslant on darker wood."""
    page = rng.uniform(0.8, 0.97) * (1 - 0.8 * margins(mask, round(1.25 * mask.shape[0]), *rng.uniform(0.2, 0.8, size=2)))
    side = 2 * mask.shape[0]
    y, x = rng.integers(side // 12, side // 3.5, size=2)
    paper = np.full((side, side), -1.0, np.float32)  # -1: none
    paper[y : y + len(page), x : x + len(page)] = page
    paper = np.asarray(Image.fromarray(paper).rotate(rng.uniform(-15, 15), Image.Resampling.BILINEAR, fillcolor=-1.0))
    wood = rng.uniform(0.15, 0.6) + rng.normal(0, 0.03, (side, 1)) + rng.normal(0, 0.02, paper.shape)
    levels = np.where(paper >= 0, paper, wood) * shading(paper.shape, rng, 0.75, 1.0) + rng.normal(0, 0.015, paper.shape)
    tint = np.where((paper >= 0)[..., None], (1, 0.98, 0.94), (1, 0.8, 0.6))
    tinted = Image.fromarray((np.clip(levels[..., None] * tint, 0, 1) * 255).astype(np.uint8))
    return jpeg(tinted.filter(ImageFilter.GaussianBlur(1)), 75)


def _lying(paper: Colour, table: Colour, ink: Colour) -> Style:
    """A sheet that lies aslant on a table of another colour."""

    def picture(mask: Mask, rng: np.random.Generator) -> Image.Image:
        page = margins(mask, round(1.25 * mask.shape[0]), *rng.uniform(0.2, 0.8, size=2))
        side, turn = 2 * mask.shape[0], rng.uniform(-12, 12)
        y, x = rng.integers(side // 12, side // 3.5, size=2)
        levels = np.full((side, side, 3), table)
        for covered, colour in ((np.ones_like(page), paper), (page, ink)):
            laid = np.zeros((side, side), np.float32)
            laid[y : y + len(page), x : x + len(page)] = covered
            laid = np.asarray(Image.fromarray(laid).rotate(turn, Image.Resampling.BILINEAR))
            levels += laid[..., None] * (np.array(colour) - levels)
        levels = levels * shading((side, side), rng, 0.85, 1.0)[..., None] + rng.normal(0, 0.012, (side, side, 1))
        shown = Image.fromarray((np.clip(levels, 0, 1) * 255).astype(np.uint8))
        return jpeg(shown.filter(ImageFilter.GaussianBlur(1)), 75)

    return picture


def _dark_edges(mask: Mask, rng: np.random.Generator) -> Image.Image:
    """A scan that shows some of the scanner's dark lid, on one side or more."""
    page = margins(mask, round(1.3 * mask.shape[0]), *rng.uniform(0.2, 0.8, size=2))
    levels = 0.93 * (1 - 0.85 * page) + rng.normal(0, 0.01, page.shape)
    wide = rng.integers(len(page) // 50, len(page) // 10, size=4) * (rng.random(4) < 0.7)
    wide[rng.integers(4)] = len(page) // 16
    top, right, bottom, left = wide
    lid = np.ones(page.shape, bool)
    lid[top : len(page) - bottom, left : len(page) - right] = False
    return Image.fromarray((np.clip(np.where(lid, 0.05, levels), 0, 1) * 255).astype(np.uint8))


def _corner(mask: Mask, rng: np.random.Generator) -> Image.Image:
    """The corner of a page that runs out of the picture on two sides; on the others there is a desk."""
    desk = [(int(wide), 0)[:: rng.choice([-1, 1])] for wide in rng.integers(len(mask) // 10, len(mask) // 3, size=2)]
    page = margins(mask, round(1.25 * len(mask)), *rng.uniform(0.2, 0.8, size=2))
    levels = np.pad(0.9 - 0.75 * page, desk, constant_values=rng.uniform(0.1, 0.4))
    return jpeg(grey(np.zeros(levels.shape), 0, levels + rng.normal(0, 0.015, levels.shape)), 80)


def _barred(mask: Mask, rng: np.random.Generator) -> Image.Image:
    """A picture of a page as a telephone shows it: black above and below."""
    page = margins(mask, round(1.25 * len(mask)), *rng.uniform(0.2, 0.8, size=2))
    levels = np.pad(0.9 - 0.8 * page, ((int(rng.integers(len(mask) // 5, len(mask))),) * 2, (0, 0)))
    return grey(np.zeros(levels.shape), 0, levels)


def _on_a_disc(disc: Colour, around: Colour, ink: Colour) -> Style:
    """A badge, a ball, a coaster."""

    def picture(mask: Mask, rng: np.random.Generator) -> Image.Image:
        written = np.pad(mask, round(rng.uniform(0.25, 0.5) * len(mask)))
        y, x = np.mgrid[-1 : 1 : len(written) * 1j, -1 : 1 : len(written) * 1j]
        covered = np.pad(np.clip((0.97 - np.hypot(x, y)) * len(written) / 2, 0, 1), len(written) // 8)
        levels = np.asarray(painted(covered, disc, around), np.float64) / 255
        return painted(np.pad(written, len(written) // 8), ink, levels)

    return picture


Lines = Callable[[ImageDraw.ImageDraw, float, float, np.random.Generator], None]


def _with_lines(draw: Lines, colour: Colour, turn: float = 0.0) -> Style:
    """`draw` puts lines, at twice the size, on a sheet twice as large as the writing; it gets the middle and that reach."""

    def picture(mask: Mask, rng: np.random.Generator) -> Image.Image:
        written = cropped(mask)
        reach = max(written.shape) / 2
        side = round(4 * reach)
        top, left = ((side - part) // 2 for part in written.shape)
        page = np.zeros((side, side))
        page[top : top + written.shape[0], left : left + written.shape[1]] = written
        canvas = Image.new("L", (2 * side, 2 * side))
        draw(ImageDraw.Draw(canvas), side, 2 * reach, rng)
        lines = np.asarray(canvas.resize((side, side), Image.Resampling.BOX), dtype=np.float64) / 255
        seen = np.asarray(painted(lines, colour, (0.95, 0.95, 0.93)), np.float64) / 255
        drawn = painted(page, (0.1, 0.1, 0.15), seen).rotate(
            turn * rng.uniform(-1, 1), Image.Resampling.BILINEAR, fillcolor=(242, 242, 237)
        )
        return jpeg(drawn, 85)

    return picture


def _box(draw: ImageDraw.ImageDraw, middle: float, reach: float, rng: np.random.Generator) -> None:
    """A box drawn by hand, with no corner where it ought to be."""
    corners = middle + (np.array([(-1, -1), (1, -1), (1, 1), (-1, 1)]) * 1.4 + rng.normal(0, 0.04, (4, 2))) * reach
    draw.line([tuple(corner) for corner in (*corners, corners[0])], fill=255, width=7)


def _cells(draw: ImageDraw.ImageDraw, middle: float, reach: float, rng: np.random.Generator) -> None:
    """Cells of a form, in a row that runs out of the picture."""
    for sign in (-1, 1):
        draw.line((0, middle + 1.3 * sign * reach, 2 * middle, middle + 1.3 * sign * reach), fill=255, width=5)
        draw.line(
            (middle + 1.3 * sign * reach, middle - 1.3 * reach, middle + 1.3 * sign * reach, middle + 1.3 * reach),
            fill=255,
            width=5,
        )


def _ring(draw: ImageDraw.ImageDraw, middle: float, reach: float, rng: np.random.Generator) -> None:
    """A teacher's ring, not quite closed."""
    reach, start = reach * rng.uniform(1.4, 1.6), rng.uniform(0, 360)
    draw.arc(
        (middle - reach, middle - 1.05 * reach, middle + reach, middle + 1.05 * reach), start, start + 350, fill=255, width=8
    )


def _underline(draw: ImageDraw.ImageDraw, middle: float, reach: float, rng: np.random.Generator) -> None:
    heights = middle + reach * rng.uniform(1.25, 1.4, size=2)
    draw.line((middle - 1.3 * reach, heights[0], middle + 1.3 * reach, heights[1]), fill=255, width=7)


def _on_a_line(gap: float, asked: str = "") -> Style:
    """A form's line for an answer: `gap` of the answer's height below it, or, if that is negative, through its feet."""

    def picture(mask: Mask, rng: np.random.Generator) -> Image.Image:
        written = cropped(mask)
        high, wide = written.shape
        bottom, begins, ends = round(1.6 * high), round(1.4 * high), round(3.4 * high)
        page = np.zeros((round(2.1 * high), round(3.5 * high)))
        top = bottom - round((1 + gap) * high)
        left = round(rng.uniform(begins + 0.15 * high, ends - wide - 0.15 * high))
        page[top : top + high, left : left + wide] = written
        canvas = Image.new("L", page.shape[::-1])
        draw = ImageDraw.Draw(canvas)
        draw.line((begins, bottom, ends, bottom), fill=255, width=max(2, high // 70))
        draw.text((0.1 * high, bottom), asked, fill=255, font=ImageFont.load_default(0.3 * high), anchor="ls")
        printed = np.asarray(canvas, dtype=np.float64) / 255
        return jpeg(painted(page, (0.1, 0.15, 0.4), np.asarray(painted(printed, (0.1, 0.1, 0.1), (0.97, 0.97, 0.95))) / 255), 85)

    return picture


STYLES: dict[str, Style] = {
    "black on white": lambda mask, rng: grey(mask, 0.0, 1.0),
    "white on black": lambda mask, rng: grey(mask, 1.0, 0.0),
    "pencil": lambda mask, rng: grey(mask, 0.62, 0.8),
    "blue on yellow": lambda mask, rng: painted(mask, (0.1, 0.2, 0.7), (0.98, 0.93, 0.4)),
    "red on green, equally bright": lambda mask, rng: painted(mask, (0.9, 0.2, 0.2), (0.2, 0.555, 0.2)),
    "chalk": lambda mask, rng: painted(
        mask * rng.uniform(0.6, 1.0, mask.shape), (0.95, 0.95, 0.9), rng.normal(0.2, 0.03, (*mask.shape, 1)) * [0.6, 1.2, 0.8]
    ),
    "gradient": lambda mask, rng: grey(mask, 0.1, shading(mask.shape, rng)),
    "shadow": _shadow,
    "photo": _photo,
    "noise": lambda mask, rng: grey(mask, 0.2, rng.normal(0.75, 0.08, mask.shape)),
    "jpeg": lambda mask, rng: jpeg(grey(mask, 0.1, 0.9), 15),
    "squared paper": _squared,
    "exercise book": _exercise_book,
    "graph paper": _graph_paper,
    "Seyès paper": _seyes,
    "dusty scan": _dusty,
    "black on transparent": lambda mask, rng: with_alpha(mask, (0, 0, 0)),
    "white on transparent": lambda mask, rng: with_alpha(mask, (1, 1, 1)),
    "red on transparent": lambda mask, rng: with_alpha(mask, (0.9, 0.1, 0.1)),
    "a highlighter's, on transparent": lambda mask, rng: with_alpha(0.4 * mask, (0.1, 0.4, 0.1)),
    "palette": lambda mask, rng: painted(mask, (0.6, 0.0, 0.4), (0.9, 0.95, 1.0)).quantize(16),
    "16 bits": _sixteen_bits,
    "16 bits, few of them used": _few_bits,
    "on a desk": _desk,
    "grey paper on a white table": _lying((0.67, 0.67, 0.67), (0.97, 0.97, 0.97), (0.1, 0.1, 0.1)),
    "kraft card on a white table": _lying((0.72, 0.55, 0.38), (0.95, 0.95, 0.95), (0.12, 0.1, 0.1)),
    "a yellow note on a white table": _lying((0.98, 0.9, 0.35), (0.97, 0.97, 0.97), (0.1, 0.1, 0.3)),
    "grey paper on black, written in white": _lying((0.6, 0.6, 0.6), (0.05, 0.05, 0.05), (0.95, 0.95, 0.95)),
    "dark edges": _dark_edges,
    "a corner of a page": _corner,
    "between black bars": _barred,
    "on a badge": _on_a_disc((0.78, 0.0, 0.0), (1.0, 1.0, 1.0), (1.0, 1.0, 1.0)),
    "on a coaster": _on_a_disc((0.94, 0.94, 0.92), (0.43, 0.31, 0.2), (0.08, 0.08, 0.24)),
    "in a box": _with_lines(_box, (0.1, 0.1, 0.15), turn=4),
    "in a form": _with_lines(_cells, (0.45, 0.45, 0.5), turn=2),
    "in a red ring": _with_lines(_ring, (0.85, 0.15, 0.15)),
    "underlined": _with_lines(_underline, (0.1, 0.1, 0.15), turn=3),
    "on a line": _on_a_line(-0.04),
    "close above a line": _on_a_line(0.05),
    "on a line behind a word": _on_a_line(-0.04, "Age:"),
    "above a line behind a word": _on_a_line(0.15, "Age:"),
    "far corner": lambda mask, rng: grey(margins(mask, 1000, 0.95, 0.9), 0.0, 1.0),
    "no margin": lambda mask, rng: grey(cropped(mask), 0.0, 1.0),
    "no margin, light on dark": lambda mask, rng: grey(cropped(mask), 0.9, 0.2),
    "huge": lambda mask, rng: grey(mask, 0.1, 0.95).resize((3000, 3000), Image.Resampling.BICUBIC),
    "28 pixels": lambda mask, rng: grey(scaled(mask, 28), 0.0, 1.0),
    "16 pixels": lambda mask, rng: grey(scaled(mask, 16), 1.0, 0.0),
    "wide banner": lambda mask, rng: grey(np.pad(mask, ((0, 0), (300, 500))), 0.0, 1.0),
}


def encoded(picture: Image.Image, form: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, form, **options)
    return buffer.getvalue()
