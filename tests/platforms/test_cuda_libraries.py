"""Libraries of NVIDIA GPUs as op providers, without a GPU: cuBLASLt's products on torch's own processor forms, and
flashinfer behind a stand-in with its signature."""

import dataclasses
import sys
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from headrace.core.errors import ConfigError, Unsupported
from headrace.core.ops import OpTable, select_ops
from headrace.core.platform import DeviceInfo, OpContext, OpProvider
from headrace.core.plugin_loader import load_plugins
from headrace.core.self_test import nmse, tiny_spec
from headrace.kernels.torch.flashinfer import FlashInfer
from headrace.platforms.conformance.kit import all_checks, run_check
from headrace.platforms.conformance.registry import Subject
from headrace.platforms.cuda.libraries import Trial
from headrace.plugins.op_providers import sdpa
from wrong_device import open_on


class Wrapper:
    """BatchPrefillWithPagedKVCacheWrapper as flashinfer 0.6 declares it, in dense float32."""

    plans = 0
    runs = 0

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "NHD"

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        assert {t.dtype for t in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)} == {
            torch.int32
        }
        assert len(paged_kv_indices) == paged_kv_indptr[-1] and q_data_type == kv_data_type
        assert ((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all()
        self.starts, self.indptr, self.pages = qo_indptr.tolist(), paged_kv_indptr.tolist(), paged_kv_indices.long()
        self.last, self.size, self.heads = paged_kv_last_page_len.tolist(), page_size, (num_qo_heads, num_kv_heads)
        self.causal, self.scale, self.window, self.cap = causal, sm_scale, window_left, logits_soft_cap
        Wrapper.plans += 1

    def run(self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        assert self.scale is not None and q.is_contiguous()
        out = torch.empty_like(q)
        group = self.heads[0] // self.heads[1]
        for r, (begin, end) in enumerate(zip(self.starts, self.starts[1:], strict=False)):
            pages = self.pages[self.indptr[r] : self.indptr[r + 1]]
            num_keys = (len(pages) - 1) * self.size + self.last[r]
            k, v = (
                part[pages].flatten(0, 1)[:num_keys].float().repeat_interleave(group, 1) for part in paged_kv_cache
            )
            scores = torch.einsum("qhd,khd->hqk", q[begin:end].float(), k) * self.scale
            if self.cap:
                scores = self.cap * torch.tanh(scores / self.cap)
            places = torch.arange(num_keys - (end - begin), num_keys)[:, None]
            keys = torch.arange(num_keys)[None, :]
            hidden = (keys > places) & self.causal
            if self.window >= 0:
                hidden = hidden | (places - keys > self.window)
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            # What a weight of 0 meets is not read.
            out[begin:end] = torch.einsum("hqk,khd->qhd", weights, v.nan_to_num(0.0)).to(q.dtype)
        Wrapper.runs += 1
        return out


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flashinfer")
    vars(module)["BatchPrefillWithPagedKVCacheWrapper"] = Wrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(Wrapper, "plans", 0)
    monkeypatch.setattr(Wrapper, "runs", 0)


def provider() -> OpProvider:
    ops: dict[str, Any] = {"new_kv_cache": OpTable.new_kv_cache, "write_kv": OpTable.write_kv}
    return OpProvider(name="flashinfer", ops={**ops, "paged_attention": FlashInfer(OpTable.paged_attention)})


@pytest.mark.parametrize(
    ("variant", "runs"),
    [
        ("plain", 1),
        ("large", 1),
        ("window", 1),
        ("large_window", 1),
        ("softcap", 1),
        ("window_softcap", 1),
        ("all_keys", 1),
        ("unknown_lengths", 1),
        ("blocks_of_32", 1),
        ("decode", 0),
        ("sinks", 0),
        ("alibi", 0),
        ("relative", 0),
        ("reach", 0),
        ("chunk", 0),
        ("wide_chunk", 1),
    ],
)
def test_flashinfer_passes_the_kit(library: None, variant: str, runs: int) -> None:
    plugins = load_plugins()
    device = open_on(plugins, "reference")
    device.extra_providers = (provider(),)
    result = run_check(all_checks()[f"attention.{variant}.float16"], Subject(device, plugins))
    assert result.outcome == "passed", result.detail
    assert Wrapper.runs == runs


def test_a_step_is_planned_once_for_all_layers_of_a_kind(library: None) -> None:
    attend = FlashInfer(OpTable.paged_attention)
    cache = torch.randn(4, 8, 2, 64).half(), torch.randn(4, 8, 2, 64).half()
    query = torch.randn(5, 4, 64).half()

    def step() -> None:
        starts, lens = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([9, 3], dtype=torch.int32)
        table = torch.tensor([[1, 2], [3, -1]], dtype=torch.int32)
        for window in (0, 4, 0, 4):
            batch = (starts, lens, table)
            got = attend(query, cache, *batch, scale=0.1, window=window, max_query_len=3, max_seq_len=9)
            want = OpTable.paged_attention(
                query.double(), tuple(p.double() for p in cache), *batch, scale=0.1, window=window
            )
            assert nmse(got.float(), want) < 5e-6

    step()
    assert (Wrapper.plans, Wrapper.runs) == (2, 4)
    step()
    assert (Wrapper.plans, Wrapper.runs) == (4, 8)


CONTEXT = OpContext(spec=tiny_spec(), dtype="float16", block_size=16)


def wide_context(**changes: Any) -> OpContext:
    """A model whose heads flashinfer takes."""
    spec = tiny_spec(window=24)
    layers = tuple(
        dataclasses.replace(layer, attn=dataclasses.replace(layer.attn, head_dim=64, **changes))
        for layer in spec.layers
    )
    return OpContext(spec=dataclasses.replace(spec, layers=layers), dtype="float16", block_size=16)


def test_flashinfer_is_tried_when_a_model_is_opened(library: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler, or on a GPU that it does not know, it says so at its first plan."""
    trial = Trial(FlashInfer(OpTable.paged_attention), OpTable.new_kv_cache, device="cpu")
    assert "heads of 64, 128, 256 values, not 16" in trial.declines("write_kv", CONTEXT) and not Wrapper.plans
    for op in ("write_kv", "paged_attention"):
        assert trial.declines(op, wide_context()) == ""
    assert (Wrapper.plans, Wrapper.runs) == (2, 2), "once for layers with a window, once for those without"
    plan = Wrapper.plan

    def without_compiler(*args: Any, **options: Any) -> None:
        raise RuntimeError("Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist")

    monkeypatch.setattr(Wrapper, "plan", without_compiler)
    assert "does not work here: RuntimeError: Could not find nvcc" in trial.declines("", wide_context(softcap=9.0))
    monkeypatch.setattr(Wrapper, "plan", lambda *args, **options: plan(*args, **{**options, "sm_scale": 0.2}))
    assert "it differs from Triton's kernel here" in trial.declines("", wide_context(softcap=5.0))


def served(wishes: str, *providers: OpProvider) -> str:
    """Who serves attention."""
    _, selections = select_ops(providers, CONTEXT, wishes=wishes)
    return next(row.provider for row in selections if row.op == "paged_attention")


def test_providers_are_insisted_on_and_left_out() -> None:
    ops = provider().ops
    high, low = OpProvider(name="high", priority=60, ops=ops), OpProvider(name="low", priority=50, ops=ops)
    assert served("", low, high) == "high"
    assert served("low", low, high) == "low"
    assert served("-high", low, high) == "low"
    assert served(" -high, -low ", low, high) == "definition"
    with pytest.raises(ConfigError, match="'hihg', which is not offered for this device; did you mean high"):
        served("hihg", low, high)
    shy = OpProvider(name="shy", ops=ops, declines=lambda op, context: "not today")
    assert served("", low, shy) == "low"
    with pytest.raises(Unsupported, match=r"shy cannot serve new_kv_cache, write_kv, paged_attention: not today"):
        served("shy", low, shy)


@pytest.mark.parametrize("platform", ["cuda", "rocm", "xpu"])
def test_encoders_on_gpus_take_the_fused_attention(platform: str) -> None:
    info = DeviceInfo(id=platform, name="", kind="gpu", total_bytes=1, free_bytes=1)
    [found] = sdpa.headrace_op_providers(platform, info)
    assert set(found.ops) == {"encoder_attention"}
    plugins = load_plugins()
    device = open_on(plugins, "reference")
    device.extra_providers = (found,)
    subject = Subject(device, plugins)
    assert subject.ops("float32").encoder_attention is sdpa.encoder_attention
    result = run_check(all_checks()["ops.encoder_attention.float32"], subject)
    assert result.outcome == "passed", result.detail


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: pip install 'headrace[cuda]'")
@pytest.mark.parametrize("scheme", ["int8-channel", "fp8"])
def test_products_in_8_bits_by_cublaslt(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.core.weights.dequantize import to_float32
    from headrace.core.weights.quantize import CODES, FP8, INT8, quantize_rows
    from headrace.core.weights.source import HostTensor
    from headrace.kernels.triton.ops import TritonOps
    from headrace.kernels.triton.tuning import TUNINGS
    from headrace.platforms.cuda.cublaslt import CublasLt
    from headrace.platforms.gpu.packing import pack_linear

    kernels, wanted = TritonOps(TUNINGS["sm_90"], wide_dot=True), FP8 if scheme == "fp8" else INT8
    others: list[int] = []
    linear = CublasLt(kernels, lambda x, weight, bias=None: others.append(len(x)), has_float8=True)
    called: list[str] = []

    def noted(name: str, right: Any, *args: Any, **kwargs: Any) -> Any:
        called.append(name)
        return right(*args, **kwargs)

    for name in ("_int_mm", "_scaled_mm"):
        monkeypatch.setattr(torch, name, partial(noted, name, getattr(torch, name)))
    values = torch.randn(48, 64, generator=torch.Generator().manual_seed(0)).numpy().astype(np.float32)
    codes, scales, _ = quantize_rows(values, wanted)
    tensor = HostTensor(name="w", dtype=CODES[wanted.name], shape=codes.shape, data=codes, scales=scales)
    weight = pack_linear([tensor], dtype="bfloat16", device="cpu", float8="e4m3fn")
    exact = torch.from_numpy(to_float32(tensor)).double()
    bias = torch.randn(48)
    for num_tokens in (1, 16, 17, 50):
        x = torch.randn(num_tokens, 64).bfloat16()
        for given in (None, bias):
            got = linear(x, weight, given)
            if num_tokens <= 16:
                assert got is None and others.pop() == num_tokens
                continue
            want = x.double() @ exact.T + (0 if given is None else given.double())
            assert got.dtype == torch.bfloat16
            assert nmse(got.float(), want) < (2e-3 if scheme == "fp8" else 5e-4)
    assert called == ["_scaled_mm" if scheme == "fp8" else "_int_mm"] * 4
    linear(torch.randn(50, 64), weight)
    assert others == ([50] if scheme == "fp8" else []), "float8 gives bfloat16 alone"
