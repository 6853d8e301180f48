"""/v2 as its real client speaks it: tritonclient against a real server, then what that client would never send."""

import json
from collections.abc import Iterator
from dataclasses import replace

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from service.engine import CapsNet
from tests.service.conftest import serving, settings

EXAMPLES = 5


@pytest.fixture(scope="module")
def v2(server: str) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.removeprefix("http://")) as client:
        yield client


@pytest.fixture(scope="module")
def images(net: CapsNet):
    return np.random.default_rng(0).random((EXAMPLES, *net.manifest.image_shape), np.float32)


@pytest.fixture(scope="module")
def expected(net: CapsNet, images):
    seen = net.perceive(images, np.ones(EXAMPLES, bool))
    return {"lengths": seen.lengths, "capsules": seen.capsules, "reconstructions": seen.drawings[:, 0]}


def tensor(images, binary: bool) -> triton.InferInput:
    given = triton.InferInput("images", list(images.shape), "FP32")
    given.set_data_from_numpy(images, binary_data=binary)
    return given


def test_metadata(v2: triton.InferenceServerClient, net: CapsNet):
    assert v2.is_server_live()
    assert v2.is_server_ready()
    assert v2.is_model_ready("tiny")
    assert v2.is_model_ready("tiny", net.manifest.version)
    assert not v2.is_model_ready("tiny", "2")
    assert not v2.is_model_ready("absent")
    assert "binary_tensor_data" in v2.get_server_metadata()["extensions"]
    assert v2.get_model_metadata("tiny") == {
        "name": "tiny",
        "versions": [net.manifest.version],
        "platform": "onnx_onnxv1",
        "inputs": [{"name": "images", "datatype": "FP32", "shape": [-1, 1, 28, 28]}],
        "outputs": [
            {"name": "lengths", "datatype": "FP32", "shape": [-1, 10]},
            {"name": "capsules", "datatype": "FP32", "shape": [-1, 10, 6]},
            {"name": "reconstructions", "datatype": "FP32", "shape": [-1, 1, 28, 28]},
        ],
    }


@pytest.mark.parametrize("binary_in", [False, True])
@pytest.mark.parametrize("binary_out", [False, True, None])
def test_infer(v2, images, expected, binary_in, binary_out):
    """With None, no output is named: all are returned, and the client asks for them as raw bytes."""
    outputs = None
    if binary_out is not None:
        outputs = [triton.InferRequestedOutput(name, binary_data=binary_out) for name in expected]
    answer = v2.infer("tiny", [tensor(images, binary_in)], outputs=outputs, request_id="seven")
    assert answer.get_response()["id"] == "seven"
    assert answer.get_response()["model_name"] == "tiny"
    for name, values in expected.items():
        np.testing.assert_allclose(answer.as_numpy(name), values, atol=1e-5)


def test_only_requested_outputs_are_returned_in_their_order(v2, images, expected):
    asked = [triton.InferRequestedOutput("capsules", binary_data=False), triton.InferRequestedOutput("lengths", binary_data=True)]
    answer = v2.infer("tiny", [tensor(images, True)], outputs=asked)
    assert [output["name"] for output in answer.get_response()["outputs"]] == ["capsules", "lengths"]
    assert answer.as_numpy("reconstructions") is None
    np.testing.assert_allclose(answer.as_numpy("lengths"), expected["lengths"], atol=1e-5)
    np.testing.assert_allclose(answer.as_numpy("capsules"), expected["capsules"], atol=1e-5)


class Counting:
    """A decoder that notes how many it draws at a time."""

    def __init__(self, decoder: object) -> None:
        self._decoder, self.drawn = decoder, []

    def run(self, *inputs: np.ndarray) -> object:
        self.drawn.append(len(inputs[0]))
        return self._decoder.run(*inputs)

    def __getattr__(self, name: str) -> object:
        return getattr(self._decoder, name)


def test_reconstructions_are_drawn_only_when_requested(net: CapsNet, images):
    decoder = Counting(net.decoder)
    with serving(settings(), {"tiny": replace(net, decoder=decoder)}) as client:
        for output, expected in {"lengths": [], "reconstructions": [1]}.items():
            decoder.drawn.clear()  # warming up draws, too
            value = {"inputs": [json_tensor(images[:1])], "outputs": [{"name": output}]}
            answer = client.post("/v2/models/tiny/infer", json=value)
            assert answer.status_code == 200
            assert decoder.drawn == expected
            assert ("reconstruct" in answer.headers["Server-Timing"]) == bool(expected)


