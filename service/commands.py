"""What `capserve` does: serve, check, predict. Each gives an exit status; faults that a person can mend are raised."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from service import listening, logs, workers
from service.bundle import BundleError
from service.errors import ServiceError, StartError
from service.settings import Settings

if TYPE_CHECKING:  # it opens ONNX Runtime
    from service.engine import CapsNet

logger = logging.getLogger(__name__)


def serve(settings: Settings) -> int:
    logs.configure(settings.log_format, settings.log_level)
    if settings.workers > 1:
        return workers.run(settings, work)
    from service import server  # here, so that --help needs no onnxruntime and a supervisor holds none in memory

    with listening.bind(settings.host, settings.port) as listener:
        logger.info("loading %s, for http://%s:%d", settings.models, *listener.getsockname()[:2])
        server.serve(settings, listener)
    return 0


def work(settings: Settings, address: tuple[str, int]) -> None:
    """One of several processes."""
    logs.configure(settings.log_format, settings.log_level)
    try:
        from service import server

        with listening.join(address) as listener:
            server.serve(settings, listener)
    except (BundleError, StartError) as error:
        logger.error("%s", error)
        sys.exit(workers.CANNOT_START)


def check(settings: Settings) -> int:
    """Loads and replays every bundle, and tells of each what runs it or what is wrong."""
    from service import catalogue

    open_bundle, status = catalogue.opener(settings), 0
    nets: dict[str, CapsNet] = {}
    for folder in catalogue.folders(settings):
        try:
            net = catalogue.add(nets, open_bundle(folder), folder)
        except BundleError as error:
            print(f"{folder.name}: broken: {error}")
            status = 2
        else:
            nodes = ", ".join(f"{count} nodes on {provider}" for provider, count in net.nodes.items())
            print(f"{folder.name}: sound: version {net.manifest.version}, {net.variant}, {nodes}, replay within {net.replay:.1e}")
    if nets:
        catalogue.default(settings, nets)  # raises what serve would
    return status


def predict(settings: Settings, files: list[Path], normalise: bool, reconstruct: bool) -> int:
    """A line of JSON for each file, the same as POST /predict would answer."""
    from service import answer, catalogue, images

    nets, status = catalogue.load(settings), 0
    net = nets[catalogue.default(settings, nets)]
    for path in files:
        try:
            picture = images.read(path.read_bytes(), settings.max_pixels)
            image = images.prepare(picture, net.manifest.image_shape, normalise)
        except (OSError, ServiceError) as error:
            print(f"capserve: {path}: {error}", file=sys.stderr)
            status = 1
        else:
            seen = net.perceive(image[None], np.array([True]))
            print(json.dumps({"file": str(path), **answer.prediction(net.manifest, seen, 0, reconstruct)}))
    return status
