"""The null platform's tokens against the same checksum in plain Python, and what must change them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.config import DeviceConfig, EngineConfig
from headrace.core.devices import open_device
from headrace.core.platform import Runner, RunnerConfig
from headrace.core.self_test import Driver, tiny_config, tiny_spec
from headrace.core.stages import PromptLogprobsBatch

MASK = (1 << 64) - 1
VOCAB_SIZE = 211


def mix(value: int) -> int:
    for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        value = ((value ^ (value >> 29)) * factor) & MASK
    return value ^ (value >> 29)


def next_token(token_ids: list[int]) -> int:
    """The token after a sequence, from all of it at once."""
    total = sum(mix((mix(token_id) + position) & MASK) for position, token_id in enumerate(token_ids))
    return mix(total & MASK) % VOCAB_SIZE


def continuation(prompt: list[int], num_tokens: int) -> list[int]:
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids))
    return token_ids[len(prompt) :]


def make(*, window: int = 0, depth: int = 0) -> tuple[Runner, RunnerConfig]:
    config = tiny_config(tiny_spec(window=window))
    device = open_device(EngineConfig(device=DeviceConfig(device=f"null:{depth}")))
    return device.runner(config), config


@settings(max_examples=40)
@given(
    st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=60), st.integers(0, 17), st.sampled_from([0, 24])
)
def test_tokens_depend_on_every_token_before(prompt: list[int], chunk: int, window: int) -> None:
    assert Driver(*make(window=window)).generate(prompt, 20, chunk=chunk) == continuation(prompt, 20)


def test_a_batch_gives_what_each_request_gets_alone() -> None:
    driver = Driver(*make())
    prompts = [[5], [7] * 33, list(range(50))]
    rows = [driver.add(prompt) for prompt in prompts]
    driver.step({0: 1, 1: 20, 2: 50})
    driver.step({2: 1, 1: 13, 0: 1})
    for _ in range(4):
        driver.step({row: 1 for row in rows})
    for request, prompt in zip(driver.requests, prompts, strict=True):
        made = request.token_ids[len(prompt) :]
        assert made == continuation(prompt, len(made))


@pytest.mark.parametrize("group", [0, 1])
def test_a_wrong_block_changes_the_tokens(group: int) -> None:
    driver = Driver(*make(window=24))
    prompt = list(range(40))
    driver.add(prompt)
    driver.step({0: 40})
    driver.requests[0].block_ids[group][2] = 0
    driver.step({0: 1})
    assert driver.requests[0].token_ids[40:] != continuation(prompt, 2)


def test_run_ahead_recalls_the_last_token() -> None:
    driver = Driver(*make(depth=2))
    driver.add([1, 2, 3])
    steps = [driver.submit({0: 3}), driver.submit({0: 1}), driver.submit({0: 1})]
    found = [int(step.result().token_ids[0]) for step in steps]
    assert found == continuation([1, 2, 3], 3)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_id_is_the_depth(depth: int) -> None:
    assert open_device(EngineConfig(device=DeviceConfig(device=f"null:{depth}"))).caps.depth == depth


def test_a_seed_counts_only_with_a_temperature() -> None:
    driver = Driver(*make())
    greedy = [driver.add([4, 5], seed=seed) for seed in (1, 2)]
    warm = [driver.add([4, 5], temperature=0.7, seed=seed) for seed in (1, 2, 1)]
    tokens = driver.step({row: 2 for row in (*greedy, *warm)}).token_ids.tolist()
    assert tokens[0] == tokens[1] == next_token([4, 5])
    assert tokens[2] == tokens[4] != tokens[3]


def test_log_probabilities_are_those_of_a_uniform_distribution() -> None:
    driver = Driver(*make())
    driver.add([9, 8, 7])
    arrays = driver.step({0: 3}, num_logprobs=5).logprobs
    assert arrays is not None
    assert arrays.chosen == pytest.approx([-np.log(VOCAB_SIZE)])
    assert arrays.top_values.shape == arrays.top_ids.shape == (1, 5)
    assert arrays.ranks.tolist() == [1]
    assert driver.requests[0].token_ids[-1] in arrays.top_ids[0]


def test_prompt_log_probabilities_have_the_targets_shape() -> None:
    runner, config = make()
    driver = Driver(runner, config)
    driver.add([9, 8, 7])
    batch = driver._batch({0: 3}, [0], -1)
    asked = PromptLogprobsBatch(rows=np.array([0, 1], np.int32), targets=np.array([8, 7], np.int32), num_logprobs=3)
    output = runner.step(replace(batch, prompt_logprobs=asked)).result()
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs.chosen.shape == (2,)
    assert output.prompt_logprobs.top_ids[:, 0].tolist() == [8, 7]


def test_blocks_cost_what_the_models_would() -> None:
    runner, _ = make()
    # keys and values, 2 layers, 2 heads of 16 values, float32, 16 tokens
    assert runner.kv_plan().block_bytes == (2 * 2 * 2 * 16 * 4 * 16,)
