"""The llguidance plugin: masks against json, jsonschema and re over whole vocabularies, errors, speed."""

import json
import random
import re
import time
from collections.abc import Sequence
from typing import Any

import jsonschema
import numpy as np
import pluggy
import pytest

from headrace.core import hooks
from headrace.core.errors import PluginError, RequestError
from headrace.core.structured.compiler import GrammarCache, Vocabulary
from headrace.core.structured.params import StructuredOutputParams
from headrace.core.text.gguf_tokenizer import tokenizer_from_gguf
from headrace.core.text.tokenizer import Tokenizer, TokenizerInfo
from headrace.plugins.structured_output import llguidance as plugin
from tiny_tokenizers import sentencepiece_fields, train_byte_level, train_sentencepiece, train_wordpiece

END = 2


def byte_level() -> Vocabulary:
    return Vocabulary(tokenizer=Tokenizer(train_byte_level()), vocab_size=500, end_token_ids=[END])


def pieces() -> Vocabulary:
    """SentencePiece with byte fallback, cut short: the weights have fewer rows than the tokenizer has tokens."""
    fields = sentencepiece_fields(train_sentencepiece("bpe", vocab_size=500, byte_fallback=True), "llama")
    metadata = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    return Vocabulary(tokenizer=tokenizer_from_gguf(metadata), vocab_size=490, end_token_ids=[END, 499])


VOCABULARIES = {"byte_level": byte_level(), "pieces": pieces()}


def allowed(matcher: Any, vocab_size: int) -> list[int]:
    row = np.zeros(-(-vocab_size // 32), np.int32)
    matcher.fill_mask(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    assert not bits[vocab_size:].any()
    return np.flatnonzero(bits).tolist()


def generate(vocabulary: Vocabulary, params: StructuredOutputParams, seed: int, max_tokens: int = 400) -> str | None:
    """A random walk over the allowed tokens that likes to close; None if it was cut short."""
    rng = random.Random(seed)
    matcher = plugin.Compiler(vocabulary).compile(params).new_matcher()
    text = b""
    for count in range(max_tokens):
        choice = allowed(matcher, vocabulary.vocab_size)
        assert choice, text
        closing = [t for t in choice if vocabulary.tokenizer.token_bytes(t)[:1] in b'"]},']
        token = rng.choice(closing if closing and (count > 60 or rng.random() < 0.3) else choice)
        if END in choice and (len(choice) == 1 or count > 60):
            token = END
        assert matcher.accept([token]) == 1
        if token == END:
            return text.decode()
        text += vocabulary.tokenizer.token_bytes(token)
    return None


@pytest.mark.parametrize("pattern", [r"\d", r"[\d.]", r"\D", r"[^\d]", r"\w", r"\W", r"[\W_]", r"\\d", r"\s"])
def test_classes_of_a_pattern_are_ascii(pattern: str) -> None:
    vocabulary = VOCABULARIES["byte_level"]
    grammar = plugin.Compiler(vocabulary).compile(StructuredOutputParams(kind="regex", value=pattern))
    for text in ("7", "x", "_", "-", ".", " ", "\\d", "\u00e9", "\u0663", "\U0001fbf8"):
        tokens = vocabulary.tokenizer.encode(text)
        matcher = grammar.new_matcher()
        is_whole = matcher.accept(tokens) == len(tokens) and END in allowed(matcher, vocabulary.vocab_size)
        assert is_whole == bool(re.fullmatch(pattern, text, re.ASCII)), text


SCHEMAS: list[Any] = [
    {"type": "object"},
    True,
    {"type": "array", "items": {"type": "integer", "minimum": -3, "maximum": 12}, "minItems": 1, "maxItems": 4},
    {"enum": ["a", 1, None, [True]]},
    {"anyOf": [{"type": "string", "maxLength": 5}, {"type": "number"}]},
    {"type": "string", "pattern": "^[a-f]{2,4}$"},
    {"type": "string", "format": "date"},
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 10},
            "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 3},
            "inner": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]},
        },
        "required": ["name", "inner"],
        "additionalProperties": False,
    },
    {
        "$defs": {"node": {"type": "object", 
                           "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
                           "required": ["next"], "additionalProperties": False}},
        "$ref": "#/$defs/node",
    },
]  # fmt: skip


