"""Accept and If-None-Match, as clients write them."""

from __future__ import annotations

import pytest

from service.web.headers import matches, preferred

PNG, JSON = "image/png", "application/json"


@pytest.mark.parametrize(
    ("accept", "offer"),
    [
        ("", PNG),
        ("*/*", PNG),
        ("image/*", PNG),
        ("IMAGE/PNG", PNG),
        (JSON, JSON),
        ("application/*", JSON),
        ("application/json; charset=utf-8", JSON),
        ("application/json;q=0.5, image/png;q=0.4", JSON),
        ("application/json;q=0.5, image/png; q=0.50", PNG),
        ("application/json;q=0", None),
        ("application/json;Q=0", None),
        ("application/json;q=0.000, image/*;q=0.1", PNG),
        ("*/*, application/json;q=0", PNG),
        ("*/*, image/png;q=0", JSON),
        ("*/*;q=0", None),
        ("image/*;q=0, */*", JSON),
        ("application/json, text/plain, */*", JSON),
        ("text/plain, " * 63 + JSON, JSON),
        ("text/plain, " * 64 + JSON, None),
        ("text/html,application/xhtml+xml,image/avif,image/webp,*/*;q=0.8", PNG),
        ("application/problem+json", None),
        ("application/jsonp, x-application/json", None),
        ("text/html", None),
        ("application/json;q=2, image/png", PNG),
        ("application/json;q=x", PNG),  # what cannot be understood counts as nothing
        ("json, , ;q=1", PNG),
    ],
)
def test_the_preferred_media_type_is_chosen(accept: str, offer: str | None) -> None:
    assert preferred([accept], (PNG, JSON)) == offer
    assert preferred(accept.split(","), (PNG, JSON)) == offer


@pytest.mark.parametrize(
    ("header", "known"),
    [
        ("*", True),
        ('"a"', True),
        ('W/"a"', True),
        ('"b", W/"c" ,"a"', True),
        ('"b,c","a"', True),
        ("", False),
        ("a", False),
        ('"A"', False),
        ('"b", *', False),
        ('"x, a"', False),
    ],
)
@pytest.mark.parametrize("etag", ['"a"', 'W/"a"'])
def test_etags_are_compared_weakly(header: str, known: bool, etag: str) -> None:
    assert matches([header], etag) == known
