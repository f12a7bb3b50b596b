"""Each op against its definition in float64, by dtype, over odd, empty and large shapes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from headrace.core.models.spec import Activation
from headrace.core.ops import OpTable
from headrace.core.self_test import TOLERANCE
from headrace.core.weights.block_types import BLOCK_TYPES

from . import expert_cases, sampling_cases, state_cases
from .arrays import Excess, compare, dtype_name, flat, is_array, to_array, to_numpy, wide_copy
from .registry import DTYPES, Failed, Subject, add_check, need_definitions
from .values import LONG_SUMS, ROWS, Case, Rng, Value, normal, normal32, whole
from .weight_cases import FURTHER, QUANTIZED, eased, host_tensor, rounded

if TYPE_CHECKING:
    pass

WIDTHS = (1, 7, 64, 576)
WIDE = 2501
"""More than one program of a kernel walks over, and odd."""
SIZES = (2e-3, 900.0)
"""Of a norm's input: where eps counts, and where squares are more than float16 holds."""


# ---- the cases of each op -----------------------------------------------------------------------------------
def _rms_norm(rng: Rng) -> Iterator[Case]:
    for rows in ROWS:
        for width in WIDTHS:
            yield Case(f"[{rows}, {width}]", [normal(rng, rows, width), normal32(rng, width)], {"eps": 1e-5})
    yield Case("per head", [normal(rng, 5, 3, 64), normal32(rng, 64)], {"eps": 1e-6})
    yield Case("no weight", [normal(rng, 4, 33), None], {"eps": 1e-6})
    yield Case("wide", [normal(rng, 2, WIDE), normal32(rng, WIDE)], {"eps": 1e-6})
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
    yield Case("wide", [normal(rng, 2, WIDE), normal32(rng, WIDE), normal32(rng, WIDE)], {"eps": 1e-5})
    far = normal(rng, 5, 64)
    yield Case("a mean far from 0", [replace(far, array=far.array + np.float32(50)), None, None], {"eps": 1e-5})
    for size in SIZES:
        yield Case(f"values of about {size}", [_times(normal(rng, 5, 64), size), None, None], {"eps": 1e-5})


def _magnitude(rng: Rng) -> Iterator[Case]:
    for centred in (False, True):
        for width in WIDTHS[1:]:
            yield Case(f"5 rows of {width}, centred {centred}", [normal(rng, 5, width)], {"centred": centred})
        for size in SIZES:
            args = [_times(normal(rng, 5, 64), size)]
            yield Case(f"values of about {size}, centred {centred}", args, {"centred": centred})


def _times(value: Value, factor: float) -> Value:
    return replace(value, array=value.array * np.float32(factor))


def _rotary_angles(rng: Rng) -> Iterator[Case]:
    inv_freq = (1e4 ** (-np.arange(16, dtype=np.float32) / 16)).astype(np.float32)
    for positions in ([], [0], [32767, 32768, 40000], [0, 1, 2, 8191, 131071]):
        args = [whole(positions), Value("float32", inv_freq[None]), Value("float32", np.ones(1, np.float32))]
        yield Case(f"positions {positions}", args, exact_inputs=True)
    tables = Value("float32", np.stack([inv_freq, inv_freq / 4]))
    factors = Value("float32", np.array([1.0, 1.19], np.float32))
    args = [whole([3, 700]), Value("float32", inv_freq[None]), Value("float32", np.full(1, 1.19, np.float32))]
    yield Case("a factor", args, exact_inputs=True)
    yield Case("two variants", [whole([5, 4000, 9]), tables, factors, whole([1, 0, 1])], exact_inputs=True)


def _rotary_axes(rng: Rng) -> Iterator[Case]:
    inv_freq = (1e4 ** (-np.arange(16, dtype=np.float32) / 16)).astype(np.float32)
    places = whole([[5, 70, 3], [9, 2, 400]])
    for what, axes in (("in runs", (0,) * 4 + (1,) * 6 + (2,) * 6), ("interleaved", (0, 1, 2, 1) * 4)):
        args = [places, Value("float32", inv_freq[None]), Value("float32", np.ones(1, np.float32))]
        yield Case(f"three axes {what}", args, {"axes": axes}, exact_inputs=True)


