"""Response templates: which parts a model's answer has, and how each begins, ends and is read.

The data is that of transformers' response templates, version 1, which checkpoints bring in tokenizer_config.json.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ...errors import ModelError
from .values import VALUE_PARSERS

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names that templates use for the field that we call reasoning."""
TOOL_CALLS = "tool_calls"
_FIELD_KEYS = frozenset(
    ("open", "open_pattern", "close", "close_pattern", "content", "content_args", "repeats", "join", "optional")
    + ("transform", "transform_each")
)
_TEMPLATE_KEYS = frozenset(("version", "defaults", "fields", "start_anchor", "start_anchor_pattern"))


@dataclass(frozen=True, kw_only=True)
class Anchor:
    """What begins or ends a part: one of some literal texts, or a pattern of the regex library."""

    literals: tuple[str, ...] = ()
    pattern: str = ""

    @cached_property
    def compiled(self) -> Any:
        """The compiled pattern; of literals that begin alike the longest matches."""
        import regex

        literals = sorted(self.literals, key=len, reverse=True)
        return regex.compile(self.pattern or "|".join(map(regex.escape, literals)), regex.DOTALL)

    @cached_property
    def is_final(self) -> bool:
        """True if a match at the end of the text cannot become another one when more text comes."""
        return bool(self.literals) and not any(
            one != other and one.startswith(other) for one in self.literals for other in self.literals
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One part of an answer. Without `open` it is what stands outside of all others."""

    name: str
    open: Anchor | None = None
    close: Anchor | None = None
    content: str = "text"
    content_args: Mapping[str, Any] = field(default_factory=dict)
    transform: Any = None
    transform_each: bool = False

    @property
    def is_reasoning(self) -> bool:
        """True for the part in which the model thinks."""
        return self.name in REASONING

    @property
    def is_tools(self) -> bool:
        """True for the part that holds tool calls."""
        return self.name == TOOL_CALLS


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseTemplate:
    """The parts of an answer. start: where, in a prompt, the answer begins (None: at the prompt's end)."""

    fields: tuple[Field, ...]
    start: Anchor | None = None

    @property
    def implicit(self) -> Field | None:
        """The part outside of all others; None: such text is dropped."""
        return next((field for field in self.fields if field.open is None), None)

    @property
    def reasoning(self) -> Field | None:
        """The part in which the model thinks, or None."""
        return next((field for field in self.fields if field.is_reasoning), None)

    @property
    def tools(self) -> Field | None:
        """The part with tool calls, or None."""
        return next((field for field in self.fields if field.is_tools), None)


def read_template(data: object, where: str) -> ResponseTemplate:
    """A response template from its JSON. Raises ModelError that names `where` and what is wrong."""

    def wrong(reason: str) -> ModelError:
        return ModelError(f"the response template of {where} cannot be used: {reason}")

    if not isinstance(data, Mapping):
        raise wrong(f"it must be an object, got {type(data).__name__}")
    if data.get("version", 1) != 1:
        raise wrong(f"version {data['version']!r} is not known, only 1")
    if unknown := set(data) - _TEMPLATE_KEYS:
        raise wrong(f"unknown keys {', '.join(sorted(map(str, unknown)))}")
    fields = data.get("fields")
    if not isinstance(fields, Mapping) or not fields:
        raise wrong("fields must be an object with one field or more")
    read = tuple(_read_field(name, value, wrong) for name, value in fields.items())
    if sum(each.open is None for each in read) > 1:
        raise wrong("only one field may have no open")
    return ResponseTemplate(fields=read, start=_read_anchor(data, "start_anchor", wrong))


def _read_field(name: str, data: object, wrong: Any) -> Field:
    if not isinstance(data, Mapping):
        raise wrong(f"field {name} must be an object")
    if unknown := set(data) - _FIELD_KEYS:
        raise wrong(f"field {name} has unknown keys {', '.join(sorted(map(str, unknown)))}")
    content = data.get("content", "text")
    if content not in VALUE_PARSERS:
        raise wrong(f"field {name} has content {content!r}; known: {', '.join(VALUE_PARSERS)}")
    if not isinstance(data.get("content_args", {}), Mapping):
        raise wrong(f"field {name} has content_args that are no object")
    return Field(
        name=name,
        open=_read_anchor(data, "open", wrong),
        close=_read_anchor(data, "close", wrong),
        content=content,
        content_args=data.get("content_args", {}),
        transform=data.get("transform"),
        transform_each=bool(data.get("transform_each", False)),
    )


def _read_anchor(data: Mapping[str, Any], key: str, wrong: Any) -> Anchor | None:
    import regex

    literal, pattern = data.get(key), data.get(f"{key}_pattern")
    if literal is not None and pattern is not None:
        raise wrong(f"{key} and {key}_pattern exclude each other")
    if pattern is not None:
        try:
            regex.compile(pattern, regex.DOTALL)
        except (regex.error, TypeError) as error:
            raise wrong(f"{key}_pattern {pattern!r}: {error}") from error
        return Anchor(pattern=pattern)
    if literal is None:
        return None
    literals: Sequence[Any] = [literal] if isinstance(literal, str) else literal
    is_right = isinstance(literals, list) and literals and all(isinstance(each, str) and each for each in literals)
    if not is_right:
        raise wrong(f"{key} must be a text or a list of texts, got {literal!r}")
    return Anchor(literals=tuple(dict.fromkeys(literals)))
