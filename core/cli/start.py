"""Loads a model for a command, and logs how long it took."""

import gc
import logging
import time
from typing import TYPE_CHECKING

from ..config import EngineConfig, lora_pairs
from ..errors import ConfigError

if TYPE_CHECKING:
    from ..llm import LLM

_logger = logging.getLogger(__name__)


def only_lora(config: EngineConfig) -> str:
    """The name of the adapter that a command answers through, "" for none. Raises ConfigError for several."""
    names = list(lora_pairs(config.model.lora))
    if len(names) > 1:
        raise ConfigError(
            f"this command answers through one adapter, and {len(names)} are given: {', '.join(names)}",
            remedies=["one --lora NAME=FOLDER", "headrace serve, where requests name theirs"],
        )
    return "".join(names)


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
