"""Encoder-decoder models as data: what BART's and T5's descendants share, config keys and names of weights alike."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ModelError
from ..ops.attention import MAX_DISTANCE
from ..weights.names import NameTable, Stored
from .config import NOTHING, HFConfig
from .constants import distance_rows
from .llama_like import ACTIVATIONS, gpt_like, llama_like, replace_layers
from .name_tables import BART_LAYER, name_table
from .spec import ModelSpec, NormSpec

RELATIVE_LENGTH = 2048
"""Tokens that a model with relative positions takes on either side: it has no end, but memory has."""
_BART_CROSS = {f"cross.{name}_proj": f"encoder_attn.{name}_proj" for name in "qkv"}
_T5 = {f"attn.{name}_proj": f"layer.0.SelfAttention.{name}" for name in "qkvo"}
_T5_CROSS = {f"cross.{name}_proj": f"layer.1.EncDecAttention.{name}" for name in "qkvo"}


def bart_like(
    config: HFConfig, *, pre_norm: bool = False, lm_head_bias: bool = True, encoder: Any = NOTHING, **both: Any
) -> ModelSpec:
    """The spec of BART with this config's sizes: layer norms, biases everywhere, positions that are added.

    encoder: fields of the encoder's spec that differ from the decoder's; both: of both.
    Raises ModelError for a missing or impossible value.
    """
    config = config.with_defaults(
        max_position_embeddings=1024, activation_function="gelu", scale_embedding=False, tie_word_embeddings=True
    )
    length, hidden_size = config.size("max_position_embeddings"), config.size("d_model")
    common = {
        "norm": NormSpec(kind="layer", eps=1e-5, bias=True), "final_norm": False, "num_learned_positions": length,
        "embed_scale": hidden_size**0.5 if config.boolean("scale_embedding") else 1.0, **both,
        "layer": {"pre_norm": pre_norm, "norm_after_add": not pre_norm},
    }  # fmt: skip

    def half(side: str, **own: Any) -> ModelSpec:
        names = {
            "num_hidden_layers": "layers",
            "num_attention_heads": "attention_heads",
            "intermediate_size": "ffn_dim",
        }
        keys = {ours: f"{side}_{theirs}" for ours, theirs in names.items()}
        sized = config.alias(hidden_size="d_model", hidden_act="activation_function", **keys)
        return gpt_like(sized, **{**common, **own})

    shares = config.boolean("tie_word_embeddings")  # untied, transformers has embeddings of the encoder's own, too
    reader = half(
        "encoder", **{"kind": "encoder", "shares_embedding": shares, "tie_word_embeddings": False, **encoder}
    )
    return with_cross(half("decoder", encoder=reader, lm_head_bias=lm_head_bias))


def with_cross(spec: ModelSpec) -> ModelSpec:
    """A decoder whose layers attend to its encoder, as they attend to what they have read."""
    crossed = replace_layers(spec, lambda layer: {"cross": layer.attn})
    return dataclasses.replace(crossed, kind="encoder_decoder")


def bart_names(
    *,
    skip_positions: int = 0,
    changes: Mapping[str, str | Stored] | None = None,
    encoder_changes: Mapping[str, str | Stored] | None = None,
    tensors: Mapping[str, str | Stored] | None = None,
) -> NameTable:
    """The names of BART. skip_positions: rows of the position embeddings before that of position 0.

    changes: of names in the decoder; encoder_changes: in the encoder. tensors: as `name_table` takes them, of both.
    """

    def side(name: str) -> dict[str, str | Stored]:
        root = f"model.{name}."
        return {
            **BART_LAYER,
            "attn_post_norm": BART_LAYER["attn_norm"],
            "mlp_post_norm": BART_LAYER["mlp_norm"],
            "embed_positions": Stored(name=f"{root}embed_positions", skip_rows=skip_positions),
            "embed_norm": f"{root}layernorm_embedding",
            "final_norm": f"{root}layer_norm",
        }

    copies = ("model.shared", "model.encoder.embed_tokens", "lm_head", "proj_out")
    decoder = {
        **side("decoder"),
        **_BART_CROSS,
        "cross.o_proj": "encoder_attn.out_proj",
        "cross_norm": "encoder_attn_layer_norm",
        "cross_post_norm": "encoder_attn_layer_norm",
        "embed_tokens": Stored(name="model.decoder.embed_tokens", copies=copies),
        "lm_head": Stored(name="lm_head", copies=("proj_out", "model.shared")),
        **(changes or {}),
    }
    decoder_tensors = {"lm_head.bias": Stored(name="final_logits_bias", stacked=True), **(tensors or {})}
    own = {name: stored for name, stored in (tensors or {}).items() if not name.startswith("cross.")}
    return seq2seq_names(
        name_table(decoder, tensors=decoder_tensors, layer="model.decoder.layers.{i}."),
        name_table(
            {**side("encoder"), "embed_tokens": "model.encoder.embed_tokens", **(encoder_changes or {})},
            tensors=own,
            layer="model.encoder.layers.{i}.",
        ),
        ignore=(r"embed_positions\.weights?$", r"^(model\.)?final_logits_bias$"),
    )


def t5_like(config: HFConfig, *, bias_by_layer: bool = False, scales_output: bool = True) -> ModelSpec:
    """The spec of T5 with this config's sizes: RMS norms, no bias, and a bias of attention by distance.

    bias_by_layer: every layer has its own. scales_output: what goes to the head is scaled, unless the config says
    otherwise; a head of its own (or a copy of the embedding, where no other is stored) comes without. Raises
    ModelError for a missing or impossible value.
    """
    config = config.with_defaults(
        relative_attention_num_buckets=32,
        relative_attention_max_distance=128,
        layer_norm_epsilon=1e-6,
        feed_forward_proj="relu",
        num_decoder_layers=config.get("num_layers"),
        tie_word_embeddings=True,
    )
    num_buckets, farthest = (config.size(f"relative_attention_{key}") for key in ("num_buckets", "max_distance"))
    if not num_buckets // 2 < farthest <= MAX_DISTANCE:
        raise ModelError(
            f"relative_attention_max_distance ({farthest}) in {config.file} must be more than half of "
            f"relative_attention_num_buckets ({num_buckets}), and at most {MAX_DISTANCE}"
        )
    gate, _, name = config.text("feed_forward_proj").rpartition("-")
    name = config.text("dense_act_fn", "gelu_new" if (gate, name) == ("gated", "gelu") else name)
    if gate not in ("", "gated") or name not in ACTIVATIONS:
        raise ModelError(f"feed_forward_proj in {config.file} is {config['feed_forward_proj']!r}, which is not known")
    config = config.replace(
        num_key_value_heads=None, rope_scaling=None, rope_parameters=None, hidden_act=name,
        hidden_size=config.size("d_model"), num_attention_heads=config.size("num_heads"),
        head_dim=config.size("d_kv"), intermediate_size=config.size("d_ff"),
        rms_norm_eps=config.number("layer_norm_epsilon"),
    )  # fmt: skip

    def half(num_layers: str, **own: Any) -> ModelSpec:
        rows = distance_rows(num_buckets, farthest, both_ways=own.get("kind") == "encoder")
        return llama_like(
            config.alias(num_hidden_layers=num_layers),
            has_rope="none",
            attn={"scale": 1.0},
            mlp={"gated": config.boolean("is_gated_act", gate == "gated")},
            max_position_embeddings=RELATIVE_LENGTH,
            num_relative_buckets=num_buckets,
            relative_rows=() if farthest == MAX_DISTANCE else rows,
            relative_bias_by_layer=bias_by_layer,
            **own,
        )

    # transformers 5 calls every T5 tied, and says by another key what the first one meant.
    is_tied = scales_output and config.boolean("scale_decoder_outputs", config.boolean("tie_word_embeddings"))
    scale = config.size("hidden_size") ** -0.5 if is_tied else 1.0
    reader = half("num_layers", kind="encoder", shares_embedding=True, tie_word_embeddings=False)
    return with_cross(half("num_decoder_layers", encoder=reader, tie_word_embeddings=is_tied, logit_scale=scale))


def t5_names(*, bias_by_layer: bool = False) -> NameTable:
    """The names of T5."""

    def side(name: str, mlp: int) -> dict[str, str | Stored]:
        bias = "layer.0.SelfAttention.relative_attention_bias"
        dense = f"layer.{mlp}.DenseReluDense"
        return {
            **_T5,
            "attn_norm": "layer.0.layer_norm",
            "mlp_norm": f"layer.{mlp}.layer_norm",
            "mlp.up_proj": Stored(name=f"{dense}.wi", also=(f"{dense}.wi_1",)),
            "mlp.gate_proj": f"{dense}.wi_0",
            "mlp.down_proj": f"{dense}.wo",
            "final_norm": f"{name}.final_layer_norm",
            **({"attn.relative_bias": bias} if bias_by_layer else {"relative_bias": f"{name}.block.0.{bias}"}),
        }

    decoder = {
        **side("decoder", 2),
        **_T5_CROSS,
        "cross_norm": "layer.1.layer_norm",
        "embed_tokens": Stored(name="shared", copies=("decoder.embed_tokens", "encoder.embed_tokens")),
        "lm_head": Stored(name="lm_head", copies=("shared",)),
    }
    return seq2seq_names(
        name_table(decoder, layer="decoder.block.{i}."),
        name_table(side("encoder", 1), layer="encoder.block.{i}."),
        # Old files have a bias in the cross attention of layer 0 that no code ever read.
        ignore=(r"EncDecAttention\.relative_attention_bias", r"^lm_head\.weight$"),
        base_prefix="",
    )


def seq2seq_names(
    decoder: NameTable, encoder: NameTable, *, ignore: Sequence[str] = (), base_prefix: str = "model."
) -> NameTable:
    """One table of both halves."""
    entries = {f"encoder.{name}": stored for name, stored in encoder.entries.items()}
    return NameTable(entries={**entries, **decoder.entries}, ignore=tuple(ignore), base_prefix=base_prefix)
