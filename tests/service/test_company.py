"""Pictures that show more than the digit: what is beside it is left out, and is not read as a digit."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from service import images
from service.bundle import Array
from service.engine import CapsNet
from service.pictures.blots import components
from service.pictures.company import meant
from service.verdict import Judge
from tests import drawings

SHAPE = (1, 28, 28)
DIGITS = "0123456789"
FONT = ImageFont.load_default

Scene = Callable[[str], Image.Image]


def mask(digit: str, side: int = 240) -> Image.Image:
    """A digit written with a pen, white on black."""
    made = drawings.written(digit, np.random.default_rng(zlib.crc32(digit.encode())))
    return Image.fromarray((made * 255).astype(np.uint8)).resize((side, side))


def on_a_phone(digit: str) -> Image.Image:
    """A screenshot: the time, the buttons' texts, colours to choose from, the bar to swipe on."""
    picture = Image.new("RGB", (585, 1266), "white")
    draw = ImageDraw.Draw(picture)
    draw.text((50, 18), "9:41", fill="black", font=FONT(24))
    draw.text((20, 70), "< Notes", fill=(210, 150, 0), font=FONT(26))
    draw.text((505, 70), "Done", fill=(210, 150, 0), font=FONT(26))
    for place, colour in enumerate(["black", "red", "blue", "green"]):
        draw.ellipse((60 + place * 130, 1120, 120 + place * 130, 1180), fill=colour)
    draw.rectangle((190, 1250, 395, 1257), fill="black")
    picture.paste((20, 20, 20), (110, 380), mask(digit, 360))
    return picture


def in_a_window(digit: str) -> Image.Image:
    picture = Image.new("RGB", (1000, 640), (245, 246, 247))
    draw = ImageDraw.Draw(picture)
    draw.rectangle((0, 0, 1000, 30), fill="white")
    draw.text((10, 7), "Untitled - Paint", fill="black", font=FONT(14))
    draw.text((10, 40), "File   Home   View", fill="black", font=FONT(14))
    for place in range(14):
        draw.rectangle((420 + place * 24, 65, 438 + place * 24, 83), fill=(18 * place, 250 - 18 * place, 128), outline="grey")
    draw.rectangle((8, 130, 808, 600), fill="white")
    draw.text((10, 615), "800 x 470px      100%", fill="black", font=FONT(12))
    picture.paste((0, 0, 0), (250, 200), mask(digit))
    return picture


def on_a_web_page(digit: str) -> Image.Image:
    picture = Image.new("RGB", (600, 700), "white")
    draw = ImageDraw.Draw(picture)
    draw.text((300, 50), "Draw a digit", fill=(30, 30, 30), anchor="mm", font=FONT(34))
    draw.rectangle((148, 108, 452, 412), outline=(60, 60, 60), width=2)
    for left, text, colour in ((150, "Clear", (220, 53, 69)), (310, "Predict", (0, 123, 255))):
        draw.rounded_rectangle((left, 440, left + 140, 490), 8, fill=colour)
        draw.text((left + 70, 465), text, fill="white", anchor="mm", font=FONT(22))
    picture.paste((0, 0, 0), (180, 140), mask(digit))
    return picture


def below_a_question(digit: str) -> Image.Image:
    picture = Image.new("L", (420, 520), 250)
    draw = ImageDraw.Draw(picture)
    draw.text((15, 15), "Name: Ada    Class 2b", fill=20, font=FONT(18))
    draw.text((15, 55), "3) How many apples are there?", fill=20, font=FONT(18))
    draw.text((15, 490), "page 4", fill=20, font=FONT(18))
    picture.paste(25, (90, 150), mask(digit))
    return picture


def behind_a_word(digit: str) -> Image.Image:
    picture = Image.new("L", (520, 200), 250)
    ImageDraw.Draw(picture).text((30, 95), "Answer:", fill=20, font=FONT(40))
    picture.paste(10, (300, 40), mask(digit, 120))
    return picture


def cut_out_of_a_row(digit: str) -> Image.Image:
    """Cut out of a line of digits, with parts of both neighbours."""
    picture = Image.new("L", (300, 260), 245)
    for left, each in ((-150, "8"), (220, "3")):
        picture.paste(30, (left, 10), mask(each))
    picture.paste(30, (30, 10), mask(digit))
    return picture


