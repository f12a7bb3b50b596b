"""The ops between logits and tokens over numpy arrays: what `sample_step` calls on this platform."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.core.ops import OpTable
from headrace.kernels.cpu import _ops

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


def sampling_ops() -> OpTable:
    """An op table whose sampling and transfer ops take and return numpy arrays; the others are not for use."""
    table: dict[str, Callable[..., Any]] = {
        "gather": lambda x, indices: x[indices],
        "to_device": lambda array: array,
        "to_host": lambda array: array,
        "apply_token_mask": apply_token_mask,
        "add_logit_bias": add_logit_bias,
        "apply_penalties": apply_penalties,
        "logprobs": logprobs,
        "sample": sample,
        "remember_tokens": remember_tokens,
        "recall_tokens": recall_tokens,
    }
    return OpTable(table)


def apply_token_mask(logits: Floats, mask: Ints) -> Floats:
    """As the declaration in core/ops says; returns a new array."""
    bits = np.unpackbits(mask.view(np.uint8), axis=-1, bitorder="little", count=logits.shape[-1])
    return np.where(bits, logits, np.float32(-np.inf))


def add_logit_bias(logits: Floats, rows: Ints, tokens: Ints, values: Floats) -> Floats:
    """As the declaration says; returns a new array."""
    edited = logits.copy()
    np.add.at(edited, (rows, tokens), values)
    return edited


def apply_penalties(
    logits: Floats, rows: Ints, tokens: Ints, counts: Ints, repetition: Floats, frequency: Floats, presence: Floats
) -> Floats:
    """As the declaration says; returns a new array."""
    edited = logits.copy()
    is_row = rows >= 0
    rows, tokens, counts = rows[is_row], tokens[is_row], counts[is_row]
    value, rep = edited[rows, tokens], repetition[rows]
    value = np.where(value > 0, value / rep, value * rep)
    edited[rows, tokens] = value - frequency[rows] * counts - presence[rows] * (counts > 0)
    return edited


def logprobs(logits: Floats, token_ids: Ints, *, num_logprobs: int) -> tuple[Floats, Ints, Ints, Floats]:
    """As the declaration says. Equal values are ordered by token id."""
    top = logits.max(-1, keepdims=True)
    values = logits - top
    values -= np.log(np.exp(values).sum(-1, keepdims=True, dtype=np.float64)).astype(np.float32)
    chosen = np.take_along_axis(values, token_ids[:, None].astype(np.int64), -1)
    ranks = (values > chosen).sum(-1, dtype=np.int32) + np.int32(1)
    if num_logprobs == 0:
        empty = np.empty((len(values), 0))
        return chosen[:, 0], ranks, empty.astype(np.int32), empty.astype(np.float32)
    best = np.argpartition(-values, num_logprobs - 1, axis=-1)[:, :num_logprobs]
    best.sort(-1)
    order = np.argsort(-np.take_along_axis(values, best, -1), axis=-1, kind="stable")
    best = np.take_along_axis(best, order, -1)
    return chosen[:, 0], ranks, best.astype(np.int32), np.take_along_axis(values, best, -1)


def sample(
    logits: Floats,
    seeds: Ints,
    positions: Ints,
    temperature: Floats | None,
    top_k: Ints | None,
    top_p: Floats | None,
    min_p: Floats | None,
) -> Ints:
    """As the declaration says, by the native kernel."""
    out = np.empty(len(logits), np.int32)
    _ops.sample(out, np.ascontiguousarray(logits), seeds, positions, temperature, top_k, top_p, min_p)
    return out


def remember_tokens(last_tokens: Ints, slots: Ints, token_ids: Ints) -> Ints:
    """As the declaration says; mutates last_tokens."""
    last_tokens[slots] = token_ids
    return last_tokens


def recall_tokens(input_ids: Ints, last_tokens: Ints, slots: Ints) -> Ints:
    """As the declaration says; returns a new array."""
    return np.where(input_ids < 0, last_tokens[slots], input_ids)
