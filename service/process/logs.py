"""Logs on standard error, one line per record (console tracebacks take more), each with its request's id.

They never hold pictures, tokens or queries.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import sys
from datetime import UTC, datetime
from typing import Literal

from service.visits import request_id


class Console(logging.Formatter):
    def __init__(self) -> None:
        worker = "" if multiprocessing.parent_process() is None else "%(process)d "  # one of several workers
        super().__init__(f"%(asctime)s %(levelname)-7s {worker}%(request_id)s %(message)s", "%Y-%m-%d %H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        record.request_id = request_id.get()
        return super().format(record)


class Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "request_id": request_id.get(),
            "message": record.getMessage(),
        }
        fields |= getattr(record, "request", {})
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


FORMATS = {"console": Console, "json": Json}


class Stderr(logging.Handler):
    """Writes to the file descriptor directly. If a full disk or a closed pipe refuses a record, it is lost: in Python's buffer it
    would fail again at every flush, which happens before each start of a worker and when the process ends."""

    def __init__(self) -> None:
        super().__init__()
        self._file = sys.__stderr__.fileno() if sys.__stderr__ else None  # None: closed, and its number may be a client's by now
        self._torn = False  # the last record was written only in part

    def emit(self, record: logging.LogRecord) -> None:
        try:
            rest = b"\n" * self._torn + f"{self.format(record)}\n".encode(errors="backslashreplace")
            while rest and self._file is not None:
                rest = rest[os.write(self._file, rest) :]
                self._torn = bool(rest)
        except OSError:
            pass  # there is nowhere to report it
        except Exception:  # a record that cannot be formatted: logging's own report
            self.handleError(record)


def configure(form: Literal["console", "json"], level: str) -> None:
    handler = Stderr()
    handler.setFormatter(FORMATS[form]())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("PIL").setLevel(logging.INFO)  # its debug lines quote a picture's headers
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLogger().level))  # we log readiness ourselves
    logging.getLogger("asyncio").setLevel(logging.INFO)
