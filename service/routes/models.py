"""GET /models and /models/{name}: what is served, and by what; POST /models/reload: serve what the folder holds now."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from service import state
from service.catalogue import Catalogue
from service.errors import Busy, Forbidden, KeyWanted, NotReloaded, StartError, UnknownModel, Unprocessable
from service.manifest import DECODER_FILE, ENCODER_FILES, BundleError
from service.routes.direct import Bare, refusals
from service.schemas import ModelDetail, Models, Reloaded
from service.served import Served

router = APIRouter(route_class=Bare, responses=refusals(KeyWanted, Unprocessable, Busy), tags=["models"])


@router.get("/models", response_model=Models)
async def models(request: Request) -> Response:
    """All models, in short."""
    return JSONResponse(listing(state.of(request).catalogue))


@router.post("/models/reload", response_model=Reloaded, responses=refusals(Forbidden, NotReloaded))
async def reload(request: Request) -> Response:
    """Takes up new, changed and removed bundles; what cannot be verified changes nothing. Asks for the
    server's key, and is a 403 where the server has none (CAPSERVE_API_KEY).

    The answer is of the worker that was asked. Others of the same server follow in the seconds after it, and one that cannot
    serves on as before and says so in the log.
    """
    service = state.of(request)
    if service.settings.api_key is None:
        raise Forbidden(
            "reloading over HTTP needs a key: start the server with CAPSERVE_API_KEY; or restart it; or, if no terminal "
            "runs it, send it SIGHUP"
        )
    if _from_another_site(request):
        raise Forbidden("another site's page sent this reload; use this server's own page, or curl")
    try:
        changes = await service.catalogue.reload()
    except (BundleError, StartError) as error:
        raise NotReloaded(f"{error}; the previous models still serve") from error
    await service.siblings.let_all_reload()
    return JSONResponse({"models": changes})


def _from_another_site(request: Request) -> bool:
    """Whether another site's page asks: browsers add a key they know to any page's form. Over http: they send Origin alone."""
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if site is not None:
        return site in ("cross-site", "same-site")
    return origin is not None and origin.partition("://")[2] != request.headers.get("host")


@router.get("/models/{name}", response_model=ModelDetail, responses=refusals(UnknownModel))
async def model(request: Request, name: str) -> Response:
    """One model with its whole manifest: how it was trained, what was measured, what is usual for it."""
    catalogue = state.of(request).catalogue
    served = catalogue.get(name)
    manifest = served.manifest.model_dump(mode="json")
    return JSONResponse({**_summary(served, name == catalogue.default), "manifest": manifest})


def listing(catalogue: Catalogue) -> dict[str, Any]:
    return {"models": [_summary(served, served.manifest.name == catalogue.default) for served in catalogue]}


def _summary(served: Served, default: bool) -> dict[str, Any]:
    manifest = served.manifest
    return {
        "name": manifest.name,
        "version": manifest.version,
        "default": default,
        "variant": served.net.variant,
        "provider": served.provider,
        "classes": list(manifest.classes),
        "image_shape": list(manifest.image_shape),
        "pose_size": manifest.pose_size,
        "dimensions": [
            {"dim": dim, "name": each.name, "strength": each.strength}
            for dim, each in enumerate(manifest.dimensions)
            if each.name
        ],
        "graphs": {file: manifest.files[file] for file in (ENCODER_FILES[served.net.variant], DECODER_FILE)},
    }
