"""What a chat answer's text means, by the model's format: content, reasoning, tool calls; and what forces calls."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import RequestError
from ..json_text import parse_json
from ..structured.params import StructuredOutputParams
from ..text.tokenizer import Tokenizer
from .formats.constrain import constrain_after_reasoning, constrain_tools
from .formats.formats import Format, tool_format
from .formats.parser import AnswerDelta
from .formats.tools import Tool, read_tools
from .protocol.chat import ChatRequest

_WORDS = ("none", "auto", "required")
"""What tool_choice may be besides the name of a tool."""


class TurnParser(Protocol):
    """Reads the text of one answer as it grows; AnswerParser is one."""

    @property
    def num_calls(self) -> int:
        """Tools that the answer calls."""
        ...

    def feed(self, text: str) -> list[AnswerDelta]:
        """The next piece of text; what is certain with it, one part in each delta."""
        ...

    def finish(self) -> list[AnswerDelta]:
        """The answer has ended: what was withheld."""
        ...


class PlainParser:
    """All text is content."""

    num_calls = 0

    def feed(self, text: str) -> list[AnswerDelta]:
        """The text as content."""
        return [AnswerDelta(kind="content", text=text)] if text else []

    def finish(self) -> list[AnswerDelta]:
        """Nothing: nothing was withheld."""
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatForm:
    """How answers to one request are made and read. tool_choice: none, auto, required or a tool's name."""

    format: Format | None
    tools: Sequence[Tool]
    tool_choice: str
    is_parallel: bool
    tokenizer: Tokenizer

    def new_parser(self, prompt: str) -> TurnParser:
        """A parser for one answer to this prompt."""
        if self.format is None:
            return PlainParser()
        reads_calls = bool(self.tools) and self.tool_choice != "none"
        return self.format.new_parser(
            prompt=prompt, tools=self.tools, parse_tools=reads_calls, parallel=self.is_parallel
        )

    def structured_output(self, form: StructuredOutputParams | None, prompt: str) -> StructuredOutputParams | None:
        """The form that the answer is kept to: calls if they are forced, else the request's own behind the
        reasoning. Raises RequestError."""
        if self.tool_choice not in ("none", "auto"):
            return constrain_tools(
                tool_format(self.format),
                self.tools,
                choice=self.tool_choice,
                parallel=self.is_parallel,
                tokenizer=self.tokenizer,
                prompt=prompt,
            )
        if form is None:
            return None
        return constrain_after_reasoning(self.format, form, tokenizer=self.tokenizer, prompt=prompt)

    @property
    def needs_special_tokens(self) -> bool:
        """True if the format's markers are special tokens, so that the text must have them."""
        return self.format is not None and self.format.needs_special_tokens(self.tokenizer)


def chat_form(request: ChatRequest, model_format: Format | None, tokenizer: Tokenizer) -> ChatForm:
    """How answers to this request are made and read. Raises RequestError for wrong tools or tool_choice."""
    tools = read_tools(request.tools)
    choice = _tool_choice(request, tools)
    uses_tools = bool(tools) and choice != "none"
    return ChatForm(
        format=tool_format(model_format) if uses_tools else model_format,
        tools=tools,
        tool_choice=choice,
        is_parallel=request.parallel_tool_calls is not False,
        tokenizer=tokenizer,
    )


def narrow_tools(request: ChatRequest) -> None:
    """Leave only the tools that tool_choice allows ({"type": "allowed_tools"}, in chat's form or that of responses),
    and the choice among them. Raises RequestError if none is left."""
    choice = request.tool_choice
    if isinstance(choice, dict) and choice.get("type") == "function" and _name_of(choice) in _WORDS:
        # A function with the name of a mode: told from the mode by standing alone.
        request.tools = [tool for tool in request.tools or () if _name_of(tool) == _name_of(choice)]
        request.tool_choice, request.parallel_tool_calls = "required", False
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return
    allowed = choice.get("allowed_tools", choice)
    given = allowed.get("tools") if isinstance(allowed, dict) else None
    names = [_name_of(tool) for tool in given] if isinstance(given, list) else []
    request.tools = [tool for tool in request.tools or () if _name_of(tool) in names]
    if not request.tools:
        raise RequestError("tool_choice: allowed_tools names none of the tools", code="invalid_tools")
    request.tool_choice = allowed.get("mode", "auto")


def with_parsed_arguments(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the arguments of earlier calls as objects, as chat templates want them; clients send JSON
    text."""
    return [
        {**message, "tool_calls": [_parsed_call(call) for call in message["tool_calls"]]}
        if isinstance(message, dict) and isinstance(message.get("tool_calls"), list)
        else message
        for message in messages
    ]


def _tool_choice(request: ChatRequest, tools: Sequence[Tool]) -> str:
    choice = request.tool_choice
    if choice is None:
        return "auto" if tools else "none"
    if isinstance(choice, dict):
        function = choice.get("function", choice)
        name = function.get("name") if isinstance(function, dict) else None
        if choice.get("type", "function") != "function" or not isinstance(name, str):
            raise RequestError(
                'tool_choice must be none, auto, required or {"type": "function", "function": {"name": ...}}',
                code="invalid_tools",
            )
        choice = name
    elif choice not in _WORDS:
        raise RequestError(f"tool_choice must be none, auto or required, got {choice!r}", code="invalid_tools")
    if not tools and choice not in ("none", "auto"):
        raise RequestError("tool_choice needs tools", code="invalid_tools")
    return choice


def _name_of(tool: Any) -> Any:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    return function.get("name") if isinstance(function, dict) else None


def _parsed_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = parse_json(function["arguments"] or "{}")
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call
