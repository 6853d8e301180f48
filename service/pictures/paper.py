"""What a picture would be with nothing written on it, and how far it departs from that. Knows no digits.

Three papers are tried, simplest first: one colour; a smooth surface, for lamps and vignettes; and whatever is left when
all that is narrow is taken away, for hard shadows. A paper is believed if nearly all of the picture's border looks like it,
or else if what does not may be ink.
"""

from __future__ import annotations

from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from service.bundle import Array
from service.pictures.blots import FAINTEST, components, edge, extremes, grain, strength

Real = NDArray[np.float64]

NEAR = 0.08  # distance in a colour cube of side 1 that still counts as the same paper
MOST = 0.75  # share of the border that a smooth surface must explain
OFF = 0.2  # of the ink's strength: what departs by more is not paper
CLEAN = 0.15  # share of the border: ink that touches it covers less
NONE, SOME, GRAVE = range(3)  # doubt that this is the paper
ONE_SIDED = 0.35  # of the ink's strength: what departs to the other side by more is not paper
NARROW = 1 / 3  # of the picture's longer side: strokes are narrower, shadows are not


def departure(colours: Array) -> Array:
    """(h, w, 3 or 1) -> (h, w): the distance of each pixel from the paper, along the line through colour space to the ink."""
    border = _rim(colours.shape[0], colours.shape[1])
    tried: list[tuple[int, Array]] = []
    for attempt, acceptable in ((_flat, NONE), (_smooth, SOME), (_narrow, GRAVE)):
        line = attempt(colours, border)
        if line is not None:
            tried.append((_doubt(line, border), line))
        if tried and min(doubt for doubt, _ in tried) <= acceptable:
            break
    return min(tried, key=itemgetter(0))[1]  # the simplest of those with the least doubt


def _doubt(line: Array, border: NDArray[np.bool_]) -> int:
    """Ink departs from its paper to one side, and where it touches the border it is as dark there as elsewhere.

    A shadow fails: against the paper in the light it is an even grey along the border, paler than ink; against the paper in
    the dark, light and ink go opposite ways. Only blurred ink is pale too, and it is not even.
    """
    full = strength(line)
    if full < FAINTEST or full < 5 * grain(line):
        return NONE  # nothing is written at all
    if -float(np.percentile(line, 1)) > ONE_SIDED * full:
        return GRAVE
    rim = line[border]
    off = rim[rim > OFF * full]
    if off.size < CLEAN * rim.size:
        return NONE
    lower, middle, upper = np.percentile(off, (25, 50, 75))
    return SOME if middle > 0.8 * full or upper - lower > 0.25 * full else GRAVE


