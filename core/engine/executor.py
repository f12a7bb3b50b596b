"""Where plans are carried out: in this process, in a worker, or in a simulation."""

from typing import Any, Protocol

from ..stages import Plan, StepResult


class StepFuture(Protocol):
    """What the step loop needs of a `concurrent.futures.Future`."""

    def done(self) -> bool:
        """True if `result` would not wait."""
        ...

    def result(self, timeout: float | None = None) -> StepResult:
        """Wait for the step. Raises what it raised."""
        ...


class Executor(Protocol):
    """Carries out plans in order. Plans and results are plain data, so an executor may cross processes.

    start: make it ready. submit: begin a step; the future raises DeviceLost or OutOfMemory, or holds a result.
    call: a rare, synchronous request by name ("memory", ...). health: "" or why it cannot work. restart: after
    a failure; all state on the device is gone. close: free everything; may be called twice.
    """

    def start(self) -> None:
        """Make the executor ready for plans."""
        ...

    def submit(self, plan: Plan) -> StepFuture:
        """Begin one step."""
        ...

    def call(self, name: str, *args: Any) -> Any:
        """A rare request, answered synchronously."""
        ...

    def health(self) -> str:
        """Empty if it works, else the reason."""
        ...

    def restart(self) -> None:
        """Begin again with an empty KV cache and no requests."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...
