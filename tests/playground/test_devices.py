"""The page by keyboard, on a phone, on small screens."""

from __future__ import annotations

import time

from playwright.sync_api import Page, expect

from service.engine import CapsNet
from tests.playground.conftest import PHONE, OpenPage
from tests.playground.hand import SEVEN, draw, image, said, wait_for_change, wait_for_verdict


def test_the_whole_page_can_be_used_by_keyboard(page: Page, nets: dict[str, CapsNet]) -> None:
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    entries = page.evaluate("history.length")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "answer"
    assert page.evaluate("history.length") == entries  # another entry would not have the drawing
    page.reload()
    page.wait_for_selector("#examples button")
    _tab_to(page, "[aria-label='Example 3']")
    page.keyboard.press("Enter")
    wait_for_verdict(page, "3")
    _tab_to(page, "#clear", "Shift+Tab")
    for heir in ("undo", "undo", "file"):  # a button that can do no more passes the focus on
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == heir
    _tab_to(page, "[aria-label='Example 3']")
    page.keyboard.press("Enter")
    wait_for_verdict(page, "3")
    _tab_to(page, "#as-label")
    _tab_to(page, "#open-sweep")
    page.keyboard.press("Enter")
    expect(page.locator("#sheet img")).to_be_visible()
    page.keyboard.press("Escape")
    _tab_to(page, "#dim-0")
    before = image(page, "turned")
    page.keyboard.press("Home")
    wait_for_change(page, "turned", before)
    _tab_to(page, f"[aria-label='Reset {nets['tiny'].manifest.dimensions[0].name}']")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "dim-0"
    for end in ("keep-from", "keep-to"):
        _tab_to(page, f"#{end}")
        page.keyboard.press("Enter")
    expect(page.locator("#strip img")).to_be_visible()
    page.keyboard.press("Control+z")
    assert page.evaluate("document.activeElement.id") == "file"
    _tab_to(page, "#copy")


def test_pinch_zoom_works_on_a_slate_that_fills_the_screen(open_page: OpenPage) -> None:
    """Otherwise somebody who has enlarged the page so far could only draw."""
    page = open_page(**PHONE)
    session = page.context.new_cdp_session(page)
    reacts = "getComputedStyle(document.getElementById('drawing')).touchAction"
    for scale, expected in ((4, "pinch-zoom"), (1, "none")):
        session.send("Emulation.setPageScaleFactor", {"pageScaleFactor": scale})
        page.wait_for_function("(scale) => Math.abs(visualViewport.scale - scale) < 0.1", arg=scale)
        page.wait_for_timeout(100)
        assert page.evaluate(reacts) == expected


