"""llama.cpp's tensor names for the parameters of a spec."""

from collections.abc import Collection, Mapping
from dataclasses import replace

from ..weights.names import NameTable, Stored
from .gguf_archs import ARCHS
from .spec import ModelSpec

_MODULES: Mapping[str, str] = {
    "attn_norm": "attn_norm",
    "attn.q_proj": "attn_q", "attn.k_proj": "attn_k", "attn.v_proj": "attn_v", "attn.qkv_proj": "attn_qkv",
    "attn.q_norm": "attn_q_norm", "attn.k_norm": "attn_k_norm", "attn.o_proj": "attn_output",
    "attn.gate_proj": "attn_gate", "attn.q_a_proj": "attn_q_a", "attn.q_a_norm": "attn_q_a_norm",
    "attn.q_b_proj": "attn_q_b", "attn.kv_a_proj": "attn_kv_a_mqa", "attn.kv_a_norm": "attn_kv_a_norm",
    "attn.kv_b_proj": "attn_kv_b", "attn_post_norm": "post_attention_norm", "mlp_norm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp_post_norm": "post_ffw_norm", "mlp.router": "ffn_gate_inp", "mlp.shared_gate": "ffn_gate_inp_shexp",
    **{f"mlp.experts.{{j}}.{name}_proj": f"ffn_{name}_exps.{{j}}" for name in ("gate", "up", "down")},
    **{f"mlp.shared.{name}_proj": f"ffn_{name}_shexp" for name in ("gate", "up", "down")},
    "mlp.latent_in": "ffn_latent_down", "mlp.latent_out": "ffn_latent_up", "mlp.inner_norm": "ffn_sub_norm",
    "attn.out_norm": "attn_sub_norm",
    "input_gate": "inp_gate", "input_proj": "proj", "input_norm": "post_norm", "mlp_out_norm": "post_ffw_norm_1",
    "moe_norm": "pre_ffw_norm_2", "moe_out_norm": "post_ffw_norm_2", "moe.router": "ffn_gate_inp",
    **{f"moe.experts.{{j}}.{name}_proj": f"ffn_{name}_exps.{{j}}" for name in ("gate", "up")},
    "altup.router_norm": "altup_router_norm", "altup.router": "altup_router", "altup.predict": "altup_predict_coef",
    "altup.correct": "altup_correct_coef", "laurel.in_proj": "laurel_l", "laurel.out_proj": "laurel_r",
    "laurel.norm": "laurel_post_norm",
    "mixer.in_proj": "ssm_in shortconv.in_proj", "mixer.out_proj": "ssm_out shortconv.out_proj",
    "mixer.x_proj": "ssm_x", "mixer.dt_proj": "ssm_dt",
    "mixer.qkv_proj": "attn_qkv", "mixer.z_proj": "attn_gate",
    "mixer.beta_proj": "ssm_beta", "mixer.dt_norm": "ssm_dt_norm",
    "mixer.b_norm": "ssm_b_norm", "mixer.c_norm": "ssm_c_norm",
}  # fmt: skip
"""Modules of a layer."""
_TENSORS: Mapping[str, Stored] = {
    "altup.scale": Stored(name="altup_correct_scale.weight"),
    "scalar": Stored(name="layer_output_scale.weight", is_scalar=True),
    "moe.router_norm.weight": Stored(name="ffn_gate_inp.scale"),
    "moe.experts.{j}.down_proj.weight": Stored(name="ffn_down_exps.{j}.weight", scaled_by="ffn_down_exps.{j}.scale"),
    "attn.sinks": Stored(name="attn_sinks.weight"),
    "mlp.router.correction": Stored(name="exp_probs_b.bias", reshape=True),
    "mixer.a_log": Stored(name="ssm_a", reshape=True, minus_exp=True),
    "mixer.d": Stored(name="ssm_d", reshape=True),
    "mixer.dt_bias": Stored(name="ssm_dt.bias"),
    "mixer.gates_proj.weight": Stored(name="ssm_ba.weight", interleaved=True),
    "mixer.norm.weight": Stored(name="ssm_norm.weight", reshape=True),
    "mixer.conv.weight": Stored(name="ssm_conv1d.weight", also=("shortconv.conv.weight",), reshape=True),
    **{f"mixer.{name}_conv.weight": Stored(name=f"ssm_conv1d_{name}.weight", reshape=True) for name in "qkv"},
    "mixer.conv.bias": Stored(name="ssm_conv1d.bias", also=("shortconv.conv.bias",)),
}
"""Tensors of a layer that are stored in a shape of their own."""
_MODEL: Mapping[str, str] = {
    "embed_tokens": "token_embd", "embed_positions": "position_embd", "embed_token_types": "token_types",
    "embed_norm": "token_embd_norm", "final_norm": "output_norm", "lm_head": "output",
    "embed_layers_proj": "per_layer_model_proj", "embed_layers_norm": "per_layer_proj_norm",
    "altup_in.{i}": "altup_proj.{i}", "altup_out.{i}": "altup_unembd_proj.{i}",
}  # fmt: skip


