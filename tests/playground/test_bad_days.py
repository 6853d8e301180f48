"""The page while the service is away, busy, silent, replaced, or behind a key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from playwright.sync_api import Page, Route, expect

from service.engine import CapsNet
from tests.playground.conftest import OpenPage
from tests.playground.hand import ONE, SEVEN, draw, image, said, wait_for_verdict
from tests.service.conftest import drawn, encoded, serving, settings

KEY = "correct horse"
SHORT_WAITS = "{ const later = setTimeout; window.setTimeout = (what, time) => later(what, time < 4000 ? time : time / 10); }"


def test_the_page_recovers_and_keeps_the_drawing_after_an_outage(open_page: OpenPage, nets: dict[str, CapsNet]) -> None:
    with serving(settings(model="tiny"), nets) as client:
        url = str(client.base_url)
        page = open_page(at=url)
        draw(page, ONE)
        wait_for_verdict(page, "1")
        page.click("#clear")
    draw(page, SEVEN)
    expect(page.locator("#unreachable")).to_contain_text("does not answer")
    assert said(page, "#state") == "unreachable"
    assert said(page, "#verdict") == "No answer yet"
    kept = image(page, "drawing")
    with serving(settings(model="tiny"), nets, port=int(url.rpartition(":")[2])):
        wait_for_verdict(page, "7")
        expect(page.locator("#unreachable")).to_be_hidden()
        expect(page.locator("#state")).to_have_text("ready")
        assert image(page, "drawing") == kept


def test_an_idle_page_notices_an_outage_and_a_changed_model(open_page: OpenPage, nets: dict[str, CapsNet]) -> None:
    """The service that comes back may have another model, and the page takes that up."""
    with serving(settings(model="tiny"), nets) as client:
        url = str(client.base_url)
        page = open_page(at=url)
        draw(page, SEVEN)
        wait_for_verdict(page, "This is a 7")
    page.evaluate("() => document.dispatchEvent(new Event('visibilitychange'))")
    expect(page.locator("#state")).to_have_text("unreachable")
    words = nets["words"]
    other = {"tiny": replace(words, manifest=words.manifest.model_copy(update={"name": "tiny"}))}
    with serving(settings(model="tiny"), other, port=int(url.rpartition(":")[2])):
        expect(page.locator("#state")).to_have_text("ready")
        wait_for_verdict(page, "This is sneaker")
        assert said(page, "#lengths .winner .label") == "sneaker"
        page.context.close()


def test_the_page_adopts_a_replaced_model_when_old_poses_are_refused(with_seven: Page) -> None:
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
    wait_for_verdict(page, "7")
    expect(page.locator("#refusal")).to_contain_text("was replaced by a new version")
    assert said(page, ".slider:has(#dim-0) .figure") == "0.00"


def test_foreign_or_broken_answers_count_as_unreachable_and_are_retried(page: Page) -> None:
    """A proxy without the service behind it, a network that wants a password first, a connection that breaks."""
    answers: list[Callable[[Route], None]] = [
        lambda route: route.fulfill(status=502),
        lambda route: route.fulfill(body="<html>Who are you?", content_type="text/html"),
        lambda route: route.abort(),
    ]
    for answer in answers:
        page.route("**/predict?*", answer, times=1)
        draw(page, ONE)
        expect(page.locator("#unreachable")).to_contain_text("does not answer")
        wait_for_verdict(page, "1")
        expect(page.locator("#unreachable")).to_be_hidden()
        assert page.locator("#refused").is_hidden()
        page.click("#clear")


def test_a_request_without_an_answer_times_out_and_is_retried(open_page: OpenPage, server: str) -> None:
    page = open_page(path="/docs", wait=False, script=SHORT_WAITS)
    page.route("**/predict?*", lambda route: None, times=1)
    page.goto(server)
    page.wait_for_selector("#examples button")
    draw(page, SEVEN)
    expect(page.locator("#unreachable")).to_contain_text("does not answer")
    wait_for_verdict(page, "7")


def test_a_late_answer_clears_the_results_of_the_previous_drawing(with_seven: Page) -> None:
    page = with_seven
    page.route("**/predict?*", lambda route: None, times=1)
    page.click("#examples button:nth-child(2)")
    expect(page.locator("#verdict")).to_have_text("No answer yet", timeout=2_000)
    expect(page.locator("#subject")).to_contain_text("average")
    assert page.locator("#keep-from").is_disabled()
    page.click("#examples button:nth-child(4)")  # its answer does not wait for the late one
    wait_for_verdict(page, "3")
    expect(page.locator("#subject")).to_have_text("This is your 3.")
    expect(page.locator("#keep-from")).to_be_enabled()


def test_an_answer_in_time_replaces_the_previous_one_directly(open_page: OpenPage) -> None:
    """Here an answer is late after 1.5 seconds, and each takes one second."""
    page = open_page(
        script="{ const later = setTimeout; window.setTimeout = (what, time) => later(what, time === 250 ? 1500 : time); }"
    )
    page.route("**/predict?*", lambda route: (page.wait_for_timeout(1_000), route.continue_()))
    page.evaluate("""() => {
        window.said = [];
        const verdict = document.querySelector("#verdict");
        new MutationObserver(() => window.said.push(verdict.textContent)).observe(verdict, { childList: true });
    }""")
    for label in ("1", "3"):
        page.click(f"#examples button:nth-child({int(label) + 1})")
        wait_for_verdict(page, label)
    assert page.evaluate("window.said") == ["This is a 1", "This is a 3"]


def test_an_upload_on_a_slow_line_does_not_time_out(open_page: OpenPage, tmp_path: Path) -> None:
    page = open_page(script=SHORT_WAITS)
    asked = []
    page.on("request", lambda request: "/predict?" in request.url and asked.append(request.url))
    line = {"offline": False, "latency": 0, "downloadThroughput": -1, "uploadThroughput": 250_000}
    page.context.new_cdp_session(page).send("Network.emulateNetworkConditions", line)
    photo = tmp_path / "seven.bmp"
    photo.write_bytes(encoded(drawn("7", 900), "BMP"))  # takes three seconds
    page.set_input_files("#file", photo)
    wait_for_verdict(page, "7")
    assert len(asked) == 1
    expect(page.locator("#unreachable")).to_be_hidden()


def test_the_page_recovers_even_if_readyz_answers_503(page: Page) -> None:
    told = {"ready": False, "state": "failing"}
    page.route("**/readyz", lambda route: route.fulfill(status=503, json=told))
    page.route("**/predict?*", lambda route: route.abort(), times=1)
    draw(page, SEVEN)
    wait_for_verdict(page, "7")
    expect(page.locator("#unreachable")).to_be_hidden()


def test_requests_carry_a_proxys_login_cookie(page: Page, server: str) -> None:
    page.context.add_cookies([{"name": "login", "value": "known", "url": server}])
    with page.expect_request("**/predict?*") as sent:
        draw(page, SEVEN)
    assert sent.value.all_headers()["cookie"] == "login=known"


def test_a_failed_example_leaves_the_others_usable(page: Page) -> None:
    held: list[Route] = []
    page.route("**/reconstruct?*label=sneaker*", lambda route: held.append(route), times=1)
    page.select_option("#model", "words")
    expect(page.get_by_role("button", name="Example bag")).to_be_enabled()
    assert page.get_by_role("button", name="Example 3").count() == 0
    held[0].fulfill(status=500, json={"detail": "a fault of the server's own"})
    expect(page.locator("#refused")).to_contain_text("a fault of the server's own")
    assert page.locator("#examples button:enabled").count() == 9
    page.get_by_role("button", name="Close").click()
    expect(page.locator("#refused")).to_be_hidden()


def test_an_unknown_model_in_the_address_is_reported_and_removed(open_page: OpenPage) -> None:
    page = open_page(path="/?model=letters")
    expect(page.locator("#refused")).to_contain_text("There is no model letters here; tiny answers.")
    assert page.evaluate("location.search") == ""
    draw(page, SEVEN)
    wait_for_verdict(page, "7")
    expect(page.locator("#refused")).to_be_hidden()


def test_errors_appear_in_front_of_the_open_sheet(page: Page) -> None:
    page.route("**/reconstruct/sweep?*", lambda route: route.abort(), times=1)
    page.click("#open-sweep")
    expect(page.locator("dialog[open] #unreachable")).to_be_visible()
    expect(page.locator("#sheet img")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#sweep #notices")).to_have_count(0)


def test_a_login_in_the_pages_address_is_left_out_of_requests(open_page: OpenPage, server: str) -> None:
    """Browsers fetch nothing from an address with a login in it, even if the login comes from the page's own address."""
    page = open_page(at=server.replace("://", "://someone:secret@"))
    draw(page, SEVEN)
    wait_for_verdict(page, "7")
    assert f"'{server}/predict?" in said(page, "#command")


