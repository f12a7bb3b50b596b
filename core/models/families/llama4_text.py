"""Llama 4, text only: every fourth layer without rope, experts beside a shared one, weights on their input."""

from functools import partial

from ..config import HFConfig
from ..dense_families import ATTN_FLAG
from ..llama_like import CHUNKED, FULL, ByLayer, llama_like, rope_by_interval
from ..mixtures import read_experts
from ..name_tables import joined_experts, llama_names
from ..spec import MlpSpec, ModelSpec, NormSpec

WEIGHTS = llama_names(tensors=joined_experts("feed_forward.experts.", transpose=True))


def to_spec(config: HFConfig) -> ModelSpec:
    """Layers with rope see chunks of `attention_chunk_size` tokens, unless it is null or `layer_types` says more."""
    config = config.with_defaults(
        num_key_value_heads=8, head_dim=128, max_position_embeddings=131072, hidden_act="silu", rope_theta=500000.0,
        num_local_experts=16, num_experts_per_tok=1, intermediate_size_mlp=16384, attention_chunk_size=8192,
    )  # fmt: skip
    num_layers, has_rope = config.num_layers(), rope_by_interval(config)
    norm = NormSpec(eps=config.number("rms_norm_eps", 1e-5), weight=False)
    norms, grows = config.boolean("use_qk_norm", True), config.boolean("attn_temperature_tuning", True)
    scale, length = config.number("attn_scale", 0.1), config.size("floor_scale", 8192)
    shared = MlpSpec(intermediate_size=config.size("intermediate_size"))
    step, listed = config.size("interleave_moe_layer_step", 1), config.get("moe_layers")
    turned = FULL if config["attention_chunk_size"] is None else CHUNKED
    return llama_like(
        config,
        layer_types=config.texts("layer_types") or [turned if turns else FULL for turns in has_rope],
        rms_norm_eps=1e-5,
        in_pairs=True,
        has_rope=has_rope,
        attn={
            "qk_norm": ByLayer(norm if norms and turns else None for turns in has_rope),
            "norm_after_rope": ByLayer(has_rope),
            "temperature_scale": ByLayer(scale if grows and not turns else 0.0 for turns in has_rope),
            "temperature_length": ByLayer(length if grows and not turns else 1 for turns in has_rope),
            "temperature_shift": ByLayer(int(grows and not turns) for turns in has_rope),
        },
        mlp={"intermediate_size": config.size("intermediate_size_mlp")},
        moe=partial(
            read_experts,
            size="intermediate_size",
            score="sigmoid",
            renormalize=False,
            scale_input=True,
            shared=shared,
        ),
        is_sparse=[i in listed if isinstance(listed, list) else (i + 1) % step == 0 for i in range(num_layers)],
        **ATTN_FLAG,
    )
