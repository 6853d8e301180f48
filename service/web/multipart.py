"""multipart/form-data (RFC 7578) in a body that is already here: a parser for streams takes ten times as long."""

from __future__ import annotations

import re
from itertools import islice
from typing import NamedTuple

from service.errors import MalformedRequest

MOST_PARTS = 1_000
LONG_HEAD = 512  # bytes of a part's headers, in the mean of as many parts as there may be; a picture's are about a hundred
READ = 16  # headers of a part, and parameters of a header; what comes behind them is not looked at
FOLD = re.compile(rb"\r\n[ \t]+")  # a header goes on in the next line, as in e-mail, from where these headers come
PARAMETER = re.compile(rb';\s*([^\s=;"]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s;"]+))')
LEFT_ALONE = "leave that header to your HTTP client"
BOUNDARY = re.compile(r';\s*boundary=(?:"([^"]{1,200})"|([^\s;"]{1,200}))', re.IGNORECASE)


def looks_so(body: bytes) -> bool:
    """Whatever its Content-Type says."""
    return body.startswith(b"--") and b"content-disposition:" in body[:LONG_HEAD].lower()


class Part(NamedTuple):
    name: str
    content: bytes


def parse(content_type: str, body: bytes, most: int = MOST_PARTS) -> list[Part]:
    """The parts in order, `most` of them. `content_type` is the request's header, which names the boundary."""
    found = BOUNDARY.search(content_type)
    if found is None:
        raise MalformedRequest(f"multipart/form-data needs a boundary in its Content-Type; {LEFT_ALONE}")
    delimiter = b"\r\n--" + (found[1] or found[2]).encode("latin-1", "replace")
    # The first delimiter may begin the body; what precedes it is a preamble, what follows the last is ignored too.
    sections = (b"\r\n" + body).split(delimiter, most + 2)
    if len(sections) > most + 2:
        raise MalformedRequest(f"more than {most} parts in a multipart body; send fewer")
    if len(sections) == 1:
        told = "the boundary that Content-Type names is nowhere in" if body else "there is nothing (0 bytes) in"
        raise MalformedRequest(f"{told} the multipart body; {LEFT_ALONE}")
    parts: list[Part] = []
    room = LONG_HEAD * most
    for section in sections[1:]:
        if section.startswith(b"--"):
            return parts
        parts.append(_part(section, room))
        room -= len(section) - len(parts[-1].content)
    raise MalformedRequest("the multipart body ends before its closing boundary; send the whole of it")


def _part(section: bytes, room: int) -> Part:
    """What lies between two delimiters: rest of the delimiter's line, headers, empty line, content."""
    padding, line, rest = section.partition(b"\r\n")
    head, blank, content = (b"\r\n" + rest).partition(b"\r\n\r\n")
    if len(head) > room:
        raise MalformedRequest("the parts of the multipart body have too many bytes of headers; give pictures shorter names")
    if not line or padding.strip(b" \t") or not blank:
        told = "a part of the multipart body has no headers; each needs a Content-Disposition with a name"
        raise MalformedRequest(f"{told}, and CRLF at the ends of lines")
    for header in FOLD.sub(b" ", head).split(b"\r\n", READ + 1)[1 : READ + 1]:
        key, _, value = header.partition(b":")
        if key.strip().lower() == b"content-disposition":
            # One after the other: a quoted filename may look like a name.
            for parameter in islice(PARAMETER.finditer(value), READ):
                if parameter[1].lower() == b"name":
                    return Part((parameter[2] or parameter[3] or b"").decode("utf-8", "replace"), content)
    raise MalformedRequest('a part of the multipart body has no name; write Content-Disposition: form-data; name="file"')
