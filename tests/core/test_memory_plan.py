"""The memory table against parameter counts of transformers and sums done by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace.core.config import EngineConfig
from headrace.core.errors import ConfigError, ModelNotFound, Unsupported
from headrace.core.memory_plan import MemoryPlan, Target, plan_model
from headrace.core.platform import Caps, Memory
from published_recurrent import PUBLISHED_RECURRENT
from tiny_checkpoints import FAMILIES, tiny_config

MIB = 1 << 20


def _plan(folder: Path, *, memory: int = 64 * MIB, caps: Caps | None = None, **options: object) -> MemoryPlan:
    target = Target(name="a box", memory=Memory(total_bytes=2 * memory, free_bytes=memory))
    if caps is not None:
        target = Target(name="a box", memory=target.memory, caps=caps)
    return plan_model(EngineConfig.from_options({"model": str(folder), **options}), target, lambda line: None)


def _save_config(folder: Path, model_type: str, **overrides: object) -> int:
    """Write a config.json, and return the number of parameters that transformers makes of it."""
    config = tiny_config(model_type, **overrides)
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("tie", [False, True])
def test_parameters_are_counted_as_transformers_does(tmp_path: Path, model_type: str, tie: bool) -> None:
    count = _save_config(tmp_path, model_type, tie_word_embeddings=tie)
    plan = _plan(tmp_path, dtype="float32")
    assert plan.num_params == count
    assert (plan.model_type, plan.num_layers) == (model_type, 4)
    # All is float32; rope constants come on top and are smaller than a thousandth of a model, even of this one.
    assert 4 * count <= plan.weights_bytes <= 4 * count + 1000
    # Of an untied model one decode step reads all but the token embedding, of which it reads a row.
    positions = 256 * 64 if model_type == "gpt2" else 0
    looked_up = 0 if tie else 256 * 64
    assert plan.read_bytes == plan.weights_bytes - 4 * (looked_up + positions)


def test_kv_cache_of_a_llama(tmp_path: Path) -> None:
    _save_config(tmp_path, "llama")
    plan = _plan(tmp_path, dtype="bfloat16", kv_memory="16MiB")
    # 4 layers, keys and values, 2 heads of 16, 2 bytes
    token = 4 * 2 * 2 * 16 * 2
    [group] = plan.groups
    assert (group.kind, group.window, group.num_layers) == ("full", 0, 4)
    assert (group.token_bytes, group.block_bytes, plan.block_size) == (token, 16 * token, 16)
    assert (plan.max_model_len, plan.request_bytes) == (256, 256 * token)
    assert plan.fits
    assert plan.kv_bytes <= 16 * MIB
    # Never more than 64 requests of full length and the null block, which is less than 16 MiB here.
    assert group.num_blocks == 64 * 16 + 1
    assert plan.concurrency == 64


def test_states_are_counted_beside_keys_and_values(tmp_path: Path) -> None:
    config = {**PUBLISHED_RECURRENT["granite_4_h_tiny"], "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = _plan(tmp_path, memory=64 * 1024 * MIB, dtype="bfloat16", kv_memory="4GiB")
    full, state = plan.groups
    assert (full.kind, full.num_layers, state.kind, state.num_layers) == ("full", 4, "state", 36)
    # 48 heads of 64 values by 128 in float32, and 3 inputs of the convolution's 48 * 64 + 2 * 128 channels
    assert state.block_bytes == 36 * (48 * 64 * 128 * 4 + 3 * (48 * 64 + 2 * 128) * 2)
    assert full.block_bytes == 16 * 4 * 2 * 4 * 128 * 2
    assert plan.request_bytes == 4 * state.block_bytes + 256 * full.block_bytes
    assert state.num_blocks == 1 + int(4 * plan.concurrency)


def test_sliding_layers_are_a_group_of_their_own(tmp_path: Path) -> None:
    _save_config(tmp_path, "gemma2", sliding_window=32)
    plan = _plan(tmp_path, max_model_len=200)
    assert [(group.kind, group.window, group.num_layers) for group in plan.groups] == [
        ("full", 0, 2),
        ("sliding", 32, 2),
    ]
    assert plan.max_model_len == 200


def test_a_step_is_what_the_device_fills_unless_it_is_said(tmp_path: Path) -> None:
    """A sliding group keeps the tokens of one step beside its window."""
    _save_config(tmp_path, "gemma2", sliding_window=32)

    def need(step_tokens: int = 2048, **options: Any) -> int:
        caps = Caps(dtypes=("float32",), step_tokens=step_tokens)
        return _plan(tmp_path, max_model_len=200, caps=caps, **options).request_bytes

    assert need() == need(max_num_batched_tokens=200)
    assert need(16, max_num_seqs=4) == need(max_num_seqs=4, max_num_batched_tokens=16) < need()
    assert need(16, max_num_seqs=64) == need(max_num_batched_tokens=64)
    assert need(16, max_num_batched_tokens=128) == need(max_num_batched_tokens=128)


def test_dtype_follows_the_checkpoint_unless_the_device_has_it_not(tmp_path: Path) -> None:
    _save_config(tmp_path, "llama", dtype="bfloat16")
    assert _plan(tmp_path).dtype == "bfloat16"
    plan = _plan(tmp_path, caps=Caps(dtypes=("float32",)))
    assert plan.dtype == "float32"
    assert "bfloat16" in plan.dtype_reason
    with pytest.raises(Unsupported, match="no float16"):
        _plan(tmp_path, caps=Caps(dtypes=("float32",)), dtype="float16")


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    count = _save_config(tmp_path, "llama")
    plan = _plan(tmp_path, memory=4 * count - 1, dtype="float32")
    assert not plan.fits
    assert "does not fit on a box: weights" in plan.problem
    assert (plan.kv_bytes, plan.concurrency) == (0, 0)


def test_a_length_that_memory_cannot_hold(tmp_path: Path) -> None:
    _save_config(tmp_path, "llama", max_position_embeddings=1 << 20)
    assert _plan(tmp_path, memory=2 * MIB).max_model_len < 1 << 20
    plan = _plan(tmp_path, memory=2 * MIB, max_model_len=1 << 20)
    assert not plan.fits
    assert "does not fit with requests of 1048576 tokens" in plan.problem
    assert any(remedy.startswith("--max-model-len ") for remedy in plan.remedies)
    with pytest.raises(ConfigError, match="more than the 1048576 positions"):
        _plan(tmp_path, max_model_len=(1 << 20) + 1)


def test_speed_is_bandwidth_over_bytes(tmp_path: Path) -> None:
    _save_config(tmp_path, "llama")
    plan = _plan(tmp_path)
    assert plan.max_decode_tokens_per_s(100.0 * plan.read_bytes) == 100.0


@pytest.mark.parametrize("tie", [False, True])
def test_quantized_weights_are_planned(tmp_path: Path, tie: bool) -> None:
    _save_config(tmp_path, "llama", tie_word_embeddings=tie)
    plan = _plan(tmp_path, dtype="bfloat16", quantize="int4")
    # hidden 64, inner 96, qkv 64 + 2 * 32 rows: 4 bits and two float16 a group, 8 bits and one; 9 norms and 8 angles
    layers = 4 * ((64 * 64 + 2 * 96 * 64 + 64 * 96) * (4 + 1) // 8 + 128 * 64 * 34 // 32)
    tables = (1 if tie else 2) * 256 * 64 * 34 // 32
    assert plan.weights_bytes == layers + tables + 4 * (9 * 64 + 8 + 1)
    assert plan.read_bytes == plan.weights_bytes - (0 if tie else tables // 2)
    assert plan.quantize == "int4"
    whole = _plan(tmp_path, dtype="bfloat16")
    unable = _plan(tmp_path, dtype="bfloat16", quantize="int4", caps=Caps(dtypes=("bfloat16",)))
    assert unable.weights_bytes == whole.weights_bytes > 2 * plan.weights_bytes


def test_errors_of_the_model_come_through(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"has no config\.json"):
        _plan(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "lama"}))
    with pytest.raises(Exception, match="did you mean llama"):
        _plan(tmp_path)