def test_drawing_and_layout_work_on_a_phone(open_page: OpenPage) -> None:
    page = open_page(**PHONE)
    box = page.locator("#drawing").bounding_box()
    assert box is not None
    touch = page.context.new_cdp_session(page)
    points = [{"x": box["x"] + x * box["width"], "y": box["y"] + y * box["height"], "id": 0} for x, y in SEVEN[0]]
    touch.send("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": points[:1]})
    palm = {"x": box["x"] + 10, "y": box["y"] + box["height"] - 10, "id": 1}
    touch.send("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [points[0], palm]})
    for point in points[1:]:
        palm = {**palm, "x": palm["x"] + 50}
        touch.send("Input.dispatchTouchEvent", {"type": "touchMove", "touchPoints": [point, palm]})
    touch.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    wait_for_verdict(page, "7")
    assert page.get_attribute("#drawing", "aria-label") == "Your drawing: 1 stroke"
    assert "7" in said(page, "#glance")
    assert page.evaluate("scrollY") == 0  # the finger drew and did not scroll
    sizes = page.locator("#model, #steps, #key-field").evaluate_all("all => all.map((one) => getComputedStyle(one).fontSize)")
    assert sizes == ["16px"] * 3  # for smaller ones an iPhone zooms the page in
    for width in (390, 320):
        page.set_viewport_size({"width": width, "height": 700})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.locator("#dim-5").scroll_into_view_if_needed()
    turned = page.locator("#turned").bounding_box()
    assert turned is not None
    assert 0 <= turned["y"] < 200  # the picture stays in sight of the sliders


def test_a_hand_resting_on_the_slate_draws_no_stroke(open_page: OpenPage) -> None:
    page = open_page(**PHONE)
    box = page.locator("#drawing").bounding_box()
    assert box is not None
    touch = page.context.new_cdp_session(page)
    hand = {"x": box["x"] + 10, "y": box["y"] + box["height"] - 10, "id": 0}
    touch.send("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [hand]})
    page.wait_for_timeout(400)
    points = [{"x": box["x"] + x * box["width"], "y": box["y"] + y * box["height"], "id": 1} for x, y in SEVEN[0]]
    touch.send("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [hand, points[0]]})
    for point in points[1:]:
        touch.send("Input.dispatchTouchEvent", {"type": "touchMove", "touchPoints": [hand, point]})
    touch.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    wait_for_verdict(page, "7")
    assert page.get_attribute("#drawing", "aria-label") == "Your drawing: 1 stroke"
    page.click("#undo")
    assert page.get_attribute("#drawing", "aria-label") == "Your drawing: empty"


def test_scrolling_past_a_slider_does_not_move_it(open_page: OpenPage) -> None:
    page = open_page(**PHONE)
    touch = page.context.new_cdp_session(page)

    def swiped(across: float, down: float) -> float:
        """Swipes from the slider, and returns how far the page has scrolled."""
        page.evaluate("() => document.querySelector('#dim-5').scrollIntoView({ block: 'center' })")
        before: float = page.evaluate("scrollY")
        box = page.locator("#dim-5").bounding_box()
        assert box is not None
        for step in range(12):
            point = {"x": box["x"] + 30 + step * across, "y": box["y"] + box["height"] / 2 + step * down}
            touch.send("Input.dispatchTouchEvent", {"type": "touchMove" if step else "touchStart", "touchPoints": [point]})
        touch.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
        page.wait_for_timeout(200)
        after: float = page.evaluate("scrollY")
        return abs(after - before)

    assert swiped(0.4, -12) > 50
    assert page.input_value("#dim-5") == "0"
    assert not said(page, "#subject").endswith("moved.")
    swiped(20, 0.4)
    assert page.input_value("#dim-5") not in ("", "0")
    assert said(page, "#subject").endswith("moved.")


def test_the_slate_and_the_model_switch_fit_on_small_screens(open_page: OpenPage) -> None:
    page = open_page(**PHONE)
    page.evaluate("() => document.querySelector('#model').append(new Option('a-network-with-a-name-that-no-telephone-can-show'))")
    draw(page, SEVEN)
    wait_for_verdict(page, "7")
    drawing = _levels(page)
    assert 10 < sum(drawing) < 300
    for width, height in ((390, 844), (320, 568), (844, 390), (667, 375)):
        page.set_viewport_size({"width": width, "height": height})
        switch, slate = (page.locator(each).bounding_box() for each in ("label:has(#model)", "#slate"))
        assert switch is not None
        assert 0 <= switch["x"] <= switch["x"] + switch["width"] <= width
        assert slate is not None
        assert slate["height"] < height - 80
        page.wait_for_function(
            "() => [document.querySelector('#drawing')].every(({ width, clientWidth }) => width === 2 * clientWidth)"
        )
        assert sum(abs(before - after) for before, after in zip(drawing, _levels(page), strict=True)) < 10  # turned, too


def _levels(page: Page) -> list[float]:
    """What is on the slate, of whatever size, as 28x28 levels from 0 to 1."""
    levels: list[float] = page.evaluate("""() => {
        const small = new OffscreenCanvas(28, 28).getContext("2d");
        small.imageSmoothingQuality = "high";
        small.drawImage(document.querySelector("#drawing"), 0, 0, 28, 28);
        return Array.from(small.getImageData(0, 0, 28, 28).data.filter((_, i) => i % 4 === 0), (red) => (red - 17) / 230);
    }""")
    return levels


def test_text_follows_the_browsers_font_size_and_stays_in_its_card(with_seven: Page) -> None:
    page = with_seven
    page.evaluate("() => (document.documentElement.style.fontSize = '24px')")
    assert page.locator("#reason").evaluate("text => getComputedStyle(text).fontSize") == "24px"
    card, figure = (page.locator(each).bounding_box() for each in ("#answer", "#lengths .winner .figure"))
    assert card is not None
    assert figure is not None
    needed = page.locator("#lengths .winner .figure").evaluate("figure => figure.scrollWidth")
    assert needed <= figure["width"] + 1
    assert figure["x"] + figure["width"] < card["x"] + card["width"] - 20


def test_reduced_motion_is_honoured(open_page: OpenPage) -> None:
    page = open_page(reduced_motion="reduce")
    page.evaluate("() => (document.querySelector('#state').dataset.state = 'asking')")  # otherwise it never moves
    assert page.locator(".bar > span").first.evaluate("bar => getComputedStyle(bar).transitionDuration") == "0s"
    assert page.locator("#state").evaluate("state => getComputedStyle(state, '::before').animationName") == "none"


def _tab_to(page: Page, selector: str, key: str = "Tab") -> None:
    until = time.monotonic() + 8
    while not page.evaluate("selector => document.activeElement.matches(selector)", selector):
        assert time.monotonic() < until, f"{selector} cannot be reached"
        page.keyboard.press(key)
