"""Experts of GGUF files, one by one: plain and in blocks, against the gguf package."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from headrace.core.weights.dequantize import to_float32
from headrace.core.weights.gguf import GGUFSource
from headrace.core.weights.unstacked import UnstackedSource


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_0", "MXFP4"])
def test_each_expert_is_its_part_of_the_stack(kind: str, tmp_path: Path) -> None:
    block_type = gguf.GGMLQuantizationType[kind]
    values = np.random.default_rng(0).standard_normal((3, 5, 64)).astype(np.float32)
    stored = gguf.quants.quantize(values, block_type)
    want = gguf.quants.dequantize(stored, block_type)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("blk.0.ffn_up_exps.weight", stored, raw_dtype=block_type)
    writer.add_tensor("blk.0.ffn_up_exps.bias", values[:, :, 0].copy())
    writer.add_tensor("blk.0.ffn_gate_inp_shexp.weight", values[0, 0].copy())
    writer.add_tensor("output_norm.weight", values[0, 1].copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = UnstackedSource(GGUFSource(tmp_path / "m.gguf"))
    experts = [f"blk.0.ffn_up_exps.{expert}" for expert in range(3)]
    assert set(source.names()) == {
        *(f"{name}.{leaf}" for name in experts for leaf in ("weight", "bias")),
        "blk.0.ffn_gate_inp_shexp.weight",
        "output_norm.weight",
    }
    for expert, name in enumerate(experts):
        tensor = source.read(f"{name}.weight")
        assert tensor.shape == source.info(f"{name}.weight").shape == (5, 64)
        assert np.array_equal(to_float32(tensor), want[expert])
        assert np.array_equal(to_float32(source.read(f"{name}.bias")), values[expert, :, 0])
    assert source.read("blk.0.ffn_gate_inp_shexp.weight").data.tolist() == values[0, :1].tolist()
    assert source.read("output_norm.weight").shape == (64,)
    source.close()
