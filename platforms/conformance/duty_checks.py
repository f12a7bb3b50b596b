"""What a runner owes its caller beside tokens: results that stay as they are, any order of requests, drafts that were
wrong, parameters of rows that are drafts, prompts of many log probabilities, states that two requests read."""

from dataclasses import replace
from functools import partial

import numpy as np

from headrace.core.platform import Pending
from headrace.core.self_test import tiny_spec
from headrace.core.stages import PromptLogprobsBatch, StepInput, StepOutput

from .drivers import compare_logprobs, driver_of, prompt_of, reference_of, with_rows
from .model_checks import SPECS
from .registry import Failed, Subject, add_check, check

NUM_TOKENS = 8


@check("model.results_stay")
def check_results_stay(subject: Subject) -> str:
    """What a step gave does not change when later steps run, and asking again gives the same."""
    driver = driver_of(subject, tiny_spec())
    rows = [driver.add(prompt_of(length)) for length in (9, 4, 22)]
    steps: list[Pending] = []
    kept: list[tuple[StepOutput, list[np.ndarray]]] = []
    counts = {row: len(driver.requests[row].token_ids) for row in rows}
    for _ in range(6):
        pending = driver.submit(counts, num_logprobs=4)
        output = pending.result()
        steps.append(pending)
        kept.append((output, [array.copy() for array in _arrays(output)]))
        for row, token_id in zip(counts, output.token_ids.tolist(), strict=True):
            driver.requests[row].token_ids[-1] = token_id
        counts = dict.fromkeys(rows, 1)
    for again in ("", " asked again"):
        for step, (pending, (output, copies)) in enumerate(zip(steps, kept, strict=True)):
            if not pending.ready():
                raise Failed(f"step {step} is not ready, though it gave its result")
            arrays = _arrays(pending.result() if again else output)
            if any(not np.array_equal(array, copy) for array, copy in zip(arrays, copies, strict=True)):
                raise Failed(f"the result of step {step}{again} is not what it was")
    return f"{len(steps)} steps"


@check("model.any_order")
def check_any_order(subject: Subject) -> str:
    """Requests that stand in another place in each step, or miss one, get what they get alone; a step ahead, too."""
    driver = driver_of(subject, tiny_spec())
    prompts = [prompt_of(length) for length in (6, 19, 3, 12)]
    alone = []
    for prompt in prompts:
        alone.append(driver.generate(prompt, NUM_TOKENS))
        driver.remove_all()
    rng = np.random.default_rng(0)
    for depth in range(min(subject.device.caps.depth, 1) + 1):
        rows = [driver.add(prompt) for prompt in prompts]
        found: dict[int, list[int]] = {row: [] for row in rows}
        waiting: list[tuple[list[int], Pending]] = []
        asked = dict.fromkeys(rows, 0)
        while waiting or min(asked.values()) < NUM_TOKENS:
            left = [row for row in rows if asked[row] < NUM_TOKENS]
            order = [int(row) for row in rng.permutation(left)][: max(1, len(left) - int(rng.integers(2)))]
            if order:
                counts = {row: len(prompts[row]) if not asked[row] else 1 for row in order}
                waiting.append((order, driver.submit(counts)))
                asked |= {row: asked[row] + 1 for row in order}
            if len(waiting) > depth or not order:
                order, pending = waiting.pop(0)
                for row, token_id in zip(order, pending.result().token_ids.tolist(), strict=True):
                    found[row].append(token_id)
                    tokens = driver.requests[row].token_ids
                    tokens[tokens.index(-1)] = token_id
        if list(found.values()) != alone:
            raise Failed(f"{depth} steps ahead: {list(found.values())}, expected {alone}")
        driver.remove_all()
    return f"{len(prompts)} requests, {NUM_TOKENS} tokens each"


