"""The slate under mouse, finger, palm and pen, with undo and what outlives the page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.playground.conftest import PHONE, OpenPage
from tests.playground.hand import ONE, SEVEN, Stroke, draw, image, wait_for_verdict
from tests.service.conftest import drawn, encoded


class Hand:
    """Fingers, palm and pen on a tablet; places are given in parts of the slate's side."""

    def __init__(self, page: Page) -> None:
        page.locator("#slate").scroll_into_view_if_needed()
        box = page.locator("#drawing").bounding_box()
        assert box is not None
        self.box, self.session = box, page.context.new_cdp_session(page)

    def touch(self, kind: str, *places: tuple[float, float]) -> None:
        """Sends a touchStart, touchMove, touchEnd or touchCancel."""
        self.session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": [self._at(*place) for place in places]})

    def write(self, stroke: Stroke) -> None:
        """Draws with a pen, from touching the slate to leaving it."""
        self._pen("mousePressed", stroke[0])
        for place in stroke[1:]:
            self._pen("mouseMoved", place)
        self._pen("mouseReleased", stroke[-1])

    def _pen(self, kind: str, place: tuple[float, float]) -> None:
        how = {"button": "left", "buttons": 1, "clickCount": 1, "pointerType": "pen"}
        self.session.send("Input.dispatchMouseEvent", {"type": kind, **self._at(*place), **how})

    def _at(self, x: float, y: float) -> dict[str, float]:
        return {"x": self.box["x"] + x * self.box["width"], "y": self.box["y"] + y * self.box["height"]}


def expect_on_the_slate(page: Page, what: str) -> None:
    expect(page.locator("#drawing")).to_have_attribute("aria-label", f"Your drawing: {what}")


@pytest.fixture
def tablet(open_page: OpenPage) -> Page:
    return open_page(**PHONE)


def test_undo_and_clear(with_seven: Page) -> None:
    page = with_seven
    seven = image(page, "drawing")
    draw(page, [[(0.2, 0.9), (0.8, 0.9)]])
    assert image(page, "drawing") != seven
    page.keyboard.press("Control+z")
    assert image(page, "drawing") == seven
    draw(page, [[(0.2, 0.9), (0.8, 0.9)]])
    page.evaluate(
        "() => document.body.dispatchEvent(new KeyboardEvent('keydown', {key: 'я', code: 'KeyZ', ctrlKey: true, bubbles: true}))"
    )
    assert image(page, "drawing") == seven  # the same key where letters are Cyrillic
    page.evaluate(
        "() => document.body.dispatchEvent(new KeyboardEvent('keydown', {key: ';', code: 'KeyZ', ctrlKey: true, bubbles: true}))"
    )
    assert image(page, "drawing") == seven  # another key on a Dvorak keyboard
    page.click("#clear")
    expect(page.locator("#verdict")).to_have_text("Nothing yet")
    expect(page.locator("#invitation")).to_be_visible()
    page.click("#undo")  # clearing can be undone
    assert image(page, "drawing") == seven
    wait_for_verdict(page, "7")


def test_undo_remembers_at_most_five_pictures(page: Page, tmp_path: Path) -> None:
    for number in range(6):
        photo = tmp_path / f"{number}.png"
        photo.write_bytes(encoded(drawn("7")))
        page.set_input_files("#file", photo)
        expect_on_the_slate(page, f"the picture {number}.png")
        draw(page, ONE)
    undone = 0
    while page.locator("#undo").is_enabled():
        page.click("#undo")
        undone += 1
    assert undone == 10  # five pictures, and what was drawn after each


def test_a_pen_replaces_the_palms_stroke_and_touch_is_briefly_ignored(tablet: Page) -> None:
    hand = Hand(tablet)
    hand.touch("touchStart", (0.8, 0.9))
    hand.touch("touchMove", (0.85, 0.92))
    expect_on_the_slate(tablet, "1 stroke")
    hand.write([(0.5, 0.1), (0.5, 0.3), (0.5, 0.5), (0.5, 0.7), (0.5, 0.9)])
    hand.touch("touchEnd")
    hand.touch("touchStart", (0.2, 0.9))
    hand.touch("touchEnd")
    wait_for_verdict(tablet, "1")
    expect_on_the_slate(tablet, "1 stroke")
    tablet.wait_for_timeout(1100)
    hand.touch("touchStart", (0.5, 0.9))
    hand.touch("touchEnd")
    expect_on_the_slate(tablet, "2 strokes")


