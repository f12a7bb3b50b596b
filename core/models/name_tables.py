"""Weight names of families: one table for what most share, changed by a few lines each."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..weights.names import NameTable, Stored
from .spec import LayerSpec, ModelSpec

LAYER = "model.layers.{i}."
IGNORE = (r"rotary_emb\.inv_freq$", r"^lm_head\.weight$")
"""Buffers, and the copy of the embedding that some tied checkpoints carry; read by name where it is declared."""

_LLAMA: Mapping[str, str | Stored] = {
    "embed_tokens": "model.embed_tokens",
    "final_norm": "model.norm",
    "lm_head": "lm_head",
    "attn.q_proj": "self_attn.q_proj",
    "attn.k_proj": "self_attn.k_proj",
    "attn.v_proj": "self_attn.v_proj",
    "attn.o_proj": "self_attn.o_proj",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "mlp.gate_proj": "mlp.gate_proj",
    "mlp.up_proj": "mlp.up_proj",
    "mlp.down_proj": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}
_PARTS = {
    "attn.qkv_proj": ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.experts.gate_up_proj": ("mlp.experts.{j}.gate_proj", "mlp.experts.{j}.up_proj"),
    "mlp.experts.down_proj": ("mlp.experts.{j}.down_proj",),
    "mlp.shared.gate_up_proj": ("mlp.shared.gate_proj", "mlp.shared.up_proj"),
}
_GLU = ("gate_proj", "up_proj", "down_proj")
PROJECTORS = ("projector.", "taps.")
_MODEL_LEVEL = (
    "embed_", "altup_", "final_norm", "lm_head", "project_", "relative_bias", "convolutions.", "patch_norm",
    *PROJECTORS,
)  # fmt: skip


def glu(ours: str, theirs: str, names: tuple[str, str, str] = _GLU) -> Mapping[str, str | Stored]:
    """Modules of a gated block: `names` of its checkpoints for gate, up and down."""
    return {f"{ours}.{name}": f"{theirs}.{stored}" for name, stored in zip(_GLU, names, strict=True)}


EXPERTS: Mapping[str, str | Stored] = {"mlp.router": "mlp.gate", **glu("mlp.experts.{j}", "mlp.experts.{j}")}
"""Experts as most checkpoints spell them."""
BLOCK_SPARSE_EXPERTS: Mapping[str, str | Stored] = {
    "mlp.router": "block_sparse_moe.gate",
    **glu("mlp.experts.{j}", "block_sparse_moe.experts.{j}", ("w1", "w3", "w2")),
}
"""Experts as Mixtral spells them."""


def joined_experts(at: str, *, transpose: bool = False) -> Mapping[str, str | Stored]:
    """Tensors that hold all experts of a layer. transpose: stored [in_features, out_features]."""
    return {
        f"mlp.experts.{name}.weight": Stored(name=f"{at}{name}", stacked=True, transpose=transpose)
        for name in ("gate_up_proj", "down_proj")
    }


_JOINED_EXPERTS = joined_experts("mlp.experts.")
"""Experts in one tensor a layer, as transformers holds them since version 5, whatever the model."""
CORRECTION: Mapping[str, str | Stored] = {"mlp.router.correction": "mlp.gate.e_score_correction_bias"}
SHARED_EXPERTS = glu("mlp.shared", "mlp.shared_experts")
SHARED_EXPERT = {**glu("mlp.shared", "mlp.shared_expert"), "mlp.shared_gate": "mlp.shared_expert_gate"}
BART_LAYER: Mapping[str, str | Stored] = {
    "attn_norm": "self_attn_layer_norm", **{f"attn.{name}_proj": f"self_attn.{name}_proj" for name in "qkv"},
    "attn.o_proj": "self_attn.out_proj", "mlp_norm": "final_layer_norm", "mlp.up_proj": "fc1", "mlp.down_proj": "fc2",
}  # fmt: skip
"""A layer as BART's descendants spell it."""
LAYER_INPUTS: Mapping[str, str | Stored] = {
    "input_gate": "per_layer_input_gate", "input_proj": "per_layer_projection",
    "input_norm": "post_per_layer_input_norm",
    "embed_layers": Stored(name="model.embed_tokens_per_layer", first_beyond=True),
    "embed_layers_proj": "model.per_layer_model_projection", "embed_layers_norm": "model.per_layer_projection_norm",
}  # fmt: skip
"""What layers read of the tokens themselves, as Gemma spells it."""
SANDWICH: Mapping[str, str | Stored] = {
    "attn_norm": "input_layernorm",
    "attn_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
"""Norms around both blocks, as Gemma 2 spells them."""
_GPT: Mapping[str, str | Stored] = {
    "embed_tokens": "transformer.wte", "attn_norm": "ln_1", "attn.o_proj": "attn.out_proj", "mlp_norm": "ln_2",
    "final_norm": "transformer.ln_f", "lm_head": "lm_head",
}  # fmt: skip


def megatron(at: str) -> Mapping[str, str | Stored]:
    """A layer as Megatron spells it; at: what its attention is called."""
    return {
        "attn_norm": "input_layernorm", "attn.qkv_proj": Stored(name=f"{at}.query_key_value", interleaved=True),
        "attn.o_proj": f"{at}.dense", "mlp_norm": "post_attention_layernorm", "mlp.up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    }  # fmt: skip


def name_table(
    modules: Mapping[str, str | Stored],
    *,
    layer: str = LAYER,
    tensors: Mapping[str, str | Stored] | None = None,
    base_prefix: str = "model.",
    ignore: tuple[str, ...] = IGNORE,
) -> NameTable:
    """A table from the names of modules, each of which may have a weight and a bias.

    modules: canonical -> stored; names of layers are given without `layers.{i}.` and the `layer` of the
    checkpoint. tensors: names that have no .weight or .bias at their end, spelled out in the same way. A
    transposition and other shapes hold for weights alone.
    """
    entries: dict[str, str | Stored] = {}
    of_bias = {"transpose": False, "kernel": 0, "reshape": False, "joined": False}
    for ours, theirs in modules.items():
        stored = _stored(ours, theirs, layer)
        for leaf in ("weight", "bias"):
            also, copies = (tuple(f"{name}.{leaf}" for name in names) for names in (stored.also, stored.copies))
            fields: dict[str, Any] = {} if leaf == "weight" else of_bias
            entries[f"{_canonical(ours)}.{leaf}"] = dataclasses.replace(
                stored, name=f"{stored.name}.{leaf}", also=also, copies=copies, **fields
            )
    for ours, theirs in (tensors or {}).items():
        entries[_canonical(ours)] = _stored(ours, theirs, layer)
    return NameTable(entries=entries, base_prefix=base_prefix, ignore=ignore)


def llama_names(
    changes: Mapping[str, str | Stored] | None = None,
    *,
    tensors: Mapping[str, str | Stored] | None = None,
    ignore: tuple[str, ...] = (),
    renames: tuple[tuple[str, str], ...] = (),
) -> NameTable:
    """Llama's table with some modules named differently, or added; a fused name takes the place of its parts."""
    changes = changes or {}
    replaced = {part for fused, parts in _PARTS.items() if fused in {**changes, **(tensors or {})} for part in parts}
    modules = {ours: name for ours, name in _LLAMA.items() if ours not in replaced}
    if "mlp.experts.{j}.down_proj" in changes:
        tensors = {**_JOINED_EXPERTS, **(tensors or {})}
    table = name_table({**modules, **changes}, tensors=tensors, ignore=IGNORE + ignore)
    return dataclasses.replace(table, renames=renames)


def gpt_names(
    changes: Mapping[str, str | Stored],
    *,
    layer: str = "transformer.h.{i}.",
    tensors: Mapping[str, str | Stored] | None = None,
    ignore: tuple[str, ...] = (),
) -> NameTable:
    """The table of what descends from GPT: a backbone called `transformer`, with some modules named differently."""
    ignore = (*IGNORE, r"\.(attn|attention)\.(masked_|causal_)?(bias|mask)$", *ignore)  # masks kept as buffers
    return name_table({**_GPT, **changes}, layer=layer, tensors=tensors, base_prefix="transformer.", ignore=ignore)


def checkpoint_names(names: NameTable, spec: ModelSpec) -> NameTable:
    """A family's table for a checkpoint of this model, which may hold keys and values of layers that read another's,
    layers that do nothing here, and those behind the last one that predict further tokens; none is read."""
    shared = [i for i, layer in enumerate(spec.layers) if layer.attn.kv_layer >= 0]
    idle = [i for i, layer in enumerate(spec.layers) if layer == LayerSpec()]
    further = range(spec.num_layers, spec.num_layers + spec.num_further_layers)
    moe = next((layer.moe for layer in spec.layers if layer.moe is not None and layer.moe.num_identities), None)
    behind = () if moe is None else range(moe.num_experts, moe.num_experts + moe.num_identities)
    unread = [(shared, r"self_attn\.([kv]_norm|[kv]_proj)\."), (idle, ""), (further, "")]
    ignore = [rf"\blayers\.({'|'.join(map(str, layers))})\.{what}" for layers, what in unread if layers]
    ignore += [rf"\.experts\.({'|'.join(map(str, behind))})\."] if behind else []  # of experts without any
    return dataclasses.replace(names, ignore=(*names.ignore, *ignore))


def _canonical(name: str) -> str:
    return name if name.startswith(_MODEL_LEVEL) else f"layers.{{i}}.{name}"


def _stored(ours: str, theirs: str | Stored, layer: str) -> Stored:
    stored = theirs if isinstance(theirs, Stored) else Stored(name=theirs)
    if ours.startswith(_MODEL_LEVEL):
        return stored
    scaled_by = layer + stored.scaled_by if stored.scaled_by else ""
    also = tuple(layer + name for name in stored.also)
    return dataclasses.replace(stored, name=layer + stored.name, also=also, scaled_by=scaled_by)


LLAMA_NAMES = llama_names()
GEMMA_NAMES = llama_names(SANDWICH)
