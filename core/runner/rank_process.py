"""The process of a rank other than 0: it opens its device, joins the group and does what rank 0 says.

python -m headrace.core.runner.rank_process FD, where FD is the socket to rank 0. The process ends when rank 0
does, or with a Failure when something raises: the group cannot go on without it.
"""

import os
import queue
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..devices import open_device
from ..errors import DeviceUnavailable
from ..models.params import Param
from ..weights.source import LoadedParam
from .ranked import join
from .ranks import Failure, StartRank, receive, send
from .torch import TorchDevice, TorchRunner


class ReceivedParams:
    """A ParamSource of what rank 0 sends: (name, tensors) of each parameter, then None."""

    def __init__(self, own: Mapping[str, Param], inbox: "queue.SimpleQueue[Any]") -> None:
        self._own = own
        self._inbox = inbox

    def params(self) -> Sequence[Param]:
        """This rank's declarations."""
        return tuple(self._own.values())

    def __iter__(self) -> Iterator[LoadedParam]:
        """Each parameter when it comes."""
        while (message := self._inbox.get()) is not None:
            name, tensors = message
            yield LoadedParam(param=self._own[name], tensors=tensors)


class RankProcess:
    """Owns the runner of one rank and its side of the socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def run(self) -> None:
        """Until rank 0 is gone."""
        threading.Thread(target=self._read, name="rank 0", daemon=True).start()
        try:
            self._run(self._inbox.get())
        except BaseException as error:  # noqa: BLE001 - rank 0 raises it
            send(self._socket, Failure(kind=type(error).__name__, text=str(error) or type(error).__name__))
            os._exit(1)

    def _read(self) -> None:
        try:
            while True:
                self._inbox.put(receive(self._socket))
        except (OSError, EOFError):
            os._exit(0)  # whatever the main thread waits for

    def _run(self, start: StartRank) -> None:
        device = open_device(start.engine)
        if not isinstance(device, TorchDevice):
            raise DeviceUnavailable(f"{device.info.id} is no device of torch, which alone has ranks")
        device.group, device.share = join(device, start.config.spec, start.tp_rank, start.tp_size, start.store)
        runner = device.own_runner(start.config)
        send(self._socket, None)
        while True:
            name, *args = self._inbox.get()
            answer = self._call(device, runner, name, args)
            if name != "step":  # its collectives are the answer
                send(self._socket, answer)

    def _call(self, device: TorchDevice, runner: TorchRunner, name: str, args: Sequence[Any]) -> Any:
        assert device.share is not None and device.group is not None, "this rank has joined"
        if name == "load":
            own = {param.name: param for _, param in device.share.params.values()}
            return runner.load(ReceivedParams(own, self._inbox))
        if name == "collective":
            return device.collective(*args)
        answer = getattr(runner, name)(*args)
        return answer if name == "memory" else None


if __name__ == "__main__":
    RankProcess(socket.socket(fileno=int(sys.argv[1]))).run()
