"""Tiny tokenizers of every kind, trained by other libraries: byte-level BPE, SentencePiece, WordPiece, unigram."""

import io
import json
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not care at all.",
    "It's 12345 degrees; we'll see what they've done: "
    "\u00fcber caf\u00e9s, na\u00efve r\u00e9sum\u00e9s and fianc\u00e9es.",
    "def main(args):\n    return [x ** 2 for x in range(100) if x % 2 == 0]\n\n\tprint('hello world')",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440! \u4f60\u597d\uff0c\u4e16\u754c\u3002 "
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \U0001f600 \U0001f44d\U0001f3fd",
    "A headrace is the channel that feeds a turbine: one channel, any turbine, any water.",
    'She said: "Don\'t do that again!" HELLO World, camelCase and snake_case names.',
] * 4


def train_byte_level(pre: pre_tokenizers.PreTokenizer | None = None) -> tokenizers.Tokenizer:
    """Byte-level BPE; `pre` cuts before the bytes, None is GPT-2's way."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre is None)
    tokenizer.pre_tokenizer = byte_level if pre is None else pre_tokenizers.Sequence([pre, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=480,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def train_sentencepiece(kind: str, **options: Any) -> sentencepiece.SentencePieceProcessor:
    """A SentencePiece model of kind "bpe" or "unigram"."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=model, model_type=kind, minloglevel=2, **options
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def byte_level_fields(trained: tokenizers.Tokenizer) -> dict[str, Any]:
    """The tokenizer.ggml.* fields that describe a byte-level BPE."""
    model = json.loads(trained.to_str())["model"]
    special = trained.get_added_tokens_decoder()
    return {
        "model": "gpt2",
        "tokens": sorted(model["vocab"], key=model["vocab"].__getitem__),
        "token_type": [3 if i in special else 1 for i in range(trained.get_vocab_size())],
        "merges": [" ".join(pair) for pair in model["merges"]],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def sentencepiece_fields(trained: sentencepiece.SentencePieceProcessor, kind: str) -> dict[str, Any]:
    """The tokenizer.ggml.* fields that describe a SentencePiece model."""

    def type_of(i: int) -> int:
        kinds = (trained.is_unknown(i), trained.is_control(i), trained.is_unused(i), trained.is_byte(i))
        return dict(zip(kinds, (2, 3, 5, 6), strict=True)).get(True, 1)

    ids = range(trained.get_piece_size())
    return {
        "model": kind,
        "tokens": [trained.id_to_piece(i) for i in ids],
        "scores": [trained.get_score(i) for i in ids],
        "token_type": [type_of(i) for i in ids],
        "bos_token_id": trained.bos_id(),
        "eos_token_id": trained.eos_id(),
        "unknown_token_id": trained.unk_id(),
    }


def train_wordpiece() -> tokenizers.Tokenizer:
    """BERT's kind."""
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    )
    return tokenizer


def train_suffix_bpe() -> tokenizers.Tokenizer:
    """The first GPT's kind: ends of words are marked."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer
