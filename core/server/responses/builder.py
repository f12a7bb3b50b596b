"""Builds a response out of what an answer's parser says, with the events that tell of each change."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ..api_errors import ApiError
from ..chat_parser import TurnParser
from ..formats.parser import AnswerDelta
from ..frames import Output
from ..generation import Generation
from ..logprobs import chat_logprobs
from ..protocol.chat import ContentLogprob
from ..protocol.common import new_id, now
from ..protocol.responses import (
    FunctionCall,
    IncompleteDetails,
    InputTokensDetails,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    OutputTokensDetails,
    ReasoningItem,
    ReasoningText,
    ResponseError,
    ResponseEvent,
    ResponseObject,
    ResponseUsage,
)
from ..request_log import timings

_ITEMS: dict[str, type[OutputItem]] = {"content": OutputMessage, "reasoning": ReasoningItem}


class ResponseBuilder:
    """Owns a response while it grows. Every call gives the events of what changed, in order.

    Invariant: all items of `response.output` but the last are complete; the last is open while `_item` is set.
    """

    def __init__(
        self,
        response: ResponseObject,
        parser: TurnParser,
        *,
        num_top_logprobs: int | None,
        count_tokens: Callable[[str], int],
    ) -> None:
        """num_top_logprobs: None for no log probabilities. count_tokens: of a text, for the usage."""
        self.response = response
        self._parser = parser
        self._num_top_logprobs = num_top_logprobs
        self._count_tokens = count_tokens
        self._item: OutputItem | None = None
        self._logprobs: list[ContentLogprob] = []
        self._sequence_number = 0

    def start(self) -> list[ResponseEvent]:
        """The response exists, and is being worked at."""
        snapshot = msgspec.structs.replace(self.response, output=[])
        return [
            self._event("response.created", response=snapshot),
            self._event("response.in_progress", response=snapshot),
        ]

    def push(self, output: Output) -> list[ResponseEvent]:
        """More of the answer."""
        if self._num_top_logprobs is not None and output.logprobs is not None:
            self._logprobs += chat_logprobs(output.logprobs, self._num_top_logprobs)
        return self._add(self._parser.feed(output.text))

    def finish(self, generation: Generation, finish_reason: str | None) -> list[ResponseEvent]:
        """The answer has ended."""
        events = self._add(self._parser.finish())
        was_cut = finish_reason == "length"
        if not self.response.output:
            events += self._open(OutputMessage)
        events += self._close("incomplete" if was_cut else "completed")
        self.response.usage = self._usage(generation)
        self.response.timings = timings(generation)
        if was_cut:
            self.response.incomplete_details = IncompleteDetails(reason="max_output_tokens")
        else:
            self.response.completed_at = now()
        self.response.status = "incomplete" if was_cut else "completed"
        return [*events, self._event(f"response.{self.response.status}", response=self.response)]

    def fail(self, error: ApiError) -> list[ResponseEvent]:
        """It broke off; what there is stays."""
        if self._item is not None:
            self._item.status = "incomplete"
            self._item = None
        self.response.status = "failed"
        self.response.error = ResponseError(code=error.code or "server_error", message=error.message)
        return [self._event("response.failed", response=self.response)]

    def cancel(self) -> None:
        """It was given up; what there is stays."""
        if self._item is not None:
            self._item.status = "incomplete"
            self._item = None
        self.response.status = "cancelled"

    # ---- items ------------------------------------------------------------------------------------------------
    def _add(self, deltas: Sequence[AnswerDelta]) -> list[ResponseEvent]:
        events: list[ResponseEvent] = []
        for delta in deltas:
            if delta.kind == "tool_call":
                events += self._open(FunctionCall, delta)
                continue
            if delta.kind in _ITEMS and not isinstance(self._item, _ITEMS[delta.kind]):
                events += self._open(_ITEMS[delta.kind])
            item = self._item
            if isinstance(item, FunctionCall):
                item.arguments += delta.text
                events.append(self._of_item("response.function_call_arguments.delta", delta=delta.text))
            elif isinstance(item, ReasoningItem):
                item.content[0].text += delta.text
                events.append(self._of_item("response.reasoning_text.delta", content_index=0, delta=delta.text))
            elif isinstance(item, OutputMessage):
                item.content[0].text += delta.text
                logprobs, self._logprobs = self._logprobs, []
                item.content[0].logprobs += logprobs
                events.append(
                    self._of_item("response.output_text.delta", content_index=0, delta=delta.text, logprobs=logprobs)
                )
        if deltas:
            self._logprobs = []  # of tokens that made no text of a message
        return events

    def _open(self, kind: type[OutputItem], call: AnswerDelta | None = None) -> list[ResponseEvent]:
        events = self._close("completed")
        part: OutputText | ReasoningText | None = None
        if call is not None:
            shown: OutputItem = FunctionCall(id=new_id("fc_"), call_id=call.id, name=call.name)
            self._item = msgspec.structs.replace(shown)
        elif kind is ReasoningItem:
            part = ReasoningText()
            shown = ReasoningItem(id=new_id("rs_"), content=[])
            self._item = msgspec.structs.replace(shown, content=[ReasoningText()])
        else:
            part = OutputText()
            shown = OutputMessage(id=new_id("msg_"), content=[])
            self._item = msgspec.structs.replace(shown, content=[OutputText()])
        self.response.output.append(self._item)
        # The events hold copies: they are sent when the item may have grown.
        events.append(
            self._event("response.output_item.added", output_index=len(self.response.output) - 1, item=shown)
        )
        if part is not None:
            events.append(self._of_item("response.content_part.added", content_index=0, part=part))
        return events

    def _close(self, status: ItemStatus) -> list[ResponseEvent]:
        item = self._item
        if item is None:
            return []
        events = []
        if isinstance(item, FunctionCall):
            events.append(
                self._of_item("response.function_call_arguments.done", name=item.name, arguments=item.arguments)
            )
        else:
            part = item.content[0]
            if isinstance(part, OutputText):
                done = self._of_item(
                    "response.output_text.done", content_index=0, text=part.text, logprobs=part.logprobs
                )
            else:
                done = self._of_item("response.reasoning_text.done", content_index=0, text=part.text)
            events += [done, self._of_item("response.content_part.done", content_index=0, part=part)]
        item.status = status
        index = len(self.response.output) - 1
        events.append(self._event("response.output_item.done", output_index=index, item=item))
        self._item = None
        return events

    # ---- events -----------------------------------------------------------------------------------------------
    def _of_item(self, type: str, **fields: Any) -> ResponseEvent:
        assert self._item is not None
        index = len(self.response.output) - 1
        return self._event(type, item_id=self._item.id, output_index=index, **fields)

    def _event(self, type: str, **fields: Any) -> ResponseEvent:
        event = ResponseEvent(type=type, sequence_number=self._sequence_number, **fields)
        self._sequence_number += 1
        return event

    def _usage(self, generation: Generation) -> ResponseUsage:
        thoughts = [item.content[0].text for item in self.response.output if isinstance(item, ReasoningItem)]
        prompt, output = generation.num_prompt_tokens, generation.num_output_tokens
        reasoning = min(output, sum(map(self._count_tokens, thoughts)))
        return ResponseUsage(
            input_tokens=prompt,
            input_tokens_details=InputTokensDetails(cached_tokens=generation.num_cached_tokens),
            output_tokens=output,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=reasoning),
            total_tokens=prompt + output,
        )
