"""GPT-Neo: GPT-2 with plain linears, unscaled scores, and a window in every other layer."""

import dataclasses

from ...errors import ModelError
from ..config import HFConfig
from ..llama_like import FULL, SLIDING, layer_norm, llama_like, replace_attention, replace_mlp, turn_only
from ..name_tables import name_table
from ..spec import ModelSpec

WEIGHTS = name_table(
    {
        "embed_tokens": "transformer.wte",
        "embed_positions": "transformer.wpe",
        "attn_norm": "ln_1",
        "attn.q_proj": "attn.attention.q_proj",
        "attn.k_proj": "attn.attention.k_proj",
        "attn.v_proj": "attn.attention.v_proj",
        "attn.o_proj": "attn.attention.out_proj",
        "mlp_norm": "ln_2",
        "mlp.up_proj": "mlp.c_fc",
        "mlp.down_proj": "mlp.c_proj",
        "final_norm": "transformer.ln_f",
        "lm_head": "lm_head",
    },
    layer="transformer.h.{i}.",
    base_prefix="transformer.",
    ignore=(r"\.attn\.attention\.(masked_)?bias$", r"^lm_head\.weight$"),
)


def to_spec(config: HFConfig) -> ModelSpec:
    """`attention_types` lists [kinds of layers, how often]; only o_proj has a bias in attention."""
    config = config.alias(
        num_hidden_layers="num_layers", num_attention_heads="num_heads", hidden_act="activation_function",
        sliding_window="window_size",
    )  # fmt: skip
    config = config.with_defaults(
        max_position_embeddings=2048, hidden_act="gelu_new", sliding_window=256, tie_word_embeddings=True
    )
    if config.get("intermediate_size") is None:
        config = config.replace(intermediate_size=4 * config.size("hidden_size"))
    spec = llama_like(config, layer_types=_layer_types(config), norm=layer_norm(config, "layer_norm_epsilon"))
    spec = replace_attention(turn_only(spec, [False] * spec.num_layers), scale=1.0, o_bias=True)
    spec = replace_mlp(spec, gated=False, bias=True)
    return dataclasses.replace(spec, num_learned_positions=spec.max_position_embeddings)


def _layer_types(config: HFConfig) -> list[str]:
    kinds = {"global": FULL, "local": SLIDING}
    listed = config.get("attention_types") or [[["global", "local"], config.num_layers() // 2]]
    try:
        return [kinds[name] for names, count in listed for _ in range(count) for name in names]
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"attention_types in {config.file} must list [[kinds], count], got {listed!r}") from error
