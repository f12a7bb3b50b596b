"""The form of the output that a request asks for, in OpenAI's spelling and vLLM's."""

from typing import Any, cast

from ..errors import RequestError
from ..structured.params import KINDS, StructuredKind, StructuredOutputParams
from ..suggest import did_you_mean
from .protocol.common import GenerationFields


def structured_output(request: GenerationFields) -> StructuredOutputParams | None:
    """The form, None for any text. Raises RequestError for an unknown one, and for more than one."""
    asked = [
        *_response_format(request),
        *((name.removeprefix("guided_"), getattr(request, name)) for name in _GUIDED),
        *_structured_outputs(request),
    ]
    forms = [(_KIND_OF.get(name, name), value) for name, value in asked if value is not None]
    if not forms:
        return None
    if len(forms) > 1:
        raise RequestError(
            f"an output has one form, but {len(forms)} are asked for: {', '.join(kind for kind, _ in forms)}",
            code="invalid_structured_output",
        )
    kind, value = forms[0]
    if kind not in KINDS:
        field = "structured_outputs" if kind in (request.structured_outputs or {}) else "response_format"
        raise RequestError(
            f"{field}: no form of output {kind!r}{did_you_mean(kind, KINDS)}; known: text, {', '.join(KINDS)}",
            code="invalid_response_format",
        )
    return StructuredOutputParams(kind=cast(StructuredKind, kind), value=None if kind == "json_object" else value)


def _response_format(request: GenerationFields) -> list[tuple[str, Any]]:
    asked = request.response_format
    if asked is None or asked.type == "text":
        return []
    if asked.type != "json_schema":
        return [(asked.type, True)]
    if not asked.json_schema or asked.json_schema.get("schema") is None:
        raise RequestError("response_format: json_schema needs json_schema.schema", code="invalid_response_format")
    return [("json_schema", asked.json_schema["schema"])]


def _structured_outputs(request: GenerationFields) -> list[tuple[str, Any]]:
    asked = request.structured_outputs
    if asked is None:
        return []
    given = {name: value for name, value in asked.items() if value is not None and name[:1] != "_"}  # vLLM's own
    if not given:
        raise RequestError("structured_outputs names no form of output", code="invalid_structured_output")
    for name, reason in _NOT_SERVED.items():
        if given.pop(name, None):
            raise RequestError(f"structured_outputs: {name}: {reason}", code="unsupported_parameter")
    return [(name, value) for name, value in given.items() if (name, value) not in _NOTHING]


_NOT_SERVED = {
    "whitespace_pattern": "JSON has up to 20 blanks between two tokens",
    "disable_any_whitespace": "JSON has up to 20 blanks between two tokens",
    "disable_additional_properties": 'put "additionalProperties": false into the schema',
    "structural_tag": "send tools, or a grammar",
}
"""What vLLM takes beside a form, and what to do without it; false asks for nothing."""
_NOTHING = (("json_object", False), ("disable_fallback", True), ("disable_fallback", False))
_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
_KIND_OF = {"json": "json_schema"}
