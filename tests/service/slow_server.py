"""`capserve serve` that takes its time: `slow_server A B`, seconds for each batch and for each large picture to be decoded.

Worker processes import this module too, under another name, and so they are as slow.
"""

import sys
import time

from service import images
from service.__main__ import main
from service.engine import CapsNet
from service.routes.predict import SMALL_BYTES

a_batch, a_picture = map(float, sys.argv[1:])
believe, read = CapsNet.believe, images.read


def slowly(self, *seen):
    time.sleep(a_batch)
    return believe(self, *seen)


def slowly_if_large(data, *asked, **more):
    time.sleep(a_picture if len(data) > SMALL_BYTES else 0)
    return read(data, *asked, **more)


CapsNet.believe, images.read = slowly, slowly_if_large

if __name__ == "__main__":
    sys.exit(main(["serve"]))
