"""Runs the server: binds the port, loads the model, serves until a signal, drains."""

import asyncio
import contextlib
import errno
import logging
import os
import resource
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import uvicorn
import uvloop

from ..config import EngineConfig, ServerConfig
from ..errors import ConfigError, PortBusy
from .api_errors import ApiError
from .app import make_app
from .connection import Connection
from .server import Server
from .signals import heeded

logger = logging.getLogger(__name__)

_KEEP_ALIVE_S = 65
_LAST_WORDS_S = 2.0
"""What clients get to read the error when the drain's deadline has passed."""
_BACKLOG = 2048
_UNSENT: int | None = getattr(socket, "TCP_NOTSENT_LOWAT", None)
_UNSENT_BYTES = 64 * 1024
"""So much may wait in a connection's socket beside what is on its way: megabytes would hide that nobody reads."""


def serve(config: EngineConfig) -> int:
    """Serve until a signal; the exit code. Raises PortBusy, ConfigError and what loading a model raises."""
    server = Server(config)
    check_tls(config.server)
    sock = bind(config.server.host, config.server.port)
    _raise_file_limit()
    with contextlib.closing(sock):
        return uvloop.run(_Run(config, server, sock).main())


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address. Raises PortBusy or ConfigError."""
    try:
        found = socket.getaddrinfo(host.removeprefix("[").removesuffix("]"), port, type=socket.SOCK_STREAM)
        family, kind, proto, _, address = found[0]
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no name of a host"
        raise ConfigError(
            f"host: {host!r} is no address of this machine: {reason}", remedies=["--host 127.0.0.1", "--host 0.0.0.0"]
        ) from None
    sock = socket.socket(family, kind, proto)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if _UNSENT is not None:
        sock.setsockopt(socket.IPPROTO_TCP, _UNSENT, _UNSENT_BYTES)
    try:
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise PortBusy(
                f"port {port} on {host} is in use",
                remedies=[f"--port {port + 1 if port < 65535 else 0}", "--port 0 takes a free one"],
            ) from None
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    sock.setblocking(False)
    return sock


class _Run:
    """One life of the server: loading, serving, draining. A signal moves it on; a second one hurries it."""

    def __init__(self, config: EngineConfig, server: Server, sock: socket.socket) -> None:
        self._config = config
        self._server = server
        self._socket = sock
        self._signals: list[int] = []
        self._signalled = asyncio.Event()
        self._hurry = asyncio.Event()

    async def main(self) -> int:
        """The exit code."""
        started_s = time.monotonic()
        loop = asyncio.get_running_loop()
        for number in heeded():
            loop.add_signal_handler(number, self._on_signal, number)
        http = _HttpServer(_uvicorn_config(self._config.server, self._server))
        serving = loop.create_task(http.serve(sockets=[self._socket]))
        serving.add_done_callback(lambda _: self._signalled.set())  # a server that ends by itself is over
        try:
            if not await self._load(started_s):
                return self._exit_code()
            await self._until_end()
            await self._drain(http)
        finally:
            http.should_exit = http.force_exit = True
            await self._server.close()
            await serving
        if self._server.engine.state == "failed" or self._server.engine.failed.is_set():
            return 1
        return self._exit_code()

    async def _load(self, started_s: float) -> bool:
        """False if a signal came first."""
        loading = asyncio.ensure_future(self._server.load())
        signalled = asyncio.ensure_future(self._signalled.wait())
        await asyncio.wait([loading, signalled], return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            loading.cancel()
            return False
        signalled.cancel()
        info = loading.result()
        self._announce(info.model, time.monotonic() - started_s)
        return True

    def _announce(self, model: str, seconds: float) -> None:
        server = self._config.server
        scheme = "https" if server.tls_cert else "http"
        host, port = self._socket.getsockname()[:2]
        if ":" in host:
            host = f"[{host}]"
        if host in ("0.0.0.0", "[::]") and not len(self._server.keys):
            logger.warning("anyone who reaches this machine can use the model: set --api-key, or --host 127.0.0.1")
        key = ' -H "Authorization: Bearer $KEY"' if len(self._server.keys) else ""
        url = f"{scheme}://{host}:{port}"
        logger.info("serving %s at %s", model, url)
        route, data = self._server.example()
        logger.info("try: curl %s%s%s %s", url, route, key, data)
        logger.info("ready in %.1f s", seconds)

    async def _until_end(self) -> None:
        waits = [asyncio.ensure_future(event.wait()) for event in (self._signalled, self._server.engine.failed)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    async def _drain(self, http: "_HttpServer") -> None:
        """Stop accepting, let what runs finish until the deadline, then end it with an error."""
        server, timeout_s = self._server, self._config.server.drain_timeout_s
        server.is_draining = True
        server.feed.close()
        if server.engine.num_unfinished:
            fields = {"requests": server.engine.num_unfinished, "seconds": timeout_s}
            logger.info("draining; the signal again ends it now", extra={"fields": fields})
        http.should_exit = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while server.engine.num_unfinished and not self._hurry.is_set():
                    await asyncio.sleep(0.02)
        server.engine.fail_all(ApiError(503, "the server is shutting down", code="shutting_down"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                while http.has_open_responses():
                    await asyncio.sleep(0.02)

    def _exit_code(self) -> int:
        """0 after SIGTERM, as those who stop services expect it; else as shells count signals."""
        others = [number for number in self._signals if number != signal.SIGTERM]
        return 128 + others[0] if others else 0

    def _on_signal(self, number: int) -> None:
        if len(self._signals) >= 2:
            os._exit(128 + number)
        self._signals.append(number)
        (self._hurry if self._signalled.is_set() else self._signalled).set()


class _HttpServer(uvicorn.Server):
    """uvicorn without signal handlers of its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield

    def has_open_responses(self) -> bool:
        """True while a response is being sent."""
        return bool(self.server_state.tasks)


def _uvicorn_config(config: ServerConfig, server: Server) -> uvicorn.Config:
    return uvicorn.Config(
        make_app(server),
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        ssl_certfile=config.tls_cert or None,
        ssl_keyfile=config.tls_key or None,
    )


def check_tls(config: ServerConfig) -> None:
    """Raise ConfigError for a certificate and key that cannot be used."""
    if bool(config.tls_cert) != bool(config.tls_key):
        raise ConfigError("TLS needs both --tls-cert and --tls-key")
    if not config.tls_cert:
        return
    for name in ("tls_cert", "tls_key"):
        path = getattr(config, name)
        try:
            Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(f"{name}: {path} cannot be read: {error.strerror}") from None

    def no_password() -> str:
        raise ConfigError(
            f"tls_key: {config.tls_key} is encrypted, and a server has nobody to ask for its password",
            remedies=[f"openssl pkey -in {config.tls_key} -out FILE"],
        )

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.tls_cert, config.tls_key, no_password)
    except OSError as error:  # an SSLError among them
        what = error.reason if isinstance(error, ssl.SSLError) and error.reason else "no certificate and key in PEM"
        raise ConfigError(
            f"tls_cert {config.tls_cert} and tls_key {config.tls_key} cannot be used: {what}",
            remedies=["a PEM file with the certificate chain, and one with the private key of its first certificate"],
        ) from None


def _raise_file_limit() -> None:
    """Each connection takes a file descriptor; take as many as we may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
