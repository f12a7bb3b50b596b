"""Reads the tool calls of one part of an answer while it is written."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...json_text import parse_json
from .json_scanner import JsonEvent, JsonScanner
from .template import Field
from .values import apply_transform, cast_argument, parse_value, placeholder


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPiece:
    """A piece of a call: its beginning if `name` is set, else a piece of its arguments."""

    name: str = ""
    arguments: str = ""


class WholeCalls:
    """Calls in a form that says what it is only when it is complete."""

    def __init__(self, field: Field, captures: Mapping[str, str], parameters: Mapping[str, Any]) -> None:
        self.announced = False
        self._field = field
        self._captures = dict(captures)
        self._parameters = parameters
        self._body: list[str] = []

    def feed(self, text: str) -> Sequence[CallPiece]:
        """Take more of the part's text."""
        self._body.append(text)
        return ()

    def finish(self, captures: Mapping[str, str]) -> Sequence[CallPiece] | None:
        """The calls, or None if it is no such text."""
        scope = {**self._captures, **captures}
        try:
            found = _calls("".join(self._body), self._field, scope)
            pieces = [piece for call in found for piece in self._pieces(call)]
        except (ValueError, TypeError, KeyError, RecursionError):  # whatever a model wrote instead
            return None
        return pieces or None

    def _pieces(self, call: Any) -> list[CallPiece]:
        function = call["function"]
        name, arguments = function["name"], function.get("arguments")
        if isinstance(arguments, str):
            arguments = parse_json(arguments)
        if not isinstance(name, str) or not name or not isinstance(arguments or {}, dict):
            raise ValueError("no call")
        properties = self._parameters.get(name, {})
        typed = {key: cast_argument(value, properties.get(key)) for key, value in (arguments or {}).items()}
        return [CallPiece(name=name), CallPiece(arguments=json.dumps(typed, ensure_ascii=False))]


