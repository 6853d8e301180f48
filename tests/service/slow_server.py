"""`capserve serve` over a model that takes its time: `python -m tests.service.slow_server SECONDS`, so much for each batch."""

import sys
import time

from service.__main__ import main
from service.engine import CapsNet

if __name__ == "__main__":
    seconds, perceive = float(sys.argv[1]), CapsNet.perceive

    def slowly(self, images, drawn):
        time.sleep(seconds)
        return perceive(self, images, drawn)

    CapsNet.perceive = slowly
    sys.exit(main(["serve"]))
