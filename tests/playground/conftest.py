"""The real page in a real Chromium, on a uvicorn as in the service's tests. No page may send another host a request."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, Request, expect, sync_playwright

from service import catalogue
from service.engine import CapsNet
from service.settings import Settings
from tests.playground.hand import SEVEN, draw, wait_for_verdict
from tests.service.bundles import wide
from tests.service.conftest import serving, settings

CHROMIUM = shutil.which("chromium-headless-shell") or shutil.which("chromium")  # the first is the same without its windows
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--no-first-run"]
PHONE = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2, "has_touch": True, "is_mobile": True}

WORDS = "shirt 1 pullover dress coat sandal blouse sneaker bag boot"

OpenPage = Callable[..., Page]


@pytest.fixture(scope="package")
def nets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CapsNet]:
    """The tests' bundle `tiny`, and three models made of it.

    `pair` passes for a network of two digits, the second of any length, and `beside` for one of two digits side by side. The
    classes of `words` are not digits, and two of its dimensions do the same.
    """
    tiny = catalogue.load(settings())["tiny"]
    thresholds = tiny.manifest.thresholds
    lenient = dict.fromkeys(thresholds.lengths, -1.0)
    drawn = {
        label: {rank: 10 + each for rank, each in usual.items()} for label, usual in thresholds.reconstruction_errors.items()
    }
    values = {"presence": 0.02, "lengths": lenient, "margins": lenient, "reconstruction_errors": drawn}
    both = {"name": "pair", "max_objects": 2, "thresholds": thresholds.model_copy(update=values)}
    nets = {"tiny": tiny, "pair": replace(tiny, manifest=tiny.manifest.model_copy(update=both))}
    words = tuple(WORDS.split())
    usual = dict(zip(words, thresholds.reconstruction_errors.values(), strict=True))
    alike = tuple(
        each.model_copy(update={"name": "slant"}) if dim == 3 else each for dim, each in enumerate(tiny.manifest.dimensions)
    )
    named = {"name": "words", "classes": words, "dimensions": alike}
    named["thresholds"] = thresholds.model_copy(update={"reconstruction_errors": usual})
    nets["words"] = replace(tiny, manifest=tiny.manifest.model_copy(update=named))
    folder = wide(tmp_path_factory.mktemp("wide") / "beside").parent
    beside = catalogue.load(Settings(models=folder))["beside"]
    update = {"thresholds": thresholds.model_copy(update=values)}
    return nets | {"beside": replace(beside, manifest=beside.manifest.model_copy(update=update))}


@pytest.fixture(scope="package")
def server(nets: dict[str, CapsNet]) -> Iterator[str]:
    with serving(settings(model="tiny"), nets) as client:
        yield str(client.base_url)


# Its scope is the package, not the session: Playwright's event loop would stand in the way of asyncio.run in other tests.
@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("needs a browser: Debian's package chromium-headless-shell, or chromium")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser: Browser, server: str) -> Iterator[OpenPage]:
    """open_page(at=..., wait=..., script=..., **how) -> a page, which runs `script` before its own scripts.

    At the end no page may have failed, and no other host may have been asked.
    """
    contexts, faults, asked = [], [], []

    def heard(request: Request) -> None:
        asked.append(request.url)

    def opened(at: str = server, path: str = "/", wait: bool = True, script: str = "", **how: object) -> Page:
        context = browser.new_context(**how)  # type: ignore[arg-type]
        context.set_default_timeout(20_000)
        contexts.append(context)
        page = context.new_page()
        page.add_init_script(script)
        page.on("request", heard)
        page.on("pageerror", lambda error: faults.append(str(error)))
        # Browsers also log requests that fail, which is allowed; scripts and policies that fail are what we look for.
        page.on("console", lambda said: said.type == "error" and "Failed to load" not in said.text and faults.append(said.text))
        page.goto(at + path)
        if wait:
            expect(page.locator("#examples button").first).to_be_visible()
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not faults
    assert {urlsplit(url.removeprefix("blob:")).hostname for url in asked} <= {"127.0.0.1"}, asked


@pytest.fixture
def page(open_page: OpenPage) -> Page:
    return open_page()


@pytest.fixture
def with_seven(page: Page) -> Page:
    draw(page, SEVEN)
    wait_for_verdict(page, "7")
    return page
