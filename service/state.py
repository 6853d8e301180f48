"""What the routes of one app share; it hangs on app.state, so that two apps in a process share nothing."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from service.bodies import Bodies
from service.catalogue import Catalogue
from service.crew import Crew
from service.metrics import Metrics
from service.settings import Settings


@dataclass(frozen=True)
class Service:
    settings: Settings
    catalogue: Catalogue
    metrics: Metrics
    crew: Crew
    bodies: Bodies


def of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service
