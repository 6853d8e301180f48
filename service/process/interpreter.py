"""Python's own habits that a server would wait for: threads that keep their turn, and rubbish looked for where there is none."""

from __future__ import annotations

import gc
import sys

# Seconds after which a thread that computes lets another go on. The runners leave Python for each graph and come back for a
# moment; with Python's own 5 ms they, and a batch of answers with them, wait up to as long each time the event loop is busy.
# With far shorter turns it is the event loop that waits: at 10 us small pictures beside photographs took half as long again.
TURN = 5e-4


def take_short_turns() -> None:
    sys.setswitchinterval(TURN)


def settle() -> None:
    """Once all that will live long has been made: collects garbage, and has the collector pass over what is left.

    Under load Python looks through all objects about once a second, and the 75,000 of an app that is ready stopped everything
    for 30 ms each time. Settling again looks at all once more, so that what has been replaced since can go.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
