"""The service away, busy, silent, replaced, or behind a key."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from playwright.sync_api import Page, Route, expect

from service.engine import CapsNet
from tests.playground.conftest import OpenPage
from tests.playground.hand import ONE, SEVEN, ask_for, draw, image, said
from tests.service.conftest import serving, settings

pytestmark = pytest.mark.alone

KEY = "correct horse"


def test_a_service_that_goes_away_comes_back_by_itself(open_page: OpenPage, nets: dict[str, CapsNet]) -> None:
    with serving(settings(model="tiny"), nets) as client:
        url = str(client.base_url)
        page = open_page(at=url)
    draw(page, SEVEN)
    expect(page.locator("#unreachable")).to_contain_text("does not answer")
    assert said(page, "#state") == "unreachable"
    kept = image(page, "drawing")
    with serving(settings(model="tiny"), nets, port=int(url.rpartition(":")[2])):
        ask_for(page, "7")
        expect(page.locator("#unreachable")).to_be_hidden()
        expect(page.locator("#state")).to_have_text("ready")
        assert image(page, "drawing") == kept


def test_a_service_that_goes_away_is_missed_without_being_asked(open_page: OpenPage, nets: dict[str, CapsNet]) -> None:
    """And what comes back in its place may be another: the page takes up what the model is now."""
    with serving(settings(model="tiny"), nets) as client:
        url = str(client.base_url)
        page = open_page(at=url)
        draw(page, SEVEN)
        ask_for(page, "This is a 7")
    page.evaluate("() => document.dispatchEvent(new Event('visibilitychange'))")
    expect(page.locator("#state")).to_have_text("unreachable")
    words = nets["words"]
    other = {"tiny": replace(words, manifest=words.manifest.model_copy(update={"name": "tiny"}))}
    with serving(settings(model="tiny"), other, port=int(url.rpartition(":")[2])):
        expect(page.locator("#state")).to_have_text("ready")
        ask_for(page, "This is sneaker")
        assert said(page, "#lengths .winner .label") == "sneaker"
        page.context.close()


def test_a_model_that_was_replaced_is_taken_up_when_its_old_poses_are_refused(with_seven: Page) -> None:
    def replaced(route: Route) -> None:
        told = route.fetch().json()
        told["models"][0]["version"] = "another"
        route.fulfill(json=told)

    page = with_seven
    refusal = {"detail": "pose was made by another model"}
    page.route("**/reconstruct?*delta*", lambda route: route.fulfill(status=422, json=refusal), times=1)
    page.route("**/models", replaced)
    with page.expect_request("**/predict?*"):
        page.fill("#dim-0", "0.1")
    ask_for(page, "7")
    expect(page.locator("#refused")).to_be_hidden()
    assert said(page, "output[for=dim-0]") == "0.00"


@pytest.mark.parametrize("answer", [{"status": 502}, {"body": "<html>Who are you?", "content_type": "text/html"}, None])
def test_answers_that_are_not_the_services_are_none(page: Page, answer: dict[str, object] | None) -> None:
    """A proxy without the service behind it, a network that wants a password first, a connection that breaks."""
    page.route("**/predict?*", lambda route: route.fulfill(**answer) if answer else route.abort(), times=1)  # type: ignore[arg-type]
    draw(page, ONE)
    expect(page.locator("#unreachable")).to_contain_text("does not answer")
    ask_for(page, "1")
    expect(page.locator("#unreachable")).to_be_hidden()
    assert page.locator("#refused").is_hidden()


def test_silence_is_not_waited_for_without_end(open_page: OpenPage, server: str) -> None:
    page = open_page(path="/docs", wait=False)
    page.add_init_script(
        "{ const limit = AbortSignal.timeout; AbortSignal.timeout = (time) => limit.call(AbortSignal, time / 10); }"
    )
    page.route("**/predict?*", lambda route: None, times=1)
    page.goto(server)
    page.wait_for_selector("#examples button")
    draw(page, SEVEN)
    expect(page.locator("#unreachable")).to_contain_text("does not answer")
    ask_for(page, "7")


def test_what_goes_wrong_behind_the_sheet_is_said_before_it(page: Page) -> None:
    page.route("**/reconstruct/sweep?*", lambda route: route.abort(), times=1)
    page.click("#open-sweep")
    expect(page.locator("dialog[open] #unreachable")).to_be_visible()
    expect(page.locator("#sheet img")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#sweep #notices")).to_have_count(0)


def test_a_key_that_is_asked_for_later_was_not_wrong_before(with_seven: Page) -> None:
    page = with_seven
    page.route("**/reconstruct*/**", lambda route: route.fulfill(status=401, json={"detail": "a key is wanted"}))
    page.route("**/predict?*", lambda route: route.fulfill(status=401, json={"detail": "a key is wanted"}))
    page.click("#open-sweep")
    expect(page.locator("#key")).to_be_visible()
    expect(page.locator("#sweep")).to_be_hidden()
    with page.expect_response("**/predict?*"):
        draw(page, ONE)
    page.wait_for_timeout(100)
    expect(page.locator("#key label")).to_have_text("This service asks for its key")
    page.route("**/models", lambda route: route.fulfill(status=401, json={"detail": "a key is wanted"}))
    page.fill("#key-field", "wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#key label")).to_contain_text("not the key")
    page.get_by_role("button", name="Example 3").click()  # is drawn, though nobody answers yet
    expect(page.locator("#drawing")).to_have_attribute("aria-label", "Your drawing: example 3")


def test_a_busy_service_is_asked_again(page: Page) -> None:
    asked = 0

    def busy_once(route: Route) -> None:
        nonlocal asked
        asked += 1
        if asked > 1:
            return route.continue_()
        problem = {"status": 503, "title": "busy", "detail": "512 images wait already"}
        route.fulfill(status=503, headers={"Retry-After": "1"}, content_type="application/problem+json", body=json.dumps(problem))

    page.route("**/predict?*", busy_once)
    draw(page, SEVEN)
    expect(page.locator("#unreachable")).to_contain_text("busy: 512 images wait already")
    ask_for(page, "7")
    expect(page.locator("#unreachable")).to_be_hidden()


def test_a_key_is_asked_for_and_kept_in_the_tab(open_page: OpenPage, nets: dict[str, CapsNet]) -> None:
    with serving(settings(model="tiny", api_key=KEY), nets) as client:
        page = open_page(at=str(client.base_url), wait=False)
        expect(page.locator("#key")).to_be_visible()
        page.fill("#key-field", "wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#key label")).to_contain_text("not the key")
        with page.expect_response("**/models"):
            page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # as one who looks the key up comes back
        page.wait_for_timeout(100)
        expect(page.locator("#key label")).to_contain_text("not the key")
        page.fill("#key-field", KEY)
        page.keyboard.press("Enter")
        page.wait_for_selector("#examples button")
        expect(page.locator("#key")).to_be_hidden()
        draw(page, SEVEN)
        ask_for(page, "7")
        assert '"X-API-Key: $CAPSERVE_API_KEY"' in said(page, "#command")
        assert KEY not in page.content()
        page.click("#open-sweep")
        expect(page.locator("#sheet img")).to_be_visible()
        page.reload()
        page.wait_for_selector("#examples button")
        page.context.close()
