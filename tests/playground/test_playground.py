"""What a visitor does at /, with mouse and keyboard, on a desk and on a phone, on good days and bad ones."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Page, Route, expect

from service.engine import CapsNet
from tests.playground.conftest import PHONE, OpenPage
from tests.playground.hand import ONE, SEVEN, ask_for, changed, colours, draw, image, said
from tests.service.conftest import drawn, encoded, serving, settings

pytestmark = pytest.mark.alone

KEY = "correct horse"
SOON = 300  # milliseconds


def test_a_drawn_seven_is_seen_and_explained(with_seven: Page, server: str) -> None:
    page = with_seven
    assert len(page.query_selector_all("#lengths li")) == 10
    figures = [float(each) for each in page.locator("#lengths .figure").all_inner_texts()]
    assert max(figures) == figures[7]
    assert said(page, "#lengths .winner .label") == "7"
    assert "capsule 7 is" in said(page, "#reason").lower()
    assert "answered in" in said(page, "#took")
    assert len({image(page, tile) for tile in ("seen", "believed", "difference")}) == 3
    assert "7" in str(page.get_attribute("#believed", "aria-label"))
    assert said(page, "#subject") == "This is your 7."


def test_answers_come_while_the_pen_is_down_one_at_a_time(page: Page) -> None:
    flying, most = 0, 0

    def started(*_: object) -> None:
        nonlocal flying, most
        flying += 1
        most = max(most, flying)

    def ended(*_: object) -> None:
        nonlocal flying
        flying -= 1

    page.on("request", lambda request: "/predict" in request.url and started())
    for end in ("requestfinished", "requestfailed"):
        page.on(end, lambda request: "/predict" in request.url and ended())
    draw(page, SEVEN, lift=False)
    ask_for(page, "7", finally_=False)
    page.mouse.up()
    for stroke in (ONE, SEVEN, ONE):
        page.click("#clear")
        draw(page, stroke)
    ask_for(page, "1")
    assert most == 1


def test_an_answer_that_nobody_waits_for_is_dropped(page: Page) -> None:
    held: list[Route] = []
    over: list[str] = []
    page.route("**/predict?*", lambda route: held.append(route))
    for end in ("requestfinished", "requestfailed"):
        page.on(end, lambda request: over.append(request.url))
    draw(page, SEVEN)
    while not held:
        page.wait_for_timeout(20)
    page.click("#clear")
    for route in held:
        route.continue_()
    while len(over) < len(held):
        page.wait_for_timeout(20)
    page.wait_for_timeout(50)  # for the page to make nothing of it
    assert said(page, "#verdict") == "Nothing yet"


def test_the_first_answer_comes_soon_after_the_stroke(open_page: OpenPage, compact: CapsNet) -> None:
    """Of the shipped network, to all of the stroke. `pytest -s` tells how soon. Other work may have the processor, so that one in
    time is enough."""
    with serving(settings(), {"compact": compact}) as client:
        waits = _waits(open_page(at=str(client.base_url)))
    print(f"first answers after the stroke, in milliseconds: {', '.join(f'{each:.0f}' for each in sorted(waits))}")
    assert min(waits) < SOON


def _waits(page: Page) -> list[float]:
    page.evaluate("""() => {
        const [slate, answer] = ["drawing", "answer"].map((id) => document.getElementById(id));
        const last = new MutationObserver(() => answer.ariaBusy === "true" || (window.answered ??= performance.now()));
        slate.addEventListener("pointerup", () => {
            window.lifted = performance.now();
            window.answered = undefined;
            last.observe(answer, { attributeFilter: ["aria-busy"] });
        });
    }""")
    waits: list[float] = []
    while len(waits) < 9 or (min(waits) >= SOON and len(waits) < 30):
        draw(page, ONE)
        waits.append(page.wait_for_function("() => window.answered && window.answered - window.lifted").json_value())
        page.click("#clear")
    return waits


def test_an_example_is_a_click(page: Page) -> None:
    page.get_by_role("button", name="Example 3").click()
    ask_for(page, "3")
    assert page.get_attribute("#drawing", "aria-label") == "Your drawing: example 3"
    draw(page, [[(0.5, 0.2), (0.5, 0.3)]])  # and more can be drawn on it
    assert page.get_attribute("#drawing", "aria-label") == "Your drawing: example 3, 1 stroke"


def test_examples_of_other_classes_are_drawn_by_the_model(open_page: OpenPage) -> None:
    page = open_page(path="/?model=words")
    page.get_by_role("button", name="Example sneaker").click()
    ask_for(page, "This is sneaker")
    assert "Capsule sneaker is" in said(page, "#reason")


def test_a_chosen_picture_is_sent_as_it_is(page: Page, tmp_path: Path) -> None:
    photo = tmp_path / "seven on paper.jpg"
    photo.write_bytes(encoded(drawn("7", 400, ink=40, paper=200), "JPEG"))
    with page.expect_request("**/predict?*") as sent:
        page.set_input_files("#file", photo)
    assert sent.value.all_headers()["content-length"] == str(len(photo.read_bytes()))
    ask_for(page, "7")
    assert "-F 'file=@seven on paper.jpg'" in said(page, "#command")
    draw(page, ONE)  # nothing can be drawn over a photo: this is another digit
    ask_for(page, "1")
    page.click("#undo")
    ask_for(page, "7")


def test_a_large_photo_is_scaled_down_before_it_is_sent(page: Page, tmp_path: Path) -> None:
    photo = tmp_path / "seven.bmp"
    photo.write_bytes(encoded(drawn("7", 2000, ink=40, paper=200), "BMP"))
    with page.expect_request("**/predict?*") as sent:
        page.set_input_files("#file", photo)
    assert sent.value.headers["content-type"] == "image/jpeg"
    assert int(sent.value.all_headers()["content-length"]) < 300_000
    ask_for(page, "7")


def test_a_picture_that_the_service_cannot_read_is_converted_where_the_browser_can(page: Page, tmp_path: Path) -> None:
    moving = tmp_path / "seven.gif"
    moving.write_bytes(encoded(drawn("7", 300, ink=40, paper=200), "GIF"))
    with page.expect_request("**/predict?*") as sent:
        page.set_input_files("#file", moving)
    assert sent.value.headers["content-type"] == "image/jpeg"
    ask_for(page, "7")
    assert "-F 'file=@seven.jpg'" in said(page, "#command")  # a GIF it would refuse
    assert "save it as seven.jpg first." in said(page, "#latency")


def test_of_a_large_file_that_is_no_picture_the_beginning_is_sent(page: Page, tmp_path: Path) -> None:
    film = tmp_path / "film.mp4"
    film.write_bytes(b"\0\0\0\x18ftypmp42" + bytes(12 << 20))
    with page.expect_request("**/predict?*") as sent:
        page.set_input_files("#file", film)
    assert sent.value.all_headers()["content-length"] == str(1 << 20)
    expect(page.locator("#refused")).to_contain_text("PNG, JPEG, WebP and BMP are read")


def test_a_file_that_goes_away_stays_on_the_slate(page: Page, tmp_path: Path) -> None:
    photo = tmp_path / "seven.png"
    photo.write_bytes(encoded(drawn("7")))
    page.set_input_files("#file", photo)
    ask_for(page, "7")
    photo.unlink()
    page.select_option("#model", "pair")
    expect(page.locator("#model")).to_have_value("pair")
    page.wait_for_function("() => document.querySelector('#lengths').style.getPropertyValue('--presence') === '0.02'")
    ask_for(page, "7")


@pytest.mark.parametrize(("event", "carrier"), [("paste", "clipboardData"), ("drop", "dataTransfer")])
def test_a_picture_may_be_pasted_or_dropped(page: Page, event: str, carrier: str) -> None:
    _hand_over(page, event, carrier, "one.png")
    ask_for(page, "1")
    assert ("This was pasted: save it as one.png first." in said(page, "#latency")) == (event == "paste")


def test_what_is_pasted_into_a_field_is_the_fields(page: Page) -> None:
    """A spreadsheet's cell comes as words and as a picture of them."""
    kept = page.evaluate(
        """() => {
            const cell = new DataTransfer();
            cell.setData("text/plain", "5");
            cell.items.add(new File(["picture"], "image.png", { type: "image/png" }));
            const event = new ClipboardEvent("paste", { clipboardData: cell, bubbles: true, cancelable: true });
            return document.querySelector("#steps").dispatchEvent(event);
        }"""
    )
    assert kept  # nobody prevented it
    expect(page.locator("#drawing")).to_have_attribute("aria-label", "Your drawing: empty")


