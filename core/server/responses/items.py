"""Items of the Responses API as the messages that chat templates take."""

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import RequestError
from ..protocol.common import new_id

_ROLES = ("user", "assistant", "system", "developer")
_PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_", "function_call_output": "fco_"}


def read_items(given: str | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """The items of a request's input, each with type and id; references are left as they are. Raises RequestError."""
    if given is None:
        return []
    if isinstance(given, str):
        given = [{"role": "user", "content": [{"type": "input_text", "text": given}]}]
    return [_read_item(index, item) for index, item in enumerate(given)]


def to_messages(instructions: str | None, items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The conversation. Reasoning, text and calls of one turn become one message of the assistant. Raises
    RequestError."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    names: dict[str, str] = {}
    is_open = False  # the last message is the assistant's, and what follows may belong to it
    for item in items:
        kind = item["type"]
        if kind == "message" and item["role"] != "assistant":
            messages.append({"role": item["role"], "content": _content(item["content"])})
            is_open = False
            continue
        if kind == "function_call_output":
            call_id = str(item["call_id"])
            result = {"role": "tool", "tool_call_id": call_id, "content": _text(item["output"], "output")}
            if call_id in names:
                result["name"] = names[call_id]
            messages.append(result)
            is_open = False
            continue
        # Text ends what a message can take of reasoning: the next reasoning begins another one.
        if not is_open or (kind != "function_call" and messages[-1]["content"] is not None):
            messages.append({"role": "assistant", "content": None})
            is_open = True
        last = messages[-1]
        if kind == "message":
            last["content"] = _text(item["content"], "content")
        elif kind == "reasoning":
            thought = _text(item.get("content") or item.get("summary") or [], "content")
            last["reasoning_content"] = last.get("reasoning_content", "") + thought
        else:
            names[str(item["call_id"])] = str(item["name"])
            last.setdefault("tool_calls", []).append(
                {
                    "id": item["call_id"],
                    "type": "function",
                    "function": {"name": item["name"], "arguments": item["arguments"]},
                }
            )
    for message in messages:
        if message["role"] == "assistant" and message["content"] is None:
            message["content"] = ""
    return messages


def _read_item(index: int, given: Mapping[str, Any]) -> dict[str, Any]:
    def wrong(reason: str) -> RequestError:
        return RequestError(f"input[{index}] {reason}", code="invalid_input")

    item = {**given, "type": given.get("type") or ("message" if "role" in given else "item_reference")}
    kind = item["type"]
    if kind == "item_reference":
        if not isinstance(item.get("id"), str):
            raise wrong("has neither role nor type, and no id that it could refer to")
        return item
    if kind not in _PREFIXES:
        raise wrong(f"has the type {kind!r:.100}; this server takes {', '.join(_PREFIXES)} and item_reference")
    if kind == "message":
        if item.get("role") not in _ROLES:
            raise wrong(f"needs a role of {', '.join(_ROLES)}, got {item.get('role')!r:.100}")
        content = item.get("content")
        if isinstance(content, str):
            part = "output_text" if item["role"] == "assistant" else "input_text"
            item["content"] = [{"type": part, "text": content}]
        elif not isinstance(content, list):
            raise wrong("needs content: a text or a list of parts")
        item.setdefault("status", "completed")
    for name in {"function_call": ("call_id", "name", "arguments"), "function_call_output": ("call_id",)}.get(
        kind, ()
    ):
        if not isinstance(item.get(name), str):
            raise wrong(f"needs {name}, a text")
    if kind == "function_call_output" and not isinstance(item.get("output"), (str, list)):
        raise wrong("needs output: a text or a list of parts")
    if kind == "reasoning" and not isinstance(item.get("content") or item.get("summary") or [], list):
        raise wrong("needs content: a list of parts")
    if not isinstance(item.get("id"), str):
        item["id"] = new_id(_PREFIXES[kind])
    if kind in ("function_call", "function_call_output"):
        item.setdefault("status", "completed")
    return item


def _content(parts: Any) -> str | list[dict[str, Any]]:
    """Texts as one; with images among them, chat's parts. Raises RequestError."""
    if not isinstance(parts, list) or not any(
        isinstance(p, Mapping) and p.get("type") == "input_image" for p in parts
    ):
        return _text(parts, "content")
    return [
        dict(part)
        if isinstance(part, Mapping) and part.get("type") == "input_image"
        else {"type": "text", "text": _text([part], "content")}
        for part in parts
    ]


def _text(parts: Any, where: str) -> str:
    """The text of parts. Raises RequestError for one that is none."""
    if isinstance(parts, str):
        return parts
    texts = []
    for part in parts:
        text = part.get("text", part.get("refusal")) if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RequestError(
                f"input: {where} has a part of type {kind!r}; only text can be used", code="invalid_input"
            )
        texts.append(text)
    return "\n".join(texts)
