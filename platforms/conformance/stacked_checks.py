"""Mixtures of experts and the heads of latent attention against their definitions in float64."""

from functools import partial
from typing import Any

import numpy as np

from headrace.core.ops import OpTable
from headrace.core.self_test import TOLERANCE
from headrace.core.weights.block_types import BLOCK_TYPES
from headrace.core.weights.source import HostTensor

from .arrays import compare, to_array, to_numpy, to_slice, wide_copy
from .registry import DTYPES, Subject, add_check, need_definitions
from .values import HostArray, Rng, normal, normal32, whole
from .weight_cases import FURTHER, QUANTIZED, eased, host_tensor, rounded

EXPERTS: tuple[dict[str, Any], ...] = (
    {},
    {"activation": "gelu_tanh"},
    {"bias": True},
    {"bias": True, "clamp": 0.7},
    {"clamp": 0.9, "alpha": 1.1},
    {"scale_input": True},
    {"partial": True, "bias": True},
    {"gated": False, "activation": "relu2"},
    {"gated": False, "activation": "linear", "partial": True, "out": 72, "per_token": 1},
    {"many": True},
    {"twice": True},
)
"""What mixtures may ask for: keywords of the op, biases, more tokens than a tile of one expert holds; and adapters,
whose outputs have a size of their own."""
_OF_SHAPES = ("bias", "many", "twice", "out", "per_token")


def _stacked(rng: Rng, count: int, rows: int, columns: int) -> tuple[HostTensor, HostArray]:
    """Matrices as a checkpoint holds them, and as the definition does."""
    values = (rng.standard_normal((count * rows, columns)) / columns**0.5).astype(np.float32)
    tensor = HostTensor(name="weight", dtype="float32", shape=values.shape, data=values)
    return tensor, values.reshape(count, rows, columns)


