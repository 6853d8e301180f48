from __future__ import annotations

import base64
import threading
from io import BytesIO

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from service import images, pose
from service.crew import Crew
from service.engine import CapsNet, perturb
from service.errors import Busy
from service.pose import Pose
from service.schemas import MOST_DIMS, MOST_STEPS
from tests.service.conftest import serving, settings

AS_JSON = {"Accept": "application/json"}


def picture(answer: httpx.Response) -> NDArray[np.uint8]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["Content-Type"] == "image/png"
    return np.asarray(Image.open(BytesIO(answer.content)))


def pixels(answer: httpx.Response) -> NDArray[np.float64]:
    assert answer.status_code == 200, answer.text
    return np.array(answer.json()["images"])


def test_a_pose_draws_what_predict_showed(client: httpx.Client, seven: bytes) -> None:
    seen = client.post("/predict", files={"file": seven}).json()["objects"][0]
    shown = base64.b64decode(seen["reconstruction"].partition(",")[2])
    drawn = picture(client.get("/reconstruct", params={"pose": seen["pose"], "size": 28}))
    difference = drawn.astype(int) - np.asarray(Image.open(BytesIO(shown)))
    assert np.abs(difference).max() <= 2  # float16 poses


def test_deltas_move_the_pose_as_the_engine_does(client: httpx.Client, token: str, net: CapsNet) -> None:
    found = pose.decode(token, net.manifest)
    expected = net.reconstruct(perturb(found.values, [3, 0], [0.05, -0.2])[None], np.array([7]))
    query = {"pose": token, "dim": [3, 0], "delta": [0.05, -0.2]}
    answer = client.get("/reconstruct", params=query, headers=AS_JSON)
    assert answer.json()["labels"] == ["7"]
    np.testing.assert_allclose(pixels(answer), expected, atol=1e-4)
    assert not np.allclose(pixels(client.get("/reconstruct", params={"pose": token}, headers=AS_JSON)), expected, atol=1e-3)


def test_without_pose_or_label_all_prototypes_are_drawn(client: httpx.Client, net: CapsNet) -> None:
    strip = picture(client.get("/reconstruct?dim=3&delta=0.05&size=28"))
    assert strip.shape == (28, 280)
    expected = net.reconstruct(perturb(np.float32(net.manifest.prototypes), [3], [0.05]), np.arange(10))
    assert np.abs(strip[:, 84:112] - expected[3, 0] * 255).max() <= 1
    answer = client.get("/reconstruct", headers=AS_JSON)
    assert answer.json()["labels"] == list("0123456789")
    assert pixels(answer).shape == (10, 1, 28, 28)


def test_a_label_draws_its_prototype_at_the_size_asked_for(client: httpx.Client) -> None:
    assert picture(client.get("/reconstruct?label=4")).shape == (140, 140)
    assert picture(client.get("/reconstruct?label=4&size=64")).shape == (64, 64)


def test_as_label_draws_another_class_in_the_same_hand(client: httpx.Client, token: str, net: CapsNet) -> None:
    """The pose's difference from the mean of its class is carried over to the other class."""
    found = pose.decode(token, net.manifest)
    prototypes = np.float32(net.manifest.prototypes)
    expected = net.reconstruct((found.values - prototypes[found.label] + prototypes[2])[None], np.array([2]))
    answer = client.get("/reconstruct", params={"pose": token, "as_label": "2"}, headers=AS_JSON)
    assert answer.json()["labels"] == ["2"]
    np.testing.assert_allclose(pixels(answer), expected, atol=1e-4)


def test_as_label_of_the_poses_own_class_changes_nothing(client: httpx.Client, token: str, net: CapsNet) -> None:
    own = net.manifest.classes[pose.decode(token, net.manifest).label]
    answers = [client.get("/reconstruct", params={"pose": token} | extra) for extra in ({}, {"as_label": own})]
    np.testing.assert_array_equal(picture(answers[0]), picture(answers[1]))


BARE = {"names": False}


def test_a_sweep_names_each_row_in_its_left_margin(client: httpx.Client) -> None:
    asked = {"label": "5", "size": 28}
    named, bare = (picture(client.get("/reconstruct/sweep", params=asked | extra)) for extra in ({}, BARE))
    margin = named.shape[1] - bare.shape[1]
    assert margin > 10
    np.testing.assert_array_equal(named[:, margin:], bare)
    for row in range(6):
        assert named[row * 28 : (row + 1) * 28, :margin].max() > 100