@pytest.mark.parametrize(
    "lack",
    [
        "delete AbortSignal.any",  # Safari before 17.4, Firefox before 124
        "Object.defineProperty(window, 'sessionStorage', { get() { throw new DOMException('denied', 'SecurityError') } })",
        "history.replaceState = () => { throw new DOMException('a hundred in half a minute', 'SecurityError') }",  # Safari
    ],
    ids=["signals", "storage", "history"],
)
def test_a_browser_that_lacks_something_does_the_rest(open_page: OpenPage, lack: str) -> None:
    page = open_page(script=lack)
    draw(page, SEVEN)
    ask_for(page, "7")
    with page.expect_request("**/predict?model=pair*"):
        page.select_option("#model", "pair")
    page.click("#clear")
    expect(page.locator("#verdict")).to_have_text("Nothing yet")


def test_of_several_files_the_first_is_taken_and_that_is_said(page: Page) -> None:
    _hand_over(page, "drop", "dataTransfer", "one.png", "another.png")
    expect(page.locator("#refused")).to_contain_text("Of these 2 files the first is on the slate, one.png")
    ask_for(page, "1")
    page.click("#clear")
    expect(page.locator("#refused")).to_be_hidden()


def _hand_over(page: Page, event: str, carrier: str, *names: str) -> None:
    page.evaluate(
        """([kind, carrier, names, text]) => {
            const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
            const files = new DataTransfer();
            for (const name of names) files.items.add(new File([bytes], name, { type: "image/png" }));
            const made = kind === "paste" ? ClipboardEvent : DragEvent;
            document.body.dispatchEvent(new made(kind, { [carrier]: files, bubbles: true, cancelable: true }));
        }""",
        [event, carrier, names, base64.b64encode(encoded(drawn("1"))).decode()],
    )


