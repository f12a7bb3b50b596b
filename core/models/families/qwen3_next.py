"""Qwen3-Next: the gated delta rule, gated attention in every fourth layer, experts beside a gated shared one."""

from ...weights.names import Stored
from ..config import HFConfig
from ..hybrids import mixer_modules, mixer_tensors, read_delta, recurrent_layers, replace_with_mixers
from ..llama_like import llama_like, replace_attention
from ..mixtures import read_shared, replace_with_experts, sparse_steps
from ..name_tables import EXPERTS, SHARED_EXPERT, llama_names
from ..spec import ModelSpec, NormSpec

AT = "linear_attn."
WEIGHTS = llama_names(
    {
        **EXPERTS,
        **SHARED_EXPERT,
        **mixer_modules(AT),
        "mixer.in_proj": Stored(name=f"{AT}in_proj_qkvz", interleaved=True),
        "mixer.gates_proj": Stored(name=f"{AT}in_proj_ba", interleaved=True),
    },
    tensors=mixer_tensors(AT),
    ignore=(r"^mtp\.",),
)


def to_spec(config: HFConfig) -> ModelSpec:
    """Some layers may stay dense; a head before the last layers' next token is not read."""
    config = config.with_defaults(
        intermediate_size=5632, moe_intermediate_size=512, shared_expert_intermediate_size=512, num_experts=512,
        num_experts_per_tok=10, hidden_act="silu",
    )  # fmt: skip
    moe = read_shared(config, renormalize=config.boolean("norm_topk_prob", True))
    return replace_with_experts(qwen3_next_like(config), moe, sparse_steps(config))


def qwen3_next_like(config: HFConfig) -> ModelSpec:
    """The layers of Qwen3-Next and 3.5 with dense feed-forward blocks."""
    config = config.with_defaults(
        num_key_value_heads=2, head_dim=256, max_position_embeddings=32768, hidden_act="silu",
        partial_rotary_factor=0.25, linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_value_head_dim=128,
        linear_num_key_heads=16, linear_num_value_heads=32,
    )  # fmt: skip
    norm = NormSpec(eps=config.number("rms_norm_eps", 1e-6), plus_one=True)
    spec, bias = llama_like(config, norm=norm), config.boolean("attention_bias", False)
    spec = replace_attention(spec, qk_norm=norm, gate_in_query=True, qkv_bias=bias, o_bias=bias)
    interval = config.size("full_attention_interval", 4)
    is_recurrent = recurrent_layers(config, "layer_types") or [
        (i + 1) % interval != 0 for i in range(spec.num_layers)
    ]
    return replace_with_mixers(spec, read_delta(config, NormSpec(eps=norm.eps)), is_recurrent)