@pytest.mark.parametrize("name", VOCABULARIES)
@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:40])
def test_texts_keep_to_their_schema(schema: Any, name: str) -> None:
    finished = 0
    for seed in range(4):
        text = generate(VOCABULARIES[name], StructuredOutputParams(kind="json_schema", value=schema), seed)
        if text is not None:
            jsonschema.validate(json.loads(text), schema)
            finished += 1
    assert finished


PATTERNS = ["ab+", "^(cat|dog)s?$", r"[0-9]{3}-[0-9]{4}", r"-?[0-9]+(\.[0-9]{1,2})?", "[^a]{3}", "x*y?"]


@pytest.mark.parametrize("name", VOCABULARIES)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_texts_match_their_pattern(pattern: str, name: str) -> None:
    for seed in range(4):
        text = generate(VOCABULARIES[name], StructuredOutputParams(kind="regex", value=pattern), seed)
        assert text is not None and re.fullmatch(pattern, text)


@pytest.mark.parametrize("name", VOCABULARIES)
def test_texts_are_among_the_choices(name: str) -> None:
    texts = ["yes", "yes, really", 'a "quoted"\\ one', "two\nlines", "\u00e9t\u00e9", "\U0001f600"]
    found = {generate(VOCABULARIES[name], StructuredOutputParams(kind="choice", value=texts), n) for n in range(40)}
    assert found == set(texts)


@pytest.mark.parametrize(
    "grammar",
    ['start: "[" (NUMBER ("," NUMBER)*)? "]"\nNUMBER: /[0-9]{1,3}/', 'root ::= "[" (n ("," n)*)? "]"\nn ::= [0-9]+'],
)
def test_lark_and_ebnf(grammar: str) -> None:
    text = generate(VOCABULARIES["byte_level"], StructuredOutputParams(kind="grammar", value=grammar), 3)
    assert text is not None and re.fullmatch(r"\[([0-9]+(,[0-9]+)*)?\]", text)


def oracle_ids(vocabulary: Vocabulary, prefix: bytes, texts: Sequence[str]) -> list[int]:
    """Tokens that leave a beginning of one of the texts, by trying each; the end if the prefix is one of them."""
    whole = [text.encode() for text in texts]
    ids = []
    for token in range(vocabulary.vocab_size):
        if token in vocabulary.special_ids:
            if token in vocabulary.end_token_ids and prefix in whole:
                ids.append(token)
            continue
        own = vocabulary.tokenizer.token_bytes(token)
        if own and any(text.startswith(prefix + own) for text in whole):
            ids.append(token)
    return ids


@pytest.mark.parametrize("name", VOCABULARIES)
def test_masks_equal_brute_force(name: str) -> None:
    vocabulary = VOCABULARIES[name]
    texts = ["the dog", "the quick brown fox", "there", "\u00fcber", "<|im_end|>"]
    grammar = plugin.Compiler(vocabulary).compile(StructuredOutputParams(kind="choice", value=texts))
    for seed in range(10):
        rng, matcher, prefix = random.Random(seed), grammar.new_matcher(), b""
        while True:
            choice = allowed(matcher, vocabulary.vocab_size)
            expected = oracle_ids(vocabulary, prefix, texts)
            rest = {text.encode()[len(prefix) :][:1] for text in texts if text.encode().startswith(prefix)}
            if len(rest) > 1:
                assert choice == expected
            else:  # the text is forced, and so may be its tokens
                assert choice and set(choice) <= set(expected)
            token = rng.choice(choice)
            assert matcher.accept([token]) == 1
            if token == END:
                break
            prefix += vocabulary.tokenizer.token_bytes(token)


