"""Requests that take over blocks, slots and positions of others: preempted ones, shared prefixes, late positions."""

import dataclasses

import numpy as np

from headrace.core.platform import Pending
from headrace.core.self_test import Driver, tiny_spec
from headrace.core.stages import StepInput

from .drivers import compare_logprobs, driver_of, prompt_of, reference_of
from .registry import Failed, Subject, check
from .values import random_weights

NUM_TOKENS = 8
FAR = 9000
"""Positions begin here: behind tables and counters that end at 4096 or 8192."""


@check("model.preempted")
def check_preempted(subject: Subject) -> str:
    """A request that lost its blocks and slot to others, and computes its tokens again, goes on as before."""
    driver = Driver(*subject.runner(tiny_spec(), params=random_weights), num_blocks=24)
    prompts = [prompt_of(length) for length in (37, 20, 5)]
    alone = []
    for prompt in prompts:
        alone.append(driver.generate(prompt, NUM_TOKENS))
        driver.remove_all()
    ahead = subject.device.caps.depth > 0
    for taken in (1, 2, 3):  # the slots that others take before the first request comes back
        rows = [driver.add(prompt) for prompt in prompts]
        _run(driver, {row: len(prompts[row]) for row in rows}, 3, ahead)
        lost = driver.requests[0].token_ids
        _same([lost[len(prompts[0]) :]], [alone[0][:3]], "before it was preempted")
        driver.remove_all()
        others = [driver.add(prompt_of(30, seed=other + 1), temperature=1.0) for other in range(taken)]
        _run(driver, {row: 30 for row in others}, 3, ahead)
        again = driver.add(lost)
        counts = {**dict.fromkeys(others, 1), again: len(lost)}
        _run(driver, counts, NUM_TOKENS - 3, ahead)
        _same([driver.requests[again].token_ids[len(prompts[0]) :]], [alone[0]], f"again behind {taken} others")
        driver.remove_all()
    return f"3 times, {'a step ahead' if ahead else 'step by step'}"


@check("model.shared_blocks")
def check_shared_blocks(subject: Subject) -> str:
    """A request reads blocks that another one writes in the same step, wherever it stands in the batch."""
    runner, config = subject.runner(tiny_spec(), params=random_weights)
    size = config.block_size
    prompt = prompt_of(2 * size + 5)
    other = prompt[: 2 * size] + prompt_of(9, seed=3)
    driver = Driver(runner, config)
    want = []
    for tokens in (prompt, other):
        want.append(driver.generate(tokens, NUM_TOKENS))
        driver.remove_all()
    for writer in (0, 1, 2):
        driver.remove_all()
        rows = [driver.add(prompt if row == writer else other) for row in range(3)]
        # Blocks are taken when a step is prepared; the others' first ones then are the writer's.
        driver.prepare({writer: len(prompt)})
        owner = driver.requests[writer]
        for row in rows:
            if row != writer:
                driver.requests[row].block_ids = [list(blocks[:2]) for blocks in owner.block_ids]
                driver.requests[row].num_computed = 2 * size
        owner.num_computed, owner.token_ids = 0, list(prompt)
        driver.step({row: len(driver.requests[row].token_ids) - driver.requests[row].num_computed for row in rows})
        for _ in range(NUM_TOKENS - 1):
            driver.step(dict.fromkeys(rows, 1))
        found = [driver.requests[row].token_ids[-NUM_TOKENS:] for row in rows]
        _same(found, [want[int(row != writer)] for row in rows], f"the writer is request {writer} of the step")
        for request in driver.requests:  # shared blocks are free once
            if request is not owner:
                request.block_ids = [blocks[2:] for blocks in request.block_ids]
    return f"3 requests, {2 * size} tokens shared"


@check("model.shrinking")
def check_shrinking(subject: Subject) -> str:
    """A batch that loses a request every few steps, whose blocks the others take, against the reference."""
    lengths = (15, 3, 14, 7, 22)
    found = []
    for driver in (driver_of(subject, tiny_spec()), reference_of(subject, tiny_spec())):
        live = [driver.add(prompt_of(length)) for length in lengths]
        outputs = [driver.step(dict(zip(live, lengths, strict=True)), num_logprobs=3)]
        while live:
            outputs += [driver.step(dict.fromkeys(live, 1), num_logprobs=3) for _ in range(4)]
            driver.remove(live.pop(0 if len(live) == 3 else -1))
        found.append(outputs)
    for step, (got, want) in enumerate(zip(*found, strict=True)):
        _same(got.token_ids.tolist(), want.token_ids.tolist(), f"step {step}")
        compare_logprobs(got.logprobs, want.logprobs, f"step {step}")
    return f"{len(found[0])} steps of {len(lengths)} requests and fewer"


