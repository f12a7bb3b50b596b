"""GPT-NeoX (Pythia, Dolly, RedPajama): parallel blocks with a norm each, partial rope, fused qkv."""

from collections.abc import Mapping

from ...weights.names import NameTable, Stored
from ..config import HFConfig
from ..llama_like import layer_norm, llama_like, replace_layers, replace_mlp, with_biases
from ..name_tables import name_table
from ..spec import ModelSpec


def names(base: str, tensors: Mapping[str, str | Stored] | None = None) -> NameTable:
    """The table of a GPT-NeoX whose backbone is called `base`; tensors: as name_table takes them."""
    modules: dict[str, str | Stored] = {
        "embed_tokens": f"{base}.embed_in",
        "attn_norm": "input_layernorm",
        "attn.qkv_proj": Stored(name="attention.query_key_value", interleaved=True),
        "attn.o_proj": "attention.dense",
        "mlp_norm": "post_attention_layernorm",
        "mlp.up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
        "final_norm": f"{base}.final_layer_norm",
        "lm_head": "embed_out",
    }
    ignore = (r"\.attention\.(masked_)?bias$", r"rotary_emb\.inv_freq$", r"^embed_out\.weight$")
    return name_table(modules, tensors=tensors, layer=f"{base}.layers.{{i}}.", base_prefix=f"{base}.", ignore=ignore)


WEIGHTS = names("gpt_neox")


def to_spec(config: HFConfig) -> ModelSpec:
    """Published files call rope's values rotary_pct and rotary_emb_base."""
    config = config.alias(partial_rotary_factor="rotary_pct", rope_theta="rotary_emb_base")
    config = config.with_defaults(max_position_embeddings=2048, hidden_act="gelu", partial_rotary_factor=0.25)
    bias, is_parallel = config.boolean("attention_bias", True), config.boolean("use_parallel_residual", True)
    spec = with_biases(llama_like(config, norm=layer_norm(config)), attention=bias, mlp=True)
    return replace_layers(replace_mlp(spec, gated=False), lambda layer: {"parallel": is_parallel})
