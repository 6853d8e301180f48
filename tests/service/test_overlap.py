"""The shipped bundle of two digits a picture, over HTTP: both are found, each is drawn by itself."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image, ImageOps

from service import bundle, catalogue, images
from service.bundle import Array
from service.engine import CapsNet
from service.settings import Settings
from tests import drawings
from tests.mnist import Digits
from tests.service.conftest import encoded, serving
from tests.service.test_metrics import samples

MODELS = Path(__file__).parents[2] / "models"
SHAPE = (1, 36, 36)


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    """A server of the shipped models; tests ask for `overlap` by its name."""
    settings = Settings(models=MODELS, port=0, linger=0.0)
    nets = catalogue.load(settings)
    assert nets["overlap"].manifest.max_objects == 2
    with serving(settings, nets) as client:
        yield client


def seen(client: httpx.Client, picture: Image.Image, **query: str) -> list[dict[str, str]]:
    answer = client.post("/predict", params={"model": "overlap", **query}, content=encoded(picture))
    assert answer.status_code == 200, answer.text
    objects: list[dict[str, str]] = answer.json()["objects"]
    return objects


def labels(objects: list[dict[str, str]]) -> set[str]:
    return {each["label"] for each in objects}


def drawing(found: dict[str, str]) -> Array:
    png = base64.b64decode(found["reconstruction"].partition(",")[2])
    return images.prepare(images.read(png, 10**6), SHAPE, normalise=False)[0]


def written_over(first: str, second: str, rng: np.random.Generator, move: float = 0.08) -> Image.Image:
    """Two digits drawn over each other, the second a little aside; dark ink on light paper."""
    side = drawings.SIDE
    masks = []
    for digit, sign in ((first, -1), (second, 1)):
        mask = drawings.written(digit, rng)
        masks.append(np.roll(mask, round(sign * move * side / 2), axis=1))
    return drawings.grey(np.clip(masks[0] + masks[1], 0, 1), ink=0.1, paper=0.95)


def test_both_of_two_overlapping_drawn_digits_are_found(client: httpx.Client) -> None:
    rng, right = np.random.default_rng(0), []
    pairs = [(str(first), str(second)) for first in range(10) for second in range(first)]
    for first, second in pairs:
        right.append(labels(seen(client, written_over(first, second, rng), reconstruct="false")) == {first, second})
    print(f"\n{sum(right)} of {len(pairs)} drawn pairs named rightly")
    assert sum(right) >= 40


def test_each_digit_of_a_pair_is_reconstructed_by_itself(client: httpx.Client) -> None:
    """One drawing shows a ring, the other a stroke."""
    objects = seen(client, written_over("0", "1", np.random.default_rng(0)))
    assert labels(objects) == {"0", "1"}
    zero, one = (next(each for each in objects if each["label"] == label) for label in ("0", "1"))
    hole, stroke = drawing(zero), drawing(one)
    rows = np.flatnonzero(hole.max(axis=1) > 0.5)
    middle = hole[rows[0] : rows[-1] + 1][len(rows) // 2]
    assert np.ptp(np.flatnonzero(middle > 0.5)) > 6  # the two sides of a ring
    columns = np.flatnonzero(stroke.max(axis=0) > 0.5)
    assert len(columns) < 10  # as narrow as a 1


def test_a_pair_made_as_for_training_is_not_changed_by_normalising(client: httpx.Client, mnist: Digits) -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        first, second = rng.choice(len(mnist.images), 2, replace=False)
        frame = np.zeros(SHAPE[1:], np.int32)
        for index in (first, second):
            top, left = rng.integers(0, 9, 2)
            frame[top : top + 28, left : left + 28] += mnist.images[index]
        picture = Image.fromarray(np.minimum(frame, 255).astype(np.uint8))
        answers = {normalise: seen(client, picture, normalise=normalise) for normalise in ("auto", "none")}
        assert answers["auto"] == answers["none"]


def test_both_digits_of_mnist_pairs_moved_onto_a_sheet_are_found(mnist: Digits) -> None:
    """`pytest -s` prints for how many pairs that is so, and for how many before they were moved."""
    net = catalogue.opener(Settings())(bundle.read(MODELS / "overlap"))
    rng = np.random.default_rng(0)
    pairs: list[Array] = []
    expected: list[set[int]] = []
    while len(pairs) < 500:
        both = rng.integers(len(mnist.images), size=2)
        if len(found := set(mnist.labels[both].tolist())) == 2:
            frame = np.zeros((36, 36), np.float32)
            for image, (top, left) in zip(mnist.images[both], rng.integers(0, 9, (2, 2)), strict=True):
                frame[top : top + 28, left : left + 28] += np.float32(image / 255)
            pairs.append(frame.clip(max=1)[None])
            expected.append(found)

    def sheet(pair: Array) -> Array:
        large = Image.fromarray((255 - pair[0] * 255).astype(np.uint8)).resize((360, 360), Image.Resampling.BICUBIC)
        return images.prepare(ImageOps.expand(large, 60, fill=255), SHAPE, normalise=True, objects=2)

    def right(pictures: list[Array]) -> float:
        longest = np.concatenate(
            [net.classify(np.stack(part))[0].argsort(axis=1)[:, -2:] for part in np.split(np.array(pictures), 10)]
        )
        return float(np.mean([set(row.tolist()) == found for row, found in zip(longest, expected, strict=True)]))

    untouched, elsewhere = right(pairs), right([sheet(pair) for pair in pairs])
    print(f"both digits of {untouched:.1%} of 500 pairs as in training, of {elsewhere:.1%} enlarged on a sheet")
    assert untouched > 0.94
    assert elsewhere > 0.87


def test_drift_of_pairs_is_measured_on_the_second_longest_capsule(client: httpx.Client) -> None:
    """With two objects that is the second longest capsule: the longest would look like drift on usual pictures."""

    def total() -> float:
        return samples(client)["capserve_winner_length_sum", "overlap"]

    before = total()
    answer = client.post("/predict?model=overlap", content=encoded(written_over("3", "7", np.random.default_rng(1)))).json()
    assert total() - before == pytest.approx(sorted(answer["probabilities"])[-2], abs=1e-5)


def test_the_pose_of_either_digit_can_be_drawn_and_changed(client: httpx.Client) -> None:
    drawings = set()
    found = seen(client, written_over("3", "7", np.random.default_rng(0)))
    for each in found:
        for turn in ({}, {"dim": 0, "delta": 0.2}):
            answer = client.get("/reconstruct", params={"model": "overlap", "pose": each["pose"], **turn})
            assert answer.status_code == 200, answer.text
            assert Image.open(BytesIO(answer.content)).size == (140, 140)
            drawings.add(answer.content)
    assert len(found) == 2
    assert len(drawings) == 4  # of both, turned and not


def test_overlapping_drawings_add_up_to_full_ink_at_most(net: CapsNet) -> None:
    """As MultiMNIST adds them."""
    manifest = net.manifest.model_copy(update={"max_objects": 2})
    shape = (1, *manifest.image_shape)
    two = replace(net, manifest=manifest)
    object.__setattr__(two, "reconstruct", lambda poses, classes: np.ones((len(poses), *manifest.image_shape), np.float32))
    lengths = np.ones((1, len(manifest.classes)), np.float32)
    capsules = np.zeros((1, len(manifest.classes), manifest.pose_size), np.float32)
    seen = two.perceive_encoded(np.ones(shape, np.float32), lengths, capsules, np.ones(1, bool))
    assert len(seen.objects(0)) == 2
    assert seen.errors.tolist() == [0.0]
