"""SECURITY.md's numbers are the code's: a limit that moves, and is not told there, fails here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from service import app, bundle, images, manifest, pngfile
from service.web import multipart, protocol

ROOT = Path(__file__).parents[1]
WORDS = {4: "four", 16: "sixteen"}

LIMITS = {
    "service/app.py": [f"at most {WORDS[app.DECODERS]} are decoded at once"],
    "service/bundle.py": [f"{bundle.EXAMPLE_LIMIT >> 20} MB for the example"],
    "service/images.py": [
        f"{images.LONGEST:,} a side",
        f"more than {images.MOST_SCANS} are refused",
        f"more than {images.MOST_SCANNED:,} pixels in all, or, where that is more, {images.AS_OFTEN} times `CAPSERVE_MAX_PIXELS`",
        f"more than {images.MOST_OF_RUNS:,} bytes and pixels",
    ],
    "service/manifest.py": [f"{manifest.MANIFEST_LIMIT >> 20} MB for the manifest"],
    "service/pngfile.py": [
        f"more than {pngfile.MOST_CHUNKS} chunks beside its pixels",
        f"more than {pngfile.MOST_OF_PIXELS:,} of pixels",
    ],
    "service/web/bodies.py": [f"at {app.LARGEST_BODIES} times `CAPSERVE_MAX_BODY`"],
    "service/web/multipart.py": [
        f"{multipart.LONG_HEAD * multipart.MOST_PARTS:,} bytes of them",
        f"{WORDS[multipart.READ]} a part are looked at",
    ],
    "service/web/protocol.py": [
        f"{protocol.MOST_HEAD >> 10} KB, in {protocol.MOST_HEADERS} headers",
        f"{WORDS[protocol.AHEAD]} wait for their turn, or what {protocol.PIECE >> 10} KB more hold",
    ],
    "docker/nginx/nginx.conf": ["10 seconds pass between two parts, and an address have 20 large bodies and 1,000 requests"],
}


def test_every_file_it_names_is_there() -> None:
    named = re.findall(r"`((?:service|docker|training|tests)/[\w./-]+|docker-compose.yml)`", (ROOT / "SECURITY.md").read_text())
    assert len(named) > 20
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("file", LIMITS)
def test_a_limit_is_told_beside_the_file_that_has_it(file: str) -> None:
    rows = [row for row in (ROOT / "SECURITY.md").read_text().splitlines() if f"`{file}`" in row]
    for limit in LIMITS[file]:
        assert any(limit in row for row in rows), limit


def test_the_proxys_limits_are_those_told() -> None:
    configuration = (ROOT / "docker/nginx/nginx.conf").read_text()
    for directive in ("client_body_timeout 10s;", "limit_conn large_bodies 20;", "limit_conn requests 1000;"):
        assert directive in configuration