def test_what_is_no_picture_is_said_in_plain_words(page: Page, tmp_path: Path) -> None:
    letter = tmp_path / "letter.json"
    letter.write_text('{"dear": "model"}')
    page.set_input_files("#file", letter)
    expect(page.locator("#refused")).to_contain_text("PNG, JPEG, WebP and BMP are read")
    expect(page.locator("#verdict")).to_have_text("No answer")
    page.click("#undo")
    expect(page.locator("#refused")).to_be_hidden()
    draw(page, SEVEN)
    ask_for(page, "7")


def test_sliders_turn_the_pose(with_seven: Page, nets: dict[str, CapsNet]) -> None:
    page = with_seven
    page.wait_for_timeout(200)
    still = image(page, "turned")
    assert page.locator("#sliders input").count() == nets["tiny"].manifest.pose_size
    names = [each.name for each in nets["tiny"].manifest.dimensions]
    page.get_by_role("slider", name=names[3], exact=True).focus()
    with page.expect_request(lambda request: "dim=3&delta=0.01" in request.url):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("End")
    turned = changed(page, "turned", still)
    assert said(page, "output[for=dim-3]") == "+0.25"
    expect(page.locator("#command")).to_contain_text("delta=0.25")
    page.get_by_role("slider", name=names[5], exact=True).fill("-0.2")
    both = changed(page, "turned", turned)
    page.get_by_role("button", name=f"Reset {names[3]}", exact=True).click()
    changed(page, "turned", both)
    assert said(page, "output[for=dim-3]") == "0.00"
    page.click("#reset")
    page.wait_for_function("before => document.getElementById('turned').toDataURL() === before", arg=still)
    assert page.locator("#reset").is_disabled()


def test_a_pose_is_drawn_as_another_digit(with_seven: Page) -> None:
    page = with_seven
    page.wait_for_timeout(200)
    before = image(page, "turned")
    with page.expect_request(lambda request: "as_label=1" in request.url):
        page.select_option("#as-label", "1")
    changed(page, "turned", before)
    assert said(page, "#subject") == "This is your 7, drawn as a 1."


def test_before_anything_is_drawn_the_prototypes_can_be_turned(page: Page) -> None:
    assert "the model’s average 3" in said(page, "#subject")
    before = image(page, "turned")
    page.select_option("#as-label", "8")
    changed(page, "turned", before)


def test_dimensions_have_the_names_that_the_manifest_gives(open_page: OpenPage, server: str) -> None:
    def named(route: Route) -> None:
        told = route.fetch().json()
        told["manifest"]["dimensions"] = [{"name": "slant", "strength": 0.9}, {"name": "", "strength": 0.0}]
        route.fulfill(json=told)

    page = open_page(path="/docs", wait=False)
    page.route("**/models/*", named)
    page.goto(server)
    page.wait_for_selector("#sliders input")
    assert page.locator("#sliders label").all_inner_texts()[:3] == ["slant", "dimension 1", "dimension 2"]


