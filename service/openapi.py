"""The OpenAPI document: FastAPI's, with the schemas that it does not know and examples that work."""

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
from service.schemas import Problem
from service.served import Served
from service.tensors import InferenceRequest

DESCRIBED = (Problem, InferenceRequest)  # what routes name in their descriptions and FastAPI does not know
REFERENCE = "#/components/schemas/{model}"
KEYS = {"bearer": {"type": "http", "scheme": "bearer"}, "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"}}

logger = logging.getLogger(__name__)


def documented(app: FastAPI, catalogue: Catalogue, keyless: Set[str] | None) -> Callable[[], dict[str, Any]]:
    """In place of app.openapi; made when first asked for, and again when the model of its examples is another. For a thread:
    the model runs for it. `keyless` are the paths that want no key, where there is a key."""
    plain, making = app.openapi, Lock()
    made: tuple[str, dict[str, Any]] = "", {}

    def openapi() -> dict[str, Any]:
        nonlocal made
        with making:
            served = catalogue.get(None)
            if made[0] != served.digest:
                app.openapi_schema = None
                made = served.digest, _completed(plain(), served, keyless)
            return made[1]

    return openapi


def _completed(document: dict[str, Any], served: Served, keyless: Set[str] | None) -> dict[str, Any]:
    """FastAPI's document with what it does not know, and without what cannot come."""
    _, described = models_json_schema([(each, "validation") for each in DESCRIBED], ref_template=REFERENCE)
    document["components"]["schemas"] |= described["$defs"]
    _drop_what_cannot_come(document)
    if keyless is not None:
        _lock(document, keyless)
    try:
        examples.add(document, served)
    except Exception as error:  # whatever the runtime throws; a fault of ours would be here too, and is in the log
        logger.exception("no examples for /docs")
        raise Broken("the model failed at the examples of this page; ask again", "failed") from error
    return document


def _drop_what_cannot_come(document: dict[str, Any]) -> None:
    """A 422 of FastAPI's own for each parameter in a path: ours are texts, so that it never comes; our 422 is a Problem."""
    for operation in (each for path in document["paths"].values() for each in path.values()):
        if "application/json" in operation["responses"].get("422", {}).get("content", ()):
            del operation["responses"]["422"]
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)


def _lock(document: dict[str, Any], keyless: Set[str]) -> None:
    """Says where the key belongs, either way."""
    document["components"]["securitySchemes"] = KEYS
    document["security"] = [{name: []} for name in KEYS]
    for path in keyless & document["paths"].keys():
        for operation in document["paths"][path].values():
            operation["security"] = []
