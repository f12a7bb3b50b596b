"""Weight names of families: one table for what most share, changed by a few lines each."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..weights.names import NameTable, Stored
from .config import NOTHING
from .spec import LayerSpec, ModelSpec

LAYER = "model.layers.{i}."
IGNORE = (r"rotary_emb\.inv_freq$", r"^lm_head\.weight$")
"""Buffers, and the copy of the embedding that some tied checkpoints carry; read by name where it is declared."""

PROJECTORS = ("projector.", "taps.")
_MODEL_LEVEL = (
    "embed_", "altup_", "final_norm", "lm_head", "project_", "relative_bias", "convolutions.", "patch_norm",
    *PROJECTORS,
)  # fmt: skip


BART_LAYER: Mapping[str, str | Stored] = {
    "attn_norm": "self_attn_layer_norm", **{f"attn.{name}_proj": f"self_attn.{name}_proj" for name in "qkv"},
    "attn.o_proj": "self_attn.out_proj", "mlp_norm": "final_layer_norm", "mlp.up_proj": "fc1", "mlp.down_proj": "fc2",
}  # fmt: skip
"""A layer as BART's descendants spell it."""
SANDWICH: Mapping[str, str] = {
    "attn_post_norm": "post_attention_layernorm", "mlp_norm": "pre_feedforward_layernorm pre_mlp_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm post_mlp_layernorm",
}  # fmt: skip
"""Norms around both blocks, as Gemma 2 spells them, whose post_attention_layernorm is not Llama's."""


def glu(ours: str, *theirs: str) -> Mapping[str, str]:
    """Modules of a gated block that is called one of `theirs`: gate_proj, up_proj and down_proj, or w1, w3 and w2."""
    leaves = (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))
    return {f"{ours}.{pair[0]}": " ".join(f"{at}.{leaf}" for at in theirs for leaf in pair) for pair in leaves}


