"""The fields that objects within a body may have, and which ones of a request are none of them."""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import islice
from typing import Any

Shape = Mapping[str, "Shape | tuple[Shape, ...] | None"]
"""The names of an object's fields, each with the shape of the objects in it; None: whatever is there has no shape.
Of several shapes that one counts which an object is nearest to."""

_MAX_SEARCHED = 10_000
"""So many objects of a field are looked at."""


def _of(*names: str, **within: Shape | tuple[Shape, ...]) -> Shape:
    return {**dict.fromkeys(names), **within}


_PART = ("type", "text", "cache_control", "prompt_cache_breakpoint")
_SOURCE = _of("type", "media_type", "data", "url", "file_id")
_PARTS = (
    _of(*_PART, "citations", "annotations", "logprobs"),
    _of("type", "refusal"),
    _of(*_PART, "detail", "file_id", "uuid", image_url=_of("url", "detail")),
    _of(*_PART, "input_audio", "audio_url", "video_url", "file"),
    _of(*_PART, "transformations", "toolset_name", "image", "video", source=_SOURCE),
    _of("type", "thinking", "signature"),
    _of(*_PART, "id", "name", "input", "caller", "toolset_name"),
    _of(*_PART, "tool_use_id", "is_error", "toolset_name", content=(_of(*_PART, "citations"), _of(*_PART, "source"))),
)
_CALLS = (
    _of("id", "type", "index", function=_of("name", "arguments")),
    _of("id", "type", "index", "name", "arguments"),
)
_MESSAGES = (
    _of(
        *("role", "name", "refusal", "reasoning", "reasoning_content", "audio", "function_call", "annotations"),
        *("tool_call_id", "id", "type", "status", "phase"),
        content=_PARTS,
        tool_calls=_CALLS,
    ),
    _of("type", "id", "status", "call_id", "name", "arguments", "namespace", "caller", "async"),
    _of("type", "id", "status", "call_id", "name", "namespace", "caller", output=_PARTS),
    _of("type", "id", "status", "encrypted_content", summary=_PARTS, content=_PARTS),
)
_TOOL = ("type", "description", "strict", "cache_control", "allowed_callers", "defer_loading")
_TOOLS = (
    _of("type", "cache_control", function=_of("name", "description", "parameters", "strict")),
    _of(*_TOOL, "name", "parameters", "output_schema", "async"),
    _of(*_TOOL, "name", "input_schema", "input_examples", "eager_input_streaming"),
)
_FORM = ("type", "name", "description", "strict")
_SHAPES: dict[str, Shape | tuple[Shape, ...]] = {
    "messages": _MESSAGES,
    "input": _MESSAGES,
    "system": _PARTS,
    "tools": _TOOLS,
    "tool_choice": (
        _of("type", "name", "disable_parallel_tool_use", function=_of("name")),
        _of("type", "mode", tools=_TOOLS),
        _of("type", allowed_tools=_of("mode", tools=_TOOLS)),
    ),
    "stream_options": _of("include_usage", "continuous_usage_stats", "include_obfuscation"),
    "response_format": _of("type", json_schema=_of(*_FORM, "schema")),
    "text": _of("verbosity", format=_of(*_FORM, "schema")),
    "output_config": _of("effort", format=_of(*_FORM, "schema")),
    "reasoning": _of("effort", "summary", "generate_summary", "context", "mode"),
    "thinking": _of("type", "budget_tokens", "display"),
    "chat_template_kwargs": _of(),
}

NESTED = frozenset(_SHAPES)
"""Fields of a body whose objects have a shape."""


def unknown_within(field: str, value: Any, is_read: Callable[[str], bool]) -> Iterator[tuple[str, Collection[str]]]:
    """Of each field of an object in `field` that its shape does not have: its path, and the names that the shape has.

    is_read: whether the chat template reads a name, which makes it known. Fields that are null are passed over.
    """
    left: deque[tuple[str, Any, Any]] = deque([(field, value, _SHAPES[field])])
    for _ in range(_MAX_SEARCHED):
        if not left:
            return
        path, value, shapes = left.popleft()
        if isinstance(value, list):
            inner = islice(value, _MAX_SEARCHED)
            left.extend((path, item, shapes) for item in inner if isinstance(item, dict | list))
        elif isinstance(value, dict):
            each = shapes if isinstance(shapes, tuple) else (shapes,)
            shape: Shape = min(each, key=lambda names: len(value.keys() - names.keys()))
            for name, held in value.items():
                if name not in shape:
                    if held is not None and not is_read(name):
                        yield f"{path}.{name}", shape
                elif shape[name] is not None:
                    left.append((f"{path}.{name}", held, shape[name]))
