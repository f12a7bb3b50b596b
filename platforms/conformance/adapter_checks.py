"""Low-rank adapters: requests with different ones in one batch, beside some without any."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from headrace.core.models.spec import AdaptersSpec
from headrace.core.self_test import DrivenRequest, Driver, tiny_spec

from .registry import Failed, Subject, check
from .values import random_weights

NUM_TOKENS = 8
LENGTHS = (1, 17, 40, 9, 17)
CHOSEN = (0, 3, 2, 1, 2)
"""The adapter of each request; 3 is none."""
RANKS = (("layers.0.attn.qkv_proj", 5), ("layers.0.mlp.gate_up_proj", 2), ("layers.1.mlp.down_proj", 17))


@check("model.adapters")
def check_adapters(subject: Subject) -> str:
    """Requests with adapters and without, in one batch, give the reference's tokens, the latter the model's own."""
    subject.need(feature="lora")
    spec = dataclasses.replace(tiny_spec(), adapters=AdaptersSpec(num_adapters=3, ranks=RANKS))
    driver = Driver(*subject.runner(spec, params=random_weights))
    oracle = Driver(*subject.reference_runner(spec, params=random_weights), seed=1)
    plain = Driver(*subject.reference_runner(tiny_spec(), params=random_weights), seed=1)
    want, none = _tokens(oracle, CHOSEN), _tokens(plain, ())
    for what, chosen in (("together", CHOSEN), ("without adapters", (3,) * 5), ("again", CHOSEN)):
        expected = [own if number < 3 else bare for number, own, bare in zip(chosen, want, none, strict=True)]
        if (got := _tokens(driver, chosen)) != expected:
            raise Failed(f"{what}: {got}, expected {expected}")
    for number, tokens, bare in zip(CHOSEN, want, none, strict=True):
        if (tokens == bare) != (number == 3):
            raise Failed(f"adapter {number} gave {tokens}, the model alone {bare}")
    return f"{len(CHOSEN)} requests with adapters {', '.join(map(str, CHOSEN))}, {NUM_TOKENS} tokens each"


def _tokens(driver: Driver, chosen: Sequence[int]) -> list[list[int]]:
    """Greedy tokens of all prompts in one batch, the first step in chunks of different lengths."""
    driver.remove_all()
    rows = [driver.add([(7 * i + 3 * length) % 211 for i in range(length)]) for length in LENGTHS]
    while any(len(request.token_ids) < length + NUM_TOKENS for request, length in _pairs(driver)):
        left = {row: len(driver.requests[row].token_ids) - driver.requests[row].num_computed for row in rows}
        counts = {row: min(count, 11 + row) for row, count in left.items()}
        sampling = [row for row in rows if counts[row] == left[row]]
        batch = driver.prepare(counts)
        numbers = np.repeat(np.array(chosen, np.int32), list(counts.values())) if chosen else None
        if numbers is not None and (numbers < 3).any():
            batch = dataclasses.replace(batch, forward=dataclasses.replace(batch.forward, adapters=numbers))
        output = driver.runner.step(batch).result()
        for row, token in zip(sampling, output.token_ids.tolist(), strict=True):
            driver.requests[row].token_ids[-1] = token
    return [request.token_ids[length : length + NUM_TOKENS] for request, length in _pairs(driver)]


def _pairs(driver: Driver) -> list[tuple[DrivenRequest, int]]:
    return list(zip(driver.requests, LENGTHS, strict=True))
