"""config.json of published encoders: the keys that say what a model is."""

from collections.abc import Mapping
from typing import Any

_BERT = {
    "model_type": "bert", "hidden_act": "gelu", "hidden_size": 768, "intermediate_size": 3072,
    "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "num_attention_heads": 12, "num_hidden_layers": 12,
    "pad_token_id": 0, "type_vocab_size": 2, "vocab_size": 30522, "position_embedding_type": "absolute",
}  # fmt: skip
_ROBERTA = {
    "hidden_act": "gelu", "hidden_size": 768, "intermediate_size": 3072, "layer_norm_eps": 1e-5,
    "max_position_embeddings": 514, "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 1,
    "type_vocab_size": 1, "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
PUBLISHED_ENCODERS: Mapping[str, Mapping[str, Any]] = {
    "bert_base_uncased": _BERT,
    "minilm_l6": {**_BERT, "hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6},
    "bge_large_en": {
        **_BERT, "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24,
    },
    "ms_marco_minilm_l6": {
        **_BERT, "hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6,
        "architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0},
    },
    "roberta_base": {**_ROBERTA, "model_type": "roberta", "vocab_size": 50265},
    "bge_m3": {
        **_ROBERTA, "model_type": "xlm-roberta", "vocab_size": 250002, "hidden_size": 1024,
        "intermediate_size": 4096, "max_position_embeddings": 8194, "num_attention_heads": 16,
        "num_hidden_layers": 24, "torch_dtype": "float32",
    },
    "all_mpnet_base_v2": {
        "model_type": "mpnet", "hidden_act": "gelu", "hidden_size": 768, "intermediate_size": 3072,
        "layer_norm_eps": 1e-5, "max_position_embeddings": 514, "num_attention_heads": 12, "num_hidden_layers": 12,
        "pad_token_id": 1, "relative_attention_num_buckets": 32, "vocab_size": 30527,
    },
    "camembert_base": {**_ROBERTA, "model_type": "camembert", "vocab_size": 32005},
    "electra_small": {
        "model_type": "electra", "embedding_size": 128, "hidden_act": "gelu", "hidden_size": 256,
        "intermediate_size": 1024, "layer_norm_eps": 1e-12, "max_position_embeddings": 512,
        "num_attention_heads": 4, "num_hidden_layers": 12, "pad_token_id": 0, "type_vocab_size": 2,
        "vocab_size": 30522,
    },
    "distilbert_base_uncased": {
        "model_type": "distilbert", "activation": "gelu", "dim": 768, "hidden_dim": 3072,
        "max_position_embeddings": 512, "n_heads": 12, "n_layers": 6, "pad_token_id": 0,
        "sinusoidal_pos_embds": False, "vocab_size": 30522,
    },
    "modernbert_base": {
        "model_type": "modernbert", "attention_bias": False, "classifier_activation": "gelu",
        "classifier_bias": False, "classifier_pooling": "mean", "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0, "local_rope_theta": 10000.0, "hidden_activation": "gelu",
        "hidden_size": 768, "intermediate_size": 1152, "local_attention": 128, "max_position_embeddings": 8192,
        "mlp_bias": False, "norm_bias": False, "norm_eps": 1e-05, "num_attention_heads": 12,
        "num_hidden_layers": 22, "pad_token_id": 50283, "vocab_size": 50368, "torch_dtype": "float32",
    },
    "nomic_embed_text_v1_5": {
        "model_type": "nomic_bert", "vocab_size": 30528, "hidden_size": 768, "num_hidden_layers": 12,
        "num_attention_heads": 12, "intermediate_size": 3072, "hidden_act": "silu",
        "max_position_embeddings": 2048, "type_vocab_size": 2, "layer_norm_eps": 1e-12,
        "rope_parameters": {"rope_theta": 1000.0, "rope_type": "default"},
    },
    "eurobert_210m": {
        "model_type": "eurobert", "attention_bias": False, "head_dim": 64, "hidden_act": "silu", "hidden_size": 768,
        "intermediate_size": 3072, "max_position_embeddings": 8192, "mlp_bias": False, "num_attention_heads": 12,
        "num_hidden_layers": 12, "num_key_value_heads": 12, "rms_norm_eps": 1e-05, "rope_theta": 250000,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 128256, "pad_token_id": 128001,
    },
    "albert_base_v2": {
        **_BERT, "model_type": "albert", "embedding_size": 128, "hidden_act": "gelu_new", "inner_group_num": 1,
        "num_hidden_groups": 1, "vocab_size": 30000, "net_structure_type": 0,
    },
    "data2vec_text_base": {**_ROBERTA, "model_type": "data2vec-text", "vocab_size": 50265},
    "ernie_2_0_base_en": {**_BERT, "model_type": "ernie", "type_vocab_size": 4},
    "ernie_3_0_base_zh": {
        **_BERT, "model_type": "ernie", "layer_norm_eps": 1e-5, "max_position_embeddings": 2048,
        "task_type_vocab_size": 3, "type_vocab_size": 4, "use_task_id": True, "vocab_size": 40000,
    },
    "gte_multilingual_base": {
        **_BERT, "model_type": "gte", "max_position_embeddings": 8192, "pad_token_id": 1, "type_vocab_size": 1,
        "vocab_size": 250048,
    },
    "jina_embeddings_v3": {
        **_ROBERTA, "model_type": "jina_embeddings_v3", "vocab_size": 250002, "hidden_size": 1024,
        "intermediate_size": 4096, "max_position_embeddings": 8194, "num_attention_heads": 16,
        "num_hidden_layers": 24, "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
    },
    "megatron_bert_cased_345m": {
        **_BERT, "model_type": "megatron-bert", "hidden_size": 1024, "intermediate_size": 4096,
        "num_attention_heads": 16, "num_hidden_layers": 24, "vocab_size": 29056,
    },
    "rembert": {
        **_BERT, "model_type": "rembert", "hidden_size": 1152, "input_embedding_size": 256,
        "intermediate_size": 4608, "num_attention_heads": 18, "num_hidden_layers": 32,
        "output_embedding_size": 1664, "vocab_size": 250300,
    },
    "roformer_chinese_base": {
        **_BERT, "model_type": "roformer", "embedding_size": 768, "max_position_embeddings": 1536,
        "rotary_value": False, "vocab_size": 50000,
    },
    "efficient_mlm_m0_40": {
        **_ROBERTA, "model_type": "roberta-prelayernorm", "vocab_size": 50265, "hidden_size": 1024,
        "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24,
    },
    "xlm_roberta_xl": {
        **_ROBERTA, "model_type": "xlm-roberta-xl", "vocab_size": 250880, "hidden_size": 2560,
        "intermediate_size": 10240, "num_attention_heads": 32, "num_hidden_layers": 36,
    },
    "embeddinggemma_300m": {
        "model_type": "gemma3_text", "attention_bias": False, "final_logit_softcapping": None, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 768, "intermediate_size": 1152,
        "max_position_embeddings": 2048, "num_attention_heads": 3, "num_hidden_layers": 24,
        "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000.0, "rope_theta": 1000000.0, "sliding_window": 512,
        "use_bidirectional_attention": True, "vocab_size": 262144, "torch_dtype": "float32",
    },
}  # fmt: skip
