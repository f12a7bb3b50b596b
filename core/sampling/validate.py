"""What sampling parameters must keep to that depends on the model and the engine."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..errors import RequestError
from ..structured.compiler import GrammarCache
from ..suggest import did_you_mean
from .params import SamplingParams

MAX_LOGPROBS = 20
"""Most likely tokens whose log probabilities a request may ask for, as in vLLM and OpenAI's API."""

ProcessorFactories = Mapping[str, Callable[..., Any]]
"""Logits processors by name: (sampling_params, prompt_token_ids) -> f(output_token_ids, logits) -> logits."""


def validate_params(
    params: SamplingParams,
    *,
    vocab_size: int,
    processors: ProcessorFactories,
    max_model_len: int,
    grammars: GrammarCache | None = None,
) -> None:
    """Raise RequestError for token ids outside the vocabulary, unknown logits processors, too many log
    probabilities, limits that the model's length cannot meet, and grammars that cannot be compiled."""
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        _check_ids(name, getattr(params, name) or (), vocab_size)
    for name in ("logprobs", "prompt_logprobs"):
        wanted = getattr(params, name)
        if wanted is not None and wanted > MAX_LOGPROBS:
            raise RequestError(f"{name} may be at most {MAX_LOGPROBS}, got {wanted}", code="invalid_sampling_params")
    for name in params.logits_processors:
        if name not in processors:
            known = ", ".join(sorted(processors)) or "none is installed"
            raise RequestError(
                f"no logits processor {name!r}{did_you_mean(name, processors)}; known: {known}",
                code="unknown_logits_processor",
            )
        _try_factory(name, processors[name], params)
    if params.stop and not params.detokenize:
        raise RequestError("stop strings need text, and detokenize is off", code="invalid_sampling_params")
    if params.min_tokens >= max_model_len:
        raise RequestError(
            f"min_tokens {params.min_tokens} cannot be reached with max_model_len {max_model_len}",
            code="invalid_sampling_params",
        )
    if params.structured_output is not None:
        if grammars is None:
            raise RequestError(
                "structured output needs a tokenizer (see skip_tokenizer_init) and a plugin that compiles grammars",
                code="structured_output_unavailable",
                remedies=("load the model with its tokenizer", "pip install llguidance"),
            )
        grammars.compile(params.structured_output)


def _try_factory(name: str, factory: Callable[..., Any], params: SamplingParams) -> None:
    # Wrong extra_args must fail here, not in the middle of a step that others share.
    try:
        factory(params, ())
    except RequestError:
        raise
    except Exception as error:  # a plugin's code; its failure is this request's alone
        raise RequestError(
            f"logits processor {name!r} does not take this request: {type(error).__name__}: {error}",
            code="invalid_sampling_params",
        ) from error


def _check_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token in token_ids:
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"{name} has the token id {token}, which is outside the vocabulary of {vocab_size}",
                code="invalid_sampling_params",
            )
