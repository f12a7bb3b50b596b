"""Chat templates against transformers' apply_chat_template, on templates written in the manner of real models."""

import re
import time
from datetime import datetime
from typing import Any

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from headrace.core.errors import ModelError, RequestError
from headrace.core.text import template_env
from headrace.core.text.chat import ChatTemplate

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = """{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Functions:\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
QWEN = """{%- set ns = namespace(multi_step_tool=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and not(message.content.startswith('<tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" and '</think>' in message.content and loop.index0 > ns.last %}
        {{- '<|im_start|>assistant\\n' + message.content.split('</think>')[-1].lstrip('\\n') }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token}}"
    "{% endgeneration %}{% endif %}{% endfor %}"
)
GEMMA = """{{ bos_token }}
{%- for message in messages -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '\\n' }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'text' -%}
                {{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model\\n'}}
{%- endif -%}
"""
LOOPS = (
    "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m | tojson }}"
    "{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}{{ strftime_now('%Y') }}"
    "{% for d in documents or [] %}{{ d.title }}{% endfor %}"
)
TEMPLATES = {"smollm2": SMOLLM2, "llama3": LLAMA3, "qwen": QWEN, "mistral": MISTRAL, "gemma": GEMMA, "loops": LOOPS}
SPECIAL = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
TURNS = [
    {"role": "user", "content": "Why is the sky blue?  "},
    {"role": "assistant", "content": "<think>hm</think>\n\nR\u00e4uber & <b>'Light'</b>"},
    {"role": "user", "content": "And at night?"},
]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "sky", "description": "a \u00fc <b>", "parameters": {"type": "object"}},
}
CALL: list[dict[str, Any]] = [
    TURNS[0],
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "sky", "arguments": {"at": "\u00fc"}}}],
    },
    {"role": "tool", "content": "black"},
]


@pytest.fixture(scope="module")
def theirs(byte_level: tokenizers.Tokenizer) -> Any:
    make: Any = PreTrainedTokenizerFast
    return make(tokenizer_object=byte_level, **SPECIAL)


def expected(theirs: Any, template: str, messages: list[dict[str, Any]], **options: Any) -> Any:
    return theirs.apply_chat_template(messages, chat_template=template, tokenize=False, **options)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("count", [1, 3])
def test_templates_equal_transformers(name: str, add_generation_prompt: bool, count: int, theirs: Any) -> None:
    template, messages = TEMPLATES[name], TURNS[:count]
    ours = ChatTemplate(template, SPECIAL).render(messages, add_generation_prompt=add_generation_prompt)
    assert ours == expected(theirs, template, messages, add_generation_prompt=add_generation_prompt)


@pytest.mark.parametrize("name", ["smollm2", "llama3", "qwen", "gemma", "loops"])
def test_system_messages_equal_transformers(name: str, theirs: Any) -> None:
    messages = [{"role": "system", "content": " Be kind. "}, *TURNS]
    ours = ChatTemplate(TEMPLATES[name], SPECIAL).render(messages)
    assert ours == expected(theirs, TEMPLATES[name], messages, add_generation_prompt=True)


@pytest.mark.parametrize("name", ["smollm2", "llama3", "gemma"])
@pytest.mark.parametrize("content", ["Because ", "Because", [{"type": "text", "text": "Because "}]])
def test_a_continued_message_equals_transformers(name: str, content: Any, theirs: Any) -> None:
    messages: list[dict[str, Any]] = [TURNS[0], {"role": "assistant", "content": content}]
    ours = ChatTemplate(TEMPLATES[name], SPECIAL).render(messages, continue_final_message=True)
    if isinstance(content, list) and name != "gemma":
        messages[1]["content"] = content[0]["text"]  # these templates take text only
    assert ours == expected(theirs, TEMPLATES[name], messages, continue_final_message=True)
    assert ours.endswith("Because " if name == "smollm2" and content != "Because" else "Because")


def test_tools_documents_and_keywords_equal_transformers(theirs: Any) -> None:
    ours = ChatTemplate(LLAMA3, SPECIAL)
    assert ours.render(CALL, tools=[TOOL]) == expected(theirs, LLAMA3, CALL, tools=[TOOL], add_generation_prompt=True)
    documents = [{"title": "Sky", "text": "blue"}]
    assert ChatTemplate(LOOPS, SPECIAL).render(TURNS, documents=documents) == expected(
        theirs, LOOPS, TURNS, documents=documents
    )
    assert ChatTemplate(QWEN, SPECIAL).render(TURNS, enable_thinking=False) == expected(
        theirs, QWEN, TURNS, enable_thinking=False, add_generation_prompt=True
    )


