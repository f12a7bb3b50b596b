"""Grammars that make a model call a tool, or think before it answers in a form."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import RequestError
from ...json_text import parse_json
from ...structured.params import StructuredOutputParams
from ...suggest import did_you_mean
from .formats import CallSyntax, Format
from .template import ResponseTemplate
from .tools import Tool

if TYPE_CHECKING:
    from ...text.tokenizer import Tokenizer

MAX_CALLS = 32
"""Calls in one forced answer; a model that nothing stops would go on for ever."""
_SLOTS = re.compile(r"(\{name\}|\{arguments\}|\{index\}|\{key\}|\{value\})")
_WHITESPACE = r"[ \t\n\r]{0,20}"


def constrain_tools(
    format: Format,
    tools: Sequence[Tool],
    *,
    choice: str,
    parallel: bool,
    tokenizer: "Tokenizer",
    prompt: str,
) -> StructuredOutputParams:
    """The form of an answer that calls tools: one or more of any ("required"), or one of the tool named by `choice`.

    format: from `tool_format`. prompt: its text; if it has begun to think, the answer thinks first, else it may.
    Raises RequestError if there is no such tool.
    """
    assert format.calls is not None, "tool_format gives one that has calls"
    if not tools:
        raise RequestError("tool_choice needs tools", code="invalid_tools")
    chosen = [tool for tool in tools if choice in ("required", tool.name)]
    if not chosen:
        names = [tool.name for tool in tools]
        raise RequestError(
            f"tool_choice names {choice!r}{did_you_mean(choice, names)}, which is none of the tools: "
            f"{', '.join(names)}",
            code="invalid_tools",
        )
    grammar = _Lark(tokenizer)
    names = [grammar.rule(grammar.call(format.calls, tool)) for tool in chosen]
    call = grammar.rule(" | ".join(names))
    syntax, calls = format.calls, call
    if parallel and choice == "required" and syntax.between is not None:
        calls = f"{call} ({grammar.literal(syntax.between)} {call}){{0,{MAX_CALLS - 1}}}"
    answer = f"{grammar.literal(syntax.before)} {calls} {grammar.literal(syntax.after)}"
    start = f"{grammar.thinking(format, prompt)} {answer}"
    return StructuredOutputParams(kind="grammar", value=grammar.text(start), label="the schema of a tool")


def constrain_after_reasoning(
    format: Format | None, form: StructuredOutputParams, *, tokenizer: "Tokenizer", prompt: str
) -> StructuredOutputParams:
    """The same form, but behind the thinking that the prompt has begun; `form` itself if it has begun none.

    A grammar of the user's own cannot be put behind something else, and is left as it is.
    """
    if format is None or form.kind == "grammar" or not _is_thinking(format.template, prompt):
        return form
    grammar = _Lark(tokenizer)
    value = form.value
    if form.kind == "choice":
        body = "(" + " | ".join(_quote(text) for text in value) + ")"
    elif form.kind == "regex":
        pattern = value.removeprefix("^")
        pattern = pattern[:-1] if pattern.endswith("$") and not pattern.endswith("\\$") else pattern
        body = "/" + re.sub(r"\\.|/", lambda m: "\\/" if m[0] == "/" else m[0], pattern, flags=re.DOTALL) + "/"
    else:
        schema = {"type": "object"} if form.kind == "json_object" else value
        if isinstance(schema, str):
            try:
                schema = parse_json(schema)
            except ValueError as error:
                raise RequestError(
                    f"structured output: json_schema cannot be used: {error}", code="invalid_structured_output"
                ) from error
        body = grammar.schema(schema, strict=True)
    blanks = grammar.rule(f"/{_WHITESPACE}/")
    return StructuredOutputParams(
        kind="grammar", value=grammar.text(f"{grammar.thinking(format, prompt)} {blanks} {body}"), label=form.kind
    )


def _is_thinking(template: ResponseTemplate, prompt: str) -> bool:
    from .parser import AnswerParser

    return AnswerParser(template, prompt=prompt).is_reasoning


class _Lark:
    """A Lark grammar that is being written, in llguidance's dialect: %json, special tokens by id, lazy texts."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._rules: list[str] = []
        self._special = {
            token: id for id in tokenizer.special_ids if (token := tokenizer.backend.id_to_token(id)) is not None
        }
        texts = sorted(self._special, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, texts)) + ")") if texts else None

    def text(self, start: str) -> str:
        """The whole grammar."""
        return "\n".join([f"start: {start}", *self._rules]) + "\n"

    def rule(self, body: str, options: str = "") -> str:
        """Add a rule; its name."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def literal(self, text: str) -> str:
        """A text; special tokens in it are these tokens, not their letters."""
        parts = self._split.split(text) if self._split is not None else [text]
        return " ".join(
            f"<[{self._special[part]}]>" if part in self._special else _quote(part) for part in parts if part
        )

    def schema(self, schema: Any, *, strict: bool) -> str:
        """JSON of a schema. strict: a keyword that cannot be enforced is an error; else it is ignored."""
        if not isinstance(schema, Mapping):
            schema = {} if schema is True or schema is None else {"enum": []}
        options = {"whitespace_pattern": _WHITESPACE, "lenient": not strict}
        return f"%json {json.dumps({**schema, 'x-guidance': options})}"

    def thinking(self, format: Format, prompt: str) -> str:
        """Thinking that must end if the prompt has begun it, and may come if not."""
        reasoning = format.reasoning
        if reasoning is None:
            return ""
        close = f"{self._until(reasoning.close)} {self.literal(reasoning.then)}"
        blanks = self.rule(f"/{_WHITESPACE}/")
        if _is_thinking(format.template, prompt):
            return f"{close} {blanks}"
        return f"({self.literal(reasoning.open)} {close} {blanks})?"

    def call(self, syntax: CallSyntax, tool: Tool) -> str:
        """One call of a tool."""
        parts = []
        for part in _SLOTS.split(syntax.call):
            if part == "{name}":
                parts.append(_quote(tool.name))
            elif part == "{index}":
                parts.append("/[0-9]{1,3}/")
            elif part == "{arguments}":
                parts.append(self._arguments(syntax, tool))
            else:
                parts.append(self.literal(part))
        return " ".join(filter(None, parts))

    def _arguments(self, syntax: CallSyntax, tool: Tool) -> str:
        if not syntax.argument:
            return self.schema({"type": "object", **tool.parameters}, strict=tool.strict)
        required = tool.parameters.get("required") or ()
        each = [
            (self.rule(self._argument(syntax, tool, key, schema)), key in required)
            for key, schema in tool.properties.items()
        ]
        between = self.literal(syntax.between_arguments)
        more = ""
        first = ""
        for rule, is_required in reversed(each):
            with_more = f"{rule} {more}"
            first = with_more if is_required else f"({with_more} | {first})" if first else f"({with_more})?"
            more = f"{between} {rule} {more}" if is_required else f"({between} {rule})? {more}"
        return first

    def _argument(self, syntax: CallSyntax, tool: Tool, key: str, schema: Any) -> str:
        before, _, after = syntax.argument.replace("{key}", key).partition("{value}")
        kinds = schema.get("type") if isinstance(schema, Mapping) else None
        choices = schema.get("enum") if isinstance(schema, Mapping) else None
        if syntax.raw_strings and isinstance(choices, list) and choices and all(isinstance(c, str) for c in choices):
            return f"{self.literal(before)} ({' | '.join(map(_quote, choices))}) {self.literal(after)}"
        if syntax.raw_strings and (kinds is None or kinds == "string" or "string" in kinds):
            longest = schema.get("maxLength") if isinstance(schema, Mapping) else None
            return f"{self.literal(before)} {self._until(after, longest if isinstance(longest, int) else None)}"
        definitions = {name: tool.parameters[name] for name in ("$defs", "definitions") if name in tool.parameters}
        value = self.schema({**(schema if isinstance(schema, Mapping) else {}), **definitions}, strict=tool.strict)
        return f"{self.literal(before)} {value} {self.literal(after)}"

    def _until(self, end: str, max_chars: int | None = None) -> str:
        """Any text up to an end that does not occur in it."""
        anything = "/(.|\\n)*/" if max_chars is None else f"/(.|\\n){{0,{max_chars}}}/"
        if self._split is not None and self._split.search(end):
            return f"{self.rule(anything)} {self.literal(end)}"
        return self.rule(anything, f"[suffix={_quote(end)}]")


def _quote(text: str) -> str:
    return json.dumps(text)
