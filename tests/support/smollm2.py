"""The embedded default model as a checkpoint of transformers: as it is, or in other coordinates."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

State = Mapping[str, torch.Tensor]
_NAMES = (
    ("token_embd", "model.embed_tokens"),
    ("output_norm", "model.norm"),
    ("blk.", "model.layers."),
    ("attn_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
)
_HEAD = "lm_head.weight"


def smollm2_config(**overrides: Any) -> LlamaConfig:
    """transformers' config of SmolLM2-135M."""
    common = dict(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    return LlamaConfig(**{**common, **overrides})


def read_state(path: Path) -> dict[str, torch.Tensor]:
    """The weights by transformers' names, as the gguf package dequantizes them; tied, so without a head."""
    state: dict[str, torch.Tensor] = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
        name = tensor.name
        for ours, theirs in _NAMES:
            name = name.replace(ours, theirs)
        if ".q_proj." in name or ".k_proj." in name:  # stored for interleaved rope
            heads = values.shape[0] // 64
            values = values.view(heads, 32, 2, -1).transpose(1, 2).reshape(values.shape)
        state[name] = values
    return state


def rotate(state: State, seed: int = 0) -> dict[str, torch.Tensor]:
    """The same function with its residual stream turned by a random orthogonal matrix.

    Norm weights move into the products behind them, which leaves norms that commute with rotations; the head is no
    longer the table of tokens. No value of a matrix is left on the grid that the file's 4-bit blocks had.
    """
    generator = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(576, 576, generator=generator, dtype=torch.float64))[0]
    one = torch.ones(576)
    tokens, final = state["model.embed_tokens.weight"].double(), state["model.norm.weight"].double()
    turned = {"model.embed_tokens.weight": tokens @ turn, _HEAD: (tokens * final) @ turn, "model.norm.weight": one}
    for name, values in state.items():
        layer, _, leaf = name.rpartition("layers.")[2].partition(".")
        prefix = f"model.layers.{layer}."
        if leaf.endswith("layernorm.weight"):
            turned[name] = one
        elif "o_proj" in leaf or "down_proj" in leaf:
            turned[name] = turn.T @ values.double()
        elif "proj" in leaf:
            norm = "input_layernorm" if "self_attn" in leaf else "post_attention_layernorm"
            turned[name] = (values.double() * state[f"{prefix}{norm}.weight"].double()) @ turn
    return {name: values.float() for name, values in turned.items()}


def save_state(folder: Path, state: State) -> None:
    """Write a checkpoint in bfloat16."""
    folder.mkdir()
    save_file({name: values.bfloat16().contiguous() for name, values in state.items()}, folder / "model.safetensors")
    config = smollm2_config(tie_word_embeddings=_HEAD not in state)
    config.architectures, config.dtype = ["LlamaForCausalLM"], torch.bfloat16
    config.save_pretrained(folder)


def round_as(state: State, layers: gguf.GGMLQuantizationType, vocab: gguf.GGMLQuantizationType) -> State:
    """The matrices as the gguf package's quantization leaves them."""

    def rounded(name: str, values: torch.Tensor) -> torch.Tensor:
        if values.dim() == 1:
            return values
        kind = vocab if "embed" in name or name == _HEAD else layers
        return torch.from_numpy(gguf.dequantize(gguf.quantize(values.numpy(), kind), kind))

    return {name: rounded(name, values) for name, values in state.items()}
