"""Runners that checks drive step by step, and what they ask of a step and compare."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from headrace.core.models.spec import ModelSpec
from headrace.core.self_test import Driver, nmse
from headrace.core.stages import LogprobArrays, StepInput

from .registry import Failed, Subject
from .values import random_weights

TOLERANCE = 1e-9
"""Of what a step computes in float32, as the mean square error of all against their mean square."""


def driver_of(subject: Subject, spec: ModelSpec, *, num_blocks: int = 64, **fields: Any) -> Driver:
    return Driver(*subject.runner(spec, params=random_weights, **fields), num_blocks=num_blocks)


def reference_of(subject: Subject, spec: ModelSpec, *, num_blocks: int = 64, **fields: Any) -> Driver:
    runner, config = subject.reference_runner(spec, params=random_weights, **fields)
    return Driver(runner, config, num_blocks=num_blocks, seed=1)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [int(token_id) for token_id in np.random.default_rng(1000 * seed + length).integers(0, 211, length)]


def with_rows(batch: StepInput, counts: Sequence[int]) -> StepInput:
    """The step with logits for the last tokens of each request, as many as `counts` says, each a sampled row."""
    assert batch.sampling is not None, "every request samples"
    ends, positions = batch.forward.query_start_loc[1:].tolist(), batch.sampling.positions.tolist()
    pairs = [(i, back) for i, count in enumerate(counts) for back in range(count - 1, -1, -1)]
    forward = replace(batch.forward, logits_indices=np.array([ends[i] - 1 - back for i, back in pairs], np.int32))
    sampling = replace(
        batch.sampling,
        rows=np.arange(len(pairs), dtype=np.int32),
        slots=batch.sampling.slots[[i for i, _ in pairs]],
        positions=np.array([positions[i] - back for i, back in pairs], np.int32),
        seeds=np.zeros(len(pairs), np.int32),
    )
    return replace(batch, forward=forward, sampling=sampling)


def compare_logprobs(got: LogprobArrays | None, want: LogprobArrays | None, what: str) -> None:
    if got is None or want is None:
        raise Failed(f"{what}: no log probabilities came")
    for name in ("ranks", "top_ids"):
        ours, theirs = getattr(got, name), getattr(want, name)
        if not np.array_equal(ours, theirs):
            raise Failed(f"{what}: {name} {ours.tolist()[:6]}, expected {theirs.tolist()[:6]}")
    for name in ("chosen", "top_values"):
        error = nmse(getattr(got, name), getattr(want, name))
        if not error <= TOLERANCE:
            raise Failed(f"{what}: error of {name} {error:.1e}, allowed {TOLERANCE:.0e}")
