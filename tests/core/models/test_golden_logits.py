"""Every family against transformers: tiny random checkpoints, read from files, logits compared in float32."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from golden_cases import CASES as MORE_CASES
from golden_cases import FIRST as CASES
from golden_cases import FLAGS, GEMMA
from headrace.core.models.config import HFConfig, read_config
from headrace.core.models.declare import declare_params
from headrace.core.models.gguf_config import config_from_gguf, gguf_names
from headrace.core.models.registry import read_spec
from headrace.core.weights.gguf import GGUFSource
from headrace.core.weights.load import CheckpointParams
from headrace.core.weights.unstacked import UnstackedSource
from paged_model import (
    TOLERANCE,
    Case,
    PagedModel,
    assert_close,
    check_logits,
    hf_logits,
    load_folder,
    make_checkpoint,
    make_sequences,
    place,
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
    check_logits(case, tmp_path)


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
    "gemma3_text": "GEMMA3", "phi3": "PHI3", "gpt2": "GPT2", "olmo2": "OLMO2", "granite": "GRANITE",
    "mixtral": "LLAMA", "qwen2_moe": "QWEN2MOE", "qwen3_moe": "QWEN3MOE", "olmoe": "OLMOE", "gpt_oss": "GPT_OSS",
    "gemma": "GEMMA", "cohere": "COMMAND_R", "starcoder2": "STARCODER2",
    "stablelm": "STABLELM", "nemotron": "NEMOTRON", "phi": "PHI2", "glm4": "GLM4",
}  # fmt: skip
LAYER_NORM_KEYS = ("layer_norm_eps", "norm_epsilon", "norm_eps")
GGUF_CASES = (
    "llama", "llama_tied", "llama_linear", "llama_llama3", "llama_yarn", "mistral_window", "qwen2", "qwen3",
    "gemma2_gguf", "gemma3_text_gguf", "phi3_window", "phi3_partial_longrope", "gpt2", "gpt2_inner",
    "olmo2", "olmo2_bias", "granite", "granite_biases", "mixtral", "mixtral_full", "qwen2_moe", "qwen3_moe_gguf",
    "olmoe", "gpt_oss", "gemma_gguf", "cohere_gguf", "cohere_qk_norm", "starcoder2", "starcoder2_window",
    "stablelm", "nemotron", "nemotron_biases", "phi", "glm4",
)  # fmt: skip
_GEMMA_GGUF = {**GEMMA, "query_pre_attn_scalar": 24, "num_hidden_layers": 7}
GGUF_ONLY_CASES = (
    # llama.cpp knows Gemma's query_pre_attn_scalar as head_dim, and has one pattern of layers for each family.
    Case("gemma2_gguf", "gemma2", {**_GEMMA_GGUF, "attn_logit_softcapping": 2.0}),
    Case("gemma3_text_gguf", "gemma3_text", {**_GEMMA_GGUF, "tie_word_embeddings": False}),
    Case("gemma_gguf", "gemma", {"head_dim": 24}),  # llama.cpp has no head of its own for it
    Case("cohere_gguf", "cohere", {"attention_bias": True}),
    Case("qwen3_moe_gguf", "qwen3_moe", {"head_dim": 16, "norm_topk_prob": True}),  # llama.cpp knows no other
    Case("gpt2_inner", "gpt2", {"tie_word_embeddings": False, "n_inner": 80}),
)


@pytest.mark.parametrize("name", GGUF_CASES)
def test_logits_of_a_gguf_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    case = next(case for case in CASES + MORE_CASES + FLAGS + GGUF_ONLY_CASES if case.name == name)
    folder, sequences = make_checkpoint(case, tmp_path), make_sequences(case)
    write_gguf(folder, tmp_path / "model.gguf")
    source = GGUFSource(tmp_path / "model.gguf")
    spec = read_spec(config_from_gguf(source.metadata, source.names(), source.read))
    params = CheckpointParams(declare_params(spec), UnstackedSource(source), gguf_names(spec))
    model = PagedModel(spec, place(params))
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
    for name, data in stacked_experts(load_file(folder / "model.safetensors")).items():
        if ("gemma" in kind or kind == "nemotron") and "norm" in name and name.endswith(".weight"):
            data = data + 1
        if kind in ("llama", "mistral", "mixtral", "granite") and (".q_proj." in name or ".k_proj." in name):
            heads = num_heads if ".q_proj." in name else config.size("num_key_value_heads")
            rows = data.reshape(heads, 2, data.shape[0] // heads // 2, *data.shape[1:])
            data = rows.swapaxes(1, 2).reshape(data.shape)
        if kind == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
            data = data.T
        if name.endswith("shared_expert_gate.weight"):
            data = data[0]
        name = name + ".weight" if name.endswith("sinks") else name
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        writer.add_tensor(stored, np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def stacked_experts(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors with the experts of a layer in one, [experts, out, in], gate and up apart."""
    found: dict[str, Any] = {}
    experts: dict[str, list[Any]] = {}
    spellings = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    for name, data in tensors.items():
        if match := re.fullmatch(r"(.*\.)(?:block_sparse_moe|mlp)\.experts\.(\d+)\.(\w+)\.weight", name):
            piece = spellings.get(match[3], match[3])
            experts.setdefault(f"{match[1]}mlp.experts.{piece}.weight", []).append((int(match[2]), data))
        elif match := re.fullmatch(
            r"(.*\.experts\.)(gate_up|down)_proj(_bias)?", name
        ):  # gpt-oss: [experts, in, out]
            leaf, data = ("bias", data) if match[3] else ("weight", data.swapaxes(1, 2))
            if match[2] == "down":
                found[f"{match[1]}down_proj.{leaf}"] = data
            else:
                found |= {f"{match[1]}gate_proj.{leaf}": data[:, ::2], f"{match[1]}up_proj.{leaf}": data[:, 1::2]}
        else:
            found[name] = data
    return found | {
        name: np.stack([data for _, data in sorted(parts, key=lambda part: part[0])])
        for name, parts in experts.items()
    }


def add_llama_keys(writer: Any, config: HFConfig, head_dim: int) -> None:
    """Metadata of every architecture but gpt2, rope scaling included."""
    import gguf
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    writer.add_feed_forward_length(config.size("intermediate_size"))
    writer.add_head_count_kv(config.size("num_key_value_heads"))
    if (eps := next((config.get(key) for key in LAYER_NORM_KEYS if config.get(key)), None)) is not None:
        writer.add_layer_norm_eps(eps)
    else:
        writer.add_layer_norm_rms_eps(config.number("rms_norm_eps"))
    if experts := config.get("num_local_experts") or config.get("num_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.size("num_experts_per_tok"))
    if config.model_type == "gpt_oss":
        writer.add_expert_feed_forward_length(config.size("intermediate_size"))
    if size := config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(size)
    if size := config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(size)
    if config.get("clip_qkv"):
        writer.add_clamp_kqv(config.number("clip_qkv"))
    if config.get("logit_scale"):
        writer.add_logit_scale(config.number("logit_scale"))
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if config.get("sliding_window"):
        writer.add_sliding_window(config.size("sliding_window"))
    for key, add in (
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
        ("attention_multiplier", writer.add_attention_scale),
        ("embedding_multiplier", writer.add_embedding_scale),
        ("residual_multiplier", writer.add_residual_scale),
        ("logits_scaling", writer.add_logit_scale),
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
