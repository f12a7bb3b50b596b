"""The fused attention of torch as an op provider: equal to the definition, chosen where it can serve."""

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from headrace.core.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec
from headrace.core.ops import OpTable, select_ops
from headrace.core.platform import DeviceInfo, OpContext, OpProvider
from headrace.plugins.op_providers.sdpa import headrace_op_providers, paged_attention

BLOCK = 4
INFO = DeviceInfo(id="cpu", name="", kind="cpu", total_bytes=1, free_bytes=1)


def spec(softcap: float = 0.0) -> ModelSpec:
    """A model of one layer."""
    attn = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, scale=0.3, softcap=softcap)
    layer = LayerSpec(attn=attn, mlp=MlpSpec(intermediate_size=8))
    return ModelSpec(
        model_type="x", vocab_size=8, hidden_size=8, max_position_embeddings=64, layers=(layer,), norm=NormSpec()
    )


def provider() -> OpProvider:
    """What the hook gives for the cpu platform."""
    (found,) = headrace_op_providers("cpu", INFO)
    return found


@settings(max_examples=60)
@given(
    requests=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30)), min_size=1, max_size=6),
    hidden=st.sampled_from([{}, *({kind: size} for kind in ("window", "chunk") for size in (1, 3, 8))]),
    alibi=st.booleans(),
    seed=st.integers(0, 99),
)
def test_equals_the_definition(
    requests: list[tuple[int, int]], hidden: dict[str, Any], alibi: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    counts = [count for count, _ in requests]
    lens = [count + before for count, before in requests]
    cache = tuple(torch.randn(64, BLOCK, 2, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    order = torch.randperm(63, generator=generator) + 1
    width = max(-(-max(lens) // BLOCK), 1)
    table = torch.full((len(requests), width), -1, dtype=torch.int32)
    taken = 0
    for r, seq_len in enumerate(lens):
        needed = -(-seq_len // BLOCK)
        table[r, :needed] = order[torch.arange(taken, taken + needed) % 63].int()
        taken += needed
    unused = torch.ones(64, dtype=torch.bool)
    unused[table[table >= 0].long()] = False
    for side in cache:
        side[unused] = float("nan")
    query = torch.randn(sum(counts), 4, 8, generator=generator, dtype=torch.float64)
    arguments = (
        query,
        cache,
        torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32),
        torch.tensor(lens, dtype=torch.int32),
        table,
    )
    slopes = torch.rand(4, generator=generator) if alibi else None
    expected = OpTable().paged_attention(*arguments, scale=0.3, alibi_slopes=slopes, **hidden)
    got = paged_attention(*arguments, scale=0.3, alibi_slopes=slopes, **hidden)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def test_hook_headrace_op_providers() -> None:
    assert headrace_op_providers("reference", INFO) == ()
    context = OpContext(spec=spec(), dtype="float32", block_size=BLOCK)
    table, report = select_ops([provider()], context)
    assert table.paged_attention is paged_attention
    assert {row.provider for row in report if row.op == "write_kv"} == {"torch-sdpa"}


def test_softcap_is_declined() -> None:
    table, report = select_ops([provider()], OpContext(spec=spec(30.0), dtype="float32", block_size=BLOCK))
    row = next(row for row in report if row.op == "paged_attention")
    assert row.provider == "definition" and row.declined == (("torch-sdpa", "the fused kernel has no softcap"),)
    assert table.paged_attention is OpTable.paged_attention


def test_a_family_is_taken_whole_or_not_at_all() -> None:
    half = replace(provider(), ops={"paged_attention": paged_attention})
    _, report = select_ops([half], OpContext(spec=spec(), dtype="float32", block_size=BLOCK))
    row = next(row for row in report if row.op == "paged_attention")
    assert row.provider == "definition" and "new_kv_cache, write_kv" in row.declined[0][1]


@pytest.mark.parametrize("name", ["cpu"])
def test_only_known_platforms(name: str) -> None:
    assert headrace_op_providers(name, INFO)
