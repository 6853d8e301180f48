"""What a picture would be with nothing written on it, and how far it departs from that. Knows nothing about digits.

Four papers are tried, simplest first: one colour; a smooth surface, for lamps and vignettes; all that is as light as some of the
border, if light and dark alternate there, for the shadows of blinds and leaves; and whatever is left when everything narrow is
removed, for hard shadows. Printed rules count as paper too, and so do frames and a hand's shadow.
A paper is believed if nearly all of the picture's border looks like it, or if what does not may be ink.
"""

from __future__ import annotations

from dataclasses import replace
from operator import itemgetter

import numpy as np

from service.bundle import Array
from service.pictures.blots import Blots, Places, components, edge, extremes, grown, stroke_width
from service.pictures.frames import unframed
from service.pictures.levels import DIAGONAL, OFF, Departure, lightness, median, otsu, quantile
from service.pictures.lines import unlined
from service.pictures.rules import unruled
from service.pictures.surface import NEAR, Real, distance, drawn, fitted, terms

MOST = 0.75  # share of the border that a smooth surface must explain
CLEAN = 0.15  # share of the border: ink that touches it covers less
BLACK = 0.02  # of full scale: what is brighter may be paper in a shadow
NONE, SOME, GRAVE = range(3)  # doubt that this is the paper
HELD = 0.5  # of the ink's strength: if what lies inside is weaker, the ink is what is connected with the border
ONE_SIDED = 0.35  # of the ink's strength: where something departs further to the other side, this is not the paper
SHADE = 0.03  # of the picture: a smaller shadow does not matter
DARKER, WIDER = 1.7, 1.2  # times: ink is this much darker than a shadow, and a shadow this much wider than ink
LONGER = 2  # times the width of a shadow: some stroke of the ink is this long
STRIPES = 4  # changes from light to dark or back, around the picture: the edge of a single shadow makes two
NEARLY_ALL = 0.98  # of the border: the rest may be specks
BEYOND = 0.5  # of the difference between the border's lightest and darkest: ink is at least so far beyond them
NARROW = 1 / 3  # of the picture's longer side: strokes are narrower, shadows are not


def departure(colours: Array, alone: bool = True) -> Departure:
    """How far (h, w, 3 or 1) departs from the likeliest paper; if two digits are looked for, a 0 around a 1 is no frame."""
    border = _border(colours.shape[0], colours.shape[1])
    tried: list[tuple[int, Departure, Departure]] = []
    for attempt, acceptable in ((_flat, NONE), (_smooth, SOME), (_striped, SOME), (_narrow, GRAVE)):
        line = attempt(colours, border)
        if line is not None:
            rest = unruled(seen := Departure(line))
            board = attempt is _flat and _is_black(colours, line, border)
            tried.append((_doubt(rest, border, shaded=not board), seen, rest))
        if tried and min(doubt for doubt, _, _ in tried) <= acceptable:
            break
    _, seen, rest = min(tried, key=itemgetter(0))  # the simplest of those with the least doubt
    if not alone:
        return rest
    if rest is seen:  # no rules, of which the line could be one
        seen = rest = unlined(seen)
    framed = unframed(seen)
    if framed is not None and not seen.noisy and _is_left(framed, rest):
        return unruled(framed)
    return _unshaded(rest if rest is seen else unframed(rest) or rest)


def _is_left(framed: Departure, rest: Departure) -> bool:
    """Whether most of what is framed remains without rules: the rules of squared paper frame parts of each other."""
    inked = framed.line > framed.threshold
    return bool(np.count_nonzero(rest.line[inked] > rest.threshold / 2) > np.count_nonzero(inked) / 2)


def _is_black(colours: Array, line: Array, border: Places) -> bool:
    """Whether this paper is black along the border: some light falls into every shadow, so it was drawn on a screen."""
    paper = border[abs(line.ravel()[border]) < NEAR]
    return bool(paper.size) and median(lightness(colours.reshape(-1, 1, colours.shape[2])[paper])) < BLACK


