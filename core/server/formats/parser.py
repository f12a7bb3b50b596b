"""Splits an answer, while it is written, into content, reasoning and tool calls."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .calls import CallPiece, JsonCalls, WholeCalls, read_calls
from .template import Anchor, Field, ResponseTemplate

_LOOK_BACK = 256
"""Characters that are kept for patterns that look at what stands before them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerDelta:
    """What came to one part of an answer.

    content, reasoning: `text` is more of it. tool_call: call number `index` begins, with `id` and `name`.
    arguments: `text` is more of the arguments (JSON) of call number `index`.
    """

    kind: Literal["content", "reasoning", "tool_call", "arguments"]
    text: str = ""
    index: int = 0
    id: str = ""
    name: str = ""


@dataclass(slots=True, kw_only=True)
class ToolCall:
    """One call of an answer; arguments are JSON, as far as the model wrote them."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True, kw_only=True)
class Answer:
    """A whole answer."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall]

    def add(self, deltas: Sequence[AnswerDelta]) -> None:
        """Put deltas together."""
        for delta in deltas:
            if delta.kind == "content":
                self.content += delta.text
            elif delta.kind == "reasoning":
                self.reasoning += delta.text
            elif delta.kind == "tool_call":
                self.tool_calls.append(ToolCall(id=delta.id, name=delta.name))
            else:
                self.tool_calls[delta.index].arguments += delta.text


