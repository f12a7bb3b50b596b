"""GGUF metadata as a config; logits of whole files are compared in test_golden_logits."""

import contextlib
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np
import pytest

from headrace.core.errors import ModelError
from headrace.core.models.gguf_archs import ARCHS, KEYS
from headrace.core.models.gguf_config import config_from_gguf
from headrace.core.models.gguf_names import gguf_names
from headrace.core.models.registry import family_names, read_spec
from headrace.core.models.spec import ModelSpec, RopeSpec
from headrace.core.weights.names import Stored
from headrace.core.weights.source import HostTensor

GEMMA_9B = {"embedding_length": 3584, "attention.head_count": 16, "block_count": 42}
GEMMA_27B = {"embedding_length": 4608, "attention.head_count": 32, "block_count": 46, "attention.key_length": 128}


def metadata(arch: str = "llama", *, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Metadata of a small file with other values in `more`; None takes a key away."""
    sizes = {
        "vocab_size": 32, "context_length": 2048, "embedding_length": 64, "block_count": 2, "feed_forward_length": 96,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.layer_norm_epsilon": 1e-5, **(more or {}),
    }  # fmt: skip
    keys = {f"{arch}.{key}": value for key, value in sizes.items() if value is not None}
    return {"general.architecture": arch, **keys}


def spec_of(data: dict[str, Any], names: tuple[str, ...] = ("output.weight",)) -> ModelSpec:
    return read_spec(config_from_gguf(data, names, no_tensor))


def no_tensor(name: str) -> HostTensor:
    raise AssertionError(name)


def lacking(name: str) -> HostTensor:
    raise ModelError(f"no tensor {name}")


def test_every_architecture_is_served_by_a_family() -> None:
    assert {arch.model_type for arch in ARCHS.values()} <= set(family_names())
    known = {str(name) for name in gguf.MODEL_ARCH_NAMES.values()}
    assert set(ARCHS) <= known


def test_a_head_is_tied_if_there_is_no_output_tensor() -> None:
    assert not spec_of(metadata()).tie_word_embeddings
    assert spec_of(metadata(), names=("token_embd.weight",)).tie_word_embeddings


def test_the_vocabulary_is_counted_if_not_stated() -> None:
    data = {**metadata(more={"vocab_size": None}), "tokenizer.ggml.tokens": ["a"] * 77}
    assert spec_of(data).vocab_size == 77
    with pytest.raises(ModelError, match="the GGUF metadata of llama lacks the key 'vocab_size'"):
        spec_of(metadata(more={"vocab_size": None}))


def test_biases_are_seen_by_their_tensors() -> None:
    spec = spec_of(metadata(), names=("blk.0.attn_q.bias", "blk.0.ffn_down.bias"))
    attn, mlp = spec.layers[0].attn, spec.layers[0].mlp
    assert attn.qkv_bias and attn.o_bias and mlp.bias
    assert not spec_of(metadata()).layers[0].attn.qkv_bias


def test_a_window_makes_a_mistral() -> None:
    spec = spec_of(metadata(more={"attention.sliding_window": 16}))
    assert spec.model_type == "mistral" and {layer.attn.window for layer in spec.layers} == {16}


def test_a_window_makes_an_olmo3() -> None:
    spec = spec_of(metadata("olmo2", more={"attention.sliding_window": 16}))
    assert [layer.attn.window for layer in spec.layers] == [16, 16]


def test_gemma_scales_its_largest_model_differently() -> None:
    small = spec_of(metadata("gemma2", more={**GEMMA_9B, "attention.key_length": 256}))
    assert small.layers[0].attn.scale == pytest.approx(1 / 16)
    large = spec_of(metadata("gemma2", more=GEMMA_27B))
    assert large.layers[0].attn.scale == pytest.approx(1 / 12)
    assert large.logit_softcap == 30.0 and large.layers[0].attn.softcap == 50.0  # left out of early files
    assert [layer.attn.window for layer in large.layers[:2]] == [4096, 0]


def test_gemma3_says_which_layers_slide() -> None:
    more = {"attention.sliding_window": 8, "block_count": 4, "rope.freq_base": 5e5, "rope.freq_base_swa": 123.0}
    default = spec_of(metadata("gemma3", more=more))
    assert [layer.attn.window for layer in default.layers] == [8] * 4
    listed = spec_of(metadata("gemma3", more={**more, "attention.sliding_window_pattern": [True, False] * 2}))
    assert [layer.attn.window for layer in listed.layers] == [8, 0, 8, 0]
    assert [rope_of(listed, i).theta for i in range(2)] == [123.0, 5e5]
    counted = spec_of(metadata("gemma3", more={**more, "attention.sliding_window_pattern": 2}))
    assert [layer.attn.window for layer in counted.layers] == [8, 0, 8, 0]


def test_yarn_and_linear_scaling() -> None:
    more = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 512}
    scaling = rope_of(spec_of(metadata("qwen2", more=more))).scaling
    assert scaling is not None and scaling.kind == "yarn"
    assert (scaling.factor, scaling.original_max_position_embeddings, scaling.beta_fast) == (4.0, 512, 32.0)
    assert scaling.attention_factor == pytest.approx(0.1 * np.log(4.0) + 1)
    old = rope_of(spec_of(metadata(more={"rope.scale_linear": 2.0}))).scaling
    assert old is not None and (old.kind, old.factor) == ("linear", 2.0)


def test_partial_rotary_embedding_keeps_its_size() -> None:
    for rotary_dim in range(2, 98, 2):
        more = {"attention.key_length": 98, "rope.dimension_count": rotary_dim}
        assert rope_of(spec_of(metadata(more=more))).rotary_dim == rotary_dim


def test_rope_factors_are_never_ignored() -> None:
    names = ("rope_freqs.weight",)
    with pytest.raises(ModelError, match=r"in the tensor rope_freqs\.weight, which was not given"):
        config_from_gguf(metadata(), names)
    factors = np.array([1, 1, 2, 8, 8, 8, 8, 8], np.float32)

    def read(name: str) -> HostTensor:
        assert name == "rope_freqs.weight"
        return HostTensor(name=name, dtype="float32", shape=factors.shape, data=factors)

    scaling = rope_of(read_spec(config_from_gguf(metadata(), names, read))).scaling
    assert scaling is not None and scaling.short_factor == scaling.long_factor == tuple(factors.tolist())
    with pytest.raises(ModelError, match="scales rope both by yarn and by the tensor rope_freqs"):
        config_from_gguf(metadata(more={"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}), names, read)
    with pytest.raises(ModelError, match="no tensor rope_factors_long.weight"):
        config_from_gguf(metadata("phi3", more={"rope.scaling.type": "longrope"}), ())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"general.architecture": "llama3"}, "architecture 'llama3' is not served; did you mean llama"),
        ({}, "architecture 'None' is not served"),
        (metadata(more={"block_count": None}), "lacks the key 'block_count'"),
        (metadata("rwkv7"), r"architecture 'rwkv7' is not served\n  try: take a model of one of these: llama, qwen2"),
        (metadata(more={"attention.value_length": 8}), "keys and values .* differ in size"),
        (metadata(more={"attention.head_count_kv": [2, 1]}), "head_count_kv differs from layer to layer"),
        (
            metadata(more={"attention.head_count": 0}),
            "the GGUF metadata of llama gives no sliding_window; the file lacks",
        ),
        (metadata(more={"attention.head_count": 65}), r"has 65 heads .* for embedding_length 64"),
    ],
)
def test_what_cannot_be_served_is_a_model_error(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        spec_of(data)


@pytest.mark.parametrize("arch", sorted(ARCHS))
def test_damaged_values_of_every_architecture_are_model_errors(arch: str) -> None:
    for key in (*KEYS, *ARCHS[arch].keys, "block_count", "attention.head_count", "attention.key_length"):
        for value in (None, 0, -1, 2**64 - 1, 1.5, float("nan"), "x", [], [1, 2]):
            with contextlib.suppress(ModelError):
                config_from_gguf(metadata(arch, more={key: value}), ("blk.0.attn_q.weight",), lacking)
    with pytest.raises(ModelError):
        config_from_gguf({"general.architecture": arch}, (), lacking)


def test_equal_numbers_of_each_layer_are_one_number() -> None:
    more = {"attention.head_count_kv": [2, 2], "feed_forward_length": [96, 96]}
    assert spec_of(metadata(more=more)) == spec_of(metadata())


def test_only_llama_reorders_query_and_key_rows() -> None:
    entries = gguf_names("llama", spec_of(metadata()), ()).entries
    pairs = {
        name: entry.rope_pairs for name, entry in entries.items() if isinstance(entry, Stored) and entry.rope_pairs
    }
    assert pairs == {
        "layers.{i}.attn.q_proj.weight": 4,
        "layers.{i}.attn.q_proj.bias": 4,
        "layers.{i}.attn.k_proj.weight": 2,
        "layers.{i}.attn.k_proj.bias": 2,
    }
    qwen = gguf_names("qwen2", spec_of(metadata("qwen2")), ()).entries.values()
    assert not any(isinstance(entry, Stored) and entry.rope_pairs for entry in qwen)


def rope_of(spec: ModelSpec, layer: int = 0) -> RopeSpec:
    rope = spec.layers[layer].attn.rope
    assert rope is not None
    return rope
