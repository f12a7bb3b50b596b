"""What is decided once, at start."""

import pytest

from headrace.core.engine.resolve import param_bytes, stored_bytes
from headrace.core.errors import ModelError, WeightError
from headrace.core.models.config import HFConfig
from headrace.core.models.registry import read_spec
from headrace.core.platform import Caps
from headrace.core.weights.source import TensorInfo


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "intermediate_size", "head_dim", "num_attention_heads"])
@pytest.mark.parametrize("value", [2**49, 2**63, 10**20, 1e300])
def test_sizes_beyond_every_device_are_model_errors(key: str, value: float) -> None:
    sizes = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1}
    spec = read_spec(HFConfig({"model_type": "llama", **sizes, **heads, key: value}))

    def counted(shape: tuple[int, ...], _: object) -> int:
        assert all(0 < size < 2**63 for size in shape)
        return 4

    with pytest.raises(ModelError, match=r"declares the parameter .* of shape .*; no parameter has more than"):
        param_bytes(spec, "float32", "none", Caps(), counted)


def test_a_matrix_of_a_gguf_file_without_numbers_is_named() -> None:
    info = TensorInfo(name="blk.0.ffn_up.weight", dtype="f32", shape=(0, 96), file="m.gguf", num_bytes=0)
    with pytest.raises(WeightError, match=r"m.gguf: tensor blk.0.ffn_up.weight of shape \[0, 96\] holds no number"):
        stored_bytes([info], "float32", Caps(), lambda shape, _: 4)
