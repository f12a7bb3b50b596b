"""Outputs that hold only what is new, and requests that go on where another engine left off."""

from collections.abc import Iterator
from typing import Any

import pytest

from headrace import LLM, RequestOutput, SamplingParams
from headrace.core.engine.engine import Engine
from tiny_server_model import tiny_server_model

PROMPT = [5, 9, 77, 130, 12, 40]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A model whose tokens depend on all tokens before them."""
    folder = tiny_server_model(tmp_path_factory.mktemp("model"))
    with LLM(str(folder), device="null", load_format="dummy", kv_memory="4MiB") as made:
        yield made


def finish(engine: Engine) -> list[RequestOutput]:
    """All outputs of the only request."""
    outputs: list[RequestOutput] = []
    while engine.has_unfinished():
        outputs += engine.step()
    return outputs


def joined(outputs: list[RequestOutput]) -> tuple[str, list[int], list[Any]]:
    """Text, tokens and log probabilities of deltas."""
    parts = [output.outputs[0] for output in outputs]
    return (
        "".join(part.text for part in parts),
        [token for part in parts for token in part.token_ids],
        [entry for part in parts for entry in part.logprobs or ()],
    )


@pytest.mark.parametrize("stop", [(), ("\u00e9",), ("a",)])
def test_deltas_sum_up_to_the_whole(llm: LLM, stop: tuple[str, ...]) -> None:
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=40, stop=stop, logprobs=2, prompt_logprobs=1)
    whole = llm.generate({"prompt_token_ids": PROMPT}, params)[0]
    engine = llm.built.engine
    engine.add("deltas", PROMPT, params, deltas=True)
    outputs = finish(engine)
    text, token_ids, logprobs = joined(outputs)
    expected = whole.outputs[0]
    assert (text, token_ids, logprobs) == (expected.text, expected.token_ids, expected.logprobs)
    assert outputs[-1].outputs[0].finish_reason == expected.finish_reason
    assert outputs[-1].outputs[0].cumulative_logprob == pytest.approx(expected.cumulative_logprob)
    assert all(len(output.outputs[0].token_ids) <= 1 for output in outputs)
    given = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
    assert given == [whole.prompt_logprobs]


@pytest.mark.parametrize("cut", [1, 2, 7, 15, 16, 17, 39])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_request_goes_on_where_it_was(llm: LLM, cut: int, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=11, max_tokens=40, ignore_eos=True, logprobs=0)
    engine = llm.built.engine
    engine.add("whole", PROMPT, params, deltas=True)
    steps = finish(engine)
    engine.add("rest", PROMPT, params, deltas=True, output_token_ids=joined(steps[:cut])[1])
    rest = finish(engine)
    assert joined(rest) == joined(steps[cut:])
    assert rest[-1].outputs[0].finish_reason == "length"