def _rope(rng: Rng) -> Iterator[Case]:
    for rows in ROWS:
        for heads, head_dim, rotary_dim in ((1, 16, 16), (3, 64, 64), (4, 80, 32)):
            angles = rng.uniform(0, 6.28, (rows, rotary_dim // 2)).astype(np.float32)
            turns = [Value("float32", np.cos(angles)), Value("float32", np.sin(angles))]
            for interleaved in (False, True):
                what = f"[{rows}, {heads}, {head_dim}] rotary {rotary_dim} interleaved {interleaved}"
                yield Case(what, [normal(rng, rows, heads, head_dim), *turns], {"interleaved": interleaved})
    turns = [Value("float32", rng.standard_normal((2, 8)).astype(np.float32)) for _ in range(2)]
    yield Case("37 heads", [normal(rng, 2, 37, 16), *turns])


def _pairwise(rng: Rng) -> Iterator[Case]:
    for rows in ROWS:
        for width in WIDTHS:
            yield Case(f"[{rows}, {width}]", [normal(rng, rows, width), normal(rng, rows, width)])


def _with_number(number: float, rng: Rng) -> Iterator[Case]:
    for rows in ROWS:
        for width in WIDTHS:
            yield Case(f"[{rows}, {width}]", [normal(rng, rows, width), number])
    yield Case("far from 0", [_times(normal(rng, 3, 64), 90), number])


def _activations(columns: int, rng: Rng) -> Iterator[Case]:
    for activation in get_args(Activation):
        for rows in ROWS:
            for width in WIDTHS if activation in ("silu", "gelu") else WIDTHS[-1:]:
                what = f"{activation} [{rows}, {columns * width}]"
                yield Case(what, [normal(rng, rows, columns * width)], {"activation": activation})
        yield Case(f"{activation}, wide", [normal(rng, 2, columns * WIDE)], {"activation": activation})
        far = _times(normal(rng, 3, columns * 64), 2 if activation == "relu2" else 40)
        yield Case(f"{activation} far from 0", [far], {"activation": activation})


def _split(rng: Rng) -> Iterator[Case]:
    for rows in ROWS:
        yield Case(f"{rows} rows", [normal(rng, rows, 64 + 7 + 1), (64, 7, 1)])


def _heads(shape: tuple[int, ...], options: dict[str, int], rng: Rng) -> Iterator[Case]:
    for rows in ROWS:
        yield Case(f"{rows} rows", [normal(rng, rows, *shape)], options)


def _gather(rng: Rng) -> Iterator[Case]:
    for count in ROWS:
        yield Case(f"{count} of 9 rows", [normal(rng, 9, 65), whole(rng.integers(0, 9, count))])
    yield Case("wide rows", [normal(rng, 3, WIDE), whole([2, 0])])
    yield Case("rows of heads", [normal(rng, 9, 3, 16), whole([8, 1, 1, 0])])


def _gate(rng: Rng) -> Iterator[Case]:
    for rows in ROWS:
        for shape, gates in (((64,), 64), ((64,), 1), ((3, 16), 3), ((3, 20), 3)):
            yield Case(
                f"{rows} rows of {shape}, gates of {gates}", [normal(rng, rows, *shape), normal(rng, rows, gates)]
            )


def _xielu(rng: Rng) -> Iterator[Case]:
    for rows in ROWS:
        yield Case(f"{rows} rows", [normal(rng, rows, 65), normal32(rng, 1), normal32(rng, 1)])
    yield Case("values near 0", [_times(normal(rng, 9, 65), 1e-3), normal32(rng, 1), normal32(rng, 1)])


def _mul(rng: Rng) -> Iterator[Case]:
    for rows in ROWS:
        for what, factors in (
            ("a row", normal32(rng, 65)),
            ("a column", normal32(rng, rows, 1)),
            ("a column in its dtype", normal(rng, rows, 1)),
            ("all", normal(rng, rows, 65)),
        ):
            yield Case(f"{rows} rows by {what}", [normal(rng, rows, 65), factors])
        yield Case(f"{rows} rows of heads", [normal(rng, rows, 3, 20), normal(rng, rows, 3)])


def _clamp(rng: Rng) -> Iterator[Case]:
    for rows in ROWS:
        yield Case(f"{rows} rows", [normal(rng, rows, 65)], {"limit": 0.75})


def _log_growth(rng: Rng) -> Iterator[Case]:
    positions = whole([0, 1, 7, 8, 8191, 8192, 100_000])
    for shift in (0, 1):
        for length in (8, 8192):
            kwargs = {"factor": 0.1, "length": length, "shift": shift}
            yield Case(f"length {length}, shift {shift}", [positions], kwargs, exact_inputs=True)


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
        yield Case(
            f"{lengths} tokens, softcap", arrays, {"scale": 0.25, "softcap": 1.5, "max_query_len": max(lengths)}
        )
        large = [_times(arrays[0], 40), *arrays[1:]]
        yield Case(f"{lengths} tokens, large scores", large, {"scale": 1.0, "max_query_len": max(lengths)})

    starts = whole([0, 300, 310])  # of images, as SigLIP's heads have them
    arrays = [normal(rng, 310, heads, 72) for heads in (4, 2, 2)]
    yield Case("heads of 72", [*arrays, starts], {"scale": 72**-0.5, "max_query_len": 300})
    kwargs = {"scale": 0.2, "softcap": 2.0, "window": 40}
    yield Case("a bias, a window and a softcap", [*arrays, starts, normal32(rng, 32, 4)], kwargs)


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


BY_DTYPE: dict[str, Callable[[Rng], Iterator[Case]]] = {
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "layer_norm": _layer_norm,
    "magnitude": _magnitude,
    "rope": _rope,
    "add": _pairwise,
    "scale": partial(_with_number, 11.285),
    "softcap": partial(_with_number, 1.5),
    "act": partial(_activations, 1),
    "act_mul": partial(_activations, 2),
    "split": _split,
    "split_heads": partial(_heads, (3 * 80,), {"head_dim": 80}),
    "merge_heads": partial(_heads, (3, 80), {}),
    "gather": _gather,
    "gate": _gate,
    "xielu": _xielu,
    "mul": _mul,
    "clamp": _clamp,
    "encoder_attention": _encoder_attention,
    "mean_rows": _mean_rows,
    "stack_rows": _stack_rows,
    "store_rows": _store_rows,
    "place_rows": _place_rows,
    **state_cases.BY_OP,
}
_FLOAT32: dict[str, Callable[[Rng], Iterator[Case]]] = {
    "rotary_angles": _rotary_angles,
    "log_growth": _log_growth,
    "part_identities": expert_cases.part_identities,
    "route_experts": expert_cases.route_experts,
    "apply_token_mask": sampling_cases.apply_token_mask,
    "add_logit_bias": sampling_cases.add_logit_bias,
    "apply_penalties": sampling_cases.apply_penalties,
    "logprobs": sampling_cases.logprobs,
    "sample": sampling_cases.sample,
    "recall_tokens": sampling_cases.recall_tokens,
}
"""Ops that take float32 or int32 only, whatever the model's dtype."""


# ---- running and comparing ----------------------------------------------------------------------------------
def _check_op(op: str, dtype: str, cases: Callable[[Rng], Iterator[Case]], subject: Subject) -> str:
    need_definitions()
    import torch

    ops = subject.ops(dtype)
    count, worst, excess = 0, 0.0, Excess()
    for case in cases(np.random.default_rng(0)):
        arguments = [to_array(ops, value, dtype) for value in case.args]
        kept = [not (isinstance(value, Value) and value.is_mutable) for value in case.args]
        before = [to_numpy(ops, array) for array in arguments if is_array(array)]
        wide = torch.float32 if case.exact_inputs else torch.float64
        copies = [wide_copy(ops, array, wide) if is_array(array) else array for array in arguments]
        if op == "scale":  # its factor is rounded, too
            copies[1] = torch.tensor(case.args[1], dtype=getattr(torch, dtype)).item()
        kinds = _result_dtypes(op, case, copies, dtype)
        results = getattr(ops, op)(*arguments, **case.kwargs)
        after = [to_numpy(ops, array) for array in arguments if is_array(array)]
        arrays = [flag for flag, array in zip(kept, arguments, strict=True) if is_array(array)]
        changed = [not np.array_equal(a, b, equal_nan=True) for a, b in zip(before, after, strict=True)]
        if any(is_changed and flag for is_changed, flag in zip(changed, arrays, strict=True)):
            raise Failed(f"{case.what}: it changed its arguments")
        expected = getattr(OpTable, op)(*copies, **case.kwargs)
        got, want = (flat(value) for value in (results, expected))
        mutable = [value.array.shape for value in case.args if isinstance(value, Value) and value.is_mutable]
        for result, definition, kind in zip(got, want, kinds, strict=True):
            array, wanted = to_numpy(ops, result), definition.numpy()
            if (name := dtype_name(result)) != kind:
                raise Failed(f"{case.what}: a result in {name}, expected {kind}")
            if array.shape in mutable:  # what is not kept may land in the null block
                array, wanted = array[1:], wanted[1:]
            error = compare(array, wanted, TOLERANCE.get(kind, 0.0), case.what)
            worst = max(worst, error)
            if op in ROUNDED_ONCE and kind in ("float16", "bfloat16"):
                excess.add(array, wanted, kind, case.what)
        count += 1
    excess.check()
    return f"{count} cases, worst error {worst:.1e}, allowed {TOLERANCE[dtype]:.0e}"


ROUNDED_ONCE = frozenset(
    (
        "rms_norm layer_norm softcap act act_mul gate xielu mul scale rope mean_rows causal_conv selective_scan "
        "gated_delta wkv"
    ).split()
)
"""Ops that compute in float32 at least and round their result, and nothing before it."""


def _result_dtypes(op: str, case: Case, copies: Sequence[Any], dtype: str) -> list[str]:
    """The dtypes in which the definition gives its results."""
    import torch

    def narrow(value: Any, copy: Any) -> Any:
        if not isinstance(value, Value) or value.kind == "index":
            return copy.clone() if isinstance(value, Value) else copy
        return copy.to(getattr(torch, dtype) if value.kind == "activation" else torch.float32)

    given = [narrow(value, copy) for value, copy in zip(case.args, copies, strict=True)]
    return [dtype_name(result) for result in flat(getattr(OpTable, op)(*given, **case.kwargs))]


# ---- ops that need their own way ----------------------------------------------------------------------------
def _check_linear(dtype: str, subject: Subject) -> str:
    need_definitions()
    import torch

    ops = subject.ops(dtype)
    count, worst = 0, 0.0
    kept = set(subject.device.caps.schemes) - set(DTYPES)
    shapes: dict[str, Sequence[tuple[tuple[int, ...], int]]] = dict.fromkeys(
        ("float32", "bfloat16", "float16", "q8_0", *QUANTIZED), (((1,), 32), ((7, 64, 3), 96), ((300,), 1056))
    )
    # What a device may multiply as it stands, and parts that are stored in different ways.
    shapes |= dict.fromkeys((*FURTHER, *(name for name in BLOCK_TYPES if name in kept)), (((37, 5), 768),))
    for stored in (*shapes, "mixed"):
        rng = np.random.default_rng(0)
        for rows, columns in shapes.get(stored, (((7, 64, 3), 96),)):
            parts = ("q8_0", "bfloat16", "int4") if stored == "mixed" else (stored,) * len(rows)
            tensors = [host_tensor(rng, part, columns, kind) for part, kind in zip(rows, parts, strict=True)]
            weight = ops.pack_linear(tensors, dtype=dtype, device=subject.place)
            for num_tokens in ROWS:
                bias = normal32(rng, sum(rows)) if (num_tokens + sum(rows)) % 2 else None
                x = to_array(ops, normal(rng, num_tokens, columns), dtype)
                result = ops.linear(x, weight, to_array(ops, bias, dtype))
                expected = wide_copy(ops, x, torch.float64) @ rounded(tensors, dtype).T
                if bias is not None:
                    expected = expected + torch.from_numpy(bias.array.astype(np.float64))
                what = f"{stored} [{sum(rows)}, {columns}] x {num_tokens} tokens"
                # A kernel that multiplies quantized blocks may quantize the activations to 8 bits too.
                allowed = max(TOLERANCE[dtype], eased(stored) if stored.partition("-")[0] in kept else 0)
                worst = max(worst, compare(to_numpy(ops, result), expected.numpy(), allowed, what))
                count += 1
    return f"{count} cases, worst error {worst:.1e}"


def _check_long_sums(dtype: str, subject: Subject) -> str:
    need_definitions()
    import torch

    ops, rng = subject.ops(dtype), np.random.default_rng(0)
    columns = 4096
    tensor = host_tensor(rng, 33, columns, "float32")
    tensor = replace(tensor, data=np.abs(tensor.data) * np.float32(8))
    weight = ops.pack_linear([tensor], dtype=dtype, device=subject.place)
    worst = 0.0
    for num_tokens in (1, 40):
        x = to_array(ops, Value("activation", rng.random((num_tokens, columns), np.float32)), dtype)
        expected = wide_copy(ops, x, torch.float64) @ rounded([tensor], dtype).T
        # Of numbers of one sign no error cancels, so sums can be held to what a result's own rounding leaves.
        allowed = LONG_SUMS[dtype]
        worst = max(
            worst, compare(to_numpy(ops, ops.linear(x, weight)), expected.numpy(), allowed, f"{num_tokens} tokens")
        )
    return f"sums of {columns}, worst error {worst:.1e}"


def _check_embedding(dtype: str, subject: Subject) -> str:
    need_definitions()
    import torch

    ops, rng = subject.ops(dtype), np.random.default_rng(0)
    blocks = [name for name in BLOCK_TYPES if name in subject.device.caps.schemes]
    stored_as = dict.fromkeys(("float32", "bfloat16", "q8_0", *QUANTIZED, *FURTHER, *blocks))
    for stored in stored_as:
        tensors = [host_tensor(rng, 77, 256, stored)]
        weight = ops.pack_linear(tensors, dtype=dtype, device=subject.place)
        for num_tokens in ROWS:
            token_ids = rng.integers(0, 77, num_tokens).astype(np.int32)
            token_ids[:1], token_ids[1:2] = 76, 0
            result = to_numpy(ops, ops.embedding(ops.to_device(token_ids), weight))
            expected = rounded(tensors, dtype)[torch.from_numpy(token_ids).long()]
            compare(result, expected.numpy(), TOLERANCE[dtype], f"{stored}, {num_tokens} tokens")
    return f"{len(stored_as)} stored dtypes"


def _check_concat(dtype: str, subject: Subject) -> str:
    ops, rng = subject.ops(dtype), np.random.default_rng(0)
    for rows in ROWS:
        for shapes in (((rows, 7), (rows, 64)), ((rows, 3, 5), (rows, 3, 1), (rows, 3, 16))):
            parts = [to_array(ops, normal(rng, *shape), dtype) for shape in shapes]
            want = np.concatenate([to_numpy(ops, part) for part in parts], -1)
            compare(to_numpy(ops, ops.concat(parts)), want, 0.0, f"{shapes}")
    return f"{2 * len(ROWS)} cases"


def _check_slices(dtype: str, subject: Subject) -> str:
    """The parts of a split may be views, whose rows lie apart."""
    need_definitions()
    import torch

    ops, rng = subject.ops(dtype), np.random.default_rng(0)
    tensor = host_tensor(rng, 24, 64, "float32")
    weight = ops.pack_linear([tensor], dtype=dtype, device=subject.place)
    exact, scales = rounded([tensor], dtype), normal32(rng, 64)
    turns = [Value("float32", rng.standard_normal((9, 8)).astype(np.float32)) for _ in range(2)]
    x = to_array(ops, normal(rng, 9, 7 + 64 + 64), dtype)
    _, first, second = ops.split(x, (7, 64, 64))
    heads = ops.split_heads(second, head_dim=16)
    wide_first, wide_second, wide_heads = (wide_copy(ops, part, torch.float64) for part in (first, second, heads))
    scale, *angles = (to_array(ops, value, dtype) for value in (scales, *turns))
    wide_scale, *wide_angles = (wide_copy(ops, array, torch.float64) for array in (scale, *angles))
    picked = ops.to_device(np.array([8, 0, 3], np.int32))
    for what, got, want in (
        ("linear", ops.linear(second, weight), OpTable.linear(wide_second, exact)),
        ("rms_norm", ops.rms_norm(second, scale, eps=1e-5), OpTable.rms_norm(wide_second, wide_scale, eps=1e-5)),
        ("rope", ops.rope(heads, *angles), OpTable.rope(wide_heads, *wide_angles)),
        ("act_mul", ops.act_mul(second, activation="silu"), OpTable.act_mul(wide_second, activation="silu")),
        ("add", ops.add(first, second), wide_first + wide_second),
        ("gather", ops.gather(second, picked), wide_second[[8, 0, 3]]),
        ("concat", ops.concat((second, first)), torch.cat((wide_second, wide_first), -1)),
        ("merge_heads", ops.merge_heads(heads), wide_second),
    ):
        compare(to_numpy(ops, got), want.numpy(), TOLERANCE[dtype], f"{what} of a slice")
    return "8 ops"


def _check_cast(dtype: str, subject: Subject) -> str:
    """Narrower numbers are the nearest, halves to even; wider ones are the same."""
    need_definitions()
    import torch

    ops, rng = subject.ops(dtype), np.random.default_rng(0)
    halves = (
        1 + np.arange(1, 64, 2, dtype=np.float32) / 2**12 if dtype == "float16" else 1 + np.arange(1, 64, 2) / 2**9
    )
    for rows in ROWS:
        values = rng.standard_normal((rows, 32)).astype(np.float32)
        values[: rows // 2] = halves
        narrow = ops.cast(ops.to_device(values), dtype=dtype)
        want = torch.from_numpy(values).to(getattr(torch, dtype)).float().numpy()
        if not np.array_equal(to_numpy(ops, narrow), want):
            raise Failed(f"{rows} rows of float32 as {dtype} are not the nearest numbers")
    return f"{len(ROWS)} cases, equal"


def _check_upload(dtype: str, subject: Subject) -> str:
    need_definitions()
    ops, rng = subject.ops(dtype), np.random.default_rng(0)
    for stored in ("float32", "bfloat16", "float16"):
        tensor = host_tensor(rng, 5, 33, stored)
        result = to_numpy(ops, ops.upload(tensor, dtype=dtype, device=subject.place))
        compare(result, rounded([tensor], dtype).numpy(), TOLERANCE[dtype], stored)
    return "3 stored dtypes"


def _check_transfer(subject: Subject) -> str:
    ops = subject.ops("float32")
    columns = np.arange(21, dtype=np.int32).reshape(3, 7)[:, 1:3]
    for array in (
        np.arange(-3, 9, dtype=np.int32),
        np.ones((0, 4), np.float32),
        np.ones((3, 5), np.float32),
        columns,
    ):
        sent = ops.to_device(array)
        kept = array.copy()
        array += 1
        if not np.array_equal(ops.to_host(sent), kept):
            raise Failed(f"{kept.dtype} {kept.shape} came back changed, or the device reads the caller's memory")
    return "4 arrays there and back"


def _check_remember_tokens(subject: Subject) -> str:
    ops = subject.ops("float32")
    last = ops.to_device(np.arange(6, dtype=np.int32))
    slots, token_ids = ops.to_device(np.array([4, 0], np.int32)), ops.to_device(np.array([70, 71], np.int32))
    last = ops.remember_tokens(last, slots, token_ids)
    compare(ops.to_host(last), np.array([71, 1, 2, 3, 70, 5], np.int32), 0.0, "last tokens")
    want = np.arange(700, dtype=np.int32)
    order = np.random.default_rng(0).permutation(700)[:600].astype(np.int32)
    last = ops.remember_tokens(ops.to_device(want), ops.to_device(order), ops.to_device(order + 1000))
    want[order] = order + 1000
    compare(ops.to_host(last), want, 0.0, "last tokens of many")
    return "2 of 6 slots, 600 of 700"


def _register() -> None:
    for op, cases in BY_DTYPE.items():
        for dtype in DTYPES:
            add_check(f"ops.{op}.{dtype}", f"{op} against its definition", partial(_check_op, op, dtype, cases))
    for op, cases in _FLOAT32.items():
        add_check(f"ops.{op}", f"{op} against its definition", partial(_check_op, op, "float32", cases))
    meaning = "rotary_angles of positions along several axes against its definition"
    add_check("ops.rotary_axes", meaning, partial(_check_op, "rotary_angles", "float32", _rotary_axes))
    for dtype in DTYPES:
        meaning = "packed weights of each stored dtype and `--quantize` scheme, stacked parts, bias, against float64"
        add_check(f"ops.linear.{dtype}", meaning, partial(_check_linear, dtype))
        meaning = "products whose sums of 4096 numbers of one sign a narrow sum would lose, against float64"
        add_check(f"ops.long_sums.{dtype}", meaning, partial(_check_long_sums, dtype))
        add_check(f"ops.embedding.{dtype}", "rows of a packed weight", partial(_check_embedding, dtype))
        add_check(
            f"ops.slices.{dtype}", "ops on parts of a split, whose rows may lie apart", partial(_check_slices, dtype)
        )
        add_check(f"ops.cast.{dtype}", "float32 rounded to the nearest number", partial(_check_cast, dtype))
        add_check(f"ops.concat.{dtype}", "arrays joined along the last axis", partial(_check_concat, dtype))
        add_check(f"ops.upload.{dtype}", "a vector on the device in another dtype", partial(_check_upload, dtype))
    add_check("ops.transfer", "arrays there and back; the caller's memory may be reused at once", _check_transfer)
    add_check("ops.remember_tokens", "what each slot sampled last", _check_remember_tokens)


_register()