def test_the_requested_version_is_returned(v2, images, net: CapsNet):
    answer = v2.infer("tiny", [tensor(images, True)], model_version=net.manifest.version)
    assert answer.get_response()["model_version"] == net.manifest.version


def test_more_pictures_than_a_batch_are_answered(v2, net: CapsNet):
    images = np.random.default_rng(1).random((100, *net.manifest.image_shape), np.float32)
    for binary in (False, True):
        answer = v2.infer("tiny", [tensor(images, binary)])
        np.testing.assert_allclose(answer.as_numpy("lengths"), net.classify(images)[0], atol=1e-5)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda given: given.set_shape([EXAMPLES, 28, 28]), "expected shape"),
        (lambda given: setattr(given, "_name", "image"), "expected the inputs images"),
        (lambda given: setattr(given, "_datatype", "FP16"), "expected datatype FP32"),
    ],
)
def test_invalid_inputs_raise_the_clients_exception(v2, images, change, says):
    given = tensor(images, True)
    change(given)
    with pytest.raises(InferenceServerException, match=says):
        v2.infer("tiny", [given])


def test_unknown_outputs_and_classification_are_refused(v2, images):
    with pytest.raises(InferenceServerException, match="expected outputs out of lengths, capsules, reconstructions"):
        v2.infer("tiny", [tensor(images, True)], outputs=[triton.InferRequestedOutput("logits")])
    with pytest.raises(InferenceServerException, match="classification"):
        v2.infer("tiny", [tensor(images, True)], outputs=[triton.InferRequestedOutput("lengths", class_count=3)])


@pytest.mark.parametrize("value", [255.0, -1.0, float("nan"), float("inf")])
def test_pixels_out_of_range_are_refused(v2, images, value):
    with pytest.raises(InferenceServerException, match="from 0 to 1"):
        v2.infer("tiny", [tensor(np.full_like(images, value), True)])


def test_unknown_models_versions_and_compression_are_refused(v2, images):
    with pytest.raises(InferenceServerException, match="there are tiny"):
        v2.infer("large", [tensor(images, True)])
    with pytest.raises(InferenceServerException, match="no such version"):
        v2.infer("tiny", [tensor(images, True)], model_version="2")
    with pytest.raises(InferenceServerException, match="uncompressed"):
        v2.infer("tiny", [tensor(images, True)], request_compression_algorithm="gzip")


def json_tensor(images) -> dict:
    return {"name": "images", "shape": list(images.shape), "datatype": "FP32", "data": images.tolist()}


def test_nested_json_data_is_accepted(client: httpx.Client, images, expected):
    answer = client.post("/v2/models/tiny/infer", json={"inputs": [json_tensor(images)], "outputs": [{"name": "lengths"}]})
    assert answer.headers["content-type"] == "application/json"
    assert "inference-header-content-length" not in answer.headers
    (output,) = answer.json()["outputs"]
    assert output["shape"] == [EXAMPLES, 10]
    np.testing.assert_allclose(output["data"], expected["lengths"].ravel(), atol=1e-5)
    assert "id" not in answer.json()


def test_json_with_a_byte_order_mark_is_accepted(client: httpx.Client, images, expected):
    text = json.dumps({"inputs": [json_tensor(images[:2])], "outputs": [{"name": "lengths"}]})
    (output,) = client.post("/v2/models/tiny/infer", content=text.encode("utf-8-sig")).json()["outputs"]
    np.testing.assert_allclose(output["data"], expected["lengths"][:2].ravel(), atol=1e-5)


def test_binary_tensors_are_read_and_written_as_raw_bytes(client: httpx.Client, images, expected):
    raw = images.tobytes()
    header = {
        "inputs": [
            {"name": "images", "shape": list(images.shape), "datatype": "FP32", "parameters": {"binary_data_size": len(raw)}}
        ],
        "parameters": {"binary_data_output": True},
    }
    text = json.dumps(header).encode()
    headers = {"Inference-Header-Content-Length": str(len(text)), "Content-Type": "application/octet-stream"}
    answer = client.post("/v2/models/tiny/infer", content=text + raw, headers=headers)
    size = int(answer.headers["inference-header-content-length"])
    outputs = json.loads(answer.content[:size])["outputs"]
    at = size
    for output in outputs:
        end = at + output["parameters"]["binary_data_size"]
        found = np.frombuffer(answer.content[at:end], "<f4").reshape(output["shape"])
        np.testing.assert_allclose(found, expected[output["name"]], atol=1e-5)
        at = end
    assert at == len(answer.content)
    for sent in (raw[:-1], raw + b"\0"):
        answer = client.post("/v2/models/tiny/infer", content=text + sent, headers=headers)
        assert answer.status_code == 400
        assert "error" in answer.json()


