"""A request's body, read within limits of size and time, and the pictures in it, in whichever form they were sent."""

from __future__ import annotations

import asyncio
import base64
import codecs
from typing import TypeVar

from pydantic import ValidationError
from starlette.requests import Request

from service import faults, state, tensors, visits
from service.errors import Encoded, MalformedRequest, NotAnImage, TooLarge, TooSlow
from service.schemas import ManyPictures, OnePicture
from service.web import multipart

AS_JSON = "as JSON with Content-Type: application/json"
SEND_ONE = (
    f"send it as multipart field `file` (curl -F file=@picture.png), as a raw body with Content-Type: image/png, or {AS_JSON}"
)
SEND_MANY = (
    f"send each as a multipart field `file` (curl -F file=@one.png -F file=@two.png), or all {AS_JSON}; /predict takes a raw body"
)

OPTION = "?model=NAME"

MULTIPART, JSON = "multipart/form-data", "application/json"
RAW = ("", "application/octet-stream", "binary/octet-stream")  # besides image/*; the last is S3's default

MOST_VALUES = 1_000  # in JSON, or four per picture if that is more: each of thousands of wrong values would be kept as a fault

Sent = TypeVar("Sent", OnePicture, ManyPictures)


async def read(request: Request, max_body: int, patience: float) -> bytes:
    """Read the whole body. Its announced length is checked before a byte is read, its true length with every chunk."""
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise Encoded("send the body uncompressed, without Content-Encoding")
    bodies, visit = state.of(request).bodies, visits.of(request.scope)
    size = announced_length(request)
    if size > max_body:
        raise TooLarge(_too_large(max_body))
    bodies.admit(size)
    chunks = []
    try:
        async with asyncio.timeout(None if visits.COMPLETE in request.scope else patience):  # most bodies are here by now
            async for chunk in request.stream():
                if visit.body_bytes + len(chunk) > max_body:
                    raise TooLarge(_too_large(max_body))
                bodies.take(visit, len(chunk))
                chunks.append(chunk)
    except TimeoutError:
        raise TooSlow(f"the body did not arrive in {patience:g} seconds; send it faster, or a smaller one") from None
    finally:
        visits.body_arrived(request.scope)
    return b"".join(chunks)


def announced_length(request: Request) -> int:
    """Return the announced length of the body, or 0. Reads the raw headers, since this is on the hot path and called twice."""
    length = next((value for name, value in request.scope["headers"] if name == b"content-length"), b"")
    return int(length.lstrip(b"0") or 0) if length.isdigit() else 0  # int() refuses thousands of zeros


def picture(content_type: str, body: bytes) -> bytes:
    """Return the one picture of a request to /predict."""
    kind = _kind(content_type, body)
    if kind == MULTIPART:
        contents = _files(content_type, body, most=1)
    elif kind == JSON:
        contents = [_from_base64(_parsed(OnePicture, body, most=1).image, "a picture")]
    elif kind.startswith("image/") or kind in RAW:
        contents = [body]
    else:
        raise _unreadable(kind, SEND_ONE)
    if len(contents) != 1:
        raise MalformedRequest(
            f"expected one picture, found {len(contents)}; {SEND_ONE if not contents else '/predict/batch takes many'}"
        )
    return contents[0]


def pictures(content_type: str, body: bytes, most: int) -> list[bytes]:
    """Return the pictures of a request to /predict/batch, in order."""
    kind = _kind(content_type, body)
    if kind == MULTIPART:
        contents = _files(content_type, body, most)
        _check_count(len(contents), most)
        return contents
    if kind == JSON:
        texts = _parsed(ManyPictures, body, most).images
        _check_count(len(texts), most)
        return [_from_base64(text, f"picture {index}") for index, text in enumerate(texts)]
    raise _unreadable(kind, SEND_MANY)


def _kind(content_type: str, body: bytes) -> str:
    kind = content_type.partition(";")[0].strip().lower()
    if kind != MULTIPART and multipart.looks_like_multipart(body):
        message = f"the body is {MULTIPART} but Content-Type says {kind[:60] or 'nothing'}"
        raise MalformedRequest(f"{message}; {multipart.LEAVE_HEADER_ALONE}")
    return kind


def _unreadable(kind: str, instead: str) -> NotAnImage:
    return NotAnImage(f"no picture can be read from {kind[:60] or 'a body without Content-Type'}: {instead}")


def _check_count(count: int, most: int) -> None:
    if not 1 <= count <= most:
        advice = "send them in several requests" if count else "send at least one"
        raise MalformedRequest(f"expected 1 to {most} pictures, found {count}; {advice}")


def _files(content_type: str, body: bytes, most: int) -> list[bytes]:
    contents = []
    for part in multipart.parse(content_type, body, max(multipart.MOST_PARTS, most)):
        if part.name != "file":
            message = f"a multipart field is called {part.name[:40]!r}; call each picture's field 'file'"
            raise MalformedRequest(f"{message}, and put options into the query: {OPTION}")
        contents.append(part.content)
    return contents


def _parsed(model: type[Sent], body: bytes, most: int) -> Sent:
    advice = f"send {model.FORM}, and put options into the query: {OPTION}"
    limit = max(MOST_VALUES, 4 * most)
    if tensors.count_values(body) > limit:
        raise TooLarge(f"more than {limit:,} values in JSON; {advice}")
    try:
        return model.model_validate_json(body.removeprefix(codecs.BOM_UTF8))
    except ValidationError as error:
        raise MalformedRequest(f"{faults.sentences(model, error, 'the body')[0]}; {advice}") from None


def _from_base64(text: str, which: str) -> bytes:
    if text[:5].lower() == "data:":  # as browsers export a canvas
        head, comma, text = text.partition(",")
        if not (comma and head.lower().endswith(";base64")):
            raise MalformedRequest(f"{which} is a data URI, but not of the form data:image/png;base64,...; use that")
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        message = "is not valid base64; encode its bytes with the standard alphabet and padding, without line breaks"
        raise MalformedRequest(f"{which} {message}") from None


def _too_large(max_body: int) -> str:
    return f"the body is larger than {max_body:,} bytes; send a smaller picture, or fewer of them"
