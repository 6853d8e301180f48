"""What holds for every route: key, problem+json, OpenAPI, request ids, logs, and no torch."""

from __future__ import annotations

import asyncio
import base64
import html
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import ExifTags, Image

from service.app import create_app
from service.bundle import Array
from service.engine import CapsNet
from service.process import logs
from service.web.envelope import OPEN_PATHS
from tests.service.conftest import drawn, encoded, serving, settings
from tests.service.test_metrics import samples
from tests.waiting import until

KEY = "correct horse"


def test_service_imports_without_torch_onnx_and_training() -> None:
    blocked = "import sys; sys.modules.update(dict.fromkeys(('torch', 'onnx', 'training')))\n"
    code = blocked + "import service.app, service.process.server, service.__main__; print('imported')"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "imported\n"


def test_a_key_is_required_except_for_health_and_metrics(nets: dict[str, CapsNet], seven: bytes) -> None:
    with serving(settings(api_key=KEY), nets) as client:
        for path in ("/healthz", "/readyz", "/metrics", "/v2/health/live", "/v2/health/ready"):
            assert client.get(path).status_code == 200
        for path in ("/models", "/docs", "/openapi.json", "/reconstruct", "/v2", "/nowhere"):
            answer = client.get(path)
            assert answer.status_code == 401
            assert answer.json()["detail"].startswith("send the server's key as")
            assert answer.headers["WWW-Authenticate"].startswith("Bearer, Basic realm=")
            scripted = client.get(path, headers={"X-Requested-With": "XMLHttpRequest"})
            assert (scripted.status_code, scripted.headers["WWW-Authenticate"]) == (401, "Bearer")
        assert client.post("/predict", files={"file": seven}).status_code == 401
        another = client.get("/models", headers={"X-API-Key": KEY[:-1]})
        assert another.status_code == 401
        assert "the key sent is not the server's" in another.json()["detail"]
        assert client.get("/models", headers={"X-API-Key": "naïve".encode()}).status_code == 401
        assert client.get("/models", headers={"Authorization": "Basic !"}).status_code == 401
        basic = base64.b64encode(f"anyone:{KEY}".encode()).decode()
        for header in ({"X-API-Key": KEY}, {"Authorization": f"Bearer {KEY}"}, {"Authorization": f"basic {basic}"}):
            assert client.get("/models", headers=header).status_code == 200
        assert client.get("/reconstruct", headers={"X-API-Key": KEY}).headers["Cache-Control"].startswith("private")
        document = client.get("/openapi.json", headers={"X-API-Key": KEY}).json()
        assert document["security"] == [{name: []} for name in document["components"]["securitySchemes"]]
        assert "security" not in document["paths"]["/predict"]["post"]
        assert document["paths"]["/healthz"]["get"]["security"] == []


def test_any_one_of_several_configured_keys_is_accepted(nets: dict[str, CapsNet]) -> None:
    with serving(settings(api_key=f"the new one\n{KEY}"), nets) as client:
        for key, status in (("the new one", 200), (KEY, 200), (f"the new one\t{KEY}", 401), ("", 401), ("the", 401)):
            assert client.get("/models", headers={"X-API-Key": key}).status_code == status, key


def test_a_trailing_slash_gets_404_and_no_redirect(client: httpx.Client, seven: bytes) -> None:
    """A redirect would send clients, and their keys with them, from a proxy's https: to our http:."""
    for path in ("/predict/", "/models/", "/docs/"):
        answer = client.post(path, files={"file": seven}, follow_redirects=False)
        assert (answer.status_code, answer.headers["Content-Type"]) == (404, "application/problem+json"), path


def test_answers_that_may_change_are_no_store_and_docs_no_cache(client: httpx.Client) -> None:
    for path in ("/healthz", "/readyz", "/metrics", "/models", "/models/tiny", "/v2", "/v2/models/tiny", "/nowhere"):
        assert client.get(path).headers["Cache-Control"] == client.head(path).headers["Cache-Control"] == "no-store", path
    assert client.get("/docs").headers.get_list("Cache-Control") == ["no-cache"]