def test_accept_stops_at_the_first_wrong_token_and_rollback_undoes() -> None:
    vocabulary = VOCABULARIES["byte_level"]
    ids = vocabulary.tokenizer.encode("aab", add_special_tokens=False)
    matcher = plugin.Compiler(vocabulary).compile(StructuredOutputParams(kind="regex", value="a*")).new_matcher()
    before = allowed(matcher, 500)
    single = [vocabulary.tokenizer.token_id(char) for char in "aab"]
    assert ids and matcher.accept([t for t in single if t is not None]) == 2
    assert END in allowed(matcher, 500)
    matcher.rollback(2)
    assert allowed(matcher, 500) == before
    with pytest.raises(PluginError, match="cannot go back 3 tokens"):
        matcher.rollback(3)


def test_copies_do_not_share_their_place() -> None:
    grammar = plugin.Compiler(VOCABULARIES["byte_level"]).compile(StructuredOutputParams(kind="regex", value="ab"))
    first, second = grammar.new_matcher(), grammar.new_matcher()
    token = VOCABULARIES["byte_level"].tokenizer.token_id("a")
    assert token is not None and first.accept([token]) == 1
    assert allowed(first, 500) != allowed(second, 500) == allowed(grammar.new_matcher(), 500)


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("json_schema", {"type": "nope"}, "Invalid type: nope"),
        ("json_schema", '{"type": ', "Expecting value"),
        ("json_schema", "[]", "a schema must be an object, got list"),
        ("json_schema", {"not": {}}, "not"),
        ("json_schema", {"type": "array", "uniqueItems": True}, "uniqueItems"),
        ("json_schema", {"$ref": "https://example.com/schema"}, "not present"),
        ("json_schema", {"type": "object", "x": {1, 2}}, "no JSON"),
        ("regex", "a(", "unclosed group"),
        ("regex", r"\bfoo", "lookarounds"),
        ("grammar", "start: missing", "missing"),
        ("grammar", "root ::= (", "cannot be used"),
    ],
)
def test_wrong_grammars_are_request_errors(kind: Any, value: Any, message: str) -> None:
    cache = GrammarCache(plugin.Compiler(VOCABULARIES["byte_level"]))
    with pytest.raises(RequestError, match=re.escape(message)) as caught:
        cache.compile(StructuredOutputParams(kind=kind, value=value))
    assert caught.value.code == "invalid_structured_output"
    assert len(caught.value.reason) < 600


def test_a_schema_too_deep_is_a_request_error() -> None:
    schema: dict[str, Any] = {}
    for _ in range(100_000):
        schema = {"items": schema}
    cache = GrammarCache(plugin.Compiler(VOCABULARIES["byte_level"]))
    with pytest.raises(RequestError, match="nested too deeply"):
        cache.compile(StructuredOutputParams(kind="json_schema", value=schema))


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("json_schema", {"properties": {f"p{n}": {} for n in range(1001)}}, "1001 properties; at most 1000"),
        ("json_schema", {"anyOf": [{"enum": ["x" * 100]}] * 2000}, "characters, of which 200000 may be"),
        ("choice", ["x" * 100_000] * 3, "characters, of which 200000 may be"),
    ],
)
def test_grammars_that_would_cost_too_much_are_refused(kind: Any, value: Any, message: str) -> None:
    start = time.perf_counter()
    with pytest.raises(RequestError, match=message) as caught:
        plugin.Compiler(VOCABULARIES["byte_level"]).compile(StructuredOutputParams(kind=kind, value=value))
    assert caught.value.code == "invalid_structured_output"
    assert time.perf_counter() - start < 5


