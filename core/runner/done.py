"""A step that has already run, for runners that work synchronously."""

from ..stages import StepOutput


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
