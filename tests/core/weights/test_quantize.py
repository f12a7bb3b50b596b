"""Quantization on load against the gguf package's formats of the same size, and its errors."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from transformers import LlamaConfig

from headrace.core.errors import WeightError
from headrace.core.models.config import HFConfig
from headrace.core.models.declare import declare_params
from headrace.core.models.params import Param, Part
from headrace.core.models.registry import read_spec
from headrace.core.platform import Caps
from headrace.core.weights.dequantize import to_float32
from headrace.core.weights.quantize import (
    FP8,
    INT4,
    INT5,
    INT5_OFFSETS,
    INT8,
    INT8_GROUPS,
    QuantizedParams,
    Scheme,
    packed_bytes,
    quantize_rows,
    schemes_of,
    to_float8,
)
from headrace.core.weights.source import HostTensor, LoadedParam

Floats = npt.NDArray[np.float32]
NO_MIXTURE = Caps(schemes=("int8", "int4"))
MIXTURE = Caps(schemes=("int8", "int5", "int4"))


class OneTensor:
    """A ParamSource of one parameter."""

    def __init__(self, tensor: HostTensor, **fields: Any) -> None:
        param = Param(
            name="layers.0.mlp.gate_up_proj.weight", shape=tensor.shape, kind="linear", quantizable=True, **fields
        )
        self.loaded = LoadedParam(param=param, tensors=(tensor,))

    def params(self) -> Sequence[Param]:
        return (self.loaded.param,)

    def __iter__(self) -> Iterator[LoadedParam]:
        yield self.loaded


def _weight(rows: int = 64, cols: int = 256, seed: int = 0) -> Floats:
    rng = np.random.default_rng(seed)
    values = rng.standard_t(5, (rows, cols)) * rng.uniform(0.1, 3, (rows, 1))
    return values.astype(np.float32)


def _tensor(values: Floats, name: str = "model.layers.0.mlp.up_proj.weight") -> HostTensor:
    return HostTensor(name=name, dtype="float32", shape=values.shape, data=values, file="model.safetensors")


def _quantized(values: Floats, quantization: str, **fields: Any) -> HostTensor:
    [loaded] = QuantizedParams(OneTensor(_tensor(values), **fields), quantization, NO_MIXTURE)
    [tensor] = loaded.tensors
    return tensor


def _error(values: Floats, approximation: Floats) -> float:
    return float(np.sum((values.astype(np.float64) - approximation) ** 2))


def test_int8_channel_is_the_nearest_of_255_levels_of_a_row() -> None:
    values = _weight()
    tensor = _quantized(values, "int8-channel")
    assert (tensor.dtype, tensor.group, tensor.offsets) == ("int8", 256, None)
    steps = np.abs(values).max(1, keepdims=True).astype(np.float64) / 127
    assert np.all(np.abs(to_float32(tensor) - values) <= steps * 0.5001)


def test_int8_in_groups_is_the_gguf_packages_q8_0() -> None:
    values = _weight()
    tensor = _quantized(values, "int8")
    assert tensor.group == 32
    theirs = gguf.dequantize(gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0), gguf.GGMLQuantizationType.Q8_0)
    # They round with the scale before it is rounded to float16, so that some codes differ.
    assert _error(values, to_float32(tensor)) <= _error(values, theirs) * 1.001


@pytest.mark.parametrize(
    ("scheme", "theirs", "most"),
    [
        (INT4["int4"], gguf.GGMLQuantizationType.Q4_1, 0.85),
        (INT4["int4-sym"], gguf.GGMLQuantizationType.Q4_0, 0.95),
        (INT5_OFFSETS, gguf.GGMLQuantizationType.Q5_1, 0.9),
        (INT5, gguf.GGMLQuantizationType.Q5_0, 0.95),
    ],
)
def test_codes_are_closer_than_rounding_by_the_gguf_package(
    scheme: Scheme, theirs: gguf.GGMLQuantizationType, most: float
) -> None:
    values = _weight()
    codes, scales, offsets = quantize_rows(values, scheme)
    assert codes.min() >= 0 and codes.max() == 2**scheme.bits - 1
    tensor = replace(_tensor(values), dtype=scheme.name, data=codes, scales=scales, offsets=offsets)
    expected = gguf.dequantize(gguf.quantize(values, theirs), theirs)
    assert _error(values, to_float32(tensor)) < most * _error(values, expected)


@pytest.mark.parametrize("quantization", INT4)
def test_groups_that_lie_on_a_grid_come_back_exactly(quantization: str) -> None:
    rng = np.random.default_rng(3)
    scheme = INT4[quantization]
    codes = rng.integers(0, 16, (8, 2, scheme.group))
    codes[..., :2] = 0, 15
    scales = rng.uniform(0.01, 1, (8, 2, 1)).astype(np.float16).astype(np.float32)
    offsets = -8 * scales if scheme.is_symmetric else np.float32(rng.normal(size=(8, 2, 1)).astype(np.float16))
    values = (codes * scales + offsets).astype(np.float32).reshape(8, -1)
    assert np.abs(to_float32(_quantized(values, quantization)) - values).max() < 1e-6


def test_larger_groups_cost_accuracy_and_save_bytes() -> None:
    values = _weight()
    errors = [_error(values, to_float32(_quantized(values, name))) for name in ("int4", "int4-g64", "int4-g128")]
    sizes = [packed_bytes(values.shape, INT4[name]) for name in ("int4", "int4-g64", "int4-g128")]
    assert errors == sorted(errors) and sizes == sorted(sizes, reverse=True)
    # 4 bits and two float16 numbers a group
    assert sizes[0] == 64 * 256 // 2 + 64 * 8 * 4


def test_constant_and_zero_groups() -> None:
    values = np.zeros((2, 128), np.float32)
    values[1, :64] = 0.75
    for name in ("int8", *INT4):
        assert np.abs(to_float32(_quantized(values, name)) - values).max() < 1e-3


def test_what_is_sensitive_or_a_vocabulary_keeps_8_bits() -> None:
    def schemes(quantization: str, **fields: Any) -> Any:
        param = Param(name="w", shape=(8, 64), kind="linear", **{"quantizable": True, **fields})
        return schemes_of(param, quantization, NO_MIXTURE)

    assert schemes("none") == schemes("int4", quantizable=False) == ()
    assert schemes("int8-channel") == ((8, INT8),)
    assert schemes("int8") == ((8, INT8_GROUPS),)
    assert schemes("int4-g64", shard="row") == ((8, INT4["int4-g64"]),)
    assert schemes("int4", shard="vocab") == ((8, INT8_GROUPS),)
    assert schemes("int4", is_sensitive=True) == ((8, INT8_GROUPS),)


def _llama(hidden_size: int) -> list[Param]:
    """Declarations of matrices by a family of the registry."""
    config = LlamaConfig(
        vocab_size=3000,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=1,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=hidden_size // 192,
        architectures=["LlamaForCausalLM"],
    )
    spec = read_spec(HFConfig(config.to_dict()))
    return [param for param in declare_params(spec) if param.quantizable]


@pytest.mark.parametrize(("hidden_size", "expected"), [(2304, 4.79), (576, 5.53)])
def test_int4_is_a_mixture_no_larger_than_q4_k_m(hidden_size: int, expected: float) -> None:
    """expected: bits a value of the layers in llama.cpp's Q4_K_M, which has 5 bits where 256 does not divide columns:
    4.5 or 5.5; but half of v and down_proj in 6.5625 (v of few columns: 8.5; down_proj has 1,152: 5.5 and 8.5)."""
    params = {param.name: param for param in _llama(hidden_size)}
    schemes = {name: schemes_of(param, "int4", MIXTURE) for name, param in params.items()}
    layers = [name for name in params if name.startswith("layers.")]
    bits = sum(8 * packed_bytes((n, params[name].shape[1]), s) for name in layers for n, s in schemes[name])
    assert bits / sum(params[name].num_elements for name in layers) <= expected
    kv_rows = hidden_size // 192 * 64
    [(rows, scheme), (v_rows, of_v)] = schemes["layers.0.attn.qkv_proj.weight"]
    assert (rows, v_rows, of_v) == (hidden_size + kv_rows, kv_rows, INT8_GROUPS)
    assert scheme == (INT5 if hidden_size < 1024 else INT4["int4-sym"])
    assert schemes["layers.0.mlp.down_proj.weight"][0][1] == (INT5 if hidden_size < 1024 else INT4["int4"])
    assert schemes["lm_head.weight"][0][1] == (INT8_GROUPS if hidden_size < 1024 else INT5_OFFSETS)


def test_a_fused_tensor_is_cut_where_schemes_change() -> None:
    values = _weight(rows=96)
    param = Param(
        name="layers.0.attn.qkv_proj.weight",
        shape=values.shape,
        kind="linear",
        shard="column",
        quantizable=True,
        is_sensitive=True,
        parts=(Part(name="q", rows=50), Part(name="k", rows=23), Part(name="v", rows=23, is_sensitive=True)),
    )
    for tensors in ([values], [values[:50], values[50:73], values[73:]], [values[:80], values[80:]]):
        source = OneTensor(_tensor(values))
        source.loaded = LoadedParam(param=param, tensors=tuple(map(_tensor, tensors)))
        [loaded] = QuantizedParams(source, "int4", MIXTURE)
        assert [tensor.dtype for tensor in loaded.tensors if len(tensor.data) > 7][-2:] == ["int5", "int8"]
        assert sum(len(tensor.data) for tensor in loaded.tensors if tensor.dtype == "int8") == 23
        got = np.concatenate([to_float32(tensor) for tensor in loaded.tensors])
        assert _error(values, got) < 0.003 * float(np.sum(values.astype(np.float64) ** 2))


def test_columns_that_no_group_divides() -> None:
    with pytest.raises(
        WeightError, match=r"up_proj.weight has 96 columns, which groups of 128 do not divide"
    ) as info:
        _quantized(_weight(cols=96), "int4-g128")
    assert info.value.remedies == ("--quantize int4", "--quantize int8")
    with pytest.raises(WeightError, match="24 columns") as info:
        _quantized(_weight(cols=24), "int4")
    assert info.value.remedies == ("--quantize int8",)
    assert _quantized(_weight(cols=24), "int8").group == 24  # of a row too short for groups
    declared = Param(name="up_proj", shape=(8, 24), kind="linear", quantizable=True)
    with pytest.raises(WeightError, match="^tensor up_proj has 24 columns"):  # before a byte is planned or read
        schemes_of(declared, "int4", NO_MIXTURE)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("quantization", ["int8", "int4", "int4-sym"])
def test_a_bad_value_is_named(bad: float, quantization: str) -> None:
    values = _weight()
    values[40, 100] = bad
    with pytest.raises(WeightError, match=r"model.safetensors: tensor model.layers.0.mlp.up_proj.weight holds a NaN"):
        _quantized(values, quantization)


def test_what_is_quantized_already_is_refused() -> None:
    blocks = np.zeros((4, 36), np.uint8)
    blocked = HostTensor(name="blk.0.ffn_up.weight", dtype="q4_0", shape=(4, 64), data=blocks, file="a.gguf")
    fp8 = HostTensor(name="up", dtype="float8_e4m3fn", shape=(4, 64), data=np.zeros((4, 64), np.uint8))
    for tensor, dtype in ((blocked, "q4_0"), (fp8, "float8_e4m3fn")):
        with pytest.raises(WeightError, match=rf"is quantized already \({dtype}\)"):
            list(QuantizedParams(OneTensor(tensor), "int8", NO_MIXTURE))


def test_a_large_weight_is_quantized_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    values = _weight(rows=50)
    whole = quantize_rows(values, INT4["int4"])
    monkeypatch.setattr("headrace.core.weights.quantize._CHUNK_VALUES", 7 * 256)
    tensor = _quantized(values, "int4")
    assert tensor.offsets is not None
    for ours, expected in zip((tensor.data, tensor.scales, tensor.offsets), whole, strict=True):
        np.testing.assert_array_equal(ours, expected)


def test_float8_is_what_torch_makes_of_it() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    halves = (np.arange(1, 2048) / 2048).astype(np.float32)  # among them all that lie between two of the smallest
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    middles = (every[:126] + every[1:127]) / 2
    spread = rng.standard_normal(4096) * np.exp(rng.uniform(-8, 4, 4096))
    x = np.concatenate([halves, middles, -middles, np.array([0, 448, -448], np.float32), np.clip(spread, -448, 448)])
    x = x.astype(np.float32)
    want = torch.from_numpy(x).to(torch.float8_e4m3fn)
    assert np.array_equal(to_float32(_float8(to_float8(x))), want.float().numpy())


def _float8(codes: npt.NDArray[np.uint8]) -> HostTensor:
    return HostTensor(name="", dtype="float8_e4m3fn", shape=codes.shape, data=codes)


def test_fp8_has_a_scale_for_each_output() -> None:
    values = _weight()
    values[3] = 0
    tensor = _quantized(values, "fp8")
    assert tensor.dtype == "float8_e4m3fn" and tensor.scales is not None and tensor.scales.shape == (64, 1)
    got = to_float32(tensor)
    assert np.array_equal(got[3], values[3])
    assert np.abs(got - values).max(1) == pytest.approx(np.zeros(64), abs=float(np.abs(values).max() / 28))
    assert (np.abs(got - values) <= np.abs(values) / 16 + np.abs(values).max(1, keepdims=True) * 2**-18).all()
    assert packed_bytes(tensor.shape, FP8) == tensor.data.nbytes + tensor.scales.nbytes