class AnswerParser:
    """One answer. Deltas do not depend on where the text was cut, except for how they are cut themselves.

    Text that may turn out to be the beginning of a marker is withheld, and so are blanks at the start and the end
    of content and reasoning. A call that is malformed before its arguments begin becomes content, with its markers;
    later, when it is announced, the rest of it is passed on as its arguments, which then are no JSON.
    """

    def __init__(
        self,
        template: ResponseTemplate,
        *,
        prompt: str = "",
        parameters: Mapping[str, Mapping[str, Any]] | None = None,
        parse_tools: bool = True,
        max_calls: int | None = None,
        new_id: Callable[[str, int], str] = lambda name, index: f"call_{secrets.token_hex(12)}",
    ) -> None:
        """prompt: the text that the answer continues, which may have begun a part. parameters: by name of a tool,
        the properties of its arguments. parse_tools: False leaves calls in the content. max_calls: drop further
        ones. new_id: (name, index) -> the id of a call."""
        self._template = template
        self._parameters = parameters or {}
        self._max_calls = max_calls
        self._new_id = new_id
        self._fields = tuple(field for field in template.fields if parse_tools or not field.is_tools)
        self._implicit = template.implicit
        self._buffer = ""
        self._at = 0
        self._current = self._implicit
        self._captures: dict[str, str] = {}
        self._opening = ""  # the marker that began the part
        self._calls: WholeCalls | JsonCalls | None = None
        self._body = ""  # of a part with calls
        self._num_calls = 0
        self._texts = {"content": _Stripper(), "reasoning": _Stripper()}
        self._finished = False
        self._start(prompt)

    @property
    def num_calls(self) -> int:
        """Calls that were announced; with one or more the finish reason is tool_calls."""
        return self._num_calls if self._max_calls is None else min(self._num_calls, self._max_calls)

    @property
    def is_reasoning(self) -> bool:
        """True while the model thinks."""
        return self._current is not None and self._current.is_reasoning

    def feed(self, text: str) -> list[AnswerDelta]:
        """Take more text; what is certain by now."""
        deltas: list[AnswerDelta] = []
        if text:
            self._buffer += text
            self._process(deltas, is_end=False)
        return _merge(deltas)

    def finish(self) -> list[AnswerDelta]:
        """The answer has ended: what was withheld."""
        deltas: list[AnswerDelta] = []
        if not self._finished:
            self._finished = True
            self._process(deltas, is_end=True)
        return _merge(deltas)

    # ---- where parts begin and end ------------------------------------------------------------------------
    def _start(self, prompt: str) -> None:
        """Go through what the prompt has of the answer already; it is not part of the output."""
        start, reasoning = self._template.start, self._template.reasoning
        if start is not None:
            ends = [match.end() for match in start.compiled.finditer(prompt)]
            self._buffer = prompt[ends[-1] :] if ends else prompt
        elif reasoning is not None and reasoning.open is not None:
            stripped = prompt.rstrip()
            opening = next((text for text in reasoning.open.literals if stripped.endswith(text.rstrip())), "")
            self._buffer = opening
        if self._buffer:
            self._process([], is_end=False)
            if self._calls is None:
                self._texts = {"content": _Stripper(), "reasoning": _Stripper()}

    def _process(self, deltas: list[AnswerDelta], is_end: bool) -> None:
        while True:
            found, hold = self._find(is_end)
            if found is None:
                self._take(self._buffer[self._at : hold], deltas)
                self._at = hold
                if is_end:
                    self._close("", deltas)
                break
            field, match, is_open = found
            self._take(self._buffer[self._at : match.start()], deltas)
            had_text = match.start() > self._at or match.end() > match.start() or self._opening
            self._at = match.end()
            if is_open:
                self._close("", deltas)
                self._open(field, match)
            else:
                self._captures.update(_named(match))
                self._close(match[0], deltas)
                if not had_text:  # an empty end of an empty part, which would be found for ever
                    self._take(self._buffer[self._at :], deltas)
                    self._at = len(self._buffer)
                    break
        if self._at > 4 * _LOOK_BACK:
            self._buffer = self._buffer[self._at - _LOOK_BACK :]
            self._at = _LOOK_BACK

    def _find(self, is_end: bool) -> tuple[tuple[Field, Any, bool] | None, int]:
        """The next marker that is certain, and up to where the text before the next possible one is certain."""
        hold = len(self._buffer)
        best: tuple[tuple[int, int, bool], Field, Any, bool] | None = None
        for field, anchor, is_open in self._watched():
            match = anchor.compiled.search(self._buffer, self._at, partial=not is_end)
            if match is None:
                continue
            if not is_end and (match.partial or self._can_change(anchor, match)):
                hold = min(hold, match.start())
                continue
            order = (match.start(), -match.end(), not is_open)
            if best is None or order < best[0]:
                best = order, field, match, is_open
        if best is None or (best[2].start() >= hold and not is_end):
            return None, hold
        return (best[1], best[2], best[3]), hold

    def _watched(self) -> list[tuple[Field, Anchor, bool]]:
        current, implicit = self._current, self._implicit
        if current is not None and current is not implicit:
            return [] if current.close is None else [(current, current.close, False)]
        watched = [(field, field.open, True) for field in self._fields if field.open is not None]
        if implicit is not None and implicit.close is not None:
            watched.append((implicit, implicit.close, False))
        return watched

    def _can_change(self, anchor: Anchor, match: Any) -> bool:
        """True if more text could make another match of this one."""
        if anchor.is_final:
            return False
        if anchor.compiled.fullmatch(self._buffer, match.start(), partial=True) is not None:
            return True  # it may go on to the end and beyond
        if anchor.literals:
            return False
        # A pattern may look at the end of the text, or ahead.
        longer = anchor.compiled.match(self._buffer + "\0", match.start())
        return longer is None or longer.span() != match.span() or longer.groupdict() != match.groupdict()

    def _open(self, field: Field, match: Any) -> None:
        self._current, self._captures, self._opening = field, _named(match), match[0]
        if field.is_tools:
            self._calls, self._body = read_calls(field, self._captures, self._parameters), ""

    def _close(self, marker: str, deltas: list[AnswerDelta]) -> None:
        calls, self._calls = self._calls, None
        if calls is not None:
            pieces = calls.finish(self._captures)
            if pieces is not None:
                self._tell_calls(pieces, deltas)
            elif not calls.announced:
                self._tell_text("content", self._opening + self._body + marker, deltas)
        self._current, self._captures, self._opening = self._implicit, {}, ""

    # ---- what stands in them ------------------------------------------------------------------------------
    def _take(self, text: str, deltas: list[AnswerDelta]) -> None:
        field = self._current
        if not text or field is None:
            return
        if self._calls is not None:
            self._body += text
            self._tell_calls(self._calls.feed(text), deltas)
        elif field.is_reasoning:
            self._tell_text("reasoning", text, deltas)
        elif field.name == "content":
            self._tell_text("content", text, deltas)

    def _tell_text(self, kind: Literal["content", "reasoning"], text: str, deltas: list[AnswerDelta]) -> None:
        certain = self._texts[kind].feed(text)
        if certain:
            deltas.append(AnswerDelta(kind=kind, text=certain))

    def _tell_calls(self, pieces: Sequence[CallPiece], deltas: list[AnswerDelta]) -> None:
        for piece in pieces:
            self._num_calls += bool(piece.name)
            index = self._num_calls - 1
            if self._max_calls is not None and index >= self._max_calls:
                continue
            if piece.name:
                id = self._new_id(piece.name, index)
                deltas.append(AnswerDelta(kind="tool_call", index=index, id=id, name=piece.name))
            else:
                deltas.append(AnswerDelta(kind="arguments", index=index, text=piece.arguments))


class _Stripper:
    """A text without the blanks at its start and its end."""

    def __init__(self) -> None:
        self._blanks = ""
        self._has_text = False

    def feed(self, text: str) -> str:
        kept = text.rstrip()
        blanks, self._blanks = self._blanks, text[len(kept) :]
        if not kept:
            self._blanks = blanks + self._blanks if self._has_text else ""
            return ""
        if not self._has_text:
            self._has_text = True
            return kept.lstrip()
        return blanks + kept


def parse_answer(text: str, parser: AnswerParser) -> Answer:
    """A whole answer at once."""
    answer = Answer(tool_calls=[])
    answer.add(parser.feed(text))
    answer.add(parser.finish())
    return answer


def _named(match: Any) -> dict[str, str]:
    return {name: value for name, value in match.groupdict().items() if value is not None}


def _merge(deltas: Sequence[AnswerDelta]) -> list[AnswerDelta]:
    """Join neighbours that belong together."""
    merged: list[AnswerDelta] = []
    for delta in deltas:
        last = merged[-1] if merged else None
        if last is not None and delta.kind != "tool_call" and (last.kind, last.index) == (delta.kind, delta.index):
            merged[-1] = AnswerDelta(kind=delta.kind, text=last.text + delta.text, index=delta.index)
        else:
            merged.append(delta)
    return merged
