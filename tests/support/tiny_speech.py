"""A tiny Whisper with a tokenizer of its own, for dummy weights, and a recording."""

import json
import struct
from pathlib import Path

import numpy as np

from tiny_tokenizers import train_byte_level

SPECIAL = (
    "<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>",
    "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>",
)  # fmt: skip


def tiny_whisper(folder: Path) -> Path:
    """Write the folder. Its decoder is short, so that a window takes few steps."""
    folder.mkdir(parents=True, exist_ok=True)
    backend = train_byte_level()
    vocab = json.loads(backend.to_str())
    first = backend.get_vocab_size()
    vocab["added_tokens"] = [
        {
            "id": first + i, "content": name, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": True,
        }
        for i, name in enumerate(SPECIAL)
    ]  # fmt: skip
    for name in [name for name in vocab["model"]["vocab"] if name in SPECIAL]:
        vocab["model"]["vocab"][name + "old"] = vocab["model"]["vocab"].pop(name)
    (folder / "tokenizer.json").write_text(json.dumps(vocab))
    ids = {name: first + i for i, name in enumerate(SPECIAL)}
    config = {
        "model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"], "is_encoder_decoder": True,
        "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 80,
        "max_source_positions": 1500, "max_target_positions": 24, "vocab_size": first + len(SPECIAL) + 300,
        "decoder_start_token_id": ids["<|startoftranscript|>"], "eos_token_id": ids["<|endoftext|>"],
        "pad_token_id": ids["<|endoftext|>"], "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    generation = {
        "is_multilingual": True, "lang_to_id": {name: ids[name] for name in ("<|en|>", "<|de|>")},
        "no_timestamps_token_id": ids["<|notimestamps|>"], "max_initial_timestamp_index": 50,
        "eos_token_id": ids["<|endoftext|>"], "decoder_start_token_id": ids["<|startoftranscript|>"],
        "suppress_tokens": list(range(first + 4, first + 9)), "begin_suppress_tokens": [ids["<|endoftext|>"]],
    }  # fmt: skip
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def recording(seconds: float, seed: int = 0) -> bytes:
    """Noise as a WAV file of 16 kHz."""
    values = np.random.default_rng(seed).integers(-3000, 3000, int(seconds * 16_000)).astype("<i2").tobytes()
    form = struct.pack("<HHIIHH", 1, 1, 16_000, 32_000, 2, 16)
    data = b"data" + struct.pack("<I", len(values)) + values
    body = b"WAVE" + b"fmt " + struct.pack("<I", 16) + form + data
    return b"RIFF" + struct.pack("<I", len(body)) + body
