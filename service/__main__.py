"""`capserve`, or `python -m service`. Ctrl-C ends it at once and without a word until a command has something to finish."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else whoever started us has it ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from service import cli  # here, since it takes a second in which somebody may have thought better of it

    return cli.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
