"""Encoder-decoder models as data: what BART's and T5's descendants share, config keys and names of weights alike."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ModelError
from ..weights.names import NameTable, Stored
from .config import HFConfig
from .llama_like import ACTIVATIONS, read_activation
from .name_tables import name_table
from .spec import Activation, AttentionSpec, CrossSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec

RELATIVE_LENGTH = 2048
"""Tokens that a model with relative positions takes on either side: it has no end, but memory has."""
_BART: Mapping[str, str | Stored] = {
    "attn.q_proj": "self_attn.q_proj",
    "attn.k_proj": "self_attn.k_proj",
    "attn.v_proj": "self_attn.v_proj",
    "attn.o_proj": "self_attn.out_proj",
    "mlp.up_proj": "fc1",
    "mlp.down_proj": "fc2",
}
_BART_CROSS = {f"cross.{ours}_proj": f"encoder_attn.{theirs}_proj" for ours, theirs in zip("qkv", "qkv", strict=True)}
_T5 = {f"attn.{name}_proj": f"layer.0.SelfAttention.{name}" for name in "qkvo"}
_T5_CROSS = {f"cross.{name}_proj": f"layer.1.EncDecAttention.{name}" for name in "qkvo"}


def bart_like(
    config: HFConfig,
    *,
    pre_norm: bool = False,
    embed_norm: bool = False,
    final_norm: bool = False,
    lm_head_bias: bool = True,
    encoder: Mapping[str, Any] | None = None,
    **changes: Any,
) -> ModelSpec:
    """The spec of BART with this config's sizes: layer norms, biases everywhere, positions that are added.

    encoder: fields of the encoder's spec that differ from the decoder's; changes: of both.
    Raises ModelError for a missing or impossible value.
    """
    config = config.with_defaults(
        max_position_embeddings=1024, activation_function="gelu", scale_embedding=False, tie_word_embeddings=True
    )
    hidden_size, length = config.size("d_model"), config.size("max_position_embeddings")
    decoder, cross = _bart_layer(config, "decoder", pre_norm)
    both = dict(
        model_type=config.model_type,
        vocab_size=config.size("vocab_size"),
        hidden_size=hidden_size,
        max_position_embeddings=length,
        norm=NormSpec(kind="layer", eps=1e-5, bias=True),
        embed_scale=hidden_size**0.5 if config.boolean("scale_embedding") else 1.0,
        num_learned_positions=length,
        embed_norm=embed_norm,
        final_norm=final_norm,
        dtype=config.dtype,
    )
    other = dict(kind="encoder", shares_embedding=True, layers=_repeat(config, "encoder_layers", "encoder", pre_norm))
    return ModelSpec(
        **{
            **both,
            "kind": "encoder_decoder",
            "layers": (dataclasses.replace(decoder, cross=cross),) * config.num_layers("decoder_layers"),
            "tie_word_embeddings": config.boolean("tie_word_embeddings"),
            "lm_head_bias": lm_head_bias,
            "encoder": ModelSpec(**{**both, **other, **changes, **(encoder or {})}),
            **changes,
        }
    )


def bart_names(
    *,
    embed_norm: bool = False,
    final_norm: bool = False,
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
        modules: dict[str, str | Stored] = dict(_BART)
        modules["embed_positions"] = Stored(name=f"{root}embed_positions", skip_rows=skip_positions)
        modules.update({"embed_norm": f"{root}layernorm_embedding"} if embed_norm else {})
        modules.update({"final_norm": f"{root}layer_norm"} if final_norm else {})
        for ours, theirs in (("attn", "self_attn_layer_norm"), ("mlp", "final_layer_norm")):
            modules.update({f"{ours}_norm": theirs, f"{ours}_post_norm": theirs})
        return modules

    copies = ("model.decoder.embed_tokens", "model.encoder.embed_tokens", "lm_head", "proj_out")
    decoder = {
        **side("decoder"),
        **_BART_CROSS,
        "cross.o_proj": "encoder_attn.out_proj",
        "cross_norm": "encoder_attn_layer_norm",
        "cross_post_norm": "encoder_attn_layer_norm",
        "embed_tokens": Stored(name="model.shared", copies=copies),
        "lm_head": Stored(name="lm_head", copies=("proj_out", "model.shared")),
        **(changes or {}),
    }
    decoder_tensors = {"lm_head.bias": Stored(name="final_logits_bias", stacked=True), **(tensors or {})}
    own = {name: stored for name, stored in (tensors or {}).items() if not name.startswith("cross.")}
    return seq2seq_names(
        name_table(decoder, tensors=decoder_tensors, layer="model.decoder.layers.{i}."),
        name_table({**side("encoder"), **(encoder_changes or {})}, tensors=own, layer="model.encoder.layers.{i}."),
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
    if config.size("relative_attention_max_distance") != 128:
        raise ModelError(f"relative_attention_max_distance in {config.file} must be 128")
    hidden_size, num_heads, head_dim = config.size("d_model"), config.size("num_heads"), config.size("d_kv")
    gate, _, name = config.text("feed_forward_proj").rpartition("-")
    name = "gelu_new" if (gate, name) == ("gated", "gelu") else name
    if gate not in ("", "gated") or name not in ACTIVATIONS:
        raise ModelError(f"feed_forward_proj in {config.file} is {config['feed_forward_proj']!r}, which is not known")
    layer = LayerSpec(
        attn=AttentionSpec(num_heads=num_heads, num_kv_heads=num_heads, head_dim=head_dim, scale=1.0),
        mlp=MlpSpec(
            intermediate_size=config.size("d_ff"), activation=ACTIVATIONS[name], gated=gate == "gated", bias=False
        ),
    )
    cross = CrossSpec(num_heads=num_heads, num_kv_heads=num_heads, head_dim=head_dim, scale=1.0)
    encoder = ModelSpec(
        model_type=config.model_type,
        vocab_size=config.size("vocab_size"),
        hidden_size=hidden_size,
        max_position_embeddings=RELATIVE_LENGTH,
        layers=(layer,) * config.num_layers("num_layers"),
        norm=NormSpec(eps=config.number("layer_norm_epsilon")),
        kind="encoder",
        shares_embedding=True,
        num_relative_buckets=config.size("relative_attention_num_buckets"),
        relative_bias_by_layer=bias_by_layer,
        dtype=config.dtype,
    )
    # transformers 5 calls every T5 tied, and says by another key what the first one meant.
    is_tied = scales_output and config.boolean("scale_decoder_outputs", config.boolean("tie_word_embeddings"))
    return dataclasses.replace(
        encoder,
        kind="encoder_decoder",
        encoder=encoder,
        shares_embedding=False,
        layers=(dataclasses.replace(layer, cross=cross),) * config.num_layers("num_decoder_layers"),
        tie_word_embeddings=is_tied,
        logit_scale=hidden_size**-0.5 if is_tied else 1.0,
    )


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


def _bart_layer(config: HFConfig, side: str, pre_norm: bool) -> tuple[LayerSpec, CrossSpec]:
    hidden_size, num_heads = config.size("d_model"), config.size(f"{side}_attention_heads")
    if hidden_size % num_heads:
        raise ModelError(
            f"d_model ({hidden_size}) in {config.file} is no multiple of {side}_attention_heads ({num_heads})"
        )
    head_dim = hidden_size // num_heads
    activation: Activation = read_activation(config, "activation_function")
    layer = LayerSpec(
        attn=AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            qkv_bias=True,
            o_bias=True,
        ),
        mlp=MlpSpec(intermediate_size=config.size(f"{side}_ffn_dim"), activation=activation, gated=False, bias=True),
        pre_norm=pre_norm,
        norm_after_add=not pre_norm,
    )
    cross = CrossSpec(num_heads=num_heads, num_kv_heads=num_heads, head_dim=head_dim, scale=head_dim**-0.5, bias=True)
    return layer, cross


def _repeat(config: HFConfig, key: str, side: str, pre_norm: bool) -> tuple[LayerSpec, ...]:
    return (_bart_layer(config, side, pre_norm)[0],) * config.num_layers(key)
