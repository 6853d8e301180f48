"""Interpreter settings that keep a server from waiting: how long a thread holds the GIL, what the garbage collector scans."""

from __future__ import annotations

import gc
import sys

# Seconds after which a computing thread must release the GIL. The runners leave Python for each graph and come back for a moment;
# with Python's default of 5 ms they, and a batch of answers with them, wait up to that long each time the event loop is busy.
# With a far shorter interval the event loop waits: at 10 us small pictures beside photographs took half as long again.
SWITCH_INTERVAL = 5e-4


def shorten_switch_interval() -> None:
    sys.setswitchinterval(SWITCH_INTERVAL)


def collect_and_freeze() -> None:
    """Collect garbage, then exclude what is left from later collections; called once all long-lived objects exist.

    Under load Python scans all objects about once a second, and the 75,000 of a ready app stopped everything for 30 ms each
    time. Doing so again scans everything once more, so that objects replaced since then can be freed.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