def beside_punched_holes(digit: str) -> Image.Image:
    picture = Image.new("L", (420, 420), 240)
    draw = ImageDraw.Draw(picture)
    for top in (50, 195, 340):
        draw.ellipse((8, top, 38, top + 30), fill=60)
    picture.paste(30, (130, 90), mask(digit))
    return picture


def beside_a_desk(digit: str) -> Image.Image:
    picture = Image.new("L", (400, 300), 240)
    picture.paste(30, (130, 30), mask(digit))
    ImageDraw.Draw(picture).polygon([(0, 0), (60, 0), (45, 299), (0, 299)], fill=90)
    return picture


def on_a_turned_page(digit: str) -> Image.Image:
    page = Image.new("RGB", (300, 300), (247, 247, 242))
    page.paste((25, 25, 40), (30, 30), mask(digit))
    turned = page.convert("RGBA").rotate(42, Image.Resampling.BILINEAR, expand=True)
    picture = Image.new("RGB", (turned.width + 120, turned.height + 100), (110, 80, 60))
    picture.paste(turned, (60, 40), turned)
    return picture


def dithered(digit: str) -> Image.Image:
    """Grey paper, dithered to black and white."""
    picture = Image.new("L", (312, 312), 150)
    picture.paste(20, (36, 36), mask(digit))
    return picture.convert("1")


def in_a_fingers_shadow(digit: str) -> Image.Image:
    light = Image.new("L", (384, 384), 255)
    ImageDraw.Draw(light).line((120, 384, 220, 170), fill=150, width=80)
    lit = np.asarray(light.filter(ImageFilter.GaussianBlur(8))) / 255
    written = np.asarray(mask(digit)) / 255
    return drawings.grey(np.pad(written, 72), 0.1, 0.9 * lit)


def on_a_ball(digit: str) -> Image.Image:
    """Dark on a white disc, which lies on a blue disc, on green cloth."""
    picture = Image.new("RGB", (400, 400), (20, 90, 50))
    draw = ImageDraw.Draw(picture)
    draw.ellipse((30, 30, 370, 370), fill=(20, 60, 160))
    draw.ellipse((110, 110, 290, 290), fill=(245, 245, 235))
    picture.paste((15, 15, 15), (145, 145), mask(digit).resize((110, 110)))
    return picture.filter(ImageFilter.GaussianBlur(1))


