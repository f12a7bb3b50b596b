"""Tiny checkpoints of transformers as GGUF files, as llama.cpp's converter writes them.

Metadata is what that converter wrote (gguf_metadata.json, recorded with the one in llama-cpp-python 0.3.36; those of
Qwen-VL, Qwen3.5, EmbeddingGemma and InternLM 2 are others' with their name; those from exaone_gguf on are what its
source says); names of tensors are the gguf package's;
how their numbers are rearranged stands here, and was compared with that converter's files. Heads of Qwen3.5 are
reordered as the converter's source says.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

Data = npt.NDArray[Any]
Tensors = Mapping[str, Data]
METADATA: Mapping[str, Mapping[str, Any]] = json.loads(Path(__file__).with_name("gguf_metadata.json").read_text())
"""Case -> metadata, keys of an architecture without its name before them."""
PAIRS = (
    "llama", "granite", "minicpm", "granitemoe", "granitehybrid", "arcee", "smollm3", "olmo", "mistral3", "internlm2",
)  # fmt: skip
"""Architectures whose query and key rows are stored for interleaved rope."""
_TILED = ("qwen35", "qwen35moe")
_ONE_MORE = ("gemma", "gemma2", "gemma3", "gemma-embedding", "nemotron", "qwen3next", *_TILED)
_MAMBA2 = ("mamba2", "granitehybrid", "nemotron_h", "nemotron_h_moe", "falcon-h1")
_SPELLINGS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj", "v1": "up_proj"}
_RENAMES = (
    (r"\bdt_bias$", "dt_proj.bias"),
    (r"(sinks|correct_output_scale|layer_scalar|per_expert_scale)$", r"\1.weight"),
    (r"\.attn_sub_norm\.", ".inner_attn_ln."),
    (r"\.ffn_sub_norm\.", ".ffn_layernorm."),
    (r"\.attention_sink_bias$", ".sinks.weight"),
    (r"\.block_sparse_moe\.(\w+_proj)", r".mlp.\1"),
    (r"(expert_bias|e_score_correction)(_bias)?$", r"\1.bias"),
)


def write_gguf(case: str, folder: Path, file: Path, more: Mapping[str, Any] | None = None) -> None:
    """The model of a folder as a file, with the metadata recorded for the case and `more` keys."""
    keys = {**METADATA[case], **(more or {})}
    arch = keys["general.architecture"]
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(file, arch)
    writer.add_token_list([str(i) for i in range(131)])
    for key, value in keys.items():
        if key != "general.architecture":
            _add(writer, key if key.startswith(("general.", "tokenizer.")) else f"{arch}.{key}", value)
    tensors = load_file(folder / "model.safetensors")
    if arch == "apertus":  # whose activations' numbers are metadata
        for kind in ("alpha_p", "alpha_n", "beta", "eps"):
            found = [tensors.pop(f"model.layers.{i}.mlp.act_fn.{kind}") for i in range(keys["block_count"])]
            writer.add_array(f"xielu.{kind}", [float(np.ravel(value)[0]) for value in found])
    for name, data in stored_tensors(arch, keys, config, tensors):
        writer.add_tensor(name, np.ascontiguousarray(data, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def stored_tensors(
    arch: str, keys: Mapping[str, Any], config: Mapping[str, Any], tensors: Tensors
) -> Iterator[tuple[str, Data]]:
    """Names and numbers as llama.cpp has them."""
    code = next(code for code, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(code, keys["block_count"])
    for name, data in _extra(keys, config):
        yield name, data
    for name, data in _stacked(tensors).items():
        for pattern, spelling in _RENAMES:
            name = re.sub(pattern, spelling, name)
        for part, values in _rearranged(arch, keys, config, name, data):
            direct = part.startswith("blk.")
            stored = part if direct else names.get_name(part, try_suffixes=(".weight", ".bias"))
            assert stored is not None, part
            yield stored, values


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds: Mapping[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    if isinstance(value, list):
        writer.add_array(key, value)
    else:
        kinds[type(value)](key, value)


def _stacked(tensors: Tensors) -> dict[str, Data]:
    """Tensors with the experts of a layer in one, [experts, out, in], gate and up apart."""
    found: dict[str, Data] = {}
    experts: dict[str, list[tuple[int, Data]]] = {}
    for name, data in tensors.items():
        if match := re.fullmatch(r"(.*)\.experts\.(\d+)\.(\w+)\.weight", name):
            block = match[1].replace(".block_sparse_moe", ".mlp")
            piece = _SPELLINGS.get(match[3], match[3])
            experts.setdefault(f"{block}.experts.{piece}.weight", []).append((int(match[2]), data))
        elif match := re.fullmatch(r"(.*\.altup_\w*projections)\.(\d+)\.weight", name):
            experts.setdefault(f"{match[1]}.weight", []).append((int(match[2]), data))
        else:
            found[name] = data
    return found | {
        name: np.stack([data for _, data in sorted(parts, key=lambda part: part[0])])
        for name, parts in experts.items()
    }


def _rearranged(
    arch: str, keys: Mapping[str, Any], config: Mapping[str, Any], name: str, data: Data
) -> Iterator[tuple[str, Data]]:
    """What becomes of one tensor, by its name in transformers or, beginning with blk., in llama.cpp."""
    layer = re.search(r"\.(\d+)\.", name)
    at = f"blk.{layer[1]}" if layer else ""
    num_heads, hidden_size = keys.get("attention.head_count", 1), keys["embedding_length"]
    leaf = name.rpartition(".")[2]
    if arch in ("bert", "nomic-bert", "modern-bert", "eurobert"):
        if "pooler" in name:
            return
        if "position_embeddings" in name and config["model_type"] in ("roberta", "xlm-roberta"):
            data = data[config["pad_token_id"] + 1 :]
    if arch in _ONE_MORE and name.endswith("norm.weight") and "linear_attn" not in name:
        data = data + 1
    if arch in PAIRS and re.search(r"\.[qk]_proj\.(weight|bias)$", name):
        heads = num_heads if ".q_proj." in name else max(np.ravel(keys.get("attention.head_count_kv", num_heads)))
        rows = data.reshape(heads, 2, -1, *data.shape[1:])
        data = rows.swapaxes(1, 2).reshape(data.shape)
    if arch == "gpt2" and re.search(r"\.(c_attn|c_proj|c_fc)\.weight$", name):
        data = data.T
    if arch in ("gptneox", "bloom", "falcon") and "query_key_value" in name:
        groups = keys.get("attention.head_count_kv", num_heads) if arch == "falcon" else num_heads
        head_dim = hidden_size // num_heads
        rows = data.reshape(groups, -1, head_dim, *data.shape[1:])
        parts = (rows[:, :-2], rows[:, -2:-1], rows[:, -1:])
        data = np.concatenate([part.reshape(-1, *data.shape[1:]) for part in parts])
    if arch == "bloom":
        name = name.removeprefix("transformer.")
    if name.endswith("A_log"):
        data = -np.exp(data)
    if "conv1d.weight" in name or name.endswith("conv.conv.weight"):
        data = data.reshape(1, -1, 1, data.shape[-1]) if arch == "kimi-linear" else data[:, 0]
    if arch in _MAMBA2:
        if leaf in ("A_log", "D"):
            data = data[:, None]
        elif re.search(r"\.(mixer|mamba)\.norm\.weight$", name):
            data = data.reshape(keys["ssm.group_count"], -1)
    if arch == "falcon-h1":
        data = data * _multiplier(name, config)
    if arch in _TILED and ".linear_attn." in name:
        data = _tiled(keys, name, data)
    match name.rsplit(".", 2)[1:] if "." in name else [name]:
        case ["kv_b_proj", "weight"] if arch != "minicpm3":
            rank = keys["attention.kv_lora_rank"]
            values = keys["attention.value_length_mla"]
            heads = data.reshape(num_heads, -1, rank)
            yield f"{at}.attn_k_b.weight", heads[:, :-values].swapaxes(1, 2)
            yield f"{at}.attn_v_b.weight", heads[:, -values:]
        case ["in_proj_qkvz", "weight"]:
            groups, size = keys["ssm.group_count"], keys["ssm.state_size"]
            rows = data.reshape(groups, -1, hidden_size)
            half = (rows.shape[1] - 2 * size) // 2
            pieces = np.split(rows, [size, 2 * size, 2 * size + half], axis=1)
            q, k, v, z = (piece.reshape(-1, hidden_size) for piece in pieces)
            yield f"{at}.attn_qkv.weight", np.concatenate([q, k, v])
            yield f"{at}.attn_gate.weight", z
        case ["experts", "gate_up_proj"] if arch == "gemma4":
            yield f"{at}.ffn_gate_up_exps.weight", data
        case ["experts", "down_proj"] if arch == "gemma4":
            yield f"{at}.ffn_down_exps.weight", data
        case ["per_expert_scale", "weight"]:
            yield f"{at}.ffn_down_exps.scale", data
        case ["router", "scale"]:
            yield f"{at}.ffn_gate_inp.scale", data
        case ["experts", "gate_up_proj"] if arch in ("qwen35moe", "mistral4"):
            for piece, half in zip(("gate", "up"), np.split(data, 2, axis=1), strict=True):
                yield f"{at}.ffn_{piece}_exps.weight", half
        case ["experts", "down_proj"] if arch in ("qwen35moe", "mistral4"):
            yield f"{at}.ffn_down_exps.weight", data
        case ["experts", "gate_up_proj"]:  # [experts, in, out], interleaved or not
            halves = (data[..., ::2], data[..., 1::2]) if arch == "gpt-oss" else np.split(data, 2, axis=-1)
            for piece, half in zip(("gate", "up"), halves, strict=True):
                yield f"{at}.ffn_{piece}_exps.weight", half.swapaxes(1, 2)
        case ["experts", "down_proj"]:
            yield f"{at}.ffn_down_exps.weight", data.swapaxes(1, 2)
        case ["experts", "gate_up_proj_bias"]:
            yield f"{at}.ffn_gate_exps.bias", data[:, ::2]
            yield f"{at}.ffn_up_exps.bias", data[:, 1::2]
        case ["experts", "down_proj_bias"]:
            yield f"{at}.ffn_down_exps.bias", data
        case ["input_linear", "weight"]:
            kind = "exps" if data.ndim == 3 else "shexp" if keys.get("expert_count") else ""
            for piece, half in zip(("gate", "up"), np.split(data, 2, axis=-2), strict=True):
                yield f"{at}.ffn_{piece}_{kind}.weight".replace("_.", "."), half
        case ["output_linear", "weight"]:
            kind = "exps" if data.ndim == 3 else "shexp" if keys.get("expert_count") else ""
            yield f"{at}.ffn_down_{kind}.weight".replace("_.", "."), data
        case ["mlp", "w1" | "v1" | "w2" as piece]:
            rows = data.reshape(keys["expert_count"], -1, hidden_size)
            piece = _SPELLINGS[piece].removesuffix("_proj")
            yield f"{at}.ffn_{piece}_exps.weight", rows.swapaxes(1, 2) if piece == "down" else rows
        case _ if arch == "falcon-h1" and "pre_ff_layernorm" in name:
            yield f"{at}.ffn_norm", data
        case ["up_proj" | "down_proj" as piece, "weight"] if ".mixer.experts." in name:
            yield f"{at}.ffn_{piece.removesuffix('_proj')}_exps.weight", data
        case _:
            yield name, data


def _tiled(keys: Mapping[str, Any], name: str, data: Data) -> Data:
    """Heads of values in turn of the key heads that they read, instead of those of one key head together."""
    key_heads, heads, size = keys["ssm.group_count"], keys["ssm.time_step_rank"], keys["ssm.inner_size"]
    if "in_proj_qkv" in name or "conv1d" in name:
        first = 2 * key_heads * keys["ssm.state_size"]
        return np.concatenate([data[:first], _tiled(keys, "in_proj_z", data[first:])])
    if "out_proj" in name:
        return _tiled(keys, "in_proj_z", data.T).T
    if ".norm." in name:
        return data
    rows = size // heads if "in_proj_z" in name else 1
    shaped = data.reshape(key_heads, heads // key_heads, rows, *data.shape[1:])
    return shaped.swapaxes(0, 1).reshape(data.shape)


def _multiplier(name: str, config: Mapping[str, Any]) -> Any:
    """What the converter of Falcon-H1 puts into the weights."""
    gate, down = config["mlp_multipliers"]
    scale = config["attention_in_multiplier"]
    size, keys = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    parts = np.repeat(config["ssm_multipliers"], (size, size, keys, keys, config["mamba_n_heads"]))
    for end, factor in (
        ("down_proj.weight", down),
        ("gate_proj.weight", gate),
        ("q_proj.weight", scale),
        ("k_proj.weight", scale * config["key_multiplier"]),
        ("v_proj.weight", scale),
        ("o_proj.weight", config["attention_out_multiplier"]),
        ("out_proj.weight", config["ssm_out_multiplier"]),
        ("in_proj.weight", parts[:, None] * config["ssm_in_multiplier"]),
        ("lm_head.weight", config["lm_head_multiplier"]),
        ("embed_tokens.weight", config["embedding_multiplier"]),
    ):
        if name.endswith(end) and not (end == "o_proj.weight" and name.endswith("to_proj.weight")):
            return factor
    return 1.0


def _extra(keys: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[tuple[str, Data]]:
    """Factors of rope, which the converter stores as tensors."""
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        from transformers import AutoConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        theirs = AutoConfig.for_model(**config)
        dim = keys["rope.dimension_count"]
        plain = rope["rope_theta"] ** -(np.arange(0, dim, 2) / dim)
        yield "rope_freqs.weight", plain / ROPE_INIT_FUNCTIONS["llama3"](theirs)[0].numpy()
    elif rope.get("rope_type") == "longrope":
        yield "rope_factors_long.weight", np.array(rope["long_factor"])
        yield "rope_factors_short.weight", np.array(rope["short_factor"])
    elif keys["general.architecture"] == "gemma4":
        dim = keys["attention.key_length"]
        turned = int(dim * rope["full_attention"]["partial_rotary_factor"] / 2)
        yield "rope_freqs.weight", np.array([1.0] * turned + [1e30] * (dim // 2 - turned))