_EXPERTS = tuple(f"{at}.experts.{{j}}" for at in ("mlp", "block_sparse_moe", "feed_forward"))
_SHARED = ("mlp.shared_experts", "mlp.shared_expert", "mlp.shared_mlp", "feed_forward.shared_expert")
_LLAMA: Mapping[str, str] = {
    "embed_tokens": "model.embed_tokens model.word_embeddings", "lm_head": "lm_head",
    "final_norm": "model.norm model.final_layernorm model.final_norm model.embedding_norm",
    "attn_norm": "input_layernorm attention_layernorm operator_norm",
    "attn_post_norm": "post_self_attn_layernorm post_operator_norm post_norm1",
    "mlp_norm": "post_attention_layernorm pre_feedforward_layernorm pre_ff_layernorm feedforward_layernorm ffn_norm",
    "mlp_post_norm": "post_mlp_layernorm post_feedforward_layernorm post_ffn_norm post_norm2",
    **{f"attn.{name}_proj": f"self_attn.{name}_proj" for name in ("q", "k", "v", "q_a", "q_b", "kv_b")},
    "attn.qkv_proj": "self_attn.qkv_proj self_attn.W_pack attention.query_key_value",
    "attn.o_proj": "self_attn.o_proj self_attn.out_proj self_attn.dense attention.dense",
    "attn.q_norm": "self_attn.q_norm self_attn.q_layernorm self_attn.query_layernorm attention.query_layernorm",
    "attn.k_norm": "self_attn.k_norm self_attn.k_layernorm self_attn.key_layernorm attention.key_layernorm",
    "attn.gate_proj": "self_attn.gate_proj self_attn.g_proj", "attn.out_norm": "self_attn.attn_sub_norm",
    "attn.kv_a_proj": "self_attn.kv_a_proj_with_mqa", "attn.kv_a_norm": "self_attn.kv_a_layernorm",
    "attn.q_a_norm": "self_attn.q_a_layernorm",
    "mlp.gate_up_proj": "mlp.gate_up_proj shared_mlp.input_linear", **glu("mlp", "mlp", "feed_forward"),
    "mlp.up_proj": "mlp.up_proj mlp.fc1 mlp.c_fc feed_forward.up_proj feed_forward.w3",
    "mlp.down_proj": "mlp.down_proj mlp.fc2 mlp.c_proj feed_forward.down_proj feed_forward.w2 "
    "shared_mlp.output_linear",
    "mlp.inner_norm": "mlp.ffn_sub_norm", **glu("mlp.experts.{j}", *_EXPERTS), **glu("mlp.shared", *_SHARED),
    "mlp.router": "mlp.gate mlp.router mlp.router.gate mlp.gate.wg block_sparse_moe.gate block_sparse_moe.router "
    "block_sparse_moe.router.layer feed_forward.gate feed_forward.router",
    "mlp.shared_gate": "mlp.shared_expert_gate", "mlp.shared.gate_up_proj": "shared_mlp.input_linear",
    "mlp.shared.down_proj": " ".join(f"{at}.down_proj" for at in _SHARED) + " shared_mlp.output_linear",
    "mixer.in_proj": "mamba.in_proj conv.in_proj", "mixer.conv": "mamba.conv1d linear_attn.conv1d conv.conv",
    "mixer.out_proj": "mamba.out_proj linear_attn.out_proj conv.out_proj",
    "mixer.norm": "mamba.norm linear_attn.norm",
    "input_gate": "per_layer_input_gate", "input_proj": "per_layer_projection",
    "input_norm": "post_per_layer_input_norm", "embed_layers_proj": "model.per_layer_model_projection",
    "embed_layers_norm": "model.per_layer_projection_norm",
}  # fmt: skip
"""Modules of Llama's descendants: all ways in which they spell what is the same in each. A checkpoint has one."""
_LLAMA_TENSORS: Mapping[str, str | Stored] = {
    "attn.sinks": "self_attn.sinks self_attn.attention_sink_bias self_attn.softmax_offset",
    "mlp.router.correction": "mlp.gate.e_score_correction_bias mlp.e_score_correction_bias mlp.expert_bias "
    "mlp.experts.e_score_correction_bias mlp.gate.expert_bias block_sparse_moe.e_score_correction_bias "
    "feed_forward.expert_bias",
    "mlp.experts.gate_up_proj.weight": Stored(
        name="mlp.experts.gate_up_proj block_sparse_moe.experts.gate_up_proj block_sparse_moe.input_linear.weight",
        stacked=True,
    ),
    "mlp.experts.down_proj.weight": Stored(
        name="mlp.experts.down_proj block_sparse_moe.experts.down_proj block_sparse_moe.output_linear.weight",
        stacked=True,
    ),
    "mixer.a_log": "mamba.A_log linear_attn.A_log", "mixer.d": "mamba.D",
    "mixer.dt_bias": "mamba.dt_bias linear_attn.dt_bias",
    "embed_layers.weight": Stored(name="model.embed_tokens_per_layer.weight", first_beyond=True),
}  # fmt: skip
_GPT: Mapping[str, str] = {
    "embed_tokens": "transformer.wte transformer.word_embeddings transformer.tokens_embed transformer.w",
    "embed_positions": "transformer.wpe transformer.positions_embed",
    "embed_norm": "transformer.word_embeddings_layernorm",
    "final_norm": "transformer.ln_f transformer.norm_f transformer.layernorm", "lm_head": "lm_head",
    "attn_norm": "ln_1 input_layernorm norm_1 layernorm1 ln_attn",
    "mlp_norm": "ln_2 post_attention_layernorm norm_2 layernorm2 ln_mlp",
    **{f"attn.{n}_proj": f"attn.{n}_proj attn.attention.{n}_proj multi_head_attention.W{n}" for n in "qkv"},
    "attn.o_proj": "attn.out_proj attn.c_proj attn.attention.out_proj self_attention.dense "
    "multi_head_attention.dense",
    "attn.qkv_proj": "attn.Wqkv", "mlp.gate_proj": "mlp.c_fc_0",
    "mlp.up_proj": "mlp.c_fc mlp.c_fc_1 mlp.fc_in mlp.dense_h_to_4h ffn.up_proj ffn.0",
    "mlp.down_proj": "mlp.c_proj mlp.fc_out mlp.dense_4h_to_h ffn.down_proj ffn.2",
}  # fmt: skip
"""The same for GPT's descendants."""


