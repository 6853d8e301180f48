"""The OpenAPI document: FastAPI's, with our error schema and examples that work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI

from service import examples
from service.catalogue import Served
from service.schemas import Problem


def documented(app: FastAPI, served: Served) -> Callable[[], dict[str, Any]]:
    """In place of app.openapi; made once, when first asked for."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = plain()
            document["components"]["schemas"]["Problem"] = Problem.model_json_schema()
            examples.add(document, served)
        return app.openapi_schema or plain()

    return openapi
