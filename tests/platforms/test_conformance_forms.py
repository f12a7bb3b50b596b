"""Bugs in forms of arguments and results, in rounding on the way, in combinations, and in a runner's duties."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportOptionalSubscript=false

import dataclasses
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from headrace.core.ops import OpTable
from headrace.core.ops.attention import Integers
from headrace.core.ops.sampling import gumbel_noise, keep_tokens
from headrace.core.ops.table import FAMILIES
from headrace.core.platform import OpProvider, Pending
from headrace.core.plugin_loader import Plugins
from headrace.core.runner.torch import TorchRunner
from headrace.core.stages import StepInput, StepOutput
from headrace.platforms.cpu.detect import has_native_kernels
from wrong_device import Op, WrongDevice, must_fail, open_on

needs_jax = pytest.mark.skipif(find_spec("jax") is None, reason="jax is not installed: pip install 'headrace[tpu]'")
pytestmark = pytest.mark.usefixtures("one_thread")


# ---- form -----------------------------------------------------------------------------------------------------
def _side_by_side(x: Any) -> Any:
    """What a kernel reads that takes rows to lie side by side."""
    if not isinstance(x, torch.Tensor) or x.is_contiguous():
        return x
    room = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    found = x.as_strided((min(room, x.numel()),), (1,))
    return torch.cat([found, found.new_zeros(x.numel() - len(found))]).view(x.shape)


def _contiguous(op: str, *places: int) -> Op:
    right = getattr(OpTable, op)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        return right(*(_side_by_side(x) if place in places else x for place, x in enumerate(args)), **kwargs)

    wrong.__name__ = f"rows_of_{'_'.join(map(str, places))}_side_by_side"
    return wrong


def _result(op: str, change: Callable[[Any], Any], name: str) -> Op:
    right = getattr(OpTable, op)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        return change(right(*args, **kwargs))

    wrong.__name__ = name
    return wrong


def _argument(op: str, place: int, change: Callable[[Any], Any], name: str) -> Op:
    right = getattr(OpTable, op)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        return right(*args[:place], change(args[place]), *args[place + 1 :], **kwargs)

    wrong.__name__ = name
    return wrong


def _slots_as_one_column(from_slots: Any) -> Any:
    return from_slots.flatten()[: len(from_slots)][:, None]


# ---- rounding ----------------------------------------------------------------------------------------------------
def _turns_in_its_own_dtype(x: Any, cos: Any, sin: Any, *, interleaved: bool = False) -> Any:
    return OpTable.rope(x, cos.to(x.dtype), sin.to(x.dtype), interleaved=interleaved)


def _product_of_rounded(x: Any, *, activation: Any) -> Any:
    gate, up = x.chunk(2, -1)
    return OpTable.act(gate, activation=activation) * up


def _softcap_in_its_own_dtype(x: Any, cap: float) -> Any:
    return cap * torch.tanh(x / cap)


def _gate_in_its_own_dtype(x: Any, gates: Any) -> Any:
    return x * (gates[..., None] if gates.dim() < x.dim() else gates).sigmoid()


def _factor_in_its_own_dtype(x: Any, y: Any) -> Any:
    return x * (y[..., None] if 1 < y.dim() < x.dim() else y).to(x.dtype)


def _factor_not_rounded(x: Any, factor: float) -> Any:
    return (x.float() * factor).to(x.dtype)


def _sum_in_its_own_dtype(x: Any, starts: Any, ends: Any) -> Any:
    means = []
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        total = torch.zeros_like(x[0])
        for row in x[start:end]:
            total = total + row
        means.append(total / (end - start))
    return torch.stack(means)


def _state_rounded(op: str, place: int) -> Op:
    right = getattr(OpTable, op)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        y, state = right(*args, **kwargs)
        return y, state.copy_(state.to(args[0].dtype).float())

    wrong.__name__ = f"{op}_rounds_its_state"
    return wrong


def _heads_by_eights(x: Any, weight: Any, form: str, matrix: Any) -> Any:
    total = None
    for start in range(0, x.shape[-1], 8):
        part = torch.einsum(form, x[..., start : start + 8], matrix(weight, start))
        total = part if total is None else total + part
    return total


def _keys_by_eights(query: Any, weight: Any) -> Any:
    size = query.shape[-1]
    return _heads_by_eights(query, weight, "thd,hdr->thr", lambda w, at: w[:, at : min(at + 8, size)])


def _values_by_eights(latents: Any, weight: Any, *, v_head_dim: int) -> Any:
    return _heads_by_eights(latents, weight, "thr,hdr->thd", lambda w, at: w[:, -v_head_dim:, at : at + 8])


def _experts_by_eights(x: Any, weights: Any, experts: Any, up: Any, down: Any, *args: Any, **kwargs: Any) -> Any:
    size, total = down.shape[-1], torch.zeros_like(x)
    for at in range(0, size, 8):
        part = torch.cat([up[:, at : at + 8], up[:, size + at : size + min(at + 8, size)]], 1)
        total = total + OpTable.grouped_experts(x, weights, experts, part, down[:, :, at : at + 8], **kwargs)
    return total


def _weights_of_an_encoder_rounded(
    query: Any, key: Any, value: Any, starts: Any, bias: Any = None, *, scale: float, **kwargs: Any
) -> Any:
    out, group = torch.empty_like(query), query.shape[1] // key.shape[1]
    for begin, end in zip(starts.tolist(), starts.tolist()[1:], strict=False):
        scores = torch.einsum("qhd,khd->hqk", query[begin:end], key[begin:end].repeat_interleave(group, 1)) * scale
        weights, total = scores.softmax(-1), torch.zeros_like(query[begin:end])
        for place in range(end - begin):
            total = total + weights[:, :, place].T[..., None] * value[begin + place].repeat_interleave(group, 0)
        out[begin:end] = total
    return out


def _scaled_query_rounded(query: Any, *args: Any, scale: float, **kwargs: Any) -> Any:
    return OpTable.paged_attention((query.float() * scale).to(query.dtype), *args, scale=1.0, **kwargs)


# ---- attention -----------------------------------------------------------------------------------------------------
def _drops(term: str, beside: Callable[[Any, Any, dict[str, Any]], bool], name: str) -> Op:
    """A term of scores that a kernel forgets beside another one."""

    def wrong(query: Any, cache: Any, *args: Any, **kwargs: Any) -> Any:
        if beside(query, cache, kwargs):
            kwargs = {key: value for key, value in kwargs.items() if key != term}
        return OpTable.paged_attention(query, cache, *args, **kwargs)

    wrong.__name__ = name
    return wrong


def _cut_heads(size: int, first: int, when: Callable[[Any, dict[str, Any]], bool], name: str) -> Op:
    """Heads of one size of which only the first values are computed."""

    def wrong(query: Any, cache: Any, *args: Any, **kwargs: Any) -> Any:
        out = OpTable.paged_attention(query, cache, *args, **kwargs)
        if query.shape[2] == size and when(cache, kwargs):
            out[..., first:] = 0
        return out

    wrong.__name__ = name
    return wrong


def _is_decode(cache: Any, kwargs: dict[str, Any]) -> bool:
    return bool(kwargs.get("max_query_len") == 1)


def _tanh_of_exponentials(
    query: Any, cache: Any, *args: Any, softcap: float = 0.0, scale: float, **kwargs: Any
) -> Any:
    out = OpTable.paged_attention(query, cache, *args, softcap=softcap, scale=scale, **kwargs)
    if softcap and len(query):
        top = query.float().norm(dim=-1).max() * scale * 4 / softcap
        out = out + (torch.exp(2 * top) - torch.exp(2 * top))  # NaN where it overflows
    return out


def _sink_beside_the_maximum(*args: Any, sinks: Any = None, **kwargs: Any) -> Any:
    if sinks is not None:
        sinks = torch.where(torch.exp(sinks).isinf(), torch.nan, sinks)
    return OpTable.paged_attention(*args, sinks=sinks, **kwargs)


def _owners_by_starts(query: Any, cache: Any, starts: Any, lens: Any, table: Any, **kwargs: Any) -> Any:
    """Behind a request without tokens at the beginning, others read its neighbour's table."""
    counts = starts.diff()
    if len(counts) > 1 and counts[0] == 0:
        lens, table = lens.roll(1), table.roll(1, 0)
    return OpTable.paged_attention(query, cache, starts, lens, table, **kwargs)


