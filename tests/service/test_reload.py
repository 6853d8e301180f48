"""A new version of a bundle goes live while requests come in: none is lost, and what cannot be served changes nothing."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import os
import shutil
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from service import bundle, catalogue
from service.app import create_app
from service.catalogue import Catalogue
from service.engine import CapsNet
from service.manifest import BundleError
from service.metrics import Metrics
from service.process.server import Server, uvicorn_config
from tests.service.bundles import TINY, renewed
from tests.service.conftest import reaching, serving, settings
from tests.service.processes import Process, process
from tests.service.test_metrics import samples
from tests.waiting import until

KEY = {"X-API-Key": "sesame"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(TINY, tmp_path / "models" / "tiny")
    return tmp_path / "models"


@pytest.fixture
def keyed(folder: Path, request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    """A server with a deadline of a second, or another that a test asks for, and with no shorter limit on waiting."""
    deadline = getattr(request, "param", 1.0)
    chosen = settings(api_key="sesame", deadline=deadline, max_wait=deadline).model_copy(update={"models": folder})
    with serving(chosen) as client:
        client.headers.update(KEY)
        yield client


def test_folders_put_aside_are_ignored(folder: Path, keyed: httpx.Client) -> None:
    for aside in ("_before", ".old"):
        shutil.copytree(folder / "tiny", folder / aside)
    (folder / "lost+found").mkdir()  # as at the top of a volume
    assert reloaded(keyed) == {"tiny": "unchanged"}


def versions(client: httpx.Client) -> dict[str, str]:
    return {each["name"]: each["version"] for each in client.get("/models").json()["models"]}


def reloaded(client: httpx.Client) -> dict[str, str]:
    answer = client.post("/models/reload")
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["models"])


def test_a_reload_replaces_changed_models_and_adds_new_ones(keyed: httpx.Client, folder: Path, seven: bytes) -> None:
    token = keyed.post("/predict", content=seven).json()["objects"][0]["pose"]
    before = versions(keyed)
    assert reloaded(keyed) == {"tiny": "unchanged"}
    renewed(folder / "tiny", "second")
    renewed(folder / "other", "a model that was not there")
    assert reloaded(keyed) == {"other": "added", "tiny": "replaced"}
    after = versions(keyed)
    assert after["tiny"] != before["tiny"]
    assert keyed.post("/predict?model=other", content=seven).json()["model"] == "other"
    assert "another model" in keyed.get("/reconstruct", params={"pose": token}).json()["detail"]
    again = keyed.post("/predict", content=seven).json()["objects"][0]["pose"]
    assert keyed.get("/reconstruct", params={"pose": again}).status_code == 200
    metrics = keyed.get("/metrics").text
    shown = {
        line.partition('version="')[2].partition('"')[0]: line[-3:] for line in metrics.splitlines() if "model_info{" in line
    }
    assert shown == {before["tiny"]: "0.0", after["tiny"]: "1.0", after["other"]: "1.0"}
    assert 'capserve_queue_limit_images{graph="encoder",model="tiny"} 512.0' in metrics
    document = keyed.get("/openapi.json").json()  # its examples are of the model that is served
    parameters = document["paths"]["/reconstruct"]["get"]["parameters"]
    (example,) = (each["example"] for each in parameters if each["name"] == "pose")
    assert keyed.get("/reconstruct", params={"pose": example}).status_code == 200


def test_every_path_asks_the_model_that_is_named(keyed: httpx.Client, folder: Path, seven: bytes) -> None:
    renewed(folder / "other", "the second")
    reloaded(keyed)
    other = {"model": "other"}
    token = keyed.post("/predict", params=other, content=seven).json()["objects"][0]["pose"]
    batch = keyed.post("/predict/batch", params=other, files=[("file", seven)] * 2).json()
    assert {batch["model"], *(each["model"] for each in batch["predictions"])} == {"other"}
    for path, query in (("", {"pose": token}), ("/sweep", {"pose": token}), ("/morph", {"from": token, "to": token})):
        assert keyed.get(f"/reconstruct{path}", params={**query, **other}).status_code == 200
        refused = keyed.get(f"/reconstruct{path}", params={**query, "model": "tiny"})
        assert (refused.status_code, "another model" in refused.json()["detail"]) == (422, True)


def test_an_etag_of_the_old_model_does_not_match_the_new_one(keyed: httpx.Client, folder: Path) -> None:
    """New prototypes do not change the version, which covers only the graphs, and yet they change the drawing."""
    before = keyed.get("/reconstruct?label=7")
    manifest = folder / "tiny" / "manifest.json"
    values = json.loads(manifest.read_text())
    values["prototypes"][7] = values["prototypes"][1]
    manifest.write_text(json.dumps(values))
    assert reloaded(keyed) == {"tiny": "replaced"}
    after = keyed.get("/reconstruct?label=7", headers={"If-None-Match": before.headers["etag"]})
    assert after.status_code == 200
    assert after.content != before.content


def test_a_model_in_a_renamed_folder_is_unchanged(keyed: httpx.Client, folder: Path) -> None:
    (folder / "tiny").rename(folder / "v2")
    assert reloaded(keyed) == {"tiny": "unchanged"}


def test_a_folder_whose_name_is_not_utf_8_is_reported(keyed: httpx.Client, folder: Path) -> None:
    Path(os.fsdecode(bytes(folder) + b"/bad\xff")).mkdir()
    answer = keyed.post("/models/reload")
    assert answer.status_code == 409
    assert "bad?" in answer.json()["detail"]


def test_a_reload_that_changes_the_default_model_logs_it(
    keyed: httpx.Client, folder: Path, seven: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """From then on another model answers requests that name none."""
    renewed(folder / "other", "a model that was not there")
    reloaded(keyed)
    assert keyed.post("/predict", content=seven).json()["model"] == "other"
    assert "the default model is now other, no longer tiny" in caplog.messages


def test_a_removed_model_gets_404_and_zeroed_gauges(keyed: httpx.Client, folder: Path, seven: bytes) -> None:
    renewed(folder / "other", "for a while")
    reloaded(keyed)
    shutil.rmtree(folder / "other")
    assert reloaded(keyed) == {"other": "removed", "tiny": "unchanged"}
    assert keyed.post("/predict?model=other", content=seven).status_code == 404
    lines = [line for line in keyed.get("/metrics").text.splitlines() if 'model="other"' in line]
    gauges = ("capserve_queue", "capserve_execution_provider", "capserve_model_info", "capserve_reference")
    assert {line.rpartition(" ")[2] for line in lines if line.startswith(gauges)} == {"0.0"}


def test_a_damaged_bundle_changes_nothing(
    keyed: httpx.Client, folder: Path, seven: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    before, sound = versions(keyed), (folder / "tiny" / "encoder.onnx").read_bytes()
    renewed(folder / "another", "sound, and beside one that is not")
    (folder / "tiny" / "encoder.onnx").write_bytes(b"no graph")
    answer = keyed.post("/models/reload")
    assert answer.status_code == 409
    assert "sha256" in answer.json()["detail"]
    assert "the previous models still serve" in answer.json()["detail"]
    assert any(
        told.startswith("not reloaded, the previous models still serve: ") and "sha256" in told for told in caplog.messages
    )
    assert versions(keyed) == before
    assert keyed.post("/predict", content=seven).status_code == 200
    assert keyed.get("/readyz").status_code == 200
    assert samples(keyed)["capserve_last_reload_successful",] == 0
    (folder / "tiny" / "encoder.onnx").write_bytes(sound)
    assert keyed.post("/models/reload").status_code == 200
    assert samples(keyed)["capserve_last_reload_successful",] == 1


@pytest.mark.parametrize("target", ["nowhere", "tiny"])
def test_a_broken_link_does_not_remove_its_model(target: str, keyed: httpx.Client, folder: Path, seven: bytes) -> None:
    """As when its target is being copied or is not mounted, or when it leads to itself."""
    shutil.rmtree(folder / "tiny")
    (folder / "tiny").symlink_to(folder / target)
    answer = keyed.post("/models/reload")
    assert answer.status_code == 409
    assert f"{folder / 'tiny'}: no bundle there" in answer.json()["detail"]
    assert keyed.post("/predict", content=seven).status_code == 200


def test_a_model_that_does_not_run_changes_nothing(
    keyed: httpx.Client, folder: Path, seven: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are sound, but the runtime fails on it."""

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    before = versions(keyed)
    renewed(folder / "tiny", "which fails when it is warmed")
    with monkeypatch.context() as patched:
        patched.setattr(CapsNet, "warm_up", fail)
        answer = keyed.post("/models/reload")
    assert answer.status_code == 409
    assert "tiny: expected a model that runs" in answer.json()["detail"]
    assert samples(keyed)["capserve_model_failures_total", "tiny"] == 0  # the one that is served did not fail
    assert versions(keyed) == before
    assert keyed.post("/predict", content=seven).status_code == 200
    assert keyed.get("/readyz").status_code == 200
    assert reloaded(keyed) == {"tiny": "replaced"}  # once it runs


