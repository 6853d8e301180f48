"""What a client's headers ask for: Accept and If-None-Match (RFC 9110), each given as the lines in which it came."""

from __future__ import annotations

import re
from collections.abc import Sequence

TOKEN = r"[\w!#$&^.+-]+"
RANGE = re.compile(rf"\s*(\*/\*|{TOKEN}/\*|{TOKEN}/{TOKEN})\s*(?:;(.*))?", re.ASCII | re.DOTALL)
WEIGHT = re.compile(r"0(?:\.\d{0,3})?|1(?:\.0{0,3})?", re.ASCII)
MOST_RANGES = 64  # a browser sends about eight; each is read in Python, on the event loop
TAG = re.compile(r'(?:W/)?("[^"]*")')


def preferred(accept: Sequence[str], offers: Sequence[str]) -> str | None:
    """Return the offer of highest weight; of equals the most specifically named, then the first. None if none is accepted."""
    parts = ",".join(accept).split(",", MOST_RANGES)[:MOST_RANGES]
    ranges = [found for part in parts if (found := _range(part)) is not None]
    if not ranges:  # no header, or none that can be parsed
        return offers[0]
    best = max(offers, key=lambda offer: _preference(offer, ranges))  # of equals the first
    weight, _ = _preference(best, ranges)
    return best if weight > 0 else None


def _range(part: str) -> tuple[str, float] | None:
    """Parse a media range and its weight; None if it is malformed."""
    found = RANGE.fullmatch(part)
    if found is None:
        return None
    for parameter in (found[2] or "").split(";"):
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "q":
            return (found[1].lower(), float(value)) if WEIGHT.fullmatch(value := value.strip()) else None
    return found[1].lower(), 1.0


def _preference(offer: str, ranges: Sequence[tuple[str, float]]) -> tuple[float, int]:
    """Return the weight of the most specific range that matches, and how specific it is: 3 type/subtype, 2 type/*, 1 */*."""
    specificities = {offer: 3, offer.partition("/")[0] + "/*": 2, "*/*": 1}
    specificity, weight = max((specificities.get(name, 0), weight) for name, weight in ranges)
    return (weight, specificity) if specificity else (0.0, 0)


def matches(if_none_match: Sequence[str], etag: str) -> bool:
    """Whether the client has this version, by weak comparison: W/"x" and "x" are the same."""
    tags = ",".join(if_none_match)
    return tags.strip() == "*" or etag.removeprefix("W/") in TAG.findall(tags)
