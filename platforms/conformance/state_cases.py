"""Cases of the ops over states: rows of all lengths in one batch, new and begun, and one token for every row."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from .values import Case, Rng, Value, normal, normal32, whole

NUM_SLOTS = 400


def causal_conv(rng: Rng) -> Iterator[Case]:
    """Channels within and across a vector's end, widths of 1 to 8, with and without bias and activation."""
    for what, rows, _ in _batches(rng):
        for channels, width in ((5, 1), (1, 2), (70, 3), (129, 4), (65, 7), (33, 8)):
            state = replace(normal(rng, NUM_SLOTS, width - 1, channels), is_mutable=True)
            args = [normal(rng, _num_tokens(rows), channels), normal32(rng, channels, 1, width)]
            kwargs = {"activation": "silu" if width == 4 else None}
            yield Case(what, [*args, normal32(rng, channels) if width > 2 else None, state, *rows], kwargs)


def selective_scan(rng: Rng) -> Iterator[Case]:
    """Channels that are heads of one value with a matrix of decays, and heads of several values in groups."""
    for what, rows, most in _batches(rng):
        tokens = _num_tokens(rows)
        for heads, dim, size, groups in ((5, 1, 16, 1), (4, 9, 24, 2)):
            values = [normal(rng, tokens, heads, dim), normal(rng, tokens, heads)]
            values += [normal(rng, tokens, groups, size), normal(rng, tokens, groups, size)]
            a_log = normal32(rng, heads, size) if dim == 1 else normal32(rng, heads)
            state = replace(normal32(rng, NUM_SLOTS, heads, dim, size), is_mutable=True)
            kwargs = {"dt_min": 0.1, "dt_max": 1.5, "max_query_len": most}
            yield Case(what, [*values, a_log, normal32(rng, heads), normal32(rng, heads), state, *rows], kwargs)
            if dim > 1 and most == 1:
                far = replace(values[1], array=values[1].array * np.float32(60))
                vectors = [normal32(rng, heads) for _ in range(3)]
                args = [values[0], far, *values[2:], *vectors, state, *rows]
                yield Case("steps far from 0", args, {"max_query_len": most})


def gated_delta(rng: Rng) -> Iterator[Case]:
    """Keys shared by heads, decays for heads and for the values of keys."""
    for what, rows, most in _batches(rng):
        tokens, heads, groups, key_dim, dim = _num_tokens(rows), 4, 2, 12, 9
        for decays in (1, key_dim):
            values = [
                normal(rng, tokens, groups, key_dim),
                normal(rng, tokens, groups, key_dim),
                normal(rng, tokens, heads, dim),
            ]
            values += [
                normal(rng, tokens, heads) if decays == 1 else normal(rng, tokens, heads, key_dim),
                normal(rng, tokens, heads),
            ]
            state = replace(normal32(rng, NUM_SLOTS, heads, key_dim, dim), is_mutable=True)
            kwargs = {"beta_scale": min(float(decays), 2.0), "max_query_len": most}
            yield Case(what, [*values, normal32(rng, heads), normal32(rng, heads * decays), state, *rows], kwargs)
            if decays == 1 and most == 1:
                values[:2] = [replace(value, array=value.array * np.float32(3e-4)) for value in values[:2]]
                args = [*values, normal32(rng, heads), normal32(rng, heads), state, *rows]
                yield Case("short keys", args, {"max_query_len": most})


def wkv(rng: Rng) -> Iterator[Case]:
    """Channels within and across a vector's end, keys whose exponentials no float32 holds, states of nothing."""
    for what, rows, most in _batches(rng):
        for channels, reach in ((1, 1.0), (70, 1.0), (33, 120.0), (300, 1.0)):
            key = normal(rng, _num_tokens(rows), channels)
            key = replace(key, array=key.array * np.asarray(reach, key.array.dtype))
            state = normal32(rng, NUM_SLOTS, 3, channels)
            state.array[:, 1] = np.abs(state.array[:, 1])
            state.array[::2, 1] = 0
            args = [key, normal(rng, _num_tokens(rows), channels), normal32(rng, channels), normal32(rng, channels)]
            yield Case(what, [*args, replace(state, is_mutable=True), *rows], {"max_query_len": most})


def _batches(rng: Rng) -> Iterator[tuple[str, list[Value], int]]:
    """(name, query_start_loc, from_slots and to_slots, max_query_len). In the last two batches a row's last state
    takes the place of the one that it began with; in the others no slot is both read and written."""
    for what, counts, most, columns in (
        ("mixed rows", (5, 1, 0, 33, 2), 0, 3),
        ("the last state of each row", (5, 1, 0, 33, 2), 0, 1),
        ("a long row", (150, 3), 150, 1),
        ("one token a row", (1,) * 7, 1, 2),
    ):
        starts = np.cumsum([0, *counts])
        # What lies in further columns means nothing.
        before = np.array([[-1 if r % 3 == 0 else 1 + r, 17, -1][:columns] for r in range(len(counts))])
        kept = 20 + rng.permutation(NUM_SLOTS - 20)[: starts[-1]]
        if what.startswith("the last"):
            kept[~np.isin(np.arange(starts[-1]), starts[1:] - 1)] = -1
        if most:
            kept[starts[1:] - 1] = np.where(before[:, 0] < 0, kept[starts[1:] - 1], before[:, 0])
        yield what, [whole(starts), whole(before), whole(kept)], most


def _num_tokens(rows: list[Value]) -> int:
    return int(rows[0].array[-1])


def lru_inputs(rng: Rng) -> Iterator[Case]:
    for rows in (0, 1, 37):
        arrays = [normal(rng, rows, 48) for _ in range(3)]
        vectors = [normal32(rng, 48) for _ in range(3)]
        yield Case(f"{rows} rows", [*arrays, *vectors, whole(np.arange(rows) % 9)])


BY_OP = {
    "causal_conv": causal_conv,
    "selective_scan": selective_scan,
    "gated_delta": gated_delta,
    "wkv": wkv,
    "lru_inputs": lru_inputs,
}
