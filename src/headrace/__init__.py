"""headrace serves language models on whatever accelerator is in the machine."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "HeadraceError",
    "Logprob",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputParams",
    "TranscriptionParams",
    "__version__",
]

if TYPE_CHECKING:
    from .core.audio.whisper import TranscriptionParams
    from .core.beam_search import BeamSearchParams
    from .core.errors import HeadraceError
    from .core.llm import LLM
    from .core.pooling.params import PoolingParams
    from .core.sampling.params import SamplingParams
    from .core.stages import CompletionOutput, Logprob, RequestOutput
    from .core.structured.params import StructuredOutputParams
else:
    # `import headrace` must stay cheap: each public name is imported when it is first used (PEP 562).
    _EXPORTS = {
        "LLM": ".core.llm",
        "BeamSearchParams": ".core.beam_search",
        "SamplingParams": ".core.sampling.params",
        "PoolingParams": ".core.pooling.params",
        "RequestOutput": ".core.stages",
        "CompletionOutput": ".core.stages",
        "Logprob": ".core.stages",
        "HeadraceError": ".core.errors",
        "StructuredOutputParams": ".core.structured.params",
        "TranscriptionParams": ".core.audio.whisper",
    }

    def __getattr__(name: str) -> Any:
        if name not in _EXPORTS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        value = getattr(import_module(_EXPORTS[name], __name__), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted(__all__)
