"""Measures how long it takes to make pictures of each style look like MNIST's: `python -m benchmarks.pictures`, 20 seconds.

One thread, one picture after the other; each is decoded and normalised several times, and the fastest run counts.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable
from statistics import median

import numpy as np

from service import images
from tests import drawings

SHAPE = (1, 28, 28)
DIGITS = "02468"
REPEATS = 5


def main() -> None:
    print(f"{'milliseconds':42} {'pixels':>11}   decode   normalise")
    for style, draw in drawings.STYLES.items():
        pictures = []
        for digit in DIGITS:
            rng = np.random.default_rng(zlib.crc32(f"{style} {digit}".encode()))
            pictures.append(drawings.encoded(draw(drawings.written(digit, rng), rng)))
        decoded = [images.read(each, 10**8) for each in pictures]
        reading = _quickest(images.read, ((each, 10**8) for each in pictures))
        normalising = _quickest(images.prepare, ((each, SHAPE, True) for each in decoded))
        width, height = decoded[0].size
        print(f"{style:42} {f'{width}x{height}':>11}   {reading:6.2f}   {normalising:9.2f}", flush=True)


def _quickest(work: Callable[..., object], inputs: Iterable[tuple[object, ...]]) -> float:
    """The fastest of several runs with each input, in milliseconds; the median over all inputs."""
    return median(min(_timed(work, *each) for _ in range(REPEATS)) for each in inputs)


def _timed(work: Callable[..., object], *arguments: object) -> float:
    began = time.perf_counter()
    work(*arguments)
    return (time.perf_counter() - began) * 1e3


if __name__ == "__main__":
    main()
