"""CheckpointParams against transformers' state dicts and hand-made checkpoints."""

import gc
import tracemalloc
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors.numpy import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.core.errors import WeightError
from headrace.core.models.params import Param, Part
from headrace.core.weights.dequantize import to_float32
from headrace.core.weights.gguf import GGUFSource
from headrace.core.weights.load import CheckpointParams
from headrace.core.weights.names import NameTable, Stored
from headrace.core.weights.open import open_weights
from headrace.core.weights.source import HostTensor, LoadedParam, TensorInfo

Floats = npt.NDArray[np.float32]


class FakeSource:
    """A WeightSource of arrays that counts how many of its tensors are alive."""

    def __init__(self, tensors: Mapping[str, npt.NDArray[Any]], dtypes: Mapping[str, str] | None = None) -> None:
        self.tensors = dict(tensors)
        self.dtypes = dict(dtypes or {})
        self.num_alive = self.max_alive = 0
        self.reads: list[str] = []

    def names(self) -> Sequence[str]:
        return tuple(self.tensors)

    def info(self, name: str) -> TensorInfo:
        data = self.tensors[name]
        dtype = self.dtypes.get(name, data.dtype.name)
        return TensorInfo(name=name, dtype=dtype, shape=data.shape, file="fake.bin", num_bytes=data.nbytes)

    def read(self, name: str) -> HostTensor:
        self.reads.append(name)
        data = self.tensors[name].copy()
        self.num_alive += 1
        self.max_alive = max(self.max_alive, self.num_alive)
        weakref.finalize(data, self.drop)
        return HostTensor(name=name, dtype=self.info(name).dtype, shape=data.shape, data=data, file="fake.bin")

    def drop(self) -> None:
        self.num_alive -= 1

    def close(self) -> None:
        pass


def linear(name: str, *shape: int, parts: tuple[Part, ...] = (), **fields: Any) -> Param:
    return Param(name=name, shape=shape, kind="linear", parts=parts, **fields)


def vector(name: str, size: int, **fields: Any) -> Param:
    return Param(name=name, shape=(size,), kind="vector", **fields)


