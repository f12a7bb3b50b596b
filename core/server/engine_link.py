"""One engine process and the socket to it."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any, cast

import msgspec

from .frames import FrameSplitter, Start, Stop, ToEngine, ToFront, pack

_NUM_SPARE = 12
"""A start takes a pair of sockets, a pipe for errors and /dev/null; the rest is for what the loop does beside."""

_decoder: msgspec.msgpack.Decoder[ToFront] = msgspec.msgpack.Decoder(ToFront)


class EngineLink(asyncio.Protocol):
    """Owns a process. on_message gets its messages, on_lost is called once, when the process or the socket is
    gone; nothing is called after `stop` or `kill`."""

    def __init__(self, on_message: Callable[[ToFront], None], on_lost: Callable[["EngineLink"], None]) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._splitter = FrameSplitter()
        self._transport: asyncio.Transport | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    @property
    def pid(self) -> int:
        """The process' id."""
        assert self._process is not None
        return self._process.pid

    async def start(self, options: dict[str, Any]) -> None:
        """Start a process that builds an engine from these options. Raises OSError."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                # In a process group of its own, it does not hear the terminal's Ctrl-C.
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", f"{__package__}.engine_process", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=sys.stderr.fileno() if _has_fileno(sys.stderr) else None,
                    pass_fds=[theirs.fileno()],
                    process_group=0,
                )
            ours.setblocking(False)
            await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=ours)
        except BaseException:
            ours.close()
            self.kill()
            raise
        self.send(Start(options=options))

    def send(self, message: ToEngine) -> None:
        """Send a message; one to a process that is gone is lost, which on_lost tells."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(pack(message))

    async def stop(self, timeout_s: float) -> None:
        """Ask the process to end, and kill it if it does not."""
        self._is_closed = True
        self.send(Stop())
        if self._process is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    while self._process.poll() is None:
                        await asyncio.sleep(0.01)
        self.kill()

    def end_process(self) -> None:
        """Kill the process, which on_lost will tell as if it had died by itself."""
        assert self._process is not None
        self._process.kill()

    def kill(self) -> None:
        """End the process at once."""
        self._is_closed = True
        if self._transport is not None:
            self._transport.abort()
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    async def exit_status(self) -> str:
        """How the process ended, in words; it is killed if it only closed its socket."""
        assert self._process is not None
        for _ in range(100):
            if self._process.poll() is not None:
                break
            await asyncio.sleep(0.01)
        else:
            self._process.kill()
            self._process.wait()
        code = self._process.returncode
        if code >= 0:
            return f"exit code {code}"
        return f"signal {signal.Signals(-code).name}" if -code in set(signal.Signals) else f"signal {-code}"

    # ---- asyncio.Protocol -------------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is in the loop's hands."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Frames, or parts of them."""
        for frame in self._splitter.push(data):
            if self._is_closed:
                return
            self._on_message(_decoder.decode(frame))

    def connection_lost(self, exc: Exception | None) -> None:
        """The process is gone."""
        if not self._is_closed:
            self._is_closed = True
            self._on_lost(self)


class SpareFiles:
    """Owns file descriptors that are kept for the start of another process: clients may have taken all others."""

    def __init__(self) -> None:
        self._files: list[int] = []

    def keep(self) -> None:
        """Take those that are missing, as far as there are any."""
        with contextlib.suppress(OSError):
            while len(self._files) < _NUM_SPARE:
                self._files.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def release(self) -> None:
        """Make room for what comes next in the same turn of the event loop."""
        while self._files:
            os.close(self._files.pop())


def _has_fileno(stream: Any) -> bool:
    try:
        stream.fileno()
    except (AttributeError, OSError, ValueError):
        return False
    return True