MANY = "a{1000000}"
TOO_MANY: list[tuple[Any, Any]] = [
    ("regex", MANY),
    ("regex", "(a{1000}){1000}"),
    ("json_schema", {"type": "string", "pattern": MANY}),
    ("json_schema", {"properties": {"n": {"type": "integer"}, "a": {"type": "string", "pattern": MANY}}}),
    ("json_schema", json.dumps({"anyOf": [{"type": "null"}, {"items": {"type": "string", "pattern": MANY}}]})),
    ("grammar", f"start: /{MANY}/"),
    ("grammar", f'start: "x" | "y" A\nA: /{MANY}/'),
    ("grammar", 'start: "a"{1000000}'),
]


@pytest.mark.parametrize(("kind", "value"), TOO_MANY)
def test_what_llguidance_cannot_follow_is_known_when_it_is_compiled(kind: Any, value: Any) -> None:
    with pytest.raises(RequestError, match=r"too many expressions constructed$|Too many items") as caught:
        plugin.Compiler(VOCABULARIES["byte_level"]).compile(StructuredOutputParams(kind=kind, value=value))
    assert caught.value.code == "invalid_structured_output"


LARGE: list[tuple[Any, Any]] = [
    ("regex", "a{2000}"),
    ("regex", "[a-z]{1000000}"),
    ("json_schema", {"type": "string", "minLength": 100_000, "maxLength": 1_000_000}),
    ("json_schema", {"type": "array", "items": {"type": "integer"}, "minItems": 1_000, "maxItems": 1_000_000}),
    ("json_schema", {"type": "object", "properties": {"pattern": {"type": "string"}}, "default": {"pattern": "a{2"}}),
]


@pytest.mark.parametrize(("kind", "value"), LARGE)
def test_large_counts_are_followed(kind: Any, value: Any) -> None:
    vocabulary = VOCABULARIES["byte_level"]
    matcher = plugin.Compiler(vocabulary).compile(StructuredOutputParams(kind=kind, value=value)).new_matcher()
    for _ in range(100):
        token = min(set(allowed(matcher, vocabulary.vocab_size)) - {END}, default=END)
        matcher.forced_token()
        assert matcher.accept([token]) == 1
        if token == END:
            break


def test_blanks_are_bounded() -> None:
    vocabulary = VOCABULARIES["byte_level"]
    matcher = plugin.Compiler(vocabulary).compile(StructuredOutputParams(kind="json_object")).new_matcher()
    brace, blank = (vocabulary.tokenizer.encode(text, add_special_tokens=False) for text in ("{", " "))
    assert matcher.accept(brace) == 1
    assert matcher.accept(blank * 100) == 20


@pytest.mark.parametrize(
    ("vocabulary", "message"),
    [
        (Vocabulary(tokenizer=Tokenizer(train_byte_level()), vocab_size=500, end_token_ids=[]), "no end-of-sequence"),
        (
            Vocabulary(tokenizer=Tokenizer(train_wordpiece(), TokenizerInfo()), vocab_size=300, end_token_ids=[3]),
            "depends on their neighbours",
        ),
    ],
)
def test_unfit_tokenizers_are_named(vocabulary: Vocabulary, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        plugin.Compiler(vocabulary).compile(StructuredOutputParams(kind="json_object"))
    assert caught.value.code == "structured_output_unavailable"


def test_hook_headrace_structured_output() -> None:
    manager = pluggy.PluginManager("headrace")
    manager.add_hookspecs(hooks)
    manager.register(plugin)
    [compiler] = manager.hook.headrace_structured_output(vocabulary=VOCABULARIES["byte_level"])
    assert isinstance(compiler, plugin.Compiler)


def test_a_mask_takes_microseconds() -> None:
    compiler = plugin.Compiler(VOCABULARIES["byte_level"])
    matcher = compiler.compile(StructuredOutputParams(kind="json_schema", value=SCHEMAS[-2])).new_matcher()
    row = np.zeros(16, np.int32)
    best = 1.0
    for _ in range(50):
        start = time.perf_counter()
        matcher.fill_mask(row)
        best = min(best, time.perf_counter() - start)
    assert best < 1e-3