def test_a_cancelled_touch_leaves_no_stroke(tablet: Page) -> None:
    hand = Hand(tablet)
    hand.touch("touchStart", (0.8, 0.9))
    hand.touch("touchMove", (0.85, 0.92))
    expect_on_the_slate(tablet, "1 stroke")
    hand.touch("touchCancel")
    expect_on_the_slate(tablet, "empty")


def test_a_pen_removes_only_the_palms_stroke(tablet: Page) -> None:
    hand = Hand(tablet)
    hand.touch("touchStart", (0.8, 0.9))
    tablet.get_by_role("button", name="Example 3").press("Enter")
    expect_on_the_slate(tablet, "example 3")
    hand.touch("touchMove", (0.85, 0.92))
    hand.write([(0.5, 0.1), (0.5, 0.3)])
    expect_on_the_slate(tablet, "example 3, 1 stroke")


def test_undo_ends_a_stroke_that_is_being_drawn(page: Page) -> None:
    draw(page, ONE)
    draw(page, SEVEN, lift=False)
    expect_on_the_slate(page, "2 strokes")
    page.keyboard.press("Control+z")
    page.mouse.move(200, 200, steps=4)
    page.mouse.up()
    expect_on_the_slate(page, "1 stroke")
    draw(page, SEVEN)
    expect_on_the_slate(page, "2 strokes")


def test_undoing_a_stroke_before_it_is_sent_ends_the_busy_state(open_page: OpenPage) -> None:
    page = open_page(script="{ const later = setTimeout; setTimeout = (work, time) => later(work, time === 80 ? 60000 : time); }")
    draw(page, SEVEN, lift=False)
    expect(page.locator("#answer")).to_have_attribute("aria-busy", "true")
    page.keyboard.press("Control+z")
    expect(page.locator("#answer")).to_have_attribute("aria-busy", "false")


def test_undo_to_another_digit_resets_the_sliders(page: Page) -> None:
    for label in "38":
        page.get_by_role("button", name=f"Example {label}").click()
        wait_for_verdict(page, label)
    page.locator("#sliders input").first.press("End")
    expect(page.locator("#reset")).to_be_enabled()
    page.keyboard.press("Control+z")
    wait_for_verdict(page, "3")
    expect(page.locator("#reset")).to_be_disabled()


def test_a_two_digit_model_keeps_the_last_two_of_three_digits(open_page: OpenPage) -> None:
    page = open_page(path="/?model=pair")
    draw(page, SEVEN)
    page.get_by_role("button", name="Example 0").click()
    expect_on_the_slate(page, "example 0, 1 stroke")
    page.get_by_role("button", name="Example 1").click()
    expect_on_the_slate(page, "example 0, example 1")


def test_a_drawing_survives_a_visit_to_the_docs_and_a_reload(with_seven: Page) -> None:
    page = with_seven
    page.get_by_role("button", name="Example 0").click()
    expect_on_the_slate(page, "example 0")
    draw(page, SEVEN)
    before = image(page, "drawing")
    page.get_by_role("link", name="Docs").click()
    expect(page).to_have_url(re.compile("/docs$"))
    for there_again in (page.go_back, page.reload):
        there_again()
        expect_on_the_slate(page, "example 0, 1 stroke")
        expect(page.locator("#verdict")).not_to_have_text("Nothing yet")
        assert image(page, "drawing") == before


def test_a_drawing_is_saved_as_soon_as_its_stroke_ends(with_seven: Page) -> None:
    """A page that is reloaded or dropped for lack of memory has no time to keep it."""
    assert with_seven.evaluate("history.state.drawing.strokes.length") == 1
    with_seven.reload()
    expect_on_the_slate(with_seven, "1 stroke")


def test_a_picture_is_not_kept_across_a_reload(page: Page, tmp_path: Path) -> None:
    (tmp_path / "seven.png").write_bytes(encoded(drawn("7")))
    page.set_input_files("#file", tmp_path / "seven.png")
    expect_on_the_slate(page, "the picture seven.png")
    page.reload()
    expect_on_the_slate(page, "empty")
