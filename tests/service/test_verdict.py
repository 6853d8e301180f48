"""Digits are digits; noise, letters, textures and blank sheets are not. Measured on the shipped network, and printed."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from service import bundle, images, verdict
from service.bundle import Array
from service.engine import CapsNet, Perception
from service.verdict import Judge
from tests import drawings

TINY = bundle.read(Path(__file__).parent.parent / "bundles" / "tiny").manifest
JUDGE = Judge(TINY)
SHAPE = (1, 28, 28)
LOOKALIKES = set("OoDQIlijJZzSsBbGgqCcTtYAhr")  # a 0, 1, 2, 5, 6, 7, 8, 9 or 4 to somebody who has seen digits alone
LETTERS = sorted(set(string.ascii_letters) - LOOKALIKES)
ALL_LETTERS = sorted(string.ascii_letters)

LENGTHS = np.array([0.02, 0.05, 0.01, 0.03, 0.02, 0.01, 0.04, 0.97, 0.02, 0.06], np.float32)


Judged = tuple[list[verdict.Verdict], NDArray[np.float64]]


def judged(net: CapsNet, pictures: Array) -> Judged:
    """The verdict on each picture, and how surprising it is."""
    return judged_as_seen(net, net.perceive(pictures, np.ones(len(pictures), bool)))


def judged_as_seen(net: CapsNet, seen: Perception) -> Judged:
    judge = Judge(net.manifest)
    rows = enumerate(zip(seen.lengths, seen.errors.tolist(), strict=True))
    return judge.verdicts(seen), np.array([judge.surprise(lengths, seen.objects(row), error) for row, (lengths, error) in rows])


def prepared(pictures: Iterable[Image.Image]) -> Array:
    return np.stack([images.prepare(picture, SHAPE, normalise=True) for picture in pictures])


def grey(levels: NDArray[np.generic]) -> Image.Image:
    return Image.fromarray(np.rint(np.clip(levels, 0, 1) * 255).astype(np.uint8))


@cache
def noise() -> Array:
    """Noise that is not normalised: as pictures, most of it would be found blank."""
    return np.random.default_rng(0).random((500, *SHAPE), dtype=np.float32)


def typed(letters: Iterable[str]) -> Array:
    return prepared(drawings.grey(drawings.typed(letter, bold=bold), 0, 1) for letter in letters for bold in (0, 4))


@cache
def letters() -> Array:
    return typed(LETTERS)


@cache
def all_letters() -> Array:
    """Half of them are digits to somebody who has seen nothing else."""
    return typed(ALL_LETTERS)


@cache
def textures() -> Array:
    y, x = np.mgrid[0:200, 0:200]
    waves = [0.5 + 0.5 * np.sin(x * across + y * down) for across, down in ((0.1, 0), (0.3, 0), (0, 0.2), (0.2, 0.2), (0.5, 0.3))]
    boards = [(x // step + y // step) % 2 for step in (5, 10, 25, 50)]
    rings = [np.hypot(x - 100, y - 100) % step < step / 2 for step in (20, 50)]
    return prepared(grey(np.asarray(each, np.float64)) for each in (*waves, *boards, *rings))


@cache
def clouds() -> Array:
    rng = np.random.default_rng(0)
    blurred = [grey(rng.random((200, 200))).filter(ImageFilter.GaussianBlur(radius)) for radius in (3, 6, 12) for _ in range(10)]
    return prepared(picture.point(lambda level: 12 * (level - 128) + 128) for picture in blurred)


@pytest.fixture(scope="module")
def real(compact: CapsNet, seen: Perception) -> Judged:
    return judged_as_seen(compact, seen)


def test_real_digits_are_digits(real: Judged) -> None:
    verdicts, _ = real
    shares = {kind: verdicts.count(kind) / len(verdicts) for kind in ("digit", "unsure", "not_a_digit")}  # type: ignore[arg-type]
    print("\nMNIST's test digits:", {kind: f"{share:.2%}" for kind, share in shares.items()})
    assert shares["not_a_digit"] <= 0.02
    assert shares["digit"] >= 0.9


def test_drawn_digits_are_not_refused(compact: CapsNet) -> None:
    drawn = prepared(
        drawings.grey(drawings.written(digit, np.random.default_rng(seed)), 0, 1) for digit in "0123456789" for seed in range(5)
    )
    assert judged(compact, drawn)[0].count("not_a_digit") <= 3


@pytest.mark.parametrize(("side", "channels"), [(28, 1), (28, 3), (100, 1), (200, 3)])
def test_noise_normalised_as_a_picture_is_judged_not_a_digit(compact: CapsNet, side: int, channels: int) -> None:
    """Its darkest pixels touch here and there, as those of strokes do."""
    rng = np.random.default_rng(side)
    made = (rng.integers(0, 256, (side, side, channels), dtype=np.uint8) for _ in range(40))
    verdicts, _ = judged(compact, prepared(Image.fromarray(each[..., 0] if channels == 1 else each) for each in made))
    print(f"\nnoise of {side}x{side}, {channels} channels: {verdicts.count('not_a_digit')} of 40 are not_a_digit")
    assert verdicts.count("not_a_digit") >= 39


@pytest.mark.parametrize(
    ("odd", "least", "refused"),
    [(noise, 0.999, 1.0), (letters, 0.97, 0.75), (all_letters, 0.88, 0.5), (textures, 0.98, 0.9), (clouds, 0.97, 0.9)],
)
def test_noise_letters_and_textures_are_judged_not_a_digit(
    compact: CapsNet, real: Judged, odd: Callable[[], Array], least: float, refused: float
) -> None:
    from sklearn.metrics import roc_auc_score  # here, or each process that runs tests would spend seconds on it

    _, usual = real
    verdicts, surprise = judged(compact, odd())
    share = verdicts.count("not_a_digit") / len(verdicts)
    auroc = roc_auc_score(np.repeat([0, 1], [len(usual), len(surprise)]), np.concatenate([usual, surprise]))
    print(f"\n{odd.__name__}: AUROC {auroc:.3f}, {share:.1%} of {len(verdicts)} are not_a_digit")
    assert auroc >= least
    assert share >= refused


def test_blank_sheets_are_judged_not_a_digit(compact: CapsNet) -> None:
    sheets = [Image.new("L", (60, 60), level) for level in (0, 128, 255)]
    for pictures in (prepared(sheets), np.zeros((1, *SHAPE), np.float32), np.full((1, *SHAPE), 0.7, np.float32)):
        assert set(judged(compact, pictures)[0]) == {"not_a_digit"}


def test_a_picture_usual_in_every_respect_is_a_digit() -> None:
    assert JUDGE.judge(LENGTHS, [7], 0.03, contrast=0.3) == "digit"


def test_a_long_capsule_with_a_bad_drawing_is_not_a_digit() -> None:
    """Uniform noise has longer capsules than digits have, and no drawing comes near it."""
    assert JUDGE.judge(LENGTHS, [7], 0.3, contrast=0.29) == "not_a_digit"


def test_no_class_is_judged_more_strictly_than_the_median_class() -> None:
    """Where bare strokes are usual, a 1 with a flag, drawn as well as any 4, would be the rarest of all digits."""
    errors = TINY.thresholds.reconstruction_errors
    bare = {each: error / 10 for each, error in errors["1"].items()}
    thresholds = TINY.thresholds.model_copy(update={"reconstruction_errors": errors | {"1": bare}})
    strict = Judge(TINY.model_copy(update={"thresholds": thresholds}))
    flagged = np.roll(LENGTHS, 4)  # the 1 wins
    middle = float(np.median([each["50"] for each in errors.values()]))
    assert strict.judge(flagged, [1], middle, contrast=0.3) == "digit"
    assert strict.judge(flagged, [1], 10 * middle, contrast=0.3) == "not_a_digit"


def test_two_classes_of_nearly_equal_length_are_unsure() -> None:
    lengths = LENGTHS.copy()
    lengths[1] = lengths[7] - 0.01
    assert JUDGE.judge(lengths, [7], 0.03, contrast=0.3) == "unsure"


def test_a_picture_without_contrast_is_not_a_digit() -> None:
    assert JUDGE.judge(LENGTHS, [7], 0.0, contrast=0.01) == "not_a_digit"


def test_without_a_reconstruction_the_verdict_is_unsure() -> None:
    assert JUDGE.judge(LENGTHS, [7], float("nan"), contrast=0.3) == "unsure"


def test_surprise_grows_steadily_and_without_bound() -> None:
    errors = [JUDGE.surprise(LENGTHS, [7], error) for error in np.linspace(0, 0.5, 200)]
    assert errors == sorted(errors)
    assert errors[-1] > errors[-20] > 2 * verdict.NOT_A_DIGIT
    shorter = [JUDGE.surprise(LENGTHS * share, [7], 0.04) for share in np.linspace(1, 0, 100, dtype=np.float32)]
    assert shorter == sorted(shorter)


def test_two_long_capsules_are_unsurprising_when_both_are_objects() -> None:
    lengths = LENGTHS.copy()
    lengths[1] = 0.95
    assert JUDGE.surprise(lengths, [7, 1], 0.02) < JUDGE.surprise(lengths, [7], 0.02)
    assert JUDGE.judge(lengths, [7, 1], 0.02, contrast=0.3) == "digit"


def test_a_pair_is_judged_by_the_class_that_is_harder_to_draw() -> None:
    errors = [TINY.thresholds.reconstruction_errors[name]["90"] for name in TINY.classes]
    easy, hard = int(np.argmin(errors)), int(np.argmax(errors))
    lengths = np.full(len(errors), 0.05, np.float32)
    lengths[[easy, hard]] = 0.95
    surprises = [JUDGE.surprise(lengths, pair, errors[hard]) for pair in ([easy, easy], [hard, hard], [easy, hard])]
    assert surprises[0] > surprises[1] == surprises[2]


def test_all_classes_may_be_present_at_once() -> None:
    lengths = np.array([0.9, 0.8], np.float32)
    two = TINY.model_copy(update={"classes": TINY.classes[:2]})
    assert Judge(two).surprise(lengths, [0, 1], 0.02) < Judge(two).surprise(lengths, [0], 0.02)  # nothing comes near the second