def joined_experts(at: str, *, transpose: bool = False) -> Mapping[str, str | Stored]:
    """Tensors that hold all experts of a layer. transpose: stored [in_features, out_features]."""
    return {
        f"mlp.experts.{name}.weight": Stored(name=f"{at}{name}", stacked=True, transpose=transpose)
        for name in ("gate_up_proj", "down_proj")
    }


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
    tensors: Mapping[str, str | Stored] = NOTHING,
    base_prefix: str = "model.",
    ignore: tuple[str, ...] = IGNORE,
    renames: tuple[tuple[str, str], ...] = (),
) -> NameTable:
    """A table from the names of modules, each of which may have a weight and a bias.

    modules: canonical -> stored, several spellings with spaces between them; names of layers are given without
    `layers.{i}.` and the `layer` of the checkpoint. tensors: names that have no .weight or .bias at their end,
    spelled out in the same way. A transposition and other shapes hold for weights alone. renames: see NameTable.
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
    for ours, theirs in tensors.items():
        entries[_canonical(ours)] = _stored(ours, theirs, layer)
    return NameTable(entries=entries, base_prefix=base_prefix, ignore=ignore, renames=renames)


def llama_names(
    changes: Mapping[str, str | Stored] = NOTHING,
    *,
    tensors: Mapping[str, str | Stored] = NOTHING,
    ignore: tuple[str, ...] = (),
    **options: Any,
) -> NameTable:
    """Llama's table with some modules named differently, or added. options: as `name_table` takes them."""
    tensors = {**_LLAMA_TENSORS, **tensors}
    return name_table({**_LLAMA, **changes}, tensors=tensors, ignore=IGNORE + ignore, **options)


def gpt_names(
    changes: Mapping[str, str | Stored] = NOTHING,
    *,
    layer: str = "transformer.h.{i}.",
    tensors: Mapping[str, str | Stored] = NOTHING,
    ignore: tuple[str, ...] = (),
) -> NameTable:
    """The table of what descends from GPT: a backbone called `transformer`, with some modules named differently."""
    ignore = (*IGNORE, r"\.(attn|attention)\.(masked_|causal_)?(bias|mask)$", *ignore)  # masks kept as buffers
    return name_table({**_GPT, **changes}, layer=layer, tensors=tensors, base_prefix="transformer.", ignore=ignore)


def checkpoint_names(names: NameTable, spec: ModelSpec) -> NameTable:
    """A family's table for a checkpoint of this model, which may hold keys and values of layers that read another's,
    layers that do nothing here, those behind the last one that predict further tokens, gates of no experts, adapters
    of other layers, and positions before the first; none is read."""
    shared = [i for i, layer in enumerate(spec.layers) if layer.attn.kv_layer >= 0]
    idle = [i for i, layer in enumerate(spec.layers) if layer == LayerSpec()]
    further = range(spec.num_layers, spec.num_layers + spec.num_further_layers)
    moe = next((layer.moe for layer in spec.layers if layer.moe is not None and layer.moe.num_identities), None)
    behind = () if moe is None else range(moe.num_experts, moe.num_experts + moe.num_identities)
    unread = [(shared, r"self_attn\.([kv]_norm|[kv]_proj)\."), (idle, ""), (further, "")]
    ignore = [rf"\blayers\.({'|'.join(map(str, layers))})\.{what}" for layers, what in unread if layers]
    ignore += [rf"\.experts\.({'|'.join(map(str, behind))})\."] if behind else []  # of experts without any
    if any(layer.moe is not None and layer.moe.shared_gated and layer.moe.shared is None for layer in spec.layers):
        ignore += [r"\.shared_expert_gate\.weight$"]
    adapted = [layer.shared.number for layer in spec.layers if layer.shared is not None]
    if adapted and not spec.tie_word_embeddings:  # each layer has a block of its own, with adapters of others, too
        ignore += [rf"_adapter_list\.({'|'.join(map(str, adapted))})\."]
    entries = dict(names.entries)
    for at in ("", "encoder."):
        positions = names.entry(name := f"{at}embed_positions.weight")
        if spec.first_position and positions is not None:
            entries[name] = dataclasses.replace(positions, skip_rows=spec.first_position)
    return dataclasses.replace(names, entries=entries, ignore=(*names.ignore, *ignore))


def _canonical(name: str) -> str:
    return name if name.startswith(_MODEL_LEVEL) else f"layers.{{i}}.{name}"


def _stored(ours: str, theirs: str | Stored, layer: str) -> Stored:
    stored = theirs if isinstance(theirs, Stored) else Stored(name=theirs)
    at = "" if ours.startswith(_MODEL_LEVEL) else layer
    first, *also = (at + name for name in (*stored.name.split(), *stored.also))
    scaled_by = at + stored.scaled_by if stored.scaled_by else ""
    return dataclasses.replace(stored, name=first, also=tuple(also), scaled_by=scaled_by)


LLAMA_NAMES = llama_names()
