"""Tiny configs of every decoder family and flag that is compared with transformers."""

from collections.abc import Mapping
from typing import Any

from paged_model import Case
from recent_cases import GEMMA4, RECENT_CASES, RECENT_FLAGS
from recurrent_cases import RECURRENT_CASES, RECURRENT_FLAGS
from respelled import baichuan, chatglm, internlm2

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32, "rope_theta": 10000.0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}

LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 32,
    "short_factor": [1.0 + 0.1 * i for i in range(6)], "long_factor": [2.0 + 0.3 * i for i in range(6)],
    "partial_rotary_factor": 0.75,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
GEMMA: Mapping[str, Any] = {"head_dim": 24, "sliding_window": 6, "query_pre_attn_scalar": 20}
LATENT = {"num_key_value_heads": 4}
INTERNLM2 = {"rope_parameters": DYNAMIC, "max_position_embeddings": 32}
_HALVES = [[["global", "local"], 2]]

FIRST = (
    Case("llama", "llama", {}),
    Case("llama_tied", "llama", {"tie_word_embeddings": True}),
    Case("llama_biases", "llama", {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
    Case("llama_one_kv_head", "llama", {"num_key_value_heads": 1}),
    Case("llama_head_dim", "llama", {"head_dim": 24, "num_key_value_heads": 4}),
    Case("llama_linear", "llama", {"rope_parameters": LINEAR}),
    Case("llama_llama3", "llama", {"rope_parameters": LLAMA3}, lengths=(50, 9)),
    Case("llama_yarn", "llama", {"rope_parameters": YARN}),
    Case(
        "llama_dynamic", "llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 32}, lengths=(9, 32, 33, 50)
    ),
    Case("mistral", "mistral", {"sliding_window": None}),
    Case("mistral_window", "mistral", {"sliding_window": 6, "head_dim": 24}),
    Case("qwen2", "qwen2", {}),
    Case("qwen2_tied_yarn", "qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    Case("qwen2_window", "qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}),
    Case("qwen3", "qwen3", {"head_dim": 32}),
    Case("qwen3_tied_bias", "qwen3", {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}),
    Case(
        "gemma2", "gemma2", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 8.0}, has_sdpa=False
    ),
    Case("gemma2_untied", "gemma2", {**GEMMA, "tie_word_embeddings": False}, has_sdpa=False),
    Case("gemma3_text", "gemma3_text", {**GEMMA, "tie_word_embeddings": False, "layer_types": None}),
    Case(
        "gemma3_text_two_ropes",
        "gemma3_text",
        {
            **GEMMA,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "full_attention": {**LINEAR, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
            "final_logit_softcapping": 8.0,
        },
    ),
    Case("phi3", "phi3", {"sliding_window": None}),
    Case("phi3_window", "phi3", {"sliding_window": 6}),
    Case(
        "phi3_partial_longrope",
        "phi3",
        {"original_max_position_embeddings": 32, "rope_parameters": LONGROPE},
        lengths=(50, 40, 9, 32, 33),
    ),
    Case("gpt2", "gpt2", {}),
    Case(
        "gpt2_inverse_layer",
        "gpt2",
        {"scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": False, "n_inner": 80},
    ),
    Case("gpt2_unscaled", "gpt2", {"scale_attn_weights": False, "activation_function": "relu"}),
)
"""Families that test_golden_logits compares in every way, each flag in the default run."""
CASES = (
    Case("ministral", "ministral", {"sliding_window": 6, "head_dim": 24}),
    Case(
        "ministral3",
        "ministral3",
        {
            "head_dim": 16,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3},
        },
        lengths=(50, 9),
    ),
    Case("cwm", "cwm", {"sliding_window": 6, "head_dim": 16, "rope_parameters": LLAMA3}, lengths=(50, 9)),
    Case("internlm3", "internlm3", {"head_dim": 16}),
    Case("exaone", "exaone", {"head_dim": 16}),
    Case("seed_oss", "seed_oss", {"head_dim": 16}),
    Case("arcee", "arcee", {"head_dim": 16}),
    Case("nemotron", "nemotron", {"head_dim": 16}),
    Case("jais2", "jais2", {"head_dim": 16}),
    Case("apertus", "apertus", {"rope_parameters": LLAMA3}, lengths=(50, 9)),
    Case("smollm3", "smollm3", {"tie_word_embeddings": False}),
    Case("helium", "helium", {"head_dim": 16}),
    Case("ernie4_5", "ernie4_5", {"head_dim": 16, "tie_word_embeddings": False}),
    Case("glm", "glm", {"head_dim": 16}),
    Case("glm4", "glm4", {"head_dim": 16}),
    Case("gemma", "gemma", {"head_dim": 24, "tie_word_embeddings": False}),
    Case("olmo", "olmo", {"clip_qkv": 1.0}),
    Case("olmo2", "olmo2", {}),
    Case("olmo3", "olmo3", {"sliding_window": 6}),
    Case("exaone4", "exaone4", {"sliding_window": 6}),
    Case(
        "granite",
        "granite",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
            "logits_scaling": 8.0,
        },
    ),
    Case("cohere", "cohere", {"tie_word_embeddings": False}),
    Case("cohere2", "cohere2", {"sliding_window": 6, "tie_word_embeddings": False}),
    Case("stablelm", "stablelm", {}),
    Case("starcoder2", "starcoder2", {"tie_word_embeddings": False}),
    Case("persimmon", "persimmon", {}),
    Case("phi", "phi", {}),
    Case("hunyuan_v1_dense", "hunyuan_v1_dense", {"head_dim": 16}),
    Case("gpt_bigcode", "gpt_bigcode", {}),
    Case("opt", "opt", {}),
    Case("biogpt", "biogpt", {}),
    Case("gpt_neox", "gpt_neox", {}),
    Case("gptj", "gptj", {"rotary_dim": 8}),
    Case("codegen", "codegen", {"rotary_dim": 8}, has_sdpa=False),
    Case("falcon", "falcon", {"tie_word_embeddings": False}),
    Case(
        "gpt_neo",
        "gpt_neo",
        {"attention_types": _HALVES, "window_size": 6},
        has_sdpa=False,
    ),
    Case("bloom", "bloom", {}, has_sdpa=False),
    Case("mpt", "mpt", {}, has_sdpa=False),
    Case("mixtral", "mixtral", {"sliding_window": 6}),
    Case("qwen2_moe", "qwen2_moe", {}),
    Case("qwen3_moe", "qwen3_moe", {"head_dim": 16}),
    Case("olmoe", "olmoe", {"clip_qkv": 1.0}),
    Case("granitemoe", "granitemoe", {"attention_multiplier": 0.1, "residual_multiplier": 0.5}),
    Case("granitemoeshared", "granitemoeshared", {"attention_multiplier": 0.1}),
    Case("phimoe", "phimoe", {}),
    Case("gpt_oss", "gpt_oss", {"head_dim": 16, "sliding_window": 6, "rope_parameters": YARN}, has_sdpa=False),
    Case("dots1", "dots1", {"num_experts_per_tok": 2, "n_routed_experts": 8, "n_shared_experts": 1}),
    Case("glm4_moe", "glm4_moe", {}),
    Case("ernie4_5_moe", "ernie4_5_moe", {"tie_word_embeddings": False}),
    Case("minimax_m2", "minimax_m2", {"head_dim": 16}),
    Case("afmoe", "afmoe", {"head_dim": 16, "sliding_window": 6}),
    Case("hunyuan_v1_moe", "hunyuan_v1_moe", {"head_dim": 16, "num_experts": 8, "moe_topk": 2}),
    Case(
        "llama4_text", "llama4_text", {"head_dim": 16, "floor_scale": 8, "attention_chunk_size": 8}, lengths=(50, 9)
    ),
    Case("deepseek_v2", "deepseek_v2", {**LATENT, "num_experts_per_tok": 2, "n_group": 2}),
    Case("deepseek_v3", "deepseek_v3", LATENT),
    Case("minicpm3", "minicpm3", {**LATENT, "tie_word_embeddings": False}),
    Case("glm4_moe_lite", "glm4_moe_lite", LATENT),
    Case("youtu", "youtu", {**LATENT, "tie_word_embeddings": False, "pad_token_id": None}),
    Case("internlm2", "internlm2", {}, twin="llama", respell=internlm2),
    Case(
        "baichuan",
        "baichuan",
        {"num_key_value_heads": 4, "hidden_size": 4096, "head_dim": 1024, "num_hidden_layers": 1},
        twin="llama",
        respell=baichuan,
    ),
    Case(
        "chatglm",
        "chatglm",
        {
            "head_dim": 16,
            "rope_parameters": {"rope_theta": 5e5, "rope_type": "default", "partial_rotary_factor": 0.5},
        },
        twin="glm",
        respell=chatglm,
    ),
    *RECENT_CASES,
    *RECURRENT_CASES,
)
FLAGS = (
    Case("cwm_full", "cwm", {"layer_types": ["full_attention"] * 4, "head_dim": 16}),
    Case("internlm3_biases", "internlm3", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    Case("exaone_biases", "exaone", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    Case("seed_oss_biases", "seed_oss", {"head_dim": 16, "attention_out_bias": True, "mlp_bias": True}),
    Case("arcee_biases", "arcee", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    Case("nemotron_biases", "nemotron", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    Case("jais2_plain", "jais2", {"head_dim": 16, "attention_bias": False, "mlp_bias": False}),
    Case("apertus_bias", "apertus", {"attention_bias": True}),
    Case("smollm3_window", "smollm3", {"use_sliding_window": True, "sliding_window": 6, "attention_bias": True}),
    Case("helium_bias", "helium", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    Case("ernie4_5_bias", "ernie4_5", {"head_dim": 16, "use_bias": True}),
    Case("glm_plain", "glm", {"head_dim": 16, "attention_bias": False}),
    Case("gemma_bias", "gemma", {"head_dim": 16, "attention_bias": True}),
    Case("olmo_plain", "olmo", {"clip_qkv": None, "attention_bias": True}),
    Case("olmo2_bias", "olmo2", {"attention_bias": True, "tie_word_embeddings": True}),
    Case("exaone4_full", "exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    Case("granite_biases", "granite", {"attention_bias": True, "mlp_bias": True, "attention_multiplier": 0.25}),
    Case("cohere_qk_norm", "cohere", {"use_qk_norm": True, "attention_bias": True}),
    Case("cohere2_head_dim", "cohere2", {"sliding_window": 6, "head_dim": 24}),
    Case("stablelm_12b", "stablelm", {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True}),
    Case("starcoder2_window", "starcoder2", {"sliding_window": 6, "use_bias": False}),
    Case("persimmon_plain", "persimmon", {"qk_layernorm": False}),
    Case("phi_qk_norm", "phi", {"qk_layernorm": True}),
    Case("gpt_bigcode_multi_head", "gpt_bigcode", {"multi_query": False}),
    Case("opt_350m", "opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    Case("opt_plain", "opt", {"enable_bias": False, "layer_norm_elementwise_affine": False}),
    Case("biogpt_unscaled", "biogpt", {"scale_embedding": False}),
    Case("gpt_neox_serial", "gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    Case("gptj_inner", "gptj", {"rotary_dim": 16, "n_inner": 80}),
    Case("falcon_40b", "falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    Case("falcon_11b", "falcon", {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1}),
    Case(
        "falcon_rw",
        "falcon",
        {"alibi": True, "parallel_attn": False, "multi_query": False, "num_kv_heads": 4, "bias": True},
        has_eager=False,
    ),
    Case("bloom_6_heads", "bloom", {"n_head": 6, "hidden_size": 96}, has_sdpa=False),
    Case(
        "mpt_clip",
        "mpt",
        {"n_heads": 6, "d_model": 96, "attn_config": {"clip_qkv": 1.0, "softmax_scale": 0.2}},
        has_sdpa=False,
    ),
    Case(
        "hunyuan_alpha",
        "hunyuan_v1_dense",
        {
            "rope_parameters": {"rope_type": "dynamic", "alpha": 100.0, "factor": 1.0, "rope_theta": 10000.0},
            "head_dim": 16,
        },
    ),
    Case("mixtral_full", "mixtral", {"sliding_window": None, "num_experts_per_tok": 3}),
    Case("qwen2_moe_mixed", "qwen2_moe", {"mlp_only_layers": [0], "norm_topk_prob": True, "qkv_bias": False}),
    Case("qwen3_moe_sparse_steps", "qwen3_moe", {"decoder_sparse_step": 2, "norm_topk_prob": True}),
    Case("olmoe_renormalized", "olmoe", {"norm_topk_prob": True, "attention_bias": True}),
    Case("phimoe_biases", "phimoe", {"attention_bias": True, "lm_head_bias": True}),
    Case("glm4_moe_qk_norm", "glm4_moe", {"use_qk_norm": True, "attention_bias": True, "norm_topk_prob": False}),
    Case("ernie4_5_moe_alone", "ernie4_5_moe", {"moe_num_shared_experts": 0, "use_bias": True}),
    Case("afmoe_scaled", "afmoe", {"head_dim": 16, "sliding_window": 6, "mup_enabled": True, "route_scale": 2.5}),
    Case("llama4_mixed", "llama4_text", {"head_dim": 16, "interleave_moe_layer_step": 2, "use_qk_norm": False}),
    Case(
        "deepseek_v2_groups",
        "deepseek_v2",
        {**LATENT, "num_experts_per_tok": 2, "n_group": 2, "topk_method": "group_limited_greedy"},
    ),
    Case("deepseek_v2_lite", "deepseek_v2", {**LATENT, "num_experts_per_tok": 2, "q_lora_rank": None}),
    Case(
        "deepseek_v3_yarn",
        "deepseek_v3",
        {**LATENT, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, "attention_bias": True},
        lengths=(50, 9),
    ),
    Case(
        "gpt_neo_listed_layers",
        "gpt_neo",
        {"attention_layers": ["local", "local", "global", "global"], "window_size": 6, "attention_types": _HALVES},
        has_sdpa=False,
    ),
    Case("internlm2_dynamic", "internlm2", INTERNLM2, lengths=(9, 50), twin="llama", respell=internlm2),
    Case("llama_tanh", "llama", {"hidden_act": "tanh"}),
    Case("gpt_neox_sigmoid", "gpt_neox", {"hidden_act": "sigmoid"}),
    Case("gemma4_equal_heads", "gemma4_text", {**GEMMA4, "head_dim": 24}),
    Case(
        "modernbert_decoder_window",
        "modernbert-decoder",
        {"local_attention": 12, "sliding_window": 4, "tie_word_embeddings": False},
    ),
    *RECENT_FLAGS,
    *RECURRENT_FLAGS,
)