def test_commands_in_docs_use_the_readers_host_and_scheme(client: httpx.Client) -> None:
    place = client.base_url.netloc.decode()
    assert f"http://{place}/predict" in client.get("/docs").text
    behind = client.get("/docs", headers={"X-Forwarded-Proto": "https, http"}).text  # from two proxies
    assert f"https://{place}/predict" in behind
    assert f"http://{place}" not in behind


def test_head_answers_as_get_would_without_the_body(client: httpx.Client) -> None:
    paths = [
        "/",
        "/healthz",
        "/readyz",
        "/metrics",
        "/models",
        "/models/tiny",
        "/docs",
        "/openapi.json",
        "/v2",
        "/v2/models/tiny",
    ]
    paths += ["/reconstruct?label=7", "/reconstruct/sweep?label=7", "/reconstruct?size=1", "/nowhere", "/predict"]
    for path in paths:
        get, head = client.get(path), client.head(path)
        assert (head.status_code, head.content) == (get.status_code, b""), path
        assert head.headers["Content-Type"] == get.headers["Content-Type"]
        assert head.headers.get("ETag") == get.headers.get("ETag")
        if path != "/metrics":  # which has counted one more request by then
            assert head.headers["Content-Length"] == get.headers["Content-Length"]
    assert client.get("/healthz").json() == {"live": True}  # the connection is still in sync


