"""config.json of published encoder-decoder models: the keys that say what a model is."""

from collections.abc import Mapping
from typing import Any

_T5 = {
    "model_type": "t5", "d_ff": 2048, "d_kv": 64, "d_model": 512, "decoder_start_token_id": 0, "eos_token_id": 1,
    "feed_forward_proj": "relu", "is_encoder_decoder": True, "layer_norm_epsilon": 1e-06, "n_positions": 512,
    "num_decoder_layers": 6, "num_heads": 8, "num_layers": 6, "pad_token_id": 0,
    "relative_attention_num_buckets": 32, "vocab_size": 32128,
}  # fmt: skip
_BART = {
    "model_type": "bart", "activation_function": "gelu", "bos_token_id": 0, "d_model": 1024,
    "decoder_attention_heads": 16, "decoder_ffn_dim": 4096, "decoder_layers": 12, "decoder_start_token_id": 2,
    "encoder_attention_heads": 16, "encoder_ffn_dim": 4096, "encoder_layers": 12, "eos_token_id": 2,
    "forced_eos_token_id": 2, "is_encoder_decoder": True, "max_position_embeddings": 1024, "pad_token_id": 1,
    "scale_embedding": False, "vocab_size": 50264,
}  # fmt: skip
_WHISPER = {
    "model_type": "whisper", "activation_function": "gelu", "bos_token_id": 50257, "d_model": 512,
    "decoder_attention_heads": 8, "decoder_ffn_dim": 2048, "decoder_layers": 6, "decoder_start_token_id": 50258,
    "encoder_attention_heads": 8, "encoder_ffn_dim": 2048, "encoder_layers": 6, "eos_token_id": 50257,
    "is_encoder_decoder": True, "max_source_positions": 1500, "max_target_positions": 448, "num_mel_bins": 80,
    "pad_token_id": 50257, "scale_embedding": False, "vocab_size": 51865,
}  # fmt: skip
PUBLISHED_SEQ2SEQ: Mapping[str, Mapping[str, Any]] = {
    "t5_small": _T5,
    "flan_t5_base": {
        **_T5, "d_model": 768, "num_layers": 12, "num_decoder_layers": 12, "num_heads": 12,
        "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "relative_attention_max_distance": 128,
    },
    "flan_ul2": {
        **_T5, "d_ff": 16384, "d_kv": 256, "d_model": 4096, "num_layers": 32, "num_decoder_layers": 32,
        "num_heads": 16, "feed_forward_proj": "gated-silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    },
    "mt5_small": {
        **_T5, "model_type": "mt5", "d_ff": 1024, "feed_forward_proj": "gated-gelu", "num_decoder_layers": 8,
        "num_heads": 6, "num_layers": 8, "tie_word_embeddings": False, "vocab_size": 250112,
    },
    "umt5_base": {
        **_T5, "model_type": "umt5", "d_model": 768, "num_heads": 12, "num_layers": 12, "num_decoder_layers": 12,
        "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "vocab_size": 256384,
        "scalable_attention": True,
    },
    "bart_large_cnn": _BART,
    "blenderbot_small_90m": {
        **_BART, "model_type": "blenderbot-small", "bos_token_id": 1, "d_model": 512, "decoder_ffn_dim": 2048,
        "decoder_layers": 8, "decoder_start_token_id": 1, "encoder_ffn_dim": 2048, "encoder_layers": 8,
        "max_position_embeddings": 512, "pad_token_id": 0, "scale_embedding": True, "vocab_size": 54944,
    },
    "mvp": {**_BART, "model_type": "mvp", "vocab_size": 50267, "use_prompt": False},
    "wmt19_en_de": {
        "model_type": "fsmt", "activation_function": "relu", "bos_token_id": 0, "d_model": 1024,
        "decoder_attention_heads": 16, "decoder_ffn_dim": 4096, "decoder_layers": 6, "decoder_start_token_id": 2,
        "encoder_attention_heads": 16, "encoder_ffn_dim": 8192, "encoder_layers": 6, "eos_token_id": 2,
        "is_encoder_decoder": True, "langs": ["en", "de"], "max_position_embeddings": 1024, "pad_token_id": 1,
        "scale_embedding": True, "src_vocab_size": 42024, "tgt_vocab_size": 42024, "tie_word_embeddings": False,
    },
    "plbart_base": {
        **_BART, "model_type": "plbart", "d_model": 768, "decoder_attention_heads": 12, "decoder_ffn_dim": 3072,
        "decoder_layers": 6, "encoder_attention_heads": 12, "encoder_ffn_dim": 3072, "encoder_layers": 6,
        "scale_embedding": True, "vocab_size": 50005,
    },
    "mbart_large_50_many_to_many": {
        **_BART, "model_type": "mbart", "activation_function": "relu", "scale_embedding": True,
        "vocab_size": 250054,
    },
    "opus_mt_en_de": {
        **_BART, "model_type": "marian", "activation_function": "swish", "d_model": 512,
        "decoder_attention_heads": 8, "decoder_ffn_dim": 2048, "decoder_layers": 6,
        "decoder_start_token_id": 58100, "encoder_attention_heads": 8, "encoder_ffn_dim": 2048,
        "encoder_layers": 6, "eos_token_id": 0, "forced_eos_token_id": 0, "max_position_embeddings": 512,
        "pad_token_id": 58100, "scale_embedding": True, "vocab_size": 58101,
    },
    "pegasus_xsum": {
        **_BART, "model_type": "pegasus", "activation_function": "relu", "decoder_layers": 16,
        "encoder_layers": 16, "max_position_embeddings": 512, "scale_embedding": True, "vocab_size": 96103,
    },
    "nllb_200_distilled_600m": {
        **_BART, "model_type": "m2m_100", "activation_function": "relu", "scale_embedding": True,
        "vocab_size": 256206, "forced_eos_token_id": None,
    },
    "blenderbot_3b": {
        **_BART, "model_type": "blenderbot", "d_model": 2560, "decoder_attention_heads": 32,
        "decoder_ffn_dim": 10240, "decoder_layers": 24, "encoder_attention_heads": 32, "encoder_ffn_dim": 10240,
        "encoder_layers": 2, "max_position_embeddings": 128, "scale_embedding": True, "vocab_size": 8008,
        "bos_token_id": 1, "decoder_start_token_id": 1, "pad_token_id": 0,
    },
    "whisper_base": _WHISPER,
    "whisper_large_v3": {
        **_WHISPER, "d_model": 1280, "decoder_attention_heads": 20, "decoder_ffn_dim": 5120, "decoder_layers": 32,
        "encoder_attention_heads": 20, "encoder_ffn_dim": 5120, "encoder_layers": 32, "num_mel_bins": 128,
        "vocab_size": 51866, "torch_dtype": "float16",
    },
}  # fmt: skip
SEQ2SEQ_SIZES: Mapping[str, Any] = {
    "vocab_size": 50, "d_model": 48, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 96, "decoder_ffn_dim": 80, "d_ff": 96, "d_kv": 16,
    "num_layers": 2, "num_heads": 4,
}  # fmt: skip
"""Sizes that a config states; what else its class knows has a default."""
