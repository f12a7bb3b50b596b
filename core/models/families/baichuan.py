"""Baichuan 1 and 2: Llama with fused qkv; 13B has ALiBi instead of rope, and 2 has a head of rows of length 1."""

import dataclasses

from ..config import HFConfig
from ..llama_like import llama_like, replace_attention, turn_only
from ..name_tables import llama_names
from ..spec import ModelSpec

WEIGHTS = llama_names({"attn.qkv_proj": "self_attn.W_pack"})
_HIDDEN_SIZE_7B, _VOCAB_SIZE_2 = 4096, 125696


def to_spec(config: HFConfig) -> ModelSpec:
    """No key says ALiBi or which head: hidden_size and vocab_size tell the sizes and the generations apart."""
    config = config.alias(max_position_embeddings="model_max_length")
    spec = llama_like(config.with_defaults(hidden_act="silu"))
    if spec.hidden_size != _HIDDEN_SIZE_7B:
        spec = replace_attention(turn_only(spec, [False] * spec.num_layers), alibi_max_bias=8.0)
    return dataclasses.replace(spec, lm_head_unit_rows=spec.vocab_size == _VOCAB_SIZE_2)
