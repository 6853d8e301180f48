"""Pictures that are not drawn here: chosen, dropped, pasted, large, or none at all."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Page, expect

from service import images
from service.settings import Settings
from tests.playground.conftest import OpenPage
from tests.playground.hand import ONE, SEVEN, draw, said, wait_for_verdict
from tests.service.conftest import drawn, encoded

PLAYGROUND = Path(images.__file__).parent / "playground"


def test_the_pages_upload_limits_match_the_services() -> None:
    script = (PLAYGROUND / "upload.js").read_text()
    usual = {name: field.default for name, field in Settings.model_fields.items()}
    assert f"MOST_BYTES = ({usual['max_body'] >> 20} << 20) + 1;" in script
    assert f"[MOST_PIXELS, LONGEST] = [{usual['max_pixels']:_}, {images.LONGEST_SIDE:_}];" in script


def test_a_chosen_picture_is_sent_as_it_is(page: Page, tmp_path: Path) -> None:
    photo = tmp_path / "seven on paper.jpg"
    photo.write_bytes(encoded(drawn("7", 400, ink=40, paper=200), "JPEG"))
    with page.expect_request("**/predict?*") as sent:
        page.set_input_files("#file", photo)
    assert sent.value.all_headers()["content-length"] == str(len(photo.read_bytes()))
    wait_for_verdict(page, "7")
    assert "-F 'file=@\"seven on paper.jpg\"'" in said(page, "#command")
    draw(page, ONE)  # nothing can be drawn over a photo: this is another digit
    wait_for_verdict(page, "1")
    page.click("#undo")
    wait_for_verdict(page, "7")


def test_after_a_reload_the_page_asks_to_choose_the_picture_again(page: Page, tmp_path: Path) -> None:
    photo = tmp_path / "seven.png"
    photo.write_bytes(encoded(drawn("7")))
    page.set_input_files("#file", photo)
    wait_for_verdict(page, "7")
    page.reload()
    expect(page.locator("#refusal")).to_have_text("seven.png is not kept when you leave: choose it again.")
    draw(page, ONE)
    wait_for_verdict(page, "1")
    page.reload()
    wait_for_verdict(page, "1")
    expect(page.locator("#refused")).to_be_hidden()


def test_a_large_photo_is_scaled_down_before_it_is_sent(page: Page, tmp_path: Path) -> None:
    photo = tmp_path / "seven.bmp"
    photo.write_bytes(encoded(drawn("7", 2000, ink=40, paper=200), "BMP"))
    with page.expect_request("**/predict?*") as sent:
        page.set_input_files("#file", photo)
    assert sent.value.headers["content-type"] == "image/jpeg"
    assert int(sent.value.all_headers()["content-length"]) < 300_000
    wait_for_verdict(page, "7")
    assert "-F 'file=@\"seven.bmp\"'" in said(page, "#command")
    assert "This page sent it as a JPEG of 1600x1600 pixels." in said(page, "#latency")
    photo.write_bytes(encoded(drawn("7", 2000, ink=40, paper=200).convert("RGB"), "BMP"))  # 12 MB, too much to send it with curl
    page.set_input_files("#file", photo)
    expect(page.locator("#command")).to_contain_text("-F 'file=@\"seven-small.jpg\"'")
    assert "sent this as a JPEG of 1600x1600 pixels: first save that as seven-small.jpg." in said(page, "#latency")


def test_a_scan_with_few_bytes_and_many_pixels_is_scaled_down_too(page: Page, tmp_path: Path) -> None:
    scan = tmp_path / "seven.png"
    scan.write_bytes(encoded(drawn("7", 5100, ink=0, paper=255).convert("1")))
    assert scan.stat().st_size < 100_000
    page.set_input_files("#file", scan)
    wait_for_verdict(page, "7")
    assert "-F 'file=@\"seven-small.jpg\"'" in said(page, "#command")


def test_a_picture_that_the_browser_cannot_scale_is_sent_as_it_is(open_page: OpenPage, tmp_path: Path) -> None:
    page = open_page(
        script="const make = createImageBitmap;"
        "window.createImageBitmap = (from, how) => (how ? Promise.reject(new TypeError('no options')) : make(from));"
    )
    (tmp_path / "seven.png").write_bytes(encoded(drawn("7", 2000, ink=40, paper=200)))
    page.set_input_files("#file", tmp_path / "seven.png")
    wait_for_verdict(page, "7")


def test_a_picture_the_service_cannot_read_is_converted_by_the_browser(page: Page, tmp_path: Path) -> None:
    moving = tmp_path / "seven.gif"
    moving.write_bytes(encoded(drawn("7", 300, ink=40, paper=200), "GIF"))
    with page.expect_request("**/predict?*") as sent:
        page.set_input_files("#file", moving)
    assert sent.value.headers["content-type"] == "image/jpeg"
    wait_for_verdict(page, "7")
    assert "-F 'file=@\"seven.jpg\"'" in said(page, "#command")  # a GIF would be refused
    assert "sent this as a JPEG: first save that as seven.jpg." in said(page, "#latency")


def test_only_the_start_of_a_large_file_that_is_no_picture_is_sent(page: Page, tmp_path: Path) -> None:
    film = tmp_path / "film.mp4"
    film.write_bytes(b"\0\0\0\x18ftypmp42" + bytes(12 << 20))
    with page.expect_request("**/predict?*") as sent:
        page.set_input_files("#file", film)
    assert sent.value.all_headers()["content-length"] == str(1 << 20)
    expect(page.locator("#refused")).to_contain_text("PNG, JPEG, WebP and BMP are read")
    expect(page.locator("#latency")).to_contain_text("Refused, with status 415.")


def test_a_large_picture_the_browser_cannot_read_is_sent_whole(page: Page, tmp_path: Path) -> None:
    photo = tmp_path / "seven.jpg"
    photo.write_bytes(b"\xff\xd8\xff\xe0" + bytes(3 << 20))
    with page.expect_request("**/predict?*") as sent:
        page.set_input_files("#file", photo)
    assert sent.value.all_headers()["content-length"] == str(4 + (3 << 20))
    photo.write_bytes(b"\xff\xd8\xff\xe0" + bytes(30 << 20))
    page.set_input_files("#file", photo)
    expect(page.locator("#refused")).to_contain_text("the body is larger than 10,485,760 bytes")
    expect(page.locator("#subject")).to_have_text("This is the model’s average 3.")


def test_ink_on_a_transparent_picture_is_visible_on_the_slate(page: Page, tmp_path: Path) -> None:
    ink_and_paper = """() => [0.5, 0.7].map((x) => {
        const canvas = document.querySelector("#drawing");
        return canvas.getContext("2d").getImageData(x * canvas.width, 0.5 * canvas.height, 1, 1).data[0];
    })"""
    for colour, level in (("black", 0), ("white", 255)):
        ink = Image.new("RGBA", (200, 100))
        ink.paste(colour, (90, 10, 110, 90))
        (tmp_path / f"{colour}.png").write_bytes(encoded(ink))
        page.set_input_files("#file", tmp_path / f"{colour}.png")
        expect(page.locator("#drawing")).to_have_attribute("aria-label", f"Your drawing: the picture {colour}.png")
        assert page.evaluate(ink_and_paper) == [level, 0x99]


def test_a_deleted_file_stays_on_the_slate_and_can_be_sent_again(page: Page, tmp_path: Path) -> None:
    photo = tmp_path / "seven.png"
    photo.write_bytes(encoded(drawn("7")))
    page.set_input_files("#file", photo)
    wait_for_verdict(page, "7")
    photo.unlink()
    page.select_option("#model", "pair")
    expect(page.locator("#model")).to_have_value("pair")
    page.wait_for_function("() => document.querySelector('#lengths').style.getPropertyValue('--presence') === '0.02'")
    wait_for_verdict(page, "7")


@pytest.mark.parametrize(("event", "carrier"), [("paste", "clipboardData"), ("drop", "dataTransfer")])
def test_a_picture_may_be_pasted_or_dropped(page: Page, event: str, carrier: str) -> None:
    _hand_over(page, event, carrier, "one.png")
    wait_for_verdict(page, "1")
    assert ("This was pasted: save it as one.png first." in said(page, "#latency")) == (event == "paste")


def test_pasting_into_a_field_puts_no_picture_on_the_slate(page: Page) -> None:
    """A spreadsheet's cell is pasted as text and as a picture of it."""
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
    _hand_over(page, "paste", "clipboardData", "one.png")
    expect(page.locator("#drawing")).to_have_attribute("aria-label", "Your drawing: the picture one.png")
    page.click("#undo")
    expect(page.locator("#drawing")).to_have_attribute("aria-label", "Your drawing: empty")
    assert page.locator("#undo").is_disabled()  # there was nothing before


