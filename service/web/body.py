"""A request's body, read within a limit and a time, and the pictures in it, however they were sent."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import time
from typing import Any

from starlette.requests import Request

from service import state, visits
from service.errors import MalformedRequest, NotAnImage, TooLarge, TooSlow
from service.tensors import MOST_VALUES
from service.web import multipart

ONE = "send it as multipart field `file` (curl -F file=@picture.png), as a raw body with Content-Type: image/png, or as JSON"
MANY = "send each as a multipart field `file` (curl -F file=@one.png -F file=@two.png), or all as JSON; /predict takes a raw body"


async def read(request: Request, max_body: int, patience: float) -> bytes:
    """The whole body. Its announced length is checked before a byte is read, its true one with every chunk."""
    bodies, visit = state.of(request).bodies, visits.of(request.scope)
    announced = request.headers.get("content-length", "0")
    if announced.isdigit():
        if int(announced) > max_body:
            raise TooLarge(_too_large(max_body))
        bodies.admit(int(announced))
    chunks = []
    try:
        async with asyncio.timeout(patience):
            async for chunk in request.stream():
                if visit.holds + len(chunk) > max_body:
                    raise TooLarge(_too_large(max_body))
                bodies.take(len(chunk))
                visit.holds += len(chunk)
                chunks.append(chunk)
    except TimeoutError:
        raise TooSlow(f"the body was not here after {patience:g} seconds; send it faster, or a smaller one") from None
    finally:
        visit.complete = time.monotonic()
    return b"".join(chunks)


def picture(content_type: str, body: bytes) -> bytes:
    """The one picture of a request to /predict."""
    found = _pictures(content_type, body, "image", most=1)
    if len(found) != 1:
        raise MalformedRequest(f"expected one picture, found {len(found)}; {ONE if not found else '/predict/batch takes many'}")
    return found[0]


def pictures(content_type: str, body: bytes, most: int) -> list[bytes]:
    """The pictures of a request to /predict/batch, in order."""
    found = _pictures(content_type, body, "images", most)
    _check_count(len(found), most)
    return found


def _check_count(found: int, most: int) -> None:
    if not 1 <= found <= most:
        what = "send them in several requests" if found else "send at least one"
        raise MalformedRequest(f"expected 1 to {most} pictures, found {found}; {what}")


def _pictures(content_type: str, body: bytes, field: str, most: int) -> list[bytes]:
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        return _files(content_type, body, most)
    if kind == "application/json":
        return _from_json(body, field, most)
    if field == "image" and (kind.startswith("image/") or kind in ("", "application/octet-stream")):
        return [body]
    raise NotAnImage(
        f"no picture can be read from {kind[:60] or 'a body without Content-Type'}: {ONE if field == 'image' else MANY}"
    )


def _files(content_type: str, body: bytes, most: int) -> list[bytes]:
    found = []
    for part in multipart.parse(content_type, body, max(multipart.MOST_PARTS, most)):
        if part.name != "file":
            raise MalformedRequest("a multipart field is not called file; name each picture's field so")
        found.append(part.content)
    return found


def _from_json(body: bytes, field: str, most: int) -> list[bytes]:
    wanted = '{"image": "<base64>"}' if field == "image" else '{"images": ["<base64>", ...]}'
    if body.count(b",") > MOST_VALUES:
        raise TooLarge(f"more than {MOST_VALUES:,} values in JSON; send {wanted}")
    try:
        values: Any = json.loads(body)
    except (ValueError, RecursionError):
        raise MalformedRequest(f"the body is not JSON; send {wanted}") from None
    if not isinstance(values, dict) or values.keys() != {field}:
        raise MalformedRequest(f"the JSON is not as expected; send {wanted}")
    texts = [values[field]] if field == "image" else values[field]
    if not isinstance(texts, list):
        raise MalformedRequest(f"the JSON is not as expected; send {wanted}")
    _check_count(len(texts), most)  # before each of them is looked at
    if not all(isinstance(text, str) for text in texts):
        raise MalformedRequest(f"the JSON is not as expected; send {wanted}")
    return [_from_base64(text, "a picture" if field == "image" else f"picture {index}") for index, text in enumerate(texts)]


def _from_base64(text: str, which: str) -> bytes:
    if text.startswith("data:"):  # as browsers write a canvas
        text = text.partition(",")[2]
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        told = "is not valid base64; encode its bytes with the standard alphabet and padding, without line breaks"
        raise MalformedRequest(f"{which} {told}") from None


def _too_large(max_body: int) -> str:
    return f"the body is larger than {max_body:,} bytes; send a smaller picture, or fewer of them"
