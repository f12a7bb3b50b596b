"""Offers Whisper's rules for timestamps as a logits processor, through the door that others use."""

from collections.abc import Callable, Mapping

from headrace.core.audio.timestamps import NAME, WhisperRules
from headrace.core.hooks import hookimpl


@hookimpl
def headrace_logits_processors() -> Mapping[str, Callable[..., WhisperRules]]:
    """One processor; its arguments are in extra_args["whisper"]."""
    return {NAME: WhisperRules}
