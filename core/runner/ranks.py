"""The processes of the other ranks: started, told what to do, and watched.

Rank 0 is the engine's own process. The others run rank_process.py; each has a socket to it, on which messages are
pickled objects between a parent and a child of one program. What ranks compute meets in torch.distributed.
"""

import contextlib
import dataclasses
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from ..config import EngineConfig
from ..errors import DeviceLost, HeadraceError, OutOfMemory
from ..platform import RunnerConfig

_COUNT = struct.Struct("<Q")
_END_S = 5.0
"""How long a rank may take to end, or to say why it did, before it is killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRank:
    """A rank's first message. store: the file in which the ranks meet."""

    tp_rank: int
    tp_size: int
    engine: EngineConfig  # whose device is the rank's own
    config: RunnerConfig  # of the whole model
    store: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What a rank says before it ends: the class of an error and its text."""

    kind: str
    text: str


class Ranks:
    """Owns the processes of ranks 1 to tp_size - 1. All messages go to all of them.

    Invariant: after one has died all are killed, `error` says which and why, and every call raises that.
    """

    def __init__(self, devices: Sequence[str], on_death: Callable[[], None]) -> None:
        """devices: --device of every rank; that of rank 0 is opened already. on_death: called when one has died, so
        that whoever waits for it in a collective gives up."""
        self.devices = tuple(devices)
        self.error: HeadraceError | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-ranks-")
        self._on_death = on_death
        self._processes: list[subprocess.Popen[bytes]] = []
        self._sockets: list[socket.socket] = []
        self._reading: list[threading.Lock] = []
        self._failures: dict[int, Failure] = {}
        self._is_closing = False

    @property
    def store(self) -> str:
        """The file in which the ranks meet."""
        return str(Path(self._folder.name) / "store")

    def start(self, engine: EngineConfig, config: RunnerConfig) -> None:
        """Start the processes; they join the group while the caller does."""
        for tp_rank, device in enumerate(self.devices[1:], 1):
            ours, theirs = socket.socketpair()
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", f"{__package__}.rank_process", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    process_group=0,  # so that it does not hear the terminal's Ctrl-C
                )
            self._processes.append(process)
            self._sockets.append(ours)
            self._reading.append(threading.Lock())
            own = dataclasses.replace(engine.device, device=device, tensor_parallel_size=1)
            message = StartRank(
                tp_rank=tp_rank,
                tp_size=len(self.devices),
                engine=dataclasses.replace(engine, device=own),
                config=config,
                store=self.store,
            )
            send(ours, message)
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def tell(self, message: Any) -> None:
        """Send a message to every rank. Raises what ended one."""
        self.tell_each([message] * len(self._sockets))

    def tell_each(self, messages: Sequence[Any]) -> None:
        """Send each rank from 1 on a message of its own. Raises what ended one."""
        if self.error is not None:
            raise self.error
        try:
            for sock, message in zip(self._sockets, messages, strict=True):
                send(sock, message)
        except OSError:
            raise self.lost() from None

    def answers(self) -> list[Any]:
        """One message from each rank. Raises what ended one."""
        found = []
        for n in range(len(self._sockets)):
            message = self._receive(n)
            if isinstance(message, Failure):
                raise self.lost()
            found.append(message)
        return found

    def lost(self, within_s: float = _END_S) -> HeadraceError:
        """What ended a rank; waits until that is known."""
        deadline_s = time.monotonic() + within_s
        while self.error is None and time.monotonic() < deadline_s:
            time.sleep(0.01)
        return self.error or DeviceLost("a rank does not answer any more")

    def close(self) -> None:
        """End the processes; may be called twice."""
        self._is_closing = True
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # a rank ends when its socket does
            sock.close()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
        self._kill()
        self._folder.cleanup()

    def _receive(self, n: int) -> Any:
        """The next message of rank n + 1; its Failure if it has ended, with or without a word."""
        with self._reading[n]:
            if n not in self._failures:
                try:
                    message = receive(self._sockets[n])
                except (OSError, EOFError, pickle.UnpicklingError):
                    message = Failure(kind="", text="")
                if not isinstance(message, Failure):
                    return message
                self._failures[n] = message
            return self._failures[n]

    def _watch(self) -> None:
        """Wait for the first process to end: the others may wait for it in a collective for ever."""
        handles = {os.pidfd_open(process.pid): n for n, process in enumerate(self._processes)}
        ended = [handles[handle] for handle in wait(list(handles)) if isinstance(handle, int)]
        for handle in handles:
            os.close(handle)
        if not self._is_closing:
            self.error = self._describe(ended[0])
            self._kill()
            self._on_death()

    def _describe(self, n: int) -> HeadraceError:
        code = self._processes[n].wait()
        message = self._receive(n)
        while not isinstance(message, Failure):  # an answer that nobody has read
            message = self._receive(n)
        name = f"rank {n + 1} of {len(self.devices)} ({self.devices[n + 1]})"
        if message.text:
            kind = OutOfMemory if message.kind == OutOfMemory.__name__ else DeviceLost
            return kind(f"{name} failed: {message.text}")
        cause = f"exit code {code}"
        if code < 0:
            cause = f"signal {signal.Signals(-code).name}" if -code in set(signal.Signals) else f"signal {-code}"
        return DeviceLost(f"{name} died: {cause}")

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def send(sock: socket.socket, message: Any) -> None:
    """Write one message; arrays go from where they lie."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    views = [memoryview(data), *(buffer.raw() for buffer in buffers)]
    sock.sendall(_COUNT.pack(len(views)) + b"".join(_COUNT.pack(view.nbytes) for view in views))
    for view in views:
        sock.sendall(view)


def receive(sock: socket.socket) -> Any:
    """Read one message. Raises EOFError if the other side is gone."""
    (count,) = _COUNT.unpack(_read(sock, _COUNT.size))
    sizes = [size for (size,) in _COUNT.iter_unpack(_read(sock, count * _COUNT.size))]
    data, *buffers = (_read(sock, size) for size in sizes)
    return pickle.loads(data, buffers=buffers)


def _read(sock: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = sock.recv_into(view)
        if not count:
            raise EOFError("the other side is gone")
        view = view[count:]
    return data
