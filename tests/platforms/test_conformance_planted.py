"""Bugs that only sizes and histories of real use show, planted on a platform of each kind: torch, JAX, native."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import dataclasses
import math
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from headrace.core.ops import OpTable
from headrace.core.ops.attention import Integers
from headrace.core.ops.table import FAMILIES
from headrace.core.platform import OpProvider, Pending
from headrace.core.plugin_loader import Plugins
from headrace.core.runner import bucketed, buckets
from headrace.core.runner.buckets import Buckets
from headrace.core.runner.torch import TorchRunner
from headrace.core.stages import StepInput
from headrace.platforms.cpu.detect import has_native_kernels
from wrong_device import Op, WrongDevice, must_fail, open_on

needs_jax = pytest.mark.skipif(find_spec("jax") is None, reason="jax is not installed: pip install 'headrace[tpu]'")
pytestmark = pytest.mark.usefixtures("one_thread")


# ---- ops of torch ---------------------------------------------------------------------------------------------
def _scale_of_64(query: Any, *args: Any, scale: float, **kwargs: Any) -> Any:
    scale = 0.125 if query.shape[-1] == 128 else scale
    return OpTable.paged_attention(query, *args, scale=scale, **kwargs)


def _scale_of_its_own(query: Any, *args: Any, scale: float, **kwargs: Any) -> Any:
    return OpTable.paged_attention(query, *args, scale=query.shape[-1] ** -0.5, **kwargs)


def _other_values_of_many_groups(query: Any, cache: Any, *args: Any, **kwargs: Any) -> Any:
    keys, values = cache
    return OpTable.paged_attention(query, (keys, values.flip(2) if values.shape[2] > 4 else values), *args, **kwargs)


def _narrow_large_window(*args: Any, window: int = 0, **kwargs: Any) -> Any:
    return OpTable.paged_attention(*args, window=min(window, 4095), **kwargs)


def _window_without_its_last_block(query: Any, cache: Any, starts: Any, lens: Any, table: Any, **kwargs: Any) -> Any:
    window, size = kwargs.get("window", 0), cache[0].shape[1]
    if window:
        table = table.clone()
        for r, (seq_len, count) in enumerate(zip(lens.tolist(), starts.diff().tolist(), strict=True)):
            first = max(0, seq_len - count - window + 1)
            if count == 1 and first % size == size - 1:  # of the first block, one token is in sight
                table[r, first // size] = table[r, first // size + 1]
    return OpTable.paged_attention(query, cache, starts, lens, table, **kwargs)


def _64_requests(query: Any, cache: Any, starts: Any, lens: Any, table: Any, **kwargs: Any) -> Any:
    out = OpTable.paged_attention(query, cache, starts, lens, table, **kwargs)
    out[starts[64 if len(lens) > 64 else -1] :] = 0
    return out


def _keys_below_4096(query: Any, cache: Any, starts: Any, lens: Any, table: Any, **kwargs: Any) -> Any:
    short = torch.where(lens > 4096 + 64, lens - 64, lens)
    return OpTable.paged_attention(query, cache, starts, short, table, **kwargs)


def _sums_of_its_own_dtype(
    query: Any, cache: Any, starts: Any, lens: Any, table: Any, *, scale: float, **kwargs: Any
) -> Any:
    """Each head of each token; its sum over tiles of 64 keys is rounded to the activations' dtype behind each."""
    out, size = torch.empty_like(query), cache[0].shape[1]
    group = query.shape[1] // cache[0].shape[2]
    for r, seq_len in enumerate(lens.tolist()):
        blocks = table[r, : -(-seq_len // size)].long()
        keys, values = (part[blocks].flatten(0, 1)[:seq_len].float().repeat_interleave(group, 1) for part in cache)
        for row in range(starts[r], starts[r + 1]):
            seen = seq_len - (int(starts[r + 1]) - row) + 1
            weights = (torch.einsum("hd,khd->kh", query[row].float(), keys[:seen]) * scale).softmax(0)
            total = torch.zeros_like(query[row])
            for begin in range(0, seen, 64):
                part = slice(begin, min(begin + 64, seen))
                total = (total.float() + torch.einsum("kh,khd->hd", weights[part], values[part])).to(query.dtype)
            out[row] = total
    return out


def _scales_of_the_block_before(query: Any, cache: Any, *args: Any, **kwargs: Any) -> Any:
    parts = [
        Integers(codes=part.codes, scales=part.scales.roll(1, 0)) if isinstance(part, Integers) else part
        for part in cache
    ]
    return OpTable.paged_attention(query, tuple(parts), *args, **kwargs)


def _table_of_4096(positions: Any, *args: Any, **kwargs: Any) -> Any:
    return OpTable.rotary_angles(positions.clamp(max=4095), *args, **kwargs)


def _last_row_without_seed(logits: Any, seeds: Any, *args: Any) -> Any:
    seeds = seeds.clone()
    seeds[-1:] = 0
    return OpTable.sample(logits, seeds, *args)


def _limits_of_the_first_chunk(logits: Any, seeds: Any, positions: Any, warm: Any, k: Any, p: Any, m: Any) -> Any:
    if logits.shape[1] <= 4096 or all(limit is None for limit in (k, p, m)):
        return OpTable.sample(logits, seeds, positions, warm, k, p, m)
    part = logits.clone()
    part[:, 4096:] = float("-inf")
    return OpTable.sample(part, seeds, positions, warm, k, p, m)


def _without_the_last_expert(x: Any, weights: Any, experts: Any, up: Any, *args: Any, **kwargs: Any) -> Any:
    return OpTable.grouped_experts(x, weights * (experts != len(up) - 1), experts, up, *args, **kwargs)


def _64_experts(x: Any, weights: Any, experts: Any, up: Any, *args: Any, **kwargs: Any) -> Any:
    return OpTable.grouped_experts(x, weights, experts % 64, up, *args, **kwargs)


def _ids_of_16_bits(token_ids: Any, weight: Any) -> Any:
    return OpTable.embedding(token_ids % 65536, weight)


def _squares_in_its_own_dtype(x: Any, weight: Any, *, eps: float) -> Any:
    total = torch.zeros(x.shape[:-1], dtype=x.dtype)
    for start in range(0, x.shape[-1], 64):
        total = total + x[..., start : start + 64].square().sum(-1)
    y = x.float() * torch.rsqrt(total.float() / x.shape[-1] + eps)[..., None]
    return (y if weight is None else y * weight).to(x.dtype)


class RequestByRequest:
    """Keys are stored when their request's turn comes: a request sees those of the ones before it in the step."""

    def __init__(self) -> None:
        self.before: dict[int, tuple[Any, Any, Any]] = {}

    def write_kv(self, cache: Any, key: Any, value: Any, slots: Any) -> Any:
        """As declared; remembers what was there."""
        self.before[cache[0].data_ptr()] = (cache[0].clone(), cache[1].clone(), slots)
        return OpTable.write_kv(cache, key, value, slots)

    def paged_attention(self, query: Any, cache: Any, starts: Any, lens: Any, table: Any, **kwargs: Any) -> Any:
        """Of each request over what it finds at its turn."""
        out = torch.empty_like(query)
        *old, slots = self.before[cache[0].data_ptr()]
        for r, (begin, end) in enumerate(zip(starts.tolist(), starts.tolist()[1:], strict=False)):
            late = slots[end:]
            seen = [part.clone() for part in cache]
            for part, was in zip(seen, old, strict=True):
                part.flatten(0, 1)[late.long()] = was.flatten(0, 1)[late.long()]
            rows = torch.tensor([0, end - begin], dtype=torch.int32)
            one = lens[r : r + 1], table[r : r + 1]
            out[begin:end] = OpTable.paged_attention(query[begin:end], tuple(seen), rows, *one, **kwargs)
        return out


WRONG: list[tuple[str, Op, str, str]] = [
    ("paged_attention", _scale_of_64, "attention.heads_of_128.float32", "error"),
    ("paged_attention", _scale_of_64, "attention.heads_of_128_decode.bfloat16", "error"),
    ("paged_attention", _scale_of_its_own, "attention.own_scale_decode.float32", "error"),
    ("paged_attention", _other_values_of_many_groups, "attention.heads_of_128.float32", "error"),
    ("paged_attention", _narrow_large_window, "attention.long_window.float32", "error"),
    ("paged_attention", _window_without_its_last_block, "attention.edge_window.float32", "error"),
    ("paged_attention", _64_requests, "attention.many_requests.float32", "error"),
    ("paged_attention", _keys_below_4096, "attention.long.float32", "error"),
    ("paged_attention", _sums_of_its_own_dtype, "attention.long_sums.bfloat16", "error"),
    ("paged_attention", _sums_of_its_own_dtype, "attention.long_sums.float16", "error"),
    ("paged_attention", _scales_of_the_block_before, "attention.int8_cache.float32", "error"),
    ("rotary_angles", _table_of_4096, "ops.rotary_angles", "error"),
    ("rotary_angles", _table_of_4096, "model.far_positions", "expected"),
    ("sample", _last_row_without_seed, "ops.sample", "temperature"),
    ("sample", _limits_of_the_first_chunk, "ops.sample", "limits over chunks"),
    ("grouped_experts", _without_the_last_expert, "ops.grouped_experts.float32", "error"),
    ("grouped_experts", _64_experts, "ops.many_experts.float32", "error"),
    ("embedding", _ids_of_16_bits, "ops.vocabulary.float32", "rows"),
    ("rms_norm", _squares_in_its_own_dtype, "ops.wide_rows.bfloat16", "rms_norm"),
]
"""(op, what is wrong with it, the check that must find it, words of the finding)."""


@pytest.mark.parametrize(
    ("op", "wrong", "name", "words"), WRONG, ids=[f"{w.__name__}-{name}" for _, w, name, _ in WRONG]
)
def test_a_wrong_op_is_caught(plugins: Plugins, op: str, wrong: Op, name: str, words: str) -> None:
    must_fail(name, WrongDevice(open_on(plugins, "reference"), op, wrong), plugins, words)


def test_keys_that_are_stored_request_by_request_are_caught(plugins: Plugins) -> None:
    device, turns = open_on(plugins, "reference"), RequestByRequest()
    wrong = WrongDevice(device, "paged_attention", turns.paged_attention)
    wrong.ops["write_kv"] = turns.write_kv
    must_fail("model.shared_blocks", wrong, plugins, "the writer is request 1")


# ---- steps ------------------------------------------------------------------------------------------------------
def _stale_tables() -> Callable[[StepInput], StepInput]:
    """A slot keeps the blocks that its first request had, as long as its requests do not sample their first token."""
    known: dict[int, Any] = {}

    def change(batch: StepInput) -> StepInput:
        sampling, forward = batch.sampling, batch.forward
        if sampling is None or len(sampling.slots) != len(forward.seq_lens):
            return batch
        tables = [table.copy() for table in forward.block_tables]
        for row, slot in enumerate(sampling.slots.tolist()):
            first = known.setdefault(slot, int(tables[0][row, 0]))
            if forward.max_query_len == 1:
                tables[0][row, 0] = first
        return dataclasses.replace(batch, forward=dataclasses.replace(forward, block_tables=tables))

    return change


def test_a_stale_slot_is_caught(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    right, change = TorchRunner.step, _stale_tables()

    def step(runner: TorchRunner, batch: StepInput) -> Pending:
        return right(runner, change(batch) if runner.device is device else batch)

    device = open_on(plugins, "reference")
    monkeypatch.setattr(TorchRunner, "step", step)
    must_fail("model.preempted", device, plugins, "again behind 1 others")


@pytest.mark.parametrize(
    "device", ["gaudi:emulated", pytest.param("tpu:emulated", marks=[pytest.mark.slow, needs_jax])]
)
def test_a_padded_row_that_leaks_is_caught(plugins: Plugins, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Padding of a sampled row remembers its token in the first request's slot."""
    right = Buckets._sample_layout

    def leaky(buckets: Buckets, bucket: Any) -> Any:
        layout = dict(right(buckets, bucket))
        shape, dtype, _ = layout["slots"]
        return layout | {"slots": (shape, dtype, 0)}

    monkeypatch.setattr(Buckets, "_sample_layout", leaky)
    must_fail("model.run_ahead", open_on(plugins, device), plugins, "expected")


def _without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of padding keep what the step before had there."""
    right, known = buckets.pack, dict[tuple[str, ...], Any]()

    def stale(layout: Any, values: Any) -> Any:
        packed = right(layout, values)
        before, start = known.get(key := tuple(map(str, layout.items()))), 0
        for name, (shape, _, _) in layout.items():
            used = len(values[name]) if values.get(name) is not None else 0
            row, end = math.prod(shape[1:]), start + math.prod(shape)
            if before is not None and name in ("positions", "slot_mappings.0", "input_ids"):
                packed[start + used * row : end] = before[start + used * row : end]
            start = end
        known[key] = packed.copy()
        return packed

    monkeypatch.setattr(bucketed, "pack", stale)


def test_stale_rows_of_a_recording_are_caught(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    """They store the keys of requests that are gone, in blocks that others have now."""
    _without_padding(monkeypatch)
    must_fail("model.shrinking", open_on(plugins, "gaudi:emulated"), plugins, "step")


def test_prompts_that_stand_behind_decodes_are_looked_for_in_their_place(
    plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log probabilities of a prompt are taken from the first rows of a step."""
    device, right = open_on(plugins, "reference"), TorchRunner._prompt_logprobs

    def wrong(runner: TorchRunner, batch: Any, hidden_states: Any) -> Any:
        if runner.device is device and batch is not None:
            batch = dataclasses.replace(batch, rows=batch.rows - batch.rows[0])
        return right(runner, batch, hidden_states)

    monkeypatch.setattr(TorchRunner, "_prompt_logprobs", wrong)
    must_fail("model.chunked_prompt_logprobs", device, plugins, "prompt of 40")


# ---- native records -------------------------------------------------------------------------------------------
def _changed(name: str, change: Callable[[Any], dict[str, Any]]) -> Op:
    """The record of an op with other attributes, which `change` makes of the instruction."""
    from headrace.platforms.cpu.native.program import NativeProgram

    right = getattr(NativeProgram, name)
    return lambda program, i: right(program, dataclasses.replace(i, attrs={**i.attrs, **change(i)}))


@pytest.mark.skipif(not has_native_kernels(), reason="the native kernels were not built")
@pytest.mark.parametrize(
    ("record", "change", "name", "words"),
    [
        (
            "_paged_attention",
            lambda i: {"scale": 0.125} if i.inputs[0].cols == 40 * 128 else {},
            "attention.heads_of_128.bfloat16",
            "error",
        ),
        (
            "_paged_attention",
            lambda i: {"window": min(i.attrs["window"], 4095)},
            "attention.long_window.float32",
            "error",
        ),
    ],
    ids=["scale", "window"],
)
def test_a_wrong_record_is_caught(
    plugins: Plugins, monkeypatch: pytest.MonkeyPatch, record: str, change: Any, name: str, words: str
) -> None:
    from headrace.platforms.cpu.native.program import NativeProgram

    monkeypatch.setattr(NativeProgram, record, _changed(record, change))
    must_fail(name, open_on(plugins, "cpu"), plugins, words)


# ---- ops of JAX -------------------------------------------------------------------------------------------------
def _jax_bug(op: str) -> Op:
    """A bug in a body of JAX."""
    import jax.numpy as jnp

    from headrace.core.ops.jax import FUNCTIONS

    right = FUNCTIONS[op]
    if op == "rotary_angles":
        return lambda positions, *args, **kwargs: right(jnp.minimum(positions, 4095), *args, **kwargs)
    if op == "grouped_experts":
        return lambda x, w, experts, up, *args, **kwargs: right(
            x, jnp.where(experts == len(up) - 1, 0, w), experts, up, *args, **kwargs
        )
    assert op == "sample", op
    return lambda logits, seeds, *args: right(logits, seeds.at[-1].set(0), *args)


@needs_jax
@pytest.mark.parametrize(
    ("op", "name", "words"),
    [
        ("rotary_angles", "ops.rotary_angles", "positions"),
        ("grouped_experts", "ops.many_experts.float32", "error"),
        ("sample", "ops.sample", "temperature"),
        pytest.param("rotary_angles", "model.far_positions", "", marks=pytest.mark.slow),
    ],
)
def test_a_wrong_body_in_jax_is_caught(plugins: Plugins, op: str, name: str, words: str) -> None:
    from headrace.core.ops.jax import FUNCTIONS

    device: Any = open_on(plugins, "neuron:emulated")
    family = next((ops for ops in FAMILIES.values() if op in ops), ())
    bodies = {name: FUNCTIONS[name] for name in family} | {op: _jax_bug(op)}
    device.extra_providers = (OpProvider(name="wrong", ops=bodies),)
    must_fail(name, device, plugins, words)
