"""InternLM 2 and 2.5: Llama under names of its own, q, k and v fused KV head by KV head."""

from ...weights.names import Stored
from ..config import HFConfig
from ..llama_like import llama_like, with_biases
from ..name_tables import name_table
from ..spec import ModelSpec

WEIGHTS = name_table(
    {
        "embed_tokens": "model.tok_embeddings", "final_norm": "model.norm", "lm_head": "output",
        "attn_norm": "attention_norm", "attn.o_proj": "attention.wo",
        "attn.qkv_proj": Stored(name="attention.wqkv", interleaved=True),
        "mlp_norm": "ffn_norm", "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
    },
)  # fmt: skip


def to_spec(config: HFConfig) -> ModelSpec:
    """Llama; `bias` is on all of attention's projections."""
    config = config.with_defaults(max_position_embeddings=32768, hidden_act="silu")
    return with_biases(llama_like(config), attention=config.boolean("bias", False))
