"""axe-core finds nothing serious on any of our pages, in either theme, on a screen and on a phone."""

from __future__ import annotations

import re

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from service.engine import CapsNet
from tests.playground.conftest import PHONE, OpenPage
from tests.playground.hand import SEVEN, draw, wait_for_verdict
from tests.service.conftest import serving, settings

IN_SIGHT = """() => {
    const focused = document.activeElement;
    if (!focused.closest("#sliders")) return null;
    const { left, top, width, height } = focused.getBoundingClientRect();
    return [focused.id, document.elementFromPoint(left + width / 2, top + height / 2) === focused];
}"""
BELOW_A_NOTICE = """() => {
    const focused = document.activeElement;
    const { left, top, width, height } = focused.getBoundingClientRect();
    const points = [0.1, 0.5, 0.9].map((part) => document.elementFromPoint(left + width / 2, top + height * part));
    return [focused.id, points.every((each) => each?.closest("#notices") && !focused.closest("#notices"))];
}"""
TOO_WIDE = """() => [...document.querySelectorAll("body *")]
    .filter((each) => each.getBoundingClientRect().right > innerWidth).map(({ outerHTML }) => outerHTML.slice(0, 99))"""
LOOKS: dict[str, dict[str, object]] = {"light": {}, "dark, on a phone": {**PHONE, "color_scheme": "dark"}}


@pytest.mark.parametrize("look", LOOKS)
def test_the_playground_has_no_serious_accessibility_violation(open_page: OpenPage, look: str) -> None:
    page = open_page(path="/?model=pair", **LOOKS[look])
    _assert_accessible(page)
    draw(page, SEVEN)
    wait_for_verdict(page, "7")
    page.click("#keep-from")
    page.click("#keep-to")
    expect(page.locator("#strip img")).to_be_visible()
    page.locator("#dim-0").fill("0.1")
    page.set_input_files("#file", {"name": "a.txt", "mimeType": "text/plain", "buffer": b"no picture"})
    expect(page.locator("#refused")).to_be_visible()
    page.wait_for_timeout(250)  # until colours have changed
    _assert_accessible(page)
    page.click("#open-sweep")
    expect(page.locator("#sheet img")).to_be_visible()
    _assert_accessible(page)


@pytest.mark.parametrize("look", LOOKS)
def test_the_reference_has_no_serious_accessibility_violation(open_page: OpenPage, look: str) -> None:
    _assert_accessible(open_page(path="/docs", wait=False, **LOOKS[look]))


def test_the_focused_slider_is_visible_in_small_windows(open_page: OpenPage) -> None:
    """Going backwards through the sliders, the focus is never under the picture of the pose, which stays at the top."""
    page = open_page(path="/?model=pair")
    page.click("#examples button:nth-child(2)")
    page.click("#examples button:nth-child(8)")
    expect(page.locator("#objects")).to_be_visible()
    expect(page.locator("#keep-from")).to_be_enabled()
    sliders = page.locator("#sliders input").evaluate_all("sliders => sliders.map(({ id }) => id)")
    for width, height in ((640, 400), (320, 256), (360, 300)):  # a phone on its side, 400 %, 350 %
        page.set_viewport_size({"width": width, "height": height})
        page.focus("#steps")
        seen = {}
        for _ in range(40):
            page.keyboard.press("Shift+Tab")
            if (found := page.evaluate(IN_SIGHT)) is not None:
                seen[found[0]] = found[1]
        assert seen == dict.fromkeys(sliders, True), (width, height)


RECORD_ANNOUNCEMENTS = """addEventListener("DOMContentLoaded", () => {
    window.heard = [];
    const hear = () => heard.push(document.getElementById("announcement").textContent);
    new MutationObserver(hear).observe(document.getElementById("announcement"), { childList: true });
});"""


def test_every_result_is_announced_even_when_it_repeats_the_last(open_page: OpenPage) -> None:
    page = open_page(script=RECORD_ANNOUNCEMENTS)
    two = "#examples button:nth-child(3)"
    page.click(two)
    wait_for_verdict(page, "2")
    verdict = page.inner_text("#verdict")
    page.click("#clear")
    page.click(two)
    wait_for_verdict(page, "2")
    page.click(two)  # the same once more, over the first
    page.wait_for_function("() => heard.length >= 4")
    page.click("#keep-from")
    page.click("#keep-to")
    expect(page.locator("#strip img")).to_be_visible()
    page.click("#copy")
    expect(page.locator("#announcement")).to_have_text(re.compile("Copied|Selected"))
    page.click("#open-sweep")
    expect(page.locator("#sweep #announcement")).to_contain_text("drawings of your 2")  # nothing outside it is read
    page.keyboard.press("Escape")
    expect(page.locator("#sweep #announcement")).to_have_count(0)
    heard = page.evaluate("heard")
    assert heard[:4] == [verdict, "Nothing yet", verdict, verdict]
    assert heard[4] == "Kept. Now draw another and keep it as the end."
    assert heard[5] == "9 drawings from a 2 to a 2"


def test_the_return_of_the_service_is_announced(open_page: OpenPage, nets: dict[str, CapsNet]) -> None:
    with serving(settings(model="tiny"), nets) as client:
        url = str(client.base_url)
        page = open_page(at=url, script=RECORD_ANNOUNCEMENTS)
    page.evaluate("() => document.dispatchEvent(new Event('visibilitychange'))")
    expect(page.locator("#unreachable")).to_contain_text("does not answer")
    with serving(settings(model="tiny"), nets, port=int(url.rpartition(":")[2])):
        expect(page.locator("#unreachable")).to_be_hidden()
        assert page.evaluate("heard") == ["The service is back."]
        page.context.close()


@pytest.mark.parametrize("size", [(320, 256), (390, 844)], ids=["400 %", "a phone"])
def test_a_notice_never_covers_the_focused_element(open_page: OpenPage, size: tuple[int, int]) -> None:
    page = open_page(viewport={"width": size[0], "height": size[1]})
    page.set_input_files("#file", {"name": "a.txt", "mimeType": "text/plain", "buffer": b"no picture"})
    expect(page.locator("#refused")).to_be_visible()
    page.focus("#model")
    hidden, seen = [], set()
    for _ in range(60):
        page.keyboard.press("Tab")
        name, below = page.evaluate(BELOW_A_NOTICE)
        seen.add(name)
        hidden += [name] * below
    assert hidden == []
    assert {"dim-0", "dim-5", "open-sweep", "command"} <= seen


def test_large_text_and_a_small_window_need_no_scrolling_sideways(open_page: OpenPage) -> None:
    page = open_page(viewport={"width": 320, "height": 500})
    page.evaluate("document.documentElement.style.fontSize = '200%'")
    assert page.evaluate(TOO_WIDE) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    box = page.locator("#examples button").first.bounding_box()
    assert box is not None
    assert min(box["width"], box["height"]) >= 24


def test_forced_colours_do_not_make_the_drawings_background_white(open_page: OpenPage) -> None:
    page = open_page(forced_colors="active")
    page.click("#open-sweep")
    expect(page.locator("#sheet img")).to_be_visible()
    ground = page.evaluate("getComputedStyle(document.querySelector('#sheet .plate')).backgroundColor")
    assert ground != "rgb(255, 255, 255)"  # drawings are screened onto it, and would not be seen


def _assert_accessible(page: Page) -> None:
    found = Axe().run(page).response["violations"]
    serious = [each for each in found if each["impact"] in ("serious", "critical")]
    assert not serious, [(each["id"], [node["html"][:120] for node in each["nodes"]]) for each in serious]
