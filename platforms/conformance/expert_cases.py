"""Inputs of the ops that choose experts."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from .values import ROWS, Case, Rng, normal32, whole


def part_identities(rng: Rng) -> Iterator[Case]:
    for rows in ROWS:
        weights, experts = normal32(rng, rows, 5), whole(rng.integers(0, 12, (rows, 5)))
        yield Case(f"{rows} rows", [weights, experts], {"num_experts": 8}, exact_inputs=True)


def route_experts(rng: Rng) -> Iterator[Case]:
    for rows in ROWS:
        logits, correction = normal32(rng, rows, 16), normal32(rng, 16)
        for what, more, kwargs in (
            ("softmax", (), {"num_experts_per_token": 4}),
            ("softmax as it is", (), {"num_experts_per_token": 4, "renormalize": False, "weight_scale": 2.5}),
            ("sigmoid", (correction,), {"num_experts_per_token": 3, "score": "sigmoid"}),
            ("one of them", (), {"num_experts_per_token": 1, "score": "sigmoid", "renormalize": False}),
            ("one of them, of weight 1", (correction,), {"num_experts_per_token": 1}),
            ("sparsemixer", (), {"num_experts_per_token": 2, "score": "sparsemixer"}),
            (
                "groups by two",
                (correction,),
                {
                    "num_experts_per_token": 3,
                    "score": "sigmoid",
                    "num_groups": 4,
                    "num_groups_per_token": 2,
                    "weight_scale": 2.5,
                },
            ),
            (
                "groups by one",
                (),
                {"num_experts_per_token": 3, "num_groups": 4, "num_groups_per_token": 2, "group_score": "max"},
            ),
        ):
            yield Case(f"{what}, {rows} tokens", [logits, *more], kwargs, exact_inputs=True)
    yield from _many_experts(rng)


def _many_experts(rng: Rng) -> Iterator[Case]:
    """As many as DeepSeek-V3 has, in groups and without; scores that are far apart, small, and moved."""
    logits, correction = normal32(rng, 9, 256), normal32(rng, 256)
    groups = {"score": "sigmoid", "num_groups": 8, "num_groups_per_token": 4, "weight_scale": 2.5}
    for what, args, kwargs in (
        ("softmax of 256", (logits,), {}),
        ("sigmoid of 256", (logits, correction), {"score": "sigmoid"}),
        ("softmax of 256, corrected", (logits, correction), {"renormalize": False}),
        ("groups of 256", (logits, correction), groups),
        ("groups, all corrected below 0", (logits, replace(correction, array=correction.array - 9)), groups),
        ("large logits", (replace(logits, array=logits.array * np.float32(4) + np.float32(300)),), {}),
        ("small scores", (replace(logits, array=logits.array - np.float32(20)),), {"score": "sigmoid"}),
    ):
        yield Case(what, args, {"num_experts_per_token": 8, **kwargs}, exact_inputs=True)
