"""Our exception hierarchy, each with its HTTP status; one handler turns them into problem+json (RFC 9457).

    ServiceError            a request is not answered as asked; 4xx: the request is at fault
      TurnedAway            through no fault of the request
        Busy        503     carries Retry-After
          Broken    503     the model itself failed
        TooLate     504
    StartError              the process cannot start as asked: exit status 2

The text of each says what to do. It never holds an image, a token or a traceback.
"""

import math
import traceback
from collections.abc import Mapping
from typing import ClassVar


class ServiceError(Exception):
    status: ClassVar[int]
    title: ClassVar[str]
    meaning: ClassVar[str]  # for /docs
    headers: Mapping[str, str] = {}

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail

    @property
    def why(self) -> str:
        """For the log, which must not contain what `detail` quotes."""
        return self.title


class MalformedRequest(ServiceError):
    status, title = 400, "malformed request"
    meaning = "not the syntax we speak"


class KeyWanted(ServiceError):
    status, title = 401, "API key required"
    meaning = "the server's key is required"
    headers = {"WWW-Authenticate": "Bearer"}


class Forbidden(ServiceError):
    status, title = 403, "forbidden"
    meaning = "against this server's settings, or from another site's page"


class UnknownModel(ServiceError):
    status, title = 404, "no such model"
    meaning = "no such model"


class NotAcceptable(ServiceError):
    status, title = 406, "not acceptable"
    meaning = "Accept admits no form of it"


class TooSlow(ServiceError):
    status, title = 408, "request timeout"
    meaning = "head or body did not come in time"
    headers = {"Connection": "close"}


class NotReloaded(ServiceError):
    status, title = 409, "not reloaded"
    meaning = "nothing changed: the models folder holds what cannot be served"


class TooLarge(ServiceError):
    status, title = 413, "too large"
    meaning = "body or pixels over the limit"


class NotAnImage(ServiceError):
    status, title = 415, "not an image type we read"
    meaning = "not an image type we read"


class Encoded(NotAnImage):
    title = "a content coding we do not read"
    headers = {"Accept-Encoding": "identity"}  # RFC 9110 15.5.16: the coding is at fault, not the type


class Unprocessable(ServiceError):
    status, title = 422, "cannot be processed"
    meaning = "a damaged picture, a parameter out of range, another model's pose token"


class HeadTooLarge(ServiceError):
    status, title = 431, "head too large"
    meaning = "too many headers, or too long a path"


class TurnedAway(ServiceError):
    def __init__(self, detail: str, reason: str) -> None:
        """`reason` is what the metrics call it."""
        super().__init__(detail)
        self.reason = reason

    @property
    def why(self) -> str:
        return f"{self.title}, {self.reason}"


class Busy(TurnedAway):
    status, title = 503, "busy"
    meaning = "queue full or too long, warming, draining, or the model failed; see Retry-After"

    def __init__(self, detail: str, reason: str, after: float = 0.0) -> None:
        """`after` is in how many seconds there will be room again, if known."""
        super().__init__(detail, reason)
        self.headers = {"Retry-After": str(max(1, math.ceil(after)))}


class Broken(Busy):
    title = "the model failed"


class TooLate(TurnedAway):
    status, title = 504, "past the deadline"
    meaning = "past the deadline"


class StartError(Exception):
    pass


def release_frames(error: BaseException | None) -> None:
    """Frees what the frames of an error's traceback and of its causes hold, such as bodies and pixels.

    Answering a client may take as long as that client likes. Line numbers stay, for the log, and causes that it would show.
    Others go: Pydantic's error, for one, holds the body that it could not read.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        if error.__suppress_context__:
            error.__context__ = None
        error = error.__cause__ or error.__context__
