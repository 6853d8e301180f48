"""The OpenAPI document: FastAPI's, plus the schemas that it does not know and examples that work."""

from __future__ import annotations

import logging
from collections.abc import Callable, Set
from threading import Lock
from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from service import examples
from service.catalogue import Catalogue
from service.errors import Broken
from service.routes import inference_protocol, models
from service.schemas import Problem
from service.served import Served
from service.tensors import InferenceRequest
from service.web.problems import MEDIA_TYPE

EXTRA_SCHEMAS = (Problem, InferenceRequest)  # routes refer to these in their descriptions, and FastAPI does not know them
REFERENCE = "#/components/schemas/{model}"
KEYS = {"bearer": {"type": "http", "scheme": "bearer"}, "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"}}
HEADERS = {
    name: {"description": description, "schema": {"type": kind}}
    for name, kind, description in [
        ("X-Request-ID", "string", "the request's own, or one made for it; the log has the same"),
        ("Server-Timing", "string", "milliseconds of each stage and in total"),
        ("Retry-After", "integer", "seconds until another try makes sense"),
        ("ETag", "string", "names this answer, for If-None-Match"),
    ]
}
IF_NONE_MATCH = {
    "name": "If-None-Match",
    "in": "header",
    "required": False,
    "description": "the ETag of an answer that you have: 304 if it still holds",
    "schema": {"type": "string"},
}

logger = logging.getLogger(__name__)


def document_maker(app: FastAPI, catalogue: Catalogue, keyless: Set[str] | None) -> Callable[[], dict[str, Any]]:
    """Returns a replacement for app.openapi, which makes the document when first called and again when models change.

    To be called in a thread, since the model runs for it. `keyless` are the paths that need no key; None if there is no key.
    """
    original, lock = app.openapi, Lock()
    cached: tuple[tuple[str, ...], dict[str, Any]] = (), {}

    def openapi() -> dict[str, Any]:
        nonlocal cached
        with lock:
            served = catalogue.get(None)
            versions = (served.digest, *(each.digest for each in catalogue))
            if cached[0] != versions:
                app.openapi_schema = None
                cached = versions, _completed(original(), catalogue, served, keyless)
            return cached[1]

    return openapi


def _completed(document: dict[str, Any], catalogue: Catalogue, served: Served, keyless: Set[str] | None) -> dict[str, Any]:
    """Adds what FastAPI does not know to its document, and drops responses that cannot occur."""
    _, schemas = models_json_schema([(each, "validation") for each in EXTRA_SCHEMAS], ref_template=REFERENCE)
    document["components"]["schemas"] |= schemas["$defs"]
    _drop_impossible_responses(document)
    _document_headers(document)
    if keyless is not None:
        _document_key(document, keyless)
    try:
        examples.add(document, served)
        _add_answers(document, catalogue, served)
    except Exception as error:  # whatever the runtime raises, or a fault of ours: the log shows which
        logger.exception("no examples for /docs")
        raise Broken("the model failed at the examples of this page; ask again", "failed") from error
    return document


def _add_answers(document: dict[str, Any], catalogue: Catalogue, served: Served) -> None:
    """Adds answers of routes that take no body."""
    for path, answer in {
        "/models": models.listing(catalogue),
        "/v2/models/{name}": inference_protocol.describe(served),
        "/healthz": {"live": True},
        "/readyz": {"ready": True, "state": "ready"},
    }.items():
        document["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]["example"] = answer


def _drop_impossible_responses(document: dict[str, Any]) -> None:
    """Drops FastAPI's own 422 for path parameters: ours are strings, so that it never occurs; our 422 is a Problem."""
    for operation in (each for path in document["paths"].values() for each in path.values()):
        if "application/json" in operation["responses"].get("422", {}).get("content", ()):
            del operation["responses"]["422"]
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)


def _document_headers(document: dict[str, Any]) -> None:
    """Documents what all answers carry, Retry-After where an answer says that, and ETags where there can be a 304."""
    document["components"]["headers"] = HEADERS
    for operation in (each for path in document["paths"].values() for each in path.values()):
        statuses_with_etag = ("200", "304") if "304" in operation["responses"] else ()
        if statuses_with_etag:
            operation.setdefault("parameters", []).append(IF_NONE_MATCH)
        for status, answer in operation["responses"].items():
            names = ["X-Request-ID", "Server-Timing"]
            if status in statuses_with_etag:
                names.append("ETag")
            if status == "503" and MEDIA_TYPE in answer.get("content", ()):  # a probe's 503 does not
                names.append("Retry-After")
            answer["headers"] = answer.get("headers", {}) | {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def _document_key(document: dict[str, Any], keyless: Set[str]) -> None:
    """Documents both ways to send the key."""
    document["components"]["securitySchemes"] = KEYS
    document["security"] = [{name: []} for name in KEYS]
    for path in keyless & document["paths"].keys():
        for operation in document["paths"][path].values():
            operation["security"] = []
