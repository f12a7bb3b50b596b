"""BERT as data: what its descendants share, config keys and names of weights alike."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..errors import ModelError
from ..weights.names import NameTable, Stored
from .config import NOTHING, HFConfig
from .heads import classifier, is_classifier, read_labels
from .llama_like import gpt_like
from .name_tables import name_table
from .spec import Activation, DenseSpec, ModelSpec, NormSpec, PoolerSpec, Pooling

OLD_NORMS = ((r"\.gamma$", ".weight"), (r"\.beta$", ".bias"))
"""How files from TensorFlow spell the parameters of a layer norm."""


def bert_names(
    prefix: str,
    *,
    layer: str = "encoder.layer.{i}.",
    changes: Mapping[str, str | Stored] = NOTHING,
    tensors: Mapping[str, str | Stored] = NOTHING,
    renames: tuple[tuple[str, str], ...] = (),
) -> NameTable:
    """The names of BERT and its descendants under `prefix` ("bert."), in every spelling that they have. changes: of
    modules, or further ones; tensors: as `name_table` takes them."""
    at, qkv = f"{prefix}embeddings.", (("q", "query"), ("k", "key"), ("v", "value"))
    modules: Mapping[str, str | Stored] = {
        "embed_tokens": f"{at}word_embeddings", "embed_token_types": f"{at}token_type_embeddings",
        "embed_positions": f"{at}position_embeddings",
        "embed_norm": f"{at}LayerNorm",
        "embed_in": f"{prefix}embeddings_project {prefix}encoder.embedding_hidden_mapping_in",
        "relative_bias": f"{prefix}encoder.relative_attention_bias", "attn.qkv_proj": "attn.Wqkv",
        **{
            f"attn.{q}_proj": f"attention.self.{query} attention.{q}_lin attention.attn.{q} self_attn.{q}_proj"
            for q, query in qkv
        },
        "attn.o_proj": "attention.output.dense attention.out_lin attention.attn.o self_attn.o_proj",
        "attn_post_norm": "attention.output.LayerNorm attention.LayerNorm sa_layer_norm post_attention_layernorm",
        "mlp.gate_proj": "mlp.gate_proj", "mlp.up_proj": "intermediate.dense ffn.lin1 mlp.up_proj",
        "mlp.down_proj": "output.dense ffn.lin2 mlp.down_proj",
        "mlp_post_norm": "output.LayerNorm output_layer_norm post_mlp_layernorm", **changes,
    }  # fmt: skip
    # Buffers, the head of pre-training, and the pooler where nothing reads it.
    ignore = (
        r"position_ids$", r"inv_freq$", r"encoder\.embed_positions\.weight$",
        r"^(\w+\.)?pooler\.dense\.(weight|bias)$",
        r"^(cls|lm_head|generator_\w+|discriminator_\w+|vocab_(transform|layer_norm|projector))\.",
    )  # fmt: skip
    head = {"pooler": f"{prefix}pooler.dense", "dense": "classifier.dense", "out_proj": "classifier.out_proj"}
    options: dict[str, Any] = {"ignore": ignore, "renames": renames, "tensors": tensors}
    return encoder_names(modules, head, layer=prefix + layer, prefix=prefix, **options)


def encoder_names(
    modules: Mapping[str, str | Stored],
    head: Mapping[str, str],
    *,
    layer: str,
    prefix: str,
    ignore: tuple[str, ...],
    tensors: Mapping[str, str | Stored] = NOTHING,
    renames: tuple[tuple[str, str], ...] = (),
) -> NameTable:
    """A table from the names of modules and tensors as `name_table` takes them, and those of a head's layers."""
    options: dict[str, Any] = {"ignore": ignore, "renames": OLD_NORMS + renames, "tensors": tensors}
    table = name_table(modules, layer=layer, base_prefix=prefix, **options)
    of_head = {f"{name}.{leaf}": f"{stored}.{leaf}" for name, stored in head.items() for leaf in ("weight", "bias")}
    return dataclasses.replace(table, entries={**table.entries, **of_head})


def bert_like(config: HFConfig, *, first_position: int = 0, **options: Any) -> ModelSpec:
    """The spec of BERT with this config's sizes: a layer norm after each residual add, learned positions, biases.

    first_position: as ModelSpec has it; a context has so many tokens less. Raises ModelError for a missing or
    impossible value.
    """
    config = config.with_defaults(
        max_position_embeddings=512, type_vocab_size=2, hidden_act="gelu", layer_norm_eps=1e-12, hidden_size=768,
        num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072,
    )  # fmt: skip
    if config.get("is_decoder") or config.get("add_cross_attention"):
        raise ModelError(f"{config.file} describes a decoder; {config.model_type} is served as an encoder only")
    kind = config.get("position_embedding_type") or "absolute"
    if kind != "absolute":
        raise ModelError(f"{config.file} has {kind!r} position embeddings; {config.model_type} knows absolute ones")
    num_positions = config.size("max_position_embeddings") - first_position
    if num_positions <= 0:
        raise ModelError(f"max_position_embeddings in {config.file} leaves no position for a token")
    common = {
        "kind": "encoder", "layer": {"pre_norm": False, "norm_after_add": True}, "final_norm": False,
        "embed_norm": True, "max_position_embeddings": num_positions, "num_learned_positions": num_positions,
        "first_position": first_position,
        "num_token_types": config.integer("type_vocab_size"), "tie_word_embeddings": False,
    }  # fmt: skip
    return gpt_like(config, **{**common, **options})


def two_layer_head(
    config: HFConfig,
    names: tuple[str, str],
    activation: Activation,
    kind: Pooling = "cls",
    *,
    bias: bool = True,
    norm: NormSpec | None = None,
) -> PoolerSpec | None:
    """A classifier's dense layer with an activation and the layer of its labels; None if it classifies nothing."""
    if not is_classifier(config):
        return None
    size, labels = config.size("hidden_size"), len(read_labels(config))
    dense = DenseSpec(name=names[0], in_features=size, out_features=size, activation=activation, bias=bias, norm=norm)
    return classifier(config, kind, dense, DenseSpec(name=names[1], in_features=size, out_features=labels))


def bert_head(config: HFConfig) -> PoolerSpec | None:
    """BERT's head of a classifier, behind its pooler."""
    return two_layer_head(config, ("pooler", "classifier"), "tanh")


def roberta_head(config: HFConfig) -> PoolerSpec | None:
    """RoBERTa's, which is the same under other names."""
    return two_layer_head(config, ("dense", "out_proj"), "tanh")
