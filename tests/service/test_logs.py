"""What a line of the log holds."""

from __future__ import annotations

import json
import logging
import sys

from service.process import logs


def test_an_exception_is_in_the_json_log_with_its_traceback() -> None:
    try:
        raise ValueError("a fault")
    except ValueError:
        record = logging.LogRecord("service", logging.ERROR, "", 0, "it failed", (), sys.exc_info())
    told = json.loads(logs.Json().format(record))
    assert "ValueError: a fault" in told["traceback"]
