"""GPT-J: parallel blocks under one layer norm, partial rope in pairs, a bias on the head."""

import dataclasses

from ..config import HFConfig
from ..llama_like import layer_norm, llama_like, replace_layers, replace_mlp, turn_pairs
from ..name_tables import IGNORE, name_table
from ..spec import ModelSpec

WEIGHTS = name_table(
    {
        "embed_tokens": "transformer.wte",
        "attn_norm": "ln_1",
        "attn.q_proj": "attn.q_proj",
        "attn.k_proj": "attn.k_proj",
        "attn.v_proj": "attn.v_proj",
        "attn.o_proj": "attn.out_proj",
        "mlp.up_proj": "mlp.fc_in",
        "mlp.down_proj": "mlp.fc_out",
        "final_norm": "transformer.ln_f",
        "lm_head": "lm_head",
    },
    layer="transformer.h.{i}.",
    base_prefix="transformer.",
    ignore=(*IGNORE, r"\.attn\.(masked_)?bias$"),
)


def to_spec(config: HFConfig) -> ModelSpec:
    """Attention has no biases, all else has."""
    return gptj_like(config)


def gptj_like(config: HFConfig) -> ModelSpec:
    """What GPT-J and CodeGen share. Sizes are called n_embd, n_head, n_layer, n_positions and n_inner."""
    config = config.alias(
        hidden_size="n_embd", num_hidden_layers="n_layer", num_attention_heads="n_head",
        max_position_embeddings="n_positions", hidden_act="activation_function",
    )  # fmt: skip
    hidden_size, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
    head_dim = max(hidden_size // num_heads, 1)
    config = config.with_defaults(max_position_embeddings=2048, hidden_act="gelu_new").replace(
        intermediate_size=config.size("n_inner", 4 * hidden_size),
        # The quarter keeps int(head_dim * factor) at rotary_dim, whatever the division rounds to.
        partial_rotary_factor=(config.size("rotary_dim", 64) + 0.25) / head_dim,
    )
    spec = llama_like(config, norm=layer_norm(config, "layer_norm_epsilon"))
    spec = replace_layers(turn_pairs(spec), lambda layer: {"parallel": True, "shared_norm": True})
    return dataclasses.replace(replace_mlp(spec, gated=False, bias=True), lm_head_bias=True)
