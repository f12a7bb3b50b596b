"""config.json of published decoders: the keys that say what a model is, spelled as their files spell them."""

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]


def _llama(model_type: str, sizes: tuple[int, ...], rope_theta: float, **keys: Any) -> Config:
    """sizes: vocabulary, hidden, intermediate, layers, heads, KV heads, positions."""
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "max_position_embeddings",
    )  # fmt: skip
    common = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": rope_theta, "torch_dtype": "bfloat16"}
    return {"model_type": model_type, **dict(zip(names, sizes, strict=True)), **common, **keys}


def _gpt(model_type: str, sizes: tuple[int, ...], **keys: Any) -> Config:
    """sizes: vocabulary, n_embd, n_layer, n_head, n_positions."""
    names = ("vocab_size", "n_embd", "n_layer", "n_head", "n_positions")
    return {"model_type": model_type, **dict(zip(names, sizes, strict=True)), "layer_norm_epsilon": 1e-5, **keys}


def _layer_norm(model_type: str, sizes: tuple[int, ...], rope_theta: float, **keys: Any) -> Config:
    return {**_llama(model_type, sizes, rope_theta, layer_norm_eps=1e-5), **keys}


_CWM_ROPE = {
    "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip
_OPT = {
    "model_type": "opt", "vocab_size": 50272, "activation_function": "relu", "do_layer_norm_before": True,
    "max_position_embeddings": 2048, "torch_dtype": "float16",
}  # fmt: skip
_NEOX = {
    "model_type": "gpt_neox", "hidden_act": "gelu", "layer_norm_eps": 1e-5, "max_position_embeddings": 2048,
    "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False, "use_parallel_residual": True,
    "torch_dtype": "float16",
}  # fmt: skip
_FALCON = {
    "model_type": "falcon", "alibi": False, "bias": False, "layer_norm_epsilon": 1e-5, "multi_query": True,
    "new_decoder_architecture": False, "parallel_attn": True, "torch_dtype": "bfloat16", "vocab_size": 65024,
}  # fmt: skip
_NEO = {
    "model_type": "gpt_neo", "activation_function": "gelu_new", "intermediate_size": None, "vocab_size": 50257,
    "layer_norm_epsilon": 1e-5, "max_position_embeddings": 2048, "window_size": 256,
}  # fmt: skip
_GRANITE = {
    "attention_bias": False, "attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "logits_scaling": 8.0,
    "mlp_bias": False, "residual_multiplier": 0.22, "tie_word_embeddings": True,
}  # fmt: skip

PUBLISHED_DECODERS: Mapping[str, Config] = {
    "ministral_8b": _llama(
        "ministral", (131072, 4096, 12288, 36, 32, 8, 32768), 1e8, head_dim=128, sliding_window=32768
    ),
    "ministral_3_8b": _llama(
        "ministral3",
        (131072, 4096, 14336, 34, 32, 8, 262144),
        1e6,
        head_dim=128,
        rope_parameters={
            "type": "yarn",
            "rope_type": "yarn",
            "rope_theta": 1000000.0,
            "factor": 16.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 16384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    ),
    "cwm_32b": _llama(
        "cwm",
        (128256, 6144, 21504, 64, 48, 8, 131072),
        1e6,
        head_dim=128,
        sliding_window=8192,
        rope_scaling=_CWM_ROPE,
    ),
    "internlm3_8b": _llama(
        "internlm3", (128512, 4096, 10240, 48, 32, 2, 32768), 5e7, head_dim=128, qkv_bias=False, bias=False
    ),
    "exaone_3_5_2_4b": {
        "model_type": "exaone",
        "vocab_size": 102400,
        "hidden_size": 2560,
        "intermediate_size": 7168,
        "num_layers": 30,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000,
        "layer_norm_epsilon": 1e-5,
        "activation_function": "silu",
        "head_dim": 80,
        "tie_word_embeddings": True,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
    "seed_oss_36b": _llama(
        "seed_oss",
        (155136, 5120, 27648, 64, 80, 8, 524288),
        1e7,
        head_dim=128,
        attention_bias=True,
        attention_out_bias=False,
        mlp_bias=False,
        rms_norm_eps=1e-6,
    ),
    "afm_4_5b": _llama(
        "arcee",
        (128004, 2560, 18432, 36, 20, 4, 65536),
        10000.0,
        head_dim=128,
        hidden_act="relu2",
        rope_scaling={
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 20.0,
            "mscale": 1.0,
            "rope_type": "yarn",
            "original_max_position_embeddings": 4096,
        },
    ),
    "minitron_4b": _llama(
        "nemotron",
        (256000, 3072, 9216, 32, 24, 8, 4096),
        10000.0,
        hidden_act="relu2",
        norm_eps=1e-5,
        partial_rotary_factor=0.5,
        head_dim=128,
    ),
    "jais_2_8b": _layer_norm(
        "jais2", (150272, 3328, 26624, 32, 26, 26, 8192), 500000.0, hidden_act="relu2", head_dim=128
    ),
    "apertus_8b": _llama(
        "apertus",
        (131072, 4096, 21504, 32, 32, 8, 65536),
        12000000,
        hidden_act="xielu",
        rope_scaling={
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    ),
    "smollm3_3b": _llama(
        "smollm3",
        (128256, 2048, 11008, 36, 16, 4, 65536),
        5000000.0,
        rms_norm_eps=1e-6,
        sliding_window=None,
        use_sliding_window=False,
        no_rope_layers=[1, 1, 1, 0] * 9,
        no_rope_layer_interval=4,
    ),
    "helium_1_2b": _llama("helium", (64000, 2048, 8192, 28, 16, 8, 4096), 20000.0, rms_norm_eps=1e-8, head_dim=128),
    "ernie_4_5_0_3b": _llama(
        "ernie4_5", (103424, 1024, 3072, 18, 16, 2, 131072), 500000.0, head_dim=128, use_bias=False
    ),
    "glm_4_9b": _llama(
        "glm",
        (151552, 4096, 13696, 40, 32, 2, 131072),
        10000.0,
        head_dim=128,
        attention_bias=True,
        partial_rotary_factor=0.5,
        rms_norm_eps=1.5625e-07,
    ),
    "glm_4_32b_0414": _llama(
        "glm4",
        (151552, 6144, 23040, 61, 48, 2, 32768),
        10000.0,
        head_dim=128,
        attention_bias=False,
        partial_rotary_factor=0.5,
    ),
    "gemma_2b": _llama(
        "gemma", (256000, 2048, 16384, 18, 8, 1, 8192), 10000.0, head_dim=256, hidden_act="gelu", rms_norm_eps=1e-6
    ),
    "gemma_7b": _llama(
        "gemma",
        (256000, 3072, 24576, 28, 16, 16, 8192),
        10000.0,
        head_dim=256,
        rms_norm_eps=1e-6,
        hidden_act="gelu_pytorch_tanh",
    ),
    "olmo_7b": _llama("olmo", (50304, 4096, 11008, 32, 32, 32, 2048), 10000.0, clip_qkv=None),
    "olmo_1_7_7b": _llama("olmo", (50304, 4096, 11008, 32, 32, 32, 4096), 10000.0, clip_qkv=8.0),
    "olmo_2_7b": _llama("olmo2", (100352, 4096, 11008, 32, 32, 32, 4096), 500000, rms_norm_eps=1e-6),
    "olmo_3_7b": _llama(
        "olmo3",
        (100278, 4096, 11008, 32, 32, 32, 65536),
        500000,
        rms_norm_eps=1e-6,
        sliding_window=4096,
        layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 8,
        rope_scaling={
            "rope_type": "yarn",
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "exaone_4_32b": _llama(
        "exaone4",
        (102400, 5120, 27392, 64, 40, 8, 131072),
        1000000,
        head_dim=128,
        sliding_window=4096,
        sliding_window_pattern="LLLG",
        layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 16,
        rope_scaling=_CWM_ROPE,
    ),
    "exaone_4_1_2b": _llama(
        "exaone4",
        (102400, 2048, 4096, 30, 32, 8, 65536),
        1000000,
        head_dim=64,
        sliding_window=None,
        sliding_window_pattern=None,
        layer_types=["full_attention"] * 30,
        rope_scaling=_CWM_ROPE,
    ),
    "granite_3_1_2b": _llama("granite", (49155, 2048, 8192, 40, 32, 8, 131072), 5000000.0, **_GRANITE),
    "command_r_35b": _layer_norm(
        "cohere", (256000, 8192, 22528, 40, 64, 64, 8192), 8000000.0, logit_scale=0.0625, use_qk_norm=False
    ),
    "command_r_plus": _layer_norm(
        "cohere",
        (256000, 12288, 33792, 64, 96, 8, 8192),
        75000000.0,
        logit_scale=0.8333333333333334,
        use_qk_norm=True,
    ),
    "command_r7b": _layer_norm(
        "cohere2",
        (256000, 4096, 14336, 32, 32, 8, 8192),
        50000,
        logit_scale=0.25,
        sliding_window=4096,
        sliding_window_pattern=4,
        head_dim=128,
        rotary_pct=1.0,
    ),
    "stablelm_2_1_6b": _layer_norm(
        "stablelm", (100352, 2048, 5632, 24, 32, 32, 4096), 10000, partial_rotary_factor=0.25, use_qkv_bias=True
    ),
    "stablelm_2_12b": _layer_norm(
        "stablelm",
        (100352, 5120, 13824, 40, 32, 8, 4096),
        10000,
        partial_rotary_factor=0.25,
        qk_layernorm=True,
        use_parallel_residual=True,
    ),
    "starcoder2_3b": _llama(
        "starcoder2",
        (49152, 3072, 12288, 30, 24, 2, 16384),
        999999.4420358813,
        hidden_act="gelu_pytorch_tanh",
        norm_epsilon=1e-5,
        sliding_window=4096,
        use_bias=True,
    ),
    "persimmon_8b": {
        "model_type": "persimmon",
        "vocab_size": 262144,
        "hidden_size": 4096,
        "intermediate_size": 16384,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "max_position_embeddings": 16384,
        "hidden_act": "relu2",
        "layer_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "qk_layernorm": True,
        "rope_theta": 25000.0,
    },
    "phi_2": _layer_norm(
        "phi",
        (51200, 2560, 10240, 32, 32, 32, 2048),
        10000.0,
        hidden_act="gelu_new",
        partial_rotary_factor=0.4,
        qk_layernorm=False,
    ),
    "hunyuan_7b": _llama(
        "hunyuan_v1_dense",
        (128167, 4096, 14336, 32, 32, 8, 32768),
        10000.0,
        head_dim=128,
        use_qk_norm=True,
        rope_scaling={
            "alpha": 1000.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "type": "dynamic",
        },
    ),
    "starcoder": _gpt(
        "gpt_bigcode",
        (49152, 6144, 40, 48, 8192),
        n_inner=24576,
        activation_function="gelu_pytorch_tanh",
        multi_query=True,
    ),
    "opt_125m": {
        **_OPT,
        "hidden_size": 768,
        "ffn_dim": 3072,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "word_embed_proj_dim": 768,
    },
    "opt_350m": {
        **_OPT,
        "hidden_size": 1024,
        "ffn_dim": 4096,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "word_embed_proj_dim": 512,
        "do_layer_norm_before": False,
    },
    "biogpt": {
        "model_type": "biogpt",
        "vocab_size": 42384,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "max_position_embeddings": 1024,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "scale_embedding": True,
    },
    "pythia_160m": {
        **_NEOX,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "vocab_size": 50304,
    },
    "gpt_neox_20b": {
        **_NEOX,
        "hidden_act": "gelu_fast",
        "hidden_size": 6144,
        "intermediate_size": 24576,
        "num_attention_heads": 64,
        "num_hidden_layers": 44,
        "vocab_size": 50432,
    },
    "gpt_j_6b": _gpt(
        "gptj",
        (50400, 4096, 28, 16, 2048),
        activation_function="gelu_new",
        rotary_dim=64,
        n_inner=None,
        tie_word_embeddings=False,
    ),
    "codegen_350m": _gpt(
        "codegen",
        (51200, 1024, 20, 16, 2048),
        activation_function="gelu_new",
        rotary_dim=32,
        n_inner=None,
        tie_word_embeddings=False,
    ),
    "falcon_7b": {**_FALCON, "hidden_size": 4544, "num_attention_heads": 71, "num_hidden_layers": 32},
    "falcon_40b": {
        **_FALCON,
        "hidden_size": 8192,
        "num_attention_heads": 128,
        "num_hidden_layers": 60,
        "num_kv_heads": 8,
        "new_decoder_architecture": True,
    },
    "falcon_rw_1b": {
        **_FALCON,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_hidden_layers": 24,
        "vocab_size": 50304,
        "alibi": True,
        "bias": True,
        "multi_query": False,
        "parallel_attn": False,
    },
    "gpt_neo_1_3b": {
        **_NEO,
        "attention_types": [[["global", "local"], 12]],
        "hidden_size": 2048,
        "num_heads": 16,
        "num_layers": 24,
    },
    "bloom_560m": {
        "model_type": "bloom",
        "vocab_size": 250880,
        "hidden_size": 1024,
        "n_layer": 24,
        "n_head": 16,
        "layer_norm_epsilon": 1e-5,
        "seq_length": 2048,
        "apply_residual_connection_post_layernorm": False,
    },
    "mpt_7b": {
        "model_type": "mpt",
        "vocab_size": 50432,
        "d_model": 4096,
        "n_layers": 32,
        "n_heads": 32,
        "max_seq_len": 2048,
        "expansion_ratio": 4,
        "no_bias": True,
        "attn_config": {
            "alibi": True,
            "alibi_bias_max": 8,
            "attn_impl": "torch",
            "attn_pdrop": 0,
            "attn_type": "multihead_attention",
            "clip_qkv": None,
            "prefix_lm": False,
            "qk_ln": False,
            "softmax_scale": None,
        },
    },
}
"""By the name of the model, roughly as published."""
