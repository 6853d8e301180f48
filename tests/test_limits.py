"""The numbers in the manuals are the code's: a limit that changes without its page fails here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from service import app, bundle, catalogue, images, manifest, pngfile, served, verdict
from service.process import memory, siblings, workers
from service.settings import Settings
from service.web import envelope, multipart, protocol, refusals

ROOT = Path(__file__).parents[1]
RULES = (ROOT / "docker/prometheus/rules.yml").read_text()
PAUSE, LARGE, MANY = re.findall(  # in nginx.conf they stand in this order
    r"(?:client_body_timeout|limit_conn large_bodies|limit_conn requests) (\d+)s?;",
    (ROOT / "docker/nginx/nginx.conf").read_text(),
)
(ROLLOUT_WAIT,) = re.findall(r"ROLLOUT_WAIT:-(\d+)", (ROOT / "docker/rollout.sh").read_text())
(PROXY_TMP,) = re.findall(r"/tmp:size=(\d+)m", (ROOT / "docker/compose.replicas.yml").read_text())
WORDS = {4: "four", 5: "five", 16: "sixteen"}
ORDINALS = {5: "fifth"}

LIMITS = {
    "service/app.py": [f"at most {WORDS[app.DECODERS]} are decoded at once"],
    "service/bundle.py": [f"{bundle.EXAMPLE_LIMIT >> 20} MB for the example"],
    "service/images.py": [
        f"{images.LONGEST_SIDE:,} a side",
        f"more than {images.MOST_SCANS} are refused",
        f"more than {images.MOST_SCANNED_PIXELS:,} pixels in all, or, where that is more, "
        f"{images.MOST_FULL_SCANS} times `CAPSERVE_MAX_PIXELS`",
        f"more than {images.MOST_MARKERS:,} markers are refused, and more than {images.MOST_PARSED:,} bytes of Exif",
        f"the first {images.MOST_EXIF:,} bytes of it alone",
        f"more than {images.LARGEST_RLE:,} bytes and pixels",
    ],
    "service/manifest.py": [f"{manifest.MANIFEST_LIMIT >> 20} MB for the manifest"],
    "service/pngfile.py": [
        f"more than {pngfile.MOST_CHUNKS} chunks beside its pixels",
        f"more than {pngfile.MOST_PIXEL_CHUNKS:,} of pixels",
    ],
    "service/web/bodies.py": [f"at {app.LARGEST_BODIES} times `CAPSERVE_MAX_BODY`"],
    "service/web/multipart.py": [
        f"{multipart.LONG_HEAD * multipart.MOST_PARTS:,} bytes of them",
        f"{WORDS[multipart.MOST_READ]} a part are looked at",
    ],
    "service/web/protocol.py": [
        f"{protocol.MOST_HEAD >> 10} KB, in {protocol.MOST_HEADERS} headers",
        f"{WORDS[protocol.MOST_QUEUED]} wait for their turn, or what {protocol.PIECE >> 10} KB more hold",
    ],
    "docker/nginx/nginx.conf": [
        f"{PAUSE} seconds pass between two parts, and an address have {LARGE} large bodies and {int(MANY):,} requests"
    ],
}


def test_every_file_named_in_security_md_exists() -> None:
    named = re.findall(r"`((?:service|docker|training|tests)/[\w./-]+|docker-compose.yml)`", (ROOT / "SECURITY.md").read_text())
    assert len(named) > 20
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("file", LIMITS)
def test_security_md_states_each_limit_beside_its_file(file: str) -> None:
    rows = [row for row in (ROOT / "SECURITY.md").read_text().splitlines() if f"`{file}`" in row]
    for limit in LIMITS[file]:
        assert any(limit in row for row in rows), limit


BODIES = app.LARGEST_BODIES * Settings.model_fields["max_body"].default

STATEMENTS = [
    ("README.md", f"more than {protocol.MOST_HEAD >> 10} KB or {protocol.MOST_HEADERS} of headers"),
    ("README.md", f"at most one in {1 / verdict.UNSURE_SHARE:.0f} is so unlike the others as to be `unsure`, and one in"),
    ("README.md", f"and one in {1 / verdict.NOT_A_DIGIT_SHARE:.0f} `not_a_digit`"),
    ("docs/operations.md", f"event loop has not turned for {workers.STILL:.0f} seconds"),
    ("docs/operations.md", f"pauses that grow to {workers.LONGEST_PAUSE:.0f} s"),
    ("docs/operations.md", f"the {ORDINALS[workers.TRIES]} that dies ends the server"),
    ("docs/operations.md", f"up to {app.LARGEST_BODIES} times `CAPSERVE_MAX_BODY` together"),
    ("docs/operations.md", f"if they are more), {BODIES >> 20} MB"),
    ("docs/operations.md", f"at least {served.MOST_DRAWINGS:,} each"),
    ("docs/operations.md", f"beyond {refusals.RATE} a second"),
    ("docs/operations.md", f"A process takes 175 to {memory.PROCESS_BYTES >> 20} MB with the three shipped models"),
    (
        "docs/operations.md",
        f"takes up to {memory.PIXEL_BYTES * Settings.model_fields['max_pixels'].default // 10**6} MB while it is decoded",
    ),
    ("docs/operations.md", f"after {WORDS[served.HOPELESS]} failures in a row"),
    ("docs/operations.md", f"{siblings.REPLACE_ME} a runtime that fails"),
    ("docs/operations.md", f"A reload that is not done after {catalogue.LONGEST_RELOAD:.0f} s is given up"),
    ("docs/operations.md", f"the first part of more than {envelope.LONGEST_PART} characters"),
    ("docs/operations.md", f"It waits at most {ROLLOUT_WAIT} s, or `ROLLOUT_WAIT` seconds"),
    ("docs/operations.md", f"wait in nginx's /tmp, {PROXY_TMP} MB of memory"),
]


@pytest.mark.parametrize(("page", "words"), STATEMENTS)
def test_documented_numbers_match_the_code(page: str, words: str) -> None:
    assert words in " ".join((ROOT / page).read_text().split())


@pytest.mark.parametrize(
    ("alert", "condition", "told"),
    [
        ("CapserveErrors", "ratio_rate5m > 0.01", "More than 1 % of requests are answered 5xx for five minutes"),
        ("CapserveSlow", "> 0.5", "p99 over half a second for ten minutes"),
        ("CapserveQueueNearFull", "queue:ratio > 0.8", "Over 80 % of a queue is taken for a minute"),
        ("CapserveRejecting", "0.01 * sum", "More than 1 % of requests are refused for want of room or time"),
    ],
)
def test_alert_conditions_match_operations_md(alert: str, condition: str, told: str) -> None:
    assert condition in RULES.partition(f"- alert: {alert}\n")[2].partition("- alert:")[0]
    assert told in (ROOT / "docs/operations.md").read_text().partition(f"### {alert}\n")[2].partition("\n### ")[0]