def _doubt(departing: Departure, border: Places, shaded: bool) -> int:
    """How much speaks against a paper: from the right one, ink departs to one side only, as dark at the border as elsewhere.

    A shadow is not like that: against the paper in the light it is an even grey along the border, paler than ink; against the
    paper in the dark, light and ink depart in opposite directions. Blurred ink is pale too, but not even; even ink is told
    from a shadow only if nothing is `shaded`.
    """
    if not departing.written:
        return NONE
    full = departing.strength
    if -quantile(departing.levels, 0.01) > ONE_SIDED * full:
        return GRAVE
    rim = departing.line.ravel()[border]
    off = rim[rim > OFF * full]
    if off.size < CLEAN * rim.size:
        return NONE
    off = np.sort(off)
    lower, middle, upper = (quantile(off, part) for part in (0.25, 0.5, 0.75))
    return SOME if middle > 0.8 * full or upper - lower > 0.25 * full or not shaded else GRAVE


def _unshaded(departing: Departure) -> Departure:
    """Without the shadow of a hand, which is paler and wider than the ink and, unlike the ink, cut by the border."""
    line, few = departing.line, departing.line.size * SHADE
    dark = line > departing.threshold
    if not departing.written or np.count_nonzero(dark) < few or not edge(dark).any():
        return departing
    ink = line > otsu(np.sort(np.minimum(line[dark], departing.strength)))
    shade = dark & ~ink
    if not ink.any() or not shade.any() or edge(ink).any():
        return departing
    level, wide = line[shade].mean(), stroke_width(shade & ~grown(ink))
    if line[ink].mean() < DARKER * level or wide < WIDER * stroke_width(ink):
        return departing
    if Blots.of(components(ink)).longest < LONGER * wide:  # this is where a pale pen rested, or a broken outline
        return departing
    return replace(departing, line=np.maximum(line - level, 0))


