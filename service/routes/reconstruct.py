"""GET /reconstruct, /sweep and /morph: what a pose looks like, and what each of its dimensions means.

An answer depends only on the URL, the media type asked for and the model, so each has an ETag. A 304 is sent before anything is
drawn, but only once it is known that it could be.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Query, Request, Response

from service import images, pose, state, visits
from service.bundle import Array
from service.engine import Labels, perturb
from service.errors import Busy, KeyWanted, NotAcceptable, TooLate, UnknownModel, Unprocessable
from service.manifest import REACH, Manifest
from service.pose import Pose
from service.routes.direct import Direct, refusals
from service.schemas import MorphQuery, Pixels, ReconstructQuery, Subject, SweepQuery
from service.served import MOST_DRAWINGS, Served
from service.state import Service
from service.web import departure, headers

SMALL_SHEET, FEW_DRAWINGS = 1 << 17, 256  # pixels and drawings (each is scaled by itself): larger or named sheets are the crew's
LARGEST_SHEET = 1 << 24  # pixels: more is a mistake, and would take seconds
COMPACT_SEPARATORS = (",", ":")  # of JSON
MAX_AGE = 3600  # seconds for which a cache need not revalidate a pose

AS_PNG, AS_PIXELS = "image/png", "application/json"

PNG: dict[int | str, dict[str, Any]] = {
    200: {"content": {AS_PNG: {"schema": {"type": "string", "format": "binary"}}}},
    304: {"description": "If-None-Match has it already"},
}
PNG_OR_PIXELS: dict[int | str, dict[str, Any]] = {
    200: {"content": PNG[200]["content"] | {AS_PIXELS: {"schema": Pixels.model_json_schema()}}},
    304: PNG[304],
}

router = APIRouter(
    route_class=Direct,
    prefix="/reconstruct",
    responses=refusals(KeyWanted, UnknownModel, NotAcceptable, Unprocessable, Busy, TooLate),
    tags=["reconstruct"],
)


@router.get("", response_class=Response, responses=PNG_OR_PIXELS)
async def reconstruct(request: Request, query: Annotated[ReconstructQuery, Query()]) -> Response:
    """A pose, or a class's prototype, or with neither all prototypes side by side; moved by delta along each dim."""
    service, served = _admitted(request, query.model)
    media_type = _media_type(request, AS_PNG, AS_PIXELS)
    _check_dims(query.dim, served.manifest)
    subjects = _subjects(query, served.manifest)
    poses = perturb(np.stack([each.values for each in subjects]), query.dim, query.delta)
    classes = np.array([each.label for each in subjects])
    if media_type == AS_PNG:
        _check_sheet(len(subjects), query.size)
    small = _small(len(subjects), query.size)

    async def draw() -> Response:
        drawings = await _drawn(request, served, poses, classes, small or media_type == AS_PIXELS)
        if media_type == AS_PIXELS:
            return await _pixels(served.manifest, classes, drawings)
        return await _png(service, drawings[None], query.size, small)

    return await _cached_or_drawn(request, served, media_type, draw)


@router.get("/sweep", response_class=Response, responses=PNG)
async def sweep(request: Request, query: Annotated[SweepQuery, Query()]) -> Response:
    """The paper's Figure 4: a row for each dimension, a column for each delta from low to high."""
    service, served = _admitted(request, query.model)
    media_type = _media_type(request, AS_PNG)
    _check_dims(query.dim, served.manifest)
    dims = query.dim or list(range(served.manifest.pose_size))
    subjects = _subjects(query, served.manifest)
    if len(subjects) != 1:
        raise Unprocessable("sweep moves one pose; name it with pose=TOKEN, or a class with label=")
    (subject,) = subjects
    _check_sheet(len(dims) * query.steps, query.size)

    async def draw() -> Response:
        deltas = np.linspace(query.low, query.high, query.steps).tolist()
        poses = np.stack([perturb(subject.values, [dim], [delta]) for dim in dims for delta in deltas])
        small = _small(len(poses), query.size, query.names)
        drawings = await _drawn(request, served, poses, np.full(len(poses), subject.label), small)
        rows = drawings.reshape(len(dims), query.steps, *drawings.shape[1:])
        return await _png(service, rows, query.size, small, _row_titles(dims, served.manifest, query) if query.names else ())

    return await _cached_or_drawn(request, served, media_type, draw, named=query.names)


@router.get("/morph", response_class=Response, responses=PNG)
async def morph(request: Request, query: Annotated[MorphQuery, Query()]) -> Response:
    """From one digit to the other: the poses blend, and where the classes differ so do the two drawings of each pose."""
    service, served = _admitted(request, query.model)
    media_type = _media_type(request, AS_PNG)
    pose.expect_same_model(**{"from": query.start, "to": query.to})
    start, end = pose.decode(query.start, served.manifest, "from"), pose.decode(query.to, served.manifest, "to")
    small = _small(query.steps, query.size)

    async def draw() -> Response:
        share = np.linspace(0, 1, query.steps, dtype=np.float32)[:, None]  # (steps, 1)
        poses = (1 - share) * start.values + share * end.values
        classes = np.repeat([start.label, end.label], query.steps)
        drawings = await _drawn(request, served, np.concatenate([poses, poses]), classes, small)
        share = share[:, :, None, None]
        strip = (1 - share) * drawings[: query.steps] + share * drawings[query.steps :]
        return await _png(service, strip[None], query.size, small)

    return await _cached_or_drawn(request, served, media_type, draw)


def _admitted(request: Request, model: str | None) -> tuple[Service, Served]:
    service = state.of(request)
    service.catalogue.admit()
    return service, service.catalogue.get(model)


