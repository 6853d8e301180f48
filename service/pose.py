"""The pose token: (model fingerprint, class, pose vector) <-> URL-safe text.

base64url of: version, 1 byte | fingerprint, 8 | class, 2 | pose, D float16 | BLAKE2 of all before, 4; little-endian.
The server keeps nothing: any replica with the same model can draw it.
"""

from __future__ import annotations

import base64
import hashlib
import struct
from typing import NamedTuple

import numpy as np

from service.bundle import Array
from service.errors import Unprocessable
from service.manifest import Manifest

VERSION = 1
HEAD = struct.Struct("<B8sH")
CHECKSUM_SIZE = 4  # bytes; not a signature: it detects slips of copy and paste, and a pose is no secret


class Pose(NamedTuple):
    label: int  # index of the class
    values: Array  # (D,)


def encode(pose: Pose, manifest: Manifest) -> str:
    body = HEAD.pack(VERSION, manifest.fingerprint, pose.label) + pose.values.astype("<f2").tobytes()
    return _base64url(body + _checksum(body))


def decode(token: str, manifest: Manifest, name: str = "pose") -> Pose:
    """`name` is the parameter's name, for error messages."""
    fingerprint, label, values = _read(token, name)
    if fingerprint != manifest.fingerprint:
        raise Unprocessable(
            f"{name} was made by another model, not {manifest.name} {manifest.version}; "
            "name its model with ?model=, or ask /predict for a new one"
        )
    if len(values) == 2 * manifest.pose_size and label < len(manifest.classes):
        numbers = np.frombuffer(values, "<f2").astype(np.float32)
        if np.isfinite(numbers).all():
            return Pose(label, numbers)
    raise Unprocessable(f"{name} does not hold a class and {manifest.pose_size} finite values; ask /predict for a new one")


def expect_same_model(**tokens: str) -> None:
    """Raises Unprocessable, with the parameters' names, if no single ?model= would suit them all."""
    if len({_read(token, name)[0] for name, token in tokens.items()}) > 1:
        raise Unprocessable(f"{' and '.join(tokens)} were made by different models; ask one model's /predict for both")


def _read(token: str, name: str) -> tuple[bytes, int, bytes]:
    """The model's fingerprint, the class, and a pose's bytes."""
    try:
        raw = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
    except ValueError as error:
        raise Unprocessable(f"{name} is not a pose token: it is not base64url; use one that /predict gave, whole") from error
    body, check = raw[:-CHECKSUM_SIZE], raw[-CHECKSUM_SIZE:]
    # Base64 has unused bits, and Python accepts other letters too: a token changed there would decode to the same.
    if len(body) < HEAD.size or check != _checksum(body) or token != _base64url(raw):
        raise Unprocessable(f"{name} is not a whole pose token: its checksum is wrong; copy it again from /predict's answer")
    version, fingerprint, label = HEAD.unpack_from(body)
    if version != VERSION:
        raise Unprocessable(f"{name} is a token of version {version}; this server reads version {VERSION}, so ask /predict again")
    return fingerprint, label, body[HEAD.size :]


def _base64url(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2s(body, digest_size=CHECKSUM_SIZE).digest()
