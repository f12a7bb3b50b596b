"""Decoders with multi-head latent attention, dense and with experts: what `latent_like` makes of their configs.

Defaults are those of transformers' config classes. A family that takes more than this is a file in families/.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ..errors import ModelError
from ..weights.names import NameTable
from .config import HFConfig, flag, number
from .dense_families import GROWTH
from .latent import latent_like
from .llama_like import ByLayer, replace_attention, rms_norm
from .mixtures import read_biased_experts, read_deepseek_experts, sparse_after, sparse_layers
from .name_tables import glu, llama_names
from .recipes import Recipe, recipe
from .spec import ModelSpec

_DEEPSEEK: Mapping[str, Any] = dict(
    moe_intermediate_size=2048, n_shared_experts=1, n_routed_experts=256, routed_scaling_factor=2.5, kv_lora_rank=512,
    q_lora_rank=1536, qk_rope_head_dim=64, v_head_dim=128, qk_nope_head_dim=128, n_group=8, topk_group=4,
    num_experts_per_tok=8, num_nextn_predict_layers=1,
)  # fmt: skip


def _deepseek_v2(config: HFConfig) -> ModelSpec:
    method = config.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ModelError(f"topk_method in {config.file} must be greedy or group_limited_greedy, got {method!r}")
    if method == "greedy":
        config = config.replace(n_group=None, topk_group=None)
    moe = read_biased_experts(config, score="softmax", has_correction=False, renormalize=False, group_score="max")
    return latent_like(config, moe=moe, is_sparse=sparse_after, mlp_bias=flag("mlp_bias"))


def _index_length(config: HFConfig) -> int:
    """Up to `index_topk` tokens the index names them all, and it is not read: that is how far the context goes."""
    return min(config.size("max_position_embeddings"), config.size("index_topk", 2048))


def _axk1_layers(config: HFConfig) -> Sequence[bool]:
    is_sparse, every = sparse_layers(config, default=1), config.size("moe_layer_freq", 1)
    listed = config.texts("mlp_layer_types")
    return is_sparse if listed else [flag and i % every == 0 for i, flag in enumerate(is_sparse)]


def _longcat_flash(config: HFConfig) -> ModelSpec:
    """A layer of the checkpoint is two here, of which the first has experts, too. Queries and the latent of keys and
    values grow as if their ranks were the hidden size."""
    if config.text("zero_expert_type", "identity") != "identity":
        raise ModelError(f"zero_expert_type in {config.file} must be identity")
    if "num_layers" in config:
        config = config.replace(num_hidden_layers=2 * config.num_layers("num_layers"))
    moe = read_deepseek_experts(
        config,
        score="softmax",
        renormalize=False,
        num_identities=config.integer("zero_expert_num", 256, null=0),
    )
    firsts = ByLayer(i % 2 == 0 for i in range(config.num_layers()))
    spec = latent_like(config, moe=moe, is_sparse=firsts, layer={"moe_ahead": firsts})
    attn = spec.layers[0].attn
    assert attn.latent is not None
    growth = (spec.hidden_size / attn.latent.q_lora_rank) ** 0.5
    latent = dataclasses.replace(attn.latent, kv_scale=(spec.hidden_size / attn.latent.kv_lora_rank) ** 0.5)
    return replace_attention(spec, scale=attn.scale * growth, latent=latent)


def _longcat_names() -> NameTable:
    leaves = {f"{name}_proj": f"{name}_proj" for name in ("q_a", "q_b", "kv_b", "o")}
    leaves |= {"q_a_norm": "q_a_layernorm", "kv_a_proj": "kv_a_proj_with_mqa", "kv_a_norm": "kv_a_layernorm"}
    names = llama_names(
        {
            **{f"attn.{ours}": f"self_attn.{{k}}.{theirs}" for ours, theirs in leaves.items()},
            **glu("mlp", "mlps.{k}"), "attn_norm": "input_layernorm.{k}",
            "mlp_norm": "post_attention_layernorm.{k}", "moe.router": "mlp.router.classifier",
            **glu("moe.experts.{j}", "mlp.experts.{j}"),
        },
        tensors={"moe.router.correction": "mlp.router.e_score_correction_bias"},
        ignore=(r"^model\.mtp\.", r"\.classifier\.bias$"),  # a bias that transformers does not add
    )  # fmt: skip
    return dataclasses.replace(names, layers_of_one=2)


def _whole_rope(config: HFConfig) -> Mapping[str, Any]:
    """Rotary parameters may count the values that turn among all of a head; they are qk_rope_head_dim."""
    return {**config.rope_parameters().values, "partial_rotary_factor": 1.0}


LATENT_FAMILIES: Mapping[str, Recipe] = {
    # A.X-K1: DeepSeek-V3 with a norm behind the experts; a checkpoint may lack the correction of their choice. Dense
    # layers have that norm, and do not use it.
    "axk1": recipe(
        latent_like,
        defaults={
            **_DEEPSEEK, "max_position_embeddings": 32768, "n_routed_experts": 192, "num_nextn_predict_layers": 0,
        },
        names={"mlp.out_norm": "post_mlp_layernorm mlp.post_mlp_layernorm"},
        ignore=(r"\.post_mlp_layernorm\.weight$",),
        moe=partial(read_deepseek_experts, out_norm=rms_norm, may_lack_correction=True), is_sparse=_axk1_layers,
    ),
    # DeepSeek-V2, V2-Lite and Coder-V2: latent attention, softmax experts that may be chosen in groups; weights of
    # experts are never divided by their sum, as in transformers.
    "deepseek_v2": recipe(
        _deepseek_v2,
        defaults=dict(
            max_position_embeddings=2048, moe_intermediate_size=1407, n_shared_experts=2, n_routed_experts=64,
            kv_lora_rank=512, q_lora_rank=1536, qk_rope_head_dim=64, v_head_dim=128, qk_nope_head_dim=128,
        ),
        fixed=dict(rope_interleave=True),
    ),
    # DeepSeek-V3, R1, Kimi K2 (model_type deepseek_v3): latent attention, experts in groups with a correction. The
    # layer that predicts a second token is left out.
    "deepseek_v3": recipe(
        latent_like, defaults=dict(**_DEEPSEEK, max_position_embeddings=4096), moe=read_deepseek_experts,
        is_sparse=partial(sparse_after, default=3),
    ),
    # DeepSeek-V3.2 and GLM-5: DeepSeek-V3 with an index of the tokens that attention sees, `index_topk` at most.
    "deepseek_v32": recipe(
        latent_like, defaults=dict(**_DEEPSEEK, max_position_embeddings=163840),
        fixed=dict(rope_interleave=True, layer_types=None), moe=read_deepseek_experts,
        is_sparse=partial(sparse_layers, default=3), max_position_embeddings=_index_length,
        ignore=(r"\.self_attn\.indexer\.",),
    ),
    # GLM-4.7-Flash: latent attention and DeepSeek-V3's experts; the first layer is dense unless listed otherwise.
    "glm4_moe_lite": recipe(
        latent_like,
        defaults=dict(
            max_position_embeddings=202752, moe_intermediate_size=1536, n_shared_experts=1, n_routed_experts=64,
            routed_scaling_factor=1.8, kv_lora_rank=512, q_lora_rank=768, qk_rope_head_dim=64, v_head_dim=256,
            qk_nope_head_dim=192, num_experts_per_tok=4, num_nextn_predict_layers=1,
        ),
        rms_norm_eps=1e-5, moe=read_deepseek_experts,
        is_sparse=partial(sparse_layers, default=1),
    ),
    # LongCat-Flash: latent attention twice a layer, dense blocks behind both, and experts beside the second
    # half, some of which give back what they read.
    "longcat_flash": recipe(
        _longcat_flash,
        keys=dict(
            intermediate_size="ffn_hidden_size", moe_intermediate_size="expert_ffn_hidden_size",
            num_experts_per_tok="moe_topk",
        ),
        defaults=dict(
            max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=10000000.0, kv_lora_rank=512,
            q_lora_rank=1536, qk_rope_head_dim=64, v_head_dim=128, qk_nope_head_dim=128, n_routed_experts=512,
            num_experts_per_tok=12, intermediate_size=12288, moe_intermediate_size=2048, routed_scaling_factor=6.0,
        ),
        fixed=dict(n_shared_experts=None, n_group=None, topk_group=None, rope_interleave=True),
        names=_longcat_names,
    ),
    # MiniCPM3: latent attention whose rope turns halves, and multipliers on embeddings, blocks and logits.
    "minicpm3": recipe(
        latent_like,
        defaults=dict(
            max_position_embeddings=32768, tie_word_embeddings=True, kv_lora_rank=256, q_lora_rank=768,
            qk_nope_head_dim=64, qk_rope_head_dim=32,
        ),
        fixed=dict(v_head_dim=lambda c: c.size("v_head_dim", c.size("hidden_size") // c.size("num_attention_heads"))),
        rms_norm_eps=1e-5, pairs=False, mlp_bias=flag("mlp_bias"),
        layer=dict(residual_scale=lambda c: c.number("scale_depth", 1.4, null=(n := c.num_layers() ** 0.5)) / n),
        embed_scale=number("scale_emb", 12.0),
        logit_scale=lambda c: c.number("dim_model_base", 256, null=c.size("hidden_size")) / c.size("hidden_size"),
    ),
    # Mistral Small 4: DeepSeek-V3 with softmax scores, whose queries grow with the position.
    "mistral4": recipe(
        latent_like, fixed=dict(rope_scaling=None, rope_parameters=_whole_rope),
        defaults=dict(
            max_position_embeddings=1048576, moe_intermediate_size=2048, n_shared_experts=1, n_routed_experts=128,
            kv_lora_rank=256, q_lora_rank=1024, qk_rope_head_dim=64, v_head_dim=128, qk_nope_head_dim=64,
            num_experts_per_tok=4,
            rope_parameters=dict(
                rope_type="yarn", rope_theta=10000.0, factor=128.0, original_max_position_embeddings=8192,
                beta_fast=32.0, beta_slow=1.0, mscale_all_dim=1.0, mscale=1.0, llama_4_scaling_beta=0.1,
            ),
        ),
        moe=partial(read_deepseek_experts, score="softmax", has_correction=False), is_sparse=sparse_after,
        attn=GROWTH,
    ),
    # Youtu-LLM: latent attention in a dense model.
    "youtu": recipe(
        latent_like,
        defaults=dict(
            max_position_embeddings=131072, tie_word_embeddings=True, kv_lora_rank=512, q_lora_rank=1536,
            qk_rope_head_dim=64, v_head_dim=128, qk_nope_head_dim=128,
        ),
    ),
}  # fmt: skip
"""model_type -> what sets it apart."""