def _check_experts(dtype: str, subject: Subject) -> str:
    need_definitions()
    import torch

    ops, rng = subject.ops(dtype), np.random.default_rng(0)
    num_experts, hidden, size = 6, 40, 24
    worst, count = 0.0, 0
    for options in EXPERTS:
        kwargs = {name: value for name, value in options.items() if name not in _OF_SHAPES}
        out, per_token = options.get("out", hidden), options.get("per_token", 2)
        packed, exact = [], []
        inner = size if options.get("gated") is False else 2 * size
        for rows, columns in ((inner, hidden), (out, size)):
            tensor, values = _stacked(rng, num_experts, rows, columns)
            packed.append(ops.pack_stacked([tensor], num_stacked=num_experts, dtype=dtype, device=subject.place))
            exact.append(torch.from_numpy(values).to(getattr(torch, dtype)).double())
        biases = [normal32(rng, num_experts * n) for n in (2 * size, out)] if options.get("bias") else []
        for num_tokens in (0, 1, 5, 33) if not options.get("many") else (150,):
            chosen = np.argsort(rng.random((num_tokens, num_experts)), -1)[:, :per_token]
            chosen[: num_tokens // 2] = (5, 0)[:per_token]  # most tokens on two experts, some experts without any
            if options.get("partial"):
                chosen[rng.random(chosen.shape) < 0.4] = num_experts
            factors = normal32(rng, num_tokens, per_token)
            if options.get("twice"):  # as `part_identities` leaves a token that has expert 0, too
                chosen[::2], factors.array[::4, 1], factors.array[2::4, 0] = 0, 0.0, 0.0
            x = to_slice(ops, normal(rng, num_tokens, hidden), dtype)
            weights, experts = (to_array(ops, value, dtype) for value in (factors, whole(chosen)))
            extra = [to_array(ops, bias, dtype) for bias in biases]
            got = ops.grouped_experts(x, weights, experts, *packed, *extra, **kwargs)
            want = OpTable.grouped_experts(
                *(wide_copy(ops, array, torch.float64) for array in (x, weights, experts)),
                *exact,
                *(wide_copy(ops, array, torch.float64) for array in extra),
                **kwargs,
            )
            what = f"{options or 'plain'}, {num_tokens} tokens"
            worst = max(worst, compare(to_numpy(ops, got), want.numpy(), TOLERANCE[dtype], what))
            count += 1
    return f"{count} cases, worst error {worst:.1e}, allowed {TOLERANCE[dtype]:.0e}"


def _check_latents(dtype: str, subject: Subject) -> str:
    need_definitions()
    import torch

    ops, rng = subject.ops(dtype), np.random.default_rng(0)
    heads, nope_dim, v_dim, rank = 3, 20, 12, 33
    tensor, values = _stacked(rng, heads, nope_dim + v_dim, rank)
    weight = ops.pack_stacked([tensor], num_stacked=heads, dtype=dtype, device=subject.place)
    exact = torch.from_numpy(values).to(getattr(torch, dtype)).double()
    worst = 0.0
    for num_tokens in (0, 1, 17):
        query, latents = (to_slice(ops, normal(rng, num_tokens, heads, size), dtype) for size in (nope_dim, rank))
        for what, got, want in (
            (
                "absorb_keys",
                ops.absorb_keys(query, weight),
                OpTable.absorb_keys(wide_copy(ops, query, torch.float64), exact),
            ),
            (
                "expand_values",
                ops.expand_values(latents, weight, v_head_dim=v_dim),
                OpTable.expand_values(wide_copy(ops, latents, torch.float64), exact, v_head_dim=v_dim),
            ),
        ):
            what = f"{what} of {num_tokens} tokens"
            worst = max(worst, compare(to_numpy(ops, got), want.numpy(), TOLERANCE[dtype], what))
    return f"6 cases, worst error {worst:.1e}, allowed {TOLERANCE[dtype]:.0e}"


def _check_stored(dtype: str, subject: Subject) -> str:
    need_definitions()
    import torch

    ops, caps, worst = subject.ops(dtype), subject.device.caps, 0.0
    blocks = [name for name in BLOCK_TYPES if name in caps.schemes]
    stored_as = dict.fromkeys(("bfloat16", "float16", "q8_0", *QUANTIZED, *FURTHER, *blocks))
    num_experts, hidden, size, heads, nope_dim, v_dim, rank = 5, 256, 512, 3, 20, 12, 256
    for stored in stored_as:
        rng = np.random.default_rng(0)
        allowed = max(TOLERANCE[dtype], 2 * eased(stored) if stored.partition("-")[0] in {*caps.schemes} else 0)

        def pack(rng: Rng, count: int, rows: int, columns: int, stored: str = stored) -> tuple[Any, Any]:
            tensor = host_tensor(rng, count * rows, columns, stored)
            packed = ops.pack_stacked([tensor], num_stacked=count, dtype=dtype, device=subject.place)
            return packed, rounded([tensor], dtype).view(count, rows, columns)

        (up, wide_up), (down, wide_down) = (
            pack(rng, num_experts, 2 * size, hidden),
            pack(rng, num_experts, hidden, size),
        )
        for num_tokens in (1, 7, 40):
            chosen = whole(np.argsort(rng.random((num_tokens, num_experts)), -1)[:, :2])
            given = [normal(rng, num_tokens, hidden), normal32(rng, num_tokens, 2), chosen]
            arrays = [to_array(ops, value, dtype) for value in given]
            x, weights, experts = (wide_copy(ops, array, torch.float64) for array in arrays)
            got = ops.grouped_experts(arrays[0], arrays[1], arrays[2], up, down)
            want = OpTable.grouped_experts(x, weights, experts, wide_up, wide_down)
            what = f"experts in {stored}, {num_tokens} tokens"
            worst = max(worst, compare(to_numpy(ops, got), want.numpy(), allowed, what))
        weight, exact = pack(rng, heads, nope_dim + v_dim, rank)
        query, latents = (to_array(ops, normal(rng, 9, heads, width), dtype) for width in (nope_dim, rank))
        wide_query, wide_latents = (wide_copy(ops, array, torch.float64) for array in (query, latents))
        for what, got, want in (
            ("keys", ops.absorb_keys(query, weight), OpTable.absorb_keys(wide_query, exact)),
            (
                "values",
                ops.expand_values(latents, weight, v_head_dim=v_dim),
                OpTable.expand_values(wide_latents, exact, v_head_dim=v_dim),
            ),
        ):
            worst = max(worst, compare(to_numpy(ops, got), want.numpy(), allowed, f"{what} of heads in {stored}"))
    return f"{len(stored_as)} stored dtypes, worst error {worst:.1e}"


def _register() -> None:
    for dtype in DTYPES:
        meaning = "pack_stacked and grouped_experts against the definition"
        add_check(f"ops.grouped_experts.{dtype}", meaning, partial(_check_experts, dtype))
        meaning = "stacked weights of each stored dtype and scheme, against float64"
        add_check(f"ops.stored_experts.{dtype}", meaning, partial(_check_stored, dtype))
        meaning = "pack_stacked, absorb_keys and expand_values against the definitions"
        add_check(f"ops.latent_heads.{dtype}", meaning, partial(_check_latents, dtype))


_register()
