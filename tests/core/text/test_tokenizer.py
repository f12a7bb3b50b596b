"""Tokenizer folders against transformers' reading of them; bytes of tokens; bad input."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from headrace.core.errors import ModelError, RequestError
from headrace.core.text.bad_words import bad_word_ids
from headrace.core.text.tokenizer import Tokenizer, load_tokenizer
from tiny_tokenizers import train_byte_level, train_sentencepiece, train_wordpiece

CONFIG = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "pad_token": "<|endoftext|>"}


@pytest.fixture
def folder(tmp_path: Path, byte_level: tokenizers.Tokenizer) -> Path:
    byte_level.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.mark.parametrize("flags", [{}, {"add_bos_token": True}, {"add_bos_token": True, "add_eos_token": True}])
def test_a_folder_equals_transformers(folder: Path, flags: dict[str, Any]) -> None:
    config = {**CONFIG, "eos_token": "<|im_end|>", **flags}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ours = load_tokenizer(folder)
    theirs: Any = PreTrainedTokenizerFast.from_pretrained(str(folder))
    assert (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id) == (1, 2, 0)
    assert ours.vocab_size == len(theirs)
    assert ours.special_ids == set(theirs.all_special_ids)
    for text in ("", "the quick  brown fox", "a<|im_end|>b \u4f60"):
        assert ours.encode(text) == theirs(text)["input_ids"]
        assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"]
        ids = ours.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
    assert ours.encode_batch(["the", "dog"]) == [theirs(text)["input_ids"] for text in ("the", "dog")]


def test_a_post_processor_of_the_file_is_kept(folder: Path, byte_level: tokenizers.Tokenizer) -> None:
    copy = tokenizers.Tokenizer.from_str(byte_level.to_str())
    copy.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    copy.save(str(folder / "tokenizer.json"))
    assert load_tokenizer(folder).encode("dog")[0] == 1


def test_tokens_that_only_the_config_knows(folder: Path) -> None:
    entry = {"content": "<tool>", "special": True, "normalized": False, "lstrip": False, "rstrip": False}
    config = {**CONFIG, "added_tokens_decoder": {"480": {**entry, "single_word": False}}, "unk_token": "Q"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("<tool>") == [480]
    assert tokenizer.special_ids == {0, 1, 2, 480, tokenizer.unk_token_id}


def test_special_tokens_that_the_vocabulary_lacks_are_told_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load_tokenizer(folder)
    assert not caplog.records
    config = {**CONFIG, "eos_token": {"content": "<end>"}, "pad_token": "<pad>", "unk_token": None, "sep_token": ""}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(folder).end_token_ids == ()
    (line,) = caplog.messages
    assert "no such token: eos_token '<end>', pad_token '<pad>'; texts do not end at it" in line


@pytest.mark.parametrize("token", [5, True, ["<|im_end|>"], {"content": 5}, {"text": "<|im_end|>"}])
def test_special_tokens_that_are_no_text_are_refused_as_transformers_refuses_them(folder: Path, token: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({**CONFIG, "eos_token": token}))
    with pytest.raises(TypeError, match="Special token eos_token has to be"):
        PreTrainedTokenizerFast.from_pretrained(str(folder))
    with pytest.raises(ModelError, match=r"eos_token in tokenizer_config.json .* must be text, or an object"):
        load_tokenizer(folder)


def test_chat_templates_of_a_folder(folder: Path) -> None:
    stated = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({**CONFIG, "chat_template": stated}))
    assert load_tokenizer(folder).chat_template == {"default": "A", "tool_use": "B"}
    (folder / "chat_template.jinja").write_text("C")
    (folder / "chat_templates").mkdir()
    (folder / "chat_templates" / "rag.jinja").write_text("D")
    assert load_tokenizer(folder).chat_template == {"default": "C", "tool_use": "B", "rag": "D"}


def test_original_files_are_converted(tmp_path: Path, byte_level: tokenizers.Tokenizer) -> None:
    model = json.loads(byte_level.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    text = "the quick brown fox 123"
    assert load_tokenizer(tmp_path).encode(text) == byte_level.encode(text).ids


def test_without_transformers_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError, match="pip install transformers sentencepiece"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no tokenizer in"),
        ({"tokenizer.json": "{"}, "tokenizer.json is damaged"),
        ({"tokenizer.json": '{"model": {"type": "Strange"}}'}, "tokenizer.json is damaged or newer"),
        ({"tokenizer_config.json": "[1"}, "tokenizer_config.json is damaged"),
        ({"tokenizer_config.json": "[1]"}, "must hold a JSON object"),
        ({"tokenizer_config.json": "[" * 100_000}, "tokenizer_config.json is damaged: nested too deeply"),
        ({"tokenizer.model": "junk"}, "cannot convert"),
    ],
)
def test_damaged_folders(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ModelError, match=message):
        load_tokenizer(tmp_path)
    with pytest.raises(ModelError, match="no folder"):
        load_tokenizer(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"added_tokens_decoder": {"x": {}}}, "added_tokens_decoder in tokenizer_config.json is damaged: ValueError"),
        ({"added_tokens_decoder": {"1": 5}}, "added_tokens_decoder in tokenizer_config.json is damaged: TypeError"),
        ({"added_tokens_decoder": {"1": {}}}, "added_tokens_decoder in tokenizer_config.json is damaged: KeyError"),
        ({"chat_template": [5]}, "chat_template in tokenizer_config.json is neither text nor a list"),
        ({"chat_template": [{"name": "x"}]}, "chat_template in tokenizer_config.json is neither text nor a list"),
    ],
)
def test_damaged_configs(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    train_byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        load_tokenizer(tmp_path)


# ---- beginnings of long texts ------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["byte_level", "wordpiece"])
@pytest.mark.parametrize(
    "text",
    [
        "the quick brown fox, " * 3_000,
        " " * 50_000 + "the dog " * 3_000,
        "a" * 60_000,
        "supercalifragilistic" * 200 + " x" * 20_000,
        "\u4f60\u597d" * 20_000,
        "".join(chr(97 + (n * n // 7) % 26) + " " * (n % 11 == 0) for n in range(60_000)),
    ],
)
def test_a_long_text_is_cut_as_tokenizers_cuts_it(kind: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {"byte_level": train_byte_level, "wordpiece": train_wordpiece}[kind]
    ours = Tokenizer(made())
    theirs = tokenizers.Tokenizer.from_str(ours.backend.to_str())
    for limit in (1, 7, 200):
        theirs.enable_truncation(limit)
        assert ours.encode_pair(text, max_tokens=limit)[0] == theirs.encode(text).ids
    if len(set(text)) > 10 and not text.startswith(" "):
        read: list[int] = []
        backend = ours.backend

        def encode(text: str, **options: Any) -> Any:
            read.append(len(text))
            return backend.encode(text, **options)

        spy = SimpleNamespace(
            encode=encode,
            num_special_tokens_to_add=ours.backend.num_special_tokens_to_add,
            post_process=ours.backend.post_process,
        )
        monkeypatch.setattr(ours, "backend", spy)
        ours.encode_pair(text, max_tokens=7)
        assert max(read) < 20_000


# ---- bytes ------------------------------------------------------------------------------------------------
@settings(max_examples=60)
@given(st.text(st.characters(codec="utf-8"), max_size=30))
def test_bytes_of_tokens_spell_the_text(byte_level: tokenizers.Tokenizer, text: str) -> None:
    tokenizer = Tokenizer(byte_level)
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()


def test_bytes_of_special_and_missing_tokens(byte_level: tokenizers.Tokenizer) -> None:
    tokenizer = Tokenizer(byte_level)
    assert tokenizer.token_bytes(1) == b"<|im_start|>"
    assert tokenizer.token_bytes(tokenizer.vocab_size) == tokenizer.token_bytes(-1) == b""
    assert tokenizer.token_text(tokenizer.encode("\U0001f99c")[0]) == "\ufffd"


# ---- bad input --------------------------------------------------------------------------------------------
def test_lone_surrogates_and_odd_text(byte_level: tokenizers.Tokenizer) -> None:
    tokenizer = Tokenizer(byte_level)
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"
    assert tokenizer.decode(tokenizer.encode("\ud83d\ude00")) == "\U0001f600"
    assert tokenizer.decode(tokenizer.encode_batch(["\udfff\0\uffff"])[0]) == "\ufffd\0\uffff"
    with pytest.raises(RequestError, match="must be text, got int"):
        tokenizer.encode(3)  # type: ignore[arg-type]


def test_ids_outside_the_vocabulary(byte_level: tokenizers.Tokenizer) -> None:
    tokenizer = Tokenizer(byte_level)
    for id in (-1, tokenizer.vocab_size, 2**70):
        with pytest.raises(RequestError, match=f"token id {id} is not in the vocabulary"):
            tokenizer.decode([0, id])
    assert tokenizer.decode([]) == ""


def test_an_invalid_run_of_bytes_costs_only_itself(spm_bpe: sentencepiece.SentencePieceProcessor) -> None:
    from headrace.core.text.gguf_tokenizer import tokenizer_from_gguf
    from tiny_tokenizers import sentencepiece_fields

    fields = sentencepiece_fields(spm_bpe, "llama")
    tokenizer = tokenizer_from_gguf({f"tokenizer.ggml.{k}": v for k, v in fields.items()})
    data = "\u4f60".encode() + b"\xff"
    ids = [tokenizer.backend.token_to_id(f"<0x{byte:02X}>") for byte in data]
    assert tokenizer.decode([id for id in ids if id is not None]) == data.decode(errors="replace")


def test_bad_words_with_and_without_a_space(byte_level: tokenizers.Tokenizer) -> None:
    tokenizer = Tokenizer(byte_level)
    spelled = {tokenizer.decode(ids) for ids in bad_word_ids(tokenizer, ["dog", " fox jumps"])}
    assert spelled == {"dog", " dog", "fox jumps", " fox jumps"}


def test_importing_loads_no_heavy_library() -> None:
    script = (
        "import sys, headrace.core.text.tokenizer, headrace.core.text.detokenizer, headrace.core.text.chat,"
        "headrace.core.text.gguf_tokenizer;"
        "print({'tokenizers', 'transformers', 'jinja2', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# ---- SentencePiece's own file -----------------------------------------------------------------------------
ODD_TEXTS = (
    "Hello world", "  two  spaces  ", "", " ", "\u4f60\u597d \U0001f600 \U0001f469\u200d\U0001f680",
    "tab\tnew\n\nline", "caf\u00e9 cafe\u0301 \ufb01", "\u200b\u00a0x\ufeff",
    "\u0130\u0131 \uac00 \u1112\u1161\u11ab", "\x07\U0010ffff",
)  # fmt: skip


@pytest.fixture(scope="module")
def llama_model() -> sentencepiece.SentencePieceProcessor:
    """BPE with bytes for what it lacks, as Llama's file is."""
    return train_sentencepiece(
        "bpe", vocab_size=400, byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False
    )


