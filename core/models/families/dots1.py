"""dots.llm1: normalised heads, DeepSeek-V3's experts after the first dense layers."""

from ..config import HFConfig
from ..llama_like import llama_like, replace_attention, windowed_layer_types
from ..mixtures import read_deepseek_experts, replace_with_experts, sparse_after
from ..name_tables import CORRECTION, EXPERTS, SHARED_EXPERTS, llama_names
from ..spec import ModelSpec

WEIGHTS = llama_names({**EXPERTS, **SHARED_EXPERTS}, tensors=CORRECTION)


def to_spec(config: HFConfig) -> ModelSpec:
    """Llama with those."""
    config = config.with_defaults(
        max_position_embeddings=2048, hidden_act="silu", moe_intermediate_size=1408, norm_topk_prob=False,
        sliding_window=4096, max_window_layers=62,
    )  # fmt: skip
    spec = llama_like(config, layer_types=windowed_layer_types(config))
    bias = config.boolean("attention_bias", False)
    spec = replace_attention(spec, qk_norm=spec.norm, qkv_bias=bias, o_bias=bias)
    return replace_with_experts(spec, read_deepseek_experts(config), sparse_after(config, "first_k_dense_replace"))
