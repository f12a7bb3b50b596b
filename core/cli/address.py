"""The address of a server as users type it."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from ..errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Of a server of OpenAI's API. port: None for the scheme's own; root: where its routes begin, with /v1."""

    scheme: str
    host: str
    port: int | None
    netloc: str
    root: str


def parse_address(url: str) -> Address:
    """`"http://127.0.0.1:8000"`, with or without scheme and /v1. Raises ConfigError."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = parts.hostname, parts.port
    except ValueError:  # a port beyond 65535, brackets that do not close
        host = port = None
    if not host or parts.scheme not in ("http", "https") or not url.isprintable() or " " in url:
        raise ConfigError(f"{url!r} is not an address of a server", remedies=["http://127.0.0.1:8000"])
    root = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
    return Address(scheme=parts.scheme, host=host, port=port, netloc=parts.netloc, root=root)
