"""axe-core finds nothing serious on any of our pages, in either theme and on a phone."""

from __future__ import annotations

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.playground.conftest import PHONE, OpenPage
from tests.playground.hand import SEVEN, ask_for, draw

IN_SIGHT = """() => {
    const focused = document.activeElement;
    if (!focused.closest("#sliders")) return null;
    const { left, top, width, height } = focused.getBoundingClientRect();
    return [focused.id, document.elementFromPoint(left + width / 2, top + height / 2) === focused];
}"""
LOOKS: dict[str, dict[str, object]] = {"light": {}, "dark": {"color_scheme": "dark"}, "phone": PHONE}


@pytest.mark.parametrize("look", LOOKS)
def test_the_playground(open_page: OpenPage, look: str) -> None:
    page = open_page(path="/?model=pair", **LOOKS[look])
    _assert_accessible(page)
    draw(page, SEVEN)
    ask_for(page, "7")
    page.click("#keep-from")
    page.click("#keep-to")
    expect(page.locator("#strip img")).to_be_visible()
    page.locator("#dim-0").fill("0.1")
    page.set_input_files("#file", {"name": "a.txt", "mimeType": "text/plain", "buffer": b"no picture"})
    expect(page.locator("#refused")).to_be_visible()
    page.wait_for_timeout(250)  # colours in transition
    _assert_accessible(page)
    page.click("#open-sweep")
    expect(page.locator("#sheet img")).to_be_visible()
    _assert_accessible(page)


@pytest.mark.parametrize("look", LOOKS)
def test_the_reference(open_page: OpenPage, look: str) -> None:
    _assert_accessible(open_page(path="/docs", wait=False, **LOOKS[look]))


@pytest.mark.parametrize("size", [(640, 400), (320, 256), (360, 300)], ids=["a phone on its side", "400 %", "350 %"])
def test_what_has_the_focus_is_in_sight(open_page: OpenPage, size: tuple[int, int]) -> None:
    """Where the picture of the pose stays at the top, backwards through the sliders: none is below it."""
    page = open_page(path="/?model=pair", viewport={"width": size[0], "height": size[1]})
    page.click("#examples button:nth-child(2)")
    page.click("#examples button:nth-child(8)")
    expect(page.locator("#objects")).to_be_visible()
    expect(page.locator("#keep-from")).to_be_enabled()
    page.focus("#steps")
    seen = {}
    for _ in range(40):
        page.keyboard.press("Shift+Tab")
        if (found := page.evaluate(IN_SIGHT)) is not None:
            seen[found[0]] = found[1]
    assert seen == dict.fromkeys(page.locator("#sliders input").evaluate_all("sliders => sliders.map(({ id }) => id)"), True)


def test_forced_colours_leave_drawings_their_ground(open_page: OpenPage) -> None:
    page = open_page(forced_colors="active")
    page.click("#open-sweep")
    expect(page.locator("#sheet img")).to_be_visible()
    ground = page.evaluate("getComputedStyle(document.querySelector('#sheet .plate')).backgroundColor")
    assert ground != "rgb(255, 255, 255)"  # on which nothing can be seen that is screened onto it


def _assert_accessible(page: Page) -> None:
    found = Axe().run(page).response["violations"]
    serious = [each for each in found if each["impact"] in ("serious", "critical")]
    assert not serious, [(each["id"], [node["html"][:120] for node in each["nodes"]]) for each in serious]
