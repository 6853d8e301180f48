"""What the routes of one app share; it is kept on app.state, so that two apps in a process share nothing."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from service.brevity import Brevity
from service.catalogue import Catalogue
from service.crew import Crew
from service.metrics import Metrics
from service.process.siblings import Siblings
from service.scrapes import Scrapes
from service.settings import Settings
from service.web.bodies import Bodies
from service.web.refusals import Refusals


@dataclass(frozen=True)
class Service:
    settings: Settings
    catalogue: Catalogue
    metrics: Metrics
    crew: Crew
    brevity: Brevity
    bodies: Bodies
    refusals: Refusals
    siblings: Siblings
    scrapes: Scrapes

    def measure(self) -> None:
        """Updates the metrics that are states, not events."""
        self.catalogue.measure()
        self.metrics.body_bytes.set(self.bodies.held)
        self.metrics.unread_bytes.set(self.bodies.unread)


def of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service
