"""Further kinds of wrong devices: bugs that only rare shapes, large numbers, dirty memory or whole steps show."""

import dataclasses
from typing import Any

import pytest
import torch

from headrace.core.ops import OpTable
from headrace.core.ops.attention import Integers
from headrace.core.platform import Pending
from headrace.core.plugin_loader import Plugins
from headrace.core.runner.torch import TorchRunner
from headrace.core.stages import StepInput
from headrace.platforms.conformance.kit import all_checks, run_check
from headrace.platforms.conformance.registry import Subject
from wrong_device import Op, WrongDevice, open_on


def _scaled(name: str, place: int, factor: float) -> Op:
    """The op with one of its arguments multiplied."""
    right: Op = getattr(OpTable, name)
    return lambda *args, **kwargs: right(*args[:place], args[place] * factor, *args[place + 1 :], **kwargs)


# ---- elementwise, norms, rope -------------------------------------------------------------------------------
def _axes_swapped(positions: Any, *rest: Any, axes: Any = ()) -> Any:
    return OpTable.rotary_angles(positions.flip(-1) if axes else positions, *rest, axes=axes)


def _whole_head_turns(x: Any, cos: Any, sin: Any, *, interleaved: bool = False) -> Any:
    missing = x.shape[-1] // 2 - cos.shape[-1]
    cos, sin = (torch.cat([t, t[:, -1:].expand(-1, missing)], -1) for t in (cos, sin))
    return OpTable.rope(x, cos, sin, interleaved=interleaved)


def _first_16_heads(x: Any, cos: Any, sin: Any, *, interleaved: bool = False) -> Any:
    return torch.cat([OpTable.rope(x[:, :16], cos, sin, interleaved=interleaved), x[:, 16:]], 1)


def _variance_by_squares(x: Any, weight: Any, bias: Any, *, eps: float) -> Any:
    wide = x.float()
    variance = wide.square().mean(-1, keepdim=True) - wide.mean(-1, keepdim=True).square()
    y = (wide - wide.mean(-1, keepdim=True)) * (variance + eps).rsqrt()
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(x.dtype)


def _tanh_overflows(x: Any, *, activation: Any) -> Any:
    if activation != "gelu_tanh":
        return OpTable.act(x, activation=activation)
    grown = torch.exp(2 * 0.7978845608 * (x.float() + 0.044715 * x.float() ** 3))
    return (x.float() * (0.5 + 0.5 * (grown - 1) / (grown + 1))).to(x.dtype)


def _columns_of_one_program(x: Any, indices: Any) -> Any:
    rows = OpTable.gather(x, indices).clone()
    rows[:, 2048:] = 0
    return rows


def _rows_lie_side_by_side(x: Any, weight: Any, bias: Any = None) -> Any:
    packed = x.as_strided(x.shape, (x.shape[1], 1)) if len(x) else x
    return OpTable.linear(packed, weight, bias)


def _sums_in_its_own_dtype(x: Any, weight: Any, bias: Any = None) -> Any:
    total = torch.zeros(len(x), len(weight), dtype=x.dtype)
    for start in range(0, x.shape[1], 32):
        total = total + OpTable.linear(x[:, start : start + 32], weight[:, start : start + 32])
    return total if bias is None else total + bias.to(x.dtype)