@pytest.mark.parametrize("ends", [{}, {"add_bos_token": False, "add_eos_token": True}])
def test_a_sentencepiece_file_equals_the_library(
    ends: dict[str, bool], tmp_path: Path, llama_model: sentencepiece.SentencePieceProcessor
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(llama_model.serialized_model_proto())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer", **ends}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.bos_token_id == 1 and tokenizer.end_token_ids == (2,) and tokenizer.unk_token_id == 0
    assert tokenizer.vocab_size == llama_model.get_piece_size()
    for text in ODD_TEXTS:
        ids = llama_model.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.encode(text) == ([*ids, 2] if ends else [1, *ids])
        assert tokenizer.decode(ids) == llama_model.decode(ids)


def test_a_sentencepiece_file_needs_no_torch(
    tmp_path: Path, llama_model: sentencepiece.SentencePieceProcessor
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(llama_model.serialized_model_proto())
    code = (
        "import sys, pathlib\nfrom headrace.core.text.tokenizer import load_tokenizer\n"
        f"load_tokenizer(pathlib.Path({str(tmp_path)!r}))\n"
        "assert not {'torch', 'transformers', 'sentencepiece'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("options", [{}, {"normalization_rule_name": "identity"}])
def test_other_sentencepiece_files_are_left_to_transformers(options: dict[str, Any], tmp_path: Path) -> None:
    from headrace.core.text.sentencepiece_model import read_sentencepiece

    for name, kind in (("unigram", "unigram"), ("bpe", "bpe")):
        model = train_sentencepiece(kind, vocab_size=200, hard_vocab_limit=False, **options)
        (tmp_path / name).write_bytes(model.serialized_model_proto())
        assert read_sentencepiece(tmp_path / name, {}) is None  # normalized, or without extra spaces


def test_a_file_read_as_another_kind_is_refused(tmp_path: Path) -> None:
    """transformers takes any tokenizer.model of a Llama tokenizer for byte pairs."""
    model = train_sentencepiece("unigram", vocab_size=200, hard_vocab_limit=False)
    (tmp_path / "tokenizer.model").write_bytes(model.serialized_model_proto())
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    with pytest.raises(ModelError, match="Unigram model, but .* reads it as BPE"):
        load_tokenizer(tmp_path)


def test_a_damaged_sentencepiece_file_is_none(
    tmp_path: Path, llama_model: sentencepiece.SentencePieceProcessor
) -> None:
    from headrace.core.text.sentencepiece_model import read_sentencepiece

    for data in (b"", b"junk", b"IQ== 0\nIg== 1\n", llama_model.serialized_model_proto()[:-3], b"\xff" * 40):
        (tmp_path / "m").write_bytes(data)
        assert read_sentencepiece(tmp_path / "m", {}) is None, data[:20]