def test_a_hanging_reload_gets_409_and_the_next_one_succeeds(
    keyed: httpx.Client, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()
    monkeypatch.setattr(catalogue, "LONGEST_RELOAD", 1.0)
    before = versions(keyed)
    renewed(folder / "tiny", "which hangs when it is warmed")
    with monkeypatch.context() as patched:
        patched.setattr(CapsNet, "warm_up", lambda *_: over.wait(20))
        answer = keyed.post("/models/reload")
    assert answer.status_code == 409
    assert "within 1 s, found one that hangs" in answer.json()["detail"]
    assert versions(keyed) == before
    assert keyed.get("/readyz").status_code == 200
    monkeypatch.setattr(catalogue, "LONGEST_RELOAD", 20.0)
    assert reloaded(keyed) == {"tiny": "replaced"}
    over.set()


def test_a_reload_that_is_cancelled_leaves_no_threads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ray's proxy cancels it when the client has left."""
    warming, over = threading.Event(), threading.Event()
    chosen = settings().model_copy(update={"models": folder})

    def runners() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.startswith("runner")}

    async def cancelled() -> None:
        served = Catalogue(catalogue.load(chosen), chosen, Metrics())
        renewed(folder / "tiny", "the new one")
        monkeypatch.setattr(CapsNet, "warm_up", lambda *_: warming.set() or over.wait(20))
        reload = asyncio.create_task(served.reload())
        await asyncio.to_thread(warming.wait, 10)
        assert runners() - before  # some of those before may still be ending
        reload.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reload
        over.set()
        await asyncio.to_thread(until, lambda: not runners() - before, 5)

    before = runners()
    asyncio.run(cancelled())


