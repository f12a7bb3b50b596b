"""Answers of every format: what they say, cut anywhere, and as transformers reads them."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_parsing import parse_response

from headrace.core.errors import ModelError, RequestError
from headrace.core.server.formats.formats import builtin_formats, find_format, tool_format
from headrace.core.server.formats.parser import Answer, AnswerDelta, AnswerParser, parse_answer
from headrace.core.server.formats.template import read_template
from headrace.core.server.formats.tools import Tool, read_tools

TOOLS = (
    Tool(
        name="weather",
        parameters={"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    ),
    Tool(name="now"),
)
PARIS = {"city": 'Paris \u00e9 "q"', "days": 3}
CALL = json.dumps({"name": "weather", "arguments": PARIS})
ARGUMENTS = json.dumps(PARIS)
BEGIN, END, SEP = (f"<\uff5ctool\u2581{text}\uff5c>" for text in ("call\u2581begin", "call\u2581end", "sep"))
ALL_BEGIN, ALL_END = (f"<\uff5ctool\u2581calls\u2581{text}\uff5c>" for text in ("begin", "end"))
WEATHER: tuple[str, Any] = ("weather", PARIS)
NOW: tuple[str, Any] = ("now", {})

# format, answer, content, reasoning, calls
ANSWERS: list[tuple[str, str, str, str, list[tuple[str, Any]]]] = [
    ("hermes", "Hello <b>you</b> < 3", "Hello <b>you</b> < 3", "", []),
    ("hermes", f"<think>\nHm.\n</think>\n\nHi\n<tool_call>\n{CALL}\n</tool_call>", "Hi", "Hm.", [WEATHER]),
    ("hermes", f'<tool_call>{CALL}</tool_call>\n<tool_call>\n{{"name": "now"}}\n</tool_call>', "", "",
     [WEATHER, NOW]),
    ("hermes", '<tool_call>{"arguments": {"a": [1, {"b": "}"}]}, "name": "f"}</tool_call>', "", "",
     [("f", {"a": [1, {"b": "}"}]})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", "", [("f", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", "", [("f", {})]),
    ("qwen3_coder", "On it.\n<tool_call>\n<function=weather>\n<parameter=city>\nParis \u00e9 \"q\"\n</parameter>\n"
     "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>", "On it.", "", [WEATHER]),
    ("glm4", "<think>x</think>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris \u00e9 \"q\""
     "</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>", "", "x", [WEATHER]),
    ("llama3_json", json.dumps({"name": "weather", "parameters": PARIS}), "", "", [WEATHER]),
    ("llama3_json", '<|python_tag|>{"type": "function", "name": "now", "parameters": {}}; '
     + json.dumps({"name": "weather", "parameters": PARIS}), "", "", [NOW, WEATHER]),
    ("llama3_json", 'Look: {"name": "x", "parameters": {}}', 'Look: {"name": "x", "parameters": {}}', "", []),
    ("mistral", f'[TOOL_CALLS] [{CALL}, {{"name": "now", "arguments": {{}}}}]', "", "", [WEATHER, NOW]),
    ("mistral_v11", f"[THINK]a[/THINK]b[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]now{{}}", "b", "a",
     [WEATHER, NOW]),
    ("deepseek_v3", f"{ALL_BEGIN}{BEGIN}function{SEP}weather\n```json\n{ARGUMENTS}\n```{END}\n"
     f"{BEGIN}function{SEP}now\n```json\n{{}}\n```{END}{ALL_END}", "", "", [WEATHER, NOW]),
    ("deepseek_v31", f"{ALL_BEGIN}{BEGIN}weather{SEP}{ARGUMENTS}{END}{BEGIN}now{SEP}{{}}{END}{ALL_END}", "", "",
     [WEATHER, NOW]),
    ("granite", f"<|tool_call|>[{CALL}]", "", "", [WEATHER]),
    ("phi4_mini", f"Sure.<|tool_call|>[{CALL}]<|/tool_call|>", "Sure.", "", [WEATHER]),
    ("functionary", f"<function=weather>{ARGUMENTS}</function><function=now>{{}}</function>", "", "", [WEATHER, NOW]),
    ("command_r", '<|START_THINKING|>I will.<|END_THINKING|><|START_ACTION|>[\n{"tool_call_id": "0", "tool_name": '
     f'"weather", "parameters": {ARGUMENTS}}}\n]<|END_ACTION|>', "", "I will.", [WEATHER]),
    ("command_r", "<|START_RESPONSE|>Yes.<|END_RESPONSE|>", "Yes.", "", []),
    ("gpt_oss", "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>final<|message|>Done.",
     "Done.", "Think.", []),
    ("gpt_oss", "<|channel|>analysis<|message|>T<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
     f"<|constrain|>json<|message|>{ARGUMENTS}", "", "T", [WEATHER]),
    ("gemma4", 'Ok<|tool_call>call:weather{city:<|"|>Paris \u00e9 "q"<|"|>,days:3}<tool_call|>', "Ok", "", [WEATHER]),
    ("kimi_k2", f"<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
     f"{ARGUMENTS}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
     "<|tool_calls_section_end|>", "", "", [WEATHER, NOW]),
    ("pythonic", "[weather(city='Paris \u00e9 \"q\"', days=3), now()]", "", "", [WEATHER, NOW]),
    ("pythonic", "See [1] and [a(b)].", "See [1] and [a(b)].", "", []),
    ("lfm2", '<|tool_call_start|>[weather(city="Paris \u00e9 \\"q\\"", days=3)]<|tool_call_end|>Calling.', "Calling.",
     "", [WEATHER]),
    ("think", "<think>a <b> c</think>d", "d", "a <b> c", []),
]  # fmt: skip
IDS = [f"{n}-{answer[0]}" for n, answer in enumerate(ANSWERS)]


def new_parser(name: str, prompt: str = "", **options: Any) -> AnswerParser:
    return builtin_formats()[name].new_parser(prompt=prompt, tools=options.pop("tools", TOOLS), **options)


def stream(parser: AnswerParser, pieces: Sequence[str]) -> list[AnswerDelta]:
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    return deltas + parser.finish()


def together(deltas: Sequence[AnswerDelta]) -> Answer:
    answer = Answer(tool_calls=[])
    answer.add(deltas)
    return answer


def seen(answer: Answer) -> tuple[str, str, list[tuple[str, str]]]:
    return answer.content, answer.reasoning, [(call.name, call.arguments) for call in answer.tool_calls]


def cut(text: str, at: Sequence[int]) -> list[str]:
    places = [0, *sorted(at), len(text)]
    return [text[a:b] for a, b in zip(places, places[1:], strict=False)]


@pytest.mark.parametrize(("name", "text", "content", "reasoning", "calls"), ANSWERS, ids=IDS)
def test_answers(name: str, text: str, content: str, reasoning: str, calls: list[tuple[str, Any]]) -> None:
    whole = parse_answer(text, new_parser(name))
    assert (whole.content, whole.reasoning) == (content, reasoning)
    assert [(call.name, json.loads(call.arguments)) for call in whole.tool_calls] == calls
    assert seen(together(stream(new_parser(name), list(text)))) == seen(whole)
    rng = random.Random(text)
    for _ in range(20):
        pieces = cut(text, [rng.randrange(len(text) + 1) for _ in range(rng.randrange(8))])
        assert seen(together(stream(new_parser(name), pieces))) == seen(whole)


@pytest.mark.parametrize(("name", "text", "content", "reasoning", "calls"), ANSWERS, ids=IDS)
def test_deltas_come_as_clients_expect(
    name: str, text: str, content: str, reasoning: str, calls: list[tuple[str, Any]]
) -> None:
    parser = new_parser(name)
    deltas = stream(parser, list(text))
    begun = -1
    for delta in deltas:
        if delta.kind == "tool_call":
            begun += 1
            assert (delta.index, delta.text) == (begun, "") and delta.id and delta.name
        elif delta.kind == "arguments":
            assert delta.index == begun and delta.text and not delta.id and not delta.name
        else:
            assert delta.text and delta.index == 0
    assert parser.num_calls == begun + 1 == len(calls)
    ids = [delta.id for delta in deltas if delta.kind == "tool_call"]
    assert len(set(ids)) == len(ids)


def flat(items: list[Any]) -> list[Any]:
    return [each for item in items for each in (item if isinstance(item, list) else [item])]


SAME = [
    n for n, answer in enumerate(ANSWERS) if answer[0] not in ("gpt_oss", "command_r") and "null" not in answer[1]
]


@pytest.mark.parametrize("n", SAME, ids=[IDS[n] for n in SAME])
def test_equals_transformers(n: int) -> None:
    name, text, content, reasoning, calls = ANSWERS[n]
    folder = Path(__file__).parents[4] / "core" / "server" / "formats" / "builtin"
    template = json.loads((folder / f"{name}.json").read_text())["response_template"]
    tools: list[Any] = [
        {"type": "function", "function": {"name": tool.name, "parameters": tool.parameters}} for tool in TOOLS
    ]
    try:
        theirs = parse_response(text, {**template, "start_anchor": "<never>"}, prefix="", tools=tools)
    except (ValueError, KeyError, AttributeError):
        assert '"name": "now"}' in text or "pythonic" in name  # they want all keys, and calls always
        return
    functions = [call["function"] for call in flat(theirs.get("tool_calls") or [])]
    functions = flat(functions)
    arguments = [f.get("arguments", {}) for f in functions]
    arguments = [json.loads(value) if isinstance(value, str) else value for value in arguments]
    assert [(f["name"], a) for f, a in zip(functions, arguments, strict=True)] == calls
    assert (theirs.get("content", ""), theirs.get("reasoning_content", "")) == (content, reasoning)


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[", "]", "{", "}", '"name"', ": ", '"f"',
    ", ", '"arguments"', '{"a": 1}', CALL, "x", " ", "\n", "<", "; ", "<|channel|>", "final",
    "analysis", "<|message|>",
    "<|end|>", "<function=f>", "</function>", "<parameter=a>", "</parameter>", "f(a=1)", "<|python_tag|>", "null",
    "1", "<|tool_call|>", "<|START_ACTION|>", "[ARGS]", '"parameters"', BEGIN, END, SEP, "```",
]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(sorted(builtin_formats())),
    st.lists(st.sampled_from(FRAGMENTS), max_size=25).map("".join),
    st.data(),
)
def test_any_text_streams_to_what_it_is_whole(name: str, text: str, data: st.DataObject) -> None:
    whole = parse_answer(text, new_parser(name))
    at = data.draw(st.lists(st.integers(0, len(text)), max_size=10))
    for pieces in (cut(text, at), list(text)):
        assert seen(together(stream(new_parser(name), pieces))) == seen(whole)


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "f", "arguments": }',
        '{"name": "f" "arguments": {}}',
        "not json",
        '{"arguments": {"a": 1}}',
        '{"name": 5, "arguments": {}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": "x"}',
        '{"name": "f"',
        "",
    ],
)
def test_malformed_calls_are_content(body: str) -> None:
    text = f"<tool_call>{body}</tool_call>"
    answer = parse_answer(f"Hi {text}", new_parser("hermes"))
    assert (answer.content, answer.tool_calls) == (f"Hi {text}", [])


def test_what_goes_wrong_behind_the_beginning_of_arguments_is_passed_on() -> None:
    answer = parse_answer('<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call>', new_parser("hermes"))
    assert [(call.name, call.arguments) for call in answer.tool_calls] == [("f", '{"a": oops}}')]
    answer = parse_answer('<tool_call>{"name": "f", "arguments": {"a": "cut sho', new_parser("hermes"))
    assert [(call.name, call.arguments) for call in answer.tool_calls] == [("f", '{"a": "cut sho')]


def test_arguments_are_passed_on_while_they_are_written() -> None:
    parser = new_parser("hermes")
    assert parser.feed('<tool_call>\n{"name": "wea') == []
    [begin] = parser.feed('ther", "argum') or parser.feed('ents": {')[:1]
    assert (begin.kind, begin.name, begin.index) == ("tool_call", "weather", 0)
    assert [delta.text for delta in parser.feed('"city": "Pa')] == ['"city": "Pa']


def test_beginnings_of_markers_are_withheld() -> None:
    parser = new_parser("hermes")
    assert [d.text for d in parser.feed("a <tool")] == ["a"]
    assert [d.text for d in parser.feed("box>")] == [" <toolbox>"]
    assert parser.feed(" \n") == []
    assert [d.text for d in parser.feed("b")] == [" \nb"]


@pytest.mark.parametrize(
    "prompt", ["<|im_start|>assistant\n<think>\n", "what is <think>?<|im_start|>assistant\n<think>"]
)
def test_the_prompt_may_have_begun_to_think(prompt: str) -> None:
    answer = parse_answer("Hm.\n</think>\n\nYes.", new_parser("hermes", prompt))
    assert (answer.content, answer.reasoning) == ("Yes.", "Hm.")
    answer = parse_answer("Yes.", new_parser("hermes", "what is <think>?<|im_start|>assistant\n"))
    assert (answer.content, answer.reasoning) == ("Yes.", "")


def test_calls_can_be_left_alone_or_limited_to_one() -> None:
    text = f"<think>a</think><tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>"
    answer = parse_answer(text, new_parser("hermes", parse_tools=False))
    assert (answer.content, answer.reasoning, answer.tool_calls) == (text[text.index("<tool_call") :], "a", [])
    parser = new_parser("hermes", parallel=False)
    assert len(parse_answer(text, parser).tool_calls) == parser.num_calls == 1


def test_ids_have_the_form_that_the_model_reads_back() -> None:
    formats = builtin_formats()
    assert len(formats["mistral"].new_id("f", 0)) == 9 and formats["mistral"].new_id("f", 0).isalnum()
    assert formats["kimi_k2"].new_id("f", 2) == "functions.f:2"
    assert formats["hermes"].new_id("f", 0).startswith("call_")


@pytest.mark.parametrize(
    ("chat_template", "name"),
    [
        ('...<tool_call>\\n{\\"name\\": <function-name>}\\n</tool_call>', "hermes"),
        ("<tool_call>\n<function=example>\n<parameter=a>\n</parameter></function></tool_call>", "qwen3_coder"),
        ("<tool_call>{f}\n<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value></tool_call>", "glm4"),
        ('<|start_header_id|>... {"name": f, "parameters": dictionary}', "llama3_json"),
        ("[AVAILABLE_TOOLS][TOOL_CALLS]", "mistral"),
        ("[TOOL_CALLS]f[ARGS]{}", "mistral_v11"),
        (f"{BEGIN}function{SEP}name\\n```json", "deepseek_v3"),
        (f"{BEGIN}name{SEP}", "deepseek_v31"),
        ({"default": "x", "tool_use": "<|start_of_role|> <|tool_call|>"}, "granite"),
        ("<|channel|>analysis<|message|><|start|>", "gpt_oss"),
        ("<think>", "think"),
    ],
)
def test_formats_are_found_by_their_markers(chat_template: Any, name: str) -> None:
    found = find_format(chat_template)
    assert found is not None and found.name == name


def test_without_markers_there_is_no_format_but_calls_can_be_forced() -> None:
    assert find_format("{{ messages }}") is None and find_format(None) is None
    assert tool_format(None).name == tool_format(find_format("<think>")).name == "hermes"


def test_a_checkpoint_brings_its_own(tmp_path: Path) -> None:
    template = {
        "start_anchor": "<bot>",
        "fields": {"content": {}, "thinking": {"open": "<t>", "close": "</t>"}},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"response_template": template}))
    found = find_format("<tool_call></tool_call>", tmp_path)
    assert found is not None and found.name == "checkpoint" and not found.has_tools
    answer = parse_answer("b</t>c", found.new_parser(prompt="<bot>no<bot><t>a"))
    assert (answer.content, answer.reasoning) == ("c", "b")
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match="damaged"):
        find_format(None, tmp_path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "must be an object"),
        ({"version": 2}, "version 2 is not known"),
        ({"fields": {}}, "one field or more"),
        ({"fields": {"a": {}}, "more": 1}, "unknown keys more"),
        ({"fields": {"a": {}, "b": {}}}, "only one field"),
        ({"fields": {"a": {"open": ""}}}, "text or a list of texts"),
        ({"fields": {"a": {"open_pattern": "("}}}, "open_pattern"),
        ({"fields": {"a": {"open": "x", "open_pattern": "x"}}}, "exclude"),
        ({"fields": {"a": {"content": "yaml"}}}, "content 'yaml'"),
        ({"fields": {"a": {"opens": "x"}}}, "unknown keys opens"),
    ],
)
def test_damaged_templates_are_named(data: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_template(data, "here")


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("x", "must be a list"),
        ([{}], r"tools\[0\] must have type function"),
        ([{"type": "web_search"}], "type function"),
        ([{"type": "function", "function": {"name": "a b"}}], "needs a name"),
        ([{"type": "function", "function": {"name": "a", "parameters": []}}], "must be a JSON schema"),
        ([{"type": "function", "function": {"name": "a"}}] * 2, "tools: two have the name 'a'"),
    ],
)
def test_wrong_tools(tools: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        read_tools(tools)
    assert caught.value.code == "invalid_tools"