def _media_type(request: Request, *offers: str) -> str:
    """Return the media type of the answer, which the client chooses; other routes have one form and ignore Accept."""
    media_type = headers.preferred(request.headers.getlist("accept"), offers)
    if media_type is None:
        raise NotAcceptable(
            f"Accept does not admit {' or '.join(offers)}, which this path gives; ask for that, or leave Accept out"
        )
    return media_type


async def _cached_or_drawn(
    request: Request, served: Served, media_type: str, draw: Callable[[], Awaitable[Response]], named: bool = False
) -> Response:
    """Answer 304 if the client's copy is of this URL, media type and model, else the drawing with its ETag."""
    etag = _etag(request, served, media_type)
    # A token names its graphs. A class's prototype, and so a pose drawn as another class, may change in a reload, as may the
    # names of dimensions.
    parameters = request.query_params.keys()
    fixed = parameters & {"pose", "from"} and "as_label" not in parameters and not named
    lifetime = f"max-age={MAX_AGE}" if fixed else "no-cache"
    visibility = "public" if state.of(request).settings.api_key is None else "private"
    cache_headers = {"ETag": etag, "Cache-Control": f"{visibility}, {lifetime}", "Vary": "Accept"}
    if headers.matches(request.headers.getlist("if-none-match"), etag):
        return Response(status_code=304, headers=cache_headers)
    with departure.cancel_on_disconnect(request):
        response = await draw()
    response.headers.update(cache_headers)
    return response


def _etag(request: Request, served: Served, media_type: str) -> str:
    """Return a weak ETag: another replica's processor may round a pixel differently."""
    identity = "\n".join((request.app.version, served.digest, request.url.path, request.url.query, media_type))
    return f'W/"{hashlib.blake2s(identity.encode(), digest_size=12).hexdigest()}"'


def _subjects(query: Subject, manifest: Manifest) -> list[Pose]:
    if query.pose is not None:
        given = pose.decode(query.pose, manifest)
        return [given if query.as_label is None else _as_class(given, _label(query.as_label, manifest), manifest)]
    prototypes = [Pose(label, np.array(values, np.float32)) for label, values in enumerate(manifest.prototypes)]
    return prototypes if query.label is None else [prototypes[_label(query.label, manifest)]]


def _as_class(given: Pose, label: int, manifest: Manifest) -> Pose:
    """Carry a pose over to another class with its difference from the mean: as thick, slanted and wide for it as for its own."""
    own, other = (np.array(manifest.prototypes[each], np.float32) for each in (given.label, label))
    return Pose(label, given.values - own + other)


def _row_titles(dims: Sequence[int], manifest: Manifest, query: SweepQuery) -> list[str]:
    """Name each dimension by number and, if the manifest knows, by effect, with its strength if the span is the measured one."""
    known, measured_span = manifest.dimensions, (query.low, query.high) == (-REACH, REACH)
    return [known[dim].title(dim, strength=measured_span) if known else str(dim) for dim in dims]


def _label(name: str, manifest: Manifest) -> int:
    if name not in manifest.classes:
        raise Unprocessable(f"model {manifest.name} has no class {name[:40]!r}; it has {', '.join(manifest.classes)}")
    return manifest.classes.index(name)


def _check_dims(dims: list[int], manifest: Manifest) -> None:
    for dim in dims:
        if not 0 <= dim < manifest.pose_size:
            raise Unprocessable(f"dim {str(dim)[:20]}: model {manifest.name} has pose dimensions 0 to {manifest.pose_size - 1}")


def _check_sheet(drawings: int, size: int) -> None:
    if drawings > MOST_DRAWINGS:
        raise Unprocessable(f"{drawings:,} drawings are more than {MOST_DRAWINGS:,}; ask for fewer dims or steps")
    if drawings * size * size > LARGEST_SHEET:
        raise Unprocessable(
            f"{drawings} drawings of size {size} are more than {LARGEST_SHEET:,} pixels; ask for fewer or smaller"
        )


def _small(drawings: int, size: int, named: bool = False) -> bool:
    """Whether a sheet of these drawings is written on the event loop."""
    return not named and drawings <= FEW_DRAWINGS and drawings * size * size <= SMALL_SHEET


async def _drawn(request: Request, served: Served, poses: Array, classes: Labels, small: bool) -> Array:
    """Return drawings (n, C, H, W); refuse before computing them if they would wait too long to be written."""
    if not small:
        state.of(request).crew.admit()
    visit = visits.of(request.scope)
    drawings, stages = await served.draw(poses, classes, visit.complete)
    visit.model_ran(stages, served.provider)
    return drawings


async def _png(service: Service, rows: Array, size: int, small: bool, names: Sequence[str] = ()) -> Response:
    """(rows, columns, C, H, W) -> one picture."""
    write = partial(images.sheet, rows, size, names)
    return Response(write() if small else await service.crew.do(write), media_type=AS_PNG)


async def _pixels(manifest: Manifest, classes: Labels, drawings: Array) -> Response:
    fields = {"model": manifest.name, "labels": [manifest.classes[index] for index in classes], "images": []}
    before, after = json.dumps(fields, separators=COMPACT_SEPARATORS).rsplit("]", 1)
    written = []
    for drawing in drawings:
        await asyncio.sleep(0)  # let others run between two
        written.append(json.dumps(drawing.astype(float).round(4).tolist(), separators=COMPACT_SEPARATORS))
    return Response(f"{before}{','.join(written)}]{after}".encode(), media_type=AS_PIXELS)
