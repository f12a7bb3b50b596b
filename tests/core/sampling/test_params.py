"""What SamplingParams and validate_params refuse, and why."""

from typing import Any

import numpy as np
import pytest

from headrace.core.errors import RequestError
from headrace.core.sampling.params import SamplingParams
from headrace.core.sampling.validate import validate_params


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n": 0}, "n must be at least 1, got 0"),
        ({"n": True}, "n must be a whole number, got True"),
        ({"max_tokens": -1}, "max_tokens must not be negative"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens must not exceed max_tokens"),
        ({"max_tokens": 3.5}, "max_tokens must be a whole number, got 3.5"),
        ({"temperature": -0.1}, "temperature must be 0 or more"),
        ({"temperature": float("nan")}, "temperature must be 0 or more, got nan"),
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({"temperature": None}, "temperature must be a number, got None"),
        ({"top_p": 0}, "top_p must be in"),
        ({"top_k": -2}, "top_k must be -1, 0 or more"),
        ({"min_p": 1.1}, "min_p must be in"),
        ({"presence_penalty": 3}, "presence_penalty must be in"),
        ({"frequency_penalty": -3}, "frequency_penalty must be in"),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0"),
        ({"seed": 2**64}, "seed must fit in 64 bits"),
        ({"stop": ["a", ""]}, "stop strings must not be empty"),
        ({"stop": [1]}, r"stop must hold texts, got \[1\]"),
        ({"stop_token_ids": 7}, "stop_token_ids must be a list, got 7"),
        ({"allowed_token_ids": []}, r"allowed_token_ids must name a token, or be None, got \[\]"),
        ({"allowed_token_ids": ["a"]}, "allowed_token_ids must hold token ids"),
        ({"bad_words": [" "]}, "bad_words must not be empty"),
        ({"logprobs": -1}, "logprobs must be None, 0 or more"),
        ({"logit_bias": {"a": 1}}, "logit_bias must map token ids to numbers"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias values must be finite"),
        ({"logit_bias": [1]}, "logit_bias must be a mapping"),
        ({"temperature": 10**400}, "temperature must be at most 1000000, got inf"),
        ({"repetition_penalty": 1e-320}, "repetition_penalty must be from 0.000001 to 1000000"),
        ({"repetition_penalty": 1e308}, "repetition_penalty must be from 0.000001 to 1000000"),
        ({"logit_bias": {1.5: 1}}, "logit_bias must map token ids to numbers"),
        ({"logit_bias": {True: 1}}, "logit_bias must map token ids to numbers"),
        ({"logit_bias": {1: "2"}}, "logit_bias must map token ids to numbers"),
        ({"stop_token_ids": [True]}, r"stop_token_ids must hold token ids, got \[True\]"),
        ({"allowed_token_ids": "12"}, "allowed_token_ids must be a list, got '12'"),
        ({"logits_processors": {"a": 1}}, "logits_processors must be a list, got {'a': 1}"),
        ({"ignore_eos": "no"}, "ignore_eos must be true or false, got 'no'"),
        ({"ignore_eos": 2}, "ignore_eos must be true or false, got 2"),
        ({"detokenize": None}, "detokenize must be true or false, got None"),
        ({"skip_special_tokens": []}, "skip_special_tokens must be true or false"),
    ],
)
def test_wrong_values(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        SamplingParams(**values)
    assert caught.value.code == "invalid_sampling_params"


def test_what_json_and_vllm_users_write_is_understood() -> None:
    loose: dict[str, Any] = {"stop": "x", "bad_words": None, "logit_bias": {"5": 1}, "stop_token_ids": None}
    params = SamplingParams(**loose)
    assert (params.stop, params.bad_words, params.logit_bias, params.stop_token_ids) == (("x",), (), {5: 1.0}, ())
    numpys: dict[str, Any] = {
        "stop_token_ids": np.array([1, 2]),
        "temperature": np.float16(0.5),
        "top_k": np.int32(3),
        "logit_bias": {np.int64(1): np.float32(1)},
    }
    params = SamplingParams(**numpys)
    biases = [*params.logit_bias.keys(), *params.logit_bias.values()]
    plain: list[Any] = [*params.stop_token_ids, params.temperature, params.top_k, *biases]
    assert plain == [1, 2, 0.5, 3, 1, 1.0]
    assert [type(value) for value in plain] == [int, int, float, int, int, float]
    assert SamplingParams(temperature=1e-6).is_greedy and not SamplingParams().is_greedy


def picky(params: SamplingParams, prompt: Any) -> Any:
    if "size" not in params.extra_args:
        raise KeyError("size")
    return None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"logit_bias": {100: 1.0}}, "logit_bias has the token id 100, which is outside the vocabulary of 100"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids has the token id -1"),
        ({"stop_token_ids": [5, 1000]}, "stop_token_ids has the token id 1000"),
        ({"logprobs": 21}, "logprobs may be at most 20, got 21"),
        ({"prompt_logprobs": 21}, "prompt_logprobs may be at most 20"),
        ({"logits_processors": ["pick"]}, "no logits processor 'pick'; did you mean picky.; known: picky"),
        ({"logits_processors": ["picky"]}, "'picky' does not take this request: KeyError: 'size'"),
        ({"stop": "x", "detokenize": False}, "stop strings need text"),
        ({"min_tokens": 50}, "min_tokens 50 cannot be reached with max_model_len 50"),
    ],
)
def test_what_a_model_refuses(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        validate_params(SamplingParams(**values), vocab_size=100, processors={"picky": picky}, max_model_len=50)


def test_what_a_model_takes() -> None:
    params = SamplingParams(
        logit_bias={99: 1}, logprobs=20, logits_processors=["picky"], extra_args={"size": 1}, stop="x"
    )
    validate_params(params, vocab_size=100, processors={"picky": picky}, max_model_len=50)
