"""Vocabularies out of GGUF metadata against the libraries that trained them."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import sentencepiece
import tokenizers
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from headrace.core.default_model import find_default_model
from headrace.core.errors import ModelError
from headrace.core.text.gguf_pretokenizers import PRE_TOKENIZERS
from headrace.core.text.gguf_tokenizer import tokenizer_from_gguf
from headrace.core.text.tokenizer import Tokenizer
from headrace.core.weights.gguf import GGUFSource
from tiny_tokenizers import CORPUS, byte_level_fields, sentencepiece_fields, train_byte_level

Write = Callable[..., Mapping[str, Any]]
TEXTS = [
    *CORPUS[:6],
    "",
    " ",
    "  two  spaces ",
    "1234567 and 12 \u0663\u0664",
    "I'LL we've\r\n\r\n\tx  \n y",
    "a<|im_end|>b",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 e\u0301",
    "HTTPServer x=[1,2];//go  ",
]
texts = st.text(st.characters(codec="utf-8"), max_size=60)
wordy = st.lists(st.sampled_from([*"aA1 '\n\t.,s\u00e9\u4f60", "'s", "LL", "  "]), max_size=30).map("".join)
property_test = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])

# Written from the models' own tokenizer.json files.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
PRE: dict[str, pre_tokenizers.PreTokenizer | None] = {
    "gpt-2": None,
    "smollm": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    ),
    "llama-bpe": pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
    "qwen2": pre_tokenizers.Split(Regex(QWEN2), "isolated"),
}


@pytest.mark.parametrize("pre", PRE)
def test_byte_level_equals_the_tokenizer_it_came_from(pre: str, through_gguf: Write) -> None:
    way = PRE[pre]
    if pre == "smollm":
        trained = train_byte_level()
        assert way is not None
        trained.pre_tokenizer = way
        trained.train_from_iterator(
            CORPUS,
            tokenizers.trainers.BpeTrainer(
                vocab_size=480,
                special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
                initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                show_progress=False,
            ),
        )
    else:
        trained = train_byte_level(way)
    ours = tokenizer_from_gguf(through_gguf({**byte_level_fields(trained), "pre": pre, "add_bos_token": False}))

    @settings(max_examples=60)
    @given(texts | wordy)
    def check(text: str) -> None:
        assert ours.encode(text) == trained.encode(text).ids
        assert ours.decode(ours.encode(text)) == trained.decode(trained.encode(text).ids)

    for text in TEXTS:
        assert ours.encode(text) == trained.encode(text).ids, text
    check()


def test_smollm_cuts_every_digit(through_gguf: Write) -> None:
    fields = {**byte_level_fields(train_byte_level()), "pre": "smollm"}
    pieces = [tokenizer_from_gguf(through_gguf(fields)).token_text(i) for i in (0,)]
    assert pieces == ["<|endoftext|>"]
    tokenizer = tokenizer_from_gguf(through_gguf(fields))
    assert [tokenizer.token_text(id) for id in tokenizer.encode("12345")] == list("12345")


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_keeps_the_text(pre: str, through_gguf: Write) -> None:
    tokenizer = tokenizer_from_gguf(
        through_gguf({**byte_level_fields(train_byte_level()), "pre": pre, "add_bos_token": False})
    )
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@pytest.fixture(scope="module")
def llama_kind(spm_bpe: sentencepiece.SentencePieceProcessor) -> Tokenizer:
    fields = {f"tokenizer.ggml.{k}": v for k, v in sentencepiece_fields(spm_bpe, "llama").items()}
    return tokenizer_from_gguf(fields)


@property_test
@given(texts | wordy)
@example("  leading and trailing  ")
@example("\u4f60\u597d \U0001f600")
def test_llama_equals_sentencepiece(
    llama_kind: Tokenizer, spm_bpe: sentencepiece.SentencePieceProcessor, text: str
) -> None:
    # SentencePiece also writes a space mark for U+2581 itself, and drops NUL.
    text = text.replace("\u2581", "").replace("\0", "")
    expected = spm_bpe.encode(text)
    assert llama_kind.encode(text, add_special_tokens=False) == expected
    assert llama_kind.encode(text) == [spm_bpe.bos_id(), *expected]
    assert llama_kind.decode(expected) == spm_bpe.decode(expected)


def test_llama_flags(spm_bpe: sentencepiece.SentencePieceProcessor, through_gguf: Write) -> None:
    fields = sentencepiece_fields(spm_bpe, "llama")
    flags = {"add_bos_token": False, "add_eos_token": True, "add_space_prefix": False}
    tokenizer = tokenizer_from_gguf(through_gguf({**fields, **flags}))
    ids = tokenizer.encode("the dog")
    assert ids[-1] == spm_bpe.eos_id() and ids[0] != spm_bpe.bos_id()
    assert tokenizer.token_text(ids[0]).startswith("t")
    assert tokenizer.decode(tokenizer.encode(" the dog")) == " the dog"


@property_test
@given(wordy)
@example("The quick brown  fox. ")
def test_t5_equals_sentencepiece(
    spm_unigram: sentencepiece.SentencePieceProcessor, t5_kind: Tokenizer, text: str
) -> None:
    expected = spm_unigram.encode(text)
    assert t5_kind.encode(text, add_special_tokens=False) == expected
    assert t5_kind.encode(text) == [*expected, spm_unigram.eos_id()]


@pytest.fixture(scope="module")
def t5_kind(spm_unigram: sentencepiece.SentencePieceProcessor) -> Tokenizer:
    from sentencepiece import sentencepiece_model_pb2

    generated: Any = sentencepiece_model_pb2
    proto = generated.ModelProto.FromString(spm_unigram.serialized_model_proto())
    fields = {f"tokenizer.ggml.{k}": v for k, v in sentencepiece_fields(spm_unigram, "t5").items() if v != -1}
    fields["tokenizer.ggml.precompiled_charsmap"] = list(proto.normalizer_spec.precompiled_charsmap)
    return tokenizer_from_gguf(fields)


@property_test
@given(texts | wordy)
@example("Hello, unbelievable World! \u4f60\u597d caf\u00e9")
def test_bert_equals_the_tokenizer_it_came_from(wordpiece: tokenizers.Tokenizer, text: str) -> None:
    vocabulary = wordpiece.get_vocab()
    pieces = sorted(vocabulary, key=vocabulary.__getitem__)
    marked = [
        piece
        if piece.startswith("[") and len(piece) > 1
        else piece[2:]
        if piece.startswith("##")
        else "\u2581" + piece
        for piece in pieces
    ]
    metadata = {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": marked,
        "tokenizer.ggml.token_type": [
            3 if piece in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]") else 1 for piece in pieces
        ],
        "tokenizer.ggml.cls_token_id": vocabulary["[CLS]"],
        "tokenizer.ggml.seperator_token_id": vocabulary["[SEP]"],
        "tokenizer.ggml.unknown_token_id": vocabulary["[UNK]"],
    }
    ours = tokenizer_from_gguf(metadata)
    expected = wordpiece.encode(text).ids
    assert ours.encode(text) == [vocabulary["[CLS]"], *expected, vocabulary["[SEP]"]]
    assert ours.decode(expected) == wordpiece.decode(expected)


def test_special_tokens_templates_and_ends(through_gguf: Write) -> None:
    fields = byte_level_fields(train_byte_level())
    tokenizer = tokenizer_from_gguf(through_gguf({**fields, "eos_token_id": 0}, chat_template="{{ messages }}"))
    assert tokenizer.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|endoftext|>"}
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.end_token_ids == (0, 2)  # <|im_end|> ends a turn though the file does not say so
    assert tokenizer.chat_template == {"default": "{{ messages }}"}
    assert tokenizer.encode("<|im_start|>") == [1]
    named = tokenizer_from_gguf(through_gguf({**fields, "eot_token_id": 1}))
    assert named.end_token_ids == (2, 1)


def test_user_defined_tokens_stay_whole_and_visible(through_gguf: Write) -> None:
    fields = byte_level_fields(train_byte_level())
    fields["tokens"].append("<think now>")
    fields["token_type"].append(4)
    tokenizer = tokenizer_from_gguf(through_gguf(fields))
    assert tokenizer.encode("<think now>") == [tokenizer.vocab_size - 1]
    assert tokenizer.decode([tokenizer.vocab_size - 1], skip_special_tokens=True) == "<think now>"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": None}, "has no tokenizer"),
        ({"model": "rwkv"}, "known kinds are gpt2, llama, bert, t5"),
        ({"pre": "qwen-2"}, "did you mean qwen2"),
        ({"tokens": []}, "tokens is missing"),
        ({"token_type": [1]}, "has 1 entries for 480"),
        ({"merges": ["ab"]}, "damaged merge rule 'ab'"),
        ({"merges": ["nowhere tobefound"]}, "merges do not fit"),
        ({"merges": None}, "merges is missing"),
        ({"eos_token_id": 480}, "eos token id 480 is outside its 480 tokens"),
        ({"tokens": ["a"] * 480}, "the token 'a' twice, as 0 and 1"),
    ],
)
def test_damaged_metadata_is_explained(change: dict[str, Any], message: str) -> None:
    fields = {**byte_level_fields(train_byte_level()), **change}
    metadata = {f"tokenizer.ggml.{k}": v for k, v in fields.items() if v is not None}
    with pytest.raises(ModelError, match=message):
        tokenizer_from_gguf(metadata)


@pytest.mark.weights
def test_smollm2_equals_its_own_rules_and_loads_fast() -> None:
    path = find_default_model()
    if path is None:
        pytest.skip("the default model is not on this machine")
    source = GGUFSource(path)
    metadata = source.metadata
    ours, times = tokenizer_from_gguf(metadata), []
    for _ in range(3):
        start = time.process_time()
        tokenizer_from_gguf(metadata)
        times.append(time.process_time() - start)
    oracle = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])},
            [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]],
        )
    )
    way = PRE["smollm"]
    assert way is not None
    oracle.pre_tokenizer = way
    for text in TEXTS:
        if "<|" not in text:
            assert ours.encode(text) == oracle.encode(text).ids
    assert ours.end_token_ids == (2,)
    assert min(times) < 0.3
    source.close()
