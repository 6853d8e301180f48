"""Entry point of `capserve` and `python -m service`. Ctrl-C ends it at once and silently until a command has work to finish."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # otherwise our parent has SIGINT ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from service import cli  # imported here: it takes a second, in which Ctrl-C must already work

    return cli.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
