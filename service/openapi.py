"""The OpenAPI document: FastAPI's, with our error schema and examples that work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI

from service import examples
from service.catalogue import Catalogue
from service.schemas import Problem


def documented(app: FastAPI, catalogue: Catalogue) -> Callable[[], dict[str, Any]]:
    """In place of app.openapi; made when first asked for, and again when the model of its examples is another."""
    plain, shown = app.openapi, ""

    def openapi() -> dict[str, Any]:
        nonlocal shown
        served = catalogue.get(None)
        if app.openapi_schema is None or shown != served.digest:
            app.openapi_schema, shown = None, served.digest
            document = plain()
            document["components"]["schemas"]["Problem"] = Problem.model_json_schema()
            examples.add(document, served)
        assert app.openapi_schema is not None
        return app.openapi_schema

    return openapi
