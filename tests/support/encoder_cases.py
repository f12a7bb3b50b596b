"""Tiny configs of every encoder family and flag that is compared with transformers, and checkpoints of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

TINY: Mapping[str, Any] = {
    "vocab_size": 131, "hidden_size": 64, "intermediate_size": 88, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0, "num_labels": 3,
}  # fmt: skip
ROBERTA = {"pad_token_id": 1, "type_vocab_size": 1}


@dataclass(frozen=True)
class Case:
    """One tiny checkpoint. config: what differs from TINY. has_types: it is run with token types 0 and 1."""

    name: str
    model_type: str
    config: Mapping[str, Any] = field(default_factory=dict)
    has_types: bool = False
    classifies: bool = True
    has_sdpa: bool = True


CASES = (
    Case("bert", "bert", has_types=True),
    Case("bert_tanh_gelu", "bert", {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "type_vocab_size": 1}),
    Case("roberta", "roberta", ROBERTA),
    Case("roberta_pad_0", "roberta", {**ROBERTA, "pad_token_id": 0}),
    Case("roberta_pad_2", "roberta", {**ROBERTA, "pad_token_id": 2}),
    Case("xlm_roberta", "xlm-roberta", ROBERTA),
    Case("camembert", "camembert", {**ROBERTA, "type_vocab_size": 2}, has_types=True),
    Case("electra", "electra", {"embedding_size": 64}, has_types=True),
    Case("electra_small_embeddings", "electra", {"embedding_size": 24}, has_types=True),
    Case(
        "distilbert",
        "distilbert",
        {"dim": 64, "hidden_dim": 88, "n_layers": 3, "n_heads": 4, "sinusoidal_pos_embds": True},
    ),
    Case("mpnet", "mpnet", {"pad_token_id": 1, "max_position_embeddings": 300}, has_sdpa=False),
    Case(
        "mpnet_more_buckets", "mpnet",
        {"pad_token_id": 1, "max_position_embeddings": 300, "relative_attention_num_buckets": 40},
        has_sdpa=False,
    ),
    Case("albert", "albert", {"embedding_size": 24, "num_hidden_groups": 1}, has_types=True),
    Case("data2vec_text", "data2vec-text", ROBERTA),
    Case("ernie", "ernie", has_types=True),
    Case("ernie_tasks", "ernie", {"use_task_id": True, "task_type_vocab_size": 3}, has_types=True),
    Case("gte", "gte", {"pad_token_id": 1}),
    Case("gte_no_types", "gte", {"type_vocab_size": 0, "hidden_act": "gelu_new", "rope_theta": 500000.0}),
    Case("jina_embeddings_v3", "jina_embeddings_v3", ROBERTA),
    Case("megatron_bert", "megatron-bert", has_types=True, has_sdpa=False),
    Case("rembert", "rembert", {"input_embedding_size": 24}, has_types=True, has_sdpa=False),
    Case("roformer", "roformer", has_types=True, has_sdpa=False),
    Case("roformer_small_embeddings", "roformer", {"embedding_size": 24, "hidden_act": "relu"}, has_sdpa=False),
    Case("roberta_prelayernorm", "roberta-prelayernorm", ROBERTA),
    Case("xlm_roberta_xl", "xlm-roberta-xl", ROBERTA),
    Case("modernbert", "modernbert", {"local_attention": 8, "num_hidden_layers": 5}),
    Case(
        "modernbert_biases_mean",
        "modernbert",
        {
            "local_attention": 6, "attention_bias": True, "mlp_bias": True, "norm_bias": True,
            "classifier_bias": True, "classifier_pooling": "mean", "classifier_activation": "silu",
            "hidden_activation": "gelu_new", "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_hidden_layers": 4,
        },
    ),
    Case("nomic_bert", "nomic_bert", {"head_dim": None}, has_types=True),
    Case("eurobert", "eurobert", {"num_key_value_heads": 2, "classifier_pooling": "mean"}),
    Case("eurobert_biases", "eurobert", {"attention_bias": True, "mlp_bias": True, "classifier_pooling": "mean"}),
    Case(
        "gemma3_text",
        "gemma3_text",
        {
            "num_key_value_heads": 2, "head_dim": 24, "sliding_window": 12, "query_pre_attn_scalar": 20,
            "use_bidirectional_attention": True, "num_hidden_layers": 7,
        },
        classifies=False,
    ),
)  # fmt: skip


def make_checkpoint(case: Case, folder: Path, auto: str) -> Path:
    """A tiny random model of transformers, saved as people save them."""
    import transformers

    config = transformers.AutoConfig.for_model(case.model_type, **{**TINY, **case.config})
    model = getattr(transformers, auto).from_config(config, attn_implementation="eager", dtype=torch.float32)
    generator = torch.Generator().manual_seed(7)
    learned = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, parameter in learned.items():
        values = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            is_norm_weight = "norm" in name.lower() and name.endswith("weight")
            values = 0.2 * values + parameter.data.mean().round() if is_norm_weight else 0.3 * values
        elif "embedding" in name or "embed_tokens" in name:
            values = 0.5 * values
        else:
            is_query_or_key = any(part in name for part in ("q_proj", "k_proj", "query", "key", "Wqkv", "q_lin"))
            values = values * (3.0 if is_query_or_key else 1.0) / parameter.shape[1] ** 0.5
        parameter.data.copy_(values)
    model.save_pretrained(folder)
    return folder


def load_theirs(folder: Path, auto: str, attention: str) -> Any:
    """The same files in transformers."""
    import transformers

    model = getattr(transformers, auto).from_pretrained(folder, attn_implementation=attention, dtype=torch.float32)
    return model.eval().requires_grad_(False)