def test_a_key_is_called_wrong_only_after_one_was_entered(with_seven: Page) -> None:
    page = with_seven
    page.route("**/reconstruct*/**", lambda route: route.fulfill(status=401, json={"detail": "a key is wanted"}))
    page.route("**/predict?*", lambda route: route.fulfill(status=401, json={"detail": "a key is wanted"}))
    page.click("#open-sweep")
    expect(page.locator("#key")).to_be_visible()
    expect(page.locator("#sweep")).to_be_hidden()
    with page.expect_response("**/predict?*"):
        draw(page, ONE)
    page.wait_for_timeout(100)
    expect(page.locator("#key label")).to_have_text("This service needs its key")
    assert said(page, "#verdict") == "No answer yet"
    assert page.locator("#keep-from").is_disabled()
    page.route("**/models", lambda route: route.fulfill(status=401, json={"detail": "a key is wanted"}))
    page.fill("#key-field", "wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#key label")).to_contain_text("not the key")
    expect(page.locator("#announcement")).to_contain_text("not the key")
    page.get_by_role("button", name="Example 3").click()  # it is drawn, though nobody answers yet
    expect(page.locator("#drawing")).to_have_attribute("aria-label", "Your drawing: example 3")


def test_a_request_to_a_busy_service_is_retried(page: Page) -> None:
    def busy(status: int, route: Route) -> None:
        problem = {"status": status, "title": "busy", "detail": "512 images wait already"}
        route.fulfill(status=status, headers={"Retry-After": "1"}, json=problem)

    for status in (503, 429):  # from the service, and from a proxy that counts
        page.route("**/predict?*", partial(busy, status), times=1)
        draw(page, SEVEN)
        expect(page.locator("#unreachable")).to_contain_text("busy: 512 images wait already")
        wait_for_verdict(page, "7")
        expect(page.locator("#unreachable")).to_be_hidden()
        page.click("#clear")


