"""POST /predict and /predict/batch: pictures in, what was seen out."""

from __future__ import annotations

import asyncio
import json
import time
from functools import partial
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Query, Request, Response

from service import answer, images, state, visits
from service.bundle import Array
from service.crew import Line
from service.errors import ServiceError, TooLarge, TurnedAway
from service.routes.direct import RESPONSES, Direct
from service.schemas import ManyPictures, OnePicture, Prediction, Predictions, PredictQuery
from service.served import Judged, Served
from service.state import Service
from service.visits import Visit
from service.web import body, departure

router = APIRouter(route_class=Direct, responses=RESPONSES, tags=["predict"])

# Decoded on the event loop: if threads did it, fewer would be answered, since they share the GIL with it.
SMALL_BYTES = 1 << 13
SMALL_PIXELS = 1 << 12

FILE_SCHEMA = {"type": "string", "format": "binary"}


def _form_schema(file: dict[str, Any]) -> dict[str, Any]:
    return {"schema": {"type": "object", "required": ["file"], "properties": {"file": file}}}


ONE_PICTURE = {
    body.MULTIPART: _form_schema(FILE_SCHEMA),
    body.JSON: {"schema": OnePicture.model_json_schema()},
    **dict.fromkeys(("image/png", "image/jpeg", "image/webp", "image/bmp"), {"schema": FILE_SCHEMA}),
}
MANY_PICTURES = {
    body.MULTIPART: _form_schema({"type": "array", "items": FILE_SCHEMA}),
    body.JSON: {"schema": ManyPictures.model_json_schema()},
}


@router.post("/predict", response_model=Prediction, openapi_extra={"requestBody": {"required": True, "content": ONE_PICTURE}})
async def predict(request: Request, query: Annotated[PredictQuery, Query()]) -> Response:
    """Which digit is this? Probabilities are capsule lengths; the pose token draws variations at GET /reconstruct."""
    service, visit = state.of(request), visits.of(request.scope)
    _admitted(service, query, body.announced_length(request))
    raw_body = await body.read(request, service.settings.max_body, service.settings.patience)
    served = _admitted(service, query)
    picture = body.picture(request.headers.get("content-type", ""), raw_body)
    del raw_body  # what waits for the model need not be in memory twice
    with departure.cancel_on_disconnect(request):
        with visit.stage("decode"), service.crew.line() as line:
            image = await _decode(service, served, picture, query, visit, line)
        judged = await _judged(served, image[None], visit)
    input_image = image if query.input else None
    return _json(answer.prediction(served.manifest, judged.perception, 0, judged.verdicts[0], query.reconstruct, input_image))


@router.post(
    "/predict/batch", response_model=Predictions, openapi_extra={"requestBody": {"required": True, "content": MANY_PICTURES}}
)
async def predict_batch(request: Request, query: Annotated[PredictQuery, Query()]) -> Response:
    """Many pictures at once. One that cannot be read fails the request and is named by its index."""
    service, visit = state.of(request), visits.of(request.scope)
    _admitted(service, query)
    raw_body = await body.read(request, service.settings.max_body, service.settings.patience)
    served = _admitted(service, query)
    pictures = body.pictures(request.headers.get("content-type", ""), raw_body, service.settings.max_images)
    del raw_body
    with departure.cancel_on_disconnect(request):
        with served.reserved(len(pictures)), visit.stage("decode"), service.crew.line(len(pictures)) as line:
            decoded = [
                await _decode_one_of_many(service, served, index, each, query, visit, line) for index, each in enumerate(pictures)
            ]
        judged = await _judged(served, np.stack(decoded), visit)
    predictions = []
    for row, (verdict, image) in enumerate(zip(judged.verdicts, decoded, strict=True)):
        await asyncio.sleep(0)  # let others run between two: pictures are compressed here
        input_image = image if query.input else None
        predictions.append(answer.prediction(served.manifest, judged.perception, row, verdict, query.reconstruct, input_image))
    return _json({"model": served.manifest.name, "predictions": predictions})


def _admitted(service: Service, query: PredictQuery, announced: int = 0) -> Served:
    """Refuse the request or return its model, before the body is read; `announced` is the bytes of a single picture, which the
    crew decodes if they are many. Called again afterwards, since the model may have been replaced."""
    service.catalogue.admit()
    served = service.catalogue.get(query.model)
    served.admit()
    if announced > SMALL_BYTES:
        service.crew.admit()
    return served


async def _decode(service: Service, served: Served, data: bytes, query: PredictQuery, visit: Visit, line: Line) -> Array:
    """(C, H, W) in [0, 1], as the network takes it."""
    most, normalise = service.settings.max_pixels, query.normalise == "auto"
    if len(data) <= SMALL_BYTES and service.brevity.allows_next():
        began = time.thread_time()
        try:
            return images.decoded(data, min(SMALL_PIXELS, most), served.manifest, normalise)
        except TooLarge:
            pass  # in pixels, to be decoded on the event loop
        finally:
            service.brevity.record(time.thread_time() - began)
    return await line.do(partial(images.decoded, data, most, served.manifest, normalise, service.crew.lock), visit.complete)


async def _decode_one_of_many(
    service: Service, served: Served, index: int, data: bytes, query: PredictQuery, visit: Visit, line: Line
) -> Array:
    await asyncio.sleep(0)  # let others run between two pictures
    if index:
        line.advance()
    try:
        return await _decode(service, served, data, query, visit, line)
    except TurnedAway:  # because of load, whichever picture it was
        raise
    except ServiceError as error:
        error.detail = f"picture {index}: {error.detail}"
        raise


async def _judged(served: Served, pictures: Array, visit: Visit) -> Judged:
    judged = await served.perceive(pictures, visit.complete)
    visit.model_ran(judged.stages, served.provider)
    return judged


def _json(value: Any) -> Response:
    return Response(json.dumps(value, separators=(",", ":")).encode(), media_type="application/json")
