"""Files at http(s) addresses that requests name: from no machine of a private network, within bytes and seconds."""

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from urllib.parse import SplitResult, urljoin, urlsplit

from headrace import __version__

from ..units import format_bytes

_MAX_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)


class FetchError(Exception):
    """Why a file cannot be fetched."""


def fetch(url: str, *, max_bytes: int, timeout_s: float, allow_private: bool) -> bytes:
    """The file at an address, redirects followed. allow_private: machines that the internet does not reach, too (this
    one, private networks, link-local addresses such as those of clouds' metadata).

    A name is resolved once for each request: the connection goes to one of the addresses that were looked at.
    Proxies of the environment are not used. Raises FetchError.
    """
    ends_s = time.monotonic() + timeout_s
    try:
        for _ in range(_MAX_REDIRECTS + 1):
            data, location = _get(urlsplit(url), max_bytes, ends_s, allow_private)
            if location is None:
                return data
            url = urljoin(url, location)
    except (OSError, http.client.HTTPException, ValueError) as error:
        if isinstance(error, TimeoutError) or time.monotonic() >= ends_s:
            raise FetchError(f"it took longer than {timeout_s:.0f} s") from None
        raise FetchError(str(error) or type(error).__name__) from error
    raise FetchError(f"more than {_MAX_REDIRECTS} redirects")


def _get(parts: SplitResult, max_bytes: int, ends_s: float, allow_private: bool) -> tuple[bytes, str | None]:
    """The body, or where it is instead."""
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise FetchError(f"{parts.geturl()[:200]} is no http(s) address")
    connection = _connect(parts, ends_s, allow_private)
    # A socket's timeout is for one read; this is for all of them.
    clock = threading.Timer(_left(ends_s), _shut_down, [connection.sock])
    clock.start()
    try:
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        headers = {"User-Agent": f"headrace/{__version__}", "Accept-Encoding": "identity", "Connection": "close"}
        connection.request("GET", target, headers=headers)
        response = connection.getresponse()
        location = response.getheader("location")
        if response.status in _REDIRECTS and location:
            return b"", location
        if response.status != 200:
            raise FetchError(f"HTTP {response.status} {response.reason}")
        data = response.read(max_bytes + 1)
        _left(ends_s)
        if len(data) > max_bytes:
            raise FetchError(f"it has more than {format_bytes(max_bytes)}")
        if response.length:
            raise FetchError(f"the connection broke off after {len(data)} bytes")
        return data, None
    finally:
        clock.cancel()
        connection.close()


def _connect(parts: SplitResult, ends_s: float, allow_private: bool) -> http.client.HTTPConnection:
    host = parts.hostname
    assert host is not None
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    port = parts.port or (80 if tls is None else 443)
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    if not allow_private and not all(is_public(str(address[0])) for *_, address in found):
        raise FetchError(f"{host} is not at a public address")
    failed = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in found:
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(_left(ends_s))
            sock.connect(address)
            connection = http.client.HTTPConnection(host, port)
            if tls is not None:
                sock = tls.wrap_socket(sock, server_hostname=host)
                connection = http.client.HTTPSConnection(host, port, context=tls)
        except OSError as error:
            sock.close()
            failed = error
            continue
        connection.sock = sock
        return connection
    raise failed


def is_public(address: str) -> bool:
    """True for an address of the internet, also behind the IPv6 spelling of an IPv4 address."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour or _translated(found)
        if inner is not None:
            found = inner
        elif found.teredo is not None:
            return False
        elif found.is_site_local:
            return False
    return found.is_global and not found.is_multicast and not found.is_reserved


def _translated(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address that NAT64's well-known prefix stands before (RFC 6052)."""
    if address in ipaddress.ip_network("64:ff9b::/96"):
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return None


def _shut_down(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _left(ends_s: float) -> float:
    left_s = ends_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s