def random(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def load(params: Sequence[Param], tensors: Mapping[str, npt.NDArray[Any]], table: NameTable) -> dict[str, Floats]:
    return values(CheckpointParams(params, FakeSource(tensors), table))


def values(loaded: Iterable[LoadedParam]) -> dict[str, Floats]:
    """Canonical name -> float32 values, parts stacked."""
    return {item.param.name: np.concatenate([to_float32(tensor) for tensor in item.tensors]) for item in loaded}


QKV = linear(
    "layers.1.attn.qkv_proj.weight",
    8,
    6,
    parts=(
        Part(name="layers.1.attn.q_proj.weight", rows=4),
        Part(name="layers.1.attn.k_proj.weight", rows=2),
        Part(name="layers.1.attn.v_proj.weight", rows=2),
    ),
)
BOTH_WAYS = NameTable(
    entries={
        "layers.{i}.attn.qkv_proj.weight": "model.h.{i}.qkv",
        "layers.{i}.attn.q_proj.weight": "model.h.{i}.q",
        "layers.{i}.attn.k_proj.weight": "model.h.{i}.k",
        "layers.{i}.attn.v_proj.weight": "model.h.{i}.v",
    }
)
Q, K, V = random(4, 6, seed=1), random(2, 6, seed=2), random(2, 6, seed=3)


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_the_checkpoint_decides_between_whole_and_parts(prefix: str) -> None:
    stacked = np.concatenate([Q, K, V])
    whole = load([QKV], {f"{prefix}h.1.qkv": stacked}, BOTH_WAYS)
    parts = load([QKV], {f"{prefix}h.1.v": V, f"{prefix}h.1.k": K, f"{prefix}h.1.q": Q}, BOTH_WAYS)
    np.testing.assert_array_equal(whole[QKV.name], stacked)
    np.testing.assert_array_equal(parts[QKV.name], stacked)


def test_a_prefix_that_the_table_lacks_may_be_there() -> None:
    table = NameTable(entries={"w": "w"}, base_prefix="transformer.")
    np.testing.assert_array_equal(load([linear("w", 4, 6)], {"transformer.w": Q}, table)["w"], Q)


def test_transposed_weights_are_turned() -> None:
    table = NameTable(entries={"w": Stored(name="w", transpose=True)})
    source = CheckpointParams([linear("w", 6, 4)], FakeSource({"w": Q}), table)
    (loaded,) = source
    assert loaded.tensors[0].shape == (6, 4) and loaded.tensors[0].data.flags.c_contiguous
    np.testing.assert_array_equal(loaded.tensors[0].data, Q.T)


def interleave(weight: Floats, num_heads: int) -> Floats:
    """How llama.cpp's converter reorders the rows of a Llama query or key projection, written with loops."""
    head_dim = len(weight) // num_heads
    out = np.empty_like(weight)
    for head in range(num_heads):
        for i in range(head_dim // 2):
            out[head * head_dim + 2 * i] = weight[head * head_dim + i]
            out[head * head_dim + 2 * i + 1] = weight[head * head_dim + head_dim // 2 + i]
    return out


def test_rope_pairs_go_back_to_halves() -> None:
    weight, bias = random(24, 5), random(24, seed=1)
    table = NameTable(entries={"w": Stored(name="w", rope_pairs=3), "b": Stored(name="b", rope_pairs=3)})
    stored = {"w": interleave(weight, 3), "b": interleave(bias, 3)}
    got = load([linear("w", 24, 5), vector("b", 24)], stored, table)
    np.testing.assert_array_equal(got["w"], weight)
    np.testing.assert_array_equal(got["b"], bias)


def write_gguf(path: Path, tensors: Mapping[str, tuple[Floats, GGMLQuantizationType]]) -> GGUFSource:
    writer = GGUFWriter(path, "llama")
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFSource(path)


def test_rope_pairs_of_blocked_rows(tmp_path: Path) -> None:
    weight = random(24, 64)
    source = write_gguf(tmp_path / "m.gguf", {"q": (interleave(weight, 3), GGMLQuantizationType.Q4_1)})
    table = NameTable(entries={"w": Stored(name="q", rope_pairs=3)})
    (loaded,) = CheckpointParams([linear("w", 24, 64)], source, table)
    assert loaded.tensors[0].dtype == "q4_1"
    expected = dequantize(quantize(weight, GGMLQuantizationType.Q4_1), GGMLQuantizationType.Q4_1)
    np.testing.assert_array_equal(to_float32(loaded.tensors[0]), expected)


def test_blocked_tensors_cannot_be_turned(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "m.gguf", {"w": (random(32, 64), GGMLQuantizationType.Q8_0)})
    table = NameTable(entries={"w": Stored(name="w", transpose=True)})
    with pytest.raises(WeightError, match="w is stored transposed in q8_0 blocks, which cannot be turned") as caught:
        CheckpointParams([linear("w", 64, 32)], source, table)
    assert (caught.value.file, caught.value.tensor) == (str(tmp_path / "m.gguf"), "w")


def test_parts_may_mix_block_types(tmp_path: Path) -> None:
    q, k, v = random(4, 32, seed=1), random(2, 32, seed=2), random(2, 32, seed=3)
    types = (GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q8_0, GGMLQuantizationType.F32)
    source = write_gguf(
        tmp_path / "m.gguf", {f"h.1.{n}": (w, t) for n, w, t in zip("qkv", (q, k, v), types, strict=True)}
    )
    (loaded,) = CheckpointParams([replace(QKV, shape=(8, 32))], source, BOTH_WAYS)
    assert [tensor.dtype for tensor in loaded.tensors] == ["q4_0", "q8_0", "float32"]


@pytest.mark.parametrize("adds_one", [False, True])
def test_plus_one(adds_one: bool) -> None:
    stored = np.array([0.0009765625, -0.5], dtype=np.float16)
    table = NameTable(entries={"norm.weight": "norm.weight"}, adds_one=adds_one)
    got = load([vector("norm.weight", 2, plus_one=True)], {"norm.weight": stored}, table)["norm.weight"]
    assert got.tolist() == ([0.0009765625, -0.5] if adds_one else [1.0009765625, 0.5])


def test_unit_rows() -> None:
    stored = np.array([[3, 4], [0, -2]], dtype=np.float16)
    table = NameTable(entries={"w": "w"})
    got = load([replace(linear("w", 2, 2), unit_rows=True)], {"w": stored}, table)["w"]
    assert np.abs(got - np.array([[0.6, 0.8], [0, -1]], np.float32)).max() < 1e-3


def test_constants_are_computed_and_never_looked_up() -> None:
    constant = Param(
        name="rope.0.inv_freq", shape=(3,), kind="constant", compute=lambda: np.array([1, 2, 3], dtype=np.float32)
    )
    table = NameTable(entries={"w": "w"})
    source = CheckpointParams([linear("w", 4, 6), constant], FakeSource({"w": Q}), table)
    assert [param.name for param in source.params()] == ["rope.0.inv_freq", "w"]
    assert values(source)["rope.0.inv_freq"].tolist() == [1, 2, 3]


def test_each_parameter_once_in_file_order() -> None:
    table = NameTable(entries={name: name for name in "abc"} | dict(BOTH_WAYS.entries))
    params = [linear("a", 4, 6), linear("b", 4, 6), linear("c", 4, 6), QKV]
    source = FakeSource({"c": Q, "h.1.k": K, "h.1.q": Q, "b": Q, "h.1.v": V, "a": Q})
    loaded = CheckpointParams(params, source, table)
    assert source.reads == []
    assert [item.param.name for item in loaded] == ["c", QKV.name, "b", "a"]
    assert [param.name for param in loaded.params()] == ["c", QKV.name, "b", "a"]
    assert sorted(source.reads) == sorted(source.tensors)


def test_one_parameter_is_alive_at_a_time() -> None:
    table = NameTable(entries={f"w{n}": f"w{n}" for n in range(20)} | {"norm": "norm"})
    tensors = {f"w{n}": random(8, 8) for n in range(20)} | {"norm": random(4)}
    source = FakeSource(tensors)
    params = [linear(f"w{n}", 8, 8) for n in range(20)] + [vector("norm", 4, plus_one=True)]
    gc.disable()  # nothing may wait for the collector
    try:
        for item in CheckpointParams(params, source, table):
            assert len(item.tensors) == 1
            del item
        assert source.max_alive == 1 and source.num_alive == 0
    finally:
        gc.enable()


SIMPLE = NameTable(
    entries={f"w{n}": f"model.w{n}" for n in range(9)} | {"embed_tokens.weight": "model.embed_tokens.weight"},
    ignore=(r"inv_freq$", r"^lm_head\.weight$"),
)


def problem(params: Sequence[Param], tensors: Mapping[str, npt.NDArray[Any]], **fields: Any) -> WeightError:
    """The error, which must come before any data is read."""
    source = FakeSource(tensors, **fields)
    with pytest.raises(WeightError) as caught:
        CheckpointParams(params, source, SIMPLE)
    assert source.reads == []
    assert caught.value.file in caught.value.reason and caught.value.tensor in caught.value.reason
    return caught.value


def test_missing() -> None:
    error = problem([linear(f"w{n}", 4, 6) for n in range(9)], {"w0": Q})
    assert "fake.bin: 8 tensors are missing: model.w1, model.w2, model.w3, model.w4, model.w5 and 3 more" in str(
        error
    )
    assert (error.file, error.tensor) == ("fake.bin", "model.w1")
    assert "1 tensor is missing: model.w1" in str(problem([linear("w0", 4, 6), linear("w1", 4, 6)], {"w0": Q}))


def test_a_missing_part() -> None:
    source = FakeSource({"h.1.q": Q, "h.1.v": V})
    with pytest.raises(WeightError, match="1 tensor is missing: model.h.1.k"):
        CheckpointParams([QKV], source, BOTH_WAYS)


def test_extra() -> None:
    params = [linear("w0", 4, 6)]
    error = problem(params, {"w0": Q, "layers.0.q_proj.bias": random(4), "rope.inv_freq": random(4)})
    assert "1 tensor is unexpected (no parameter of this model has such a name): layers.0.q_proj.bias" in str(error)
    assert error.tensor == "layers.0.q_proj.bias"
    error = problem(params, {"w0": Q} | {f"x{n}": Q for n in range(7)})
    assert "7 tensors are unexpected" in str(error) and "x4 and 2 more" in str(error)


def test_ignored_tensors_are_not_extra_but_read_if_declared() -> None:
    table = replace(SIMPLE, entries={"lm_head.weight": "lm_head.weight", "w0": "w0"})
    assert set(load([linear("w0", 4, 6)], {"w0": Q, "lm_head.weight": Q}, table)) == {"w0"}
    both = [linear("w0", 4, 6), linear("lm_head.weight", 4, 6)]
    assert set(load(both, {"w0": Q, "lm_head.weight": Q}, table)) == {"w0", "lm_head.weight"}


def test_duplicate() -> None:
    error = problem([linear("w0", 4, 6)], {"w0": Q, "model.w0": Q})
    assert "1 tensor is stored twice: w0 as model.w0 and w0" in str(error)
    tensors = {"h.1.qkv": np.concatenate([Q, K, V]), "h.1.q": Q, "h.1.k": K, "h.1.v": V}
    with pytest.raises(WeightError, match=r"stored twice: layers.1.attn.qkv_proj.weight as h.1.qkv and h.1.q"):
        CheckpointParams([QKV], FakeSource(tensors), BOTH_WAYS)


def test_wrong_shape() -> None:
    error = problem([linear("w0", 6, 4), linear("w1", 4, 6)], {"w0": Q, "w1": Q})
    assert "1 tensor is unlike what the config declares: w0 is [4, 6], expected [6, 4]" in str(error)
    assert error.tensor == "w0"
    with pytest.raises(WeightError, match=r"h.1.k is \[4, 6\], expected \[2, 6\]"):
        CheckpointParams([QKV], FakeSource({"h.1.q": Q, "h.1.k": Q, "h.1.v": V}), BOTH_WAYS)


def test_wrong_dtype() -> None:
    error = problem([linear("w0", 4, 6)], {"w0": Q.astype(np.int8)})
    assert "w0 holds int8, expected floating point" in str(error)


def test_vocabulary_mismatch() -> None:
    embed = Param(name="embed_tokens.weight", shape=(5, 6), kind="embedding", shard="vocab")
    error = problem([embed], {"model.embed_tokens.weight": Q})
    assert "it has rows for 4 tokens, the config's vocab_size is 5" in str(error)
    assert error.remedies[0] == "set vocab_size to 4, if the tokenizer has as many tokens"


def test_all_kinds_of_problems_are_told_at_once() -> None:
    error = problem([linear("w0", 4, 6), linear("w1", 6, 4), linear("w2", 4, 6)], {"w0": Q, "w1": Q, "y": Q})
    assert "1 tensor is missing: model.w2; 1 tensor is unlike" in str(error)
    assert "; 1 tensor is unexpected" in str(error)


def test_an_empty_checkpoint() -> None:
    with pytest.raises(WeightError, match="the checkpoint, which is empty: 1 tensor is missing: model.w0"):
        CheckpointParams([linear("w0", 4, 6)], FakeSource({}), SIMPLE)


def llama_params(config: LlamaConfig) -> list[Param]:
    """A Llama's parameters, declared by hand."""
    hidden, inner, rows = config.hidden_size, config.intermediate_size, 2 * 16
    params = [
        Param(name="embed_tokens.weight", shape=(config.vocab_size, hidden), kind="embedding", shard="vocab"),
        vector("final_norm.weight", hidden),
        linear("lm_head.weight", config.vocab_size, hidden, shard="vocab"),
    ]
    for i in range(config.num_hidden_layers):
        attn, mlp = f"layers.{i}.attn", f"layers.{i}.mlp"
        sizes = {"q_proj": hidden, "k_proj": rows, "v_proj": rows}
        parts = tuple(Part(name=f"{attn}.{name}.weight", rows=size) for name, size in sizes.items())
        params += [
            linear(f"{attn}.qkv_proj.weight", hidden + 2 * rows, hidden, parts=parts),
            linear(f"{attn}.o_proj.weight", hidden, hidden),
            linear(f"{mlp}.gate_proj.weight", inner, hidden),
            linear(f"{mlp}.up_proj.weight", inner, hidden),
            linear(f"{mlp}.down_proj.weight", hidden, inner),
            vector(f"layers.{i}.attn_norm.weight", hidden),
            vector(f"layers.{i}.mlp_norm.weight", hidden),
        ]
    return params


LLAMA = NameTable(
    entries={
        "embed_tokens.weight": "model.embed_tokens.weight",
        "final_norm.weight": "model.norm.weight",
        "lm_head.weight": "lm_head.weight",
        "layers.{i}.attn_norm.weight": "model.layers.{i}.input_layernorm.weight",
        "layers.{i}.mlp_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
    }
    | {f"layers.{{i}}.attn.{n}.weight": f"model.layers.{{i}}.self_attn.{n}.weight" for n in
       ("q_proj", "k_proj", "v_proj", "o_proj")}
    | {f"layers.{{i}}.mlp.{n}.weight": f"model.layers.{{i}}.mlp.{n}.weight" for n in
       ("gate_proj", "up_proj", "down_proj")}
)  # fmt: skip


@pytest.mark.parametrize("max_shard_size", ["10GB", "40KB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpoints_of_transformers(tmp_path: Path, max_shard_size: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    num_files = len(list(tmp_path.glob("*.safetensors")))
    assert num_files == 1 if max_shard_size == "10GB" else num_files > 2
    source = open_weights(tmp_path)
    got = values(CheckpointParams(llama_params(config), source, LLAMA))
    state = {name: tensor.float().numpy() for name, tensor in model.state_dict().items()}
    np.testing.assert_array_equal(got["embed_tokens.weight"], state["model.embed_tokens.weight"])
    np.testing.assert_array_equal(got["lm_head.weight"], state["lm_head.weight"])
    for i in range(2):
        names = [f"model.layers.{i}.self_attn.{part}_proj.weight" for part in "qkv"]
        qkv = np.concatenate([state[name] for name in names])
        np.testing.assert_array_equal(got[f"layers.{i}.attn.qkv_proj.weight"], qkv)
        down = state[f"model.layers.{i}.mlp.down_proj.weight"]
        np.testing.assert_array_equal(got[f"layers.{i}.mlp.down_proj.weight"], down)
    assert sum(array.size for array in got.values()) == sum(array.size for array in state.values())
    source.close()


def test_a_big_file_is_never_copied(tmp_path: Path) -> None:
    tensors = {f"w{n}": np.zeros((512, 1024), dtype=np.float32) for n in range(9)}
    save_file(tensors, tmp_path / "model.safetensors")
    tracemalloc.start()
    source = open_weights(tmp_path)
    for item in CheckpointParams([linear(f"w{n}", 512, 1024) for n in range(9)], source, SIMPLE):
        assert item.tensors[0].data.sum() == 0
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    source.close()
    assert peak < 2**20
