"""A tiny model folder with config, byte-level tokenizer and chat template, for servers with dummy weights."""

import json
from pathlib import Path

from tiny_tokenizers import train_byte_level

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_server_model(folder: Path, *, max_position_embeddings: int = 4096) -> Path:
    """Write the folder: a llama of two layers whose vocabulary is the tokenizer's."""
    folder.mkdir(parents=True, exist_ok=True)
    backend = train_byte_level()
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": backend.get_vocab_size(),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": max_position_embeddings,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eos_token_id": backend.token_to_id("<|im_end|>"),
    }
    (folder / "config.json").write_text(json.dumps(config))
    settings = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