@check("model.far_positions")
def check_far_positions(subject: Subject) -> str:
    """Tokens at positions from 9000 on, which the model was made for, have the reference's log probabilities."""
    spec = dataclasses.replace(tiny_spec(), max_position_embeddings=2 * FAR)
    fields = {"max_num_seqs": 2, "max_num_batched_tokens": 32}
    found = []
    for driver in (driver_of(subject, spec, **fields), reference_of(subject, spec, **fields)):
        row = driver.add(prompt_of(21))
        outputs = []
        for count in (12, 9, 1, 1):
            batch = driver.prepare({row: count}, num_logprobs=5)
            outputs.append(driver.runner.step(_shifted(batch)).result())
            if batch.sampling is not None:
                driver.requests[row].token_ids[-1] = int(outputs[-1].token_ids[0])
        found.append([output.logprobs for output in outputs if output.logprobs is not None])
    worst = 0.0
    for got, want in zip(*found, strict=True):
        if got.top_ids.tolist() != want.top_ids.tolist():
            raise Failed(f"best tokens {got.top_ids.tolist()}, expected {want.top_ids.tolist()}")
        worst = max(worst, float(np.abs(got.top_values - want.top_values).max()))
    if not worst <= 1e-3:
        raise Failed(f"log probabilities differ by {worst:.1e}")
    return f"{len(found[0])} steps, log probabilities differ by {worst:.1e} at most"


@check("model.kv_blocks")
def check_kv_blocks(subject: Subject) -> str:
    """Blocks that are read to the host and written to others bring along what every layer of a group has in them."""
    has_window = "sliding_window" in subject.device.caps.features
    driver = driver_of(subject, tiny_spec(window=24 if has_window else 0))
    config, prompts = driver.config, [prompt_of(40, seed=seed) for seed in (1, 2)]
    want = []
    for prompt in prompts:
        want.append(driver.generate(prompt, NUM_TOKENS))
        driver.remove_all()
    first, second = rows = [driver.add(prompt) for prompt in prompts]
    driver.step({row: 40 for row in rows})
    one, other = (driver.requests[row] for row in rows)
    for index, (group, *blocks) in enumerate(zip(config.groups, one.block_ids, other.block_ids, strict=True)):
        data = [np.array(driver.runner.read_blocks(index, ids)) for ids in blocks]
        shape = (len(blocks[0]), len(group.layer_indices), 2, config.block_size, *group.heads[0])
        if data[0].shape != shape:
            raise Failed(f"blocks of group {index} came as {data[0].shape}, expected {shape}")
        for ids, array in zip(blocks, reversed(data), strict=True):
            driver.runner.write_blocks(index, ids, array)
    one.block_ids, other.block_ids = other.block_ids, one.block_ids
    for _ in range(NUM_TOKENS - 1):
        driver.step({second: 1, first: 1})
    _same([driver.requests[row].token_ids[40:] for row in rows], want, "in the blocks of each other")
    return f"{len(config.groups)} groups"


def _shifted(batch: StepInput) -> StepInput:
    """The step at later positions: what rotary turns depend on, and nothing of the cache."""
    return dataclasses.replace(
        batch, forward=dataclasses.replace(batch.forward, positions=batch.forward.positions + np.int32(FAR))
    )


def _run(driver: Driver, first: dict[int, int], num_steps: int, ahead: bool) -> None:
    """A first step and further ones of one token for each of its requests; ahead: each begins before the last one's
    tokens are known."""
    counts = first
    waiting: list[Pending] = []
    for _ in range(num_steps):
        if ahead:
            waiting.append(driver.submit(counts))
        else:
            driver.step(counts)
        counts = dict.fromkeys(first, 1)
        if len(waiting) > 1:
            _store(driver, list(first), waiting.pop(0).result().token_ids.tolist())
    for pending in waiting:
        _store(driver, list(first), pending.result().token_ids.tolist())


def _store(driver: Driver, rows: list[int], token_ids: list[int]) -> None:
    for row, token_id in zip(rows, token_ids, strict=True):
        tokens = driver.requests[row].token_ids
        tokens[tokens.index(-1)] = token_id


def _same(got: object, want: object, what: str) -> None:
    if got != want:
        raise Failed(f"{what}: {got}, expected {want}")
