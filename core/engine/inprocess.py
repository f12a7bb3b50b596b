"""The executor that runs the model in the engine's own process."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ..runner.runner import ModelRunner, RunningStep
from ..stages import Plan, StepResult
from .executor import StepFuture


class InProcessExecutor:
    """Owns one ModelRunner. Steps run in the order of submission, as far ahead as the device allows."""

    def __init__(self, runner: ModelRunner, num_blocks: tuple[int, ...]) -> None:
        self._runner = runner
        self._num_blocks = num_blocks
        self._health = ""

    def start(self) -> None:
        """Allocate the KV cache and warm up."""
        self._runner.runner.kv_init(self._num_blocks)
        self._runner.runner.warmup()

    def submit(self, plan: Plan) -> StepFuture:
        """Begin a step; whatever it raises is in the future."""
        try:
            return _StepFuture(self._runner.submit(plan))
        except Exception as error:  # noqa: BLE001 - handed to whoever waits for the step
            failed: Future[StepResult] = Future()
            failed.set_exception(error)
            return failed

    def call(self, name: str, *args: Any) -> Any:
        """Rare requests by name: "memory", "load_adapter" (its place, its parameters)."""
        runner = self._runner.runner
        calls: dict[str, Callable[..., Any]] = {"memory": runner.memory, "load_adapter": runner.load_adapter}
        return calls[name](*args)

    def health(self) -> str:
        """Empty: an executor in this process lives as long as the process."""
        return self._health

    def restart(self) -> None:
        """Begin again with an empty KV cache."""
        self._runner.reset()
        self._runner.runner.kv_init(self._num_blocks)

    def close(self) -> None:
        """Free the device."""
        self._health = "closed"
        self._runner.close()


class _StepFuture:
    """Resolved when somebody asks for the result: the device works on meanwhile. Needs no lock, unlike Future."""

    def __init__(self, step: RunningStep) -> None:
        self._step: RunningStep | None = step
        self._result: StepResult | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        return self._step is None or self._step.ready()

    def result(self, timeout: float | None = None) -> StepResult:
        step, self._step = self._step, None
        if step is not None:
            try:
                self._result = step.result()
            except BaseException as error:
                self._error = error
                raise
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result
