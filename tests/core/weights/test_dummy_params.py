"""Dummy weights: deterministic, of the promised scale, rounded as torch rounds."""

import tracemalloc

import numpy as np
import pytest
import torch

from headrace.core.errors import ConfigError
from headrace.core.models.params import Param
from headrace.core.weights.dequantize import to_float32
from headrace.core.weights.dummy import DummyParams, from_float32
from headrace.core.weights.source import LoadedParam

PARAMS = (
    Param(name="embed_tokens.weight", shape=(1000, 64), kind="embedding", shard="vocab"),
    Param(name="rope.0.inv_freq", shape=(2,), kind="constant", compute=lambda: np.array([3, 4], dtype=np.float32)),
    Param(name="layers.0.attn_norm.weight", shape=(64,), kind="vector", plus_one=True),
    Param(name="layers.0.attn_norm.bias", shape=(64,), kind="vector"),
    Param(name="layers.0.attn.qkv_proj.bias", shape=(192,), kind="vector"),
    Param(name="layers.0.mlp.down_proj.weight", shape=(1500, 1024), kind="linear"),
    Param(name="layers.1.mlp.down_proj.weight", shape=(1500, 1024), kind="linear"),
)


def make(seed: int = 1, dtype: str = "float32") -> dict[str, LoadedParam]:
    return {item.param.name: item for item in DummyParams(PARAMS, seed, dtype)}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_values_are_final_and_of_the_promised_scale(dtype: str) -> None:
    loaded = make(dtype=dtype)
    assert tuple(loaded) == tuple(param.name for param in PARAMS)
    values = {}
    for param in PARAMS:
        (tensor,) = loaded[param.name].tensors
        assert tensor.shape == param.shape
        assert tensor.dtype == ("float32" if param.kind == "constant" else dtype)
        values[param.name] = to_float32(tensor)
    assert values["rope.0.inv_freq"].tolist() == [3, 4]
    assert (values["layers.0.attn_norm.weight"] == 1).all()
    assert (values["layers.0.attn_norm.bias"] == 0).all() and (values["layers.0.attn.qkv_proj.bias"] == 0).all()
    for name in ("embed_tokens.weight", "layers.0.mlp.down_proj.weight"):
        in_features = values[name].shape[1]
        assert abs(values[name].mean()) < 0.02 / in_features**0.5
        assert abs(values[name].std() * in_features**0.5 - 1) < 0.02


def test_activations_keep_their_size() -> None:
    weight = to_float32(make()["layers.0.mlp.down_proj.weight"].tensors[0])
    x = np.random.default_rng(5).standard_normal((8, 1024), dtype=np.float32)
    assert 0.9 < (x @ weight.T).std() < 1.1


def test_rows_differ_though_values_repeat() -> None:
    weight = to_float32(make()["layers.0.mlp.down_proj.weight"].tensors[0])
    assert weight.size > 1.2 * 2**20  # more than is drawn
    norms = np.linalg.norm(weight, axis=1)
    cosines = np.abs(weight @ weight.T) / np.outer(norms, norms)
    np.fill_diagonal(cosines, 0)
    assert cosines.max() < 0.25


def test_a_function_of_seed_and_name() -> None:
    first, again, other = make(1), make(1), make(2)
    name, sibling = "layers.0.mlp.down_proj.weight", "layers.1.mlp.down_proj.weight"
    data = first[name].tensors[0].data
    np.testing.assert_array_equal(data, again[name].tensors[0].data)
    assert not np.array_equal(data, other[name].tensors[0].data)
    assert not np.array_equal(data, first[sibling].tensors[0].data)
    (alone,) = DummyParams([param for param in PARAMS if param.name == name], 1, "float32")
    np.testing.assert_array_equal(data, alone.tensors[0].data)


def test_one_tensor_is_made_at_a_time() -> None:
    params = [Param(name=f"w{n}", shape=(4096, 1024), kind="linear") for n in range(8)]
    tracemalloc.start()
    for item in DummyParams(params, 0, "bfloat16"):
        del item
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * 2**20 + 24 * 2**20  # one tensor, and the pool with its temporaries


def test_rounding_to_bfloat16_is_torchs() -> None:
    values = np.concatenate([np.random.default_rng(6).standard_normal(4096), [0.0, -0.0, 3.4e38, 1e-40, 1.00390625]])
    values32 = values.astype(np.float32)
    expected = torch.from_numpy(values32).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(from_float32(values32, "bfloat16"), expected)


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ConfigError, match="dummy weights can be float32, float16, bfloat16, not int8"):
        DummyParams(PARAMS, 0, "int8")