def test_clearing_the_drawing_ends_the_wait_for_a_busy_service(page: Page) -> None:
    """A proxy asks to wait half a minute; when the drawing is cleared, the next one is sent at once."""
    busy = {"status": 503, "headers": {"Retry-After": "30"}, "json": {"status": 503, "title": "busy", "detail": "at work"}}
    page.route("**/predict?*", lambda route: route.fulfill(**busy), times=1)
    draw(page, SEVEN)
    expect(page.locator("#unreachable")).to_contain_text("at work")
    page.click("#clear")
    draw(page, SEVEN)
    wait_for_verdict(page, "7")
    expect(page.locator("#unreachable")).to_be_hidden()


def test_a_key_is_asked_for_and_kept_in_the_tab(open_page: OpenPage, nets: dict[str, CapsNet]) -> None:
    with serving(settings(model="tiny", api_key=KEY), nets) as client:
        page = open_page(at=str(client.base_url), path="/healthz", wait=False)
        with page.expect_response("**/models") as asked:
            page.goto(str(client.base_url))
        assert asked.value.headers["www-authenticate"] == "Bearer"  # for anything more the browser would ask its user
        expect(page.locator("#key")).to_be_visible()
        assert said(page, "#state") == "needs its key"
        colour = "getComputedStyle(document.querySelector('#key .button')).backgroundColor"
        before = page.evaluate(colour)
        page.hover("#key .button")
        page.wait_for_timeout(250)  # until colours have changed
        assert page.evaluate(colour) == before
        page.fill("#key-field", "wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#key label")).to_contain_text("not the key")
        with page.expect_response("**/models"):
            page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # back from looking the key up
        page.wait_for_timeout(100)
        expect(page.locator("#key label")).to_contain_text("not the key")
        page.fill("#key-field", KEY)
        page.keyboard.press("Enter")
        page.wait_for_selector("#examples button")
        expect(page.locator("#key")).to_be_hidden()
        assert page.evaluate("document.activeElement.id") == "model"  # the focus is not lost
        draw(page, SEVEN)
        wait_for_verdict(page, "7")
        assert '"X-API-Key: $CAPSERVE_API_KEY"' in said(page, "#command")
        assert KEY not in page.content()
        page.click("#open-sweep")
        expect(page.locator("#sheet img")).to_be_visible()
        page.reload()
        page.wait_for_selector("#examples button")
        page.context.close()
