"""A route that is documented like any other and runs without FastAPI's machinery, which costs as much as a small inference."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from functools import lru_cache
from typing import Any, get_origin, get_type_hints
from urllib.parse import parse_qsl

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from service import problems

RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"description": title, "content": {problems.MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}}
    for status, title in {
        400: "malformed",
        401: "key wanted",
        404: "no such model",
        408: "the body took too long",
        413: "body or pixels over the limit",
        415: "not an image type we read",
        422: "not decodable, or a parameter out of range",
        503: "queue full, warming or draining; see Retry-After",
        504: "past the deadline",
    }.items()
}


class Direct(APIRoute):
    """For endpoints `async def (request, query: Annotated[SomeModel, Query()]) -> Response`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint: Callable[[Request, BaseModel], Awaitable[Response]] = self.endpoint
        read = _reader(get_type_hints(self.endpoint)["query"])

        async def handle(request: Request) -> Response:
            return await endpoint(request, read(request.scope["query_string"]))

        return handle


def _reader(model: type[BaseModel]) -> Callable[[bytes], BaseModel]:
    lists = {field.alias or name for name, field in model.model_fields.items() if get_origin(field.annotation) is list}

    @lru_cache(maxsize=64)  # clients repeat themselves; poses are long, so not many are kept
    def read(query: bytes) -> BaseModel:
        values: dict[str, Any] = {}
        for name, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True):
            if name in lists:
                values.setdefault(name, []).append(value)
            else:
                values[name] = value
        try:
            return model.model_validate(values)
        except ValidationError as error:
            faults = [{**fault, "loc": ("query", *fault["loc"])} for fault in error.errors(include_input=False)]
            raise RequestValidationError(faults) from None

    return read