@pytest.mark.parametrize(
    "lack",
    [
        "delete AbortSignal.any; delete AbortSignal.timeout; delete window.OffscreenCanvas",  # Safari before 16 to 17.4
        "Object.defineProperty(window, 'sessionStorage', { get() { throw new DOMException('denied', 'SecurityError') } })",
        "history.replaceState = () => { throw new DOMException('a hundred in half a minute', 'SecurityError') }",  # Safari
    ],
    ids=["old browser", "no storage", "no history"],
)
def test_the_page_works_in_browsers_that_lack_a_feature(open_page: OpenPage, lack: str) -> None:
    page = open_page(script=lack)
    draw(page, SEVEN)
    wait_for_verdict(page, "7")
    with page.expect_request("**/predict?model=pair*"):
        page.select_option("#model", "pair")
    page.click("#clear")
    expect(page.locator("#verdict")).to_have_text("Nothing yet")


def test_only_the_first_of_several_files_is_used_and_the_page_says_so(page: Page) -> None:
    _hand_over(page, "drop", "dataTransfer", "one.png", "another.png")
    expect(page.locator("#refused")).to_contain_text("Of these 2 files, only the first, one.png, is on the slate")
    wait_for_verdict(page, "1")
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


def test_a_file_that_is_not_a_picture_gets_a_plain_message(page: Page, tmp_path: Path) -> None:
    letter = tmp_path / "letter.json"
    letter.write_text('{"dear": "model"}')
    page.set_input_files("#file", letter)
    expect(page.locator("#refused")).to_contain_text("PNG, JPEG, WebP and BMP are read")
    expect(page.locator("#verdict")).to_have_text("No answer")
    page.click("#undo")
    expect(page.locator("#refused")).to_be_hidden()
    draw(page, SEVEN)
    wait_for_verdict(page, "7")


def test_drawing_while_a_picture_loads_discards_the_picture(open_page: OpenPage, tmp_path: Path) -> None:
    slowly = "{ const make = createImageBitmap; window.createImageBitmap = async (...what) => "
    page = open_page(script=slowly + "(await new Promise((resolve) => setTimeout(resolve, 1000)), make(...what)); }")
    photo = tmp_path / "seven.png"
    photo.write_bytes(encoded(drawn("7")))
    page.set_input_files("#file", photo)
    expect(page.locator("#refused")).to_contain_text("Reading seven.png")
    draw(page, ONE)
    wait_for_verdict(page, "1")
    assert page.locator("#refused").is_hidden()
    page.wait_for_timeout(1_200)
    assert page.locator("#drawing").get_attribute("aria-label") == "Your drawing: 1 stroke"
    assert said(page, "#verdict") == "This is a 1"
