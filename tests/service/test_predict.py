from __future__ import annotations

import base64
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from io import BytesIO

import httpx
import numpy as np
import pytest
from PIL import Image

from service import brevity, images, pose
from service.engine import CapsNet
from service.routes.predict import SMALL_BYTES, SMALL_PIXELS
from service.schemas import Prediction, Predictions
from tests.service.conftest import drawn, encoded, serving, settings
from tests.service.test_metrics import samples


def test_a_drawn_seven_is_a_seven_however_it_is_sent(client: httpx.Client, seven: bytes) -> None:
    text = base64.b64encode(seven).decode()
    answers = [
        client.post("/predict", files={"file": seven}),
        client.post("/predict", content=seven, headers={"Content-Type": "image/png"}),
        client.post("/predict", content=seven, headers={"Content-Type": "binary/octet-stream"}),
        client.post("/predict", json={"image": text}),
        client.post("/predict", json={"image": f"data:image/png;base64,{text}"}),
    ]
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.json()["label"] for answer in answers} == {"7"}
    assert len({answer.text for answer in answers}) == 1
    Prediction.model_validate(answers[0].json())


def test_data_uris_ignore_case_and_must_be_base64(client: httpx.Client, seven: bytes) -> None:
    text = base64.b64encode(seven).decode()
    assert client.post("/predict", json={"image": f"DATA:image/png;BASE64,{text}"}).json()["label"] == "7"
    for other in (f"data:image/png,{text}", "data:image/png;base64"):
        answer = client.post("/predict", json={"image": other})
        assert answer.status_code == 400
        assert "data:image/png;base64," in answer.json()["detail"]


def test_an_empty_model_name_gets_404(client: httpx.Client, seven: bytes) -> None:
    """As from a shell variable that is not set."""
    assert client.post("/predict?model=", content=seven).status_code == 404
    assert client.get("/reconstruct?model=&label=7").status_code == 404


@pytest.mark.parametrize(
    "parameters",
    [
        'filename="a; name=x"; name="file"',
        'filename="a\\"; name=x"; Name=file',
        "filename=a.png;name=file",
        'name="file"; filename="name=x"',
        'filename="a.png";\r\n\tname = "file"',
    ],
)
def test_a_filename_is_not_mistaken_for_the_field_name(client: httpx.Client, seven: bytes, parameters: str) -> None:
    body = f"--x\r\nContent-Disposition: form-data; {parameters}\r\n\r\n".encode() + seven + b"\r\n--x--\r\n"
    answer = client.post("/predict", content=body, headers={"Content-Type": "multipart/form-data; boundary=x"})
    assert answer.status_code == 200, answer.text


def test_the_answer_holds_lengths_token_and_drawing(client: httpx.Client, seven: bytes, net: CapsNet) -> None:
    answer = client.post("/predict", files={"file": seven}).json()
    assert answer["model"] == "tiny"
    assert len(answer["probabilities"]) == 10
    seen = answer["objects"][0]
    assert seen["probability"] == max(answer["probabilities"]) == answer["probabilities"][7]
    assert pose.decode(seen["pose"], net.manifest).label == 7
    png = base64.b64decode(seen["reconstruction"].removeprefix("data:image/png;base64,"))
    drawing = np.asarray(Image.open(BytesIO(png)), np.float32) / 255
    assert drawing.shape == (28, 28)
    picture = images.prepare(images.read(seven, 10**6), (1, 28, 28), True)[0]
    assert np.square(drawing - picture).mean() == pytest.approx(answer["reconstruction_error"], abs=2e-3)


def test_drawings_are_left_out_when_not_wanted(client: httpx.Client, seven: bytes) -> None:
    answer = client.post("/predict", params={"reconstruct": False}, files={"file": seven}).json()
    assert "reconstruction" not in answer["objects"][0]
    assert answer["reconstruction_error"] > 0


def test_input_true_returns_the_picture_as_the_network_got_it(client: httpx.Client, seven: bytes) -> None:
    answer = client.post("/predict", params={"input": True}, files={"file": seven}).json()
    taken = images.prepare(images.read(seven, 10**6), (1, 28, 28), True)
    assert answer["input"] == "data:image/png;base64," + base64.b64encode(images.png(taken)).decode()
    many = client.post("/predict/batch", params={"input": True}, files=[("file", seven), ("file", seven)]).json()
    assert [each["input"] for each in many["predictions"]] == [answer["input"]] * 2
    assert "input" not in client.post("/predict", files={"file": seven}).json()


def test_a_network_not_trained_on_ink_gets_the_whole_picture(net: CapsNet) -> None:
    shirt = np.random.default_rng(0).integers(0, 256, (28, 28), dtype=np.uint8)
    large = encoded(Image.fromarray(np.kron(shirt, np.ones((10, 10), np.uint8))))
    clothes = replace(net, manifest=net.manifest.model_copy(update={"boxed": False}))
    with serving(settings(), {"tiny": clothes}) as client:
        answer = client.post("/predict", params={"input": True}, files={"file": large}).json()
    taken = base64.b64decode(answer["input"].removeprefix("data:image/png;base64,"))
    np.testing.assert_array_equal(np.asarray(Image.open(BytesIO(taken))), shirt)


