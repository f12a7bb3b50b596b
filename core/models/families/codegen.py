"""CodeGen 1 and 2: GPT-J with a fused qkv in four groups of query, value and key."""

from ...weights.names import Stored
from ..config import HFConfig
from ..name_tables import IGNORE, name_table
from ..spec import ModelSpec
from .gptj import gptj_like

WEIGHTS = name_table(
    {
        "embed_tokens": "transformer.wte",
        "attn_norm": "ln_1",
        "attn.qkv_proj": Stored(name="attn.qkv_proj", interleaved=True, groups=4, order=(0, 2, 1)),
        "attn.o_proj": "attn.out_proj",
        "mlp.up_proj": "mlp.fc_in",
        "mlp.down_proj": "mlp.fc_out",
        "final_norm": "transformer.ln_f",
        "lm_head": "lm_head",
    },
    layer="transformer.h.{i}.",
    base_prefix="transformer.",
    ignore=(*IGNORE, r"\.attn\.(masked_|causal_)?(bias|mask)$"),
)


def to_spec(config: HFConfig) -> ModelSpec:
    """GPT-J."""
    return gptj_like(config)
