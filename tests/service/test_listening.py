import socket
import sys
from pathlib import Path

import pytest

from service.process import listening
from tests.service.launching import appears, launched, workers_of


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


def test_workers_find_the_address_again_with_the_link_it_is_on() -> None:
    assert listening.numbers(("::1", 8000, 0, 0)) == ("::1", 8000)
    assert listening.numbers(("fe80::1", 8000, 0, 1)) == ("fe80::1%lo", 8000)


def test_as_many_files_are_taken_as_may_be(tmp_path: Path) -> None:
    """Under bash, which as other parents do hands on a limit of its own."""
    few, log = 64, tmp_path / "log"
    command = ["bash", "-c", f"ulimit -S -n {few}; exec {sys.executable} -m service serve --port 0 --linger 0 --workers 2"]
    with launched(log, command) as process:
        appears(log, "ready: tiny", 2)
        for each in (process.pid, *workers_of(process)):
            _, _, limit = Path(f"/proc/{each}/limits").read_text().partition("Max open files")
            soft, hard = limit.split()[:2]
            assert soft == hard != str(few)
