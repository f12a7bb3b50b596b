"""What a chat answer's text means: content, reasoning, tool calls. One parser for each answer."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from .protocol.chat import ChatRequest, ToolCall

if TYPE_CHECKING:
    from .server import Server


@dataclass(slots=True, kw_only=True)
class ParsedDelta:
    """What a piece of text adds. tool_calls: as a stream brings them (index; first id, type and name)."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)


class ChatParser(Protocol):
    """Reads the text of one answer as it grows."""

    def push(self, text: str) -> ParsedDelta:
        """The next piece of text."""
        ...

    def finish(self) -> ParsedDelta:
        """The answer has ended: what was withheld."""
        ...


class PlainParser:
    """All text is content."""

    def push(self, text: str) -> ParsedDelta:
        """The text as content."""
        return ParsedDelta(content=text)

    def finish(self) -> ParsedDelta:
        """Nothing: nothing was withheld."""
        return ParsedDelta()


def make_parser(server: "Server", request: ChatRequest, prompt: str) -> ChatParser:
    """The parser for one answer to this request; prompt is the rendered conversation."""
    return PlainParser()
