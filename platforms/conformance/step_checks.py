"""What a step does beside its forward pass: parameters of sampling, drafts, log probabilities of prompts, vectors."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from headrace.core.models.spec import PoolerSpec
from headrace.core.self_test import Driver, nmse, tiny_spec
from headrace.core.stages import (
    LogprobArrays,
    PoolingBatch,
    PromptLogprobsBatch,
    SamplingBatch,
    StepOutput,
)

from .drivers import TOLERANCE, compare_logprobs, driver_of, prompt_of, reference_of, with_rows
from .registry import Failed, Subject, check
from .values import random_weights

LENGTHS = (9, 1, 30, 17, 4, 22)


@check("model.sampling")
def check_sampling(subject: Subject) -> str:
    """Every parameter of sampling, row by row in one step: the reference's tokens and log probabilities."""
    got, want = (_sampled(driver) for driver in (driver_of(subject, tiny_spec()), reference_of(subject, tiny_spec())))
    for step, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        if ours.token_ids.tolist() != theirs.token_ids.tolist():
            raise Failed(f"step {step}: {ours.token_ids.tolist()}, expected {theirs.token_ids.tolist()}")
        compare_logprobs(ours.logprobs, theirs.logprobs, f"step {step}")
    return f"{len(got)} steps of {len(LENGTHS)} requests, equal to the reference"


@check("model.verify")
def check_verify(subject: Subject) -> str:
    """Drafts that are verified in one step give, row by row, the tokens of steps of one."""
    driver = driver_of(subject, tiny_spec())
    prompts = [prompt_of(length) for length in (20, 5, 33)]
    plain = [driver.generate(prompt, 8) for prompt in prompts]
    driver.remove_all()
    num_drafts = (2, 0, 3)
    rows = [
        driver.add(prompt + tokens[:drafts])
        for prompt, tokens, drafts in zip(prompts, plain, num_drafts, strict=True)
    ]
    # One request has its prompt computed before, so that its row is made of drafts alone.
    driver.step({rows[2]: len(prompts[2]) - 1})
    counts = {row: len(driver.requests[row].token_ids) - driver.requests[row].num_computed for row in rows}
    output = driver.runner.step(with_rows(driver.prepare(counts), [drafts + 1 for drafts in num_drafts])).result()
    want = [token for tokens, drafts in zip(plain, num_drafts, strict=True) for token in tokens[: drafts + 1]]
    if output.token_ids.tolist() != want:
        raise Failed(f"rows of drafts gave {output.token_ids.tolist()}, expected {want}")
    return f"{sum(num_drafts)} drafts of {len(rows)} requests"


@check("model.prompt_logprobs")
def check_prompt_logprobs(subject: Subject) -> str:
    """Log probabilities of a prompt's own tokens against the reference."""
    found = []
    for driver in (driver_of(subject, tiny_spec()), reference_of(subject, tiny_spec())):
        row = driver.add(prompt_of(40))
        asked = PromptLogprobsBatch(
            rows=np.arange(39, dtype=np.int32), targets=np.array(prompt_of(40)[1:], np.int32), num_logprobs=3
        )
        batch = replace(driver.prepare({row: 40}), prompt_logprobs=asked)
        found.append(driver.runner.step(batch).result().prompt_logprobs)
    got, want = found
    compare_logprobs(got, want, "prompt")
    return "39 positions"


@check("model.chunked_prompt_logprobs")
def check_chunked_prompt_logprobs(subject: Subject) -> str:
    """Log probabilities of two prompts in chunks, beside a decode and across borders, against the reference."""
    prompts = [prompt_of(40), prompt_of(23)]
    whole = _prompt_chunks(reference_of(subject, tiny_spec()), prompts, [(40, 23)])
    chunked = _prompt_chunks(driver_of(subject, tiny_spec()), prompts, [(16, 7), (1, 9), (21, 1), (2, 6)])
    for got, want, prompt in zip(chunked, whole, prompts, strict=True):
        compare_logprobs(got, want, f"prompt of {len(prompt)}")
    return "2 prompts in 4 steps"


