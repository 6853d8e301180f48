"""GET /reconstruct, /sweep and /morph: what a pose looks like, and what each of its dimensions means.

An answer depends on the URL and the model alone, so each has an ETag, and a 304 is given before anything is drawn.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Query, Request, Response

from service import departure, images, pose, state, visit
from service.bundle import Array, Manifest
from service.catalogue import Served
from service.engine import Labels, perturb
from service.errors import Unprocessable
from service.pose import Pose
from service.routes.direct import RESPONSES, Direct
from service.schemas import MorphQuery, Pixels, ReconstructQuery, Subject, SweepQuery
from service.state import Service

SMALL_SHEET = 1 << 17  # pixels written on the event loop
LARGEST_SHEET = 1 << 24  # pixels: more is a mistake, and would take seconds
FRESH = 3600  # seconds that a cache need not ask

PNG: dict[int | str, dict[str, Any]] = {
    200: {"content": {"image/png": {"schema": {"type": "string", "format": "binary"}}}},
    304: {"description": "If-None-Match has it already"},
}
PNG_OR_PIXELS: dict[int | str, dict[str, Any]] = {
    200: {"content": PNG[200]["content"] | {"application/json": {"schema": Pixels.model_json_schema()}}},
    304: PNG[304],
}

router = APIRouter(
    route_class=Direct,
    prefix="/reconstruct",
    responses={status: RESPONSES[status] for status in (401, 404, 422, 503, 504)},
    tags=["reconstruct"],
)


@router.get("", response_class=Response, responses=PNG_OR_PIXELS)
async def reconstruct(request: Request, query: Annotated[ReconstructQuery, Query()]) -> Response:
    """A pose, or a class's prototype, or with neither all prototypes side by side; moved by `delta` along each `dim`."""
    as_json = "application/json" in request.headers.get("accept", "")

    async def draw(service: Service, served: Served) -> Response:
        _check_dims(query.dim, served.manifest)
        subjects = _subjects(query, served.manifest)
        poses = perturb(np.stack([each.values for each in subjects]), query.dim, query.delta)
        classes = np.array([each.label for each in subjects])
        drawings = await _drawn(request, served, poses, classes)
        return _pixels(served.manifest, classes, drawings) if as_json else await _png(service, drawings[None], query.size)

    return await _unless_known(request, query.model, draw)


@router.get("/sweep", response_class=Response, responses=PNG)
async def sweep(request: Request, query: Annotated[SweepQuery, Query()]) -> Response:
    """The paper's Figure 4: a row for each dimension, a column for each delta from `low` to `high`."""

    async def draw(service: Service, served: Served) -> Response:
        _check_dims(query.dim, served.manifest)
        dims = query.dim or list(range(served.manifest.pose_size))
        subject = _subjects(query, served.manifest)
        if len(subject) != 1:
            raise Unprocessable("sweep moves one pose; name it with pose=TOKEN, or a class with label=")
        deltas = np.linspace(query.low, query.high, query.steps).tolist()
        poses = np.stack([perturb(subject[0].values, [dim], [delta]) for dim in dims for delta in deltas])
        _check_sheet(len(poses), query.size)
        drawings = await _drawn(request, served, poses, np.full(len(poses), subject[0].label))
        return await _png(service, drawings.reshape(len(dims), query.steps, *drawings.shape[1:]), query.size)

    return await _unless_known(request, query.model, draw)


@router.get("/morph", response_class=Response, responses=PNG)
async def morph(request: Request, query: Annotated[MorphQuery, Query()]) -> Response:
    """From one digit to the other: the poses blend, and where the classes differ so do the two drawings of each pose."""

    async def draw(service: Service, served: Served) -> Response:
        start, end = (pose.decode(token, served.manifest) for token in (query.start, query.to))
        share = np.linspace(0, 1, query.steps, dtype=np.float32)[:, None]  # (steps, 1)
        poses = (1 - share) * start.values + share * end.values
        classes = np.repeat([start.label, end.label], query.steps)
        drawings = await _drawn(request, served, np.concatenate([poses, poses]), classes)
        share = share[:, :, None, None]
        strip = (1 - share) * drawings[: query.steps] + share * drawings[query.steps :]
        return await _png(service, strip[None], query.size)

    return await _unless_known(request, query.model, draw)


async def _unless_known(request: Request, model: str | None, draw: Callable[[Service, Served], Awaitable[Response]]) -> Response:
    """304 when the client's copy is of this URL and this model, else the drawing with its ETag."""
    service = state.of(request)
    service.catalogue.admit()
    served = service.catalogue.get(model)
    headers = {"ETag": _etag(request, served), "Cache-Control": f"{_who(service)}, max-age={FRESH}", "Vary": "Accept"}
    known = {tag.strip() for tag in request.headers.get("if-none-match", "").split(",")}
    if known & {headers["ETag"], "*"}:
        return Response(status_code=304, headers=headers)
    with departure.heeded(request):
        response = await draw(service, served)
    response.headers.update(headers)
    return response


def _etag(request: Request, served: Served) -> str:
    """Weak: another replica's processor may round a pixel otherwise."""
    net = served.net
    accept = request.headers.get("accept", "")
    told = "\n".join((request.app.version, net.manifest.version, request.url.path, request.url.query, accept))
    return f'W/"{hashlib.blake2s(told.encode(), digest_size=12).hexdigest()}"'


def _who(service: Service) -> str:
    return "public" if service.settings.api_key is None else "private"


def _subjects(query: Subject, manifest: Manifest) -> list[Pose]:
    if query.pose is not None:
        found = pose.decode(query.pose, manifest)
        return [found if query.as_label is None else found._replace(label=_label(query.as_label, manifest))]
    prototypes = [Pose(label, np.array(values, np.float32)) for label, values in enumerate(manifest.prototypes)]
    return prototypes if query.label is None else [prototypes[_label(query.label, manifest)]]


def _label(name: str, manifest: Manifest) -> int:
    if name not in manifest.classes:
        raise Unprocessable(f"model {manifest.name} has no such class; it has {', '.join(manifest.classes)}")
    return manifest.classes.index(name)


def _check_dims(dims: list[int], manifest: Manifest) -> None:
    for dim in dims:
        if dim >= manifest.pose_size:
            raise Unprocessable(f"dim {dim}: model {manifest.name} has pose dimensions 0 to {manifest.pose_size - 1}")


def _check_sheet(drawings: int, size: int) -> None:
    if drawings * size * size > LARGEST_SHEET:
        raise Unprocessable(
            f"{drawings} drawings of size {size} are more than {LARGEST_SHEET:,} pixels; ask for fewer or smaller"
        )


async def _drawn(request: Request, served: Served, poses: Array, classes: Labels) -> Array:
    """(n, C, H, W)"""
    seen = visit.of(request.scope)
    drawings, taken = await served.draw(poses, classes, seen.arrived)
    seen.stages |= {"queue": taken.queue_seconds, "reconstruct": taken.run_seconds}
    return drawings


async def _png(service: Service, rows: Array, size: int) -> Response:
    """(rows, columns, C, H, W) -> one picture."""
    write = partial(images.sheet, rows, size)
    small = rows.shape[0] * rows.shape[1] * size * size <= SMALL_SHEET
    return Response(write() if small else await service.crew.do(write), media_type="image/png")


def _pixels(manifest: Manifest, classes: Labels, drawings: Array) -> Response:
    labels = [manifest.classes[index] for index in classes]
    said = {"model": manifest.name, "labels": labels, "images": drawings.astype(float).round(4).tolist()}
    return Response(json.dumps(said, separators=(",", ":")).encode(), media_type="application/json")
