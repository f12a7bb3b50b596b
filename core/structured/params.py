"""What a request asks of the form of its output."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..errors import RequestError
from ..suggest import did_you_mean

StructuredKind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]
KINDS: tuple[str, ...] = get_args(StructuredKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputParams:
    """The form of an output, which it takes from its first token to its end. Raises RequestError.

    json_object: any JSON object; no value. json_schema: the schema, as an object or as JSON text. regex: a pattern
    that the whole output matches. choice: texts of which the output is one. grammar: Lark, or EBNF with ::=.
    """

    kind: StructuredKind
    value: Any = None
    label: str = ""
    """what errors call it, if it was not asked for in these words"""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            kind = str(self.kind)
            raise _wrong(f"no kind {kind!r}{did_you_mean(kind, KINDS)}; known: {', '.join(KINDS)}")
        if self.kind == "json_object":
            _check(self.value is None, "json_object takes no value", self.value)
        elif self.kind == "json_schema":
            _check(isinstance(self.value, (str, bool, Mapping)), "a JSON schema must be an object", self.value)
        elif self.kind == "choice":
            texts = self.value
            is_list = isinstance(texts, Sequence) and not isinstance(texts, (str, bytes))
            is_right = is_list and len(texts) > 0 and all(isinstance(text, str) for text in texts)
            _check(is_right, "choice must be a list of one text or more", texts)
            object.__setattr__(self, "value", tuple(texts))
        else:
            _check(isinstance(self.value, str) and bool(self.value), f"{self.kind} must be a text", self.value)


def _check(ok: bool, rule: str, value: object) -> None:
    if not ok:
        raise _wrong(f"{rule}, got {value!r:.200}")


def _wrong(reason: str) -> RequestError:
    return RequestError(f"structured output: {reason}", code="invalid_structured_output")
