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
        *((request.structured_outputs or {}).items()),
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


_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
_KIND_OF = {"json": "json_schema"}