def _cut_off(x: Any, *, dtype: str) -> Any:
    wanted = getattr(torch, dtype)
    if dtype == "bfloat16" and x.dtype == torch.float32:
        return (x.contiguous().view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    return x.to(wanted)


# ---- attention and caches -----------------------------------------------------------------------------------
def _no_maximum(query: Any, cache: Any, starts: Any, lens: Any, table: Any, *, scale: float, **kwargs: Any) -> Any:
    right = OpTable.paged_attention(query, cache, starts, lens, table, scale=scale, **kwargs)
    size = (query.float().square().sum(-1).amax() * scale).exp()  # what a softmax without its maximum would hold
    return right if size.isfinite() else right * size * 0


def _keeps_up_to_100(cache: Any, key: Any, value: Any, slots: Any) -> Any:
    return OpTable.write_kv(cache, key.clamp(-100, 100), value.clamp(-100, 100), slots)


def _scale_of_another_head(cache: Any, key: Any, value: Any, slots: Any) -> Any:
    OpTable.write_kv(cache, key, value, slots)
    if isinstance(cache[0], Integers):
        for part in cache:
            part.scales.flatten(0, 1)[slots.long().clamp(min=0)] = part.scales.flatten(0, 1)[
                slots.long().clamp(min=0)
            ].roll(1, -1)
    return cache


def _chunk_is_a_window(*args: Any, window: int = 0, chunk: int = 0, **kwargs: Any) -> Any:
    return OpTable.paged_attention(*args, window=window or chunk, **kwargs)


def _no_sight_ahead(*args: Any, reach: Any = None, **kwargs: Any) -> Any:
    return OpTable.paged_attention(*args, **kwargs)


def _sees_one_more(*args: Any, reach: Any = None, **kwargs: Any) -> Any:
    ahead = None if reach is None else (reach + (reach > 0)).minimum(args[3].max())
    return OpTable.paged_attention(*args, reach=ahead, **kwargs)


def _sight_of_the_first_token(*args: Any, reach: Any = None, **kwargs: Any) -> Any:
    if reach is not None:
        starts = args[2].long()
        owners = torch.searchsorted(starts[1:], torch.arange(len(reach)), right=True)
        reach = reach[starts[owners]]
    return OpTable.paged_attention(*args, reach=reach, **kwargs)


def _codes_cut_off(cache: Any, key: Any, value: Any, slots: Any) -> Any:
    OpTable.write_kv(cache, key, value, slots)
    if isinstance(cache[0], Integers):
        where = slots.long().clamp(min=0)
        for part, x in zip(cache, (key, value), strict=True):
            scaled = x.float() / part.scales.flatten(0, 1)[where][..., None]
            part.codes.flatten(0, 1)[where] = scaled.trunc().nan_to_num(0.0).to(torch.int8)
    return cache


def _scales_of_keys(query: Any, cache: Any, *rest: Any, **kwargs: Any) -> Any:
    keys, values = cache
    if isinstance(keys, Integers):
        values = Integers(codes=values.codes, scales=keys.scales)
    return OpTable.paged_attention(query, (keys, values), *rest, **kwargs)


def _unknown_is_short(*args: Any, max_seq_len: int = 0, **kwargs: Any) -> Any:
    query, cache, starts, lens, table = args
    if not max_seq_len:
        lens = torch.minimum(lens, torch.maximum(starts.diff(), lens.clamp(max=32)))
    return OpTable.paged_attention(query, cache, starts, lens, table, **kwargs)


def _blocks_of_16(query: Any, cache: Any, starts: Any, lens: Any, table: Any, **kwargs: Any) -> Any:
    cut = tuple(part.reshape(-1, 16, *part.shape[2:]) for part in cache)
    return OpTable.paged_attention(query, cut, starts, lens, torch.cat([table, table], 1), **kwargs)


def _slopes_upside_down(*args: Any, alibi_slopes: Any = None, **kwargs: Any) -> Any:
    slopes = None if alibi_slopes is None else -alibi_slopes
    return OpTable.paged_attention(*args, alibi_slopes=slopes, **kwargs)


def _wide_rows_cut(cache: Any, key: Any, value: Any, slots: Any) -> Any:
    key = key.flatten(1).clone()
    key[:, 2048:] = 0
    return OpTable.write_kv(cache, key.view(value.shape), value, slots)


def _pairs_of_heads(query: Any, cache: Any, *rest: Any, **kwargs: Any) -> Any:
    group = query.shape[1] // cache[0].shape[2]
    kept = OpTable.paged_attention(query, cache, *rest, **kwargs)
    kept[:, 12 * (group // 12 > 0) or len(kept[0]) :] = 0
    return kept


def _sees_the_past_only(query: Any, key: Any, value: Any, starts: Any, bias: Any = None, **kwargs: Any) -> Any:
    ends = starts.clone()
    out = OpTable.encoder_attention(query, key, value, starts, bias, **kwargs)
    for begin, end in zip(ends.tolist(), ends.tolist()[1:], strict=False):
        if end - begin > 1:
            one = torch.tensor([0, end - begin - 1], dtype=torch.int32)
            rows = slice(begin, end - 1)
            out[rows] = OpTable.encoder_attention(query[rows], key[rows], value[rows], one, bias, **kwargs)
    return out


# ---- sampling -----------------------------------------------------------------------------------------------
def _keeps_one_more(logits: Any, seeds: Any, positions: Any, temperature: Any, k: Any, top_p: Any, min_p: Any) -> Any:
    return OpTable.sample(logits, seeds, positions, temperature, k, None if top_p is None else top_p + 1e-6, min_p)


def _spares_the_prompt(logits: Any, rows: Any, tokens: Any, counts: Any, *rest: Any) -> Any:
    used = counts > 0
    return OpTable.apply_penalties(logits, rows[used], tokens[used], counts[used], *rest)


def _presence_by_count(logits: Any, rows: Any, tokens: Any, counts: Any, rep: Any, freq: Any, presence: Any) -> Any:
    return OpTable.apply_penalties(logits, rows, tokens, counts, rep, freq + presence, presence * 0)


def _padding_is_the_last_row(logits: Any, rows: Any, *rest: Any) -> Any:
    return OpTable.apply_penalties(logits, rows % len(logits), *rest)


def _last_bias_wins(logits: Any, rows: Any, tokens: Any, values: Any) -> Any:
    out = logits.clone()
    for row, token, value in zip(rows.tolist(), tokens.tolist(), values.tolist(), strict=True):
        out[row, token] = logits[row, token] + value
    return out


def _ranks_behind_equals(logits: Any, token_ids: Any, *, num_logprobs: int) -> Any:
    chosen, ranks, *rest = OpTable.logprobs(logits, token_ids, num_logprobs=num_logprobs)
    equal = (logits == logits.gather(1, token_ids.long()[:, None])).sum(1) - 1
    return chosen, (ranks + equal).to(torch.int32), *rest


def _misses_the_last_chunk(logits: Any, *rest: Any) -> Any:
    size = logits.shape[1]
    whole = size - size % 4096 if size > 4096 else size
    return OpTable.sample(logits[:, :whole], *rest)


# ---- stacked weights and states -----------------------------------------------------------------------------
def _one_tile_an_expert(x: Any, weights: Any, experts: Any, *rest: Any, **kwargs: Any) -> Any:
    kept = weights.clone()
    for expert in experts.unique().tolist():
        places = (experts == expert).nonzero()[64:]
        kept[places[:, 0], places[:, 1]] = 0
    return OpTable.grouped_experts(x, kept, experts, *rest, **kwargs)


def _always_gated(*args: Any, gated: bool = True, **kwargs: Any) -> Any:
    out = OpTable.grouped_experts(*args, gated=gated, **kwargs)
    return out if gated else out.relu()


def _keeps_the_inputs_before(
    x: Any, w: Any, b: Any, state: Any, starts: Any, before: Any, kept: Any, **o: Any
) -> Any:
    out, state = OpTable.causal_conv(x, w, b, state, starts, before, kept, **o)
    slots = kept[kept > 0].long()
    state[slots] = state[slots].roll(1, 1)
    return out, state


def _reads_what_it_wrote(x: Any, w: Any, b: Any, state: Any, starts: Any, before: Any, kept: Any, **o: Any) -> Any:
    """States are kept first, and then read; right where no row's new state takes the place of its old one."""
    OpTable.causal_conv(x, w, b, state, starts, before, kept, **o)
    return OpTable.causal_conv(x, w, b, state, starts, before, kept, **o)


def _state_of_nobody(*args: Any, **kwargs: Any) -> Any:
    *rest, before, kept = args
    scan: Op = OpTable.selective_scan
    return scan(*rest, before.clamp(min=0), kept, **kwargs)


def _forgets_behind_a_chunk(*args: Any, **kwargs: Any) -> Any:
    *head, state, starts, before, kept = args
    delta: Op = OpTable.gated_delta
    out, state = delta(*head, state, starts, before, kept, **kwargs)
    [query, key, value, *rest] = head
    for begin, end in zip(starts.tolist(), starts.tolist()[1:], strict=False):
        if end - begin > 64:
            late, one = slice(begin + 64, end), torch.tensor([0, end - begin - 64], dtype=torch.int32)
            dt, beta, *fixed = rest
            none = torch.tensor([[-1]], dtype=torch.int32)
            parts = (query[late], key[late], value[late], dt[late], beta[late], *fixed)
            out[late], state = delta(*parts, state, one, none, kept[late], **kwargs)
    return out, state


def _no_largest_exponent(
    key: Any, value: Any, a_log: Any, bonus: Any, state: Any, starts: Any, before: Any, kept: Any, **options: Any
) -> Any:
    op: Op = OpTable.wkv
    return op(key.clamp(max=80), value, a_log, bonus, state, starts, before, kept, **options)


WRONG: list[tuple[str, Op, str, str]] = [
    ("rotary_angles", _axes_swapped, "ops.rotary_axes", "three axes"),
    ("rope", _whole_head_turns, "ops.rope.float32", "rotary 32"),
    ("rope", _whole_head_turns, "model.greedy.partial_rope", "expected"),
    ("rope", _first_16_heads, "ops.rope.float32", "37 heads"),
    ("layer_norm", _variance_by_squares, "ops.layer_norm.float32", "far from 0"),
    ("act", _tanh_overflows, "ops.act.float32", "error inf"),
    ("gather", _columns_of_one_program, "ops.gather.float32", "wide rows"),
    ("linear", _rows_lie_side_by_side, "ops.slices.float32", "linear of a slice"),
    ("linear", _sums_in_its_own_dtype, "ops.long_sums.float16", "error"),
    ("linear", _sums_in_its_own_dtype, "ops.long_sums.bfloat16", "error"),
    ("cast", _cut_off, "ops.cast.bfloat16", "nearest"),
    ("embedding", lambda i, w: OpTable.embedding(i.clamp(max=len(w) - 2), w), "ops.embedding.float32", "error"),
    ("paged_attention", _no_maximum, "attention.large_scores.float32", "error inf"),
    ("paged_attention", _chunk_is_a_window, "attention.chunk_of_a_block.float32", "error"),
    ("paged_attention", _no_sight_ahead, "attention.reach.float32", "error"),
    ("paged_attention", _sees_one_more, "attention.reach.float32", "error"),
    ("paged_attention", _sight_of_the_first_token, "attention.reach_window.float32", "error"),
    ("paged_attention", _scales_of_keys, "attention.int8_cache_decode.float32", "error"),
    ("paged_attention", _unknown_is_short, "attention.unknown_lengths.float32", "error"),
    ("paged_attention", _blocks_of_16, "attention.blocks_of_32.float32", "error"),
    ("paged_attention", _slopes_upside_down, "attention.alibi.float32", "error"),
    ("paged_attention", _pairs_of_heads, "attention.many_heads.float32", "error"),
    ("write_kv", _keeps_up_to_100, "attention.large_values.float32", "error"),
    ("write_kv", _wide_rows_cut, "attention.wide_heads.float32", "error"),
    ("write_kv", _scale_of_another_head, "attention.int8_cache.float32", "error"),
    ("write_kv", _codes_cut_off, "attention.int8_cache.float32", "error"),
    ("encoder_attention", _sees_the_past_only, "ops.encoder_attention.float32", "error"),
    (
        "encoder_attention",
        lambda *args, softcap=0.0, **kwargs: OpTable.encoder_attention(*args, **kwargs),
        "ops.encoder_attention.float32",
        "softcap",
    ),
    (
        "mean_rows",
        lambda x, s, e: OpTable.mean_rows(x, s, (e + 1).clamp(max=len(x))),
        "ops.mean_rows.float32",
        "error",
    ),
    ("mean_rows", lambda x, s, e: OpTable.mean_rows(x, s * 0, e), "model.vectors", "error"),
    ("sample", _keeps_one_more, "ops.sample", "top_p where sums end"),
    ("sample", _misses_the_last_chunk, "ops.sample", "over chunks"),
    ("sample", lambda x, s, *rest: OpTable.sample(x, s * 0, *rest), "model.seeds", "seeds"),
    ("apply_penalties", _spares_the_prompt, "ops.apply_penalties", "error"),
    ("apply_penalties", _spares_the_prompt, "model.sampling", "step"),
    ("apply_penalties", _presence_by_count, "ops.apply_penalties", "error"),
    ("apply_penalties", _padding_is_the_last_row, "ops.apply_penalties", "padding"),
    ("add_logit_bias", _last_bias_wins, "ops.add_logit_bias", "one token"),
    ("logprobs", _ranks_behind_equals, "ops.logprobs", "equal logits"),
    ("logprobs", _scaled("logprobs", 0, 0.9), "model.sampling", "error"),
    ("logprobs", _scaled("logprobs", 0, 0.9), "model.prompt_logprobs", "error"),
    ("grouped_experts", _one_tile_an_expert, "ops.grouped_experts.float32", "150 tokens"),
    ("grouped_experts", _always_gated, "ops.grouped_experts.float32", "gated"),
    ("causal_conv", _keeps_the_inputs_before, "ops.causal_conv.float32", "error"),
    ("causal_conv", _keeps_the_inputs_before, "model.states", "by 1"),
    ("causal_conv", _reads_what_it_wrote, "ops.causal_conv.float32", "a long row"),
    ("selective_scan", _state_of_nobody, "ops.selective_scan.float32", "error"),
    ("gated_delta", _forgets_behind_a_chunk, "ops.gated_delta.float32", "a long row"),
    ("wkv", _no_largest_exponent, "ops.wkv.float32", "error"),
]
"""(op, what is wrong with it, the check that must find it, words of the finding)."""


@pytest.mark.parametrize(("op", "wrong", "name", "words"), WRONG, ids=[f"{op}-{name}" for op, _, name, _ in WRONG])
def test_a_wrong_op_is_caught(plugins: Plugins, op: str, wrong: Op, name: str, words: str) -> None:
    device = WrongDevice(open_on(plugins, "reference"), op, wrong)
    result = run_check(all_checks()[name], Subject(device, plugins))
    assert result.outcome == "failed", result.detail
    assert words in result.detail


def _drafts_backwards(batch: StepInput) -> StepInput:
    sampling = batch.sampling
    if sampling is None or sampling.rows is None or len(sampling.rows) == len(set(sampling.slots.tolist())):
        return batch
    return dataclasses.replace(batch, sampling=dataclasses.replace(sampling, rows=sampling.rows[::-1].copy()))


def _next_target(batch: StepInput) -> StepInput:
    asked = batch.prompt_logprobs
    if asked is None:
        return batch
    return dataclasses.replace(batch, prompt_logprobs=dataclasses.replace(asked, targets=asked.targets[::-1].copy()))


def _tables_by_turns(batch: StepInput) -> StepInput:
    """The second request reads the blocks of the first, once there are three."""
    tables = [table.copy() for table in batch.forward.block_tables]
    for table in tables:
        if len(table) == 3:
            table[1] = table[0]
    return dataclasses.replace(batch, forward=dataclasses.replace(batch.forward, block_tables=tables))


@pytest.mark.parametrize(
    ("change", "name", "words"),
    [
        (_drafts_backwards, "model.verify", "rows of drafts"),
        (_next_target, "model.prompt_logprobs", "prompt"),
        (_tables_by_turns, "model.verify", "rows of drafts"),
        (_tables_by_turns, "model.states", "three requests"),
    ],
)
def test_a_wrong_step_is_caught(
    plugins: Plugins, monkeypatch: pytest.MonkeyPatch, change: Any, name: str, words: str
) -> None:
    right = TorchRunner.step

    def step(runner: TorchRunner, batch: StepInput) -> Pending:
        return right(runner, change(batch) if runner.device is subject.device else batch)

    subject = Subject(open_on(plugins, "reference"), plugins)
    monkeypatch.setattr(TorchRunner, "step", step)
    result = run_check(all_checks()[name], subject)
    assert (result.outcome, words in result.detail) == ("failed", True), result
