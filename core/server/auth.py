"""API keys: deny by default, compared in constant time."""

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..config import ServerConfig
from ..errors import ConfigError
from .api_errors import ApiError

PAGE_ROUTE = "/"
PUBLIC_ROUTES = ("/livez", "/readyz", "/health", "/version", "/openapi.json", PAGE_ROUTE)
"""Routes that need no key: they tell nothing about requests, and probes cannot send one. The page asks for it."""


class KeyRing:
    """The keys that are let in. Keys are kept and compared as digests, so that neither length nor place of the first
    difference shows in the time it takes. Without keys everyone is let in, as one user."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = {_digest(key): f"key-{index}" for index, key in enumerate(dict.fromkeys(keys))}

    def __len__(self) -> int:
        return len(self._digests)

    def user(self, headers: Mapping[str, str]) -> str:
        """A short name for whoever sends these headers (Authorization: Bearer, or x-api-key). Raises ApiError 401."""
        if not self._digests:
            return ""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not given.strip():
            given = headers.get("x-api-key", "")
        digest, found = _digest(given.strip()), ""
        for known, name in self._digests.items():
            if hmac.compare_digest(known, digest):
                found = name
        if not found:
            reason = "the API key is not known" if given else "an API key is needed: Authorization: Bearer KEY"
            raise ApiError(401, reason, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return found


def read_keys(config: ServerConfig) -> KeyRing:
    """The keys of option and file. Raises ConfigError for a file that cannot be read or holds none."""
    keys = [_checked(config.api_key, "api_key")] if config.api_key else []
    if config.api_key_file:
        try:
            lines = Path(config.api_key_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"api_key_file: {config.api_key_file} cannot be read: {reason}") from None
        found = [
            _checked(line.strip(), f"api_key_file: line {number} of {config.api_key_file}")
            for number, line in enumerate(lines, 1)
            if line.strip() and not line.lstrip().startswith("#")
        ]
        if not found:
            raise ConfigError(f"api_key_file: {config.api_key_file} holds no key")
        keys += found
    return KeyRing(keys)


def _checked(key: str, where: str) -> str:
    """A key that a header can carry. Raises ConfigError, which does not show it."""
    if not all("!" <= char <= "~" for char in key):
        raise ConfigError(f"{where}: a key is printable ASCII without blanks; headers carry nothing else safely")
    return key


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
