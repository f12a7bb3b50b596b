"""Rope tables against transformers' own functions."""

from typing import Any

import numpy as np
import pytest

from headrace.core.models.config import HFConfig
from headrace.core.models.registry import read_spec
from headrace.core.models.rope import num_rope_variants, rope_rows, rope_tables
from headrace.core.models.spec import ModelSpec

BASE: dict[str, Any] = {
    "vocab_size": 100, "hidden_size": 512, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 131072,
}  # fmt: skip
FACTORS = [1.0 + 0.05 * i for i in range(48)], [1.0 + 0.9 * i for i in range(48)]
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    "llama3": {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_theta": 500000.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1e6},
    "yarn_mscale": {
        "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "rope_theta": 1e4,
        "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 24, "beta_slow": 2,
    },
    "yarn_not_truncated": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096, "rope_theta": 150000.0,
        "truncate": False, "attention_factor": 1.25,
    },
    "yarn_short_training": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4, "rope_theta": 1e4,
    },
    "longrope": {
        "rope_type": "longrope", "short_factor": FACTORS[0], "long_factor": FACTORS[1], "rope_theta": 1e4,
        "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75,
    },
    "longrope_stated": {
        "rope_type": "longrope", "short_factor": FACTORS[0], "long_factor": FACTORS[1], "rope_theta": 1e4,
        "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75, "attention_factor": 1.3,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ROPES)
def test_tables_equal_those_of_transformers(name: str) -> None:
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    changes = {"max_position_embeddings": 64} if name == "dynamic" else {}
    theirs = AutoConfig.for_model("llama", **{**BASE, **changes}, rope_parameters=dict(ROPES[name]))
    compute: Any = ROPE_INIT_FUNCTIONS[ROPES[name]["rope_type"]]
    inv_freq, attention_factor = tables(spec_of(ROPES[name], **changes))
    lengths: list[int | None] = [None]
    if name.startswith("longrope"):
        lengths = [1, 4097]
    elif name == "dynamic":
        lengths = list(range(64, 129))
    assert inv_freq.dtype == attention_factor.dtype == np.float32
    assert len(inv_freq) == len(attention_factor) == len(lengths)
    for row, length in enumerate(lengths):
        expected, factor = compute(theirs, seq_len=length)
        np.testing.assert_allclose(inv_freq[row], expected.numpy(), rtol=5e-7)
        assert attention_factor[row] == pytest.approx(factor, rel=1e-6)


def test_plain_rope_is_theta_to_the_minus_2i_over_d() -> None:
    inv_freq, attention_factor = tables(spec_of({"rope_type": "default", "rope_theta": 10000.0}))
    np.testing.assert_allclose(inv_freq[0], 10000.0 ** -(np.arange(0, 128, 2) / 128), rtol=5e-7)
    assert inv_freq.shape == (1, 64) and attention_factor.tolist() == [1.0]


def test_a_prompt_longer_than_training_takes_another_row() -> None:
    def row(spec: ModelSpec, *lengths: int) -> list[int]:
        return [rope_rows(spec).row(length) for length in lengths]

    assert row(spec_of(ROPES["longrope"]), 1, 4096, 4097, 131072) == [0, 0, 1, 1]
    assert row(spec_of(ROPES["yarn"]), 1, 131072) == [0, 0]
    same = spec_of({**ROPES["longrope"], "long_factor": FACTORS[0]})
    assert row(same, 1, 131072) == [0, 0] and tables(same)[0].shape == (1, 48)
    dynamic = spec_of(ROPES["dynamic"], max_position_embeddings=64)
    assert dynamic.max_position_embeddings == 128 and row(dynamic, 1, 64, 65, 128, 129) == [0, 0, 1, 64, 64]


def spec_of(rope: dict[str, Any], **changes: Any) -> ModelSpec:
    return read_spec(HFConfig({"model_type": "llama", **BASE, "rope_parameters": rope, **changes}))


def tables(spec: ModelSpec) -> tuple[Any, Any]:
    rope = spec.layers[0].attn.rope
    assert rope is not None
    result = rope_tables(rope)
    assert len(result[0]) == num_rope_variants(rope)
    return result