def test_parts_reach_templates_that_loop_over_them(theirs: Any) -> None:
    parts = [{"type": "text", "text": " one "}, {"type": "text", "text": "two"}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": parts}]
    assert ChatTemplate(GEMMA, SPECIAL).render(messages) == expected(
        theirs, GEMMA, messages, add_generation_prompt=True
    )
    joined = [{"role": "user", "content": " one \ntwo"}]
    assert ChatTemplate(SMOLLM2, SPECIAL).render(messages) == expected(
        theirs, SMOLLM2, joined, add_generation_prompt=True
    )


def test_calls_without_content(theirs: Any) -> None:
    """Templates that read every message's content get an empty one; those that look whether there is any get none."""
    looks = (
        "{% for m in messages %}{% if m.content is defined %}{{ m.content }}{% else %}a call{% endif %}{% endfor %}"
    )
    empty = [{**message, "content": message["content"] or ""} for message in CALL]
    reads = SMOLLM2.replace("message['content']", "(message['content'] + '')")
    for template in (SMOLLM2, reads):
        assert ChatTemplate(template, SPECIAL).render(CALL) == expected(
            theirs, template, empty, add_generation_prompt=True
        )
    assert "a call" in ChatTemplate(looks, SPECIAL).render(CALL)


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_turns_of_reasoning_or_refusal_alone(name: str) -> None:
    template = ChatTemplate("{% for m in messages %}[{{ m.content + '' }}]{% endfor %}")
    assert template.render([TURNS[0], {"role": "assistant", "content": None, name: "hm"}]).endswith("[]")
    assert template.render([TURNS[0], {"role": "assistant", "refusal": "no"}]).endswith("[no]")
    parts = [{"type": "refusal", "refusal": "never"}]
    assert template.render([TURNS[0], {"role": "assistant", "content": parts}]).endswith("[never]")


def test_named_templates() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "tools"})
    assert template.names == ("default", "tool_use")
    assert template.render(TURNS) == "plain"
    assert template.render(TURNS, tools=[TOOL]) == "tools"
    assert template.render(TURNS, tools=[TOOL], template="default") == "plain"
    with pytest.raises(ModelError, match="no chat template 'tool-use': it has default, tool_use; did you mean"):
        template.render(TURNS, template="tool-use")
    with pytest.raises(ModelError, match="it has none"):
        ChatTemplate({}).render(TURNS)


def test_the_time_is_now() -> None:
    assert ChatTemplate("{{ strftime_now('%Y-%m') }}").render(TURNS) == datetime.now().strftime("%Y-%m")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages: a chat needs at least one"),
        ("hello", "must be a list of objects"),
        (["hello"], r"messages\[0\] must be an object"),
        ([{"content": "x"}], r"messages\[0\] needs a role"),
        ([TURNS[0], {"role": "user"}], r"messages\[1\] needs content"),
        ([{"role": "user", "content": 3}], "text or a list of parts"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
            "a part of type 'image_url'; this model reads text only",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "a part of type 'text' whose text is no text"),
        ([{"role": "user", "content": [None]}], "a part of type 'NoneType'"),
        ([{"role": "user", "content": "x", "extra": object()}], "which is no JSON value"),
    ],
)
def test_wrong_messages(messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        ChatTemplate(SMOLLM2).render(messages)


def test_a_model_that_sees_refuses_what_is_no_image() -> None:
    video = {"type": "video_url", "video_url": {"url": "x"}}
    with pytest.raises(RequestError, match="'video_url'; this model reads text and images only"):
        ChatTemplate(SMOLLM2).render([{"role": "user", "content": [video]}], image_placeholder="<image>")


@pytest.mark.parametrize(
    ("template", "kind", "message"),
    [
        ("{% for %}", ModelError, "damaged, line 1"),
        ("{{ raise_exception('only user/assistant') }}", RequestError, "refuses the messages: only user/assistant"),
        ("{{ nothing.at_all.here }}", RequestError, "cannot render these messages: UndefinedError"),
        ("{{ messages[0].content + 3 }}", RequestError, "cannot render these messages: TypeError"),
        ("{{ messages.append(1) }}", ModelError, "must not"),
        ("{{ ''.__class__.__mro__ }}", ModelError, "must not"),
        ("{% set n = namespace(__class__=1) %}", ModelError, "must not"),
    ],
)
def test_templates_that_fail(template: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        ChatTemplate(template).render(TURNS)


def test_continuing_needs_something_to_continue() -> None:
    with pytest.raises(RequestError, match="drops the final message"):
        ChatTemplate("{{ messages[0].content }}").render(TURNS, continue_final_message=True)
    with pytest.raises(RequestError, match=re.escape("exclude each other")):
        ChatTemplate(SMOLLM2).render(TURNS, add_generation_prompt=True, continue_final_message=True)
    with pytest.raises(RequestError, match="no text to continue"):
        ChatTemplate(LLAMA3).render(CALL[:2], continue_final_message=True)


def test_rendering_changes_nothing_of_the_caller() -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": "x"}], "name": None}]
    ChatTemplate(SMOLLM2).render(messages, continue_final_message=True)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "x"}], "name": None}]


