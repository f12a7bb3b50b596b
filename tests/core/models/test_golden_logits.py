"""Every family against transformers: tiny random checkpoints, read from files, logits compared in float32."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.core.kv.groups import KVGroup, kv_groups
from headrace.core.models.config import HFConfig, read_config
from headrace.core.models.declare import declare_params
from headrace.core.models.decoder import compute_logits, decoder
from headrace.core.models.gguf_config import config_from_gguf, gguf_names
from headrace.core.models.registry import find_family, read_spec
from headrace.core.models.rope import rope_variants
from headrace.core.models.spec import ModelSpec
from headrace.core.ops import OpTable
from headrace.core.stages import Array, ForwardBatch, KVCaches
from headrace.core.weights.dequantize import to_float32
from headrace.core.weights.gguf import GGUFSource
from headrace.core.weights.load import CheckpointParams
from headrace.core.weights.open import open_weights
from headrace.core.weights.source import HostTensor, ParamSource

TOLERANCE = 2e-4
"""Largest difference of logits over their standard deviation; float32 noise is 1e-6 to 7e-5, real errors 0.1."""
OPS = OpTable()

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32, "rope_theta": 10000.0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 32,
    "short_factor": [1.0 + 0.1 * i for i in range(6)], "long_factor": [2.0 + 0.3 * i for i in range(6)],
    "partial_rotary_factor": 0.75,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}


@dataclass(frozen=True)
class Case:
    """One tiny checkpoint. config: what differs from TINY."""

    name: str
    model_type: str
    config: Mapping[str, Any]
    has_sdpa: bool = True
    lengths: tuple[int, ...] = (23, 9)
    """tokens of each sequence; beyond the window of 6"""


TINY: Mapping[str, Any] = {
    "vocab_size": 131, "hidden_size": 64, "intermediate_size": 88, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
TINY_GPT2: Mapping[str, Any] = {
    "vocab_size": 131, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
GEMMA: Mapping[str, Any] = {"head_dim": 24, "sliding_window": 6, "query_pre_attn_scalar": 20}

CASES = (
    Case("llama", "llama", {}),
    Case("llama_tied", "llama", {"tie_word_embeddings": True}),
    Case("llama_biases", "llama", {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
    Case("llama_one_kv_head", "llama", {"num_key_value_heads": 1}),
    Case("llama_head_dim", "llama", {"head_dim": 24, "num_key_value_heads": 4}),
    Case("llama_linear", "llama", {"rope_parameters": LINEAR}),
    Case("llama_llama3", "llama", {"rope_parameters": LLAMA3}, lengths=(50, 9)),
    Case("llama_yarn", "llama", {"rope_parameters": YARN}),
    Case("mistral", "mistral", {"sliding_window": None}),
    Case("mistral_window", "mistral", {"sliding_window": 6, "head_dim": 24}),
    Case("qwen2", "qwen2", {}),
    Case("qwen2_tied_yarn", "qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    Case("qwen2_window", "qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}),
    Case("qwen3", "qwen3", {"head_dim": 32}),
    Case("qwen3_tied_bias", "qwen3", {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}),
    Case(
        "gemma2", "gemma2", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 8.0}, has_sdpa=False
    ),
    Case("gemma2_untied", "gemma2", {**GEMMA, "tie_word_embeddings": False}, has_sdpa=False),
    Case("gemma3_text", "gemma3_text", {**GEMMA, "tie_word_embeddings": False, "layer_types": None}),
    Case(
        "gemma3_text_two_ropes",
        "gemma3_text",
        {
            **GEMMA,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "full_attention": {**LINEAR, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
            "final_logit_softcapping": 8.0,
        },
    ),
    Case("phi3", "phi3", {"sliding_window": None}),
    Case("phi3_window", "phi3", {"sliding_window": 6}),
    Case(
        "phi3_partial_longrope",
        "phi3",
        {"original_max_position_embeddings": 32, "rope_parameters": LONGROPE},
        lengths=(50, 40, 9, 32, 33),
    ),
    Case("gpt2", "gpt2", {}),
    Case(
        "gpt2_inverse_layer",
        "gpt2",
        {"scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": False, "n_inner": 80},
    ),
    Case("gpt2_unscaled", "gpt2", {"scale_attn_weights": False, "activation_function": "relu"}),
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads on a shared machine made a forward pass a hundred times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logits_equal_those_of_transformers(case: Case, tmp_path: Path) -> None:
    folder, sequences = make_checkpoint(case, tmp_path), make_sequences(case)
    model = load_folder(folder)
    expected = hf_logits(folder, "eager", sequences)
    if case.has_sdpa:
        for sdpa, eager in zip(hf_logits(folder, "sdpa", sequences), expected, strict=True):
            assert_close(sdpa, eager)
    dense = [model.logits([ids], block_size=64)[0] for ids in sequences]
    for got, want in zip(dense, expected, strict=True):
        assert_close(got, want)
    # All sequences in one batch, cut into chunks, over blocks in random order: prefill, decode and their mixture.
    for chunk, block_size in ((0, 4), (1, 16), (5, 4), (16, 2)):
        for got, want in zip(
            model.logits(sequences, chunk=chunk, block_size=block_size, seed=chunk + 1), expected, strict=True
        ):
            assert_close(got, want)


@pytest.mark.parametrize("name", ["llama", "gemma3_text_two_ropes", "gpt2"])
def test_a_changed_weight_changes_the_logits(name: str, tmp_path: Path) -> None:
    """The comparison can fail: any parameter whose values are off by a few percent is seen."""
    case = next(case for case in CASES if case.name == name)
    model = load_folder(make_checkpoint(case, tmp_path))
    ids = make_sequences(case)[0]
    before = model.logits([ids], block_size=64)[0]
    generator = torch.Generator().manual_seed(11)
    for param, value in model.params.items():
        original = value.clone()
        value.mul_(1 + 0.05 * torch.randn(value.shape, generator=generator))
        after = model.logits([ids], block_size=64)[0]
        value.copy_(original)
        assert ((after - before).abs().max() / before.std()).item() > TOLERANCE, param


# ---- GGUF -----------------------------------------------------------------------------------------------------
GGUF_ARCHS: Mapping[str, str] = {
    "llama": "LLAMA", "mistral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3", "gemma2": "GEMMA2",
    "gemma3_text": "GEMMA3", "phi3": "PHI3", "gpt2": "GPT2",
}  # fmt: skip
GGUF_CASES = (
    "llama", "llama_tied", "llama_linear", "llama_llama3", "llama_yarn", "mistral_window", "qwen2", "qwen3",
    "gemma2_gguf", "gemma3_text_gguf", "phi3_window", "phi3_partial_longrope", "gpt2", "gpt2_inner",
)  # fmt: skip
_GEMMA_GGUF = {**GEMMA, "query_pre_attn_scalar": 24, "num_hidden_layers": 7}
GGUF_ONLY_CASES = (
    # llama.cpp knows Gemma's query_pre_attn_scalar as head_dim, and has one pattern of layers for each family.
    Case("gemma2_gguf", "gemma2", {**_GEMMA_GGUF, "attn_logit_softcapping": 2.0}),
    Case("gemma3_text_gguf", "gemma3_text", {**_GEMMA_GGUF, "tie_word_embeddings": False}),
    Case("gpt2_inner", "gpt2", {"tie_word_embeddings": False, "n_inner": 80}),
)


@pytest.mark.parametrize("name", GGUF_CASES)
def test_logits_of_a_gguf_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    case = next(case for case in CASES + GGUF_ONLY_CASES if case.name == name)
    folder, sequences = make_checkpoint(case, tmp_path), make_sequences(case)
    write_gguf(folder, tmp_path / "model.gguf")
    source = GGUFSource(tmp_path / "model.gguf")
    spec = read_spec(config_from_gguf(source.metadata, source.names(), source.read))
    model = PagedModel(spec, place(CheckpointParams(declare_params(spec), source, gguf_names(spec))))
    expected = hf_logits(folder, "eager", sequences)
    for got, want in zip(model.logits(sequences, block_size=4, chunk=7), expected, strict=True):
        assert_close(got, want)
    source.close()


def write_gguf(folder: Path, file: Path) -> None:
    """A folder of transformers as llama.cpp's converter would write it; the names are the gguf package's."""
    import gguf
    from safetensors.numpy import load_file

    config = read_config(folder)
    kind = config.model_type
    arch = getattr(gguf.MODEL_ARCH, GGUF_ARCHS[kind])
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[arch])
    sizes = ("n_positions", "n_embd", "n_layer", "n_head") if kind == "gpt2" else (
        "max_position_embeddings", "hidden_size", "num_hidden_layers", "num_attention_heads",
    )  # fmt: skip
    length, hidden_size, num_layers, num_heads = (config.size(key) for key in sizes)
    writer.add_file_type(0)
    writer.add_vocab_size(config.size("vocab_size"))
    writer.add_context_length(length)
    writer.add_embedding_length(hidden_size)
    writer.add_block_count(num_layers)
    writer.add_head_count(num_heads)
    if kind == "gpt2":
        writer.add_feed_forward_length(config.integer("n_inner", 4 * hidden_size))
        writer.add_layer_norm_eps(config.number("layer_norm_epsilon"))
    else:
        add_llama_keys(writer, config, head_dim=config.get("head_dim") or hidden_size // num_heads)
    names = gguf.get_tensor_name_map(arch, num_layers)
    for name, data in load_file(folder / "model.safetensors").items():
        if "gemma" in kind and name.endswith("norm.weight"):
            data = data + 1
        if kind in ("llama", "mistral") and (".q_proj." in name or ".k_proj." in name):
            heads = num_heads if ".q_proj." in name else config.size("num_key_value_heads")
            rows = data.reshape(heads, 2, data.shape[0] // heads // 2, *data.shape[1:])
            data = rows.swapaxes(1, 2).reshape(data.shape)
        if kind == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
            data = data.T
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        writer.add_tensor(stored, np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_llama_keys(writer: Any, config: HFConfig, head_dim: int) -> None:
    """Metadata of every architecture but gpt2, rope scaling included."""
    import gguf
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    writer.add_feed_forward_length(config.size("intermediate_size"))
    writer.add_head_count_kv(config.size("num_key_value_heads"))
    writer.add_layer_norm_rms_eps(config.number("rms_norm_eps"))
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if config.get("sliding_window"):
        writer.add_sliding_window(config.size("sliding_window"))
    for key, add in (
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
    ):
        if config.get(key):
            add(config.number(key))
    rope = config.get("rope_parameters")
    if config.model_type == "gemma3_text":
        writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        return
    rotary_dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(rotary_dim)
    theirs = AutoConfig.from_pretrained(Path(config.file).parent)
    length = rope.get("original_max_position_embeddings")
    match rope["rope_type"]:
        case "linear" | "yarn" as name:
            writer.add_rope_scaling_type(gguf.RopeScalingType(name))
            writer.add_rope_scaling_factor(rope["factor"])
            if length:
                writer.add_rope_scaling_orig_ctx_len(length)
        case "llama3":
            # The converter stores what the frequencies are divided by.
            plain = rope["rope_theta"] ** -(np.arange(0, rotary_dim, 2) / rotary_dim)
            scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](theirs)
            writer.add_tensor("rope_freqs.weight", (plain / scaled.numpy()).astype(np.float32))
        case "longrope":
            _, attention_factor = ROPE_INIT_FUNCTIONS["longrope"](theirs)
            writer.add_rope_scaling_orig_ctx_len(length)
            writer.add_rope_scaling_attn_factors(attention_factor)
            writer.add_tensor("rope_factors_long.weight", np.array(rope["long_factor"], np.float32))
            writer.add_tensor("rope_factors_short.weight", np.array(rope["short_factor"], np.float32))


# ---- our side -------------------------------------------------------------------------------------------------
@dataclass
class PagedModel:
    """A spec with its parameters on torch, run through the definitions of the ops."""

    spec: ModelSpec
    params: Mapping[str, Array]

    def logits(
        self, sequences: Sequence[Sequence[int]], *, block_size: int, chunk: int = 0, seed: int | None = None
    ) -> list[torch.Tensor]:
        """Logits of every token of every sequence: all run together, `chunk` tokens a step (0: all at once).

        With a seed, blocks are handed out in random order and entries that left a window point anywhere.
        """
        groups = kv_groups(self.spec, max_model_len=max(map(len, sequences)))
        cache = PagedCache(self.spec, groups, block_size, sequences, seed)
        done, out = [0] * len(sequences), [list[torch.Tensor]() for _ in sequences]
        while any(n < len(ids) for n, ids in zip(done, sequences, strict=True)):
            ends = [min(len(ids), n + (chunk or len(ids))) for n, ids in zip(done, sequences, strict=True)]
            batch = cache.batch(sequences, done, ends, rope_variants(self.spec))
            with torch.inference_mode():
                hidden_states, cache.kv = decoder(OPS, self.spec, self.params, cache.kv, batch)
                logits = compute_logits(OPS, self.spec, self.params, OPS.gather(hidden_states, batch.logits_indices))
            counts = [end - start for start, end in zip(done, ends, strict=True)]
            for r, part in enumerate(logits.split(counts)):
                out[r].append(part)
            done = ends
        return [torch.cat(parts) for parts in out]


class PagedCache:
    """Caches of all layers, block tables of all groups, and the batches that use them."""

    def __init__(
        self,
        spec: ModelSpec,
        groups: Sequence[KVGroup],
        block_size: int,
        sequences: Sequence[Sequence[int]],
        seed: int | None,
    ) -> None:
        self.groups, self.block_size = groups, block_size
        self.random = None if seed is None else np.random.default_rng(seed)
        counts = [-(-len(ids) // block_size) for ids in sequences]
        self.num_blocks = 1 + sum(counts)
        self.tables = [self._table(counts) for _ in groups]
        group_of_layer = [
            next(g for g, group in enumerate(groups) if i in group.layer_indices) for i in range(spec.num_layers)
        ]
        self.kv = KVCaches(
            layers=[
                OPS.new_kv_cache(
                    num_blocks=self.num_blocks,
                    block_size=block_size,
                    num_kv_heads=layer.attn.num_kv_heads,
                    head_dim=layer.attn.head_dim,
                    dtype="float32",
                    device="cpu",
                )
                for layer in spec.layers
            ],
            group_of_layer=group_of_layer,
        )

    def _table(self, counts: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
        ids = np.arange(1, self.num_blocks, dtype=np.int32)
        if self.random is not None:
            self.random.shuffle(ids)
        table = np.full((len(counts), max(counts) + 1), -1, np.int32)
        for r, part in enumerate(np.split(ids, np.cumsum(counts)[:-1])):
            table[r, : len(part)] = part
        return table

    def batch(
        self, sequences: Sequence[Sequence[int]], starts: Sequence[int], ends: Sequence[int], original_len: int
    ) -> ForwardBatch:
        """The step that computes tokens [start, end) of each sequence."""
        spans = list(zip(starts, ends, strict=True))
        rows = np.concatenate([np.full(end - start, r) for r, (start, end) in enumerate(spans)])
        positions = np.concatenate([np.arange(start, end) for start, end in spans])
        slots, tables = [], []
        for group, table in zip(self.groups, self.tables, strict=True):
            slots.append(table[rows, positions // self.block_size] * self.block_size + positions % self.block_size)
            table = table.copy()
            if group.window and self.random is not None:
                for r, start in enumerate(starts):
                    gone = max(0, start - group.window + 1) // self.block_size
                    table[r, :gone] = self.random.integers(0, self.num_blocks, gone)
            tables.append(table)
        is_long = np.array([original_len > 0 and len(ids) > original_len for ids in sequences])
        return ForwardBatch(
            input_ids=on_device([sequences[r][p] for r, p in zip(rows, positions, strict=True)]),
            positions=on_device(positions),
            query_start_loc=on_device(np.cumsum([0, *(end - start for start, end in spans)])),
            seq_lens=on_device(ends),
            block_tables=[on_device(table) for table in tables],
            slot_mappings=[on_device(slot) for slot in slots],
            logits_indices=on_device(np.arange(len(rows))),
            rope_rows=on_device(is_long[rows]),
        )


def on_device(values: Any) -> Array:
    """int32 through ops.to_device."""
    return OPS.to_device(np.asarray(values, dtype=np.int32), device="cpu")


def load_folder(folder: Path) -> PagedModel:
    """A checkpoint folder through config, family, declaration and name table."""
    config = read_config(folder)
    spec = read_spec(config)
    source = open_weights(folder)
    table = find_family(spec.model_type).weights
    return PagedModel(spec, place(CheckpointParams(declare_params(spec), source, table)))


def place(source: ParamSource) -> dict[str, Array]:
    """Each parameter as a runner puts it on a device."""
    placed: dict[str, Array] = {}
    for loaded in source:
        if loaded.param.kind in ("linear", "embedding"):
            placed[loaded.param.name] = OPS.pack_linear(loaded.tensors, dtype="float32", device="cpu")
        else:
            data = np.concatenate([to_float32(tensor) for tensor in loaded.tensors])
            host = HostTensor(name=loaded.param.name, dtype="float32", shape=data.shape, data=data)
            placed[loaded.param.name] = OPS.upload(host, dtype="float32", device="cpu")
    return placed


# ---- their side -----------------------------------------------------------------------------------------------
def make_checkpoint(case: Case, folder: Path) -> Path:
    """A tiny random model of transformers, saved as people save them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tiny = TINY_GPT2 if case.model_type == "gpt2" else TINY
    config = AutoConfig.for_model(case.model_type, **{**tiny, **case.config})
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation="eager", dtype=torch.float32)
    randomise(model)
    model.save_pretrained(folder)
    return folder


