"""What is fetched for a request, and what is not: private addresses, redirects to them, too many bytes or seconds."""

import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from headrace.core.vision import fetch as fetching
from headrace.core.vision.fetch import FetchError, fetch, is_public


class Site(BaseHTTPRequestHandler):
    """Answers by the path."""

    def do_GET(self) -> None:
        self.server.hosts.append(self.headers["host"])  # type: ignore[attr-defined]
        kind, _, rest = self.path[1:].partition("/")
        if kind == "to":
            self.send_response(302)
            self.send_header("Location", rest)
            self.end_headers()
            return
        self.send_response(404 if kind == "missing" else 200)
        if kind in ("ok", "short"):
            self.send_header("Content-Length", "5" if kind == "ok" else "50")
        self.end_headers()
        self.wfile.write(b"hello")
        if kind == "drip":
            try:
                while True:
                    time.sleep(0.05)
                    self.wfile.write(b"x")
                    self.wfile.flush()
            except OSError:
                pass

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    server.hosts = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def get(site: ThreadingHTTPServer, path: str, **options: Any) -> bytes:
    port = site.server_address[1]
    given = {"max_bytes": 1000, "timeout_s": 5.0, "allow_private": True, **options}
    return fetch(f"http://127.0.0.1:{port}/{path}", **given)


def test_files_and_redirects(site: ThreadingHTTPServer) -> None:
    assert get(site, "ok") == b"hello"
    assert get(site, "to//ok") == b"hello"  # relative
    assert get(site, "any") == b"hello"  # of unknown length
    assert get(site, "ok", max_bytes=5) == b"hello"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing", "HTTP 404"),
        ("short", "broke off after 5 bytes"),
        ("to/file:///etc/hostname", "no http"),
        ("to/ftp://127.0.0.1/x", "no http"),
        ("to/http://[", "Invalid IPv6"),
        ("to//to//to//to//to//to//to//ok", "more than 5 redirects"),
    ],
)
def test_what_cannot_be_fetched_says_why(site: ThreadingHTTPServer, path: str, message: str) -> None:
    with pytest.raises(FetchError, match=message):
        get(site, path)


def test_bytes_and_seconds_have_limits(site: ThreadingHTTPServer) -> None:
    with pytest.raises(FetchError, match="more than 4 B"):
        get(site, "ok", max_bytes=4)
    started_s = time.monotonic()
    with pytest.raises(FetchError, match="longer than"):
        get(site, "drip", timeout_s=0.5, max_bytes=10**6)
    assert time.monotonic() - started_s < 3


@pytest.mark.parametrize(
    "name", ["127.0.0.1", "localhost", "2130706433", "0x7f.1", "[::1]", "[::ffff:127.0.0.1]", "0"]
)
def test_spellings_of_this_machine(site: ThreadingHTTPServer, name: str) -> None:
    url = f"http://{name}:{site.server_address[1]}/ok"
    with pytest.raises(FetchError, match="not at a public address|Name or service|not known"):
        fetch(url, max_bytes=1000, timeout_s=5, allow_private=False)


def test_redirects_are_looked_at_too(site: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A public host (as far as the guard can see) that sends the server on to a private one."""
    real = fetching.is_public
    monkeypatch.setattr(fetching, "is_public", lambda address: address == "127.0.0.1" or real(address))
    assert get(site, "ok", allow_private=False) == b"hello"
    for target in ("http://169.254.169.254/latest", "http://10.0.0.1/", "http://[::1]/ok"):
        with pytest.raises(FetchError, match="not at a public address"):
            get(site, f"to/{target}", allow_private=False)


def test_one_private_address_among_several_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
    found = [(*kind, ("93.184.216.34", 80)), (*kind, ("192.168.0.1", 80))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(FetchError, match="not at a public address"):
        fetch("http://example.test/", max_bytes=1, timeout_s=1, allow_private=False)


@pytest.mark.parametrize(
    ("address", "wanted"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1:248:1893:25c8:1946", True),
        ("::ffff:93.184.216.34", True),
        ("64:ff9b::5db8:d822", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::1", False),
        ("::", False),
        ("fe80::1%eth0", False),
        ("fc00::1", False),
        ("fec0::1", False),
        ("ff02::1", False),
        ("::ffff:10.0.0.1", False),
        ("::7f00:1", False),
        ("2002:7f00:1::", False),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b:1::a00:1", False),
    ],
)
def test_public_addresses(address: str, wanted: bool) -> None:
    assert is_public(address) == wanted
