"""A conversation with a server that speaks OpenAI's API: just what `chat --url` needs, over the standard library."""

import http.client
import json
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..errors import HeadraceError, ModelNotFound, RequestError
from ..json_text import parse_json
from .address import parse_address
from .output import visible

_TIMEOUT_S = 600.0


class Stopped(Exception):
    """Ctrl-C in the midst of an answer."""


class RemoteChat:
    """A model behind a URL such as http://127.0.0.1:8000 (with or without /v1). Each answer is a connection."""

    def __init__(self, url: str, *, model: str = "", api_key: str = "") -> None:
        """model: "" takes the first that the server lists. api_key: "" takes HEADRACE_API_KEY or OPENAI_API_KEY.
        Raises ConfigError, HeadraceError if the server cannot be reached, ModelNotFound if it has no model."""
        address = parse_address(url)
        self._scheme, self._host, self._port = address.scheme, address.host, address.port
        self._root = address.root
        key = api_key or os.environ.get("HEADRACE_API_KEY", "") or os.environ.get("OPENAI_API_KEY", "")
        self._headers = {"content-type": "application/json"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"
        self.model = model or self._first_model()

    def stream(self, messages: Sequence[dict[str, str]], sampling: dict[str, Any]) -> Iterator[str]:
        """Pieces of the answer. Raises RequestError for what the server refuses or breaks off; closing the
        iterator closes the connection, which ends the request there."""
        body = {"model": self.model, "messages": list(messages), "stream": True, **sampling}
        connection, response = self._request("POST", "/chat/completions", body)
        try:
            for line in response:
                if not line.startswith(b"data: "):
                    continue
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    return
                event = parse_json(data)
                if "error" in event:
                    raise RequestError(f"the server broke the answer off: {_message(event)}")
                for choice in event.get("choices", ()):
                    yield str((choice.get("delta") or {}).get("content") or "")
        except (ValueError, TypeError, AttributeError) as error:
            raise RequestError("what the server sends is no stream of OpenAI's API") from error
        except (OSError, http.client.HTTPException) as error:
            raise RequestError(f"the connection broke off: {error}") from error
        finally:
            connection.close()

    def _first_model(self) -> str:
        connection, response = self._request("GET", "/models", None)
        try:
            with connection_closed(connection):
                models = parse_json(response.read()).get("data", [])
            if not models:
                raise ModelNotFound(f"the server at {self._host} lists no model")
            return str(models[0]["id"])
        except (ValueError, TypeError, KeyError, AttributeError, OSError, http.client.HTTPException) as error:
            raise HeadraceError(
                f"what is at {self._scheme}://{self._host}:{connection.port} lists no models as OpenAI's API does",
                remedies=["headrace serve MODEL", "--url http://HOST:PORT"],
            ) from error

    def _request(
        self, method: str, path: str, body: Any
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._scheme == "https" else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=_TIMEOUT_S)
        try:
            content = None if body is None else json.dumps(body).encode()
            connection.request(method, self._root + path, body=content, headers=self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise RequestError(f"the server answers {response.status}: {_message(_json(response.read()))}")
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise HeadraceError(
                f"no server at {self._scheme}://{self._host}:{connection.port}: {_one_line(error)}",
                remedies=["headrace serve MODEL", "--url http://HOST:PORT"],
            ) from error
        except BaseException:
            connection.close()
            raise
        return connection, response


@contextmanager
def connection_closed(connection: http.client.HTTPConnection) -> Iterator[None]:
    """Close the connection at the end of the block."""
    try:
        yield
    finally:
        connection.close()


@contextmanager
def stopped_by_interrupt() -> Iterator[None]:
    """In the block Ctrl-C raises Stopped, also out of a read that waits."""

    def stop(_signal: int, _frame: Any) -> None:
        raise Stopped

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _json(data: bytes) -> Any:
    try:
        return parse_json(data)
    except ValueError:
        return data.decode("utf-8", "replace")


def _message(answer: Any) -> str:
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    return _one_line(error.get("message", error) if isinstance(error, dict) else error)


def _one_line(value: object) -> str:
    """For a message: a page of HTML, say, without its line breaks and its end."""
    text = visible(" ".join(str(value).split()))
    return text if len(text) <= 300 else f"{text[:300]}..."