def test_the_sheet_opens_and_closes(with_seven: Page, nets: dict[str, CapsNet]) -> None:
    page = with_seven
    page.focus("#open-sweep")
    page.keyboard.press("Enter")
    sheet, dims = page.locator("#sheet img"), nets["tiny"].manifest.pose_size
    expect(sheet).to_be_visible()
    assert sheet.evaluate("image => [image.naturalWidth, image.naturalHeight]") == [11 * 56, dims * 56]
    for height in (500, 720, 1400):  # a digit that is drawn narrower says of a dimension what it does not do
        page.set_viewport_size({"width": 1280, "height": height})
        box = sheet.bounding_box()
        assert box is not None
        assert box["width"] / box["height"] == pytest.approx(11 / dims, rel=0.02)
    assert page.locator("#sheet li").count() == dims
    assert "reconstruct/sweep?" in said(page, "#command")
    page.keyboard.press("Escape")
    expect(page.locator("#sweep")).to_be_hidden()
    assert page.evaluate("document.activeElement.id") == "open-sweep"


def test_from_one_drawn_digit_to_another(with_seven: Page) -> None:
    page = with_seven
    page.click("#keep-from")
    assert "another digit" in said(page, "#strip")
    page.click("#clear")
    assert page.locator("#keep-to").is_disabled()
    draw(page, ONE)
    ask_for(page, "1")
    page.click("#keep-to")
    strip = page.locator("#strip img")
    expect(strip).to_have_attribute("alt", "9 drawings from a 7 to a 1")
    page.fill("#steps", "5")
    page.keyboard.press("Tab")
    expect(strip).to_have_attribute("alt", "5 drawings from a 7 to a 1")
    assert strip.evaluate("image => image.naturalWidth") == 5 * 112


def test_another_model_answers_about_the_same_drawing(with_seven: Page) -> None:
    page = with_seven
    page.click("#keep-from")
    with page.expect_request("**/predict?model=pair*"):
        page.select_option("#model", "pair")
    ask_for(page, "7")
    expect(page.locator("#from")).to_have_attribute("aria-label", "No start yet")  # a pose of the other model
    assert said(page, "#strip").startswith("Draw a digit and keep it as the start")
    page.reload()
    expect(page.locator("#model")).to_have_value("pair")
    page.click("#clear")
    expect(page.locator("#invitation")).to_have_text("Draw two digits, one over the other")
    page.select_option("#model", "tiny")
    expect(page.locator("#invitation")).to_have_text("Draw a digit")
    assert "two" not in said(page, "#reason")


def test_two_digits_over_each_other_come_apart_in_two_colours(open_page: OpenPage) -> None:
    page = open_page(path="/?model=pair")
    expect(page.locator("#model")).to_have_value("pair")
    expect(page.locator("#invitation")).to_have_text("Draw two digits, one over the other")
    assert said(page, "#reason") == "Draw two digits, one over the other, or pick examples below the slate."
    for label in "07":
        page.get_by_role("button", name=f"Example {label}").click()
        expect(page.locator("#drawing")).to_have_attribute(
            "aria-label", f"Your drawing: example 0{', example 7' * (label == '7')}"
        )
    expect(page.locator("#verdict")).to_contain_text(" and ")
    expect(page.locator("#reason")).to_contain_text("It looks for two in every picture")
    assert page.locator("#lengths .first, #lengths .second").count() == 2
    assert page.locator("#believed-hint .key").count() == 2
    assert min(colours(page)) > 10
    page.wait_for_timeout(150)
    before = image(page, "turned")
    page.locator("#objects input").nth(1).check()
    changed(page, "turned", before)