def _border(height: int, width: int) -> Places:
    """The pixels along the four sides, as indices into the flattened picture."""
    rim = max(1, max(height, width) // 40)
    border = np.ones((height, width), bool)
    border[rim:-rim, rim:-rim] = False
    return np.flatnonzero(border)


def _flat(colours: Array, border: Places) -> Array | None:
    """The departure from the corner or border colour that most of the border and corners share."""
    rim = colours.reshape(-1, colours.shape[2])[border]
    size = max(1, max(colours.shape[:2]) // 16)
    corners = [
        colours[y, x].reshape(-1, colours.shape[2])
        for y in (slice(size), slice(-size, None))
        for x in (slice(size), slice(-size, None))
    ]
    # On a clean sheet they are all the same, and need be looked at only once.
    candidates = [np.array(colour) for colour in dict.fromkeys(tuple(_middle(part)) for part in (*corners, rim))]
    every = np.concatenate(corners)

    def share(paper: Array) -> float:
        of_rim = distance(rim, paper) < NEAR
        of_corners = distance(every, paper) < NEAR
        return float(of_rim.mean() + of_corners.mean()) / 2

    shares = [share(candidate) for candidate in candidates]
    best = candidates[int(np.argmax(shares))]
    if max(shares) < 0.4:
        return None
    near = distance(rim, best) < NEAR
    return _towards_ink(colours - rim[near].mean(axis=0))


def _smooth(colours: Array, border: Places) -> Array | None:
    """The departure from a quadratic surface through the border, then through the pixels near it all over the picture."""
    height, width, channels = colours.shape
    y, x = np.linspace(-1, 1, height), np.linspace(-1, 1, width)
    rim = colours.reshape(-1, channels)[border]
    step = max(1, max(height, width) // 48)
    some = colours[::step, ::step].reshape(-1, channels).astype(np.float64)
    surface: Real = np.zeros((6, channels))
    surface[0] = _middle(rim)
    surface = fitted(surface, terms(y[border // width], x[border % width]), rim.astype(np.float64))
    grid = np.meshgrid(y[::step], x[::step], indexing="ij")
    surface = fitted(surface, terms(*map(np.ravel, grid)), some)
    paper = drawn(surface, y, x)
    off = distance(rim, paper.reshape(-1, channels)[border])
    lit = _lamp(lightness(paper))[..., None]
    return _towards_ink((colours - paper) / lit) if (off < NEAR).mean() > MOST else None


def _middle(colours: Array) -> Array:
    """The median of each channel of (n, channels)."""
    return np.array([median(channel) for channel in colours.T], np.float32)


def _towards_ink(rest: Array) -> Array:
    """(h, w, 3 or 1) -> (h, w): along the line on which most of it lies, positive in the direction in which most of it goes."""
    flat = rest.reshape(-1, rest.shape[2])
    line = flat[:, 0]
    if rest.shape[2] > 1:
        _, directions = np.linalg.eigh((flat.T @ flat).astype(np.float64))
        line = flat @ directions[:, -1].astype(np.float32)
    towards: Array = line.reshape(rest.shape[:2]) * np.float32(1 if (line * line * line).sum() > 0 else -1)
    return towards


def _striped(colours: Array, border: Places) -> Array | None:
    """What is darker, or lighter, than a border along which light and dark alternate: ink in the shadows of blinds, chalk over
    what a sponge left. None if neither is far beyond the border, or both are."""
    around = np.concatenate([colours[0], colours[:, -1], colours[-1, ::-1], colours[::-1, 0]])
    if not _alternate(lightness(around[None])[0]):
        return None
    found = []
    for sign, choose in ((-1, np.minimum), (1, np.maximum)):  # ink is dark in some channel, chalk light in some
        low, high = _extent(sign * choose.reduce(around, axis=1))
        beyond = Departure((sign * choose.reduce(colours, axis=2) - high).clip(0))
        if beyond.written and beyond.strength > BEYOND * (high - low):
            found.append(beyond.line)
    return found[0] if len(found) == 1 else None


def _alternate(around: Array) -> bool:
    """Whether it goes from light to dark and back several times, and neither is so little that it may be ink."""
    low, high = _extent(around)
    off = around - (low + high) / 2
    above = off[abs(off) > (high - low) / 4] > 0  # without a stripe's soft edges, where noise alternates too
    return bool(np.count_nonzero(above[1:] != above[:-1]) >= STRIPES and CLEAN < above.mean() < 1 - CLEAN)


def _extent(values: Array) -> tuple[float, float]:
    levels = np.sort(values)
    return quantile(levels, 1 - NEARLY_ALL), quantile(levels, NEARLY_ALL)


def _narrow(colours: Array, border: Places) -> Array:
    """What is narrow and dark, or what is narrow and light (morphology's top-hats)."""
    light = lightness(colours)
    reach = max(1, round(max(light.shape) * NARROW / 2))
    shaded, lit = -_opened(-light, reach), _opened(light, reach)
    dark, bright = (
        _inside(unruled(Departure(departing * np.float32(DIAGONAL))))
        for departing in ((shaded - light) / _lamp(shaded), (light - lit) / _lamp(lit))
    )
    # Holes and bays of a digit are narrow too, so both may lie inside; dark is preferred, for hard shadows fall on paper more
    # often than on boards.
    on_rim_of_dark, on_rim_of_bright = (
        float((line.ravel()[border] ** 3).mean() / max((line**3).mean(), 1e-9)) for line in (dark, bright)
    )
    chosen: Array = dark if on_rim_of_dark < max(0.5, on_rim_of_bright) else bright
    return chosen


def _inside(departing: Departure) -> Array:
    """Without what is connected with the border, unless that is the ink: the corner of a shadow is narrow too."""
    line = departing.line
    blots = components(line > OFF * departing.strength)
    outward = np.zeros(int(blots.max()) + 1, bool)
    outward[edge(blots)] = True
    outward[0] = False
    inside: Array = np.where(outward[blots], 0, line)
    return inside if Departure(inside).strength > HELD * departing.strength else line


def _lamp(light: Array) -> Array:
    """How strongly each place is lit, 1 where most: in the dark, ink departs less from the paper than in the light."""
    lamp: Array = (light + 0.2) / (light.max() + 0.2)
    return lamp


def _opened(values: Array, reach: int) -> Array:
    """What remains when everything bright and narrower than the reach to both sides is removed."""
    return _widest(-_widest(-values, reach), reach)


def _widest(values: Array, reach: int) -> Array:
    """The largest within `reach` pixels, down and across."""
    for _ in range(2):
        padded = np.pad(values, [(reach, reach), (0, 0)], mode="edge")
        values = extremes(padded, 2 * reach + 1, np.maximum).T
    return values
