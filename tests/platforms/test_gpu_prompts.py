"""Long prompts by torch's fused attention beside a GPU's kernels: on the processor's forms of the same functions."""

import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from headrace.core.models.spec import ModelSpec
from headrace.core.ops import OpTable, select_ops
from headrace.core.platform import OpContext, OpProvider
from headrace.core.plugin_loader import load_plugins
from headrace.core.self_test import nmse, tiny_spec
from headrace.kernels.torch import prompts as fused_prompts
from headrace.kernels.torch.prompts import Prompts
from headrace.platforms.conformance.kit import all_checks, run_check
from headrace.platforms.conformance.registry import Subject
from headrace.platforms.gpu import prompts
from headrace.platforms.gpu.prompts import Race, prompts_provider
from wrong_device import open_on

BLOCK = 4
FAMILY: dict[str, Any] = {"new_kv_cache": OpTable.new_kv_cache, "write_kv": OpTable.write_kv}
TRITON = OpProvider(name="triton", ops={**FAMILY, "paged_attention": OpTable.paged_attention})


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every prompt that the fused attention computed."""
    counts: list[int] = []
    inner = torch.nn.functional.scaled_dot_product_attention

    def noted(query: torch.Tensor, *arrays: Any, **options: Any) -> Any:
        counts.append(query.shape[2])
        return inner(query, *arrays, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    return counts


@pytest.mark.parametrize(
    ("variant", "tokens"),
    [
        ("plain", [16, 17]),
        ("large", [64]),
        ("large_window", []),
        ("softcap", []),
        ("sinks", []),
        ("alibi", []),
        ("relative", []),
        ("reach", []),
        ("chunk", []),
        ("wide_chunk", [16, 17]),
        ("all_keys", []),
        ("decode", []),
        ("unknown_lengths", []),
        ("blocks_of_32", [16, 17]),
        ("own_scale", [16, 17]),
    ],
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_kit_passes(fused: list[int], variant: str, tokens: list[int], dtype: str) -> None:
    plugins = load_plugins()
    device = open_on(plugins, "reference")
    attend = Prompts(OpTable.paged_attention, fewest_tokens=2)
    device.extra_providers = (OpProvider(name="x", ops={**FAMILY, "paged_attention": attend}),)
    result = run_check(all_checks()[f"attention.{variant}.{dtype}"], Subject(device, plugins))
    assert result.outcome == "passed", result.detail
    assert fused == tokens


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 9), st.sampled_from([0, 0, 7, 20])), min_size=1, max_size=6),
    window=st.sampled_from([0, 3, 12]),
    seed=st.integers(0, 99),
)
def test_a_mixed_step_equals_the_definition(requests: list[tuple[int, int]], window: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    counts, lens = [count for count, _ in requests], [count + before for count, before in requests]
    cache = tuple(torch.full((64, BLOCK, 2, 8), float("nan"), dtype=torch.float64) for _ in range(2))
    order = (torch.randperm(63, generator=generator) + 1).int()
    table = torch.full((len(requests), max(1, -(-max(lens) // BLOCK))), -1, dtype=torch.int32)
    taken = 0
    for r, seq_len in enumerate(lens):
        needed = -(-seq_len // BLOCK)
        table[r, :needed] = order[taken : taken + needed]
        taken += needed
        for part in cache:
            for place in range(seq_len):
                block = int(table[r, place // BLOCK])
                part[block, place % BLOCK] = torch.randn(2, 8, generator=generator, dtype=torch.float64)
    query = torch.randn(sum(counts), 4, 8, generator=generator, dtype=torch.float64)
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    batch = (starts, torch.tensor(lens, dtype=torch.int32), table)
    longest: list[int] = []

    def others(query: Any, *arrays: Any, max_query_len: int, max_seq_len: int, **options: Any) -> Any:
        assert max_query_len == max(arrays[1].diff().tolist()) and max_seq_len == int(arrays[2].max())
        longest.append(max_query_len)
        return OpTable.paged_attention(query, *arrays, **options)

    attend = Prompts(others, fewest_tokens=4)
    bounds: dict[str, Any] = {"max_query_len": max(counts), "max_seq_len": max(lens)}
    whole = [r for r, (count, before) in enumerate(requests) if count >= 4 and not before]
    hides = 0 < window < max(counts)
    for _ in range(2):  # the second layer takes the division of the first
        got = attend(query, cache, *batch, scale=0.3, window=window, **bounds)
        want = OpTable.paged_attention(query, cache, *batch, scale=0.3, window=window)
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    rest = [count for r, count in enumerate(counts) if count and (hides or r not in whole)]
    if whole and not hides:
        assert longest == ([max(rest)] * 2 if rest else [])


def test_a_step_is_read_once_for_all_layers(fused: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    inner = torch.Tensor.tolist

    def noted(tensor: torch.Tensor) -> Any:
        reads.append(len(tensor))
        return inner(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", noted)
    attend = Prompts(lambda *args, **kwargs: pytest.fail("there is nothing else"), fewest_tokens=4)
    cache = torch.randn(9, BLOCK, 2, 8), torch.randn(9, BLOCK, 2, 8)
    for _ in range(3):
        starts, lens = torch.tensor([0, 5, 11], dtype=torch.int32), torch.tensor([5, 6], dtype=torch.int32)
        # Groups of layers have tables of their own.
        tables = [torch.tensor(rows, dtype=torch.int32) for rows in ([[1, 2], [3, 4]], [[5, 6], [7, 8]])]
        query = torch.randn(11, 4, 8)
        for table in tables:
            got = attend(query, cache, starts, lens, table, scale=0.3, max_query_len=6, max_seq_len=6)
            want = OpTable.paged_attention(query, cache, *(starts, lens, table), scale=0.3)
            assert nmse(got, want) < 1e-10
    assert reads.count(5) == 3 and fused == [5, 6] * 6


def selected(
    spec: ModelSpec, dtype: str = "bfloat16", kv_dtype: str = "", torch_device: str = "cpu"
) -> tuple[str, str]:
    """(who serves attention, why the library does not)."""
    context = OpContext(spec=spec, dtype=dtype, block_size=16, kv_dtype=kv_dtype)
    _, selections = select_ops([TRITON, prompts_provider(TRITON, torch_device)], context)
    row = next(row for row in selections if row.op == "paged_attention")
    return row.provider, dict(row.declined).get("torch-sdpa", "")


def test_it_is_chosen_where_it_was_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    raced: list[tuple[Any, ...]] = []
    seconds = [1.0, 2.0]

    def race(self: Race, *shape: Any) -> tuple[float, float]:
        raced.append(shape)
        return seconds[0], seconds[1]

    monkeypatch.setattr(Race, "seconds", race)
    spec = tiny_spec()
    attn = spec.layers[0].attn
    assert selected(spec) == ("torch-sdpa", "")
    assert raced == [(attn.num_heads, attn.num_kv_heads, attn.head_dim, 16, "bfloat16")]
    seconds[0] = 1.99
    assert selected(spec) == ("triton", "not faster here: 1990000 us a prompt of 2048 tokens, Triton's 2000000")
    seconds[0] = 1.0
    assert selected(spec, dtype="float32")[1] == "its kernels are for float16 and bfloat16, not float32"
    assert selected(tiny_spec(softcap=3.0))[1] == "flash attention has no softcap"

    def changed(**fields: Any) -> ModelSpec:
        return replace(spec, layers=tuple(replace(one, attn=replace(one.attn, **fields)) for one in spec.layers))

    assert selected(changed(window=24))[1].startswith("all windows are shorter than the 512 tokens")
    assert selected(tiny_spec(window=24)) == ("torch-sdpa", "")
    assert selected(changed(head_dim=576))[1] == "flash attention takes heads of up to 256 values, not 576"
    assert selected(spec, kv_dtype="int8")[0] != "torch-sdpa"


def test_the_race_times_both_and_refuses_to_compute_all_scores(
    fused: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "RACE_TOKENS", 64)
    theirs, ours = Race(OpTable.paged_attention, OpTable.new_kv_cache, "cpu").seconds(4, 2, 16, 16, "bfloat16")
    assert 0 < theirs < 5 and 0 < ours < 5 and fused == [64] * (1 + prompts.ROUNDS)
    # No kernel takes keys of another dtype: what torch says of it becomes the reason.
    monkeypatch.setattr(fused_prompts, "_gather", lambda *args: (torch.ones(64, 2, 16), torch.ones(64, 2, 16)))
    assert "fused kernel" in selected(tiny_spec())[1]


ON_TRITON = """
import torch

