"""DBRX: layer norms without bias, fused qkv that is cut, and experts of which a layer keeps all in three matrices."""

from ...errors import ModelError
from ...weights.names import Stored
from ..config import HFConfig
from ..llama_like import llama_like, replace_attention
from ..mixtures import read_experts, replace_with_experts
from ..name_tables import IGNORE, name_table
from ..spec import ModelSpec, NormSpec

_FIRST, _EXPERTS = "norm_attn_norm.", "ffn.experts.mlp."
WEIGHTS = name_table(
    {
        "embed_tokens": "transformer.wte", "final_norm": "transformer.norm_f", "lm_head": "lm_head",
        "attn_norm": f"{_FIRST}norm_1", "attn.qkv_proj": f"{_FIRST}attn.Wqkv",
        "attn.o_proj": f"{_FIRST}attn.out_proj", "mlp_norm": f"{_FIRST}norm_2", "mlp.router": "ffn.router.layer",
    },
    tensors={
        f"mlp.experts.{{j}}.{ours}_proj.weight": Stored(
            name=f"{_EXPERTS}{theirs}", share=True, transpose=ours == "down"
        )
        for ours, theirs in (("gate", "w1"), ("up", "v1"), ("down", "w2"))
    },
    layer="transformer.blocks.{i}.",
    base_prefix="transformer.",
    ignore=IGNORE,
)  # fmt: skip


def to_spec(config: HFConfig) -> ModelSpec:
    """Sizes of attention and of experts stand in objects of their own."""
    attn = HFConfig(config.mapping("attn_config"), file=f"attn_config of {config.file}")
    ffn = HFConfig(config.mapping("ffn_config"), file=f"ffn_config of {config.file}")
    power = ffn.number("moe_normalize_expert_weights", 1.0, null=0.0)
    if power not in (0.0, 1.0):
        raise ModelError(f"moe_normalize_expert_weights in {ffn.file} must be 1 or null")
    activation = HFConfig(ffn.mapping("ffn_act_fn"), file=f"ffn_act_fn of {ffn.file}").text("name", "silu")
    theta = attn.get("rope_theta") or config.get("rope_theta") or 10000.0
    config = config.alias(
        hidden_size="d_model", num_hidden_layers="n_layers", num_attention_heads="n_heads",
        max_position_embeddings="max_seq_len",
    ).with_defaults(max_position_embeddings=2048).replace(
        num_key_value_heads=attn.size("kv_n_heads", 1), intermediate_size=ffn.size("ffn_hidden_size", 3584),
        num_experts=ffn.size("moe_num_experts", 4), num_experts_per_tok=ffn.size("moe_top_k", 1),
        hidden_act=activation, rope_theta=theta,
    )  # fmt: skip
    spec = llama_like(config, norm=NormSpec(kind="layer", eps=1e-5))
    spec = replace_attention(spec, clip_qkv=attn.number("clip_qkv", 0.0, null=0.0))
    moe = read_experts(config, size="intermediate_size", renormalize=power == 1.0)
    return replace_with_experts(spec, moe)
