"""Each op against its definition in float64, by dtype, over odd, empty and large shapes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.core.ops import OpTable
from headrace.core.self_test import TOLERANCE, nmse
from headrace.core.weights.dequantize import to_float32
from headrace.core.weights.quantize import CODES, FP8, INT4, INT8, INT8_GROUPS, quantize_rows
from headrace.core.weights.source import HostTensor

from . import state_cases
from .registry import DTYPES, Failed, Subject, add_check, need_definitions
from .values import Case, HostArray, Rng, Value, normal, normal32, whole

if TYPE_CHECKING:
    import torch

ROWS = (0, 1, 3, 17, 130)
"""Token counts: none, one, odd, across a vector's end, large."""
WIDTHS = (1, 7, 64, 576)
SIZES = (2e-3, 900.0)
"""Of a norm's input: where eps counts, and where squares are more than float16 holds."""
QUANTIZED = {
    "int8": INT8_GROUPS,
    "int8-channel": INT8,
    "fp8": FP8,
    **{name: INT4[name] for name in ("int4", "int4-sym")},
}
"""Weights as `--quantize` leaves them."""


# ---- the cases of each op -----------------------------------------------------------------------------------
def _rms_norm(rng: Rng) -> Iterator[Case]:
    for rows in ROWS:
        for width in WIDTHS:
            yield Case(f"[{rows}, {width}]", [normal(rng, rows, width), normal32(rng, width)], {"eps": 1e-5})
    yield Case("per head", [normal(rng, 5, 3, 64), normal32(rng, 64)], {"eps": 1e-6})
    yield Case("no weight", [normal(rng, 4, 33), None], {"eps": 1e-6})
    for size in SIZES:
        args = [_times(normal(rng, 5, 64), size), normal32(rng, 64)]
        yield Case(f"values of about {size}", args, {"eps": 1e-5})


def _add_rms_norm(rng: Rng) -> Iterator[Case]:
    for rows in ROWS:
        for width in WIDTHS:
            args = [normal(rng, rows, width), normal(rng, rows, width), normal32(rng, width)]
            yield Case(f"[{rows}, {width}]", args, {"eps": 1e-5})
    yield Case("no weight", [normal(rng, 4, 33), normal(rng, 4, 33), None], {"eps": 1e-6})
    for size in SIZES:
        args = [_times(normal(rng, 5, 64), size), _times(normal(rng, 5, 64), size), normal32(rng, 64)]
        yield Case(f"values of about {size}", args, {"eps": 1e-5})


def _layer_norm(rng: Rng) -> Iterator[Case]:
    for rows in ROWS:
        for width in WIDTHS[1:]:
            args = [normal(rng, rows, width), normal32(rng, width), normal32(rng, width)]
            yield Case(f"[{rows}, {width}]", args, {"eps": 1e-5})
    yield Case("no weight, no bias", [normal(rng, 4, 33), None, None], {"eps": 1e-5})
    for size in SIZES:
        yield Case(f"values of about {size}", [_times(normal(rng, 5, 64), size), None, None], {"eps": 1e-5})


def _times(value: Value, factor: float) -> Value:
    return replace(value, array=value.array * np.float32(factor))


def _rotary_angles(rng: Rng) -> Iterator[Case]:
    inv_freq = (1e4 ** (-np.arange(16, dtype=np.float32) / 16)).astype(np.float32)
    for positions in ([], [0], [0, 1, 2, 8191, 131071]):
        args = [whole(positions), Value("float32", inv_freq[None]), Value("float32", np.ones(1, np.float32))]
        yield Case(f"positions {positions}", args, exact_inputs=True)
    tables = Value("float32", np.stack([inv_freq, inv_freq / 4]))
    factors = Value("float32", np.array([1.0, 1.19], np.float32))
    yield Case("two variants", [whole([5, 4000, 9]), tables, factors, whole([1, 0, 1])], exact_inputs=True)


