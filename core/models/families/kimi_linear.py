"""Kimi Linear: the delta rule with a decay for each value of a key, latent attention without rope, and experts."""

import dataclasses

from ...errors import ModelError
from ...weights.names import Stored
from ..config import HFConfig
from ..hybrids import delta_modules, read_delta, recurrent_layers, replace_with_mixers
from ..latent import LATENT, latent_like
from ..llama_like import turn_only
from ..mixtures import read_deepseek_experts, replace_with_experts, sparse_after
from ..name_tables import CORRECTION, SHARED_EXPERTS, llama_names
from ..spec import ModelSpec, NormSpec

_AT = "self_attn."
WEIGHTS = dataclasses.replace(
    llama_names(
        {
            **LATENT, **SHARED_EXPERTS,
            **delta_modules(_AT, beta="b", decay_a="f_a", decay_b="f_b", gate_a="g_a", gate_b="g_b"),
            "mlp.router": "mlp.gate",
            **{
                f"mlp.experts.{{j}}.{ours}_proj": f"mlp.experts.{{j}}.{theirs}"
                for ours, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
            },
        },
        tensors={
            **CORRECTION, "mixer.a_log": Stored(name=f"{_AT}A_log", reshape=True), "mixer.dt_bias": f"{_AT}dt_bias",
        },
    ),
    renames=((r"\.block_sparse_moe\.", ".mlp."), (r"\.forget_gate\.", ".")),
)  # fmt: skip


def to_spec(config: HFConfig) -> ModelSpec:
    """Published files count layers from one, and keep what is linear in an object of its own."""
    config = config.alias(
        max_position_embeddings="model_max_length", norm_topk_prob="moe_renormalize", n_group="num_expert_group",
        num_experts_per_tok="num_experts_per_token", n_shared_experts="num_shared_experts",
    ).with_defaults(
        max_position_embeddings=1048576, hidden_act="silu", moe_intermediate_size=1024, num_experts=256,
        num_experts_per_tok=8, routed_scaling_factor=2.446, n_shared_experts=1, q_lora_rank=None, kv_lora_rank=512,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    )  # fmt: skip
    config = config.replace(tie_word_embeddings=False)  # whatever it says
    linear = HFConfig(config.mapping("linear_attn_config"), file=f"linear_attn_config of {config.file}")
    num_heads = linear.size("num_heads", config.size("linear_num_heads", 32))
    head_dim = linear.size("head_dim", config.size("linear_head_dim", 128))
    width = linear.size("short_conv_kernel_size", config.size("linear_conv_kernel_dim", 4))
    config = config.replace(
        linear_num_key_heads=num_heads, linear_num_value_heads=num_heads, linear_key_head_dim=head_dim,
        linear_value_head_dim=head_dim, linear_conv_kernel_dim=width,
    )  # fmt: skip
    spec = latent_like(config, rms_norm_eps=1e-5)
    mixer = dataclasses.replace(
        read_delta(config, NormSpec(eps=spec.norm.eps)),
        decay_rank=head_dim,
        gate_rank=head_dim,
        gate_activation="sigmoid",
    )
    spec = replace_with_mixers(turn_only(spec, [False] * spec.num_layers), mixer, _is_linear(config, linear))
    moe = read_deepseek_experts(config)
    return replace_with_experts(spec, moe, sparse_after(config, "first_k_dense_replace", 1))


def _is_linear(config: HFConfig, linear: HFConfig) -> list[bool]:
    num_layers = config.num_layers()
    if listed := recurrent_layers(config, "layer_types"):
        return listed
    if "kda_layers" not in linear or "full_attn_layers" not in linear:
        return [not (i and i % 4 == 0) for i in range(num_layers)]
    kda, full = linear.indices("kda_layers"), linear.indices("full_attn_layers")
    if sorted((*kda, *full)) != list(range(1, num_layers + 1)):
        raise ModelError(
            f"kda_layers and full_attn_layers of {linear.file} must hold each of {num_layers} layers once"
        )
    return [i + 1 in kda for i in range(num_layers)]
