"""Forced calls: whatever a model would write, each format's grammar makes it calls that its own parser reads."""

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import AddedToken

from headrace.core.errors import RequestError
from headrace.core.server.formats.constrain import MAX_CALLS, constrain_after_reasoning, constrain_tools
from headrace.core.server.formats.formats import Format, builtin_formats, tool_format
from headrace.core.server.formats.parser import Answer, parse_answer
from headrace.core.server.formats.tools import Tool
from headrace.core.structured.compiler import Vocabulary
from headrace.core.structured.params import StructuredOutputParams
from headrace.core.text.tokenizer import Tokenizer
from headrace.plugins.structured_output import llguidance as plugin
from tiny_tokenizers import train_byte_level

END = 2
SPECIAL = ["[TOOL_CALLS]", "[ARGS]", "<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<think>", "</think>"]
ENDINGS = ["</think>", "[/THINK]", "<|END_THINKING|>", "<channel|>", "\n</parameter>\n", "</arg_value>\n",
           "<|end|><|start|>assistant"]  # fmt: skip
TOOLS = (
    Tool(
        name="get-weather",
        parameters={
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 6},
                "unit": {"type": "string", "enum": ["C", "F"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "exact": {"type": "boolean"},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    ),
    Tool(name="now", parameters={"type": "object", "properties": {}, "additionalProperties": False}),
)


def make_vocabulary(special: bool) -> Vocabulary:
    """The tokens of a format are special ones, or spelled out."""
    trained = train_byte_level()
    if special:
        trained.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer = Tokenizer(trained)
    return Vocabulary(tokenizer=tokenizer, vocab_size=tokenizer.vocab_size, end_token_ids=[END])


VOCABULARIES = {special: make_vocabulary(special) for special in (False, True)}


def force_ending(matcher: Any, vocabulary: Vocabulary, rng: random.Random) -> bytes:
    """Write what ends a free text, where that is possible: letters by chance never would."""
    for text in rng.sample(ENDINGS, len(ENDINGS)):
        tokens = vocabulary.tokenizer.encode(text, add_special_tokens=False)
        count = matcher.accept(tokens)
        if count == len(tokens):
            return text.encode()
        matcher.rollback(count)
    return b""


def write(form: StructuredOutputParams, vocabulary: Vocabulary, seed: int, max_tokens: int = 1500) -> str:
    """A random text of the grammar; it tends to end texts, lists and itself."""
    rng = random.Random(seed)
    matcher = plugin.Compiler(vocabulary).compile(form).new_matcher()
    row = np.zeros(-(-vocabulary.vocab_size // 32), np.int32)
    text = b""
    for count in range(max_tokens):
        matcher.fill_mask(row)
        choice = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
        if count % 8 == 7 and (ending := force_ending(matcher, vocabulary, rng)):
            text += ending
            continue
        if END in choice and (len(choice) == 1 or rng.random() < 0.5 or count > 100):
            return text.decode()
        choice = [token for token in choice if token != END]
        closing = [t for t in choice if vocabulary.tokenizer.token_bytes(t)[:1] in (*b'"]}<,)', b"\n")]
        letters = [t for t in choice if vocabulary.tokenizer.token_bytes(t).isalnum()]
        special = [t for t in choice if t in vocabulary.special_ids]
        pool = special or (closing if closing and rng.random() < 0.6 else letters or choice)
        token = rng.choice(pool)
        assert matcher.accept([token]) == 1
        text += vocabulary.tokenizer.token_bytes(token)
    raise AssertionError(f"no end: {text!r}")


def read(format: Format, text: str, prompt: str = "") -> Answer:
    return parse_answer(text, format.new_parser(prompt=prompt, tools=TOOLS))


FORCIBLE = [name for name, format in builtin_formats().items() if format.calls is not None]


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", FORCIBLE)
def test_required_and_named_calls_are_calls(name: str, special: bool) -> None:
    format, vocabulary = builtin_formats()[name], VOCABULARIES[special]
    schemas = {tool.name: tool.parameters for tool in TOOLS}
    options: dict[str, Any] = dict(tokenizer=vocabulary.tokenizer, prompt="")
    for choice in ("required", "get-weather", "now"):
        form = constrain_tools(format, TOOLS, choice=choice, parallel=choice == "required", **options)
        finished = 0
        for seed in range(3):
            try:
                text = write(form, vocabulary, seed)
            except AssertionError:
                continue
            finished += 1
            answer = read(format, text)
            assert answer.tool_calls and answer.content == "", text
            assert choice == "required" or [call.name for call in answer.tool_calls] == [choice]
            for call in answer.tool_calls:
                jsonschema.validate(json.loads(call.arguments), schemas[call.name])
        assert finished


def test_one_call_only_unless_parallel() -> None:
    vocabulary, format = VOCABULARIES[False], builtin_formats()["functionary"]
    common: dict[str, Any] = dict(choice="required", tokenizer=vocabulary.tokenizer, prompt="")
    text = "<function=now>{}</function>"
    tokens = vocabulary.tokenizer.encode(text, add_special_tokens=False)
    one, many = (
        plugin.Compiler(vocabulary)
        .compile(constrain_tools(format, TOOLS, parallel=parallel, **common))
        .new_matcher()
        .accept(tokens * (MAX_CALLS + 5))
        for parallel in (False, True)
    )
    assert (one, many) == (len(tokens), len(tokens) * MAX_CALLS)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(
    ("name", "prompt", "thought"),
    [("hermes", "<think>\n", "a plan</think>\n\n"), ("hermes", "", "<think>a plan</think>"), ("hermes", "", "")],
)
def test_a_model_may_think_first(special: bool, name: str, prompt: str, thought: str) -> None:
    vocabulary, format = VOCABULARIES[special], builtin_formats()[name]
    form = constrain_tools(format, TOOLS, choice="now", parallel=True, tokenizer=vocabulary.tokenizer, prompt=prompt)
    text = thought + '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    tokens = [*vocabulary.tokenizer.encode(text, add_special_tokens=False), END]
    assert plugin.Compiler(vocabulary).compile(form).new_matcher().accept(tokens) == len(tokens)
    answer = read(format, text, prompt)
    assert (answer.reasoning, [call.name for call in answer.tool_calls]) == ("a plan" if thought else "", ["now"])


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(
    ("kind", "value", "right", "wrong"),
    [
        ("json_object", None, '{"a": 1}', "x"),
        ("json_schema", {"type": "integer"}, "12", "a"),
        ("json_schema", '{"type": "integer"}', "12", "a"),
        ("regex", "^a/b+$", "a/bb", "c"),
        ("choice", ["yes", "no"], "no", "maybe"),
    ],
)
def test_a_form_begins_behind_the_thinking(special: bool, kind: Any, value: Any, right: str, wrong: str) -> None:
    vocabulary, format = VOCABULARIES[special], builtin_formats()["think"]
    form = StructuredOutputParams(kind=kind, value=value)
    options: dict[str, Any] = dict(tokenizer=vocabulary.tokenizer)
    assert constrain_after_reasoning(format, form, prompt="<|im_start|>assistant\n", **options) is form
    assert constrain_after_reasoning(None, form, prompt="<think>", **options) is form
    behind = constrain_after_reasoning(format, form, prompt="<think>\n", **options)
    grammar = plugin.Compiler(vocabulary).compile(behind)
    thought = vocabulary.tokenizer.encode("so { it 1 is</think>\n\n", add_special_tokens=False)
    ends, others = (vocabulary.tokenizer.encode(text, add_special_tokens=False) for text in (right, wrong))
    assert grammar.new_matcher().accept([*thought, *ends, END]) == len(thought) + len(ends) + 1
    assert grammar.new_matcher().accept([*thought, *others]) < len(thought) + len(others)


def test_special_tokens_must_be_seen() -> None:
    formats, seen = builtin_formats(), VOCABULARIES[True].tokenizer
    needs = {name: format.needs_special_tokens(seen) for name, format in formats.items()}
    assert needs["mistral"] and needs["gpt_oss"] and needs["hermes"] and not needs["functionary"]
    assert not any(format.needs_special_tokens(VOCABULARIES[False].tokenizer) for format in formats.values())


def test_wrong_choices_are_named() -> None:
    options: dict[str, Any] = dict(parallel=True, tokenizer=VOCABULARIES[False].tokenizer, prompt="")
    with pytest.raises(RequestError, match="tool_choice names 'nov'.*did you mean.*now") as caught:
        constrain_tools(tool_format(None), TOOLS, choice="nov", **options)
    assert caught.value.code == "invalid_tools"
    with pytest.raises(RequestError, match="needs tools"):
        constrain_tools(tool_format(None), (), choice="required", **options)
