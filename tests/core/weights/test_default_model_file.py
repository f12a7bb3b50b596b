"""Every byte of the embedded default model's GGUF, as the gguf package reads it."""

import numpy as np
import pytest
from gguf import GGUFReader
from gguf.quants import dequantize

from headrace.core.default_model import find_default_model
from headrace.core.weights.dequantize import to_float32
from headrace.core.weights.gguf import GGUFSource


@pytest.mark.weights
def test_the_default_model_reads_bit_exactly() -> None:
    path = find_default_model()
    if path is None:
        pytest.skip("the default model is not on this machine; `headrace complete` fetches it")
    source, reader = GGUFSource(path), GGUFReader(path)
    assert set(source.names()) == {tensor.name for tensor in reader.tensors}
    for tensor in reader.tensors:
        expected = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        ours = to_float32(source.read(tensor.name))
        np.testing.assert_array_equal(ours.view(np.uint32).reshape(-1), expected.view(np.uint32).reshape(-1))
    for key, field in reader.fields.items():
        if not key.startswith("GGUF."):  # the package's names for the header's own numbers
            assert source.metadata[key] == field.contents()
    source.close()
