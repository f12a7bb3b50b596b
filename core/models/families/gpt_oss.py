"""gpt-oss: attention sinks, biases everywhere, experts with a clamped gate, every other layer slides."""

from ...errors import ModelError
from ...weights.names import Stored
from ..config import HFConfig
from ..llama_like import llama_like, patterned_layer_types, replace_attention
from ..mixtures import read_experts, replace_with_experts
from ..name_tables import llama_names
from ..spec import ModelSpec

_EXPERTS = "mlp.experts."
WEIGHTS = llama_names(
    {"mlp.router": "mlp.router"},
    tensors={
        "attn.sinks": "self_attn.sinks",
        f"{_EXPERTS}gate_up_proj.weight": Stored(
            name=f"{_EXPERTS}gate_up_proj", transpose=True, stacked=True, interleaved=True
        ),
        f"{_EXPERTS}gate_up_proj.bias": Stored(name=f"{_EXPERTS}gate_up_proj_bias", stacked=True, interleaved=True),
        f"{_EXPERTS}down_proj.weight": Stored(name=f"{_EXPERTS}down_proj", transpose=True, stacked=True),
        f"{_EXPERTS}down_proj.bias": Stored(name=f"{_EXPERTS}down_proj_bias", stacked=True),
    },
)
_ROPE = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "truncate": False, "original_max_position_embeddings": 4096,
}  # fmt: skip


def to_spec(config: HFConfig) -> ModelSpec:
    """Experts in MXFP4 become dense while they are read (weights/formats/mxfp4.py)."""
    config = config.with_defaults(
        num_key_value_heads=8, head_dim=64, max_position_embeddings=131072, hidden_act="silu", sliding_window=128,
        num_local_experts=128, num_experts_per_tok=4, rope_parameters=_ROPE,
    )  # fmt: skip
    if config.number("swiglu_alpha", 1.702) != 1.702:
        raise ModelError(f"swiglu_alpha in {config.file} must be 1.702, got {config.get('swiglu_alpha')!r}")
    spec = llama_like(config, layer_types=patterned_layer_types(config, 2), rms_norm_eps=1e-5)
    bias = config.boolean("attention_bias", True)
    spec = replace_attention(spec, sinks=True, qkv_bias=bias, o_bias=bias)
    clamp = config.positive("swiglu_limit", 7.0)
    moe = read_experts(config, size="intermediate_size", router_bias=True, bias=True, clamp=clamp)
    return replace_with_experts(spec, moe)
