"""/v2: the Open Inference Protocol, HTTP form, with the binary tensor extension; for clients that speak it already.

One input, `images`, and the outputs of both graphs; `reconstructions` shows the winning class, and is drawn only when asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.metadata import version as installed
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from service import state, tensors, visits
from service.bundle import CAPSULES, IMAGES, LENGTHS, RECONSTRUCTIONS, Array
from service.engine import Perception
from service.errors import Busy, KeyWanted, MalformedRequest, UnknownModel, Unprocessable
from service.routes.direct import RESPONSES, Bare, Probed, refusals
from service.schemas import Liveness, V2Inference, V2Model, V2ModelReadiness, V2Readiness, V2Server
from service.served import Served
from service.state import Service
from service.tensors import Inference, Port
from service.web import body, departure

HEADER_SIZE = "Inference-Header-Content-Length"
EXTENSIONS = ["binary_tensor_data"]
PLATFORM = "onnx_onnxv1"
SLACK = 1e-3  # by how much resizing may overshoot [0, 1]
SMALL_BYTES = 1 << 16  # read and written on the event loop, which takes less time than handing it to a thread

OUTPUTS: dict[str, Callable[[Perception], Array]] = {
    LENGTHS.name: lambda perception: perception.lengths,
    CAPSULES.name: lambda perception: perception.capsules,
    RECONSTRUCTIONS.name: lambda perception: perception.drawings[:, 0],
}


_BINARY = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_JSON = {"application/json": {"schema": {"$ref": "#/components/schemas/InferenceRequest"}}}  # openapi.py puts it there
_BODY = {"required": True, "content": _JSON | _BINARY}
_SIZE_HEADER = {
    "schema": {"type": "integer"},
    "description": "bytes of it that are JSON; those of tensors with binary_data_size follow",
}
_SIZE_OR_ZERO = {"description": f"{_SIZE_HEADER['description']}; 0 where the body is the bytes of pictures alone"}
_SIZE_PARAMETER = {"name": HEADER_SIZE, "in": "header", "required": False, **_SIZE_HEADER, **_SIZE_OR_ZERO}

LIVE, READY = "/health/live", "/health/ready"

router = APIRouter(prefix="/v2", route_class=Bare, responses=refusals(Unprocessable), tags=["open inference protocol"])
probes = APIRouter(prefix="/v2", route_class=Probed, tags=["open inference protocol"])
HEALTH_PATHS = frozenset({router.prefix + LIVE, router.prefix + READY})  # without the key, as /healthz


def asks_whether_ready(path: str) -> bool:
    """Whether the path asks if one model is ready: a probe too, although it needs the key."""
    return path.startswith(f"{router.prefix}/models/") and path.endswith("/ready")


post_inference = partial(
    router.post,
    response_model=V2Inference,
    openapi_extra={"requestBody": _BODY, "parameters": [_SIZE_PARAMETER]},
    responses=RESPONSES | {200: {"content": _BINARY, "headers": {HEADER_SIZE: _SIZE_HEADER}}},
)


def unavailable(model: type[BaseModel], description: str) -> dict[int | str, dict[str, Any]]:
    """Describe a 503 with the same fields."""
    return {503: {"model": model, "description": description}}


KEYED_RESPONSES = refusals(KeyWanted, Busy)
MODEL_RESPONSES = KEYED_RESPONSES | refusals(UnknownModel)
READY_RESPONSES = MODEL_RESPONSES | unavailable(V2ModelReadiness, "send no requests for this model here")


@router.get("", response_model=V2Server, responses=KEYED_RESPONSES)
async def server(request: Request) -> Response:
    """The server's name and what it speaks."""
    return JSONResponse({"name": "capserve", "version": installed("capserve"), "extensions": EXTENSIONS})


@probes.get(LIVE, name="server_live", response_model=Liveness, responses=unavailable(Liveness, "restart the process"))
async def live(request: Request) -> Response:
    """Whether a restart would be for the better, as /healthz says it."""
    alive = state.of(request).catalogue.alive
    return JSONResponse({"live": alive}, 200 if alive else 503)


@probes.get(READY, name="server_ready", response_model=V2Readiness, responses=unavailable(V2Readiness, "send no requests here"))
async def ready(request: Request) -> Response:
    """Whether to send requests here, as /readyz says it."""
    is_ready = state.of(request).catalogue.ready
    return JSONResponse({"live": state.of(request).catalogue.alive, "ready": is_ready}, 200 if is_ready else 503)


@router.get("/models/{name}", response_model=V2Model, responses=MODEL_RESPONSES)
async def metadata(request: Request, name: str) -> Response:
    """Tensors in and out; -1 is the batch."""
    return JSONResponse(describe(_served(request, name)))


