"""OPT: learned positions that begin in row 2, biases everywhere, relu; the 350M normalises after its blocks."""

import dataclasses

from ...errors import ModelError
from ...weights.names import Stored
from ..config import HFConfig
from ..llama_like import llama_like, replace_layers, replace_mlp, turn_only, with_biases
from ..name_tables import BART_LAYER, IGNORE, name_table
from ..spec import ModelSpec, NormSpec

WEIGHTS = name_table(
    {
        **BART_LAYER,
        "embed_tokens": "model.decoder.embed_tokens",
        "embed_positions": Stored(name="model.decoder.embed_positions", skip_rows=2),
        "project_in": "model.decoder.project_in",
        "project_out": "model.decoder.project_out",
        "attn_post_norm": "self_attn_layer_norm",
        "mlp_post_norm": "final_layer_norm",
        "final_norm": "model.decoder.final_layer_norm",
        "lm_head": "lm_head",
    },
    layer="model.decoder.layers.{i}.",
    ignore=IGNORE,
)


def to_spec(config: HFConfig) -> ModelSpec:
    """Token embeddings may be smaller than hidden_size, and are projected then."""
    if config.get("_remove_final_layer_norm"):
        raise ModelError(f"{config.file} asks for a model without its last norm, which is not served")
    config = config.alias(hidden_act="activation_function").replace(intermediate_size=config.size("ffn_dim", 3072))
    config = config.with_defaults(max_position_embeddings=2048, hidden_act="relu", tie_word_embeddings=True)
    has_affine, bias = config.boolean("layer_norm_elementwise_affine", True), config.boolean("enable_bias", True)
    norm = NormSpec(kind="layer", eps=1e-5, weight=has_affine, bias=has_affine)
    spec = replace_mlp(with_biases(llama_like(config, norm=norm), attention=bias, mlp=bias), gated=False)
    spec = turn_only(spec, [False] * spec.num_layers)
    is_before = config.boolean("do_layer_norm_before", True)
    spec = replace_layers(spec, lambda layer: {"pre_norm": is_before, "norm_after_add": not is_before})
    embed_size = config.size("word_embed_proj_dim", spec.hidden_size)
    return dataclasses.replace(
        spec,
        num_learned_positions=spec.max_position_embeddings,
        embed_size=0 if embed_size == spec.hidden_size else embed_size,
        final_norm=is_before,
    )
