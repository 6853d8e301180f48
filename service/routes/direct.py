"""Routes that are documented like any other and run without FastAPI's machinery, which costs as much as a small inference.

All but probes refuse unknown query parameters: a misspelt one must not look as if it had worked.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from functools import lru_cache
from typing import Any, get_origin, get_type_hints
from urllib.parse import parse_qs, unquote_plus

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from service import faults
from service.errors import (
    Busy,
    KeyWanted,
    MalformedRequest,
    NotAnImage,
    ServiceError,
    TooLarge,
    TooLate,
    TooSlow,
    UnknownModel,
    Unprocessable,
)
from service.web import problems


def refusals(*errors: type[ServiceError]) -> dict[int | str, dict[str, Any]]:
    """How /docs describes answers that are problems."""
    schema = {"$ref": "#/components/schemas/Problem"}
    return {
        error.status: {
            "description": error.meaning,
            "content": {
                problems.MEDIA_TYPE: {"schema": schema, "example": problems.body(error.status, error.title, error.meaning)}
            },
        }
        for error in errors
    }


MOST_PARAMETERS = 1_000  # each is read in Python, on the event loop

# What a route that takes a body and runs a model may answer.
RESPONSES = refusals(MalformedRequest, KeyWanted, UnknownModel, TooSlow, TooLarge, NotAnImage, Unprocessable, Busy, TooLate)


class Direct(APIRoute):
    """For endpoints `async def (request, query: Annotated[SomeModel, Query()]) -> Response`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint: Callable[[Request, BaseModel], Awaitable[Response]] = self.endpoint
        read = _reader(get_type_hints(self.endpoint)["query"])

        async def handle(request: Request) -> Response:
            return await endpoint(request, read(request.scope["query_string"]))

        return handle


class Bare(APIRoute):
    """For endpoints `async def (request, **what stands in the path) -> Response`, which take no query."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint: Callable[..., Awaitable[Response]] = self.endpoint

        async def handle(request: Request) -> Response:
            self.expect_no_query(request.scope["query_string"])
            return await endpoint(request, **request.path_params)

        return handle

    def expect_no_query(self, query: bytes) -> None:
        if first := query.lstrip(b"&").partition(b"&")[0]:  # the others need not be read, and may be thousands
            name = unquote_plus(first.partition(b"=")[0].decode("latin-1"))
            raise Unprocessable(f"this path takes no query parameters, found {name[:40]!r}; leave it out")


class Probed(Bare):
    """Ignores the query: one against caches, or of a scrape, must not make a sound server look as if it failed."""

    def expect_no_query(self, query: bytes) -> None:
        pass


def _reader(model: type[BaseModel]) -> Callable[[bytes], BaseModel]:
    lists = {field.alias or name for name, field in model.model_fields.items() if get_origin(field.annotation) is list}

    @lru_cache(maxsize=64)  # clients repeat themselves; poses are long, so not many are kept
    def read(query: bytes) -> BaseModel:
        if query.count(b"&") >= MOST_PARAMETERS:
            raise Unprocessable(f"more than {MOST_PARAMETERS:,} query parameters; send fewer")
        parameters = parse_qs(query.decode("latin-1"), keep_blank_values=True)
        for name, values in parameters.items():
            if len(values) > 1 and name not in lists:
                raise Unprocessable(f"{name[:40]!r} is in the query more than once; give it once")
        try:
            return model.model_validate({name: values if name in lists else values[0] for name, values in parameters.items()})
        except ValidationError as error:
            raise Unprocessable("; ".join(faults.sentences(model, error, "the query"))) from None

    return read