def test_an_unexpected_exception_is_a_500_without_a_traceback(
    nets: dict[str, CapsNet], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr("service.routes.models._summary", broken)
    with serving(settings(), nets) as client:
        answer = client.get("/models")
    assert answer.status_code == 500
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert answer.headers["X-Request-ID"] in answer.json()["detail"]
    assert "secret" not in answer.text
    assert "ZeroDivisionError" in caplog.text


def test_a_failing_model_is_not_ready_until_it_works_again(
    nets: dict[str, CapsNet], monkeypatch: pytest.MonkeyPatch, seven: bytes
) -> None:
    with serving(settings(), nets) as client:
        with monkeypatch.context() as patched:
            patched.setattr(type(nets["tiny"].encoder), "run", _raise)
            answer = client.post("/predict", files={"file": seven})
            assert (answer.status_code, answer.json()["title"]) == (503, "the model failed")
            assert "Retry-After" in answer.headers
            assert client.get("/healthz").status_code == 200  # a single failure may be the batch's fault
            assert client.get("/readyz").json() == {"ready": False, "state": "failing"}
            for path in ("/v2/health/ready", "/v2/models/tiny/ready", "/docs", "/openapi.json"):  # their examples need the model
                assert client.get(path).status_code == 503, path
            for _ in range(4):
                client.post("/predict", files={"file": seven})
            assert client.get("/healthz").status_code == 503
            seen = samples(client)
            assert seen["capserve_model_failures_total", "tiny"] >= 5  # probes fail too
            assert seen["capserve_ready",] == 0
        until(lambda: client.get("/readyz").status_code == 200)  # the server probes the model
        assert client.get("/healthz").status_code == 200
        assert client.get("/docs").status_code == 200


def test_requests_without_the_decoder_do_not_clear_its_failures(
    nets: dict[str, CapsNet], monkeypatch: pytest.MonkeyPatch, seven: bytes
) -> None:
    lengths = {
        "inputs": [{"name": "images", "datatype": "FP32", "shape": [1, 1, 28, 28], "data": [0.0] * 784}],
        "outputs": [{"name": "lengths"}],
    }
    decoder, run = nets["tiny"].decoder, type(nets["tiny"].decoder).run
    with serving(settings(), nets) as client:
        with monkeypatch.context() as patched:
            patched.setattr(type(decoder), "run", lambda graph, *inputs: _raise() if graph is decoder else run(graph, *inputs))
            for _ in range(5):
                assert client.post("/predict", files={"file": seven}).status_code == 503
                assert client.post("/v2/models/tiny/infer", json=lengths).status_code == 200
                assert client.get("/readyz").status_code == 503
            assert client.get("/healthz").status_code == 503
        until(lambda: client.get("/readyz").status_code == 200)


def test_a_hanging_model_fails_its_requests_and_the_liveness_probe(
    net: CapsNet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, seven: bytes
) -> None:
    monkeypatch.setattr("service.served.HANGING_LOOKS", 2)
    hung, inside, over = threading.Event(), threading.Event(), threading.Event()

    class Hanging:
        runners = 1

        def run(self, *inputs: Array) -> object:
            if hung.is_set():
                inside.set()
                over.wait(20)
            return net.encoder.run(*inputs)

        def __getattr__(self, name: str) -> object:
            return getattr(net.encoder, name)

    with serving(settings(deadline=0.5), {"tiny": replace(net, encoder=Hanging())}) as client, ThreadPoolExecutor() as pool:
        hung.set()
        first = pool.submit(client.post, "/predict", files={"file": seven})
        assert inside.wait(5)
        behind = pool.submit(client.post, "/predict", files={"file": seven})
        assert behind.result(5).status_code == 504
        assert client.get("/healthz").status_code == 200
        told = first.result(10)
        assert (told.status_code, told.json()["title"]) == (503, "the model failed")
        assert "the model hangs" in told.json()["detail"]
        assert client.get("/healthz").status_code == 503
        assert client.get("/readyz").json() == {"ready": False, "state": "failing"}
        hung.clear()
        over.set()
        until(lambda: client.get("/readyz").status_code == 200)
    assert "model tiny hangs" in caplog.text


def test_models_are_still_supervised_after_measuring_them_fails(
    nets: dict[str, CapsNet], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, seven: bytes
) -> None:
    """As happens when the disk under a worker's metrics is full."""
    with serving(settings(), nets) as client:
        with monkeypatch.context() as patched:
            patched.setattr("service.catalogue.Catalogue.measure", _raise)
            patched.setattr(type(nets["tiny"].encoder), "run", _raise)
            assert client.post("/predict", files={"file": seven}).status_code == 503
            until(lambda: "supervising the models failed" in caplog.text)
        until(lambda: client.get("/readyz").status_code == 200)
        until(lambda: samples(client)["capserve_ready",] == 1)


def test_probing_continues_after_a_probe_misses_the_deadline(
    nets: dict[str, CapsNet], monkeypatch: pytest.MonkeyPatch, seven: bytes
) -> None:
    def hang(*_: object) -> None:
        time.sleep(2)  # a probe comes within a second, and waits for longer than the deadline
        _raise()

    with serving(settings(deadline=0.3), nets) as client:
        with monkeypatch.context() as patched:
            patched.setattr(type(nets["tiny"].encoder), "run", _raise)
            assert client.post("/predict", files={"file": seven}).status_code == 503
            patched.setattr(type(nets["tiny"].encoder), "run", hang)
            with ThreadPoolExecutor() as pool:
                answers = list(
                    pool.map(lambda _: client.post("/predict", files={"file": seven}), range(nets["tiny"].encoder.runners))
                )
        assert {each.status_code for each in answers} == {503}
        until(lambda: client.get("/readyz").status_code == 200)


def test_openapi_documents_every_route_with_examples_that_work(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    paths = document["paths"]
    assert "security" not in document  # no key is set
    assert paths["/v2/models/{name}/infer"]["post"]["responses"]["200"]["content"].keys() == {
        "application/json",
        "application/octet-stream",
    }
    assert {"/predict", "/predict/batch", "/reconstruct", "/reconstruct/sweep", "/reconstruct/morph", "/models"} <= paths.keys()
    sent = paths["/predict"]["post"]["requestBody"]["content"]["application/json"]["example"]
    promised = paths["/predict"]["post"]["responses"]["200"]["content"]["application/json"]["example"]
    answer = client.post("/predict", json=sent).json()
    assert answer == promised
    for path in ("/models", "/v2/models/{name}", "/healthz", "/readyz"):
        promised = paths[path]["get"]["responses"]["200"]["content"]["application/json"]["example"]
        assert client.get(path.format(name="tiny")).json() == promised
    refusal = paths["/predict"]["post"]["responses"]["422"]["content"]["application/problem+json"]["example"]
    assert client.get("/reconstruct?dim=99").json().keys() == refusal.keys()
    for path in ("/reconstruct", "/reconstruct/sweep", "/reconstruct/morph"):
        parameters = paths[path]["get"]["parameters"]
        query = {each["name"]: each["example"] for each in parameters if "example" in each}
        assert query
        assert client.get(path, params=query).headers["Content-Type"] == "image/png"
    assert "application/problem+json" in paths["/predict"]["post"]["responses"]["422"]["content"]
    assert "Problem" in document["components"]["schemas"]
    assert paths["/predict"]["post"]["responses"].keys().isdisjoint({"403", "409"})
    assert paths["/models/reload"]["post"]["responses"].keys() >= {"403", "409"}
    for path in paths.keys() - OPEN_PATHS:  # a busy server turns requests away on all others
        assert [method for method, each in paths[path].items() if "503" not in each["responses"]] == [], path
    assert client.get("/docs").status_code == 200


def test_openapi_has_unique_operation_ids_and_documents_headers(client: httpx.Client) -> None:
    """Short names that no other operation has, and the headers to look for."""
    document = client.get("/openapi.json").json()
    names = [each["operationId"] for path in document["paths"].values() for each in path.values()]
    assert len(set(names)) == len(names)
    assert {"predict", "predict_batch", "reconstruct", "sweep", "models", "infer", "live", "server_live"} <= set(names)
    drawn, read = document["paths"]["/reconstruct"]["get"], document["paths"]["/predict"]["post"]["responses"]
    assert "ETag" in drawn["responses"]["200"]["headers"].keys() & drawn["responses"]["304"]["headers"].keys()
    assert "If-None-Match" in [each["name"] for each in drawn["parameters"]]
    assert "X-Request-ID" in read["200"]["headers"].keys() & read["415"]["headers"].keys()
    assert [status for status, answer in read.items() if "Retry-After" in answer["headers"]] == ["503"]
    for header in read["503"]["headers"].values():
        assert header["$ref"].rpartition("/")[2] in document["components"]["headers"]


def test_openapi_names_the_servers_path_prefix(nets: dict[str, CapsNet]) -> None:
    with serving(settings(), nets, prefix="/below") as client:
        assert client.get("/openapi.json").json()["servers"] == [{"url": "/below"}]
    with serving(settings(), nets) as client:
        assert "servers" not in client.get("/openapi.json").json()
        stripped = {"X-Forwarded-Prefix": "/taken/off/"}
        assert client.get("/openapi.json", headers=stripped).json()["servers"] == [{"url": "/taken/off"}]
        place = client.base_url.netloc.decode()
        assert f"http://{place}/taken/off/predict" in client.get("/docs", headers=stripped).text
        for wrong in ("//evil.example", "/../up", "nowhere", '/"><script>', "/a b"):
            assert "servers" not in client.get("/openapi.json", headers={"X-Forwarded-Prefix": wrong}).json()


def test_a_404_below_a_prefix_names_the_docs_with_the_prefix(nets: dict[str, CapsNet]) -> None:
    """Ray calls an app with a prefix like this; uvicorn itself never passes the prefix without a slash behind it."""

    async def told(path: str) -> str:
        transport = httpx.ASGITransport(create_app(settings(), nets), root_path="/below")
        async with httpx.AsyncClient(transport=transport, base_url="http://digits") as client:
            answer = await client.get(path)
        assert answer.status_code == 404
        detail: str = answer.json()["detail"]
        return detail

    lists = "there is nothing at this path; /below/docs lists what there is"
    assert asyncio.run(told("/below/nowhere")) == lists
    assert asyncio.run(told("/below")) == f"{lists}; the page is at /below/"


def test_commands_in_docs_work_as_they_stand(nets: dict[str, CapsNet], tmp_path: Path, seven: bytes) -> None:
    (tmp_path / "seven.png").write_bytes(seven)
    with serving(settings(api_key="sesame"), nets) as client:
        client.headers["X-API-Key"] = "sesame"
        found = [html.unescape(line) for line in re.findall(r"<code>(curl .*?)</code>", client.get("/docs").text)]
        bodies = _bodies(client.get("/openapi.json").json())
        assert len(found) > 12
        for command in found:
            if "@request.json" in command:  # its content is an example in openapi.json
                (tmp_path / "request.json").write_text(
                    json.dumps(bodies.pop(command.rsplit(str(client.base_url), 1)[1].strip("'")))
                )
            line = command.replace("-s ", "-s -o answer -w '%{http_code}' ", 1).replace("-o drawing.png", "")
            told = subprocess.run(
                ["sh", "-c", line], cwd=tmp_path, env=os.environ | {"CAPSERVE_API_KEY": "sesame"}, capture_output=True, text=True
            )
            assert told.stdout == "200", command
        assert not bodies


def test_docs_name_each_group_once(client: httpx.Client) -> None:
    told = client.get("/docs").text
    contents, sections = (re.findall(pattern, told) for pattern in ("<h2>(.*?)</h2><ul>", "<section><h2>(.*?)</h2>"))
    assert contents == sections
    assert len(set(contents)) == len(contents) > 3


def _bodies(document: dict[str, Any]) -> dict[str, Any]:
    """Collects the examples of bodies that are not forms, by the path they are sent to."""
    found = {}
    for path, operations in document["paths"].items():
        post = operations.get("post", {})
        sent = post.get("requestBody", {}).get("content", {})
        if sent and "multipart/form-data" not in sent:
            names = {each["name"]: each["example"] for each in post["parameters"] if each["in"] == "path"}
            found[path.format(**names)] = sent["application/json"]["example"]
    return found


def test_logs_describe_requests_without_their_query_or_picture(
    nets: dict[str, CapsNet], capfd: pytest.CaptureFixture[str], token: str
) -> None:
    told = f"base64,{base64.b64encode(b'what a picture could be').decode()}"
    with serving(settings(), nets) as client, _logging("json", "debug"):
        client.get("/reconstruct", params={"pose": token}, headers={"X-Request-ID": "first"})
        client.get("/reconstruct", params={"pose": "x" + token}, headers={"X-Request-ID": "second"})
        client.get(f"/capserve/caf%C3%A9/{token}/{token[:20]}?pose={token}", headers={"X-Request-ID": "third"})
        assert client.post("/predict", json={"image": f"data:image/png;{told}"}).status_code == 415
        assert client.post("/predict", content=b"what a picture could be").status_code == 415
        captioned = Image.Exif()
        captioned[ExifTags.Base.ImageDescription] = "what a picture is of"
        assert client.post("/predict", content=encoded(drawn("7"), "JPEG", exif=captioned)).status_code == 200
    lines = capfd.readouterr().err.splitlines()
    written = "\n".join(line for line in lines if '"logger": "http' not in line)  # written by the client
    said = {line["request_id"]: line for line in map(json.loads, written.splitlines()) if "route" in line}
    assert (said["first"]["route"], said["first"]["status"], said["first"]["level"]) == ("/reconstruct", 200, "debug")
    assert (said["second"]["status"], said["second"]["level"]) == (422, "info")
    assert said["second"]["refusal"] == "cannot be processed"
    assert said["second"]["message"].endswith(" ms: cannot be processed")
    assert said["first"].keys().isdisjoint({"refusal", "trace_id"})
    assert (said["third"]["route"], said["third"]["path"]) == ("none", "/capserve/caf\\xe9/...")
    assert said["third"]["message"].startswith("GET /capserve/caf\\xe9/... 404 ")
    assert "path" not in said["second"]
    assert token[:20] not in written
    assert token not in written
    assert "what a picture" not in written
    assert told not in written


def test_console_log_lines_show_level_and_message() -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, "hello", (), None)
    assert logs.Console().format(record).endswith("INFO    - hello")


class _logging:
    """Puts our handler on the root logger, and pytest's back afterwards."""

    def __init__(self, form: str, level: str) -> None:
        self.form, self.level = form, level

    def __enter__(self) -> None:
        root = logging.getLogger()
        self.before = root.handlers[:], root.level
        root.handlers = []
        logs.configure(self.form, self.level)  # type: ignore[arg-type]

    def __exit__(self, *_: object) -> None:
        root = logging.getLogger()
        root.handlers, level = self.before
        root.setLevel(level)


def _raise(*_: object) -> None:
    raise RuntimeError("CUDA error 700")
