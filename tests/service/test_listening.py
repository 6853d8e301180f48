import socket

import pytest

from service.process import listening


def test_a_name_with_both_kinds_of_address_is_the_one_that_all_can_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many a client tries 127.0.0.1 for localhost alone."""
    four = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))
    six = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [six, four])
    with listening.bind("localhost", 0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize(
    ("address", "url"),
    [(("127.0.0.1", 8000), "http://127.0.0.1:8000"), (("::1", 8000, 0, 0), "http://[::1]:8000")],
)
def test_an_address_is_written_as_a_browser_takes_it(address: tuple[object, ...], url: str) -> None:
    assert listening.url(address) == url