def randomise(model: torch.nn.Module) -> None:
    """Fresh models have unit norms, zero biases and flat attention, which would hide errors."""
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            is_norm_weight = name.endswith("weight")
            values = 0.2 * values + parameter.data.mean().round() if is_norm_weight else 0.3 * values
        elif "embed" in name or "wte" in name or "wpe" in name:
            values = 0.5 * values
        else:
            fan_in = parameter.shape[0] if "c_" in name else parameter.shape[1]
            is_query_or_key = any(part in name for part in ("q_proj", "k_proj", "qkv_proj", "c_attn"))
            values = values * (3.0 if is_query_or_key else 1.0) / fan_in**0.5
        parameter.data.copy_(values)


def make_sequences(case: Case) -> list[list[int]]:
    """Random token ids of the case's lengths."""
    random = np.random.default_rng(3)
    return [random.integers(3, 131, length).tolist() for length in case.lengths]


def hf_logits(folder: Path, attention: str, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Logits of each sequence by transformers, loaded from the same files."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention, dtype=torch.float32)
    with torch.inference_mode():
        return [model.eval()(torch.tensor([list(ids)]), use_cache=False).logits[0] for ids in sequences]


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Within TOLERANCE of the standard deviation, and the same most likely tokens."""
    error = ((got - want).abs().max() / want.std()).item()
    assert error < TOLERANCE, error
    assert torch.equal(got.argmax(-1), want.argmax(-1))
