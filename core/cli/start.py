"""Loads a model for a command, and logs how long it took."""

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
    from ..llm import LLM

    llm = LLM.from_config(config, report=_logger.info)
    _logger.info("ready in %.1f s", time.perf_counter() - started_s)
    return llm