_T5: Mapping[str, str] = {
    **{f"attn.{name}_proj": f"attn_{name}" for name in "qkvo"}, "attn_norm": "attn_norm",
    **{f"cross.{name}_proj": f"cross_attn_{name}" for name in "qkvo"}, "cross_norm": "cross_attn_norm",
    **{f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")}, "mlp_norm": "ffn_norm",
    "attn.relative_bias": "attn_rel_b",
}  # fmt: skip


def gguf_names(arch: str, spec: ModelSpec, tensor_names: Collection[str]) -> NameTable:
    """Names for a model of one of `ARCHS`, as UnstackedSource gives those of experts. tensor_names: of the file.

    Norms that a family stores without their one come with it.
    """
    if arch == "t5":
        return _t5_names()
    attn = next((layer.attn for layer in spec.layers if layer.has_attention), spec.layers[0].attn)
    pairs = {"attn.q_proj": attn.num_heads, "attn.k_proj": attn.num_kv_heads} if ARCHS[arch].in_pairs else {}
    modules = {**_MODEL, **_MODULES, **_by_layout(spec, tensor_names), **ARCHS[arch].modules}
    if pairs:  # no file fuses what it reorders
        modules["attn.qkv_proj"] = ""
    entries: dict[str, str | Stored] = {}
    for leaf in ("weight", "bias"):
        for ours, theirs in modules.items():
            ours_at, theirs_at = ("", "") if ours in _MODEL else ("layers.{i}.", "blk.{i}.")
            spellings = [f"{theirs_at}{spelling}.{leaf}" for spelling in theirs.split()]
            if spellings:
                entries[f"{ours_at}{ours}.{leaf}"] = Stored(
                    name=spellings[0], also=tuple(spellings[1:]), rope_pairs=pairs.get(ours, 0)
                )
    for ours, stored in {**_TENSORS, **ARCHS[arch].tensors}.items():
        also = tuple(f"blk.{{i}}.{name}" for name in stored.also)
        scaled_by = f"blk.{{i}}.{stored.scaled_by}" if stored.scaled_by else ""
        entries[f"layers.{{i}}.{ours}"] = replace(
            stored, name=f"blk.{{i}}.{stored.name}", also=also, scaled_by=scaled_by
        )
    if attn.qk_norm_over == "heads":
        for name in ("q_norm", "k_norm"):
            entries[f"layers.{{i}}.attn.{name}.weight"] = Stored(name=f"blk.{{i}}.attn_{name}.weight", reshape=True)
    entries["embed_layers.weight"] = Stored(name="per_layer_token_embd.weight", first_beyond=True)
    further = "|".join(str(spec.num_layers + n) for n in range(spec.num_further_layers))
    ignore = (*_IGNORE, rf"^blk\.({further})\.") if further else _IGNORE
    if shared := "|".join(str(i) for i, layer in enumerate(spec.layers) if layer.attn.kv_layer >= 0):
        ignore = (*ignore, rf"^blk\.({shared})\.attn_(k|v|k_norm)\.")
    return NameTable(entries=entries, base_prefix="", ignore=ignore, adds_one=True)


def _t5_names() -> NameTable:
    """Both halves of a T5."""
    entries: dict[str, str | Stored] = {"embed_tokens.weight": "token_embd.weight", "lm_head.weight": "output.weight"}
    for ours, theirs in (("encoder.", "enc"), ("", "dec")):
        entries |= {
            f"{ours}final_norm.weight": f"{theirs}.output_norm.weight",
            f"{ours}relative_bias.weight": f"{theirs}.blk.0.attn_rel_b.weight",
            **{f"{ours}layers.{{i}}.{m}.weight": f"{theirs}.blk.{{i}}.{name}.weight" for m, name in _T5.items()},
        }
    return NameTable(entries=entries, base_prefix="", ignore=(r"cross_attn_rel_b",))


def _by_layout(spec: ModelSpec, tensor_names: Collection[str]) -> dict[str, str]:
    """Modules whose names depend on which norms a layer has, and on whether gate and up are one tensor."""
    modules, layer = dict[str, str](), spec.layers[0]
    if layer.norm_after_add:
        modules |= {"attn_post_norm": "attn_output_norm", "mlp_post_norm": "layer_output_norm"}
    elif not layer.post_norm:
        modules["mlp_norm"] = "ffn_norm post_attention_norm"
    if any(name.endswith(".attn_norm_2.weight") for name in tensor_names):  # Falcon 40B's two norms
        modules |= {"attn_norm": "attn_norm_2", "mlp_norm": "attn_norm"}
    if not spec.embed_norm:
        modules["final_norm"] = "output_norm token_embd_norm"
    dense = [layer.mlp for layer in spec.layers if layer.mlp.intermediate_size and layer.moe is None]
    if any(mlp.gated for mlp in dense) and not any(name.endswith(".ffn_gate.weight") for name in tensor_names):
        modules |= {"mlp.gate_up_proj": "ffn_up", "mlp.gate_proj": "", "mlp.up_proj": ""}
    return modules


_IGNORE = (r"\.indexer\.", r"^rope_(freqs|factors_long|factors_short)\.weight$", r"\.attn_rot_embd$")
"""The rope tensors are part of the config: config_from_gguf reads them."""