torch.set_num_threads(1)
from headrace.core.plugin_loader import load_plugins
from headrace.core.platform import OpProvider
from headrace.platforms.conformance.kit import all_checks, run_check
from headrace.platforms.conformance.registry import Subject
from headrace.kernels.torch.prompts import Prompts
from wrong_device import open_on

plugins = load_plugins()
device = open_on(plugins, "PLATFORM:emulated")
triton = device.providers()[0]
calls = []
inner = torch.nn.functional.scaled_dot_product_attention
def noted(query, *arrays, **options):
    calls.append(query.shape[2])
    return inner(query, *arrays, **options)
torch.nn.functional.scaled_dot_product_attention = noted
names = ("new_kv_cache", "write_kv")
attend = Prompts(triton.ops["paged_attention"], fewest_tokens=3)
ops = {**{name: triton.ops[name] for name in names}, "paged_attention": attend}
device.extra_providers = (OpProvider(name="x", priority=99, ops=ops),)
subject = Subject(device, plugins)
from headrace.kernels.triton.ops import LAUNCHES
for name in ("attention.plain.bfloat16", "model.greedy.plain", "model.batch"):
    LAUNCHES.clear()
    calls.clear()
    result = run_check(all_checks()[name], subject)
    assert result.outcome == "passed", result
    assert LAUNCHES["paged_attention"] and calls, (name, LAUNCHES, calls)
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: pip install 'headrace[cuda]'")
@pytest.mark.parametrize("platform", ["cuda", "rocm", "xpu"])
def test_beside_tritons_kernels_over_one_cache(platform: str) -> None:
    program = ON_TRITON.replace("PLATFORM", platform)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=600, env=environment
    )
    assert run.returncode == 0, run.stderr
