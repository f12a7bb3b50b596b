"""Builds a message out of what an answer's parser says, with the events that tell of each change."""

from collections.abc import Sequence
from typing import Any

import msgspec

from ...json_text import parse_json
from ..chat_parser import TurnParser
from ..formats.parser import AnswerDelta
from ..frames import Output
from ..generation import Generation
from ..protocol.messages import (
    Block,
    Delta,
    Message,
    MessageEvent,
    MessageUsage,
    StopReason,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)

_BLOCKS: dict[str, type[Block]] = {"content": TextBlock, "reasoning": ThinkingBlock}


class MessageBuilder:
    """Owns a message while it grows. Every call gives the events of what changed, in order.

    Invariant: all blocks of `message.content` but the last are complete; the last is open while `_block` is set.
    """

    def __init__(self, message: Message, parser: TurnParser) -> None:
        self.message = message
        self._parser = parser
        self._block: Block | None = None
        self._arguments = ""

    def start(self) -> list[MessageEvent]:
        """The message begins."""
        return [
            MessageEvent(type="message_start", message=msgspec.structs.replace(self.message, content=[])),
            MessageEvent(type="ping"),
        ]

    def push(self, output: Output) -> list[MessageEvent]:
        """More of the answer."""
        return self._add(self._parser.feed(output.text))

    def finish(self, generation: Generation, output: Output, max_tokens: int) -> list[MessageEvent]:
        """The answer has ended."""
        events = self._add(self._parser.finish()) + self._close()
        message, cached = self.message, generation.num_cached_tokens
        message.stop_reason = self._stop_reason(output, generation.num_output_tokens < max_tokens)
        if message.stop_reason == "stop_sequence":
            message.stop_sequence = str(output.stop_reason)
        message.usage = MessageUsage(
            input_tokens=generation.num_prompt_tokens - cached,
            cache_read_input_tokens=cached,
            output_tokens=generation.num_output_tokens,
        )
        ended = Delta(stop_reason=message.stop_reason, stop_sequence=message.stop_sequence)
        return [
            *events,
            MessageEvent(type="message_delta", delta=ended, usage=message.usage),
            MessageEvent(type="message_stop"),
        ]

    def _stop_reason(self, output: Output, has_room: bool) -> StopReason:
        if output.finish_reason == "length":
            return "model_context_window_exceeded" if has_room else "max_tokens"
        if self._parser.num_calls:
            return "tool_use"
        return "stop_sequence" if isinstance(output.stop_reason, str) else "end_turn"

    # ---- blocks -----------------------------------------------------------------------------------------------
    def _add(self, deltas: Sequence[AnswerDelta]) -> list[MessageEvent]:
        events: list[MessageEvent] = []
        for delta in deltas:
            if delta.kind == "tool_call":
                events += self._open(ToolUseBlock(id=delta.id, name=delta.name, input={}))
                continue
            if delta.kind in _BLOCKS and not isinstance(self._block, _BLOCKS[delta.kind]):
                events += self._open(TextBlock() if delta.kind == "content" else ThinkingBlock())
            block = self._block
            if isinstance(block, TextBlock):
                block.text += delta.text
                events.append(self._delta(type="text_delta", text=delta.text))
            elif isinstance(block, ThinkingBlock):
                block.thinking += delta.text
                events.append(self._delta(type="thinking_delta", thinking=delta.text))
            else:
                self._arguments += delta.text
                events.append(self._delta(type="input_json_delta", partial_json=delta.text))
        return events

    def _open(self, block: Block) -> list[MessageEvent]:
        events = self._close()
        self._block, self._arguments = block, ""
        self.message.content.append(block)
        # The event holds a copy: it is sent when the block may have grown.
        shown = msgspec.structs.replace(block)
        events.append(MessageEvent(type="content_block_start", index=self._index, content_block=shown))
        return events

    def _close(self) -> list[MessageEvent]:
        block, self._block = self._block, None
        if block is None:
            return []
        events = []
        if isinstance(block, ToolUseBlock):
            block.input = _arguments(self._arguments)
        elif isinstance(block, ThinkingBlock):
            events.append(self._delta(type="signature_delta", signature=block.signature))
        return [*events, MessageEvent(type="content_block_stop", index=self._index)]

    @property
    def _index(self) -> int:
        return len(self.message.content) - 1

    def _delta(self, **fields: Any) -> MessageEvent:
        return MessageEvent(type="content_block_delta", index=self._index, delta=Delta(**fields))


def _arguments(text: str) -> dict[str, Any]:
    """Arguments as an object; text that is none (the model was cut off, or wrote something else) under one name."""
    try:
        arguments = parse_json(text or "{}")
    except ValueError:
        return {"invalid_json": text}
    return arguments if isinstance(arguments, dict) else {"invalid_json": text}