def test_a_sweep_shows_strengths_only_over_the_whole_span(client: httpx.Client) -> None:
    asked = {"label": "5", "size": 28, "steps": 3}
    whole, part = (picture(client.get("/reconstruct/sweep", params=asked | {"high": high})) for high in (0.25, 0.2))
    assert whole.shape[1] > part.shape[1] + 20  # " (+2.2 SD)"


def test_a_sweep_has_a_row_per_dimension_and_a_column_per_step(client: httpx.Client, token: str) -> None:
    assert picture(client.get("/reconstruct/sweep", params={"pose": token, "size": 28} | BARE)).shape == (6 * 28, 11 * 28)
    rows = picture(client.get("/reconstruct/sweep", params={"label": "5", "dim": [1, 4], "steps": 3, "size": 28} | BARE))
    middle = picture(client.get("/reconstruct?label=5&size=28"))
    np.testing.assert_array_equal(rows[:28, 28:56], middle)
    np.testing.assert_array_equal(rows[28:, 28:56], middle)
    low = picture(client.get("/reconstruct?label=5&dim=4&delta=-0.25&size=28"))
    np.testing.assert_array_equal(rows[28:, :28], low)


def test_morph_begins_with_one_digit_and_ends_with_the_other(client: httpx.Client, token: str, net: CapsNet) -> None:
    other = pose.encode(Pose(3, np.float32(net.manifest.prototypes)[3]), net.manifest)
    strip = picture(client.get("/reconstruct/morph", params={"from": token, "to": other, "steps": 5, "size": 28}))
    assert strip.shape == (28, 5 * 28)
    ends = [picture(client.get("/reconstruct", params={"pose": each, "size": 28})) for each in (token, other)]
    np.testing.assert_array_equal(strip[:, :28], ends[0])
    np.testing.assert_array_equal(strip[:, -28:], ends[1])


def test_a_known_etag_gets_304_instead_of_a_drawing(client: httpx.Client, token: str) -> None:
    query = {"pose": token, "dim": 1, "delta": 0.1}
    first = client.get("/reconstruct", params=query)
    again = client.get("/reconstruct", params=query, headers={"If-None-Match": f'"other", {first.headers["ETag"]}'})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["ETag"] == first.headers["ETag"]
    assert first.headers["Cache-Control"] == "public, max-age=3600"
    assert first.headers["Vary"] == "Accept"
    changed = client.get("/reconstruct", params=query | {"delta": 0.2}, headers={"If-None-Match": first.headers["ETag"]})
    as_json = client.get("/reconstruct", params=query, headers=AS_JSON | {"If-None-Match": first.headers["ETag"]})
    assert (changed.status_code, as_json.status_code) == (200, 200)


def test_an_etag_of_another_service_version_gets_a_new_drawing(
    client: httpx.Client, nets: dict[str, CapsNet], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"If-None-Match": client.get("/reconstruct?label=7").headers["ETag"]}
    assert client.get("/reconstruct?label=7", headers=known).status_code == 304
    monkeypatch.setattr("service.app.version", lambda _: "another")
    with serving(settings(), nets) as upgraded:
        assert upgraded.get("/reconstruct?label=7", headers=known).status_code == 200


def test_drawings_that_depend_on_the_served_model_are_no_cache(client: httpx.Client, token: str) -> None:
    for path in (
        "/reconstruct",
        "/reconstruct?label=7",
        "/reconstruct/sweep?label=7&steps=2",
        f"/reconstruct?pose={token}&as_label=1",
        f"/reconstruct/sweep?pose={token}&size=28",  # with the names of the dimensions
    ):
        assert client.get(path).headers["Cache-Control"] == "public, no-cache"
    morph = client.get("/reconstruct/morph", params={"from": token, "to": token})
    assert morph.headers["Cache-Control"] == "public, max-age=3600"


def test_the_largest_allowed_sweep_is_drawn(client: httpx.Client) -> None:
    query = [*[("dim", 0)] * MOST_DIMS, ("label", "7"), ("steps", MOST_STEPS), ("size", 28), ("names", False)]
    assert picture(client.get("/reconstruct/sweep", params=query)).shape == (MOST_DIMS * 28, MOST_STEPS * 28)


