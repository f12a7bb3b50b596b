"""Steps under way: one that has already run, and one whose results are on their way to the host."""

from collections.abc import Callable
from typing import Any

from ..stages import IntArray, StepOutput


class Done:
    """A Pending whose output is there."""

    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def ready(self) -> bool:
        """Always true."""
        return True

    def result(self) -> StepOutput:
        """The output, at once."""
        return self._output


class Arriving:
    """A Pending whose results are being copied to the host."""

    def __init__(self, host: Any, arrived: Any, finish: Callable[[IntArray], StepOutput]) -> None:
        """host: the torch tensor that the copy fills. arrived: an event of the device's library behind the copy."""
        self._host = host
        self._arrived = arrived
        self._finish = finish

    def ready(self) -> bool:
        """True if the copy is done."""
        return bool(self._arrived.query())

    def result(self) -> StepOutput:
        """Wait for the copy."""
        self._arrived.synchronize()
        return self._finish(self._host.numpy())