def by_a_pale_pen_that_left_dark_dots(digit: str) -> Image.Image:
    """Cut close at the bottom; the pen left darker dots where it rested, and the pale stroke is not their shadow."""
    written = drawings.cropped(np.asarray(mask(digit)) / 255)
    picture = Image.fromarray(np.uint8(240 - 110 * np.pad(written, ((40, 0), (60, 60)))))
    draw, (rows, columns) = ImageDraw.Draw(picture), np.nonzero(written > 0.9)
    for place in (0, len(rows) // 2, len(rows) // 3):
        x, y = int(columns[place]) + 60, int(rows[place]) + 40
        draw.ellipse((x - 8, y - 8, x + 8, y + 8), fill=30)
    return picture


SCENES: list[Scene] = [
    on_a_phone, in_a_window, on_a_web_page, below_a_question, behind_a_word, cut_out_of_a_row, beside_punched_holes,
    beside_a_desk, on_a_turned_page, dithered, in_a_fingers_shadow, by_a_pale_pen_that_left_dark_dots, on_a_ball,
]  # fmt: skip


def prepared(pictures: list[Image.Image]) -> Array:
    return np.stack([images.prepare(picture, SHAPE, normalise=True) for picture in pictures])


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_a_digit_is_read_despite_its_surroundings(compact: CapsNet, scene: Scene) -> None:
    seen = compact.perceive(prepared([scene(digit) for digit in DIGITS]), np.ones(10, bool))
    assert (seen.lengths.argmax(axis=1) == np.arange(10)).sum() >= 9
    assert Judge(compact.manifest).verdicts(seen).count("not_a_digit") <= 1


def a_desk(side: int, width: int) -> Image.Image:
    """An empty page with a dark desk along one side."""
    picture = Image.new("L", (300, 300), 240)
    ImageDraw.Draw(picture).polygon([(0, 0), (width, 0), (width + 12, 299), (0, 299)], fill=90)
    return picture.rotate(90 * side)


def a_lamp(across: float, down: float) -> Image.Image:
    """A lamp's reflection on an empty whiteboard."""
    y, x = np.mgrid[0:240, 0:240] / 240
    shine = np.exp(-1.5 * (((x - across) / 0.12) ** 2 + ((y - down) / 0.2) ** 2))
    return drawings.grey(np.zeros((240, 240)), 0.0, np.clip(0.8 + 0.7 * shine, 0, 1))


def a_dot(radius: int, length: float) -> Image.Image:
    """A dot `length` times as high as it is wide: a pen's tap, a bullet, the end of a sentence."""
    picture = Image.new("L", (280, 280), 255)
    reach = round(radius * length)
    ImageDraw.Draw(picture).ellipse((140 - radius, 140 - reach, 140 + radius, 140 + reach), fill=0)
    return picture


EMPTY = {
    "a desk": lambda: [a_desk(side, width) for side in range(4) for width in (20, 40, 60, 120)],
    "halves": lambda: [Image.fromarray(np.where(np.arange(240) < part, 0, 255).astype(np.uint8)[None].repeat(240, 0))
                       for part in (20, 60, 120, 180, 220)],
    "a lamp": lambda: [a_lamp(across, down) for across in (0.2, 0.5, 0.8) for down in (0.3, 0.5, 0.7)],
    "a dot": lambda: [a_dot(radius, length) for radius in (6, 10, 20, 60) for length in (1, 1.2, 1.35)],
}  # fmt: skip


@pytest.mark.parametrize("pictures", EMPTY.values(), ids=EMPTY)
def test_pictures_without_writing_are_judged_not_a_digit(compact: CapsNet, pictures: Callable[[], list[Image.Image]]) -> None:
    made = prepared(pictures())
    seen = compact.perceive(made, np.ones(len(made), bool))
    assert set(Judge(compact.manifest).verdicts(seen)) == {"not_a_digit"}


def blots(*boxes: tuple[int, int, int, int]) -> Array:
    """Fills boxes in a picture of 100 by 100; each is given as its rows and columns."""
    drawn = np.zeros((100, 100), bool)
    for top, bottom, left, right in boxes:
        drawn[top:bottom, left:right] = True
    return drawn


DIGIT = (30, 70, 40, 60)


@pytest.mark.parametrize(
    ("others", "kept"),
    [
        pytest.param([(5, 10, 10, 80)], [], id="a word above"),
        pytest.param([(25, 28, 40, 60)], [(25, 28, 40, 60)], id="a bar that came off"),
        pytest.param([(30, 70, 75, 95)], [(30, 70, 75, 95)], id="another digit"),
        pytest.param([(30, 70, 75, 95), (5, 10, 10, 80)], [(30, 70, 75, 95), (5, 10, 10, 80)], id="another digit, and a word"),
        pytest.param([(20, 90, 85, 100)], [], id="a neighbour cut by the border"),
        pytest.param([(25, 100, 62, 68)], [(25, 100, 62, 68)], id="a 4's stem that runs off the picture, near its other stroke"),
        pytest.param([(0, 100, 0, 15)], [], id="a desk"),
        pytest.param([(0, 100, 0, 15), (50, 60, 15, 25)], [], id="what lies at the edge of a desk"),
        pytest.param([(20, 70, 15, 16), (20, 30, 0, 13)], [(20, 70, 15, 16)], id="a line, and what the border cuts beside it"),
    ],
)
def test_the_tallest_whole_part_and_what_is_near_it_are_kept(
    others: list[tuple[int, int, int, int]], kept: list[tuple[int, int, int, int]]
) -> None:
    found = meant(components(blots(DIGIT, *others))) > 0
    np.testing.assert_array_equal(found, blots(DIGIT, *kept))


def test_nothing_is_removed_when_the_border_cuts_the_digit() -> None:
    """A closely cut 7 with its bar apart from its stem; or one with something low and far off, since the 7 may not be whole."""
    for seven in (blots((0, 12, 5, 100), (20, 100, 50, 62)), blots((20, 80, 0, 30), (5, 12, 80, 90))):
        np.testing.assert_array_equal(meant(components(seven)) > 0, seven)


def test_a_few_specks_are_removed_but_a_texture_is_kept() -> None:
    few, many = ([(row, row + 2, left, left + 2) for row in range(1, 16, 3) for left in range(1, 97, step)] for step in (6, 3))
    np.testing.assert_array_equal(meant(components(blots(DIGIT, *few))) > 0, blots(DIGIT))
    np.testing.assert_array_equal(meant(components(blots(DIGIT, *many))) > 0, blots(DIGIT, *many))
