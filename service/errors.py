"""Our exception hierarchy, each with its HTTP status; one handler turns them into problem+json (RFC 9457).

    ServiceError
      MalformedRequest   400   not the syntax we speak
      KeyWanted          401
      Forbidden          403   nobody may, as the server is set up
      UnknownModel       404
      NotAcceptable      406   the client accepts nothing that we give there
      TooSlow            408   head or body did not come in time
      NotReloaded        409   the models folder holds something that cannot be served; what was served still is
      TooLarge           413   body or pixels over the limit
      NotAnImage         415   not an image type we read
      Unprocessable      422   damaged image, parameter out of range, someone else's pose token
      HeadTooLarge       431   more headers, or a longer path, than anybody needs
      TurnedAway               through no fault of the request
        Busy             503   queue full, warming, draining; carries Retry-After
          Broken         503   the model itself failed
        TooLate          504   past the deadline

    StartError                 the process cannot start as it was asked to: exit status 2

The text of each says what to do. It never holds an image, a token or a traceback.
"""

from collections.abc import Mapping
from typing import ClassVar


class ServiceError(Exception):
    status: ClassVar[int]
    title: ClassVar[str]
    headers: ClassVar[Mapping[str, str]] = {}

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail


class MalformedRequest(ServiceError):
    status, title = 400, "malformed request"


class KeyWanted(ServiceError):
    status, title = 401, "API key wanted"
    headers: ClassVar = {"WWW-Authenticate": 'Bearer, Basic realm="capserve: any user, the key as password"'}


class Forbidden(ServiceError):
    status, title = 403, "forbidden"


class UnknownModel(ServiceError):
    status, title = 404, "no such model"


class NotAcceptable(ServiceError):
    status, title = 406, "not acceptable"


class TooSlow(ServiceError):
    status, title = 408, "request timeout"
    headers: ClassVar = {"Connection": "close"}


class NotReloaded(ServiceError):
    status, title = 409, "not reloaded"


class TooLarge(ServiceError):
    status, title = 413, "too large"


class NotAnImage(ServiceError):
    status, title = 415, "not an image type we read"


class Unprocessable(ServiceError):
    status, title = 422, "cannot be processed"


class HeadTooLarge(ServiceError):
    status, title = 431, "head too large"


class TurnedAway(ServiceError):
    def __init__(self, detail: str, reason: str) -> None:
        """`reason` is the metrics' word for it."""
        super().__init__(detail)
        self.reason = reason


class Busy(TurnedAway):
    status, title = 503, "busy"
    headers: ClassVar = {"Retry-After": "1"}  # seconds; a queue is empty again in less


class Broken(Busy):
    title = "the model failed"


class TooLate(TurnedAway):
    status, title = 504, "past the deadline"


class StartError(Exception):
    pass
