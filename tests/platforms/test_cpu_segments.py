"""Native programs with ops that run in torch: the same numbers, said in the log, refused where torch is missing."""

import gc
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import LLM, SamplingParams
from headrace.core.errors import ConfigError, Unsupported, WeightError
from headrace.core.weights.safetensors import SafetensorsSource
from headrace.platforms.cpu.native.tracer import Tracer
from tiny_checkpoints import save_golden_case, save_tiny

_ops = pytest.importorskip("headrace.kernels.cpu._ops", reason="the native kernels were not built")
OPTIONS: dict[str, Any] = dict(dtype="float32", skip_tokenizer_init=True, kv_memory="8MiB", block_size=4)
PROMPTS = [list(range(3, 40)), [7], list(range(90, 60, -1))]


def _logprobs(folder: Path, device: str, **options: Any) -> np.ndarray[Any, Any]:
    params = SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=0, logprobs=0)
    with LLM(str(folder), device=device, **{**OPTIONS, **options}) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
    steps = [
        step for output in outputs for step in (*(output.prompt_logprobs or ()), *(output.outputs[0].logprobs or ()))
    ]
    return np.array([next(iter(step.values())).logprob for step in steps if step])


@pytest.mark.parametrize(
    ("name", "op"),
    [("mixtral", "grouped_experts"), ("deepseek_v2", "absorb_keys"), ("apertus", "xielu")],
)
def test_a_program_with_segments_computes_what_the_definitions_do(
    tmp_path: Path, name: str, op: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Tracer, op)
    save_golden_case(tmp_path / "model", name)
    expected = _logprobs(tmp_path / "model", "reference")
    ours = _logprobs(tmp_path / "model", "cpu", max_num_batched_tokens=11)
    assert np.abs(ours - expected).max() < 2e-4
    assert f"{op}:" in caplog.text and "no native program" not in caplog.text


def test_without_torch_the_error_names_the_op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Tracer, "route_experts")
    save_golden_case(tmp_path / "model", "mixtral")
    for module in ("native.tracer", "device"):
        monkeypatch.setattr(f"headrace.platforms.cpu.{module}.find_spec", lambda name: None)
    with pytest.raises(Unsupported, match="op route_experts has no native form, and torch") as info:
        LLM(str(tmp_path / "model"), device="cpu", **OPTIONS)
    assert info.value.remedies == ("pip install 'headrace[torch]'",)


@pytest.mark.parametrize("wishes", ["-native", "torch-sdpa", "torch-sdpa, -native"])
def test_torch_where_op_providers_ask_for_it(tmp_path: Path, wishes: str, caplog: pytest.LogCaptureFixture) -> None:
    save_tiny(tmp_path / "model", "llama")
    expected = _logprobs(tmp_path / "model", "reference")
    assert np.abs(_logprobs(tmp_path / "model", "cpu", op_providers=wishes) - expected).max() < 2e-4
    assert f"op_providers={wishes.replace(', -native', '')}" in caplog.text
    caplog.clear()
    _logprobs(tmp_path / "model", "cpu", op_providers="native, -torch-sdpa")
    assert "no native program" not in caplog.text


@pytest.mark.parametrize("device", ["cpu", "null", "reference"])
@pytest.mark.parametrize(
    ("wishes", "message"), [("nativ", "names 'nativ', which is not"), ("torch-sdpa,-torch-sdpa", "torch-sdpa")]
)
def test_op_providers_that_are_none(tmp_path: Path, device: str, wishes: str, message: str) -> None:
    save_tiny(tmp_path / "model", "llama")
    with pytest.raises(ConfigError, match=message):
        LLM(str(tmp_path / "model"), device=device, op_providers=wishes, **OPTIONS)


def test_a_failing_call_ends_the_step_and_leaves_the_program_usable() -> None:
    program = _ops.Program(4096, 4, 1)
    calls: list[int] = []

    def call() -> None:
        calls.append(len(calls))
        if len(calls) == 1:
            raise KeyError("first")

    program.call(call)
    ids = np.zeros(1, np.int32)
    one = np.array([0, 1], np.int32)
    with pytest.raises(KeyError, match="first"):
        program.run(ids, ids, one, ids + 1, [], [], ids)
    program.run(ids, ids, one, ids + 1, [], [], ids)
    assert calls == [0, 1]


def test_a_closed_model_leaves_no_memory_behind(tmp_path: Path) -> None:
    save_golden_case(tmp_path / "model", "mixtral")
    gc.collect()
    before = _ops.allocated_bytes()
    _logprobs(tmp_path / "model", "cpu")
    gc.collect()
    assert _ops.allocated_bytes() <= before


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_bad_weight_is_named(tmp_path: Path, bad: float, name: str, dtype: str) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    save_tiny(tmp_path / "model", "llama")
    file = tmp_path / "model" / "model.safetensors"
    state = {key: value.to(getattr(torch, dtype)) for key, value in load_file(file).items()}
    state[name].view(-1)[5] = bad
    save_file(state, file)
    stored = "final_norm.weight" if name == "model.norm.weight" else name
    with pytest.raises(WeightError, match=rf"tensor {stored} holds a NaN or an infinity"):
        LLM(str(tmp_path / "model"), device="cpu", **OPTIONS)
    assert name in SafetensorsSource(file).names()


def test_denormals_count_as_zero_on_every_tier() -> None:
    before = _ops.isa()
    x = np.full((2, 64), 1e-39, np.float32)
    weight = _ops.PackedWeight("float32", 16, 64)
    weight.write_dense(0, np.full((16, 64), 0.5, np.float32))
    try:
        for tier in _ops.supported_tiers():
            _ops.set_isa(tier)
            for threads in (1, 3):
                _ops.set_num_threads(threads)
                out = np.ones((2, 16), np.float32)
                _ops.linear(out, x, weight)
                assert not out.any()
    finally:
        _ops.set_isa(before)
        _ops.set_num_threads(1)
    assert x[0, 0] * np.float32(1.0) > 0  # the caller's own arithmetic keeps them