def test_a_raw_binary_request_without_json_is_accepted(client: httpx.Client, images, expected):
    """Triton's raw binary request."""
    answer = client.post("/v2/models/tiny/infer", content=images.tobytes(), headers={"Inference-Header-Content-Length": "0"})
    text = answer.content[: int(answer.headers["inference-header-content-length"])]
    raw = answer.content[len(text) :]
    for output in json.loads(text)["outputs"]:
        size = output["parameters"]["binary_data_size"]
        found, raw = np.frombuffer(raw[:size], "<f4").reshape(output["shape"]), raw[size:]
        np.testing.assert_allclose(found, expected[output["name"]], atol=1e-5)
    assert not raw


@pytest.mark.parametrize("body", [b"", b"{}", b"[1]", b"\x00\xff", b"[" * 50_000, b'{"inputs": [{"name": "images"}]}'])
def test_an_invalid_body_is_a_400_with_an_error(client: httpx.Client, body):
    answer = client.post("/v2/models/tiny/infer", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]


@pytest.mark.parametrize(
    ("shape", "data", "says"),
    [
        ("[1, 1, 28, 28]", '["' + "x" * 9_000_000 + '"' + ', "y"' * 100_000 + "]", "not a number"),
        ("[1" + "0" * 4298 + ", 1, 28, 28]", "[0.5]", "from 1 to 2147483647"),
        ("[1, 1, 28, 28]", "[0.5, 1" + "0" * 4298 + "]", "too large"),
    ],
    ids=["long text among many", "long axis", "long number"],
)
def test_overlong_values_get_a_short_400(client: httpx.Client, shape: str, data: str, says: str):
    sent = f'{{"inputs": [{{"name": "images", "shape": {shape}, "datatype": "FP32", "data": {data}}}]}}'
    answer = client.post("/v2/models/tiny/infer", content=sent)
    assert answer.status_code == 400
    assert says in answer.json()["error"]
    assert len(answer.content) < 300


def test_infer_requires_the_servers_key(nets, images):
    with serving(settings(api_key="secret"), nets) as client:
        address = str(client.base_url).removeprefix("http://").rstrip("/")
        with triton.InferenceServerClient(address) as v2:
            assert v2.is_server_ready()
            with pytest.raises(InferenceServerException, match="key"):
                v2.infer("tiny", [tensor(images, True)])
            v2.infer("tiny", [tensor(images, True)], headers={"Authorization": "Bearer secret"})


def test_binary_data_without_its_header_is_refused(client: httpx.Client) -> None:
    sent = b'{"inputs":[]}' + bytes(8)
    told = client.post("/v2/models/tiny/infer", content=sent, headers={"Content-Type": "application/octet-stream"})
    assert told.status_code == 400
    assert "Inference-Header-Content-Length" in told.json()["detail"]


def test_openapi_documents_the_binary_header_and_possible_statuses(client: httpx.Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    infer = paths["/v2/models/{name}/infer"]["post"]
    assert "Inference-Header-Content-Length" in [each["name"] for each in infer["parameters"]]
    assert "Inference-Header-Content-Length" in infer["responses"]["200"]["headers"]
    assert paths["/v2/health/live"]["get"]["responses"].keys() == {"200", "503"}
    assert paths["/v2/models/{name}/ready"]["get"]["responses"].keys() == {"200", "401", "404", "503"}


def test_the_documented_example_works(client: httpx.Client):
    operation = client.get("/openapi.json").json()["paths"]["/v2/models/{name}/infer"]["post"]
    sent = operation["requestBody"]["content"]["application/json"]["example"]
    (said,) = operation["responses"]["200"]["content"]["application/json"]["example"]["outputs"]
    (found,) = client.post("/v2/models/tiny/infer", json=sent).json()["outputs"]
    assert found["shape"] == said["shape"]
    np.testing.assert_allclose(found["data"], said["data"], atol=1e-5)
