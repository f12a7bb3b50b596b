"""The extension's attention is offered only where it works and wins. Its kernels, for torch 2.8, are stood in for."""

import functools
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.core.models.spec import ModelSpec
from headrace.core.ops import OpTable, select_ops
from headrace.core.ops.table import DEFINITION
from headrace.core.platform import DeviceInfo, OpContext, OpProvider
from headrace.core.self_test import tiny_spec
from headrace.plugins.op_providers import ipex

INFO = DeviceInfo(id="cpu", name="", kind="cpu", total_bytes=1, free_bytes=1)
CONTEXT = OpContext(spec=tiny_spec(), dtype="float32", block_size=16)


class Kernels:
    """The extension's calls, answered by the definitions over the same layout."""

    def reshape_and_cache(self, key: Any, value: Any, keys: Any, values: Any, slots: Any) -> None:
        size = keys.shape[2]
        keys[slots.long() // size, :, slots.long() % size] = key
        values[slots.long() // size, :, slots.long() % size] = value

    def flash_attn_varlen_func(
        self, out: Any, query: Any, keys: Any, values: Any, starts: Any, ends: Any, *rest: Any
    ) -> None:
        scale, is_causal, table, alibi = rest[2:]
        assert is_causal and alibi is None and (table >= 0).all()
        cache = keys.transpose(1, 2), values.transpose(1, 2)
        out.copy_(OpTable.paged_attention(query, cache, starts, ends.diff(), table, scale=scale))


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The pair that works together, and kernels that win."""
    monkeypatch.setattr(ipex, "version", lambda name: "2.8.0")
    monkeypatch.setattr(torch, "__version__", "2.8.0")
    monkeypatch.setattr(ipex, "_kernels", lambda: Kernels())
    monkeypatch.setattr(ipex, "_race", lambda *shape: (1e-6, 2e-6))
    ipex._cannot_be_used.cache_clear()
    yield
    ipex._cannot_be_used.cache_clear()


def provider() -> OpProvider:
    (found,) = ipex.headrace_op_providers("cpu", INFO)
    return found


def reasons(spec: ModelSpec = CONTEXT.spec, dtype: str = "float32") -> str:
    """Why it is not taken for attention; "" if it is."""
    _, selections = select_ops([provider()], replace(CONTEXT, spec=spec, dtype=dtype))
    [selection] = [selection for selection in selections if selection.op == "paged_attention"]
    if selection.provider == "ipex":
        return ""
    assert selection.provider == DEFINITION
    return selection.declined[0][1]


def test_it_is_taken_where_it_works_and_wins() -> None:
    assert reasons() == ""


def test_it_is_not_offered_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert ipex.headrace_op_providers("cpu", INFO) == ()
    assert ipex.headrace_op_providers("cuda", INFO) == ()


def test_another_torch_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    assert reasons() == "intel-extension-for-pytorch 2.8.0 works with torch 2.8.*, not 2.13.0+cpu"


def test_a_broken_installation_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("libintel-ext-pt-cpu.so: undefined symbol")

    monkeypatch.setattr(ipex, "_kernels", fail)
    assert reasons() == "it does not load: libintel-ext-pt-cpu.so: undefined symbol"


def test_losing_the_race_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipex, "_race", lambda *shape: (9e-6, 2e-6))
    assert reasons() == "slower here: 9 us a decode of 8 requests, ours 2"


def test_what_its_kernels_are_not_used_for_is_a_reason() -> None:
    assert reasons(tiny_spec(window=24)) == "not used for attention with sliding window"
    assert reasons(tiny_spec(softcap=2.0)) == "not used for attention with softcap"
    assert "not float16" in reasons(dtype="float16")


def test_its_cache_and_calls_compute_what_the_definition_says() -> None:
    torch.manual_seed(0)
    ops, shape = provider().ops, dict(num_blocks=9, block_size=16, num_kv_heads=2, head_dim=8)
    lens, counts = torch.tensor([20, 33], dtype=torch.int32), [1, 5]
    starts = torch.tensor([0, 1, 6], dtype=torch.int32)
    table = torch.tensor([[3, 7, -1], [1, 8, 5]], dtype=torch.int32)
    slots = [
        row.clamp(min=0).repeat_interleave(16)[:n] * 16 + torch.arange(n) % 16
        for row, n in zip(table, lens.tolist(), strict=True)
    ]
    slot_mapping = torch.cat([*slots, torch.tensor([-1])]).int()
    key, value, query = torch.randn(54, 2, 8), torch.randn(54, 2, 8), torch.randn(sum(counts), 4, 8)
    found = []
    for get in (ops.__getitem__, functools.partial(getattr, OpTable)):
        cache = get("write_kv")(get("new_kv_cache")(**shape, dtype="float32", device="cpu"), key, value, slot_mapping)
        found.append(get("paged_attention")(query, cache, starts, lens, table, scale=0.3))
    torch.testing.assert_close(*found)


def test_the_race_is_run_over_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(ipex, "_kernels", lambda: Kernels())
    theirs, ours = ipex._race(4, 2, 16, 16, "float32")
    assert theirs > 0 and ours > 0


def test_the_extra_pins_its_torch() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert "torch==2.8.*" in project["optional-dependencies"]["ipex"]
    assert project["entry-points"]["headrace.plugins"]["ipex"] == "headrace.plugins.op_providers.ipex"
