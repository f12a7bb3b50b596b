"""GPT (Radford et al. 2018): GPT-2 with norms after each residual add."""

import dataclasses

from ...weights.names import Stored
from ..config import HFConfig
from ..llama_like import replace_layers
from ..name_tables import IGNORE, name_table
from ..spec import ModelSpec
from . import gpt2

WEIGHTS = name_table(
    {
        "embed_tokens": "transformer.tokens_embed",
        "embed_positions": "transformer.positions_embed",
        "attn.qkv_proj": Stored(name="attn.c_attn", transpose=True),
        "attn.o_proj": Stored(name="attn.c_proj", transpose=True),
        "attn_post_norm": "ln_1",
        "mlp.up_proj": Stored(name="mlp.c_fc", transpose=True),
        "mlp.down_proj": Stored(name="mlp.c_proj", transpose=True),
        "mlp_post_norm": "ln_2",
        "lm_head": "lm_head",
    },
    layer="transformer.h.{i}.",
    base_prefix="transformer.",
    ignore=(*IGNORE, r"\.attn\.bias$", r"position_ids$"),
)
_ACTIVATIONS = {"gelu": "gelu_new", "swish": "silu"}
"""What `afn` means."""


def to_spec(config: HFConfig) -> ModelSpec:
    """GPT-2 without a norm at the end."""
    name = config.text("afn", "gelu")
    config = config.with_defaults(n_positions=512).replace(activation_function=_ACTIVATIONS.get(name, name))
    spec = gpt2.to_spec(config.replace(n_inner=None))
    spec = replace_layers(spec, lambda layer: {"pre_norm": False, "norm_after_add": True})
    return dataclasses.replace(spec, final_norm=False)
