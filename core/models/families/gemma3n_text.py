"""The language model of Gemma 3n: four residual streams, a path of low rank beside attention, sparse activations,
inputs of each layer's own, and layers that read the keys and values of others."""

from ...errors import ModelError
from ..config import HFConfig
from ..dense_families import ATTN_FLAG, root_of_size
from ..llama_like import FULL, SLIDING, ByLayer, llama_like, rms_norm, shared_keys
from ..name_tables import SANDWICH, llama_names
from ..spec import AltUpSpec, ModelSpec
from .gemma3_text import with_rope_per_layer_type

WEIGHTS = llama_names(
    {
        **SANDWICH, "altup_in.{i}": "model.altup_projections.{i}",
        "altup_out.{i}": "model.altup_unembed_projections.{i}", "altup.router_norm": "altup.router_norm",
        "altup.router": "altup.modality_router", "altup.predict": "altup.prediction_coefs",
        "altup.correct": "altup.correction_coefs", "laurel.in_proj": "laurel.linear_left",
        "laurel.out_proj": "laurel.linear_right", "laurel.norm": "laurel.post_laurel_norm",
    },
    tensors={"altup.scale": "altup.correct_output_scale"},
)  # fmt: skip


def to_spec(config: HFConfig) -> ModelSpec:
    """Each layer may have a feed-forward size and a sparsity of its own; the latter is the share that is cut off."""
    config = config.with_defaults(
        num_key_value_heads=2, head_dim=256, max_position_embeddings=32768, hidden_activation="gelu_pytorch_tanh",
        sliding_window=512, tie_word_embeddings=True, num_kv_shared_layers=15, intermediate_size=16384,
    )  # fmt: skip
    num_layers = config.num_layers()
    sizes = _by_layer(config, "intermediate_size", config.get("intermediate_size"))
    sparsities = _by_layer(config, "activation_sparsity_pattern", [0.95] * 10 * (num_layers > 10))
    kinds = config.texts("layer_types") or [SLIDING if (i + 1) % 5 else FULL for i in range(num_layers)]
    config = with_rope_per_layer_type(config.replace(intermediate_size=int(sizes[0])))
    altup = AltUpSpec(
        num_streams=config.size("altup_num_inputs", 4),
        active=config.integer("altup_active_idx", 0),
        scales_output=config.boolean("altup_correct_scale", True),
    )
    return llama_like(
        config,
        layer_types=kinds,
        activation_key="hidden_activation",
        qk_norm="head",
        attn={"scale": 1.0, "value_norm": rms_norm(config, weight=False), "kv_layer": shared_keys(config, kinds)},
        mlp={"intermediate_size": ByLayer(map(int, sizes)), "sparsity": ByLayer(sparsities)},
        layer={"post_norm": True, "laurel_rank": config.size("laurel_rank", 64)},
        embed_scale=root_of_size,
        layer_input_size=config.size("hidden_size_per_layer_input", 256),
        altup=altup,
        logit_softcap=config.number("final_logit_softcapping", 30.0, null=0.0),
        **ATTN_FLAG,
    )


def _by_layer(config: HFConfig, key: str, default: object) -> list[float]:
    """A number for each layer: as listed, or one for all; a list that is the default may be short."""
    num_layers, stated = config.num_layers(), config.get(key)
    values = default if stated is None else stated
    values = [values] * num_layers if not isinstance(values, list | tuple) else [*values]
    if stated is None:
        values += [0.0] * (num_layers - len(values))
    if len(values) != num_layers or any(isinstance(v, bool) or not isinstance(v, int | float) for v in values):
        raise ModelError(f"{key} in {config.file} must be a number, or one for each of {num_layers} layers")
    return values