def _no_key_is_a_zero(query: Any, cache: Any, starts: Any, lens: Any, table: Any, **kwargs: Any) -> Any:
    return OpTable.paged_attention(query, cache, starts, lens, table, **kwargs) / (lens > 0).all()


def _width_of_the_table(query: Any, cache: Any, starts: Any, lens: Any, table: Any, **kwargs: Any) -> Any:
    """Takes the width of the table as the number of blocks that requests have, at least of wide ones."""
    size = cache[0].shape[1]
    if table.shape[1] > 80:
        lens = torch.where(starts.diff() > 0, lens.clamp(max=table.shape[1] * size // 90), lens)
    return OpTable.paged_attention(query, cache, starts, lens, table, **kwargs)


def _blocks_below_64(query: Any, cache: Any, *args: Any, **kwargs: Any) -> Any:
    if cache[0].shape[1] == 64:
        cache = tuple(part.roll(1, 1) for part in cache)
    return OpTable.paged_attention(query, cache, *args, **kwargs)


def _scale_of_nothing(cache: Any, key: Any, value: Any, slots: Any) -> Any:
    cache = OpTable.write_kv(cache, key, value, slots)
    for stored, new in zip(cache, (key, value), strict=True):
        if isinstance(stored, Integers):
            scales = stored.scales.flatten(0, 1)
            rows = slots.long().clamp(min=0)
            scales[rows] = torch.where((new == 0).all(-1), torch.nan, scales[rows])
    return cache


def _slots_of_16_bits(cache: Any, key: Any, value: Any, slots: Any) -> Any:
    return OpTable.write_kv(cache, key, value, torch.where(slots > 32767, 0, slots))


def _first_2048_tokens(cache: Any, key: Any, value: Any, slots: Any) -> Any:
    return OpTable.write_kv(cache, key[:2048], value[:2048], slots[:2048])


# ---- sampling and routing ---------------------------------------------------------------------------------------
def _without_a_maximum(logits: Any, token_ids: Any, *, num_logprobs: int) -> Any:
    values = logits - logits.exp().sum(-1, keepdim=True).log()
    chosen, top = values.gather(-1, token_ids.long()[:, None]), values.topk(num_logprobs, -1)
    return chosen[:, 0], (values > chosen).sum(-1).int() + 1, top[1].int(), top[0]


def _first_4096_tokens(logits: Any, token_ids: Any, *, num_logprobs: int) -> Any:
    chosen, ranks, _, _ = OpTable.logprobs(logits, token_ids, num_logprobs=num_logprobs)
    values, ids = logits.log_softmax(-1)[:, :4096].topk(num_logprobs, -1)
    return chosen, ranks, ids.int(), values


def _bans_are_no_numbers(logits: Any, token_ids: Any, **kwargs: Any) -> Any:
    chosen, *rest = OpTable.logprobs(logits, token_ids, **kwargs)
    return torch.where(chosen.isinf(), torch.nan, chosen), *rest


def _ranks_of_16_bits(logits: Any, token_ids: Any, **kwargs: Any) -> Any:
    chosen, ranks, *rest = OpTable.logprobs(logits, token_ids, **kwargs)
    return chosen, ranks.to(torch.int16).int(), *rest


def _limits(change: Callable[[Any, Any, Any, Any, Any], tuple[Any, ...]], name: str) -> Op:
    """change: logits, temperature, top_k, top_p, min_p as the op takes them instead."""

    def wrong(logits: Any, seeds: Any, positions: Any, *rest: Any) -> Any:
        logits, *limits = change(logits, *rest)
        return OpTable.sample(logits, seeds, positions, *limits)

    wrong.__name__ = name
    return wrong


def _huge_top_k(logits: Any, warm: Any, k: Any, p: Any, m: Any) -> tuple[Any, ...]:
    return logits, warm, None if k is None else torch.where(k > logits.shape[1], 1, k), p, m


def _top_p_of_0(logits: Any, warm: Any, k: Any, p: Any, m: Any) -> tuple[Any, ...]:
    return logits, warm, k, None if p is None else torch.where(p == 0, 1.0, p), m


def _cold_as_half(logits: Any, warm: Any, k: Any, p: Any, m: Any) -> tuple[Any, ...]:
    return logits, None if warm is None else torch.where((warm > 0) & (warm < 1e-4), 0.5, warm), k, p, m


def _exponentials_overflow(logits: Any, warm: Any, k: Any, p: Any, m: Any) -> tuple[Any, ...]:
    return logits, warm, k, None if p is None else torch.where(logits.exp().sum(-1).isinf(), 1.0, p), m


def _min_p_last(logits: Any, seeds: Any, positions: Any, warm: Any, k: Any, p: Any, m: Any) -> Any:
    if warm is None or m is None:
        return OpTable.sample(logits, seeds, positions, warm, k, p, m)
    kept = keep_tokens(keep_tokens(logits / warm.clamp(min=1e-5)[:, None], k, p, None), None, None, m)
    drawn = (kept + gumbel_noise(seeds, positions, vocab_size=logits.shape[1])).argmax(-1)
    return torch.where(warm < 1e-5, logits.argmax(-1), drawn).int()


def _a_grid_of_0(logits: Any, rows: Any, *rest: Any) -> Any:
    if not len(rows):
        raise RuntimeError("invalid configuration argument")
    return OpTable.apply_penalties(logits, rows, *rest)


def _first(count: int, op: str, places: tuple[int, ...]) -> Op:
    right = getattr(OpTable, op)

    def wrong(*args: Any) -> Any:
        return right(*(x[:count] if place in places else x for place, x in enumerate(args)))

    wrong.__name__ = f"first_{count}_of_{op}"
    return wrong


def _recalls_256(input_ids: Any, last_tokens: Any, slots: Any) -> Any:
    return torch.cat([OpTable.recall_tokens(input_ids, last_tokens, slots)[:256], input_ids[256:]])


def _other_groups_are_0(logits: Any, correction: Any = None, **kwargs: Any) -> Any:
    groups = kwargs.get("num_groups", 1)
    if groups == 1:
        return OpTable.route_experts(logits, correction, **kwargs)
    scores = logits.softmax(-1) if kwargs.get("score", "softmax") == "softmax" else logits.sigmoid()
    choice = (scores if correction is None else scores + correction).unflatten(-1, (groups, -1))
    best = choice.topk(2, -1)[0].sum(-1) if kwargs.get("group_score", "top2") == "top2" else choice.amax(-1)
    kept = torch.zeros_like(best).scatter(-1, best.topk(kwargs["num_groups_per_token"], -1)[1], 1.0)
    experts = (choice * kept[..., None]).flatten(-2).topk(kwargs["num_experts_per_token"], -1)[1]
    weights = scores.gather(-1, experts)
    return weights / weights.sum(-1, keepdim=True) * kwargs.get("weight_scale", 1.0), experts.int()


def _first_64_experts(logits: Any, *args: Any, **kwargs: Any) -> Any:
    logits = logits.clone()
    logits[:, 64:] = -1e4
    return OpTable.route_experts(logits, *args, **kwargs)


def _scores_without_a_maximum(logits: Any, *args: Any, **kwargs: Any) -> Any:
    scores = logits.exp()
    logits = logits if kwargs.get("score") else (scores / scores.sum(-1, keepdim=True)).log()
    return OpTable.route_experts(logits, *args, **kwargs)


def _sum_and_a_bit(logits: Any, correction: Any = None, **kwargs: Any) -> Any:
    weights, experts = OpTable.route_experts(logits, correction, **kwargs | {"renormalize": False})
    if kwargs.get("renormalize", True) and kwargs.get("score") != "sparsemixer":
        scale = kwargs.get("weight_scale", 1.0)
        weights = weights / (weights.sum(-1, keepdim=True) / scale + 1e-6)
    return weights, experts


def _softmax_is_not_corrected(logits: Any, correction: Any = None, **kwargs: Any) -> Any:
    return OpTable.route_experts(logits, correction if kwargs.get("score") else None, **kwargs)


def _one_weight_an_expert(x: Any, weights: Any, experts: Any, up: Any, *args: Any, **kwargs: Any) -> Any:
    """A table of weights by expert, in which the last one of a token wins."""
    if kwargs.get("partial"):
        return OpTable.grouped_experts(x, weights, experts, up, *args, **kwargs)
    table = torch.zeros(len(x), len(up)).scatter(1, experts.long(), weights)
    is_first = torch.ones_like(weights)
    for later in range(1, experts.shape[1]):
        is_first[:, later] = (experts[:, :later] != experts[:, later : later + 1]).all(-1)
    return OpTable.grouped_experts(x, table.gather(1, experts.long()) * is_first, experts, up, *args, **kwargs)


# ---- values --------------------------------------------------------------------------------------------------------
def _tanh_by_exponentials(x: Any, cap: float) -> Any:
    e = (2 * x.float() / cap).exp()
    return (cap * (e - 1) / (e + 1)).to(x.dtype)


def _exp_less_1(x: Any, alpha_p: Any, alpha_n: Any) -> Any:
    wide, softplus = x.float(), torch.nn.functional.softplus
    down = (wide.exp() - 1 - wide) * (0.5 + softplus(alpha_n)) + 0.5 * wide
    return torch.where(wide > 0, softplus(alpha_p) * wide.square() + 0.5 * wide, down).to(x.dtype)


def _never_0(x: Any, *, centred: bool = False) -> Any:
    return (OpTable.magnitude(x, centred=centred).square() + 1e-6).sqrt()


def _unit_length(query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
    unit = [torch.nn.functional.normalize(x.float(), dim=-1).to(x.dtype) for x in (query, key)]
    return OpTable.gated_delta(*unit, *args, **kwargs)


def _softplus_overflows(x: Any, dt: Any, *args: Any, **kwargs: Any) -> Any:
    y, state = OpTable.selective_scan(x, dt, *args, **kwargs)
    return y + 0 * torch.log(1 + torch.exp(dt.float()))[..., None].to(y.dtype), state


def _short_positions(positions: Any) -> Any:
    return positions.to(torch.int16).int() if len(positions) == 3 else positions


WITH_SINKS = lambda q, c, kwargs: kwargs.get("sinks") is not None  # noqa: E731
WITH_WINDOW = lambda q, c, kwargs: bool(kwargs.get("window"))  # noqa: E731
IN_INT8 = lambda q, c, kwargs: isinstance(c[0], Integers)  # noqa: E731

WRONG: list[tuple[str, Op, str, str]] = [
    *(
        (op, _contiguous(op, *places), "ops.views.float32", op)
        for op, places in (
            ("add_rms_norm", (0, 1)),
            ("layer_norm", (0,)),
            ("softcap", (0,)),
            ("act", (0,)),
            ("gate", (1,)),
            ("mul", (0,)),
            ("scale", (0,)),
            ("magnitude", (0,)),
            ("place_rows", (0,)),
            ("place_rows", (1,)),
            ("encoder_attention", (0, 1, 2)),
            ("causal_conv", (0,)),
            ("selective_scan", (2, 3)),
            ("gated_delta", (1,)),
            ("lru_inputs", (1,)),
            ("clamp", (0,)),
            ("xielu", (0,)),
            ("wkv", (0,)),
        )
    ),
    ("write_kv", _contiguous("write_kv", 1), "attention.slices.float32", "error"),
    ("write_kv", _contiguous("write_kv", 2), "attention.slices_decode.bfloat16", "error"),
    ("paged_attention", _contiguous("paged_attention", 0), "attention.slices.float32", "error"),
    ("grouped_experts", _contiguous("grouped_experts", 0), "ops.grouped_experts.float32", "error"),
    ("absorb_keys", _contiguous("absorb_keys", 0), "ops.latent_heads.float32", "absorb"),
    ("causal_conv", _argument("causal_conv", 5, _slots_as_one_column, "columns"), "ops.causal_conv.float32", "mixed"),
    ("wkv", _argument("wkv", 6, _slots_as_one_column, "columns"), "ops.wkv.float32", "mixed"),
    ("act_mul", _result("act_mul", lambda y: y.float(), "wide"), "ops.act_mul.bfloat16", "a result in float32"),
    ("magnitude", _result("magnitude", lambda y: y.half(), "narrow"), "ops.magnitude.float16", "in float16"),
    ("part_identities", _result("part_identities", lambda y: (y[0], y[1].long(), y[2]), "long"),
     "ops.part_identities", "in int64"),
    ("rope", _turns_in_its_own_dtype, "ops.rope.float16", "rounded before"),
    ("rope", _turns_in_its_own_dtype, "ops.rope.bfloat16", "rounded before"),
    ("act_mul", _product_of_rounded, "ops.act_mul.float16", "rounded before"),
    ("softcap", _softcap_in_its_own_dtype, "ops.softcap.float16", "rounded before"),
    ("gate", _gate_in_its_own_dtype, "ops.gate.float16", "rounded before"),
    ("mul", _factor_in_its_own_dtype, "ops.mul.float16", "rounded before"),
    ("scale", _factor_not_rounded, "ops.scale.float16", "times those of rounding"),
    ("mean_rows", _sum_in_its_own_dtype, "ops.narrow_sums.float16", "mean_rows"),
    ("causal_conv", _argument("causal_conv", 1, lambda w: w.half().float(), "half"),
     "ops.causal_conv.float32", "error"),
    ("selective_scan", _state_rounded("selective_scan", 7), "ops.selective_scan.bfloat16", "error"),
    ("gated_delta", _state_rounded("gated_delta", 7), "ops.gated_delta.float16", "error"),
    ("wkv", _state_rounded("wkv", 4), "ops.wkv.bfloat16", "error"),
    ("absorb_keys", _keys_by_eights, "ops.narrow_sums.float16", "absorb_keys"),
    ("expand_values", _values_by_eights, "ops.narrow_sums.bfloat16", "expand_values"),
    ("grouped_experts", _experts_by_eights, "ops.narrow_sums.float16", "grouped_experts"),
    ("encoder_attention", _weights_of_an_encoder_rounded, "ops.narrow_sums.float16", "encoder_attention"),
    ("paged_attention", _scaled_query_rounded, "attention.large_scores.float16", "error"),
    ("paged_attention", _drops("sinks", WITH_WINDOW, "s"), "attention.window_sinks.float32", "error"),
    ("paged_attention", _drops("sinks", WITH_WINDOW, "s"), "attention.window_sinks_decode.float32", "error"),
    ("paged_attention", _drops("window", WITH_SINKS, "w"), "attention.window_sinks.float32", "error"),
    ("paged_attention", _drops("softcap", WITH_SINKS, "c"), "attention.softcap_sinks.float32", "error"),
    ("paged_attention", _drops("alibi_slopes", WITH_WINDOW, "a"), "attention.window_alibi.float32", "error"),
    *(
        ("paged_attention", _drops(term, IN_INT8, term), "attention.int8_cache_of_all_terms.float32", "error")
        for term in ("window", "softcap", "sinks", "alibi_slopes")
    ),
    ("paged_attention", _drops("window", lambda q, c, k: k.get("window") == 1, "1"),
     "attention.window_of_one.float32", "error"),
    ("paged_attention", _cut_heads(80, 64, _is_decode, "80"), "attention.heads_of_80_decode.float32", "error"),
    ("paged_attention", _cut_heads(256, 128, _is_decode, "256"), "attention.wide_heads_decode.bfloat16", "error"),
    ("paged_attention", _cut_heads(128, 64, lambda c, k: isinstance(c[0], Integers), "128"),
     "attention.int8_cache_of_all_terms.bfloat16", "error"),
    ("paged_attention", _tanh_of_exponentials, "attention.softcap_large_scores.float32", "error inf"),
    ("paged_attention", _sink_beside_the_maximum, "attention.large_sinks.float32", "error inf"),
    ("paged_attention", _owners_by_starts, "attention.empty_requests.float32", ""),
    ("paged_attention", _no_key_is_a_zero, "attention.empty_requests.float32", "error inf"),
    ("paged_attention", _width_of_the_table, "attention.wide_table.float32", "error"),
    ("paged_attention", _blocks_below_64, "attention.blocks_of_64.float32", "error"),
    ("write_kv", _scale_of_nothing, "attention.int8_cache.float32", "error inf"),
    ("write_kv", _slots_of_16_bits, "attention.many_blocks.float32", "error"),
    ("write_kv", _first_2048_tokens, "attention.many_blocks.float32", "error"),
    ("logprobs", _without_a_maximum, "ops.logprobs", "up to 3000"),
    ("logprobs", _first_4096_tokens, "ops.logprobs", "70001"),
    ("logprobs", _bans_are_no_numbers, "ops.logprobs", "banned"),
    ("logprobs", _ranks_of_16_bits, "ops.logprobs", "70001"),
    ("sample", _limits(_huge_top_k, "huge_top_k"), "ops.sample", "odd limits"),
    ("sample", _limits(_top_p_of_0, "top_p_of_0"), "ops.sample", "odd limits"),
    ("sample", _limits(_cold_as_half, "cold_as_half"), "ops.sample", "cold"),
    ("sample", _limits(_exponentials_overflow, "overflow"), "ops.sample", "large logits"),
    ("sample", _min_p_last, "ops.sample", "min_p ahead of top_p"),
    ("sample", _result("sample", lambda ids: ids.to(torch.int16).int(), "ids_of_16_bits"), "ops.sample", "70001"),
    ("apply_penalties", _a_grid_of_0, "ops.apply_penalties", "invalid configuration"),
    ("apply_penalties", _first(1024, "apply_penalties", (1, 2, 3)), "ops.apply_penalties", "long text"),
    ("apply_penalties", _argument("apply_penalties", 3, lambda c: c.clamp(max=127), "7bits"), "ops.apply_penalties",
     "long text"),
    ("apply_penalties", _result("apply_penalties", lambda y: y.clamp(min=-3e38), "bans"), "ops.apply_penalties",
     "infinities"),
    ("add_logit_bias", _first(64, "add_logit_bias", (1, 2, 3)), "ops.add_logit_bias", "600 tokens"),
    ("remember_tokens", _first(64, "remember_tokens", (1, 2)), "ops.remember_tokens", "many"),
    ("recall_tokens", _recalls_256, "ops.recall_tokens", "700 tokens"),
    ("route_experts", _other_groups_are_0, "ops.route_experts", "corrected below 0"),
    ("route_experts", _first_64_experts, "ops.route_experts", "of 256"),
    ("route_experts", _scores_without_a_maximum, "ops.route_experts", "large logits"),
    ("route_experts", _sum_and_a_bit, "ops.route_experts", "of weight 1"),
    ("route_experts", _softmax_is_not_corrected, "ops.route_experts", "of weight 1"),
    ("grouped_experts", _one_weight_an_expert, "ops.grouped_experts.float32", "twice"),
    ("softcap", _tanh_by_exponentials, "ops.softcap.float32", "far from 0"),
    ("xielu", _exp_less_1, "ops.xielu.float32", "near 0"),
    ("magnitude", _never_0, "ops.magnitude.float32", "values of about 0.002"),
    ("gated_delta", _unit_length, "ops.gated_delta.float32", "short keys"),
    ("selective_scan", _softplus_overflows, "ops.selective_scan.float32", "far from 0"),
    ("rotary_angles", _argument("rotary_angles", 0, _short_positions, "short"), "ops.rotary_angles", "32768"),
]  # fmt: skip
"""(op, what is wrong with it, the check that must find it, words of the finding)."""


@pytest.mark.parametrize(
    ("op", "wrong", "name", "words"), WRONG, ids=[f"{op}-{w.__name__}-{name}" for op, w, name, _ in WRONG]
)
def test_a_wrong_op_is_caught(plugins: Plugins, op: str, wrong: Op, name: str, words: str) -> None:
    must_fail(name, WrongDevice(open_on(plugins, "reference"), op, wrong), plugins, words)


def test_one_wrong_value_among_many_is_caught() -> None:
    """Though its share of the mean square error is small."""
    from headrace.platforms.conformance.arrays import compare
    from headrace.platforms.conformance.registry import Failed

    want = np.random.default_rng(0).standard_normal((1000, 1000))
    got = want.copy()
    got[-1, -1] = 5.0
    with pytest.raises(Failed, match="one value is off"):
        compare(got, want, 1e-4, "a million values")


# ---- a runner's duties -------------------------------------------------------------------------------------------
def _sampling(change: Callable[[Any], dict[str, Any]]) -> Callable[[StepInput], StepInput]:
    def changed(batch: StepInput) -> StepInput:
        sampling = batch.sampling
        if sampling is None:
            return batch
        return dataclasses.replace(batch, sampling=dataclasses.replace(sampling, **change(sampling)))

    return changed


def _mask_of_the_row_of_logits(sampling: Any) -> dict[str, Any]:
    masked = sampling.allow_mask is not None and sampling.rows is not None
    return {"allow_mask": sampling.allow_mask[sampling.rows]} if masked else {}


def _bias_of_the_row_of_logits(sampling: Any) -> dict[str, Any]:
    biased = sampling.bias_rows is not None and sampling.rows is not None
    return {"bias_rows": sampling.rows[sampling.bias_rows]} if biased else {}


def _slots_in_order(sampling: Any) -> dict[str, Any]:
    return {"slots": np.arange(len(sampling.slots), dtype=np.int32)}


def _tokens_of_the_row(batch: StepInput) -> StepInput:
    """Run-ahead finds a request's last token by its place in the step."""
    forward = batch.forward
    if forward.token_slots is None:
        return batch
    places = np.repeat(np.arange(len(forward.seq_lens), dtype=np.int32), np.diff(forward.query_start_loc))
    return dataclasses.replace(batch, forward=dataclasses.replace(forward, token_slots=places))


def _never_goes_back() -> Callable[[StepInput], StepInput]:
    """Remembers how far each slot has come, and computes nothing twice."""
    known: dict[int, int] = {}

    def change(batch: StepInput) -> StepInput:
        forward, sampling = batch.forward, batch.sampling
        if sampling is None or sampling.rows is None:
            return batch
        slots = list(dict.fromkeys(sampling.slots.tolist()))
        lens = forward.seq_lens.copy()
        if len(slots) == len(lens):
            for row, slot in enumerate(slots):
                lens[row] = known[slot] = max(known.get(slot, 0), int(lens[row]))
        return dataclasses.replace(batch, forward=dataclasses.replace(forward, seq_lens=lens))

    return change


def _first_piece_of_prompts(batch: StepInput) -> StepInput:
    asked = batch.prompt_logprobs
    if asked is None:
        return batch
    rows = np.concatenate([asked.rows[:256], asked.rows[: len(asked.rows) - 256]])
    return dataclasses.replace(batch, prompt_logprobs=dataclasses.replace(asked, rows=rows))


@pytest.mark.parametrize(
    ("change", "name", "words"),
    [
        (_sampling(_mask_of_the_row_of_logits), "model.drafts_sampled", "expected"),
        (_sampling(_bias_of_the_row_of_logits), "model.drafts_sampled", "expected"),
        (_never_goes_back(), "model.wrong_drafts", ""),
        (_first_piece_of_prompts, "model.long_prompt_logprobs", "expected"),
    ],
    ids=["mask", "bias", "back", "pieces"],
)
def test_a_wrong_step_is_caught(
    plugins: Plugins, monkeypatch: pytest.MonkeyPatch, change: Any, name: str, words: str
) -> None:
    device, right = open_on(plugins, "reference"), TorchRunner.step

    def step(runner: TorchRunner, batch: StepInput) -> Pending:
        return right(runner, change(batch) if runner.device is device else batch)

    monkeypatch.setattr(TorchRunner, "step", step)
    must_fail(name, device, plugins, words)


@pytest.mark.parametrize("change", [_sampling(_slots_in_order), _tokens_of_the_row], ids=["slots", "tokens"])
def test_a_last_token_of_another_request_is_caught(
    plugins: Plugins, monkeypatch: pytest.MonkeyPatch, change: Any
) -> None:
    from headrace.core.runner.bucketed import BucketedRunner

    right = BucketedRunner.step
    monkeypatch.setattr(BucketedRunner, "step", lambda runner, batch: right(runner, change(batch)))
    must_fail("model.any_order", open_on(plugins, "gaudi:emulated"), plugins, "1 steps ahead")


class OneBuffer:
    """Results of all steps in the same page-locked memory."""

    def __init__(self, pending: Pending, room: np.ndarray) -> None:
        self.pending, self.room = pending, room

    def ready(self) -> bool:
        """As the step."""
        return self.pending.ready()

    def result(self) -> StepOutput:
        """In the room that the next step's comes to, too."""
        output = self.pending.result()
        view = self.room[: len(output.token_ids)]
        view[:] = output.token_ids
        return dataclasses.replace(output, token_ids=view)


def test_results_in_memory_that_is_used_again_are_caught(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    right, room = TorchRunner.step, np.zeros(16, np.int32)
    monkeypatch.setattr(TorchRunner, "step", lambda runner, batch: OneBuffer(right(runner, batch), room))
    must_fail("model.results_stay", open_on(plugins, "reference"), plugins, "is not what it was")


def _takes_its_state_along(*args: Any, **kwargs: Any) -> Any:
    """Leaves the new state in the slot that it began with, too."""
    state, starts, before, kept = args[-4:]
    y, state = OpTable.causal_conv(*args, **kwargs)
    for row, (begin, end) in enumerate(zip(starts.tolist(), starts.tolist()[1:], strict=False)):
        if end > begin and before[row, 0] >= 0 and kept[end - 1] >= 0:
            state[before[row, 0].long()] = state[kept[end - 1].long()]
    return y, state


@pytest.mark.parametrize("name", ["model.forked.states", "model.forked.delta_states"])
def test_a_state_that_is_taken_along_is_caught(plugins: Plugins, name: str) -> None:
    must_fail(name, WrongDevice(open_on(plugins, "reference"), "causal_conv", _takes_its_state_along), plugins, "")


# ---- native records and JAX ---------------------------------------------------------------------------------------
@pytest.mark.skipif(not has_native_kernels(), reason="the native kernels were not built")
@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda a: {"window": 0} if a.get("window") == 1 else {}, "attention.window_of_one.float32"),
        (lambda a: {"softcap": 0.0} if a.get("window") else {}, "attention.int8_cache_of_all_terms.float32"),
    ],
    ids=["window", "softcap"],
)
def test_a_wrong_record_is_caught(plugins: Plugins, monkeypatch: pytest.MonkeyPatch, change: Any, name: str) -> None:
    from headrace.platforms.cpu.native.program import NativeProgram

    right = NativeProgram._paged_attention

    def wrong(program: NativeProgram, i: Any) -> None:
        right(program, dataclasses.replace(i, attrs={**i.attrs, **change(i.attrs)}))

    monkeypatch.setattr(NativeProgram, "_paged_attention", wrong)
    must_fail(name, open_on(plugins, "cpu"), plugins, "error")


def _jax_bug(op: str) -> Op:
    import jax.numpy as jnp

    from headrace.core.ops.jax import FUNCTIONS

    right = FUNCTIONS[op]
    if op == "paged_attention":
        return lambda *args, window=0, sinks=None, **kwargs: right(
            *args, window=window, sinks=None if window else sinks, **kwargs
        )
    if op == "rope":
        return lambda x, cos, sin, **kwargs: right(x, cos.astype(x.dtype), sin.astype(x.dtype), **kwargs)
    if op == "softcap":
        return lambda x, cap: (cap * (1 - 2 / (jnp.exp(2 * x / cap) + 1))).astype(x.dtype)
    assert op == "logprobs", op
    return lambda *args, **kwargs: (
        *right(*args, **kwargs)[:1],
        *(r.astype(jnp.int16) for r in right(*args, **kwargs)[1:2]),
        *right(*args, **kwargs)[2:],
    )


@needs_jax
@pytest.mark.parametrize(
    ("op", "name", "words"),
    [
        ("paged_attention", "attention.window_sinks.float32", "error"),
        ("rope", "ops.rope.bfloat16", "rounded before"),
        ("softcap", "ops.softcap.bfloat16", "error"),
        ("logprobs", "ops.logprobs", "in int16"),
    ],
)
def test_a_wrong_body_in_jax_is_caught(plugins: Plugins, op: str, name: str, words: str) -> None:
    from headrace.core.ops.jax import FUNCTIONS

    device: Any = open_on(plugins, "neuron:emulated")
    family = next((ops for ops in FAMILIES.values() if op in ops), ())
    bodies = {name: FUNCTIONS[name] for name in family} | {op: _jax_bug(op)}
    device.extra_providers = (OpProvider(name="wrong", ops=bodies),)
    must_fail(name, device, plugins, words)
