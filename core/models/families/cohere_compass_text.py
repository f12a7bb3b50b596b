"""The language model of North Micro Vision: Command R whose kinds of layers have ropes of their own, or none."""

from functools import partial

from ..config import HFConfig, flag
from ..llama_like import FULL, layer_norm, llama_like
from ..name_tables import LLAMA_NAMES
from ..spec import ModelSpec

WEIGHTS = LLAMA_NAMES
_ANY_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def to_spec(config: HFConfig) -> ModelSpec:
    """Layers of a kind whose rope parameters are null turn nothing; rope turns halves, unlike Command R's."""
    config = config.with_defaults(max_position_embeddings=8192, sliding_window=4096, tie_word_embeddings=True)
    kinds, stated = config.texts("layer_types") or (FULL,) * config.num_layers(), config.mapping("rope_parameters")
    ropes = {kind: stated[kind] if kind in stated else stated or _ANY_ROPE for kind in kinds}
    return llama_like(
        config.replace(rope_parameters={kind: rope or _ANY_ROPE for kind, rope in ropes.items()}),
        layer_types=kinds,
        norm=partial(layer_norm, bias=False),
        attn_bias=flag("attention_bias"),
        has_rope=[ropes[kind] is not None for kind in kinds],
        layer={"parallel": True, "shared_norm": True},
        logit_scale=config.number("logit_scale", 1.0, null=1.0),
    )
