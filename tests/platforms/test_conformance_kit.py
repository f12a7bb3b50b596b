"""The conformance kit: right devices pass, and each kind of wrong device is caught by the check that is for it."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.core.ops import OpTable
from headrace.core.ops.sampling import keep_tokens
from headrace.core.plugin_loader import Plugins
from headrace.platforms.conformance.attention_checks import Variant, dense_attention
from headrace.platforms.conformance.kit import all_checks, run_check
from headrace.platforms.conformance.registry import DTYPES, Subject
from headrace.platforms.cpu.detect import has_native_kernels
from wrong_device import Op, WrongDevice, open_on

DOCS = Path(__file__).parents[2] / "docs" / "conformance.md"
SAMPLE = (
    "ops.rms_norm.bfloat16",
    "ops.rope.float32",
    "ops.sample",
    "ops.linear.float16",
    "ops.transfer",
    "attention.plain.float32",
    "attention.window_softcap.bfloat16",
    "attention.sinks.float32",
    "attention.reach.float32",
    "attention.chunk.bfloat16",
    "attention.chunk_decode.float32",
    "ops.place_rows.bfloat16",
    "model.chunked",
    "model.batch",
    "model.greedy.window",
    "model.seeds",
    "memory.kv_plan",
    "memory.out_of_memory",
    "runner.close",
)


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_our_devices_pass(plugins: Plugins, device: str) -> None:
    subject = Subject(open_on(plugins, device), plugins)
    results = [run_check(all_checks()[name], subject) for name in SAMPLE]
    assert {result.outcome for result in results} == {"passed"}, results


@pytest.mark.slow
@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_our_devices_pass_all_of_it(plugins: Plugins, device: str) -> None:
    subject = Subject(open_on(plugins, device), plugins)
    results = [run_check(spec, subject) for spec in all_checks().values()]
    assert not [result for result in results if result.outcome == "failed"]
    ops = {"store_rows"} if device == "cpu" and has_native_kernels() else set()  # what is left to torch
    unsupported = {f"ops.{op}.{dtype}" for op in ops for dtype in DTYPES}
    unsupported |= {"model.run_ahead", "model.warm", "model.recorded"}  # what their steps have no need of
    if device == "cpu" and has_native_kernels():
        unsupported |= {"ranks.tokens", "ranks.collectives"}
    assert {result.name for result in results if result.outcome == "unsupported"} == unsupported


def test_null_passes_what_needs_no_arithmetic(plugins: Plugins) -> None:
    subject = Subject(open_on(plugins, "null:2"), plugins)
    for name in ("model.chunked", "model.batch", "model.dirty_blocks", "model.run_ahead", "memory.out_of_memory"):
        assert run_check(all_checks()[name], subject).outcome == "passed", name
    result = run_check(all_checks()["ops.add.float32"], subject)
    assert result.outcome == "unsupported"
    assert "no table of ops" in result.detail


# ---- wrong devices ----------------------------------------------------------------------------------------


def _low_precision_norm(x: Any, weight: Any, *, eps: float) -> Any:
    return OpTable.rms_norm(x.to(torch.bfloat16), weight, eps=eps).to(x.dtype)


def _writes_into_its_argument(x: Any, y: Any) -> Any:
    return x.add_(y)


def _swapped_gate(x: Any, *, activation: Any) -> Any:
    up, gate = x.chunk(2, -1)
    return OpTable.act_mul(torch.cat([gate, up], -1), activation=activation)


def _ties_to_the_last(logits: Any, *rest: Any) -> Any:
    last = logits.shape[-1] - 1 - logits.flip(-1).argmax(-1)
    found = OpTable.sample(logits, *rest)
    return torch.where(found == logits.argmax(-1), last.to(torch.int32), found)


def _other_noise(logits: Any, seeds: Any, *rest: Any) -> Any:
    return OpTable.sample(logits, seeds + 1, *rest)


def _keeps_memory(array: Any, *, device: str) -> Any:
    return torch.from_numpy(array)


def _attention(change: dict[str, Any]) -> Op:
    return lambda *args, **kwargs: OpTable.paged_attention(*args, **{**kwargs, **change})


def _reads_the_whole_block(query: Any, cache: Any, starts: Any, lens: Any, table: Any, **kwargs: Any) -> Any:
    # Masked with a weight of zero, as kernels do: harmless until the slot holds a NaN.
    keys, values = cache
    stray = values[table.clamp(min=0).long()].flatten(0, 2).sum(0).mean() * 0
    return OpTable.paged_attention(query, cache, starts, lens, table, **kwargs) + stray


def _padding_hits_the_last_slot(cache: Any, key: Any, value: Any, slots: Any) -> Any:
    total = cache[0].shape[0] * cache[0].shape[1]
    return OpTable.write_kv(cache, key, value, slots % total)


def _misses_the_last_block(query: Any, cache: Any, starts: Any, lens: Any, table: Any, **kwargs: Any) -> Any:
    size = cache[0].shape[1]
    cut = torch.where(lens > size, lens - lens % size, lens).to(lens.dtype)
    cut = torch.maximum(cut, starts.diff())  # rows that compute more than a block stay as they are
    return OpTable.paged_attention(query, cache, starts, cut, table, **kwargs)


def _swaps_blocks(query: Any, cache: Any, starts: Any, lens: Any, table: Any, **kwargs: Any) -> Any:
    swapped = table.clone()
    if table.shape[1] > 2:
        swapped[:, [0, 1]] = torch.where((table[:, 1:2] >= 0), table[:, [1, 0]], table[:, [0, 1]])
    return OpTable.paged_attention(query, cache, starts, lens, swapped, **kwargs)


def _window_off_by_one(*args: Any, window: int = 0, **kwargs: Any) -> Any:
    return OpTable.paged_attention(*args, window=window + (window > 0), **kwargs)


def _half_precision_attention(query: Any, cache: Any, *rest: Any, **kwargs: Any) -> Any:
    return OpTable.paged_attention(query.half().to(query.dtype), cache, *rest, **kwargs)


def _wrong_kv_head(query: Any, cache: Any, *rest: Any, **kwargs: Any) -> Any:
    return OpTable.paged_attention(query, tuple(part.flip(2) for part in cache), *rest, **kwargs)


def _stale_slot(cache: Any, key: Any, value: Any, slots: Any) -> Any:
    kept = slots.clone()
    kept[-1:] = -1 if len(slots) > 1 else kept[-1:]
    return OpTable.write_kv(cache, key, value, kept)


def _values_as_keys(cache: Any, key: Any, value: Any, slots: Any) -> Any:
    return OpTable.write_kv(cache, key, key, slots)


def _batch_dependent_sum(x: Any, weight: Any, bias: Any = None) -> Any:
    out = OpTable.linear(x, weight, bias)
    return out * (1 + 2e-2 * (len(x) > 4))


def _forgets_a_bias(x: Any, weight: Any, bias: Any = None) -> Any:
    return OpTable.linear(x, weight, None)


def _half_precision_sum(x: Any, weight: Any, bias: Any = None) -> Any:
    return OpTable.linear(x.half().to(x.dtype), weight, bias)


def _ignores_masks(logits: Any, mask: Any) -> Any:
    return logits


def _one_bit_off(logits: Any, mask: Any) -> Any:
    return OpTable.apply_token_mask(logits.roll(1, -1), mask).roll(-1, -1)


def _top_k_off_by_one(logits: Any, seeds: Any, positions: Any, temperature: Any, top_k: Any, *rest: Any) -> Any:
    return OpTable.sample(logits, seeds, positions, temperature, None if top_k is None else top_k + 1, *rest)


def _remembers_in_the_next_slot(last_tokens: Any, slots: Any, token_ids: Any) -> Any:
    return OpTable.remember_tokens(last_tokens, (slots + 1) % len(last_tokens), token_ids)


def _unweighted_experts(x: Any, weights: Any, *rest: Any, **kwargs: Any) -> Any:
    return OpTable.grouped_experts(x, torch.full_like(weights, 0.5), *rest, **kwargs)


def _noise_of_the_next_position(logits: Any, seeds: Any, positions: Any, *rest: Any) -> Any:
    return OpTable.sample(logits, seeds, positions + 1, *rest)


def _last_of_equal_tokens(logits: Any, *rest: Any) -> Any:
    seeds, positions, temperature, top_k, top_p, min_p = rest
    if temperature is None:
        return OpTable.sample(logits, *rest)
    kept = keep_tokens((logits / temperature.clamp(min=1e-5)[:, None]).flip(-1), top_k, top_p, min_p).flip(-1)
    warm = OpTable.sample(kept, seeds, positions, torch.ones_like(temperature), None, None, None)
    return torch.where(temperature < 1e-5, logits.argmax(-1).to(torch.int32), warm)


def _counts_the_prompt(logits: Any, rows: Any, tokens: Any, counts: Any, *rest: Any) -> Any:
    return OpTable.apply_penalties(logits, rows, tokens, counts + 1, *rest)


def _angles_of_later_chunks(positions: Any, *rest: Any, **kwargs: Any) -> Any:
    return OpTable.rotary_angles(positions + (positions[:1] > 0), *rest, **kwargs)


def _neighbouring_kv_head(query: Any, cache: Any, *rest: Any, **kwargs: Any) -> Any:
    num_heads, num_kv_heads = query.shape[1], cache[0].shape[2]
    order = torch.arange(num_heads).view(-1, num_kv_heads).T.flatten()  # head h reads KV head h % num_kv_heads
    return OpTable.paged_attention(query[:, order], cache, *rest, **kwargs)[:, order.argsort()]


def _sink_in_each_split(query: Any, cache: Any, starts: Any, lens: Any, *rest: Any, **kwargs: Any) -> Any:
    sinks = kwargs.pop("sinks")
    extra = 0.0 if sinks is None or lens.max() <= 512 else 0.69
    sinks = None if sinks is None else sinks + extra
    return OpTable.paged_attention(query, cache, starts, lens, *rest, sinks=sinks, **kwargs)


def _window_of_whole_blocks(query: Any, cache: Any, *rest: Any, window: int = 0, **kwargs: Any) -> Any:
    size = cache[0].shape[1]
    return OpTable.paged_attention(query, cache, *rest, window=-(-window // size) * size, **kwargs)


def _softcap_before_scale(*args: Any, scale: float, softcap: float = 0.0, **kwargs: Any) -> Any:
    return OpTable.paged_attention(*args, scale=scale, softcap=softcap * scale, **kwargs)


def _softcap_in_prefill_only(*args: Any, softcap: float = 0.0, max_query_len: int = 0, **kwargs: Any) -> Any:
    softcap = 0.0 if max_query_len == 1 else softcap
    return OpTable.paged_attention(*args, softcap=softcap, max_query_len=max_query_len, **kwargs)


def _adds_behind_the_norm(x: Any, residual: Any, weight: Any, *, eps: float) -> Any:
    return OpTable.rms_norm(x, weight, eps=eps) + residual, x + residual


def _no_bias_for_one_token(x: Any, weight: Any, bias: Any = None) -> Any:
    return OpTable.linear(x, weight, None if len(x) == 1 else bias)


def _no_bias_for_many(x: Any, weight: Any, bias: Any = None) -> Any:
    return OpTable.linear(x, weight, None if len(x) > 64 else bias)


def _never_renormalizes(*args: Any, renormalize: bool = True, **kwargs: Any) -> Any:
    return OpTable.route_experts(*args, renormalize=False, **kwargs)


def _correction_in_the_weights(logits: Any, correction: Any = None, **kwargs: Any) -> Any:
    weights, experts = OpTable.route_experts(logits, correction, **kwargs)
    return (weights if correction is None else weights + correction[experts.long()]), experts


def _starts_from_nothing(
    x: Any, w: Any, b: Any, state: Any, starts: Any, before: Any, kept: Any, **kwargs: Any
) -> Any:
    return OpTable.causal_conv(x, w, b, state, starts, torch.full_like(before, -1), kept, **kwargs)


def _keeps_a_state_too_many(*args: Any, **kwargs: Any) -> Any:
    *rest, kept = args
    scan: Op = OpTable.selective_scan
    return scan(*rest, kept.clamp(min=0) + 7 * (kept < 0), **kwargs)


def _experts_with_a_bias_of_the_first(x: Any, w: Any, e: Any, up: Any, down: Any, *biases: Any, **kwargs: Any) -> Any:
    biases = tuple(None if b is None else b.view(len(up), -1)[:1].expand(len(up), -1).flatten() for b in biases)
    return OpTable.grouped_experts(x, w, e, up, down, *biases, **kwargs)


def _adds_experts_of_other_ranks(x: Any, w: Any, e: Any, up: Any, *rest: Any, **kwargs: Any) -> Any:
    return OpTable.grouped_experts(x, w, e.clamp(max=len(up) - 1), up, *rest, **kwargs)


WRONG: list[tuple[str, Op, str, str]] = [
    ("rms_norm", _low_precision_norm, "ops.rms_norm.float32", "error"),
    ("add", _writes_into_its_argument, "ops.add.float32", "changed its arguments"),
    ("act_mul", _swapped_gate, "ops.act_mul.float32", "error"),
    ("sample", _ties_to_the_last, "ops.sample", "greedy"),
    ("sample", _other_noise, "ops.sample", "temperature"),
    ("sample", _other_noise, "model.seeds", "the reference's samples"),
    ("gather", lambda x, i: x[:1], "ops.gather.float32", "shape"),
    ("to_device", _keeps_memory, "ops.transfer", "the device reads the caller's memory"),
    ("paged_attention", _attention({"window": 0}), "attention.window.float32", "error"),
    ("paged_attention", _attention({"softcap": 0.0}), "attention.softcap.float32", "error"),
    ("paged_attention", _attention({"sinks": None}), "attention.sinks.float32", "error"),
    ("paged_attention", _attention({"alibi_slopes": None}), "attention.alibi.float32", "error"),
    ("paged_attention", _attention({"scale": 0.2}), "attention.plain.float32", "error"),
    ("paged_attention", _reads_the_whole_block, "attention.plain.float32", "error inf"),
    ("write_kv", _padding_hits_the_last_slot, "attention.plain.float32", ""),
    ("rms_norm", lambda x, w, *, eps: OpTable.rms_norm(x, w, eps=eps * 100), "ops.rms_norm.float32", "error"),
    ("rope", lambda x, c, s, *, interleaved=False: OpTable.rope(x, c, -s), "ops.rope.float32", "error"),
    ("rope", lambda x, c, s, *, interleaved=False: OpTable.rope(x, c, s), "ops.rope.float32", "error"),
    ("paged_attention", _misses_the_last_block, "attention.plain.float32", "error"),
    ("paged_attention", _swaps_blocks, "model.greedy.alibi", "expected"),
    ("paged_attention", _window_off_by_one, "attention.window.float32", "error"),
    ("paged_attention", _half_precision_attention, "attention.plain.float32", "error"),
    ("paged_attention", _wrong_kv_head, "attention.plain.float32", "error"),
    ("write_kv", _stale_slot, "attention.plain.float32", ""),
    ("write_kv", _values_as_keys, "attention.plain.float32", "error"),
    ("linear", _batch_dependent_sum, "model.batch", "expected"),
    ("linear", _forgets_a_bias, "ops.linear.float32", "error"),
    ("linear", _half_precision_sum, "ops.linear.float32", "error"),
    ("apply_token_mask", _ignores_masks, "model.masks", "allowed are"),
    ("apply_token_mask", _one_bit_off, "ops.apply_token_mask", ""),
    ("sample", _top_k_off_by_one, "ops.sample", "top"),
    ("remember_tokens", _remembers_in_the_next_slot, "ops.remember_tokens", ""),
    ("softcap", lambda x, cap: x, "ops.softcap.float32", "error"),
    ("grouped_experts", _unweighted_experts, "model.greedy.experts", "expected"),
    ("sample", _noise_of_the_next_position, "ops.sample", "temperature"),
    ("sample", _last_of_equal_tokens, "ops.sample", "equal tokens"),
    ("apply_penalties", _counts_the_prompt, "ops.apply_penalties", "error"),
    ("rotary_angles", _angles_of_later_chunks, "model.chunked", "chunks of"),
    ("paged_attention", _neighbouring_kv_head, "attention.large.float32", "error"),
    ("paged_attention", _sink_in_each_split, "attention.decode_sinks.float32", "error"),
    ("paged_attention", _window_of_whole_blocks, "attention.window.float32", "error"),
    ("paged_attention", _softcap_before_scale, "attention.softcap.float32", "error"),
    ("paged_attention", _softcap_in_prefill_only, "attention.decode_window.float32", "error"),
    ("add_rms_norm", _adds_behind_the_norm, "ops.add_rms_norm.float32", "error"),
    ("rms_norm", lambda x, w, *, eps: OpTable.rms_norm(x, w, eps=eps / 10), "ops.rms_norm.float32", "error"),
    ("linear", _no_bias_for_one_token, "ops.linear.float32", "error"),
    ("linear", _no_bias_for_many, "ops.linear.float32", "error"),
    ("route_experts", _never_renormalizes, "ops.route_experts", "error"),
    ("route_experts", _correction_in_the_weights, "ops.route_experts", "error"),
    ("grouped_experts", _unweighted_experts, "ops.grouped_experts.float32", "error"),
    ("grouped_experts", _experts_with_a_bias_of_the_first, "ops.grouped_experts.float32", "error"),
    ("grouped_experts", _adds_experts_of_other_ranks, "ops.grouped_experts.float32", "partial"),
    ("absorb_keys", lambda q, w: OpTable.absorb_keys(q, w.roll(1, 1)), "ops.latent_heads.float32", "absorb"),
    (
        "expand_values",
        lambda x, w, *, v_head_dim: OpTable.expand_values(x, w.flip(1), v_head_dim=v_head_dim),
        "ops.latent_heads.float32",
        "expand",
    ),
    ("causal_conv", _starts_from_nothing, "ops.causal_conv.float32", "error"),
    ("selective_scan", _keeps_a_state_too_many, "ops.selective_scan.float32", "error"),
    (
        "lru_inputs",
        lambda x, g, r, a, b, c, p: OpTable.lru_inputs(x, g, r, a, b, c, p + 1),
        "ops.lru_inputs.float32",
        "error",
    ),
    (
        "part_identities",
        lambda w, e, *, num_experts: OpTable.part_identities(w, e, num_experts=num_experts + 1),
        "ops.part_identities",
        "error",
    ),
    ("gate", lambda x, g: OpTable.gate(x, g.tanh()), "ops.gate.float32", "error"),
    ("mul", lambda x, y: x * y.mean(), "ops.mul.float32", "error"),
    ("clamp", lambda x, *, limit: x.clamp(max=limit), "ops.clamp.float32", "error"),
    ("xielu", lambda x, p, n: OpTable.xielu(x, n, p), "ops.xielu.float32", "error"),
    (
        "log_growth",
        lambda p, *, factor, length, shift=0: OpTable.log_growth(p, factor=factor, length=length),
        "ops.log_growth",
        "error",
    ),
    ("concat", lambda arrays: torch.cat(list(arrays)[::-1], -1), "ops.concat.float32", "error"),
]
"""(op, what is wrong with it, the check that must find it, words of the finding)."""


@pytest.mark.parametrize(("op", "wrong", "name", "words"), WRONG, ids=[f"{op}-{name}" for op, _, name, _ in WRONG])
def test_a_wrong_op_is_caught(plugins: Plugins, op: str, wrong: Op, name: str, words: str) -> None:
    device = WrongDevice(open_on(plugins, "reference"), op, wrong)
    result = run_check(all_checks()[name], Subject(device, plugins))
    assert result.outcome == "failed", result.detail
    assert words in result.detail


def test_a_recording_that_misses_its_input_is_caught(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(recorded: Any, params: Any, *arrays: Any) -> Any:
        return recorded._replay()

    monkeypatch.setattr("headrace.core.runner.torch_graphs._Recorded.__call__", stale)
    result = run_check(all_checks()["model.recorded"], Subject(open_on(plugins, "gaudi:emulated"), plugins))
    assert (result.outcome, "error" in result.detail) == ("failed", True), result


@pytest.mark.slow
def test_a_bias_that_one_rank_lacks_is_caught(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.core.runner.collectives import CutWeight, _RankOps

    right = _RankOps.linear

    def forgets(ops: Any, x: Any, weight: Any, bias: Any = None) -> Any:
        is_cut = isinstance(weight, CutWeight) and weight.by == "columns"
        return right(ops, x, weight, None if is_cut else bias)

    monkeypatch.setattr(_RankOps, "linear", forgets)  # here, where rank 0 is; the other is a process of its own
    result = run_check(all_checks()["ranks.tokens"], Subject(open_on(plugins, "reference"), plugins))
    assert (result.outcome, "expected" in result.detail) == ("failed", True), result


@pytest.mark.skipif(not has_native_kernels(), reason="the native kernels were not built")
@pytest.mark.parametrize(
    ("record", "name"),
    [
        ("rms_norm", "ops.rms_norm.float32"),
        ("rms_norm", "model.logprobs.float32"),
        ("softcap", "ops.softcap.bfloat16"),
        ("paged_attention", "attention.plain.float16"),
    ],
)
def test_a_wrong_record_of_the_native_program_is_caught(
    plugins: Plugins, monkeypatch: pytest.MonkeyPatch, record: str, name: str
) -> None:
    from headrace.platforms.cpu.native.program import NativeProgram

    right = getattr(NativeProgram, f"_{record}")

    def wrong(program: NativeProgram, i: Any) -> None:
        numbers = {key: value * 1.5 for key, value in i.attrs.items() if isinstance(value, float)}
        right(
            program,
            dataclasses.replace(i, attrs={**i.attrs, **numbers, **({"eps": 1e-2} if "eps" in i.attrs else {})}),
        )

    subject = Subject(open_on(plugins, "cpu"), plugins)
    assert run_check(all_checks()[name], subject).outcome == "passed"
    monkeypatch.setattr(NativeProgram, f"_{record}", wrong)
    result = run_check(all_checks()[name], subject)
    assert (result.outcome, "error" in result.detail) == ("failed", True), result


def test_without_torch_only_what_compares_with_definitions_is_left_out(
    plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.platforms.conformance.registry.find_spec", lambda name: None)
    subject = Subject(open_on(plugins, "cpu"), plugins)
    for name in ("attention.plain.float32", "model.batch", "ops.transfer", "ops.remember_tokens"):
        assert run_check(all_checks()[name], subject).outcome == "passed", name
    for name in ("ops.add.float32", "ops.linear.bfloat16", "model.greedy.plain"):
        result = run_check(all_checks()[name], subject)
        assert result.outcome == "unsupported" and "need torch" in result.detail, result


def test_a_device_without_a_dtype_or_feature_is_unsupported(plugins: Plugins) -> None:
    device = open_on(plugins, "null")
    object.__setattr__(device.caps, "features", frozenset())
    object.__setattr__(device.caps, "dtypes", ("float32",))
    subject = Subject(device, plugins)
    assert run_check(all_checks()["ops.add.bfloat16"], subject).detail == "the device has no bfloat16"
    assert run_check(all_checks()["model.greedy.window"], subject).detail == "the device has no sliding_window"


# ---- the oracle and the page ------------------------------------------------------------------------------
def test_the_dense_oracle_is_torchs_attention() -> None:
    rng = np.random.default_rng(0)
    query, keys, values = (rng.standard_normal(shape) for shape in ((5, 4, 8), (9, 2, 8), (9, 2, 8)))
    terms: dict[str, Any] = dict.fromkeys(("sinks", "slopes", "relative"))
    found = dense_attention(query, keys, values, Variant(), scale=0.3, **terms)
    q, k, v = (torch.from_numpy(array).transpose(0, 1) for array in (query, keys, values))
    mask = torch.ones(5, 9, dtype=torch.bool).tril(4)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True
    ).transpose(0, 1)
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-12)


def test_the_page_lists_every_check() -> None:
    listed = set(re.findall(r"^\| `([^`]+)` \|", DOCS.read_text(encoding="utf-8"), re.MULTILINE))
    dtypes = r"\.(float32|float16|bfloat16)$"
    assert listed == {re.sub(dtypes, ".DTYPE", name) for name in all_checks()}