def _rope(rng: Rng) -> Iterator[Case]:
    for rows in ROWS:
        for heads, head_dim, rotary_dim in ((1, 16, 16), (3, 64, 64), (4, 80, 32)):
            angles = rng.uniform(0, 6.28, (rows, rotary_dim // 2)).astype(np.float32)
            turns = [Value("float32", np.cos(angles)), Value("float32", np.sin(angles))]
            for interleaved in (False, True):
                what = f"[{rows}, {heads}, {head_dim}] rotary {rotary_dim} interleaved {interleaved}"
                yield Case(what, [normal(rng, rows, heads, head_dim), *turns], {"interleaved": interleaved})


def _pairwise(rng: Rng) -> Iterator[Case]:
    for rows in ROWS:
        for width in WIDTHS:
            yield Case(f"[{rows}, {width}]", [normal(rng, rows, width), normal(rng, rows, width)])


def _with_number(number: float, rng: Rng) -> Iterator[Case]:
    for rows in ROWS:
        for width in WIDTHS:
            yield Case(f"[{rows}, {width}]", [normal(rng, rows, width), number])


def _activations(columns: int, rng: Rng) -> Iterator[Case]:
    for activation in ("silu", "gelu", "gelu_tanh", "relu", "relu2", "quick_gelu"):
        for rows in ROWS:
            for width in WIDTHS:
                what = f"{activation} [{rows}, {columns * width}]"
                yield Case(what, [normal(rng, rows, columns * width)], {"activation": activation})


def _split(rng: Rng) -> Iterator[Case]:
    for rows in ROWS:
        yield Case(f"{rows} rows", [normal(rng, rows, 64 + 7 + 1), (64, 7, 1)])


def _split_heads(rng: Rng) -> Iterator[Case]:
    for rows in ROWS:
        yield Case(f"{rows} rows", [normal(rng, rows, 3 * 80)], {"head_dim": 80})


def _merge_heads(rng: Rng) -> Iterator[Case]:
    for rows in ROWS:
        yield Case(f"{rows} rows", [normal(rng, rows, 3, 80)])


def _gather(rng: Rng) -> Iterator[Case]:
    for count in ROWS:
        yield Case(f"{count} of 9 rows", [normal(rng, 9, 65), whole(rng.integers(0, 9, count))])


def _gate(rng: Rng) -> Iterator[Case]:
    for rows in ROWS:
        for width in (64, 1):
            yield Case(f"{rows} rows, gates of {width}", [normal(rng, rows, 64), normal(rng, rows, width)])


def _xielu(rng: Rng) -> Iterator[Case]:
    for rows in ROWS:
        yield Case(f"{rows} rows", [normal(rng, rows, 65), normal32(rng, 1), normal32(rng, 1)])


def _mul(rng: Rng) -> Iterator[Case]:
    for rows in ROWS:
        for what, factors in (
            ("a row", normal32(rng, 65)),
            ("a column", normal32(rng, rows, 1)),
            ("all", normal(rng, rows, 65)),
        ):
            yield Case(f"{rows} rows by {what}", [normal(rng, rows, 65), factors])


def _clamp(rng: Rng) -> Iterator[Case]:
    for rows in ROWS:
        yield Case(f"{rows} rows", [normal(rng, rows, 65)], {"limit": 0.75})


def _log_growth(rng: Rng) -> Iterator[Case]:
    positions = whole([0, 1, 7, 8, 8191, 8192, 100_000])
    for shift in (0, 1):
        for length in (8, 8192):
            kwargs = {"factor": 0.1, "length": length, "shift": shift}
            yield Case(f"length {length}, shift {shift}", [positions], kwargs, exact_inputs=True)


def _route_experts(rng: Rng) -> Iterator[Case]:
    for rows in ROWS:
        logits, correction = normal32(rng, rows, 16), normal32(rng, 16)
        for what, more, kwargs in (
            ("softmax", (), {"num_experts_per_token": 4}),
            ("softmax as it is", (), {"num_experts_per_token": 4, "renormalize": False, "weight_scale": 2.5}),
            ("sigmoid", (correction,), {"num_experts_per_token": 3, "score": "sigmoid"}),
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


def _cast(rng: Rng) -> Iterator[Case]:
    for rows in ROWS:
        yield Case(f"{rows} rows", [normal(rng, rows, 33)], {"dtype": "float32"})


def _apply_token_mask(rng: Rng) -> Iterator[Case]:
    for rows in ROWS[1:]:
        for vocab_size in (31, 32, 1000):
            words = rng.integers(-(2**31), 2**31, (rows, -(-vocab_size // 32)))
            yield Case(f"[{rows}, {vocab_size}]", [normal32(rng, rows, vocab_size), whole(words)])


def _add_logit_bias(rng: Rng) -> Iterator[Case]:
    values = Value("float32", np.array([2.5, -np.inf, -1.0, 0.5], np.float32))
    yield Case("bias and ban", [normal32(rng, 3, 97), whole([0, 0, 2, 2]), whole([96, 3, 0, 1]), values])
    none = [whole([]), whole([]), Value("float32", np.zeros(0, np.float32))]
    yield Case("nothing", [normal32(rng, 3, 97), *none])


def _apply_penalties(rng: Rng) -> Iterator[Case]:
    rows, tokens, counts = [0, 0, 1, 2, 2], [5, 96, 0, 5, 6], [0, 3, 1, 2, 0]
    strengths = [np.array(values, np.float32) for values in ([1.3, 1.0, 0.8], [0.5, -0.5, 0.0], [0.2, 0.0, -1.0])]
    args = [normal32(rng, 3, 97), *map(whole, (rows, tokens, counts)), *(Value("float32", s) for s in strengths)]
    yield Case("three rows", args)


def _logprobs(rng: Rng) -> Iterator[Case]:
    for rows in ROWS:
        for num_logprobs in (0, 1, 20):
            args = [normal32(rng, rows, 301), whole(rng.integers(0, 301, rows))]
            yield Case(f"[{rows}, 301] top {num_logprobs}", args, {"num_logprobs": num_logprobs})


def _sample(rng: Rng) -> Iterator[Case]:
    rows, vocab_size = 40, 1009
    logits = rng.standard_normal((rows, vocab_size)).astype(np.float32) * 3
    logits[0] = 0.0  # all equal: the lowest token id wins
    base = [Value("float32", logits), whole(rng.integers(-(2**31), 2**31, rows)), whole(np.arange(rows) * 37)]
    warm = np.linspace(0, 2, rows, dtype=np.float32)
    top_k = np.array([0, 1, 5, vocab_size] * 10)
    top_p = np.tile(np.array([1.0, 0.9, 0.5, 0.01], np.float32), 10)
    min_p = np.tile(np.array([0.0, 0.05, 0.5, 1.0], np.float32), 10)
    yield Case("greedy", [*base, None, None, None, None], exact_inputs=True)
    yield Case("temperature", [*base, Value("float32", warm), None, None, None], exact_inputs=True)
    for name, arguments in (
        ("top_k", [whole(top_k), None, None]),
        ("top_p", [None, Value("float32", top_p), None]),
        ("min_p", [None, None, Value("float32", min_p)]),
        ("all", [whole(top_k), Value("float32", top_p[::-1].copy()), Value("float32", min_p)]),
    ):
        yield Case(name, [*base, Value("float32", warm), *arguments], exact_inputs=True)
    # Few different values: which of equal tokens are kept is decided by their order. Probabilities are whole 1/64ths,
    # so that sums are exact in any order.
    tied = np.log(np.array([16, 16, 8, 8, 8, 2, 2, 1, 1, 1, 1], np.float32))
    ties = [Value("float32", np.tile(tied, (rows, 1))), *base[1:], Value("float32", np.ones(rows, np.float32))]
    limits = np.tile(np.array([0.2, 0.3, 0.4, 0.6, 0.7], np.float32), 8)
    yield Case("top_k of equal tokens", [*ties, whole([1, 3, 4, 6, 9] * 8), None, None], exact_inputs=True)
    yield Case("top_p of equal tokens", [*ties, None, Value("float32", limits), None], exact_inputs=True)


def _recall_tokens(rng: Rng) -> Iterator[Case]:
    yield Case("mixed", [whole([4, -1, 7, -1]), whole([10, 11, 12]), whole([0, 2, 1, 0])])


def _encoder_attention(rng: Rng) -> Iterator[Case]:
    for heads, kv_heads, lengths in ((2, 2, (1,)), (4, 2, (7, 0, 70)), (3, 1, (33, 1, 2))):
        tokens, starts = sum(lengths), whole(np.cumsum([0, *lengths]))
        arrays = [
            normal(rng, tokens, heads, 32),
            normal(rng, tokens, kv_heads, 32),
            normal(rng, tokens, kv_heads, 32),
            starts,
        ]
        for window in (0, 1, 5):
            yield Case(f"{lengths} tokens, window {window}", arrays, {"scale": 0.25, "window": window})

        yield Case(f"{lengths} tokens, bias", [*arrays, normal32(rng, 32, heads)], {"scale": 0.25})


def _stack_rows(rng: Rng) -> Iterator[Case]:
    indices = np.stack([np.arange(0, 130, 2) + tap for tap in (-1, 0, 1)], axis=1)
    yield Case("130 rows by threes", [normal(rng, 130, 33), whole(indices)])


def _mean_rows(rng: Rng) -> Iterator[Case]:
    yield Case("ranges of 130 rows", [normal(rng, 130, 65), whole([0, 3, 40, 129]), whole([3, 4, 130, 130])])


def _store_rows(rng: Rng) -> Iterator[Case]:
    yield Case(
        "5 rows of 9", [replace(normal(rng, 9, 33), is_mutable=True), normal(rng, 5, 33), whole([8, -1, 0, 3, 5])]
    )


def _place_rows(rng: Rng) -> Iterator[Case]:
    arrays = [normal(rng, 70, 33), normal(rng, 9, 33), whole(np.arange(70) % 10 - 1)]
    for add in (False, True):
        yield Case(f"70 rows, add {add}", arrays, {"add": add})


_BY_DTYPE: dict[str, Callable[[Rng], Iterator[Case]]] = {
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "layer_norm": _layer_norm,
    "rope": _rope,
    "add": _pairwise,
    "scale": partial(_with_number, 11.3137),
    "softcap": partial(_with_number, 1.5),
    "act": partial(_activations, 1),
    "act_mul": partial(_activations, 2),
    "split": _split,
    "split_heads": _split_heads,
    "merge_heads": _merge_heads,
    "gather": _gather,
    "gate": _gate,
    "xielu": _xielu,
    "mul": _mul,
    "clamp": _clamp,
    "cast": _cast,
    "encoder_attention": _encoder_attention,
    "mean_rows": _mean_rows,
    "stack_rows": _stack_rows,
    "store_rows": _store_rows,
    "place_rows": _place_rows,
    "causal_conv": state_cases.causal_conv,
    "selective_scan": state_cases.selective_scan,
    "gated_delta": state_cases.gated_delta,
}
_FLOAT32: dict[str, Callable[[Rng], Iterator[Case]]] = {
    "rotary_angles": _rotary_angles,
    "log_growth": _log_growth,
    "route_experts": _route_experts,
    "apply_token_mask": _apply_token_mask,
    "add_logit_bias": _add_logit_bias,
    "apply_penalties": _apply_penalties,
    "logprobs": _logprobs,
    "sample": _sample,
    "recall_tokens": _recall_tokens,
}
"""Ops that take float32 or int32 only, whatever the model's dtype."""


# ---- running and comparing ----------------------------------------------------------------------------------
def _check_op(op: str, dtype: str, cases: Callable[[Rng], Iterator[Case]], subject: Subject) -> str:
    need_definitions()
    import torch

    ops = subject.ops(dtype)
    count, worst = 0, 0.0
    for case in cases(np.random.default_rng(0)):
        arguments = [to_array(ops, value, dtype) for value in case.args]
        kept = [not (isinstance(value, Value) and value.is_mutable) for value in case.args]
        before = [to_numpy(ops, array) for array in arguments if _is_array(array)]
        wide = torch.float32 if case.exact_inputs else torch.float64
        copies = [wide_copy(ops, array, wide) if _is_array(array) else array for array in arguments]
        results = getattr(ops, op)(*arguments, **case.kwargs)
        after = [to_numpy(ops, array) for array in arguments if _is_array(array)]
        arrays = [flag for flag, array in zip(kept, arguments, strict=True) if _is_array(array)]
        changed = [not np.array_equal(a, b, equal_nan=True) for a, b in zip(before, after, strict=True)]
        if any(is_changed and flag for is_changed, flag in zip(changed, arrays, strict=True)):
            raise Failed(f"{case.what}: it changed its arguments")
        expected = getattr(OpTable, op)(*copies, **case.kwargs)
        got, want = (_flat(value) for value in (results, expected))
        mutable = [value.array.shape for value in case.args if isinstance(value, Value) and value.is_mutable]
        for result, definition in zip(got, want, strict=True):
            array, wanted = to_numpy(ops, result), definition.numpy()
            if array.shape in mutable:  # what is not kept may land in the null block
                array, wanted = array[1:], wanted[1:]
            error = compare(array, wanted, TOLERANCE[dtype], case.what)
            worst = max(worst, error)
        count += 1
    return f"{count} cases, worst error {worst:.1e}, allowed {TOLERANCE[dtype]:.0e}"


def compare(got: HostArray, want: HostArray, tolerance: float, what: str) -> float:
    """The error of a result; raises Failed if shape, integers, infinities or the mean square error are wrong."""
    if got.shape != want.shape:
        raise Failed(f"{what}: shape {got.shape}, expected {want.shape}")
    if want.dtype.kind in "iu":
        if not np.array_equal(got, want):
            place = tuple(int(i) for i in np.argwhere(got != want)[0])
            raise Failed(f"{what}: {got[place]} at {place}, expected {want[place]}")
        return 0.0
    infinite = np.isinf(want)
    if not np.array_equal(got[infinite], want[infinite].astype(got.dtype)):
        raise Failed(f"{what}: infinities stand at other places")
    error = nmse(got[~infinite], want[~infinite])
    if not error <= tolerance:
        raise Failed(f"{what}: error {error:.1e}, allowed {tolerance:.0e}")
    return error


def to_array(ops: OpTable, value: Any, dtype: str) -> Any:
    """A Value on the device; anything else as it is."""
    if not isinstance(value, Value):
        return value
    array = ops.to_device(value.array)
    return ops.cast(array, dtype=dtype) if value.kind == "activation" else array


def to_numpy(ops: OpTable, array: Any) -> HostArray:
    """A copy of a device array on the host, activations as float32."""
    return np.array(ops.to_host(ops.cast(array, dtype="float32") if _is_narrow(array) else array))


def _is_array(value: object) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape")


def _is_narrow(array: Any) -> bool:
    # Numpy has no bfloat16: there, uint16 holds the bits of one.
    return str(array.dtype).removeprefix("torch.") in ("bfloat16", "float16", "uint16")


def wide_copy(ops: OpTable, array: Any, dtype: "torch.dtype") -> "torch.Tensor":
    import torch

    tensor = torch.from_numpy(to_numpy(ops, array))
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _flat(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple | list) else [value]


# ---- ops that need their own way ----------------------------------------------------------------------------
def _host_tensor(rng: Rng, rows: int, columns: int, dtype: str) -> HostTensor:
    values = (rng.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)
    if dtype in QUANTIZED:
        scheme = QUANTIZED[dtype]
        codes, code_scales, offsets = quantize_rows(values, scheme)
        return HostTensor(
            name="weight",
            dtype=CODES[scheme.name],
            shape=values.shape,
            data=codes,
            scales=code_scales,
            offsets=offsets,
        )
    if dtype == "q8_0":
        blocks = np.empty((rows, columns // 32, 34), np.uint8)
        scales = rng.uniform(0.001, 0.01, (rows, columns // 32, 1)).astype(np.float16)
        blocks[..., :2] = scales.view(np.uint8).reshape(rows, columns // 32, 2)
        blocks[..., 2:] = rng.integers(0, 256, (rows, columns // 32, 32))
        data: HostArray = blocks.reshape(rows, -1)
    elif dtype == "bfloat16":
        data = (values.view(np.uint32) >> 16).astype(np.uint16)
    else:
        data = values.astype(dtype)
    return HostTensor(name="weight", dtype=dtype, shape=(rows, columns), data=data)


def _rounded(tensors: Sequence[HostTensor], dtype: str) -> "torch.Tensor":
    """The stacked weight in float64, rounded to `dtype` first as the definition does."""
    import torch

    whole = torch.from_numpy(np.concatenate([to_float32(tensor) for tensor in tensors]))
    return whole.to(getattr(torch, dtype)).to(torch.float64)


def _check_linear(dtype: str, subject: Subject) -> str:
    need_definitions()
    import torch

    ops = subject.ops(dtype)
    count, worst = 0, 0.0
    kept = subject.device.caps.schemes
    for stored in ("float32", "bfloat16", "float16", "q8_0", *QUANTIZED):
        rng = np.random.default_rng(0)
        for rows, columns in (((1,), 32), ((7, 64, 3), 96), ((300,), 1056)):
            tensors = [_host_tensor(rng, part, columns, stored) for part in rows]
            weight = ops.pack_linear(tensors, dtype=dtype, device=subject.place)
            for num_tokens in ROWS:
                bias = normal32(rng, sum(rows)) if (num_tokens + sum(rows)) % 2 else None
                x = to_array(ops, normal(rng, num_tokens, columns), dtype)
                result = ops.linear(x, weight, to_array(ops, bias, dtype))
                expected = wide_copy(ops, x, torch.float64) @ _rounded(tensors, dtype).T
                if bias is not None:
                    expected = expected + torch.from_numpy(bias.array.astype(np.float64))
                what = f"{stored} [{sum(rows)}, {columns}] x {num_tokens} tokens"
                # A kernel that multiplies quantized blocks may quantize the activations to 8 bits too.
                rounded = 2e-3 if stored == "fp8" else 5e-4  # 4 bits of precision, or 8
                allowed = max(TOLERANCE[dtype], rounded if stored.partition("-")[0] in kept else 0)
                worst = max(worst, compare(to_numpy(ops, result), expected.numpy(), allowed, what))
                count += 1
    return f"{count} cases, worst error {worst:.1e}"


def _check_embedding(dtype: str, subject: Subject) -> str:
    need_definitions()
    import torch

    ops, rng = subject.ops(dtype), np.random.default_rng(0)
    for stored in ("float32", "bfloat16", "q8_0", *QUANTIZED):
        tensors = [_host_tensor(rng, 77, 96, stored)]
        weight = ops.pack_linear(tensors, dtype=dtype, device=subject.place)
        for num_tokens in ROWS:
            token_ids = rng.integers(0, 77, num_tokens).astype(np.int32)
            result = to_numpy(ops, ops.embedding(ops.to_device(token_ids), weight))
            expected = _rounded(tensors, dtype)[torch.from_numpy(token_ids).long()]
            compare(result, expected.numpy(), TOLERANCE[dtype], f"{stored}, {num_tokens} tokens")
    return f"{3 + len(QUANTIZED)} stored dtypes"


def _check_concat(dtype: str, subject: Subject) -> str:
    ops, rng = subject.ops(dtype), np.random.default_rng(0)
    for rows in ROWS:
        for shapes in (((rows, 7), (rows, 64)), ((rows, 3, 5), (rows, 3, 1), (rows, 3, 16))):
            parts = [to_array(ops, normal(rng, *shape), dtype) for shape in shapes]
            want = np.concatenate([to_numpy(ops, part) for part in parts], -1)
            compare(to_numpy(ops, ops.concat(parts)), want, 0.0, f"{shapes}")
    return f"{2 * len(ROWS)} cases"


def _check_upload(dtype: str, subject: Subject) -> str:
    need_definitions()
    ops, rng = subject.ops(dtype), np.random.default_rng(0)
    for stored in ("float32", "bfloat16", "float16"):
        tensor = _host_tensor(rng, 5, 33, stored)
        result = to_numpy(ops, ops.upload(tensor, dtype=dtype, device=subject.place))
        compare(result, _rounded([tensor], dtype).numpy(), TOLERANCE[dtype], stored)
    return "3 stored dtypes"


def _check_transfer(subject: Subject) -> str:
    ops = subject.ops("float32")
    for array in (np.arange(-3, 9, dtype=np.int32), np.ones((0, 4), np.float32), np.ones((3, 5), np.float32)):
        sent = ops.to_device(array)
        kept = array.copy()
        array += 1
        if not np.array_equal(ops.to_host(sent), kept):
            raise Failed(f"{kept.dtype} {kept.shape} came back changed, or the device reads the caller's memory")
    return "3 arrays there and back"


def _check_remember_tokens(subject: Subject) -> str:
    ops = subject.ops("float32")
    last = ops.to_device(np.arange(6, dtype=np.int32))
    slots, token_ids = ops.to_device(np.array([4, 0], np.int32)), ops.to_device(np.array([70, 71], np.int32))
    last = ops.remember_tokens(last, slots, token_ids)
    compare(ops.to_host(last), np.array([71, 1, 2, 3, 70, 5], np.int32), 0.0, "last tokens")
    return "2 of 6 slots"


def _register() -> None:
    for op, cases in _BY_DTYPE.items():
        for dtype in DTYPES:
            add_check(f"ops.{op}.{dtype}", f"{op} against its definition", partial(_check_op, op, dtype, cases))
    for op, cases in _FLOAT32.items():
        add_check(f"ops.{op}", f"{op} against its definition", partial(_check_op, op, "float32", cases))
    for dtype in DTYPES:
        meaning = "packed weights of each stored dtype and `--quantize` scheme, stacked parts, bias, against float64"
        add_check(f"ops.linear.{dtype}", meaning, partial(_check_linear, dtype))
        add_check(f"ops.embedding.{dtype}", "rows of a packed weight", partial(_check_embedding, dtype))
        add_check(f"ops.concat.{dtype}", "arrays joined along the last axis", partial(_check_concat, dtype))
        add_check(f"ops.upload.{dtype}", "a vector on the device in another dtype", partial(_check_upload, dtype))
    add_check("ops.transfer", "arrays there and back; the caller's memory may be reused at once", _check_transfer)
    add_check("ops.remember_tokens", "what each slot sampled last", _check_remember_tokens)


_register()