class JsonCalls:
    """Calls written as JSON, passed on character by character once the name is known.

    path: keys to the name and the arguments in an object ("name", "arguments"); with a name that the part's opening
    gave, the JSON is the arguments. The objects may stand in a list. Invariant: `announced` calls cannot be taken
    back, so what follows of them is passed on even if it is no JSON.
    """

    def __init__(self, *, name: str, name_key: str, arguments_key: str) -> None:
        self.announced = False
        self._scanner = JsonScanner()
        self._given_name = name
        self._keys = (name_key, arguments_key)
        self._body = ""
        self._level = 1  # depth of the members of a call's object
        self._key = ""
        self._start = 0  # of the token that began last at the level
        self._name = name
        self._begun: int | None = None  # where the arguments begin
        self._ended: int | None = None
        self._text = "{}"  # arguments that are no object; "" if they are no arguments at all
        self._sent = 0  # characters of the body that are passed on; meaningful while arguments are open
        self._open = False  # the arguments are being passed on

    def feed(self, text: str) -> Sequence[CallPiece]:
        """Take more of the part's text; what that says of the calls."""
        has_failed = self._scanner.failed
        if has_failed:
            return [CallPiece(arguments=text)] if self._open and text else []
        pieces: list[CallPiece] = []
        self._body += text
        for event in self._scanner.feed(text):
            self._see(event, pieces)
        if self._scanner.failed:
            if self._open:
                self._pass_on(len(self._body), pieces)
        elif self._open:
            self._pass_on(self._scanner.num_chars, pieces)
        return pieces

    def finish(self, captures: Mapping[str, str]) -> Sequence[CallPiece] | None:
        """The part has ended. None if it holds no call, and none was announced."""
        return () if self.announced else None

    def _see(self, event: JsonEvent, pieces: list[CallPiece]) -> None:
        if self._given_name:
            if event.depth == 0:
                self._see_arguments(event, pieces)
            return
        if event.kind == "begin" and event.what == "array" and event.depth == 0:
            self._level = 2
        elif event.depth == self._level - 1 and event.what == "object":
            if event.kind == "begin":
                self._name, self._begun, self._ended, self._key, self._text = "", None, None, "", "{}"
            elif self._name and self._begun is None and self._text:
                self._announce(pieces)
                pieces.append(CallPiece(arguments=self._text))
        elif event.depth == self._level:
            self._see_member(event, pieces)

    def _see_member(self, event: JsonEvent, pieces: list[CallPiece]) -> None:
        if event.kind == "begin":
            self._start = event.at
        if event.what == "key":
            if event.kind == "end":
                self._key = parse_json(self._body[self._start : event.at])
        elif self._key == self._keys[0]:
            if event.kind == "end" and event.what == "value":
                name = parse_json(self._body[self._start : event.at])
                self._name = name if isinstance(name, str) else ""
                if self._name and self._begun is not None:  # the arguments came first
                    self._announce(pieces)
                    pieces.append(CallPiece(arguments=self._body[self._begun : self._ended]))
        elif self._key == self._keys[1]:
            self._see_arguments(event, pieces)

    def _see_arguments(self, event: JsonEvent, pieces: list[CallPiece]) -> None:
        if event.what == "object" and event.kind == "begin":
            self._begun = self._sent = event.at
            if self._name:
                self._announce(pieces)
                self._open = True
        elif event.what == "object":
            self._ended = event.at
            if self._open:
                self._pass_on(event.at, pieces)
                self._open = False
        elif event.what == "array":
            self._text = ""
        elif event.kind == "end" and event.what == "value" and not self._given_name:
            self._see_text_arguments(parse_json(self._body[self._start : event.at]))

    def _see_text_arguments(self, value: Any) -> None:
        """Arguments as JSON within a JSON text, or null."""
        try:
            inner = parse_json(value) if isinstance(value, str) else {} if value is None else value
        except (ValueError, RecursionError):
            inner = None
        self._text = "" if not isinstance(inner, dict) else value if isinstance(value, str) else "{}"

    def _announce(self, pieces: list[CallPiece]) -> None:
        self.announced = True
        pieces.append(CallPiece(name=self._name))

    def _pass_on(self, end: int, pieces: list[CallPiece]) -> None:
        if end > self._sent:
            pieces.append(CallPiece(arguments=self._body[self._sent : end]))
            self._sent = end


def read_calls(field: Field, captures: Mapping[str, str], parameters: Mapping[str, Any]) -> WholeCalls | JsonCalls:
    """A reader for a part that has just begun. parameters: by name of a tool, the properties of its arguments."""
    function = field.transform.get("function") if isinstance(field.transform, Mapping) else None
    if field.content == "json" and not field.content_args and function is not None:
        if placeholder(function) == "content" and not field.transform_each:
            return JsonCalls(name="", name_key="name", arguments_key="arguments")
        if isinstance(function, Mapping) and set(function) == {"name", "arguments"}:
            name, arguments = placeholder(function["name"]), placeholder(function["arguments"])
            if name in captures and arguments == "content":
                return JsonCalls(name=captures[name].strip(), name_key="", arguments_key="")
            prefix = "" if field.transform_each else "content."
            keys = [path[len(prefix) :] for path in (name, arguments) if path.startswith(prefix)]
            if len(keys) == 2 and all(key and "." not in key and key not in captures for key in keys):
                return JsonCalls(name="", name_key=keys[0], arguments_key=keys[1])
    return WholeCalls(field, captures, parameters)


def _calls(body: str, field: Field, scope: Mapping[str, Any]) -> list[Any]:
    value = parse_value(body, field.content, field.content_args)
    if field.transform is None:
        return value if isinstance(value, list) else [value]
    if field.transform_each:
        if not isinstance(value, list):
            raise ValueError("no list")
        return [apply_transform(field.transform, {**scope, **item}) for item in value]
    return [apply_transform(field.transform, {**scope, "content": value})]