@router.get("/models/{name}/versions/{version}", response_model=V2Model, responses=MODEL_RESPONSES)
async def metadata_of_version(request: Request, name: str, version: str) -> Response:
    """The same of one version, the one that is served: 404 once another is."""
    return JSONResponse(describe(_served(request, name, version)))


@probes.get("/models/{name}/ready", response_model=V2ModelReadiness, responses=READY_RESPONSES)
async def model_ready(request: Request, name: str) -> Response:
    """Whether to send requests for this model here."""
    return _ready(request, _served(request, name))


@probes.get("/models/{name}/versions/{version}/ready", response_model=V2ModelReadiness, responses=READY_RESPONSES)
async def version_ready(request: Request, name: str, version: str) -> Response:
    """The same of one version, the one that is served: 404 once another is."""
    return _ready(request, _served(request, name, version))


@post_inference("/models/{name}/infer")
async def infer(request: Request, name: str) -> Response:
    """Tensors in, tensors out; all outputs where none is named.

    Of reconstructions there is one a picture, the longest capsule's, also where a picture shows two objects."""
    return await _infer(request, partial(_served, request, name), {"model_name": name})


@post_inference("/models/{name}/versions/{version}/infer")
async def infer_version(request: Request, name: str, version: str) -> Response:
    """The same of one version, the one that is served: 404 once another is."""
    return await _infer(request, partial(_served, request, name, version), {"model_name": name, "model_version": version})


def _served(request: Request, name: str, version: str | None = None) -> Served:
    served = state.of(request).catalogue.get(name)
    if version not in (None, served.manifest.version):
        raise UnknownModel(f"{name} has no such version; it has {served.manifest.version}")
    return served


def describe(served: Served) -> dict[str, Any]:
    manifest = served.manifest
    return {
        "name": manifest.name,
        "versions": [manifest.version],
        "platform": PLATFORM,
        "inputs": [port.metadata() for port in _inputs(served)],
        "outputs": [port.metadata() for port in _outputs(served)],
    }


def _ready(request: Request, served: Served) -> Response:
    is_ready = state.of(request).catalogue.serves(served)
    return JSONResponse({"name": served.manifest.name, "ready": is_ready}, 200 if is_ready else 503)


async def _infer(request: Request, find: Callable[[], Served], names: dict[str, str]) -> Response:
    service, visit = state.of(request), visits.of(request.scope)
    service.catalogue.admit()
    find().admit()
    if body.announced_length(request) > SMALL_BYTES:
        service.crew.admit()
    raw_body = await body.read(request, service.settings.max_body, service.settings.patience)
    served = find()  # the model may have been replaced while the body arrived
    with departure.cancel_on_disconnect(request):
        with visit.stage("decode"), service.crew.line() as line:
            read = partial(tensors.read, raw_body, request.headers.get(HEADER_SIZE), _inputs(served), _outputs(served))
            inference: Inference = read() if len(raw_body) <= SMALL_BYTES else await line.do(read, visit.complete)
            images = _checked_pictures(inference.inputs[IMAGES.name])
        judged = await served.perceive(images, visit.complete, RECONSTRUCTIONS.name in inference.outputs)
        visit.model_ran(judged.stages, served.provider)
        return await _response(service, inference, judged.perception, names)


async def _response(service: Service, inference: Inference, perception: Perception, names: dict[str, str]) -> Response:
    outputs = {name: OUTPUTS[name](perception) for name in inference.outputs}
    fields = names if inference.id is None else {**names, "id": inference.id}
    write = partial(tensors.write, fields, outputs, inference.outputs)
    small = sum(values.nbytes for values in outputs.values()) <= SMALL_BYTES
    content, json_size = write() if small else await service.crew.do(write)
    if json_size is None:
        return Response(content, media_type="application/json")
    return Response(content, headers={HEADER_SIZE: str(json_size)}, media_type="application/octet-stream")


def _checked_pictures(images: Array) -> Array:
    lowest, highest = images.min(), images.max()
    if not (lowest >= -SLACK and highest <= 1 + SLACK):  # refuses NaN too
        raise MalformedRequest(f"{IMAGES.name}: expected values from 0 to 1, found {lowest:g} to {highest:g}")
    return images


def _inputs(served: Served) -> list[Port]:
    return [Port.of(IMAGES, served.manifest)]


def _outputs(served: Served) -> list[Port]:
    return [Port.of(spec, served.manifest) for spec in (LENGTHS, CAPSULES, RECONSTRUCTIONS)]