@check("model.wrong_drafts")
def check_wrong_drafts(subject: Subject) -> str:
    """Behind drafts that were wrong a request goes on from the last right one, over the keys that they left."""
    driver = driver_of(subject, tiny_spec())
    prompts = [prompt_of(length) for length in (15, 30)]
    alone = []
    for prompt in prompts:
        alone.append(driver.generate(prompt, NUM_TOKENS + 3))
        driver.remove_all()
    rows = [driver.add(prompt) for prompt in prompts]
    driver.step({row: len(prompts[row]) for row in rows})
    vocab_size = driver.config.spec.vocab_size
    for turn in (1, 2, 0):  # so many drafts are right
        for row, tokens in zip(rows, alone, strict=True):
            known = len(driver.requests[row].token_ids) - len(prompts[row])
            drafts = [*tokens[known : known + turn], *((token + 1) % vocab_size for token in tokens[known + turn :])]
            driver.requests[row].token_ids += drafts[:3]
        output = driver.runner.step(with_rows(driver.prepare(dict.fromkeys(rows, 4)), (4, 4))).result()
        for place, row in enumerate(rows):
            request = driver.requests[row]
            right = len(request.token_ids) - 4 + turn
            request.token_ids = [*request.token_ids[:right], int(output.token_ids[4 * place + turn])]
            request.num_computed = right
    driver.step(dict.fromkeys(rows, 1))
    found = [driver.requests[row].token_ids[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]
    if found != [tokens[:NUM_TOKENS] for tokens in alone]:
        raise Failed(f"{found}, expected {alone}")
    return "3 steps of 3 drafts, of which 1, 2 and 0 were right"


@check("model.drafts_sampled")
def check_drafts_sampled(subject: Subject) -> str:
    """Rows of drafts have their own masks, biases, penalties, temperatures and log probabilities."""
    found: list[StepOutput] = []
    for driver in (driver_of(subject, tiny_spec()), reference_of(subject, tiny_spec())):
        rows = [driver.add(prompt_of(length)) for length in (9, 26)]
        batch = with_rows(
            driver.prepare({row: len(driver.requests[row].token_ids) for row in rows}, num_logprobs=5), (3, 2)
        )
        found.append(driver.runner.step(_with_parameters(batch, driver.config.spec.vocab_size)).result())
    got, want = found
    if got.token_ids.tolist() != want.token_ids.tolist():
        raise Failed(f"{got.token_ids.tolist()}, expected {want.token_ids.tolist()}")
    compare_logprobs(got.logprobs, want.logprobs, "rows of drafts")
    return f"{len(got.token_ids)} rows of 2 requests, equal to the reference"


@check("model.long_prompt_logprobs")
def check_long_prompt_logprobs(subject: Subject) -> str:
    """Log probabilities of hundreds of positions, of two prompts in one step, against the reference."""
    found = []
    for driver in (driver_of(subject, tiny_spec()), reference_of(subject, tiny_spec())):
        prompts = [prompt_of(length) for length in (301, 97)]
        rows = [driver.add(prompt) for prompt in prompts]
        places = np.concatenate([np.arange(300), 301 + np.arange(96)]).astype(np.int32)
        targets = np.array([token for prompt in prompts for token in prompt[1:]], np.int32)
        asked = PromptLogprobsBatch(rows=places, targets=targets, num_logprobs=2)
        batch = driver.prepare({row: len(prompt) for row, prompt in zip(rows, prompts, strict=True)})
        found.append(driver.runner.step(replace(batch, prompt_logprobs=asked)).result().prompt_logprobs)
    got, want = found
    compare_logprobs(got, want, "prompts")
    return "396 positions"


def _check_forked(name: str, subject: Subject) -> str:
    make, features = SPECS[name]
    for feature in features:
        subject.need(feature=feature)
    driver, oracle = driver_of(subject, make()), reference_of(subject, make())
    first = prompt_of(2 * driver.config.block_size)
    prompts = [first, first + prompt_of(5)]
    want = [oracle.generate(prompt, NUM_TOKENS) for prompt in prompts]
    kinds = [group.kind for group in driver.config.groups]
    for order in ((0, 1), (1, 0), ()):
        rows = [driver.add(prompt) for prompt in prompts]
        owner, other = (driver.requests[row] for row in rows)
        driver.step({rows[0]: len(first)})
        driver.prepare({rows[1]: 1})  # takes blocks
        own = [list(blocks) for blocks in other.block_ids]
        # A request's states stand in two blocks by turns; after one step the last one is in the first.
        other.num_computed, other.num_steps = len(first), 1
        other.block_ids = [
            [theirs[0], mine[1]] if kind == "state" else list(theirs[:2])
            for kind, theirs, mine in zip(kinds, owner.block_ids, own, strict=True)
        ]
        for step in (order,) if order else ((0,), (1,)):  # together, or when the first one has gone on
            driver.step({rows[place]: (1, 5)[place] for place in step})
        other.block_ids = [
            mine if kind == "state" else blocks
            for kind, blocks, mine in zip(kinds, other.block_ids, own, strict=True)
        ]
        for _ in range(NUM_TOKENS - 1):
            driver.step(dict.fromkeys(rows, 1))
        found = [
            driver.requests[row].token_ids[len(prompt) :][:NUM_TOKENS]
            for row, prompt in zip(rows, prompts, strict=True)
        ]
        if found != want:
            raise Failed(f"{found}, expected {want}")
        other.block_ids = [  # shared blocks are free once
            blocks if kind == "state" else mine + blocks[2:]
            for kind, blocks, mine in zip(kinds, other.block_ids, own, strict=True)
        ]
        driver.remove_all()
    return f"2 requests behind {len(first)} tokens"


def _with_parameters(batch: StepInput, vocab_size: int) -> StepInput:
    """Five rows of logits, sampled in another order, each with parameters of its own."""
    assert batch.sampling is not None
    words = np.full((5, -(-vocab_size // 32)), -1, np.int32)
    words[1] = 0
    words[1, 2] = 0b1010
    sampling = replace(
        batch.sampling,
        rows=np.array([4, 0, 3, 1, 2], np.int32),
        seeds=np.array([5, 6, 7, 8, 9], np.int32),
        temperature=np.array([0.0, 0.0, 1.2, 0.0, 0.8], np.float32),
        top_k=np.array([0, 0, 30, 0, 0], np.int32),
        allow_mask=words,
        # Token 0 of row 0, which padding may be, wins unless it is penalised.
        bias_rows=np.array([3, 0, 0, 0], np.int32),
        bias_tokens=np.array([100, 7, 0, 205], np.int32),
        bias_values=np.array([50.0, -np.inf, 60.0, 50.0], np.float32),
        penalty_rows=np.repeat(np.array([0, 4], np.int32), 200),
        penalty_tokens=np.tile(np.arange(1, 201, dtype=np.int32), 2),
        penalty_counts=np.tile(np.arange(4, dtype=np.int32), 100),
        repetition=np.array([1.8, 1.0, 1.0, 1.0, 1.3], np.float32),
        frequency=np.array([0.3, 0.0, 0.0, 0.0, 0.2], np.float32),
        presence=np.zeros(5, np.float32),
    )
    return replace(batch, sampling=sampling)


def _arrays(output: StepOutput) -> list[np.ndarray]:
    found = [output.token_ids]
    if output.logprobs is not None:
        found += [getattr(output.logprobs, name) for name in ("chosen", "ranks", "top_ids", "top_values")]
    return found


def _register() -> None:
    for name, (_, features) in SPECS.items():
        if "states" in features:
            meaning = "a second request begins behind the state of a first one, with it or when that has gone on"
            add_check(f"model.forked.{name}", meaning, partial(_check_forked, name))


_register()
