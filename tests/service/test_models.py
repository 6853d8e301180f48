from __future__ import annotations

import httpx

from service.bundle import Manifest
from service.engine import CapsNet
from service.schemas import ModelDetail, Models


def test_what_is_served_and_by_what(client: httpx.Client, net: CapsNet) -> None:
    answer = client.get("/models").json()
    Models.model_validate(answer)
    (tiny,) = answer["models"]
    assert (tiny["name"], tiny["default"], tiny["variant"]) == ("tiny", True, net.variant)
    assert tiny["provider"] == "CPUExecutionProvider"


def test_one_model_tells_its_whole_manifest(client: httpx.Client, net: CapsNet) -> None:
    answer = client.get("/models/tiny").json()
    ModelDetail.model_validate(answer)
    assert Manifest.model_validate(answer["manifest"]) == net.manifest


def test_a_model_that_is_not_there(client: httpx.Client) -> None:
    answer = client.get("/models/huge")
    assert answer.status_code == 404
    assert "there are tiny" in answer.json()["detail"]
