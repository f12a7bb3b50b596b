"""Reads JSON character by character: whether it can still be JSON, and where the members of an object begin."""

from dataclasses import dataclass, field
from typing import Literal

_SPACE = frozenset(" \t\n\r")
_ESCAPES = frozenset('"\\/bfnrtu')
_HEX = frozenset("0123456789abcdefABCDEF")
_DIGITS = frozenset("0123456789")
_WORDS = {"t": "true", "f": "false", "n": "null"}
_NUMBER: dict[str, dict[str, str]] = {
    # state -> kind of character -> next state; "digit" and the characters themselves
    "-": {"0": "0", "digit": "int"},
    "0": {".": ".", "e": "e"},
    "int": {"digit": "int", "0": "int", ".": ".", "e": "e"},
    ".": {"digit": "frac", "0": "frac"},
    "frac": {"digit": "frac", "0": "frac", "e": "e"},
    "e": {"digit": "exp", "0": "exp", "sign": "sign"},
    "sign": {"digit": "exp", "0": "exp"},
    "exp": {"digit": "exp", "0": "exp"},
}
_NUMBER_ENDS = frozenset(("0", "int", "frac", "exp"))
MAX_DEPTH = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonEvent:
    """Something that begins or has ended at a character. depth: containers around it."""

    kind: Literal["begin", "end"]
    what: Literal["object", "array", "key", "value"]
    """value: a string, number or word"""
    depth: int
    at: int
    """index of the first character, or of the one behind the last"""


@dataclass(slots=True)
class JsonScanner:
    """Follows one JSON text as it grows. Invariant: what was scanned can begin a JSON text, unless `failed`."""

    num_chars: int = 0
    failed: bool = False
    done: bool = False
    _stack: list[str] = field(default_factory=list)
    _expect: str = "value"  # value, first (value or ]), key, first_key (key or }), colon, comma
    _token: str = ""  # "", string, key, word, number
    _detail: str = ""  # in a string: "", escape, hex digits to come; rest of a word; state of a number

    @property
    def is_complete(self) -> bool:
        """True if what was scanned is JSON (a number may still go on)."""
        at_number = self._token == "number" and self._detail in _NUMBER_ENDS and not self._stack
        return not self.failed and (self.done or at_number)

    def feed(self, text: str) -> list[JsonEvent]:
        """Scan more text; what began and ended in it. After the first character that cannot stand there nothing
        more comes."""
        events: list[JsonEvent] = []
        for char in text:
            if self.failed:
                break
            if self._token == "number" and not self._number(char):
                self._end_token(events)
            elif self._token == "number":
                self.num_chars += 1
                continue
            if not self.failed:
                self._char(char, events)
            self.num_chars += 1
        return events

    def _char(self, char: str, events: list[JsonEvent]) -> None:
        if self._token in ("string", "key"):
            self._in_string(char, events)
        elif self._token == "word":
            if not self._detail.startswith(char):
                self.failed = True
                return
            self._detail = self._detail[1:]
            if not self._detail:
                self._end_token(events, 1)
        elif char not in _SPACE:
            self._structure(char, events)

    def _in_string(self, char: str, events: list[JsonEvent]) -> None:
        if self._detail == "\\":
            self._detail = "uuuu" if char == "u" else ""
            self.failed = char not in _ESCAPES
        elif self._detail:
            self._detail = self._detail[1:]
            self.failed = char not in _HEX
        elif char == "\\":
            self._detail = "\\"
        elif char == '"':
            self._end_token(events, 1)
        elif char < " ":
            self.failed = True

    def _structure(self, char: str, events: list[JsonEvent]) -> None:
        expect, depth, at = self._expect, len(self._stack), self.num_chars
        if self.done:
            self.failed = True
        elif expect == "colon":
            self.failed, self._expect = char != ":", "value"
        elif char in "]}" and expect in ("comma", "first", "first_key"):
            self._close(char, events)
        elif expect == "comma":
            self._expect = "key" if self._stack[-1] == "}" else "value"
            self.failed = char != ","
        elif expect in ("key", "first_key"):
            self.failed, self._token, self._detail = char != '"', "key", ""
            events.append(JsonEvent(kind="begin", what="key", depth=depth, at=at))
        elif char in "{[":
            self.failed = depth >= MAX_DEPTH
            what: Literal["object", "array"] = "object" if char == "{" else "array"
            events.append(JsonEvent(kind="begin", what=what, depth=depth, at=at))
            self._stack.append("}" if char == "{" else "]")
            self._expect = "first_key" if char == "{" else "first"
        else:
            self._begin_value(char)
            events.append(JsonEvent(kind="begin", what="value", depth=depth, at=at))

    def _begin_value(self, char: str) -> None:
        if char == '"':
            self._token, self._detail = "string", ""
        elif char in _WORDS:
            self._token, self._detail = "word", _WORDS[char][1:]
        elif char == "-" or char in _DIGITS:
            self._token, self._detail = "number", char if char in "-0" else "int"
        else:
            self.failed = True

    def _close(self, char: str, events: list[JsonEvent]) -> None:
        if not self._stack or self._stack[-1] != char:
            self.failed = True
            return
        self._stack.pop()
        what: Literal["object", "array"] = "object" if char == "}" else "array"
        events.append(JsonEvent(kind="end", what=what, depth=len(self._stack), at=self.num_chars + 1))
        self._after_value()

    def _number(self, char: str) -> bool:
        """Take a character of a number; False if it does not belong to it."""
        kind = "0" if char == "0" else "digit" if char in _DIGITS else "e" if char in "eE" else char
        following = _NUMBER[self._detail].get("sign" if char in "+-" else kind)
        if following is None:
            return False
        self._detail = following
        return True

    def _end_token(self, events: list[JsonEvent], length: int = 0) -> None:
        if self._token == "number" and self._detail not in _NUMBER_ENDS:
            self.failed = True
            return
        what: Literal["key", "value"] = "key" if self._token == "key" else "value"
        events.append(JsonEvent(kind="end", what=what, depth=len(self._stack), at=self.num_chars + length))
        is_key, self._token, self._detail = self._token == "key", "", ""
        if is_key:
            self._expect = "colon"
        else:
            self._after_value()

    def _after_value(self) -> None:
        self._expect = "comma"
        self.done = not self._stack
