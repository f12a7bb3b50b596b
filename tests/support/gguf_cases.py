"""Tiny models whose GGUF files are compared with transformers, beside those of golden_cases: what llama.cpp's
metadata can express is less than what transformers' configs can."""

from typing import Any

from golden_cases import CASES as GOLDEN
from golden_cases import FIRST, FLAGS, GEMMA, LATENT, LONGROPE
from paged_model import Case
from recent_cases import MIMO, MISTRAL4
from recurrent_cases import BAMBA, DELTA, FALCON_H1, HYBRID, KIMI, NEMOTRON_H

_GEMMA: dict[str, Any] = {**GEMMA, "query_pre_attn_scalar": 24}
_GRANITE: dict[str, Any] = {**BAMBA, **HYBRID, "attention_multiplier": 0.1}
_FALCON = {"ffn_hidden_size": 256}
_MAMBA = {"state_size": 8, "intermediate_size": 128, "expand": 2}
_MINICPM: dict[str, Any] = {
    "embedding_multiplier": 12.0, "residual_multiplier": 0.7, "attention_multiplier": 0.25, "logits_scaling": 0.25,
}  # fmt: skip
_NO_GROUPS: dict[str, Any] = {**LATENT, "n_group": None, "topk_group": None, "num_experts_per_tok": 2}
_NAMED = {case.name: case for case in (*FIRST, *GOLDEN, *FLAGS)}
GGUF_CASES: dict[str, Case] = {
    **_NAMED,
    **{
        f"{name}_gguf": Case(name, kind, config, has_sdpa=False)
        for name, kind, config in (
            ("gpt2", "gpt2", {"n_inner": 256}),
            ("gpt_neox", "gpt_neox", {}),
            ("gpt_neox_serial", "gpt_neox", {"use_parallel_residual": False}),
            ("falcon", "falcon", {**_FALCON, "tie_word_embeddings": False}),
            ("falcon_40b", "falcon", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
            ("mpt", "mpt", {"expansion_ratio": 4}),
            ("cohere", "cohere", {}),
            ("cohere2", "cohere2", {"sliding_window": 6}),
            ("mixtral", "mixtral", {"sliding_window": None}),
            ("olmoe", "olmoe", {"norm_topk_prob": False}),
            ("qwen3_moe", "qwen3_moe", {"head_dim": 16, "norm_topk_prob": True}),
            ("glm", "glm", {"head_dim": 16, "rms_norm_eps": 1e-5}),
            ("gemma", "gemma", {"head_dim": 24}),
            ("gemma2", "gemma2", _GEMMA),
            ("gemma3", "gemma3_text", {**_GEMMA, "num_hidden_layers": 7, "tie_word_embeddings": True}),
            ("gemma3n", "gemma3n_text", {**_NAMED["gemma3n"].config, "vocab_size_per_layer_input": 131}),
            ("phi", "phi", {"num_key_value_heads": 4, "intermediate_size": 256}),
            ("minicpm3", "minicpm3", {**LATENT, "v_head_dim": 16, "tie_word_embeddings": False}),
            ("deepseek_v2", "deepseek_v2", _NO_GROUPS),
            ("deepseek_v2_lite", "deepseek_v2", {**_NO_GROUPS, "q_lora_rank": None}),
            ("mamba", "mamba", _MAMBA),
            ("falcon_mamba", "falcon_mamba", _MAMBA),
            ("bamba", "bamba", {**BAMBA, "attn_layer_indices": [1, 3]}),
            ("granitemoehybrid", "granitemoehybrid", {**_GRANITE, "residual_multiplier": 0.5}),
            (
                "granitehybrid_dense",
                "granitemoehybrid",
                {**_GRANITE, "num_local_experts": 0, "shared_intermediate_size": 88},
            ),
            ("nemotron_h", "nemotron_h", {**NEMOTRON_H, "intermediate_size": 32}),
            ("falcon_h1", "falcon_h1", FALCON_H1),
            (
                "falcon_h1_norm",
                "falcon_h1",
                {**FALCON_H1, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
            ),
            ("qwen3_next", "qwen3_next", DELTA),
            ("qwen3_5", "qwen3_5_text", DELTA),
            ("qwen3_5_moe", "qwen3_5_moe_text", DELTA),
            (
                "phi3_longrope",
                "phi3",
                {"sliding_window": None, "original_max_position_embeddings": 32, "rope_parameters": LONGROPE},
            ),
            (
                "minimax_m2",
                "minimax_m2",
                {
                    "head_dim": 16,
                    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
                },
            ),
            ("hunyuan_moe", "hunyuan_v1_moe", {"head_dim": 16, "num_experts": 8, "moe_topk": 2}),
            ("phimoe", "phimoe", {}),
            ("kimi", "kimi_linear", KIMI),
            ("ministral3", "ministral3", _NAMED["ministral3"].config),
            ("stablelm_12b", "stablelm", {"use_parallel_residual": True, "use_qkv_bias": False}),
            ("olmo", "olmo", {"clip_qkv": None}),
            ("qwen2vl", "qwen2", {}),
            ("qwen3vl", "qwen3", {"head_dim": 32}),
            ("qwen3vlmoe", "qwen3_moe", {"head_dim": 16, "norm_topk_prob": True}),
            ("internlm2", "llama", {}),
            ("smollm3", "smollm3", {"tie_word_embeddings": True}),
            ("exaone", "exaone", {"head_dim": 16, "tie_word_embeddings": False}),
            ("apertus", "apertus", {}),
            ("bitnet", "bitnet", {"hidden_act": "silu", "tie_word_embeddings": True}),
            ("bitnet_relu2", "bitnet", {"tie_word_embeddings": True}),
            ("minicpm", "granite", _MINICPM),
            ("glm_dsa", "glm_moe_dsa", {**LATENT, "n_group": 1, "topk_group": 1, "v_head_dim": 12}),
            ("mistral4", "mistral4", {**MISTRAL4, "first_k_dense_replace": 0}),
            ("mimo2", "mimo_v2_flash", {**MIMO, "num_hidden_layers": 4}),
            ("llama4", "llama4_text", {"head_dim": 16, "floor_scale": 8192}),
        )
    },
    "nemotron_dense_h": Case(
        "nemotron_dense_h",
        "nemotron_h",
        {**NEMOTRON_H, "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]},
    ),
    "gpt_oss_plain": Case("gpt_oss_plain", "gpt_oss", {"head_dim": 16, "sliding_window": 6}, has_sdpa=False),
}
