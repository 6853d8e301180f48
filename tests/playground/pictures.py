"""README's pictures of the playground on the shipped models: run `python -m tests.playground.pictures`, then look at them."""

from __future__ import annotations

import sys
from pathlib import Path

from playwright.sync_api import Page, expect, sync_playwright

from service.settings import Settings
from tests.playground.conftest import CHROMIUM, FLAGS, PHONE
from tests.playground.hand import THREE_AND_SEVEN, WRITTEN_SEVEN, WRITTEN_THREE, draw, wait_for_verdict
from tests.service.conftest import serving

DOCS = Path(__file__).parents[2] / "docs"
LOOKS: dict[str, dict[str, object]] = {
    "light": {"viewport": {"width": 1280, "height": 800}},
    "dark": {"viewport": {"width": 1280, "height": 800}, "color_scheme": "dark"},
    "phone": {**PHONE, "viewport": {"width": 390, "height": 844}},
}


def play(page: Page) -> None:
    page.wait_for_selector("#examples button")
    draw(page, WRITTEN_SEVEN)
    wait_for_verdict(page, "7")
    page.click("#keep-from")
    page.click("#clear")
    draw(page, WRITTEN_THREE)
    wait_for_verdict(page, "3")
    page.click("#keep-to")
    expect(page.locator("#strip img")).to_be_visible()
    for dim, delta in ((1, 0.12), (9, -0.1)):
        page.locator(f"#dim-{dim}").fill(str(delta))
    page.mouse.move(0, 0)
    page.wait_for_timeout(500)
    page.evaluate("() => scrollTo(0, 0)")


def draw_two(page: Page) -> None:
    page.wait_for_selector("#examples button")
    draw(page, THREE_AND_SEVEN)
    wait_for_verdict(page, "one over the other")
    page.mouse.move(0, 0)
    page.wait_for_timeout(500)


def main(models: Path) -> None:
    with serving(Settings(models=models)) as client, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        for name, look in LOOKS.items():
            page = browser.new_page(**look)  # type: ignore[arg-type]
            page.goto(str(client.base_url))
            play(page)
            page.screenshot(path=DOCS / f"playground-{name}.png", full_page=name != "phone")
        page = browser.new_page(**LOOKS["light"])  # type: ignore[arg-type]
        page.goto(f"{client.base_url}?model=overlap")
        draw_two(page)
        page.screenshot(path=DOCS / "playground-overlap.png")
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Settings().models)
