"""`capserve serve` that takes its time: `slow_server A B`, seconds for each batch and for each large picture to be decoded."""

import sys
import time

from service import images
from service.__main__ import main
from service.engine import CapsNet
from service.routes.predict import SMALL_BYTES

if __name__ == "__main__":
    a_batch, a_picture = map(float, sys.argv[1:])
    perceive, read = CapsNet.perceive, images.read

    def slowly(self, images, drawn):
        time.sleep(a_batch)
        return perceive(self, images, drawn)

    def slowly_if_large(data, *asked, **more):
        time.sleep(a_picture if len(data) > SMALL_BYTES else 0)
        return read(data, *asked, **more)

    CapsNet.perceive, images.read = slowly, slowly_if_large
    sys.exit(main(["serve"]))
