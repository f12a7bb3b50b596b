"""llama.cpp's architectures as data: which family serves each, and what its files leave unsaid."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..weights.names import Stored
from . import gguf_special as special
from .gguf_file import GGUFFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Arch:
    """One value of general.architecture.

    values: keys of config.json that no file states because llama.cpp's code knows them, or that hold where a file
    does not. keys: those that the file states under other names than KEYS says, GGUF's name first. special: makes
    others, of the file and of all these. by_layer: GGUF's keys that are lists with a number for each layer. modules,
    tensors: names of tensors of layers that differ, as gguf_names spells them; "" where there is none. in_pairs:
    query and key rows are reordered for interleaved rope.
    """

    model_type: str
    values: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    special: Callable[[GGUFFile, Mapping[str, Any]], Mapping[str, Any]] = lambda file, values: {}
    by_layer: tuple[str, ...] = ()
    modules: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[str, Stored] = field(default_factory=dict)
    in_pairs: bool = False


def _plain(names: str, **fields: Any) -> Mapping[str, Arch]:
    """Architectures that are families: "arch=model_type", or one name for both."""
    pairs = (name.partition("=") for name in names.split())
    return {arch: Arch(model_type=model_type or arch, **fields) for arch, _, model_type in pairs}


_EXPERTS_ALONE = {"expert_feed_forward_length": "intermediate_size"}
_KIMI = {
    **{f"mixer.{name}_proj": f"attn_{name}" for name in "qkv"},
    "mixer.qkv_proj": "",
    "mixer.out_proj": "attn_output",
    **{
        f"mixer.{ours}_{ab}_proj": f"ssm_{theirs}_{ab}"
        for ours, theirs in (("decay", "f"), ("gate", "g"))
        for ab in "ab"
    },
}
_QWEN3_5: Mapping[str, Any] = {
    "modules": {"mixer.dt_proj": "ssm_alpha"},
    "tensors": {
        "mixer.qkv_proj.weight": Stored(name="attn_qkv.weight", tiled=True),
        "mixer.conv.weight": Stored(name="ssm_conv1d.weight", tiled=True, reshape=True),
    },
    # Heads of values are stored in turn of the keys that they read, which are then as many: repeated.
    "special": lambda file, _: {"linear_num_key_heads": file.keys.size("ssm.time_step_rank")},
}
ARCHS: Mapping[str, Arch] = {
    # Mistral and Mixtral ship as llama; so do InternLM 3 and Baichuan.
    "llama": Arch(model_type="llama", in_pairs=True, special=special.llama),
    **_plain(
        "qwen2 qwen3 phi3 gpt2 gemma starcoder2 nemotron glm4 bloom seed_oss jais2 ernie4_5 dots1 exaone exaone4 "
        "minicpm3 nomic-bert=nomic_bert eurobert phimoe jamba chatglm=glm phi2=phi ernie4_5-moe=ernie4_5_moe "
        "exaone-moe=exaone_moe hunyuan-dense=hunyuan_v1_dense hunyuan-moe=hunyuan_v1_moe glm4moe=glm4_moe "
        "glm-dsa=glm_moe_dsa minimax-m2=minimax_m2 qwen2vl=qwen2_vl_text qwen3vl=qwen3_vl_text "
        "qwen3vlmoe=qwen3_vl_moe_text"
    ),
    **_plain("arcee smollm3 olmo internlm2 baichuan granite granitemoe=granitemoeshared", in_pairs=True),
    **_plain("olmoe qwen2moe=qwen2_moe", values={"norm_topk_prob": False}),
    **_plain("qwen3moe=qwen3_moe qwen3next=qwen3_next", values={"norm_topk_prob": True}),
    **_plain("command-r=cohere cohere2", values={"logit_scale": 1.0}),
    **_plain("lfm2 lfm2moe=lfm2_moe", values={"block_auto_adjust_ff_dim": False}),
    **_plain(
        "nemotron_h nemotron_h_moe=nemotron_h", modules={"mlp_norm": "attn_norm"}, special=special.nemotron_h
    ),
    **_plain("qwen35=qwen3_5_text qwen35moe=qwen3_5_moe_text", **_QWEN3_5),
    "gemma2": Arch(model_type="gemma2", values={"sliding_window": 4096}, special=special.gemma2),
    "gemma3": Arch(model_type="gemma3_text", special=special.gemma3),
    "gemma-embedding": Arch(
        model_type="gemma3_text", values={"use_bidirectional_attention": True}, special=special.gemma3
    ),
    "gemma3n": Arch(model_type="gemma3n_text", special=special.gemma3n, by_layer=("feed_forward_length",)),
    "gemma4": Arch(
        model_type="gemma4_text", special=special.gemma4, by_layer=("feed_forward_length", "attention.head_count_kv"),
        values={"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    ),
    "olmo2": Arch(
        model_type="olmo2", special=lambda _, values: {"model_type": "olmo3"} if values["sliding_window"] else {}
    ),
    "granitehybrid": Arch(model_type="granitemoehybrid", in_pairs=True, special=special.granite_hybrid),
    "minicpm": Arch(
        model_type="granite", in_pairs=True, values={"embedding_multiplier": 12.0}, special=special.minicpm
    ),
    "gpt-oss": Arch(
        model_type="gpt_oss", keys=_EXPERTS_ALONE,
        special=lambda _, values: {"rope_parameters": {**values["rope_parameters"], "truncate": False}},
    ),
    "stablelm": Arch(
        model_type="stablelm",
        special=lambda file, _: {"use_parallel_residual": "ffn_norm.weight" not in file.leaves},
    ),
    "gptneox": Arch(model_type="gpt_neox", keys={"use_parallel_residual": "use_parallel_residual"}),
    "falcon": Arch(model_type="falcon", special=special.falcon),
    "starcoder": Arch(
        model_type="gpt_bigcode",
        special=lambda file, _: {"multi_query": file.keys.integer("attention.head_count_kv", 1) == 1},
    ),
    "mpt": Arch(model_type="mpt", special=special.mpt),
    "dbrx": Arch(model_type="dbrx", modules={"mlp_norm": "attn_output_norm"}, special=special.dbrx),
    "deepseek2": Arch(model_type="deepseek_v2", special=special.deepseek2),
    "mistral3": Arch(model_type="ministral3", in_pairs=True, special=special.mistral3),
    "mistral4": Arch(model_type="mistral4", special=special.mistral3),
    "mimo2": Arch(
        model_type="mimo_v2_flash", special=special.mimo2, by_layer=("attention.head_count_kv",),
        values={"norm_topk_prob": True, "n_group": 1, "attention_value_scale": 1.0},
        keys={"attention.value_length": "v_head_dim", "attention.value_scale": "attention_value_scale"},
    ),
    # Maverick's heads are not normalised.
    "llama4": Arch(
        model_type="llama4_text", special=lambda file, _: {"use_qk_norm": file.keys.get("expert_count") != 128}
    ),
    "afmoe": Arch(model_type="afmoe", values={"mup_enabled": True}),
    "mamba": Arch(
        model_type="mamba", values={"use_bias": False}, keys={"ssm.inner_size": "intermediate_size"},
        special=lambda f, _: {"model_type": "falcon_mamba"} if f.keys.boolean("ssm.dt_b_c_rms", False) else {},
    ),
    "mamba2": Arch(model_type="mamba2", keys={"ssm.time_step_rank": "num_heads"}),
    # Multipliers are part of the weights.
    "falcon-h1": Arch(
        model_type="falcon_h1", values={"mamba_norm_before_gate": False},
        tensors={"mlp_norm.weight": Stored(name="ffn_norm", also=("ffn_norm.weight",))},
    ),
    "kimi-linear": Arch(
        model_type="kimi_linear", modules=_KIMI, values={"norm_topk_prob": True, "n_group": 1},
        keys={"kda.head_dim": "linear_head_dim", "attention.head_count": "num_attention_heads linear_num_heads"},
    ),
    "apertus": Arch(model_type="apertus", special=special.apertus),
    "bitnet": Arch(model_type="bitnet", values={"hidden_act": "silu"}, keys={"hidden_act": "hidden_act"}),
    # Positions of RoBERTa's descendants are stored from the first that is read.
    "bert": Arch(model_type="bert"),
    "modern-bert": Arch(
        model_type="modernbert", special=partial(special.two_ropes, sliding=160_000.0, full=160_000.0),
        keys={
            "attention.sliding_window": "local_attention", "hidden_act": "hidden_activation",
            "attention.sliding_window_pattern": "global_attn_every_n_layers",
        },
    ),
    "t5": Arch(model_type="t5", special=special.t5),
}  # fmt: skip
KEYS: Mapping[str, str] = {
    "context_length": "max_position_embeddings n_positions seq_length max_seq_len",
    "embedding_length": "hidden_size n_embd d_model",
    "feed_forward_length": "intermediate_size n_inner ffn_hidden_size d_ff intermediate_size_mlp",
    "attention.head_count": "num_attention_heads n_head n_heads num_heads",
    "attention.head_count_kv": "num_key_value_heads num_kv_heads",
    "attention.layer_norm_epsilon": "layer_norm_eps layer_norm_epsilon norm_epsilon norm_eps",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps layer_norm_epsilon norm_eps",
    "attention.sliding_window": "sliding_window",
    "attention.clamp_kqv": "clip_qkv",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.scale": "attention_multiplier",
    "attention.indexer.top_k": "index_topk",
    "embedding_scale": "embedding_multiplier",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "attention.relative_buckets_count": "relative_attention_num_buckets",
    "altup.num_inputs": "altup_num_inputs",
    "altup.active_idx": "altup_active_idx",
    "decoder_block_count": "num_decoder_layers",
    "logit_scale": "logit_scale logits_scaling",
    "residual_scale": "residual_multiplier",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_experts num_local_experts n_routed_experts moe_num_experts",
    "expert_used_count": "num_experts_per_tok moe_k moe_topk",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size moe_shared_expert_intermediate_size "
    "shared_intermediate_size",
    "expert_shared_count": "n_shared_experts moe_num_shared_experts num_shared_experts",
    "expert_weights_scale": "routed_scaling_factor route_scale",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "moe_latent_size": "moe_latent_size",
    "leading_dense_block_count": "first_k_dense_replace moe_layer_start_index num_dense_layers",
    "interleave_moe_layer_step": "moe_layer_interval interleave_moe_layer_step",
    "nextn_predict_layers": "num_nextn_predict_layers",
    "ssm.conv_kernel": "mamba_d_conv conv_kernel linear_conv_kernel_dim",
    "ssm.state_size": "mamba_d_state state_size ssm_state_size linear_key_head_dim",
    "ssm.group_count": "mamba_n_groups n_groups linear_num_key_heads",
    "shortconv.l_cache": "conv_L_cache",
}
"""Keys of GGUF, without the architecture before them -> all spellings of config.json; families read their own."""
FLAGS: Mapping[str, str] = {
    "attn_q.bias attn_qkv.bias attn_q_a.bias": "attention_bias qkv_bias use_qkv_bias use_bias add_qkv_bias bias",
    "attn_output.bias": "attention_out_bias",
    "ffn_down.bias ffn_up.bias": "mlp_bias",
    "attn_q_norm.weight": "use_qk_norm qk_layernorm",
    "ssm_conv1d.bias": "mamba_conv_bias use_conv_bias",
    "ssm_in.bias": "mamba_proj_bias",
    "shortconv.conv.bias": "conv_bias",
    "ssm_norm.weight": "mamba_rms_norm",
    "exp_probs_b.bias": "use_expert_bias",
}
"""Tensors of layers, any of which makes the keys true."""
