"""Apertus: normalised heads and a plain feed-forward block with the xIELU activation."""

from ..config import HFConfig
from ..llama_like import llama_like, replace_attention, replace_mlp
from ..name_tables import llama_names
from ..spec import ModelSpec

WEIGHTS = llama_names(
    {"attn_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm"},
    tensors={"mlp.act.alpha_p": "mlp.act_fn.alpha_p", "mlp.act.alpha_n": "mlp.act_fn.alpha_n"},
    # Constants of the activation: 0.5 and -1e-6.
    ignore=(r"\.act_fn\.(beta|eps)$",),
)
_ROPE = {
    "rope_type": "llama3", "rope_theta": 12000000.0, "factor": 8.0, "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip


def to_spec(config: HFConfig) -> ModelSpec:
    """Llama; other activations than xIELU have no parameters."""
    config = config.with_defaults(max_position_embeddings=65536, hidden_act="xielu", rope_parameters=_ROPE)
    is_xielu = config.text("hidden_act") == "xielu"
    spec = llama_like(config.replace(hidden_act="silu") if is_xielu else config, rms_norm_eps=1e-5)
    bias = config.boolean("attention_bias", False)
    spec = replace_attention(spec, qk_norm=spec.norm, qkv_bias=bias, o_bias=bias)
    return replace_mlp(spec, gated=False, xielu=is_xielu)