def test_a_reload_without_any_bundle_changes_nothing(keyed: httpx.Client, folder: Path, seven: bytes) -> None:
    shutil.rmtree(folder / "tiny")
    assert keyed.post("/models/reload").status_code == 409
    assert keyed.post("/predict", content=seven).status_code == 200


def test_a_folder_without_permission_changes_nothing(
    keyed: httpx.Client, folder: Path, seven: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the kernel answers users other than root."""

    def refusing(look: Callable[..., object]) -> Callable[..., object]:
        def refused(path: Any, *rest: Any, **options: Any) -> object:
            if str(path).startswith(str(folder)):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return look(path, *rest, **options)

        return refused

    with monkeypatch.context() as patched:
        for name in ("scandir", "stat"):
            patched.setattr(os, name, refusing(getattr(os, name)))
        answer = keyed.post("/models/reload")
    assert answer.status_code == 409
    assert "expected a folder of bundles, found Permission denied" in answer.json()["detail"]
    assert keyed.post("/predict", content=seven).status_code == 200


def test_running_out_of_open_files_names_their_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message does not ask for another folder: the folder is there."""

    def refused(path: Any) -> object:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(BundleError, match="Too many open files; raise their limit"):
        catalogue.folders(settings())


def test_reload_over_http_requires_a_key(client: httpx.Client, keyed: httpx.Client) -> None:
    answer = client.post("/models/reload")
    assert answer.status_code == 403
    assert "CAPSERVE_API_KEY" in answer.json()["detail"]
    assert keyed.post("/models/reload", headers={"X-API-Key": "guess"}).status_code == 401


OTHERS_PAGES: list[dict[str, str]] = [
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Origin": "http://elsewhere.example"},
    {"Origin": "null"},
    {"Origin": "http://["},
]
OWN_PAGES: list[dict[str, str]] = [
    {"Sec-Fetch-Site": "same-origin"},
    {"Sec-Fetch-Site": "none"},
    {"Origin": "http://here.example:8000", "Host": "here.example:8000"},
]


def test_another_sites_page_cannot_trigger_a_reload(keyed: httpx.Client) -> None:
    """With any page's form, a browser sends the key that its user typed."""
    keyed.headers["Content-Type"] = "application/x-www-form-urlencoded"
    for told in OTHERS_PAGES:
        answer = keyed.post("/models/reload", headers=told)
        assert (answer.status_code, "another site's page" in answer.json()["detail"]) == (403, True), told
    for told in OWN_PAGES:
        assert keyed.post("/models/reload", headers=told).status_code == 200, told


def test_a_hanging_model_can_be_replaced_and_its_requests_end(
    folder: Path, seven: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.served.HANGING_LOOKS", 2)
    inside, over = threading.Event(), threading.Event()
    chosen = settings(api_key="sesame", deadline=0.5, drain=1.0, max_batch=1).model_copy(update={"models": folder})
    nets = catalogue.load(chosen)
    with serving(chosen, nets) as client, ThreadPoolExecutor() as pool:
        client.headers.update(KEY)
        monkeypatch.setattr(nets["tiny"].encoder, "run", lambda *_: inside.set() or over.wait(20), raising=False)
        hung = pool.submit(client.post, "/predict", content=seven)
        assert inside.wait(5)
        behind = pool.submit(client.post, "/predict", content=seven)
        while samples(client)["capserve_queue_images", "encoder", "tiny"] < 1:
            time.sleep(0.01)
        renewed(folder / "tiny", "one that does not hang")
        assert reloaded(client) == {"tiny": "replaced"}
        assert client.post("/predict", content=seven).status_code == 200
        assert behind.result(5).status_code == 504
        assert hung.result(10).status_code == 503
        over.set()


def test_a_replaced_model_leaves_memory_at_once(folder: Path, seven: bytes) -> None:
    """It does not wait for the garbage collector, whose full collections are rare."""
    chosen = settings(api_key="sesame", deadline=3.0).model_copy(update={"models": folder})
    nets = catalogue.load(chosen)
    gc.disable()
    try:
        with serving(chosen, nets) as client:
            old = weakref.ref(nets.pop("tiny"))
            client.headers.update(KEY)
            assert client.post("/predict", content=seven).status_code == 200
            assert client.get("/reconstruct?label=7").status_code == 200
            assert client.get("/openapi.json").status_code == 200
            renewed(folder / "tiny", "the new one")
            assert reloaded(client) == {"tiny": "replaced"}
            until(lambda: old() is None, seconds=6)
    finally:
        gc.enable()


@pytest.mark.parametrize("keyed", [3.0], indirect=True)  # while other tests run, clients and server may wait for a second
def test_no_request_is_lost_while_models_are_replaced(keyed: httpx.Client, folder: Path, seven: bytes) -> None:
    statuses: list[int] = []
    asked = threading.Event()

    def ask() -> None:
        with reaching(str(keyed.base_url)) as client:
            client.headers.update(KEY)
            while not asked.wait(0.01):
                statuses.append(client.post("/predict", content=seven).status_code)

    clients = [threading.Thread(target=ask) for _ in range(4)]
    for each in clients:
        each.start()
    for turn in range(3):
        renewed(folder / "tiny", f"turn {turn}")
        assert reloaded(keyed) == {"tiny": "replaced"}
        time.sleep(1.2)  # so that a replaced model ends while requests still come
    asked.set()
    for each in clients:
        each.join()
    assert set(statuses) == {200}
    assert len(statuses) > 50


def test_a_sighup_reload_that_fails_unexpectedly_is_logged(
    nets: dict[str, CapsNet], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody awaits its result, and asyncio would report it only when the next one comes."""

    async def full(_: Catalogue) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Catalogue, "reload", full)
    wanted = settings()
    app = create_app(wanted, nets)

    async def hang_up() -> None:
        with socket.socket() as listener:
            server = Server(uvicorn_config(app, wanted), app.state.service.catalogue, wanted.linger, listener, beat=lambda: None)
            server._on_hangup()
            await asyncio.gather(*server._reloads)

    asyncio.run(hang_up())
    assert "No space left on device" in caplog.text


@pytest.fixture(params=[1, 2])
def started(request: pytest.FixtureRequest, folder: Path) -> Iterator[Process]:
    with process(models=folder, workers=request.param, api_key="sesame") as running:
        # All of them, or one would find its bundle replaced while it loads.
        until(lambda: running.metric("capserve_workers ") == request.param, 30)
        yield running


def test_all_processes_take_up_a_new_version(started: Process, folder: Path) -> None:
    """On a signal to the first process, and on a request to any of them."""

    def taken_up() -> bool:
        """Asks on separate connections, so that every process answers some."""
        wanted = bundle.read(folder / "tiny").manifest.version
        for _ in range(30):
            with reaching(started.url) as client:
                if client.get("/models", headers=KEY).json()["models"][0]["version"] != wanted:
                    return False
        return True

    renewed(folder / "tiny", "by a hangup")
    started.popen.send_signal(signal.SIGHUP)
    until(taken_up, 20)
    renewed(folder / "tiny", "by a request")
    with reaching(started.url) as client:
        assert client.post("/models/reload", headers=KEY).json() == {"models": {"tiny": "replaced"}}
    until(taken_up, 20)


def test_the_drain_time_starts_after_the_linger_and_only_once(net: CapsNet) -> None:
    chosen = settings(drain=7.0).model_copy(update={"linger": 3.0})
    models = Catalogue({"tiny": net}, chosen, Metrics())
    models.warm, (served,) = True, models
    assert models.serves(served)
    models.start_draining()
    assert models._drain_deadline == pytest.approx(time.monotonic() + 10, abs=0.5)
    assert not models.serves(served)
    models.end_draining()
    models.start_draining()  # as drain() does
    assert models._drain_deadline <= time.monotonic()


def test_a_reload_without_the_default_model_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    shutil.copytree(TINY, folder / "tiny")
    chosen = settings(api_key="sesame", model="tiny").model_copy(update={"models": folder})
    with serving(chosen) as client:
        renewed(folder / "other", "the only one")
        shutil.rmtree(folder / "tiny")
        answer = client.post("/models/reload", headers={"X-API-Key": "sesame"})
    assert (answer.status_code, "has only other" in answer.json()["detail"]) == (409, True)


def test_two_folders_with_the_same_model_name_are_rejected(tmp_path: Path) -> None:
    for name in ("one", "two"):
        shutil.copytree(TINY, tmp_path / name)
    with pytest.raises(BundleError, match="two: expected a unique name, found tiny again"):
        catalogue.load(settings().model_copy(update={"models": tmp_path}))


def test_a_model_that_fails_to_warm_up_makes_the_state_failing(net: CapsNet, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    async def warmed() -> str:
        models = Catalogue({"tiny": net}, settings(), Metrics())
        await models.warm_up()
        found = models.state
        models.end_draining()
        await models.drain()
        return found

    monkeypatch.setattr(CapsNet, "warm_up", fail)
    assert asyncio.run(warmed()) == "failing"
