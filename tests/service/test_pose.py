from __future__ import annotations

import base64

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service import pose
from service.engine import CapsNet
from service.errors import Unprocessable
from service.pose import Pose

VALUES = np.float32([-0.5, 0.25, 0.0, 1.0, 0.125, -0.0625])


def test_a_pose_survives_encoding_and_decoding(net: CapsNet) -> None:
    token = pose.encode(Pose(9, VALUES), net.manifest)
    assert token.replace("-", "").replace("_", "").isalnum()
    found = pose.decode(token, net.manifest)
    assert found.label == 9
    np.testing.assert_array_equal(found.values, VALUES)


def test_a_token_with_any_letter_changed_is_rejected(net: CapsNet) -> None:
    token = pose.encode(Pose(2, VALUES), net.manifest)
    for place, letter in enumerate(token):
        with pytest.raises(Unprocessable):
            pose.decode(token[:place] + ("x" if letter != "x" else "y") + token[place + 1 :], net.manifest)


def test_another_base64_spelling_of_a_token_is_rejected(net: CapsNet) -> None:
    """Base64 has unused bits at its end, and Python accepts letters that base64url does not have."""
    tokens = [pose.encode(Pose(label, VALUES[:5]), net.manifest) for label in range(100)]
    token = next(token for token in tokens if "-" in token and "_" in token)
    last = {"A": "B", "Q": "R", "g": "h", "w": "x"}[token[-1]]
    others = [token[:-1] + last, token + "=", token.replace("-", "+"), token.replace("_", "/")]
    assert base64.urlsafe_b64decode(token + "==") == base64.urlsafe_b64decode(others[0] + "==")
    for other in others:
        with pytest.raises(Unprocessable, match="copy it again"):
            pose.decode(other, net.manifest)


@pytest.mark.parametrize("token", ["", "A", "ä", "AAAA", "%00", "A" * 4000])
def test_a_nonsense_token_is_rejected(net: CapsNet, token: str) -> None:
    with pytest.raises(Unprocessable):
        pose.decode(token, net.manifest)


@pytest.mark.parametrize("wrong", [Pose(10, VALUES), Pose(0, VALUES[:5]), Pose(0, np.full(6, np.nan, np.float32))])
def test_a_well_made_token_must_hold_a_pose_of_this_model(net: CapsNet, wrong: Pose) -> None:
    with pytest.raises(Unprocessable, match="6 finite values"):
        pose.decode(pose.encode(wrong, net.manifest), net.manifest)


def test_a_token_of_another_version_is_rejected_naming_the_version(net: CapsNet, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(pose, "VERSION", 9)
        token = pose.encode(Pose(0, VALUES), net.manifest)
    with pytest.raises(Unprocessable, match="version 9"):
        pose.decode(token, net.manifest)


@settings(deadline=None)
@given(body=st.binary(max_size=120))
def test_any_bytes_with_a_right_checksum_are_a_pose_or_a_422(net: CapsNet, body: bytes) -> None:
    """A checksum is no signature: whoever can compute it can send anything."""
    for signed in (body, pose.HEAD.pack(pose.VERSION, net.manifest.fingerprint, 3) + body):
        token = base64.urlsafe_b64encode(signed + pose._checksum(signed)).rstrip(b"=").decode()
        try:
            found = pose.decode(token, net.manifest)
        except Unprocessable:
            continue
        assert np.isfinite(found.values).all()