@check("model.vectors")
def check_vectors(subject: Subject) -> str:
    """Means of hidden states, of several requests in one step, against the reference."""
    spec = replace(tiny_spec(), pooler=PoolerSpec(kind="mean"))
    found = []
    for runner, config in (
        subject.runner(spec, params=random_weights),
        subject.reference_runner(spec, params=random_weights),
    ):
        driver = Driver(runner, config)
        rows = [driver.add(prompt_of(length)) for length in LENGTHS]
        batch = driver.prepare(dict(zip(rows, LENGTHS, strict=True)))
        starts = batch.forward.query_start_loc
        pooling = PoolingBatch(starts=starts[:-1], ends=starts[1:])
        found.append(runner.step(replace(batch, sampling=None, pooling=pooling)).result().pooled)
    got, want = found
    if got is None or want is None or got.shape != want.shape:
        raise Failed(f"vectors {None if got is None else got.shape}, expected {None if want is None else want.shape}")
    error = nmse(got, want)
    if not error <= TOLERANCE:
        raise Failed(f"error {error:.1e}, allowed {TOLERANCE:.0e}")
    return f"{len(got)} vectors, error {error:.1e}"


def _prompt_chunks(
    driver: Driver, prompts: Sequence[Sequence[int]], steps: Sequence[Sequence[int]]
) -> list[LogprobArrays]:
    """Of each prompt the log probabilities of all its tokens but the first, in steps of so many tokens of each."""
    other, *rows = (driver.add(tokens) for tokens in ([7, 3, 5], *prompts))
    driver.step({other: 3})
    pieces: list[list[LogprobArrays]] = [[] for _ in prompts]
    starts = [0 for _ in prompts]
    for counts in steps:
        batch = driver.prepare({other: 1, **dict(zip(rows, counts, strict=True))})
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        targets = [p[start + 1 : end + 1] for p, start, end in zip(prompts, starts, ends, strict=True)]
        firsts = batch.forward.query_start_loc[1:].tolist()
        asked = PromptLogprobsBatch(
            rows=np.array(
                [f + i for f, part in zip(firsts, targets, strict=False) for i in range(len(part))], np.int32
            ),
            targets=np.array([target for part in targets for target in part], np.int32),
            num_logprobs=3,
        )
        output = driver.runner.step(replace(batch, prompt_logprobs=asked)).result()
        driver.requests[other].token_ids[-1] = int(output.token_ids[0])
        found = output.prompt_logprobs
        if found is None:
            raise Failed("no log probabilities of the prompts came")
        place = 0
        for piece, part in zip(pieces, targets, strict=True):
            piece.append(found.of_rows(slice(place, place + len(part))))
            place += len(part)
        starts = ends
    return [LogprobArrays.joined(piece) for piece in pieces]


def _sampled(driver: Driver) -> list[StepOutput]:
    """A step of prompts and three of one token each, every row with parameters of its own."""
    rows = [driver.add(prompt_of(length)) for length in LENGTHS]
    outputs = []
    for step in range(4):
        counts = {row: len(driver.requests[row].token_ids) - driver.requests[row].num_computed for row in rows}
        batch = driver.prepare(counts, num_logprobs=5)
        assert batch.sampling is not None, "every row samples"
        output = driver.runner.step(replace(batch, sampling=_parameters(batch.sampling, step))).result()
        outputs.append(output)
        for row, token_id in zip(rows, output.token_ids.tolist(), strict=True):
            driver.requests[row].token_ids[-1] = token_id
    return outputs


def _parameters(batch: SamplingBatch, step: int) -> SamplingBatch:
    """Parameters by row; the last row is greedy without any."""
    return replace(
        batch,
        seeds=np.array([3, -9, 4, 5, 0, 1], np.int32),
        temperature=np.array([1.0, 0.6, 1.4, 0.0, 0.9, 0.0], np.float32),
        top_k=np.array([0, 7, 0, 0, 40, 0], np.int32),
        top_p=np.array([1.0, 1.0, 0.8, 1.0, 0.9, 1.0], np.float32),
        min_p=np.array([0.02, 0.0, 0.0, 0.0, 0.05, 0.0], np.float32),
        bias_rows=np.array([0, 3, 3], np.int32),
        bias_tokens=np.array([17, 60 + step, 61], np.int32),
        bias_values=np.array([4.0, 0.5, -np.inf], np.float32),
        penalty_rows=np.repeat(np.array([1, 3, 4], np.int32), 200),
        penalty_tokens=np.tile(np.arange(200, dtype=np.int32), 3),
        penalty_counts=np.tile(np.arange(4, dtype=np.int32), 150),
        repetition=np.array([1.0, 1.7, 1.0, 6.0, 0.8, 1.0], np.float32),
        frequency=np.array([0.0, 0.4, 0.0, 0.0, -0.3, 0.0], np.float32),
        presence=np.array([0.0, 0.0, 0.0, 0.0, 1.1, 0.0], np.float32),
    )
