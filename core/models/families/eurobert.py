"""EuroBERT (Boizard et al. 2025): Llama that sees in both directions."""

import dataclasses

from ...errors import ModelError
from ..bert_like import two_layer_head
from ..config import HFConfig
from ..llama_like import llama_like
from ..name_tables import LLAMA_NAMES
from ..spec import ModelSpec, PoolerSpec

WEIGHTS = dataclasses.replace(
    LLAMA_NAMES,
    entries={
        **LLAMA_NAMES.entries,
        **{f"{name}.{leaf}": f"{name}.{leaf}" for name in ("dense", "classifier") for leaf in ("weight", "bias")},
    },
)


def to_spec(config: HFConfig) -> ModelSpec:
    """Llama without a cache and without a head for tokens."""
    config = config.with_defaults(max_position_embeddings=8192, hidden_act="silu")
    spec = llama_like(config, rms_norm_eps=1e-5)
    if config.boolean("attention_bias", False) or config.boolean("mlp_bias", False):
        raise ModelError(f"{config.file} asks for biases, which no published eurobert has")
    return dataclasses.replace(spec, kind="encoder", pooler=_head(config))


def _head(config: HFConfig) -> PoolerSpec | None:
    kinds = {"bos": "cls", "mean": "mean"}
    pooling = config.text("classifier_pooling", "late")
    head = two_layer_head(config, ("dense", "classifier"), "gelu", "mean" if pooling == "mean" else "cls")
    if head is not None and pooling not in kinds:
        raise ModelError(f"{config.file} pools by {pooling!r} behind its head; served are {', '.join(kinds)}")
    return head
