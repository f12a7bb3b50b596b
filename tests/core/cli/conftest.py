"""A tiny model folder for tests of commands: a config without weights, for dummy weights."""

import json
from pathlib import Path

import pytest


@pytest.fixture
def tiny_llama(tmp_path: Path) -> Path:
    """A folder with the config.json of a llama of two layers."""
    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