def test_normalise_none_takes_pictures_of_the_right_size_only(client: httpx.Client, net: CapsNet) -> None:
    prototype = net.reconstruct(np.float32(net.manifest.prototypes)[3:4], np.array([3]))
    params = {"normalise": "none"}
    assert client.post("/predict", params=params, files={"file": images.png(prototype[0])}).json()["label"] == "3"
    refused = client.post("/predict", params=params, files={"file": encoded(drawn("7", side=40))})
    assert refused.status_code == 422
    assert "28x28" in refused.json()["detail"]


def test_a_batch_answers_in_order_and_as_single_requests_do(client: httpx.Client, seven: bytes) -> None:
    pictures = [seven, encoded(drawn("1")), encoded(drawn("7", ink=0, paper=255))]
    single = [client.post("/predict", files={"file": each}).json() for each in pictures]
    sent = [("file", ("x.png", each, "image/png")) for each in pictures]
    multipart = client.post("/predict/batch", files=sent).json()
    as_json = client.post("/predict/batch", json={"images": [base64.b64encode(each).decode() for each in pictures]}).json()
    Predictions.model_validate(multipart)
    assert [each["label"] for each in multipart["predictions"]] == ["7", "1", "7"]
    for answers in (multipart, as_json):
        for found, expected in zip(answers["predictions"], single, strict=True):
            assert found["probabilities"] == pytest.approx(expected["probabilities"], abs=2e-3)


def test_a_batch_names_the_picture_it_could_not_read(client: httpx.Client, seven: bytes) -> None:
    answer = client.post("/predict/batch", files=[("file", seven), ("file", b"nonsense")])
    assert answer.status_code == 415
    assert answer.json()["detail"].startswith("picture 1: ")


def test_a_batch_larger_than_max_batch_is_answered_in_full(client: httpx.Client, seven: bytes) -> None:
    answer = client.post("/predict/batch?reconstruct=false", files=[("file", seven)] * 40).json()
    assert {each["label"] for each in answer["predictions"]} == {"7"}
    assert len(answer["predictions"]) == 40


def test_large_pictures_are_decoded_too(client: httpx.Client) -> None:
    assert client.post("/predict", files={"file": encoded(drawn("7", side=3000))}).json()["label"] == "7"


@pytest.mark.parametrize(
    ("side", "ink", "on_the_loop"),
    [(28, 255, True), (64, 255, True), (65, 255, False), (2000, 0, False)],
    ids=["small", "just small enough", "more pixels", "few bytes and many pixels"],
)
def test_only_small_pictures_are_decoded_on_the_event_loop(
    nets: dict[str, CapsNet], monkeypatch: pytest.MonkeyPatch, side: int, ink: int, on_the_loop: bool
) -> None:
    picture = encoded(drawn("7", side, ink=ink))
    assert len(picture) <= SMALL_BYTES
    prepare, threads = images.prepare, []

    def watched(*asked: object) -> object:
        threads.append(threading.current_thread().name)
        return prepare(*asked)  # type: ignore[arg-type]

    monkeypatch.setattr(images, "prepare", watched)
    with serving(settings(), nets) as client:
        assert client.post("/predict", files={"file": picture}).status_code == 200
    (decoded_on,) = threads
    assert decoded_on.startswith("crew-") != on_the_loop