def test_the_digit_that_was_chosen_stays_so_when_another_becomes_the_longer(open_page: OpenPage) -> None:
    page = open_page(path="/?model=pair")
    for label in "07":
        page.get_by_role("button", name=f"Example {label}").click()
    ask_for(page, " and ")
    chosen = page.locator("#objects label").nth(1)
    chosen.locator("input").check()
    label = chosen.inner_text()

    def turned_round(route: Route) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, json={**answer.json(), "objects": answer.json()["objects"][::-1]})

    page.route("**/predict?*", turned_round)
    draw(page, [[(0.5, 0.5), (0.52, 0.5)]])
    expect(page.locator("#objects label").first).to_have_text(label)
    expect(page.locator("#objects label").first.locator("input")).to_be_checked()
    page.locator("#objects input").first.press("Control+z")  # there is nothing to undo in a choice
    expect(page.locator("#drawing")).to_have_attribute("aria-label", "Your drawing: example 0, example 7")
    page.unroute_all(behavior="ignoreErrors")  # or the last answer is turned round for a page that is gone


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


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs the program `curl`")
def test_the_command_does_what_was_just_done(with_seven: Page, tmp_path: Path) -> None:
    page = with_seven
    page.wait_for_timeout(100)
    answer = json.loads(_run(said(page, "#command"), tmp_path))
    assert (answer["label"], answer["model"]) == ("7", "tiny")
    page.fill("#dim-3", "0.1")
    expect(page.locator("#command")).to_contain_text("delta=0.1")
    _run(said(page, "#command"), tmp_path)
    assert (tmp_path / "reconstruct.png").read_bytes().startswith(b"\x89PNG")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click("#copy")
    expect(page.locator("#copy")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == said(page, "#command")


def test_all_of_it_by_keyboard(page: Page, nets: dict[str, CapsNet]) -> None:
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    entries = page.evaluate("history.length")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "answer"
    assert page.evaluate("history.length") == entries  # another would know nothing of the drawing
    page.reload()
    page.wait_for_selector("#examples button")
    _tab_to(page, "[aria-label='Example 3']")
    page.keyboard.press("Enter")
    ask_for(page, "3")
    _tab_to(page, "#clear", "Shift+Tab")
    for heir in ("undo", "undo", "file"):  # a button that can do no more does not take the focus with it
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == heir
    _tab_to(page, "[aria-label='Example 3']")
    page.keyboard.press("Enter")
    ask_for(page, "3")
    _tab_to(page, "#as-label")
    _tab_to(page, "#open-sweep")
    page.keyboard.press("Enter")
    expect(page.locator("#sheet img")).to_be_visible()
    page.keyboard.press("Escape")
    _tab_to(page, "#dim-0")
    before = image(page, "turned")
    page.keyboard.press("Home")
    changed(page, "turned", before)
    _tab_to(page, f"[aria-label='Reset {nets['tiny'].manifest.dimensions[0].name}']")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "dim-0"
    for end in ("keep-from", "keep-to"):
        _tab_to(page, f"#{end}")
        page.keyboard.press("Enter")
    expect(page.locator("#strip img")).to_be_visible()
    _tab_to(page, "#copy")


def test_on_a_phone(open_page: OpenPage) -> None:
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
    ask_for(page, "7")
    assert page.get_attribute("#drawing", "aria-label") == "Your drawing: 1 stroke"
    assert "7" in said(page, "#glance")
    assert page.evaluate("scrollY") == 0  # the finger drew and did not scroll
    sizes = page.locator("#model, #steps, #key-field").evaluate_all("all => all.map((one) => getComputedStyle(one).fontSize)")
    assert sizes == ["16px"] * 3  # of smaller ones an iPhone makes a larger page
    for width in (390, 320):
        page.set_viewport_size({"width": width, "height": 700})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.locator("#dim-5").scroll_into_view_if_needed()
    turned = page.locator("#turned").bounding_box()
    assert turned is not None
    assert 0 <= turned["y"] < 200  # the picture stays in sight of the sliders


@pytest.mark.parametrize("size", [(390, 844), (320, 568), (844, 390), (667, 375)])
def test_all_of_the_slate_and_of_the_model_switch_is_in_sight(open_page: OpenPage, size: tuple[int, int]) -> None:
    width, height = size
    page = open_page(**{**PHONE, "viewport": {"width": width, "height": height}})
    page.evaluate("() => document.querySelector('#model').append(new Option('a-network-with-a-name-that-no-telephone-can-show'))")
    switch = page.locator("label:has(#model)").bounding_box()
    assert switch is not None
    assert 0 <= switch["x"] <= switch["x"] + switch["width"] <= width
    draw(page, SEVEN)
    ask_for(page, "7")
    drawing = page.get_attribute("#drawing", "aria-label")
    slate = page.locator("#slate").bounding_box()
    assert slate is not None
    assert slate["height"] < height - 80
    page.set_viewport_size({"width": height, "height": width})  # and a turned phone keeps what is drawn
    assert page.get_attribute("#drawing", "aria-label") == drawing


def test_reduced_motion_is_honoured(open_page: OpenPage) -> None:
    page = open_page(reduced_motion="reduce")
    page.evaluate("() => (document.querySelector('#state').dataset.state = 'asking')")  # else it moves for nobody
    assert page.locator(".bar > span").first.evaluate("bar => getComputedStyle(bar).transitionDuration") == "0s"
    assert page.locator("#state").evaluate("state => getComputedStyle(state, '::before').animationName") == "none"


def _tab_to(page: Page, selector: str, key: str = "Tab") -> None:
    until = time.monotonic() + 8
    while not page.evaluate("selector => document.activeElement.matches(selector)", selector):
        assert time.monotonic() < until, f"{selector} cannot be reached"
        page.keyboard.press(key)


def _run(command: str, folder: Path) -> str:
    return subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, timeout=20, check=True).stdout