def _rim(height: int, width: int) -> NDArray[np.bool_]:
    rim = max(1, max(height, width) // 40)
    border = np.ones((height, width), bool)
    border[rim:-rim, rim:-rim] = False
    return border


def _flat(colours: Array, border: NDArray[np.bool_]) -> Array | None:
    """The corner or border colour that most of the border and corners share."""
    rim = colours[border]
    size = max(1, max(colours.shape[:2]) // 16)
    corners = [
        colours[y, x].reshape(-1, colours.shape[2])
        for y in (slice(size), slice(-size, None))
        for x in (slice(size), slice(-size, None))
    ]
    candidates = [np.median(part, axis=0) for part in (*corners, rim)]
    every = np.concatenate(corners)

    def share(paper: Array) -> float:
        of_rim = np.linalg.norm(rim - paper, axis=1) < NEAR
        of_corners = np.linalg.norm(every - paper, axis=1) < NEAR
        return float(of_rim.mean() + of_corners.mean()) / 2

    shares = [share(candidate) for candidate in candidates]
    best = candidates[int(np.argmax(shares))]
    if max(shares) < 0.4:
        return None
    near = np.linalg.norm(rim - best, axis=1) < NEAR
    return _towards_ink(colours - rim[near].mean(axis=0))


def _smooth(colours: Array, border: NDArray[np.bool_]) -> Array | None:
    """A quadratic surface through the border, then through every pixel near it."""
    height, width, _ = colours.shape
    y, x = np.meshgrid(np.linspace(-1, 1, height), np.linspace(-1, 1, width), indexing="ij")
    terms = np.stack([np.ones_like(x), x, y, x * y, x * x, y * y], axis=-1)
    step = max(1, max(height, width) // 48)
    surface = np.zeros((6, colours.shape[2]))
    surface[0] = np.median(colours[border], axis=0)
    surface = _fitted(surface, terms[border], colours[border].astype(np.float64))
    surface = _fitted(
        surface, terms[::step, ::step].reshape(-1, 6), colours[::step, ::step].reshape(-1, colours.shape[2]).astype(np.float64)
    )
    paper = (terms @ surface).astype(np.float32)
    off = np.linalg.norm(colours[border] - paper[border], axis=1)
    lit = _lamp(paper.mean(axis=2))[..., None]
    return _towards_ink((colours - paper) / lit) if (off < NEAR).mean() > MOST else None


def _towards_ink(rest: Array) -> Array:
    """(h, w, 3 or 1) -> (h, w): along the line on which most of the departing happens, which way most of it goes."""
    flat = rest.reshape(-1, rest.shape[2])
    line = flat[:, 0]
    if rest.shape[2] > 1:
        _, directions = np.linalg.eigh((flat.T @ flat).astype(np.float64))
        line = flat @ directions[:, -1].astype(np.float32)
    towards: Array = line.reshape(rest.shape[:2]) * np.float32(1 if (line * line * line).sum() > 0 else -1)
    return towards


def _fitted(surface: Real, terms: Real, colours: Real) -> Real:
    """Least squares, again and again without what lies far off."""
    for _ in range(4):
        distance = np.linalg.norm(colours - terms @ surface, axis=1)
        near = distance <= max(NEAR / 2, 2.5 * float(np.median(distance)))
        weighted = terms[near]
        # A little of the flat surface, where the pixels at hand leave the slope open.
        normal = weighted.T @ weighted + np.diag([0, 1, 1, 1, 1, 1]) * 1e-3 * len(weighted)
        surface = np.linalg.solve(normal, weighted.T @ colours[near])
    return surface


def _narrow(colours: Array, border: NDArray[np.bool_]) -> Array:
    """What is narrow and dark, or what is narrow and light (morphology's top-hats)."""
    light = colours.mean(axis=2)
    reach = max(1, round(max(light.shape) * NARROW / 2))
    shaded, lit = -_opened(-light, reach), _opened(light, reach)
    dark, bright = _inside((shaded - light) / _lamp(shaded)), _inside((light - lit) / _lamp(lit))
    # Holes and bays of a digit are narrow too, so that both lie inside: but hard shadows fall on paper more than on boards.
    on_rim_of_dark, on_rim_of_bright = (
        float((line[border] ** 3).mean() / max((line**3).mean(), 1e-9)) for line in (dark, bright)
    )
    chosen: Array = dark if on_rim_of_dark < max(0.5, on_rim_of_bright) else bright
    return chosen


def _inside(line: Array) -> Array:
    """Without what hangs together with the border, where anything does not: the corner of a shadow is narrow too."""
    blots = components(line > OFF * strength(line))
    inside = ~np.isin(blots, edge(blots)) | (blots == 0)
    return np.where(inside, line, 0) if (blots[inside] > 0).any() else line


def _lamp(light: Array) -> Array:
    """How strongly each place is lit, 1 where most: in the dark, ink departs less from the paper than in the light."""
    lamp: Array = (light + 0.2) / (light.max() + 0.2)
    return lamp


def _opened(values: Array, reach: int) -> Array:
    """What remains when all that is bright and narrower than the reach both ways is taken away."""
    return _widest(-_widest(-values, reach), reach)


def _widest(values: Array, reach: int) -> Array:
    """The largest within `reach` pixels, down and across."""
    for _ in range(2):
        padded = np.pad(values, [(reach, reach), (0, 0)], mode="edge")
        values = extremes(padded, 2 * reach + 1, np.maximum).T
    return values
