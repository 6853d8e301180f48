"""A slowed `capserve serve`: `slow_server A B C` adds A seconds to each batch, and B or C to decoding a large or a small picture.

Worker processes import this module too, under another name, so they are as slow.
"""

import sys
import time

from service import images
from service.__main__ import main
from service.engine import CapsNet
from service.routes.predict import SMALL_BYTES

a_batch, a_large, a_small = map(float, sys.argv[1:])
perceive_encoded, read = CapsNet.perceive_encoded, images.read


def slowly(self, *seen):
    time.sleep(a_batch)
    return perceive_encoded(self, *seen)


def read_slowly(data, *asked, **more):
    time.sleep(a_large if len(data) > SMALL_BYTES else a_small)
    return read(data, *asked, **more)


CapsNet.perceive_encoded, images.read = slowly, read_slowly

if __name__ == "__main__":
    sys.exit(main(["serve"]))
