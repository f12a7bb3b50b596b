"""GPT-BigCode (SantaCoder, StarCoder 1): GPT-2 with one KV head and plain linears."""

import dataclasses

from ...weights.names import Stored
from ..config import HFConfig
from ..llama_like import replace_attention
from ..name_tables import name_table
from ..spec import ModelSpec
from . import gpt2

WEIGHTS = name_table(
    {
        "embed_tokens": "transformer.wte",
        "embed_positions": "transformer.wpe",
        "attn_norm": "ln_1",
        "attn.qkv_proj": Stored(name="attn.c_attn", interleaved=True),
        "attn.o_proj": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up_proj": "mlp.c_fc",
        "mlp.down_proj": "mlp.c_proj",
        "final_norm": "transformer.ln_f",
        "lm_head": "lm_head",
    },
    layer="transformer.h.{i}.",
    base_prefix="transformer.",
    ignore=(r"\.attn\.(masked_)?bias$", r"^lm_head\.weight$"),
)


def to_spec(config: HFConfig) -> ModelSpec:
    """GPT-2, which keeps as many KV heads as heads unless `multi_query`."""
    spec = gpt2.to_spec(config.with_defaults(activation_function="gelu_pytorch_tanh"))
    if config.boolean("multi_query", True):
        spec = replace_attention(spec, num_kv_heads=1)
    return dataclasses.replace(spec, model_type=config.model_type)
