"""Parses multipart/form-data (RFC 7578) in a complete body: a streaming parser takes ten times as long."""

from __future__ import annotations

import re
from itertools import islice
from typing import NamedTuple

from service.errors import MalformedRequest

MOST_PARTS = 1_000
LONG_HEAD = 512  # bytes of headers per part, on average over the most parts allowed; a picture has about a hundred
MOST_READ = 16  # headers of a part, and parameters of a header, that are looked at; the rest is ignored
FOLD = re.compile(rb"\r\n[ \t]+")  # a header continued on the next line, as in e-mail, where these headers come from
PARAMETER = re.compile(rb';\s*([^\s=;"]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s;"]+))')
LEAVE_HEADER_ALONE = "leave that header to your HTTP client"
BOUNDARY = re.compile(r';\s*boundary=(?:"([^"]{1,200})"|([^\s;"]{1,200}))', re.IGNORECASE)


def looks_like_multipart(body: bytes) -> bool:
    """Whether a body looks like multipart, whatever its Content-Type says."""
    return body.startswith(b"--") and b"content-disposition:" in body[:LONG_HEAD].lower()


class Part(NamedTuple):
    name: str
    content: bytes


def parse(content_type: str, body: bytes, most: int = MOST_PARTS) -> list[Part]:
    """Return the parts in order; raise if there are more than `most`. The boundary is named in the header `content_type`."""
    boundary = BOUNDARY.search(content_type)
    if boundary is None:
        raise MalformedRequest(f"multipart/form-data needs a boundary in its Content-Type; {LEAVE_HEADER_ALONE}")
    delimiter = b"\r\n--" + (boundary[1] or boundary[2]).encode("latin-1", "replace")
    # The body may begin with the first delimiter. What precedes it, a preamble, is ignored, and so is what follows the last.
    sections = (b"\r\n" + body).split(delimiter, most + 2)
    if len(sections) > most + 2:
        raise MalformedRequest(f"more than {most} parts in a multipart body; send fewer")
    if len(sections) == 1:
        message = "the boundary that Content-Type names is nowhere in" if body else "there is nothing (0 bytes) in"
        raise MalformedRequest(f"{message} the multipart body; {LEAVE_HEADER_ALONE}")
    parts: list[Part] = []
    room = LONG_HEAD * most
    for section in sections[1:]:
        if section.startswith(b"--"):
            return parts
        parts.append(_part(section, room))
        room -= len(section) - len(parts[-1].content)
    raise MalformedRequest("the multipart body ends before its closing boundary; send the whole of it")


def _part(section: bytes, room: int) -> Part:
    """Parse what lies between two delimiters: rest of the delimiter's line, headers, empty line, content."""
    padding, line, rest = section.partition(b"\r\n")
    head, blank, content = (b"\r\n" + rest).partition(b"\r\n\r\n")
    if len(head) > room:
        raise MalformedRequest("the parts of the multipart body have too many bytes of headers; give pictures shorter names")
    if not line or padding.strip(b" \t") or not blank:
        message = "a part of the multipart body has no headers; each needs a Content-Disposition with a name"
        raise MalformedRequest(f"{message}, and CRLF at the ends of lines")
    for header in FOLD.sub(b" ", head).split(b"\r\n", MOST_READ + 1)[1 : MOST_READ + 1]:
        key, _, value = header.partition(b":")
        if key.strip().lower() == b"content-disposition":
            # Parsed one after the other, since a quoted filename may contain what looks like a name.
            for parameter in islice(PARAMETER.finditer(value), MOST_READ):
                if parameter[1].lower() == b"name":
                    return Part((parameter[2] or parameter[3] or b"").decode("utf-8", "replace"), content)
    raise MalformedRequest('a part of the multipart body has no name; write Content-Disposition: form-data; name="file"')
