"""Heads that make vectors: which one a config asks for, and its labels."""

import dataclasses
import re
from typing import Literal, cast

from ..errors import ConfigError, ModelError
from ..weights.names import NameTable, Stored
from .config import HFConfig
from .spec import DenseSpec, ModelSpec, PoolerSpec, Pooling

Scores = Literal["none", "sigmoid", "softmax"]
CLASSIFIER = "ForSequenceClassification"
_ACTIVATIONS: dict[str, Scores] = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}


def is_classifier(config: HFConfig) -> bool:
    """True if the checkpoint has a head that gives one set of labels for a whole text."""
    return any(name.endswith(CLASSIFIER) for name in config.texts("architectures"))


def classifier(config: HFConfig, kind: Pooling, *dense: DenseSpec) -> PoolerSpec:
    """The head of a classifier: `dense` layers, then one named classifier unless the last has another name."""
    labels = read_labels(config)
    return PoolerSpec(kind=kind, dense=dense, labels=labels, activation=_activation(config, len(labels)))


def read_labels(config: HFConfig) -> tuple[str, ...]:
    """Names of the labels, in the order of the logits; LABEL_0, ... if the config names none."""
    named = config.mapping("id2label")
    if not named:
        return tuple(f"LABEL_{i}" for i in range(config.size("num_labels", 2)))
    try:
        by_id = {int(key): str(name) for key, name in named.items()}
    except ValueError:
        by_id = {}
    if sorted(by_id) != list(range(len(named))):
        raise ModelError(f"id2label in {config.file} must have the keys 0 to {len(named) - 1}, got {list(named)}")
    return tuple(by_id[i] for i in range(len(by_id)))


def with_asked_pooler(spec: ModelSpec, pooling: str) -> ModelSpec:
    """The spec with embeddings of this kind; "auto" leaves it. Raises ConfigError for a classifier."""
    if pooling == "auto":
        return spec
    pooler = spec.pooler or PoolerSpec(kind="last")
    if pooler.labels:
        raise ConfigError(f"pooling {pooling} makes embeddings, but this model is a classifier")
    return dataclasses.replace(spec, pooler=dataclasses.replace(pooler, kind=cast(Pooling, pooling)))


def computes_in_one_step(spec: ModelSpec) -> bool:
    """True if all tokens of a prompt must be in the same step: they see each other, or a vector is made of them."""
    return spec.kind == "encoder" or (spec.pooler is not None and spec.pooler.kind != "last")


def with_default_pooler(spec: ModelSpec, config: HFConfig) -> ModelSpec:
    """The spec with the head of a decoder that classifies, or the mean of an encoder that names no head.

    A decoder's classifier scores the last token by a linear layer without bias (transformers' `score`); mean
    is what sentence-transformers takes for a plain encoder.
    """
    if spec.pooler is not None:
        return spec
    if is_classifier(config):
        labels = len(read_labels(config))
        score = DenseSpec(name="score", in_features=spec.hidden_size, out_features=labels, bias=False)
        return dataclasses.replace(spec, pooler=classifier(config, "last", score))
    if spec.kind == "encoder":
        return dataclasses.replace(spec, pooler=PoolerSpec(kind="mean"))
    return spec


def vector_size(spec: ModelSpec) -> int:
    """Numbers in the vector of a request."""
    dense = spec.pooler.dense if spec.pooler is not None else ()
    return dense[-1].out_features if dense else spec.hidden_size


def with_head_names(names: NameTable, spec: ModelSpec) -> NameTable:
    """A family's table with the head's layers, which are stored as they are called if the family says no more.

    A head for tokens may be in the file, and is not read then.
    """
    if spec.pooler is None:
        return names
    own = {
        f"{dense.name}.{leaf}": f"{dense.name}.{leaf}" for dense in spec.pooler.dense for leaf in ("weight", "bias")
    }
    heads = [names.entries[name] for name in ("lm_head.weight", "lm_head.bias") if name in names.entries]
    stored = [head.name if isinstance(head, Stored) else head for head in heads]
    ignore = (*names.ignore, *(f"^{re.escape(name)}$" for name in stored))
    return dataclasses.replace(names, entries={**own, **names.entries}, ignore=ignore)


def _activation(config: HFConfig, num_labels: int) -> Scores:
    """What turns logits into scores: what the cross-encoder was saved with, else as transformers' pipelines do."""
    stated = config.mapping("sentence_transformers").get("activation_fn")
    stated = stated or config.get("sbert_ce_default_activation_function")
    if stated:
        name = str(stated).rpartition(".")[2]
        if name not in _ACTIVATIONS:
            raise ModelError(
                f"{config.file} names the activation {stated!r}; known are {', '.join(_ACTIVATIONS)} (of torch.nn)"
            )
        return _ACTIVATIONS[name]
    match config.get("problem_type"):
        case "regression":
            return "none"
        case "multi_label_classification":
            return "sigmoid"
        case "single_label_classification":
            return "softmax"
    return "sigmoid" if num_labels == 1 else "softmax"
