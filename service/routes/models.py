"""GET /models and /models/{name}: what is served, and by what."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from service import state
from service.catalogue import Served
from service.routes.direct import RESPONSES
from service.schemas import ModelDetail, Models

router = APIRouter(responses={status: RESPONSES[status] for status in (401, 404)}, tags=["models"])


@router.get("/models", response_model=Models)
async def models(request: Request) -> Response:
    """All models, in short."""
    catalogue = state.of(request).catalogue
    return JSONResponse({"models": [_summary(served, served.manifest.name == catalogue.default) for served in catalogue]})


@router.get("/models/{name}", response_model=ModelDetail)
async def model(request: Request, name: str) -> Response:
    """One model with its whole manifest: how it was trained, what was measured, what is usual for it."""
    catalogue = state.of(request).catalogue
    served = catalogue.get(name)
    manifest = served.manifest.model_dump(mode="json")
    return JSONResponse({**_summary(served, name == catalogue.default), "manifest": manifest})


def _summary(served: Served, default: bool) -> dict[str, Any]:
    manifest = served.manifest
    return {
        "name": manifest.name,
        "version": manifest.version,
        "default": default,
        "variant": served.net.variant,
        "provider": served.net.device.provider,
        "classes": list(manifest.classes),
        "image_shape": list(manifest.image_shape),
        "pose_size": manifest.pose_size,
    }
