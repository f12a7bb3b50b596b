"""A tokenizer out of SentencePiece's own file (Kudo and Richardson 2018), read as the protocol buffer that it is.

Serves what Llama and its descendants have: BPE whose texts are not normalized. Others are transformers' to convert.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .gguf_tokenizer import tokenizer_from_gguf
from .tokenizer import Tokenizer

_BPE = 2
_KINDS = {1: "Unigram", _BPE: "BPE", 3: "WordLevel"}
"""What the library `tokenizers` calls the kinds of models that have pieces."""
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
"""Fields of a ModelProto."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """What the file says; lists by token id. ids: "unk" and the like -> id, -1 for none."""

    pieces: list[str]
    scores: list[float]
    types: list[int]
    kind: int
    ids: Mapping[str, int]
    charsmap: bytes
    adds_prefix: bool
    removes_spaces: bool


def read_sentencepiece(file: Path, config: Mapping[str, Any]) -> Tokenizer | None:
    """The tokenizer of a file, with the ends that tokenizer_config.json asks for (Llama's: one before each text).

    None for a file of another kind, or for rules that are not read here.
    """
    try:
        model = _read_model(file.read_bytes())
    except (ValueError, IndexError):  # a bare list of tokens may have the same name
        return None
    if model.kind != _BPE or model.charsmap or model.removes_spaces or not model.pieces:
        return None
    fields: dict[str, Any] = {
        "model": "llama",
        "tokens": model.pieces,
        "scores": model.scores,
        "token_type": model.types,
        "add_space_prefix": model.adds_prefix,
        "add_bos_token": config.get("add_bos_token", True),
        "add_eos_token": config.get("add_eos_token", False),
        **{f"{name}_token_id": id for name, id in model.ids.items()},
    }
    return tokenizer_from_gguf({f"tokenizer.ggml.{name}": value for name, value in fields.items()})


def sentencepiece_kind(file: Path) -> str | None:
    """The class of `tokenizers.models` that reads a file's pieces; None for a file that is not SentencePiece's."""
    try:
        model = _read_model(file.read_bytes())
    except (ValueError, IndexError):
        return None
    return _KINDS.get(model.kind) if model.pieces else None


def _read_model(data: bytes) -> _Model:
    """Raises ValueError or IndexError for bytes that are no ModelProto."""
    pieces: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for field, value in _fields(data):
        if field == _PIECES:
            piece = dict(_fields(value))
            pieces.append(piece[1].decode() if 1 in piece else "")
            scores.append(float(np.frombuffer(piece.get(2, bytes(4)), "<f4")[0]))
            types.append(piece.get(3, 1))
        elif field == _TRAINER:
            trainer = dict(_fields(value))
        elif field == _NORMALIZER:
            normalizer = dict(_fields(value))
    names = (("unknown", 40, 0), ("bos", 41, 1), ("eos", 42, 2), ("padding", 43, -1))
    return _Model(
        pieces=pieces,
        scores=scores,
        types=types,
        kind=trainer.get(3, 1),
        ids={name: _signed(trainer.get(field, default)) for name, field, default in names},
        charsmap=normalizer.get(2, b""),
        adds_prefix=bool(normalizer.get(3, 1)),
        removes_spaces=bool(normalizer.get(4, 1)),
    )


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of each field of a message: an integer, or the bytes of anything else."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind == 2:
            size, at = _varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"wire type {kind}")
        if at + size > len(data):
            raise ValueError("the file ends within a field")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("an integer of more than 64 bits")


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
