"""The page on the bundles that are shipped, as a newcomer meets it after `make run`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from service.settings import Settings
from tests.playground.conftest import PHONE, OpenPage
from tests.playground.hand import THREE_AND_SEVEN, WRITTEN_SEVEN, colours, draw, wait_for_verdict
from tests.service.conftest import serving

MODELS = Path(__file__).parents[2] / "models"


@pytest.fixture(scope="module")
def shipped() -> Iterator[str]:
    with serving(Settings(models=MODELS, port=0, linger=0.0)) as client:
        yield str(client.base_url)


def test_a_drawn_digit_is_recognised(open_page: OpenPage, shipped: str) -> None:
    page = open_page(at=shipped)
    draw(page, WRITTEN_SEVEN)
    wait_for_verdict(page, "This is a 7")


def test_dimension_names_line_up_with_the_rows_of_the_sheet(open_page: OpenPage, shipped: str) -> None:
    page = open_page(at=shipped, **PHONE)
    for width in (320, 360, 390, 700, 1280):
        page.set_viewport_size({"width": width, "height": 700})
        page.click("#open-sweep")
        expect(page.locator("#sheet img")).to_be_visible()
        _assert_names_line_up_with_rows(page)
        page.keyboard.press("Escape")


def _assert_names_line_up_with_rows(page: Page) -> None:
    sheet = page.locator("#sheet img").bounding_box()
    assert sheet is not None
    names = page.locator("#sheet li").evaluate_all("""names => names.map((name) => {
        const text = document.createRange();
        text.selectNodeContents(name);
        const { top, height } = text.getBoundingClientRect();
        return [top + height / 2, height, name.getBoundingClientRect().right];
    })""")
    assert len(names) == 16
    row = sheet["height"] / len(names)
    for place, (middle, height, right) in enumerate(names):
        assert middle == pytest.approx(sheet["y"] + (place + 0.5) * row, abs=1)
        assert height < row + 1  # or it would overlap the next one's row
        assert right < sheet["x"]
    assert page.locator("#sweep").evaluate("sweep => sweep.scrollWidth === sweep.clientWidth")


def test_two_overlapping_digits_are_told_apart(open_page: OpenPage, shipped: str) -> None:
    page = open_page(at=shipped, path="/?model=overlap")
    draw(page, THREE_AND_SEVEN)
    expect(page.locator("#verdict")).to_have_text(re.compile("A (3 and a 7|7 and a 3), one over the other"))
    expect(page.locator("#answer")).to_have_attribute("aria-busy", "false")
    assert min(colours(page)) > 30
