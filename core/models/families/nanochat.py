"""nanochat: norms without weights, also of the embeddings and of turned heads; rope turns the other way."""

import dataclasses

from ..config import HFConfig
from ..llama_like import llama_like, replace_attention, replace_mlp, with_biases
from ..name_tables import llama_names
from ..spec import ModelSpec, NormSpec

WEIGHTS = llama_names({"mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"})


def to_spec(config: HFConfig) -> ModelSpec:
    """Llama with squared ReLU and capped logits."""
    config = config.with_defaults(max_position_embeddings=2048, hidden_act="relu2")
    norm = NormSpec(eps=config.number("rms_norm_eps", 1e-6), weight=False)
    spec = llama_like(config, norm=norm)
    rope = spec.layers[0].attn.rope
    backwards = None if rope is None else dataclasses.replace(rope, backwards=True)
    spec = with_biases(spec, attention=config.boolean("attention_bias", False))
    spec = replace_mlp(replace_attention(spec, rope=backwards, qk_norm=norm, norm_after_rope=True), gated=False)
    softcap = config.number("final_logit_softcapping", 15.0, null=0.0)
    return dataclasses.replace(spec, embed_norm=True, logit_softcap=softcap)
