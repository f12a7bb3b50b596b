"""Tiny tokenizers of every kind, and GGUF files that hold them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
import tokenizers

from headrace.core.weights.gguf import GGUFSource
from tiny_tokenizers import train_byte_level, train_sentencepiece, train_wordpiece


@pytest.fixture
def through_gguf(tmp_path: Path) -> Callable[..., Mapping[str, Any]]:
    """(fields, chat_template) -> the metadata of a GGUF file that the gguf package wrote with them."""

    def write(fields: Mapping[str, Any], chat_template: str = "") -> Mapping[str, Any]:
        path = tmp_path / "vocabulary.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        setters: dict[str, Callable[[Any], None]] = {
            "model": writer.add_tokenizer_model,
            "pre": writer.add_tokenizer_pre,
            "tokens": writer.add_token_list,
            "token_type": writer.add_token_types,
            "scores": writer.add_token_scores,
            "merges": writer.add_token_merges,
            "bos_token_id": writer.add_bos_token_id,
            "eos_token_id": writer.add_eos_token_id,
            "eot_token_id": writer.add_eot_token_id,
            "unknown_token_id": writer.add_unk_token_id,
            "padding_token_id": writer.add_pad_token_id,
            "add_bos_token": writer.add_add_bos_token,
            "add_eos_token": writer.add_add_eos_token,
            "add_space_prefix": writer.add_add_space_prefix,
            "remove_extra_whitespaces": writer.add_remove_extra_whitespaces,
            "precompiled_charsmap": writer.add_precompiled_charsmap,
        }
        for name, value in fields.items():
            setters[name](value)
        if chat_template:
            writer.add_chat_template(chat_template)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        source = GGUFSource(path)
        metadata = dict(source.metadata)
        source.close()
        return metadata

    return write


@pytest.fixture(scope="session")
def byte_level() -> tokenizers.Tokenizer:
    """GPT-2's kind."""
    return train_byte_level()


@pytest.fixture(scope="session")
def spm_bpe() -> sentencepiece.SentencePieceProcessor:
    """Llama 2's kind: BPE with byte fallback."""
    return train_sentencepiece(
        "bpe",
        vocab_size=420,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
    )


@pytest.fixture(scope="session")
def spm_unigram() -> sentencepiece.SentencePieceProcessor:
    """T5's kind."""
    return train_sentencepiece("unigram", vocab_size=120, pad_id=0, eos_id=1, unk_id=2, bos_id=-1)


@pytest.fixture(scope="session")
def wordpiece() -> tokenizers.Tokenizer:
    """BERT's kind."""
    return train_wordpiece()
