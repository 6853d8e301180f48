"""The pages as files over HTTP: light, cacheable, under a strict policy, there without a key; and /docs without any script."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest

from service.engine import CapsNet
from service.routes import playground
from tests.playground.conftest import OpenPage
from tests.service.conftest import serving, settings

MAX_PAGE_BYTES = 150_000  # bytes, all that the page loads


@pytest.fixture
def client(server: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server) as client:
        yield client


def test_the_page_with_all_its_files_is_small() -> None:
    assert sum(len(file.content) for file in playground.FILES.values()) < MAX_PAGE_BYTES
    assert {"index.html", "style.css", "app.js", "icon.svg"} <= playground.FILES.keys()


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "text/html; charset=utf-8"),
        ("/docs", "text/html; charset=utf-8"),
        ("/playground/app.js", "text/javascript; charset=utf-8"),
        ("/playground/style.css", "text/css; charset=utf-8"),
        ("/playground/icon.svg", "image/svg+xml"),
    ],
)
def test_files_have_a_type_a_policy_and_an_etag(client: httpx.Client, path: str, kind: str) -> None:
    answer = client.get(path)
    assert (answer.status_code, answer.headers["Content-Type"]) == (200, kind)
    assert _policy(answer) == {
        **dict.fromkeys(("default-src", "form-action", "base-uri", "frame-ancestors"), {"'none'"}),
        **dict.fromkeys(("script-src", "style-src", "connect-src"), {"'self'"}),
        "img-src": {"'self'", "blob:"},
    }
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    known = client.get(path, headers={"If-None-Match": f'"other", W/{answer.headers["ETag"]}'})
    assert (known.status_code, known.content) == (304, b"")
    head = client.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["ETag"] == answer.headers["ETag"]


def _policy(answer: httpx.Response) -> dict[str, set[str]]:
    directives = [each.split() for each in answer.headers["Content-Security-Policy"].split(";")]
    return {name: set(sources) for name, *sources in directives}


def test_no_answer_allows_other_origins_to_read_it(client: httpx.Client) -> None:
    for path in ("/", "/models", "/reconstruct?label=7", "/nowhere"):
        headers = client.get(path, headers={"Origin": "https://elsewhere.example"}).headers
        assert not [name for name in headers if name.startswith("access-control-")], path


def test_pages_have_no_inline_code_and_load_nothing_from_other_hosts(client: httpx.Client) -> None:
    for path in ("/", "/docs"):
        page = client.get(path).text
        assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]* src=)", page)
        assert not re.search(r"(src|<link[^>]* href)=\"https?:", page)


def test_paths_other_than_the_pages_files_are_not_found(client: httpx.Client) -> None:
    for path in ("/playground/", "/playground/nothing.js", "/playground/..%2fsettings.py", "/redoc"):
        assert client.get(path).status_code == 404


def test_the_page_and_its_files_need_no_key_but_other_paths_do(nets: dict[str, CapsNet]) -> None:
    with serving(settings(model="tiny", api_key="correct horse"), nets) as client:
        assert all(client.get(path).status_code == 200 for path in playground.PATHS)
        assert client.get("/playground/nothing.js").status_code == 401
        assert client.get("/docs").status_code == 401


def test_the_reference_names_every_path_and_needs_no_script(open_page: OpenPage, client: httpx.Client) -> None:
    page = open_page(path="/docs", wait=False, java_script_enabled=False)
    shown = page.locator("main").inner_text()
    document = client.get("/openapi.json").json()
    assert all(path in shown for path in document["paths"])
    assert "capsule lengths, in the order of the model's classes" in shown
    for link in page.locator("a").all():
        address = str(link.get_attribute("href"))
        if address.startswith("#"):
            assert page.locator(f"[id='{address[1:]}']").count() == 1
        elif not address.startswith("https:"):
            assert client.get(f"/{address.removeprefix('./')}").status_code == 200, address