def test_after_a_slow_small_picture_the_crew_decodes_the_next_ones(
    nets: dict[str, CapsNet], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, threads, small = images.prepare, [], encoded(drawn("7", 28))

    def slow_at_first(*asked: object) -> object:
        began = time.thread_time()
        while not threads and time.thread_time() - began < 1.5 * brevity.LONG:
            pass
        threads.append(threading.current_thread().name.startswith("crew-"))
        return prepare(*asked)  # type: ignore[arg-type]

    monkeypatch.setattr(images, "prepare", slow_at_first)
    monkeypatch.setattr(brevity, "PENALTY", 2)
    monkeypatch.setattr(brevity, "LONG", 0.5)  # enough for a slow machine
    with serving(settings(), nets) as client:
        assert client.post("/predict/batch", files=[("file", small)] * 5).status_code == 200
    assert threads == [False, True, True, False, False]


def test_every_answer_has_a_request_id_and_server_timing(client: httpx.Client, seven: bytes) -> None:
    answer = client.post("/predict", files={"file": seven}, headers={"X-Request-ID": "shelf-12"})
    assert answer.headers["X-Request-ID"] == "shelf-12"
    stages = [part.partition(";dur=") for part in answer.headers["Server-Timing"].split(", ")]
    assert [name for name, _, _ in stages] == ["decode", "queue", "encode", "reconstruct", "total"]
    assert all(float(milliseconds) >= 0 for _, _, milliseconds in stages)
    assert answer.headers["X-Execution-Provider"] == "CPUExecutionProvider"
    other = client.get("/models", headers={"X-Request-ID": "no spaces"})
    assert len(other.headers["X-Request-ID"]) == 16
    assert other.headers["Server-Timing"].startswith("total;dur=")
    assert "X-Execution-Provider" not in other.headers


def test_server_timing_excludes_the_upload(client: httpx.Client, seven: bytes) -> None:
    def slowly() -> Iterator[bytes]:
        yield seven[:100]
        time.sleep(0.5)
        yield seven[100:]

    answer = client.post("/predict", content=slowly(), headers={"Content-Type": "image/png"})
    assert answer.status_code == 200
    assert float(answer.headers["Server-Timing"].rpartition("total;dur=")[2]) < 400


def test_a_request_past_its_deadline_is_rejected_with_504(nets: dict[str, CapsNet], seven: bytes) -> None:
    with serving(settings(deadline=1e-6), nets) as client:
        for answer in (client.post("/predict", files={"file": seven}), client.get("/reconstruct?label=1")):
            assert (answer.status_code, answer.json()["title"]) == (504, "past the deadline")
        assert samples(client)["capserve_rejections_total", "late"] == 2


def test_a_batch_past_its_deadline_blames_no_picture(nets: dict[str, CapsNet]) -> None:
    photo = encoded(drawn("7", 1_000))  # large enough for the crew
    with serving(settings(deadline=1e-6), nets) as client:
        answer = client.post("/predict/batch", files=[("file", photo), ("file", photo)])
        assert (answer.status_code, answer.json()["detail"][:12]) == (504, "the deadline")


class Slow:
    """A graph that takes `seconds` longer."""

    def __init__(self, encoder: object, seconds: float = 0.05) -> None:
        self._encoder, self._seconds = encoder, seconds

    def run(self, *inputs: object) -> object:
        time.sleep(self._seconds)
        return self._encoder.run(*inputs)  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> object:
        return getattr(self._encoder, name)


def test_metrics_report_the_queue_length_while_pictures_wait(net: CapsNet, seven: bytes) -> None:
    """Autoscaling goes by this metric."""
    chosen = settings(max_batch=1)
    with serving(chosen, {"tiny": replace(net, encoder=Slow(net.encoder))}) as client, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.post, "/predict/batch", files=[("file", seven)] * 40)
        longest = 0.0
        while not asked.done():
            longest = max(longest, samples(client)["capserve_queue_images", "encoder", "tiny"])
        assert asked.result().status_code == 200
        assert 0 < longest <= 40
        assert samples(client)["capserve_queue_images", "encoder", "tiny"] == 0


def test_encode_time_of_a_request_sums_all_its_batches(net: CapsNet, seven: bytes) -> None:
    def milliseconds(answer: httpx.Response) -> float:
        assert answer.status_code == 200, answer.text
        return float(answer.headers["Server-Timing"].partition("encode;dur=")[2].partition(",")[0])

    tensor = {"name": "images", "shape": [5, 1, 28, 28], "datatype": "FP32", "data": [0.0] * (5 * 784)}
    with serving(settings(max_batch=2), {"tiny": replace(net, encoder=Slow(net.encoder))}) as client:
        assert milliseconds(client.post("/predict", files={"file": seven})) >= 50
        assert milliseconds(client.post("/predict/batch", files=[("file", seven)] * 5)) >= 150
        assert milliseconds(client.post("/v2/models/tiny/infer", json={"inputs": [tensor]})) >= 150


def test_large_pictures_are_decoded_side_by_side_and_normalised_in_turn(
    nets: dict[str, CapsNet], seven: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads that compete for the GIL take longer than one; a decoder does not need it."""
    most = {"read": 0, "prepare": 0}

    def watched(name: str) -> None:
        work, at_work = getattr(images, name), Counter[str]()

        def slowly(*arguments: object, **named: object) -> object:
            at_work[name] += 1
            most[name] = max(most[name], at_work[name])
            time.sleep(0.05)
            at_work[name] -= 1
            return work(*arguments, **named)

        monkeypatch.setattr(images, name, slowly)

    watched("read")
    watched("prepare")
    with Image.open(BytesIO(seven)) as picture:
        large = encoded(picture.resize((2 * SMALL_PIXELS, 8)), "BMP")
    with serving(settings(threads=2), nets) as client, ThreadPoolExecutor(6) as pool:
        answers = list(
            pool.map(lambda _: client.post("/predict", content=large, headers={"Content-Type": "image/bmp"}), range(6))
        )
    assert {answer.status_code for answer in answers} == {200}
    assert most == {"read": 2, "prepare": 1}
