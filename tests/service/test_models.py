from __future__ import annotations

import hashlib

import httpx
import pytest

from service import catalogue
from service.engine import CapsNet
from service.manifest import ENCODER_FILES, Manifest
from service.schemas import ModelDetail, Models
from service.settings import CHECKOUT, Settings
from tests.service.conftest import TINY, serving, settings


def test_the_model_list_shows_name_variant_and_provider(client: httpx.Client, net: CapsNet) -> None:
    answer = client.get("/models").json()
    Models.model_validate(answer)
    (tiny,) = answer["models"]
    assert (tiny["name"], tiny["default"], tiny["variant"]) == ("tiny", True, net.variant)
    assert tiny["provider"] == "CPUExecutionProvider"


@pytest.mark.parametrize(("names", "first"), [(("zoo", "compact", "apart"), "compact"), (("zoo", "apart"), "apart")])
def test_the_default_model_is_compact_or_else_the_first_by_name(net: CapsNet, names: tuple[str, ...], first: str) -> None:
    assert catalogue.default(settings(), dict.fromkeys(names, net)) == first


@pytest.mark.parametrize(("variant", "encoder"), ENCODER_FILES.items())
def test_the_model_list_shows_the_sha256_of_each_served_graph(variant: str, encoder: str) -> None:
    """The version covers encoder.onnx and decoder.onnx alone, so it does not change with the int8 encoder."""
    with serving(settings(variant=variant)) as client:
        (tiny,) = client.get("/models").json()["models"]
    assert tiny["graphs"] == {file: hashlib.sha256((TINY / file).read_bytes()).hexdigest() for file in (encoder, "decoder.onnx")}


def test_the_model_list_names_the_pose_dimensions() -> None:
    with serving(Settings(models=CHECKOUT / "models", port=0, linger=0)) as client:
        compact = next(each for each in client.get("/models").json()["models"] if each["name"] == "compact")
        whole = client.get("/models/compact").json()["manifest"]["dimensions"]
    assert compact["dimensions"][0]["name"] == "stroke thickness"
    assert [{"name": each["name"], "strength": each["strength"]} for each in compact["dimensions"]] == [
        whole[each["dim"]] for each in compact["dimensions"]
    ]
    assert sum(bool(each["name"]) for each in whole) == len(compact["dimensions"])


def test_model_detail_returns_the_whole_manifest(client: httpx.Client, net: CapsNet) -> None:
    answer = client.get("/models/tiny").json()
    ModelDetail.model_validate(answer)
    assert Manifest.model_validate(answer["manifest"]) == net.manifest


def test_an_unknown_model_gets_404_naming_the_known_ones(client: httpx.Client) -> None:
    answer = client.get("/models/huge")
    assert answer.status_code == 404
    assert "there are tiny" in answer.json()["detail"]
