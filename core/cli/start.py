"""Loads a model for a command, and logs how long it took."""

import gc
import logging
import time
from typing import TYPE_CHECKING

from ..config import EngineConfig

if TYPE_CHECKING:
    from ..llm import LLM

_logger = logging.getLogger(__name__)


def start_llm(config: EngineConfig) -> "LLM":
    """The loaded model; downloads and choices are logged on the way. Raises what `LLM` raises."""
    started_s = time.perf_counter()
    # Nothing of what a start allocates is garbage, but the collector would walk it a hundred times.
    gc.disable()
    try:
        from ..llm import LLM

        llm = LLM.from_config(config, report=_logger.info)
    finally:
        gc.freeze()
        gc.enable()
    _logger.info("ready in %.1f s", time.perf_counter() - started_s)
    return llm
