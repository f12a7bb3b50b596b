"""Tiny configs of families that came after the first hundred, and of their flags, compared with transformers."""

from collections.abc import Mapping
from typing import Any

from paged_model import Case

GEMMA4: Mapping[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"] * 2, "head_dim": 16, "global_head_dim": 24,
    "sliding_window": 6, "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 131,
}  # fmt: skip
RECENT_CASES = (Case("gemma4", "gemma4_text", {**GEMMA4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}),)
RECENT_FLAGS = (
    Case(
        "gemma4_experts",
        "gemma4_text",
        {
            **GEMMA4, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
            "enable_moe_block": True, "top_k_experts": 2, "num_experts": 8, "moe_intermediate_size": 24,
            "final_logit_softcapping": 8.0, "tie_word_embeddings": False,
        },
    ),
)  # fmt: skip
