"""A linear whose weight is a stack of several block types is one linear a part; logits stay what they were."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from headrace.core.kv.groups import kv_groups
from headrace.core.models.config import read_config
from headrace.core.models.declare import declare_params
from headrace.core.models.registry import read_spec
from headrace.core.models.spec import ModelSpec
from headrace.kernels.cpu import _ops
from headrace.platforms.cpu.native.parts import is_separable, part_name, separate
from headrace.platforms.cpu.native.program import NativeProgram
from headrace.platforms.cpu.native.trace import trace_step
from headrace.platforms.cpu.native.values import CacheRef, Trace
from tiny_checkpoints import tiny_config


def qwen2(folder: Path) -> ModelSpec:
    """Its q, k and v have biases."""
    tiny_config("qwen2").save_pretrained(folder)
    return read_spec(read_config(folder))


def logits_of(spec: ModelSpec, trace: Trace, weights: dict[str, Any], vectors: dict[str, Any]) -> Any:
    heads = [(layer.attn.num_kv_heads, layer.attn.head_dim) for layer in spec.layers]
    caches = {
        CacheRef(layer=layer): _ops.KVCache(4, 16, num_kv_heads, head_dim, "float32")
        for layer, (num_kv_heads, head_dim) in enumerate(heads)
    }
    program = NativeProgram(trace, weights, vectors, caches, max_tokens=8, max_logits=1, quantize_x=frozenset())
    count = 6
    tokens = np.arange(count, dtype=np.int32)
    program.run(
        tokens + np.int32(3),
        tokens,
        np.array([0, count], np.int32),
        np.array([count], np.int32),
        [np.array([[1]], np.int32)],
        [tokens + np.int32(16)],
        np.array([count - 1], np.int32),
    )
    return program.logits(1).copy()


def test_parts_give_the_bits_of_the_whole(tmp_path: Path) -> None:
    spec = qwen2(tmp_path)
    trace = trace_step(spec, "float32", kv_groups(spec, 1))
    random = np.random.default_rng(0)
    values = {
        param.name: random.standard_normal(param.shape).astype(np.float32) * 0.1 for param in declare_params(spec)
    }
    linears = {param.name for param in declare_params(spec) if param.kind in ("linear", "embedding")}
    stacked = [param for param in declare_params(spec) if param.name.endswith("qkv_proj.weight")]
    attn = spec.layers[0].attn
    kv_rows = attn.num_kv_heads * attn.head_dim
    rows = [attn.num_heads * attn.head_dim + kv_rows, kv_rows]
    assert len(stacked) == spec.num_layers and sum(rows) == stacked[0].shape[0]

    def pack(array: Any) -> Any:
        weight = _ops.PackedWeight("float32", *array.shape)
        weight.write_dense(0, array)
        return weight

    weights = {name: pack(values[name]) for name in linears}
    vectors = {name: array for name, array in values.items() if name not in linears}
    whole = logits_of(spec, trace, weights, vectors)

    parts = {param.name: rows for param in stacked}
    assert all(is_separable(trace, name, rows) for name in parts)
    cut, biases = separate(trace, parts)
    assert len(cut.instructions) == len(trace.instructions) + spec.num_layers
    for name in parts:
        del weights[name]
        weights[part_name(name, 0)] = pack(values[name][: rows[0]])
        weights[part_name(name, 1)] = pack(values[name][rows[0] :])
    vectors |= {name: values[piece.name][piece.start : piece.end] for name, piece in biases.items()}
    assert len(biases) == 2 * spec.num_layers
    assert np.array_equal(logits_of(spec, cut, weights, vectors), whole)


def test_what_is_read_across_parts_stays_whole(tmp_path: Path) -> None:
    spec = qwen2(tmp_path)
    trace = trace_step(spec, "float32", kv_groups(spec, 1))
    [gate_up, *_] = [param for param in declare_params(spec) if "gate_up_proj" in param.name]
    half = gate_up.shape[0] // 2
    assert not is_separable(trace, gate_up.name, [half, half]), "act_mul reads gate and up as one"
    [qkv, *_] = [param for param in declare_params(spec) if "qkv_proj.weight" in param.name]
    assert not is_separable(trace, qkv.name, [1, qkv.shape[0] - 1]), "a part ends within a head"
    tied = replace(spec, tie_word_embeddings=True)
    trace = trace_step(tied, "float32", kv_groups(spec, 1))
    assert not is_separable(trace, "embed_tokens.weight", [1, spec.vocab_size - 1])
