"""How one request is sampled and when it ends. Names and meanings are vLLM's."""

import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import RequestError
from ..other_names import known_names
from ..structured.params import StructuredOutputParams

GREEDY_EPSILON = 1e-5
"""Temperatures below this are greedy: the highest logit wins, without noise."""
MAX_COMPLETIONS = 4096
"""Of one prompt, and of one request to a server with all its prompts: all of them are held at once."""
MAX_FACTOR = 1e6
"""Temperature, and repetition_penalty or its inverse, at most: beyond it logits lose themselves in 32 bits."""


@known_names
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of one request; validated when made, never changed. Raises RequestError."""

    n: int = 1
    """completions of the prompt"""
    max_tokens: int | None = None
    """output tokens at most; None is up to max_model_len"""
    min_tokens: int = 0
    """output tokens before an end of sequence or a stop may end the request"""
    temperature: float = 1.0
    """0 is greedy"""
    top_p: float = 1.0
    """keep the smallest set of tokens whose probability reaches this"""
    top_k: int = 0
    """keep this many tokens; 0 or -1 keeps all"""
    min_p: float = 0.0
    """drop tokens below this fraction of the most likely token's probability"""
    presence_penalty: float = 0.0
    """subtracted once from the logit of each token that the output has; -2 to 2"""
    frequency_penalty: float = 0.0
    """subtracted per occurrence in the output; -2 to 2"""
    repetition_penalty: float = 1.0
    """divides positive and multiplies negative logits of tokens in prompt or output"""
    seed: int | None = None
    """same seed, same tokens; None takes one when the request is admitted"""
    stop: Sequence[str] = ()
    """end when one of these appears in the text"""
    stop_token_ids: Sequence[int] = ()
    """end after one of these tokens"""
    ignore_eos: bool = False
    """go on after an end-of-sequence token"""
    include_stop_str_in_output: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """token id -> value added to its logit"""
    allowed_token_ids: Sequence[int] | None = None
    """only these tokens may be sampled; None allows all"""
    bad_words: Sequence[str] = ()
    """texts whose token sequence must not be completed"""
    logprobs: int | None = None
    """log probabilities of the chosen token and this many most likely ones"""
    prompt_logprobs: int | None = None
    """the same for each token of the prompt"""
    skip_special_tokens: bool = True
    detokenize: bool = True
    logits_processors: Sequence[str] = ()
    """names of logits processors that plugins supply"""
    extra_args: Mapping[str, Any] = field(default_factory=dict)
    """arguments for those plugins"""
    structured_output: StructuredOutputParams | None = None
    """the form of the output, which ends where that does; None: any text"""

    def __post_init__(self) -> None:
        self._normalise()
        self._check_types()
        _check(self.n >= 1, "n must be at least 1", self.n)
        max_tokens = self.max_tokens
        _check(max_tokens is None or max_tokens >= 0, "max_tokens must not be negative", max_tokens)
        _check(self.min_tokens >= 0, "min_tokens must not be negative", self.min_tokens)
        if max_tokens is not None:
            _check(self.min_tokens <= max_tokens, "min_tokens must not exceed max_tokens", self.min_tokens)
        _check(self.temperature >= 0, "temperature must be 0 or more", self.temperature)
        _check(self.temperature <= MAX_FACTOR, f"temperature must be at most {MAX_FACTOR:.0f}", self.temperature)
        _check(0 < self.top_p <= 1, "top_p must be in (0, 1]", self.top_p)
        _check(self.top_k >= -1, "top_k must be -1, 0 or more", self.top_k)
        _check(0 <= self.min_p <= 1, "min_p must be in [0, 1]", self.min_p)
        _check(-2 <= self.presence_penalty <= 2, "presence_penalty must be in [-2, 2]", self.presence_penalty)
        _check(-2 <= self.frequency_penalty <= 2, "frequency_penalty must be in [-2, 2]", self.frequency_penalty)
        penalty = self.repetition_penalty
        _check(penalty > 0, "repetition_penalty must be above 0", penalty)
        limits = f"from {1 / MAX_FACTOR:f} to {MAX_FACTOR:.0f}"
        _check(1 / MAX_FACTOR <= penalty <= MAX_FACTOR, f"repetition_penalty must be {limits}", penalty)
        _check(all(self.stop), "stop strings must not be empty", list(self.stop))
        _check(all(word.strip(" ") for word in self.bad_words), "bad_words must not be empty", list(self.bad_words))
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _check(value is None or value >= 0, f"{name} must be None, 0 or more", value)
        finite = all(abs(v) <= 1e4 or v == float("-inf") for v in self.logit_bias.values())
        _check(finite, "logit_bias values must be finite", dict(self.logit_bias))
        if self.seed is not None:
            _check(-(2**63) <= self.seed < 2**64, "seed must fit in 64 bits", self.seed)

    @property
    def is_greedy(self) -> bool:
        """True if the highest logit wins."""
        return self.temperature < GREEDY_EPSILON

    def _normalise(self) -> None:
        """One string for a list of one, None for an empty collection, text keys for token ids, as in JSON."""
        for name in ("stop", "bad_words", "logits_processors"):
            if isinstance(getattr(self, name), str):
                object.__setattr__(self, name, (getattr(self, name),))
        for name in _SEQUENCES:
            value = getattr(self, name)
            is_list = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
            _check(value is None or is_list, f"{name} must be a list", value)
            if value is not None or name not in _OPTIONAL:
                object.__setattr__(self, name, () if value is None else tuple(value))
        _check(self.allowed_token_ids != (), "allowed_token_ids must name a token, or be None", [])
        for name in ("logit_bias", "extra_args"):
            value = getattr(self, name)
            _check(value is None or isinstance(value, Mapping), f"{name} must be a mapping", value)
            object.__setattr__(self, name, dict(value or {}))
        form: Any = self.structured_output
        if isinstance(form, Mapping):
            _check(set(form) <= {"kind", "value", "label"}, "structured_output must have kind and value", dict(form))
            form = StructuredOutputParams(**{"kind": "", **form})
            object.__setattr__(self, "structured_output", form)
        is_form = form is None or isinstance(form, StructuredOutputParams)
        _check(is_form, "structured_output must be StructuredOutputParams", form)
        try:
            biases = {_token_id(token): _number(value) for token, value in self.logit_bias.items()}
            object.__setattr__(self, "logit_bias", biases)
        except (TypeError, ValueError, OverflowError):
            _check(False, "logit_bias must map token ids to numbers", dict(self.logit_bias))

    def _check_types(self) -> None:
        for name in (*_WHOLE, *_REAL):
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            kind, what = (numbers.Integral, "a whole number") if name in _WHOLE else (numbers.Real, "a number")
            _check(isinstance(value, kind) and not isinstance(value, bool), f"{name} must be {what}", value)
            object.__setattr__(self, name, int(value) if name in _WHOLE else _float(value))  # numpy's become Python's
        for name in _FLAGS:
            value = getattr(self, name)
            is_flag = isinstance(value, bool | np.bool_) or (isinstance(value, numbers.Integral) and value in (0, 1))
            _check(is_flag, f"{name} must be true or false", value)
            object.__setattr__(self, name, bool(value))
        for name in _TEXTS:
            values = getattr(self, name)
            _check(all(isinstance(value, str) for value in values), f"{name} must hold texts", list(values))
        for name in _IDS:
            values = getattr(self, name)
            if values is None:
                continue
            is_right = all(isinstance(value, numbers.Integral) and not isinstance(value, bool) for value in values)
            _check(is_right, f"{name} must hold token ids", list(values))
            object.__setattr__(self, name, tuple(int(value) for value in values))


_TEXTS = ("stop", "bad_words", "logits_processors")
_IDS = ("stop_token_ids", "allowed_token_ids")
_SEQUENCES = (*_TEXTS, *_IDS)
_OPTIONAL = ("max_tokens", "seed", "logprobs", "prompt_logprobs", "allowed_token_ids")
_WHOLE = ("n", "max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs")
_REAL = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize")


def _token_id(value: object) -> int:
    """A key of logit_bias, which JSON makes a text. Raises TypeError or ValueError."""
    if isinstance(value, bool) or not isinstance(value, str | numbers.Integral):
        raise TypeError(f"{value!r} is no token id")
    return int(value)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{value!r} is no number")
    return float(value)


def _float(value: numbers.Real) -> float:
    """A number that may be an integer beyond a float's range."""
    try:
        return float(value)
    except OverflowError:
        return float("inf")


def _check(ok: bool, rule: str, value: object) -> None:
    if not ok:
        raise RequestError(f"{rule}, got {value!r:.300}", code="invalid_sampling_params")
