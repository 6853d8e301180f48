"""GET /: the playground; /docs: the reference, made from /openapi.json. All they load comes from here, and nothing is inline."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any, NamedTuple

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from service import reference, state, visits
from service.web import headers

FOLDER = Path(__file__).parent.parent / "playground"
PAGE = "index.html"

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    # blob: is for pictures that the page fetched itself, since an <img> cannot send the server's key.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' blob:; form-action 'none'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # may be kept, but is revalidated each time: a new release is a new page at once
}


class File(NamedTuple):
    content: bytes
    media_type: str
    etag: str


def _file(content: bytes, media_type: str) -> File:
    return File(content, media_type, f'"{hashlib.blake2s(content, digest_size=12).hexdigest()}"')


FILES = {path.name: _file(path.read_bytes(), TYPES[path.suffix]) for path in FOLDER.iterdir() if path.suffix in TYPES}
PATHS = frozenset({"/", *(f"/playground/{name}" for name in FILES)})  # these ask for no key: the page asks its user for it
PREFIX = re.compile(r"(/(?!\.{1,2}(?:/|$))[\w.~-]+)+", re.ASCII)

router = APIRouter(include_in_schema=False)


@router.get("/")
async def playground(request: Request) -> Response:
    return _file_response(request, FILES[PAGE])


@router.get("/playground/{name}")
async def part(request: Request, name: str) -> Response:
    if name not in FILES:
        raise HTTPException(404)
    return _file_response(request, FILES[name])


@router.get("/openapi.json")
async def openapi(request: Request) -> Response:
    """Name the server's prefix, if it has one, for clients that are generated from the document."""
    document, prefix = await _document(request), _prefix(request)
    response_headers = {"Cache-Control": HEADERS["Cache-Control"], "Vary": "X-Forwarded-Prefix"}
    return JSONResponse({**document, "servers": [{"url": prefix}]} if prefix else document, headers=response_headers)


@router.get("/docs")
async def docs(request: Request) -> Response:
    keyed = state.of(request).settings.api_key is not None
    page = reference.page(await _document(request), _base_url(request), keyed)
    return _file_response(request, _file(page.encode(), TYPES[".html"]))


async def _document(request: Request) -> dict[str, Any]:
    service = state.of(request)
    service.catalogue.admit()
    with service.crew.line() as line:
        document: dict[str, Any] = await line.do(request.app.openapi, visits.of(request.scope).complete)
    return document


def _base_url(request: Request) -> str:
    """Return the URL under which the reader found the server. It trusts headers that anybody can send: only for text to copy."""
    proxied = request.headers.get("x-forwarded-proto", "").partition(",")[0].strip().lower() == "https"
    url = request.base_url.replace(path=_prefix(request))
    return str(url.replace(scheme="https") if proxied else url)


def _prefix(request: Request) -> str:
    """Return the path prefix of the server: its own, or what a proxy stripped, as Traefik reports and others can be told to."""
    forwarded = request.headers.get("x-forwarded-prefix", "").rstrip("/")
    own: str = request.scope.get("root_path", "").rstrip("/")
    return forwarded if PREFIX.fullmatch(forwarded) else own


def _file_response(request: Request, file: File) -> Response:
    response_headers = {"ETag": file.etag, **HEADERS}
    if headers.matches(request.headers.getlist("if-none-match"), file.etag):
        return Response(status_code=304, headers=response_headers)
    return Response(file.content, headers=response_headers, media_type=file.media_type)