def test_only_sheets_of_many_drawings_are_written_by_the_crew(nets: dict[str, CapsNet], monkeypatch: pytest.MonkeyPatch) -> None:
    write, by_crew = images.sheet, []

    def watched(*asked: object) -> object:
        by_crew.append(threading.current_thread().name.startswith("crew-"))
        return write(*asked)  # type: ignore[arg-type]

    monkeypatch.setattr(images, "sheet", watched)
    with serving(settings(), nets) as client:
        for steps in (3, 41):
            picture(client.get(f"/reconstruct/sweep?label=7&size=8&names=false&steps={steps}" + "&dim=1" * 7))
    assert by_crew == [False, True]


def test_a_strip_of_too_many_pixels_is_refused(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.routes.reconstruct.LARGEST_SHEET", 10 * 100 * 100)
    assert client.get("/reconstruct?size=100").status_code == 200
    refused = client.get("/reconstruct?size=101")
    assert refused.status_code == 422
    assert refused.json()["detail"].startswith("10 drawings of size 101 are more than 100,000 pixels")
    assert client.get("/reconstruct?size=101", headers=AS_JSON).status_code == 200  # JSON has the model's own size


def test_a_sheet_of_too_many_drawings_is_refused(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a network of a hundred pose dimensions."""
    monkeypatch.setattr("service.routes.reconstruct.MOST_DRAWINGS", 20)
    assert client.get("/reconstruct/sweep?label=7&dim=1&dim=2&steps=10").status_code == 200
    refused = client.get("/reconstruct/sweep?label=7&dim=1&dim=2&steps=11")
    assert (refused.status_code, refused.json()["detail"]) == (422, "22 drawings are more than 20; ask for fewer dims or steps")


def test_a_known_etag_gets_304_for_sweeps_and_morphs_too(client: httpx.Client, token: str) -> None:
    for path in (f"/reconstruct/sweep?pose={token}&size=28&names=false", f"/reconstruct/morph?from={token}&to={token}&size=28"):
        first = client.get(path)
        assert first.status_code == 200
        assert first.headers["Cache-Control"] == "public, max-age=3600"
        again = client.get(path, headers={"If-None-Match": first.headers["ETag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert "reconstruct;dur=" in first.headers["Server-Timing"]
        assert again.headers["Server-Timing"].startswith("total;dur=")


@pytest.mark.parametrize("form", ["{}", 'W/"x", {}', '"a,b" ,{}', "*"])
def test_any_etag_of_an_if_none_match_list_gets_304(client: httpx.Client, form: str) -> None:
    path = "/reconstruct?label=3&size=28"
    etag = client.get(path).headers["ETag"]
    for tag in (etag, etag.removeprefix("W/")):
        assert client.get(path, headers={"If-None-Match": form.format(tag)}).status_code == 304
    lines = [("If-None-Match", '"other"'), ("If-None-Match", etag)]
    assert client.get(path, headers=lines).status_code == 304
    assert client.get(path, headers={"If-None-Match": etag.replace('"', "")}).status_code == 200  # a tag has quotes


@pytest.mark.parametrize(
    ("accept", "given"),
    [
        ("", "image/png"),
        ("*/*", "image/png"),
        ("application/json", "application/json"),
        ("application/json;q=0", None),
        ("application/json;q=0, */*", "image/png"),
        ("application/json, text/plain, */*", "application/json"),
        ("image/avif,image/webp,image/*,*/*;q=0.8", "image/png"),
        ("image/png;q=0.2, application/json;q=0.3", "application/json"),
        ("text/html", None),
    ],
)
def test_accept_chooses_the_preferred_media_type(client: httpx.Client, accept: str, given: str | None) -> None:
    answer = client.get("/reconstruct?label=3&size=28", headers={"Accept": accept})
    if given is None:
        assert answer.status_code == 406
        assert answer.headers["Content-Type"] == "application/problem+json"
        assert "image/png or application/json" in answer.json()["detail"]
    else:
        assert (answer.status_code, answer.headers["Content-Type"]) == (200, given)


def test_a_sweep_as_json_gets_406(client: httpx.Client) -> None:
    answer = client.get("/reconstruct/sweep?label=3", headers=AS_JSON)
    assert answer.status_code == 406
    assert "image/png" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/reconstruct?label=1&dim=6&delta=0.1", "dimensions 0 to 5"),
        ("/reconstruct?label=1&dim=-1&delta=0.1", "pose dimensions 0 to 5"),
        pytest.param(f"/reconstruct?label=1&dim={'9' * 4000}&delta=0.1", f"dim {'9' * 20}: model", id="of 4,000 digits"),
        ("/reconstruct?label=1&dim=x&delta=0.1", "dim[0]: expected a whole number, found x"),
        ("/reconstruct?label=1&dim=1&delta=nan", "delta[0]: expected a number from -1 to 1, found nan"),
        ("/reconstruct?label=1&dim=1&delta=1e99", "delta[0]: expected a number from -1 to 1, found 1e99"),
        ("/reconstruct?label=1&dim=1", "1 dim and 0 delta"),
        ("/reconstruct?label=ten", "0, 1, 2"),
        ("/reconstruct?size=9999", "size: expected a whole number from 8 to 1024, found 9999"),
        ("/reconstruct?label=1&pose=abc", "exclude each other"),
        ("/reconstruct?as_label=1", "needs a pose"),
        ("/reconstruct?pose=!!!", "not base64url"),
        ("/reconstruct?pose=abcd", "checksum"),
        ("/reconstruct?dimm=1&delt=1", "the query takes model, pose, label, as_label, dim, delta, size, not dimm, delt"),
        ("/reconstruct?" + "&dim=1" * 1_000, "more than 1,000 query parameters"),
        ("/reconstruct?size=28&size=56", "'size' is in the query more than once; give it once"),
        ("/reconstruct/sweep?label=1&label=1", "'label' is in the query more than once"),
        ("/reconstruct/sweep", "one pose"),
        ("/reconstruct/sweep?label=1&low=0.2&high=0.1", "low must be less"),
        ("/reconstruct/sweep?label=1&steps=1", "steps: expected a whole number from 2 to 41, found 1"),
        ("/reconstruct/morph?from=abcd", "to is missing: give the pose token that it ends with"),
        ("/reconstruct/morph?from=abcd&to=abcd", "from is not a whole pose token: its checksum is wrong"),
        ("/reconstruct/morph?from=abcd&to=abcd&start=abcd", "the query takes model, from, to, steps, size, not start"),
    ],
)
def test_an_invalid_drawing_request_gets_422_with_an_explanation(client: httpx.Client, path: str, told: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 422
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert told in answer.json()["detail"]
    assert answer.json()["status"] == 422
    assert client.get(path, headers={"If-None-Match": "*"}).status_code == 422  # no client can have what cannot be drawn


def test_foreign_and_mangled_tokens_are_refused_with_the_reason(client: httpx.Client, token: str, net: CapsNet) -> None:
    foreign = pose.encode(pose.decode(token, net.manifest), net.manifest.model_copy(update={"version": "0" * 16}))
    assert "another model" in client.get("/reconstruct", params={"pose": foreign}).json()["detail"]
    for ends, told in (
        ((token, foreign), "from and to were made by different models"),
        ((foreign, foreign), "from was made by another"),
    ):
        answer = client.get("/reconstruct/morph", params=dict(zip(("from", "to"), ends, strict=True)))
        assert (answer.status_code, told in answer.json()["detail"]) == (422, True), answer.text
    mangled = token[:-6] + ("A" if token[-6] != "A" else "B") + token[-5:]
    assert "checksum" in client.get("/reconstruct", params={"pose": mangled}).json()["detail"]


def test_large_sheets_get_503_when_the_crew_is_full(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is before they are drawn. A copy that the client has, pixels in JSON and small sheets do not need the crew."""
    etag = client.get("/reconstruct?size=1024").headers["ETag"]

    def full(crew: Crew) -> None:
        raise Busy("too many", "crew")

    monkeypatch.setattr(Crew, "admit", full)
    for path in ("/reconstruct?size=1024", "/reconstruct/sweep?label=7", "/reconstruct/sweep?label=7&names=false&size=256"):
        refused = client.get(path)
        assert (refused.status_code, "Retry-After" in refused.headers) == (503, True), path
    for path in ("/reconstruct?label=7", "/reconstruct/sweep?label=7&names=false&dim=1&size=56"):
        assert client.get(path).status_code == 200, path
    assert client.get("/reconstruct?size=1024", headers=AS_JSON).status_code == 200
    assert client.get("/reconstruct?size=1024", headers={"If-None-Match": etag}).status_code == 304


def test_an_unknown_model_is_not_found(client: httpx.Client) -> None:
    answer = client.get("/reconstruct?model=resnet")
    assert answer.status_code == 404
    assert answer.json()["detail"].endswith("there are tiny")
