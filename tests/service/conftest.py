"""A real uvicorn on a free port, serving tests/bundles/tiny; started once, for all tests of the service."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import httpx
import pytest
import uvicorn
from PIL import Image, ImageDraw

from service import catalogue
from service.app import create_app
from service.engine import CapsNet
from service.process.server import uvicorn_config
from service.settings import Settings

BUNDLES = Path(__file__).parent.parent / "bundles"
TINY = BUNDLES / "tiny"
CPU = {"threads": 1, "cuda_memory": 1, "cuda_graphs": False}  # what sessions.device wants to know besides

# Strokes of a 7 and a 1 on a 20x20 field, from which the tests draw pictures of any size and style.
STROKES = {"7": [(4, 3), (15, 3), (9, 17)], "1": [(10, 2), (10, 18)]}


def settings(**values: object) -> Settings:
    return Settings(models=BUNDLES, port=0, linger=0.0, **values)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def nets() -> dict[str, CapsNet]:
    return catalogue.load(settings())


@pytest.fixture(scope="session")
def net(nets: dict[str, CapsNet]) -> CapsNet:
    return nets["tiny"]


def reaching(url: str, timeout: float = 20) -> httpx.Client:
    """Makes a client for plain HTTP that loads no certificates: loading them takes longer than most tests."""
    return httpx.Client(base_url=url, timeout=timeout, verify=False)


@contextmanager
def serving(
    chosen: Settings, nets: dict[str, CapsNet] | None = None, port: int = 0, answers: str = "/readyz", prefix: str = ""
) -> Iterator[httpx.Client]:
    """Runs a server for a test that needs other settings; yields its client once it answers at the path `answers`."""
    app = create_app(chosen, nets)
    listener = socket.create_server(("127.0.0.1", port))
    config = uvicorn_config(app, chosen)
    config.root_path = prefix
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        with reaching(f"http://127.0.0.1:{listener.getsockname()[1]}") as client:
            wait_until_ready(client, path=answers)
            yield client
    finally:
        server.should_exit = True
        thread.join()


def wait_until_ready(
    client: httpx.Client, seconds: float = 20, lives: Callable[[], bool] = lambda: True, path: str = "/readyz"
) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        assert lives(), "the server ended before it was ready"
        try:
            if client.get(path).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.02)
    raise TimeoutError("the server did not become ready")


@pytest.fixture(scope="session")
def server(nets: dict[str, CapsNet]) -> Iterator[str]:
    with serving(settings(), nets) as client:
        yield str(client.base_url)


@pytest.fixture
def client(server: str) -> Iterator[httpx.Client]:
    with reaching(server) as client:
        yield client


def drawn(digit: str, side: int = 280, ink: int = 255, paper: int = 0) -> Image.Image:
    """A digit in plain strokes."""
    picture = Image.new("L", (side, side), paper)
    points = [(x * side / 20, y * side / 20) for x, y in STROKES[digit]]
    ImageDraw.Draw(picture).line(points, fill=ink, width=max(1, side // 11), joint="curve")
    return picture


def encoded(picture: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.fixture(scope="session")
def seven() -> bytes:
    return encoded(drawn("7"))


@pytest.fixture
def token(client: httpx.Client, seven: bytes) -> str:
    found: str = client.post("/predict", files={"file": seven}).json()["objects"][0]["pose"]
    return found