def test_developers_are_the_system_unless_the_template_knows_them() -> None:
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    as_system = [{**messages[0], "role": "system"}, messages[1]]
    template = ChatTemplate(SMOLLM2)
    assert template.render(messages) == template.render(as_system)
    knows = ChatTemplate("{% for m in messages %}{{ m.role }}{% if m.role == 'developer' %}!{% endif %} {% endfor %}")
    assert knows.render(messages) == "developer! user "


@pytest.mark.parametrize(
    ("calls", "problem"),
    [
        (5, "messages[0] must have a list as tool_calls, got 5"),
        ({}, "messages[0] must have a list as tool_calls, got dict {}"),
        ([5], "messages[0] has tool_calls[0] without a function's name"),
        ([{"function": {"name": "f"}}, {}], "messages[0] has tool_calls[1] without a function's name"),
        ([{"function": {"name": 5}}], "messages[0] has tool_calls[0] without a function's name"),
        ([{"name": "f", "arguments": 5}], "messages[0] has tool_calls[0] whose arguments are neither text nor"),
    ],
)
def test_tool_calls_of_earlier_turns_that_are_none(calls: Any, problem: str) -> None:
    template = ChatTemplate("{{ messages }}")
    with pytest.raises(RequestError) as error:
        template.render([{"role": "assistant", "content": "x", "tool_calls": calls}])
    assert error.value.reason.startswith(problem)
    for fine in ([], [{"function": {"name": "f", "arguments": "{}"}}], [{"name": "f", "arguments": {"a": 1}}]):
        template.render([{"role": "assistant", "content": "x", "tool_calls": fine}])


def again(first: str, then: str) -> str:
    """A template that makes a value of another one, again and again."""
    loop = "{% for _ in range(99) %}{% set n.s = " + then + " %}{% endfor %}"
    return "{% set n = namespace(s=" + first + ") %}" + loop


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "runs for more than 0 s"),
        ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}", "runs for"),
        ("{% for a in range(99999) %}" + 99999 * "text" + "{% endfor %}", "prints more than"),
        ("{% for a in range(99999) %}{{ messages[0].content * 9999999 }}{% endfor %}", "prints more than"),
        ("{% macro f(n) %}" + 999999 * "text" + "{{ f(n - 1) if n }}{% endmacro %}{{ f(40) }}", "prints more than"),
        (again("'ab'", "n.s + n.s"), "makes a value"),
        (again("'ab'", "n.s ~ n.s"), "makes a value"),
        (again("['ab']", "n.s + n.s"), "makes a value"),
        (again("[1]", "[n.s, n.s]"), "makes a"),
        (again("{}", "dict(a=n.s, b=n.s)"), "makes a"),
        ("{{ 'a' * 10 ** 10 }}", "makes a value of more than"),
        ("{{ [1] * 10 ** 10 }}", "makes a value of more than"),
        ("{{ 10 ** (10 ** 10) }}", "makes a number of 4e"),
        (again("9", "n.s * n.s"), "makes a number"),
        ("{{ '%9999999999d' % 1 }}", "writes something with a width of millions"),
        ("{{ '%*d' % (9999999999, 1) }}", "writes something with a width of millions"),
        ("{{ '{:9999999999}'.format(1) }}", "writes something with a width of millions"),
        ("{{ '{:{}}'.format(1, 9999999999) }}", "calls format with 1e"),
        ("{{ 'a'.ljust(9999999999) }}", "calls ljust with 1e"),
        ("{{ 'a'|center(9999999999) }}", "calls center with 1e"),
        ("{{ messages|tojson(indent=9999999999) }}", "calls tojson with 1e"),
        ("{% set s = 'a' * 99999 %}{{ s.replace('a', s) }}", "makes a value of more than"),
        ("{% set s = 'a' * 99999 %}{{ s|replace('a', s) }}", "makes a value of more than"),
        ("{% set s = 'a' * 99999 %}{{ s.join(s|list) }}", "makes a value of more than"),
        ("{% set s = 'a' * 99999 %}{{ s|join(s) }}", "makes a value of more than"),
    ],
)  # fmt: skip
def test_templates_end(template: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_env, "_LIMIT_S", 0.2)
    started_s = time.monotonic()
    with pytest.raises(ModelError, match=f"the chat template {reason}"):
        ChatTemplate(template).render([{"role": "user", "content": "x"}])
    assert time.monotonic() - started_s < 10
