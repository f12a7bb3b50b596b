"""The kernel that quantizes weights against its definition, on every tier."""

from typing import Any

import numpy as np
import pytest

from headrace.core.weights.dequantize import to_float32
from headrace.core.weights.quantize import INT4, INT5, INT5_OFFSETS, INT8, INT8_GROUPS, Scheme, quantize_rows
from headrace.core.weights.source import HostTensor

native = pytest.importorskip("headrace.platforms.cpu.native.weights", reason="the kernels are not built")
SCHEMES = {"int8": INT8, "int8 in groups": INT8_GROUPS, "int5": INT5, "int5 with offsets": INT5_OFFSETS, **INT4}


def _error(values: Any, scheme: Scheme, quantized: tuple[Any, Any, Any]) -> float:
    codes, scales, offsets = quantized
    tensor = HostTensor(name="w", dtype=scheme.name, shape=values.shape, data=codes, scales=scales, offsets=offsets)
    return float(np.sum((values.astype(np.float64) - to_float32(tensor)) ** 2))


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_errors_are_those_of_the_definition(tier: str, name: str, rows: int) -> None:
    """The best codes are no question of taste, but the last bit of a sum decides between two that are as good."""
    rng = np.random.default_rng(rows)
    values = (rng.standard_t(4, (rows, 384)) * 0.05).astype(np.float32)
    values[0, :128] = 0
    ours = native.quantize_rows(values, SCHEMES[name])
    theirs = quantize_rows(values, SCHEMES[name])
    assert _error(values, SCHEMES[name], ours) <= _error(values, SCHEMES[name], theirs) * 1.002
    assert np.mean(ours[0] == theirs[0]) > 0.99
    if ours[2] is not None:
        np.testing.assert_array_equal(ours[2], ours[2].astype(np.float16))


@pytest.mark.parametrize("name", [name for name, scheme in SCHEMES.items() if scheme.group == 32])
def test_packed_codes_mean_what_they_did(tier: str, name: str) -> None:
    from headrace.kernels.cpu import _ops

    values = np.random.default_rng(1).normal(size=(21, 96)).astype(np.float32)
    codes, scales, offsets = native.quantize_rows(values, SCHEMES[name])
    tensor = HostTensor(
        name="w", dtype=SCHEMES[name].name, shape=values.shape, data=codes, scales=scales, offsets=offsets
    )
    weight, layout = native.pack([tensor], "float32", keep_blocks=True)
    assert layout == native.layout_of(SCHEMES[name])
    assert weight.num_bytes == native.packed_bytes(values.shape, SCHEMES[name])
    out = np.empty_like(values)
    _ops.embedding(out, np.arange(21, dtype=np.int32), weight)
    np.testing.assert_allclose(out, to_float32(tensor), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_bad_value_spoils_its_scale_alone(tier: str, name: str) -> None:
    for bad in (np.nan, np.inf, -np.inf):
        values = np.random.default_rng(0).normal(size=(5, 256)).astype(np.float32)
        values[3, 200] = bad
        _, scales, _ = native.quantize_rows(values, SCHEMES[name])
        assert np.isnan(scales[3]).sum() == 1 and not np.isnan(scales[[0, 1, 2, 4]]).any()


def test_shapes_are_checked() -> None:
    from headrace.kernels.cpu import _ops

    x = np.zeros((2, 96), np.float32)
    codes, scales = np.zeros((2, 96), np.uint8), np.zeros((2, 3), np.float32)
    with pytest.raises(ValueError, match="equal groups"):
        _ops.quantize(codes, np.zeros((2, 5), np.float32), np.zeros((2, 5), np.float32), x)
    with pytest.raises(ValueError, match="uint8 with offsets and int8 without"):
        _ops.quantize(codes, scales, None, x)
    with pytest.raises(ValueError, match="4 or 5 bits, got 6"):
        _ops.quantize(codes, scales, scales, x, False, 6)
    with pytest.raises(ValueError, match="offsets must have shape"):
        _ops.quantize(codes, scales, np.zeros((2, 2), np.float32), x)
