"""The tools of a request, checked."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import RequestError

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that a model may call; parameters: the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False

    @property
    def properties(self) -> Mapping[str, Any]:
        """The schema of each argument."""
        properties = self.parameters.get("properties")
        return properties if isinstance(properties, Mapping) else {}


def read_tools(tools: object) -> tuple[Tool, ...]:
    """The tools of an OpenAI request: a list of {"type": "function", "function": {"name", "parameters", ...}}, or
    None. Raises RequestError with the code invalid_tools."""
    if tools is None:
        return ()
    if not isinstance(tools, Sequence) or isinstance(tools, (str, bytes)):
        raise _wrong(f"tools must be a list, got {type(tools).__name__}")
    read = tuple(_read_tool(n, tool) for n, tool in enumerate(tools))
    counts = Counter(tool.name for tool in read)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise _wrong(f"tools: two have the name {min(twice)!r}")
    return read


def _read_tool(n: int, tool: object) -> Tool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if (
        not isinstance(tool, Mapping)
        or tool.get("type", "function") != "function"
        or not isinstance(function, Mapping)
    ):
        raise _wrong(f"tools[{n}] must have type function and a function")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _wrong(f"tools[{n}] needs a name of letters, digits, '_', '-' and '.', got {name!r:.100}")
    if not isinstance(parameters, (Mapping, type(None))):
        raise _wrong(f"tools[{n}].function.parameters must be a JSON schema, got {type(parameters).__name__}")
    return Tool(name=name, parameters=parameters or {}, strict=function.get("strict") is True)


def _wrong(reason: str) -> RequestError:
    return RequestError(reason, code="invalid_tools")
