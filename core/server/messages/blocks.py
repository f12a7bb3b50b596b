"""A request of Anthropic's protocol in chat's words."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import RequestError
from ..protocol.chat import ChatRequest
from ..protocol.common import ResponseFormat, SamplingFields
from ..protocol.messages import MessagesRequest, PromptFields

_THINKING = ("enabled", "adaptive", "disabled")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_request(body: PromptFields) -> ChatRequest:
    """The same request as chat's. Raises RequestError."""
    if body.n not in (None, 1):
        raise RequestError("n: one request makes one message", code="unsupported_parameter")
    _check_ranges(body)
    messages = _messages(body)
    choice = body.tool_choice or {}
    config = body.output_config or {}
    chat = ChatRequest(
        model=body.model,
        messages=messages,
        tools=_tools(body.tools or []) or None,
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=not choice.get("disable_parallel_tool_use", False),
        reasoning_effort=config.get("effort"),
        response_format=_response_format(config.get("format")),
        continue_final_message=bool(messages) and messages[-1]["role"] == "assistant",
    )
    for name in SamplingFields.__struct_fields__:
        setattr(chat, name, getattr(body, name))
    if body.thinking is not None:
        chat.chat_template_kwargs = {"enable_thinking": body.thinking.get("type") != "disabled"}
    if isinstance(body, MessagesRequest):
        chat.max_tokens = body.max_tokens
        chat.stop = body.stop_sequences or body.stop
    return chat


def _check_ranges(body: PromptFields) -> None:
    """What Anthropic's protocol lets through less of than chat's."""
    if body.temperature is not None and not 0 <= body.temperature <= 1:
        raise _out_of_range(f"temperature must be in [0, 1], got {body.temperature}")
    if body.thinking is not None and body.thinking.get("type") not in _THINKING:
        kind = body.thinking.get("type")
        raise _out_of_range(f"thinking must have the type {', '.join(_THINKING)}, got {kind!r:.100}")
    if not isinstance(body, MessagesRequest):
        return
    if body.max_tokens < 1:
        raise _out_of_range(f"max_tokens must be at least 1, got {body.max_tokens}")
    if any(not sequence.strip() for sequence in body.stop_sequences or ()):
        raise _out_of_range("stop_sequences: each must have a character that is no white space")


def _messages(body: PromptFields) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _text(body.system, "system")})
    names: dict[str, str] = {}
    for index, message in enumerate(body.messages):
        where = f"messages[{index}]"
        role, content = message.get("role"), message.get("content")
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if not isinstance(content, list):
            raise _wrong(f"{where} needs content: a text or a list of blocks")
        if role == "user":
            _add_user(messages, content, names, where)
        elif role == "assistant":
            messages.append(_assistant(content, names, where))
        elif role == "system":
            messages.append({"role": "system", "content": _text(content, where)})
        else:
            raise _wrong(f"{where} needs the role user, assistant or system, got {role!r:.100}")
    return messages


def _add_user(messages: list[dict[str, Any]], content: list[Any], names: Mapping[str, str], where: str) -> None:
    """Results of tools are messages of their own; texts that follow each other are one, as roles alternate."""
    for block in content:
        if isinstance(block, Mapping) and block.get("type") == "tool_result":
            call_id = str(block.get("tool_use_id", ""))
            result = {"role": "tool", "tool_call_id": call_id, "content": _text(block.get("content") or "", where)}
            if call_id in names:
                result["name"] = names[call_id]
            messages.append(result)
            continue
        is_image = isinstance(block, Mapping) and block.get("type") == "image"
        part = _image(block, where) if is_image else {"type": "text", "text": _text([block], where)}
        if messages and messages[-1]["role"] == "user":
            parts = messages[-1]["content"]
            messages[-1]["content"] = _joined(parts, part)
        else:
            messages.append({"role": "user", "content": [part] if is_image else part["text"]})


def _joined(content: str | list[dict[str, Any]], part: dict[str, Any]) -> str | list[dict[str, Any]]:
    """Texts alone stay one text; with an image among them, content is a list of parts."""
    if isinstance(content, str) and part["type"] == "text":
        return f"{content}\n{part['text']}"
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return [*parts, part]


def _image(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    """An image as chat's part: its source is base64, or a url."""
    source = block.get("source")
    source = source if isinstance(source, Mapping) else {}
    if source.get("type") == "base64" and isinstance(source.get("data"), str):
        url = f"data:{source.get('media_type', '')};base64,{source['data']}"
    elif source.get("type") == "url" and isinstance(source.get("url"), str):
        url = source["url"]
    else:
        raise _wrong(f"{where} has an image without a source of the type base64 or url")
    return {"type": "image_url", "image_url": {"url": url}}


def _assistant(content: list[Any], names: dict[str, str], where: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    texts = []
    for block in content:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "thinking":
            message["reasoning_content"] = message.get("reasoning_content", "") + str(block.get("thinking", ""))
        elif kind == "tool_use":
            call_id, name = str(block.get("id", "")), str(block.get("name", ""))
            names[call_id] = name
            function = {"name": name, "arguments": json.dumps(block.get("input") or {}, ensure_ascii=False)}
            message.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})
        elif kind != "redacted_thinking":
            texts.append(_text([block], where))
    message["content"] = "\n".join(texts)
    return message


def _text(blocks: str | Sequence[Any], where: str) -> str:
    """The text of blocks. Raises RequestError for one that is none."""
    if isinstance(blocks, str):
        return blocks
    texts = []
    for block in blocks:
        text = block.get("text") if isinstance(block, Mapping) else None
        if isinstance(block, Mapping) and block.get("type") == "text" and not isinstance(text, str):
            raise _wrong(f"{where} has a block of type 'text' without a text")
        if not isinstance(block, Mapping) or block.get("type") != "text" or not isinstance(text, str):
            kind = block.get("type") if isinstance(block, Mapping) else type(block).__name__
            raise _wrong(f"{where} has a block of type {kind!r:.100} where only text can be used")
        texts.append(text)
    return "\n".join(texts)


def _tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for index, tool in enumerate(tools):
        if tool.get("type") not in (None, "custom"):
            raise RequestError(
                f"tools[{index}] has the type {tool.get('type')!r:.100}; here the client runs all tools",
                code="unsupported_parameter",
            )
        schema = tool.get("input_schema")
        if not isinstance(schema, Mapping):
            raise RequestError(
                f"tools[{index}] needs an input_schema: the JSON schema of its input, an object", code="invalid_tools"
            )
        function = {"name": tool.get("name"), "parameters": schema}
        function |= {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
        found.append({"type": "function", "function": function})
    return found


def _tool_choice(choice: Mapping[str, Any] | None) -> str | dict[str, Any] | None:
    if choice is None:
        return None
    if choice.get("type") == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") not in _CHOICES:
        raise RequestError(
            f"tool_choice must have the type auto, any, tool or none, got {choice.get('type')!r:.100}",
            code="invalid_tools",
        )
    return _CHOICES[choice["type"]]


def _response_format(format: Any) -> ResponseFormat | None:
    if format is None:
        return None
    if not isinstance(format, Mapping) or format.get("type") != "json_schema" or format.get("schema") is None:
        raise RequestError(
            'output_config.format must be {"type": "json_schema", "schema": ...}', code="invalid_response_format"
        )
    return ResponseFormat(type="json_schema", json_schema={"schema": format["schema"]})


def _out_of_range(reason: str) -> RequestError:
    return RequestError(reason, code="invalid_sampling_params")


def _wrong(reason: str) -> RequestError:
    return RequestError(reason, code="invalid_messages")
