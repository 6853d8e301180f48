"""docker/nginx/nginx.conf in a real nginx, in front of a real service or of nobody: what it passes on and what it refuses."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from http.client import HTTPMessage, HTTPResponse
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http
from tritonclient.utils import InferenceServerException

from service.web.problems import MEDIA_TYPE
from tests.service.conftest import drawn, encoded, reaching
from tests.service.processes import free_port, process
from tests.waiting import until

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx (Debian's nginx-light) is not installed")


@contextlib.contextmanager
def proxy(behind: int, folder: Path) -> Iterator[int]:
    """Runs an nginx that passes requests on to the port `behind`, without Docker's DNS; yields its own port."""
    port = free_port()
    text = (ROOT / "docker/nginx/nginx.conf").read_text().replace("/tmp/", f"{folder}/")
    for told, here in {
        "listen 8080;": f"listen 127.0.0.1:{port};",
        "set $replicas capserve;": "set $replicas 127.0.0.1;",
        "$replicas:8000": f"$replicas:{behind}",
    }.items():
        assert told in text
        text = text.replace(told, here)
    (folder / "nginx.conf").write_text(re.sub(r"resolver .*;", "", text))
    folder.chmod(0o755)
    running = subprocess.Popen(["nginx", "-e", "stderr", "-c", folder / "nginx.conf", "-g", "daemon off;"])
    try:
        until(lambda: _answers(port))
        yield port
    finally:
        running.terminate()
        running.wait(10)


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


@pytest.fixture(scope="module")
def lone_proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with proxy(free_port(), tmp_path_factory.mktemp("nginx")) as port:
        yield port


def asked(port: int, request: str) -> tuple[int, HTTPMessage, dict[str, object]]:
    """Sends a request as it is, even one that no HTTP client would send."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(request.encode())
        answer = HTTPResponse(connection)
        answer.begin()
        return answer.status, answer.headers, json.loads(answer.read())


HOST = "Host: capserve\r\n"


@pytest.mark.parametrize(
    ("status", "request_"),
    [
        (400, f"GET / HTTP/1.1\r\n{HOST}{HOST}\r\n"),
        (404, f"GET /__malformed HTTP/1.1\r\n{HOST}\r\n"),
        (405, f"TRACE / HTTP/1.1\r\n{HOST}\r\n"),
        (413, f"POST /predict HTTP/1.1\r\n{HOST}Content-Length: 20000000\r\n\r\n"),
        (431, f"GET /{'a' * 9000} HTTP/1.1\r\n{HOST}\r\n"),
        (431, f"GET / HTTP/1.1\r\n{HOST}X-Long: {'a' * 9000}\r\n\r\n"),
        (501, f"POST /predict HTTP/1.1\r\n{HOST}Transfer-Encoding: gzip\r\n\r\n"),
        (503, f"GET /models HTTP/1.1\r\n{HOST}\r\n"),
    ],
)
def test_the_proxys_own_refusals_look_like_the_services(status: int, request_: str, lone_proxy: int) -> None:
    found, headers, problem = asked(lone_proxy, request_)
    assert (found, headers["content-type"]) == (status, MEDIA_TYPE)
    assert problem["status"] == status
    assert problem["detail"] == problem["error"]
    assert ("retry-after" in headers) == (status == 503)


def test_a_body_that_cannot_be_buffered_gets_503_with_retry_after(tmp_path: Path) -> None:
    with proxy(free_port(), tmp_path) as port:
        shutil.rmtree(tmp_path / "body")  # bodies have nowhere to wait, as on a full disk
        found, headers, problem = asked(port, f"POST /predict HTTP/1.1\r\n{HOST}Content-Length: 90000\r\n\r\n{'a' * 90_000}")
    assert (found, headers["content-type"], headers["retry-after"]) == (503, MEDIA_TYPE, "1")
    assert "no room" in str(problem["detail"])


def test_one_address_may_send_at_most_twenty_large_bodies_at_once(lone_proxy: int) -> None:
    with contextlib.ExitStack() as held:
        for _ in range(20):
            connection = held.enter_context(socket.create_connection(("127.0.0.1", lone_proxy)))
            connection.sendall(f"POST /predict HTTP/1.1\r\n{HOST}Content-Length: 200000\r\n\r\nbegun".encode())
        until(lambda: asked(lone_proxy, f"POST /predict HTTP/1.1\r\n{HOST}Content-Length: 200000\r\n\r\n")[0] == 429)
        found, headers, problem = asked(lone_proxy, f"POST /predict HTTP/1.1\r\n{HOST}Content-Length: 200000\r\n\r\n")
        assert (found, headers["retry-after"]) == (429, "1")
        assert problem["detail"] == problem["error"]


def test_a_triton_client_gets_a_readable_503_when_no_server_answers(lone_proxy: int) -> None:
    client = tritonclient.http.InferenceServerClient(f"127.0.0.1:{lone_proxy}")
    images = tritonclient.http.InferInput("images", [1, 1, 28, 28], "FP32")
    images.set_data_from_numpy(np.zeros((1, 1, 28, 28), np.float32))
    with pytest.raises(InferenceServerException, match=r"^\[503\] no server answers; ask again"):
        client.infer("compact", [images])


def test_requests_and_the_api_key_pass_through_the_proxy(tmp_path: Path) -> None:
    """Where the service asks for a key, the key goes through, too."""
    with (
        process(api_key="secret") as server,
        proxy(server.port, tmp_path) as port,
        reaching(f"http://127.0.0.1:{port}") as client,
    ):
        assert client.get("/models").status_code == 401
        client.headers["X-API-Key"] = "secret"
        said = client.post("/predict", files={"file": encoded(drawn("7"))}).raise_for_status().json()
        assert said["model"] == "tiny"
        assert client.get("/reconstruct", params={"pose": said["objects"][0]["pose"], "dim": 1, "delta": 0.1}).status_code == 200
        assert client.post("/models/reload").status_code == 200
        assert client.get("/nowhere").status_code == 404
