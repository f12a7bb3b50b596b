"""Reads lists of Python calls with keyword arguments, as some models write their tool calls."""

import json
import re
from collections.abc import Callable
from typing import Any, NoReturn

MAX_DEPTH = 100
"""Lists and dicts within one another."""
_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[A-Za-z_]\w*(?:[-.]\w+)*")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d{0,300})(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_STRING = re.compile(r"""'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)\"""", re.DOTALL)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "\n": ""}
_CONSTANTS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}


def read_python_calls(text: str) -> list[dict[str, Any]]:
    """`[f(a=1), g(b="x")]` as [{"name": "f", "arguments": {"a": 1}}, ...]; with JSON's words and Python's. Raises
    ValueError for anything else, such as positional arguments or expressions."""
    reader = _Reader(text)
    reader.expect("[")
    calls = reader.items("]", reader.call)
    reader.skip_space()
    if reader.at != len(text):
        reader.fail("the end")
    return calls


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def fail(self, expected: str) -> NoReturn:
        raise ValueError(f"no list of calls: expected {expected} at {self.at}")

    def skip_space(self) -> None:
        match = _SPACE.match(self.text, self.at)
        assert match is not None
        self.at = match.end()

    def follows(self, char: str) -> bool:
        self.skip_space()
        return self.text.startswith(char, self.at)

    def expect(self, char: str) -> None:
        if not self.follows(char):
            self.fail(char)
        self.at += len(char)

    def items(self, close: str, item: Callable[[], Any]) -> list[Any]:
        found: list[Any] = []
        while not self.follows(close):
            if found:
                self.expect(",")
                if self.follows(close):  # a comma behind the last one
                    break
            found.append(item())
        self.expect(close)
        return found

    def call(self) -> dict[str, Any]:
        name = self.name()
        self.expect("(")
        return {"name": name, "arguments": self.unique(self.items(")", self.argument))}

    def argument(self) -> tuple[str, Any]:
        key = self.name()
        self.expect("=")
        return key, self.value(0)

    def name(self) -> str:
        self.skip_space()
        match = _NAME.match(self.text, self.at)
        if match is None:
            self.fail("a name")
        self.at = match.end()
        return match[0]

    def unique(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            self.fail("each name once")
        return found

    def value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            self.fail(f"at most {MAX_DEPTH} lists and dicts within one another")
        if self.follows("'") or self.follows('"'):
            return self.string()
        if self.follows("["):
            self.at += 1
            return self.items("]", lambda: self.value(depth + 1))
        if self.follows("{"):
            self.at += 1
            return self.unique(self.items("}", lambda: self.pair(depth + 1)))
        number = _NUMBER.match(self.text, self.at)
        if number is not None:
            self.at = number.end()
            value = json.loads(number[0])
            return value if abs(value) != float("inf") else self.fail("a smaller number")
        word = _NAME.match(self.text, self.at)
        if word is None or word[0] not in _CONSTANTS:
            self.fail("a value")
        self.at = word.end()
        return _CONSTANTS[word[0]]

    def pair(self, depth: int) -> tuple[str, Any]:
        self.skip_space()
        key = self.string()
        self.expect(":")
        return key, self.value(depth)

    def string(self) -> str:
        match = _STRING.match(self.text, self.at)
        if match is None:
            self.fail("a string")
        self.at = match.end()
        text = _ESCAPE.sub(_unescape, match[1] if match[1] is not None else match[2])
        # Two escapes may be one character.
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _unescape(match: "re.Match[str]") -> str:
    escape = match[1]
    if len(escape) > 1:
        return chr(int(escape[1:], 16))
    return _ESCAPES.get(escape, escape)
