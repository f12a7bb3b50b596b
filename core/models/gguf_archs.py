"""llama.cpp's architectures as data: which family serves each, and what its files leave unsaid."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Arch:
    """One value of general.architecture.

    values: keys of config.json that no file states because llama.cpp's code knows them. keys: those that the file
    states under other names than KEYS says, GGUF's name first. modules: names of tensors that differ, as gguf_names
    spells them; "" where there is none. in_pairs: query and key rows are reordered for interleaved rope.
    """

    model_type: str
    values: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)
    in_pairs: bool = False


_EXPERTS_ALONE = {"expert_feed_forward_length": "intermediate_size"}
_ONE_NORM = {"mlp_norm": "attn_norm"}
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
_ALPHA = {"mixer.dt_proj": "ssm_alpha"}
ARCHS: Mapping[str, Arch] = {
    # Mistral and Mixtral ship as llama; so do InternLM 3 and Baichuan.
    "llama": Arch(model_type="llama", in_pairs=True),
    "qwen2": Arch(model_type="qwen2"),
    "qwen3": Arch(model_type="qwen3"),
    "gemma2": Arch(model_type="gemma2"),
    "gemma3": Arch(model_type="gemma3_text"),
    "gemma-embedding": Arch(model_type="gemma3_text", values={"use_bidirectional_attention": True}),
    "phi3": Arch(model_type="phi3"),
    "olmo2": Arch(model_type="olmo2"),
    "granite": Arch(model_type="granite", in_pairs=True),
    "gpt2": Arch(model_type="gpt2"),
    "qwen2moe": Arch(model_type="qwen2_moe", values={"norm_topk_prob": False}),
    "qwen3moe": Arch(model_type="qwen3_moe", values={"norm_topk_prob": True}),
    "olmoe": Arch(model_type="olmoe", values={"norm_topk_prob": False}),
    "gpt-oss": Arch(model_type="gpt_oss", keys=_EXPERTS_ALONE),
    "gemma": Arch(model_type="gemma"),
    "command-r": Arch(model_type="cohere"),
    "starcoder2": Arch(model_type="starcoder2"),
    "stablelm": Arch(model_type="stablelm"),
    "nemotron": Arch(model_type="nemotron"),
    "phi2": Arch(model_type="phi"),
    "glm4": Arch(model_type="glm4"),
    "gptneox": Arch(model_type="gpt_neox", keys={"use_parallel_residual": "use_parallel_residual"}),
    "falcon": Arch(model_type="falcon"),
    "bloom": Arch(model_type="bloom"),
    "mpt": Arch(model_type="mpt"),
    "starcoder": Arch(model_type="gpt_bigcode"),
    "granitemoe": Arch(model_type="granitemoeshared", in_pairs=True),
    "granitehybrid": Arch(model_type="granitemoehybrid", in_pairs=True),
    "deepseek2": Arch(model_type="deepseek_v2"),
    "mamba": Arch(model_type="mamba", keys={"ssm.inner_size": "intermediate_size"}),
    "mamba2": Arch(model_type="mamba2"),
    "jamba": Arch(model_type="jamba"),
    "seed_oss": Arch(model_type="seed_oss"),
    "arcee": Arch(model_type="arcee", in_pairs=True),
    "jais2": Arch(model_type="jais2"),
    "smollm3": Arch(model_type="smollm3", in_pairs=True),
    "ernie4_5": Arch(model_type="ernie4_5"),
    "ernie4_5-moe": Arch(model_type="ernie4_5_moe"),
    "chatglm": Arch(model_type="glm"),
    "olmo": Arch(model_type="olmo", in_pairs=True),
    "exaone4": Arch(model_type="exaone4"),
    "exaone-moe": Arch(model_type="exaone_moe"),
    "hunyuan-dense": Arch(model_type="hunyuan_v1_dense"),
    "dots1": Arch(model_type="dots1"),
    "glm4moe": Arch(model_type="glm4_moe"),
    "afmoe": Arch(model_type="afmoe", values={"mup_enabled": True}),
    "llama4": Arch(model_type="llama4_text"),
    "minicpm3": Arch(model_type="minicpm3"),
    "dbrx": Arch(model_type="dbrx", modules={"mlp_norm": "attn_output_norm"}),
    "lfm2": Arch(model_type="lfm2"),
    "lfm2moe": Arch(model_type="lfm2_moe"),
    "nemotron_h": Arch(model_type="nemotron_h", modules=_ONE_NORM),
    "nemotron_h_moe": Arch(model_type="nemotron_h", modules=_ONE_NORM),
    "cohere2": Arch(model_type="cohere2"),
    "minimax-m2": Arch(model_type="minimax_m2"),
    "falcon-h1": Arch(model_type="falcon_h1"),
    "hunyuan-moe": Arch(model_type="hunyuan_v1_moe"),
    "phimoe": Arch(model_type="phimoe"),
    "qwen3next": Arch(model_type="qwen3_next"),
    "qwen35": Arch(model_type="qwen3_5_text", modules=_ALPHA),
    "qwen35moe": Arch(model_type="qwen3_5_moe_text", modules=_ALPHA),
    "qwen2vl": Arch(model_type="qwen2_vl_text"),
    "qwen3vl": Arch(model_type="qwen3_vl_text"),
    "qwen3vlmoe": Arch(model_type="qwen3_vl_moe_text"),
    "gemma3n": Arch(model_type="gemma3n_text"),
    "gemma4": Arch(model_type="gemma4_text"),
    "internlm2": Arch(model_type="internlm2", in_pairs=True),
    "mistral3": Arch(model_type="ministral3", in_pairs=True),
    "baichuan": Arch(model_type="baichuan", in_pairs=True),
    "kimi-linear": Arch(model_type="kimi_linear", modules=_KIMI),
    "exaone": Arch(model_type="exaone"),
    "apertus": Arch(model_type="apertus"),
    "bitnet": Arch(model_type="bitnet", values={"hidden_act": "silu"}, keys={"hidden_act": "hidden_act"}),
    "minicpm": Arch(model_type="granite", in_pairs=True),
    "mistral4": Arch(model_type="mistral4"),
    "glm-dsa": Arch(model_type="glm_moe_dsa"),
    "mimo2": Arch(model_type="mimo_v2_flash"),
    "bert": Arch(model_type="bert"),
    "nomic-bert": Arch(model_type="nomic_bert"),
    "modern-bert": Arch(model_type="modernbert"),
    "eurobert": Arch(model_type="eurobert"),
    "t5": Arch(model_type="t5"),
}
KEYS: Mapping[str, str] = {
    "context_length": "max_position_embeddings n_positions seq_length max_seq_len",
    "embedding_length": "hidden_size n_embd d_model",
    "block_count": "num_hidden_layers n_layer n_layers num_layers",
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
}
"""Tensors of layers, any of which makes the keys true."""
