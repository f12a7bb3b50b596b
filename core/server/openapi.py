"""/openapi.json, made of the table of routes and their msgspec types."""

import inspect
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace import __version__

from .api_errors import MESSAGES, ErrorEnvelope
from .auth import PUBLIC_ROUTES
from .protocol.messages import MessageErrorEnvelope

if TYPE_CHECKING:
    from .app import RouteSpec

_PATH = "/openapi.json"


def openapi_route(table: "Sequence[RouteSpec]", *, needs_key: bool) -> "RouteSpec":
    """The route that gives the description of all routes. needs_key: the server has keys."""
    from .app import RouteSpec

    cached: list[bytes] = []

    async def openapi(request: Request) -> Response:
        """This description."""
        if not cached:
            cached.append(msgspec.json.encode(describe([*table, spec], needs_key=needs_key)))
        return Response(cached[0], media_type="application/json")

    spec = RouteSpec(path=_PATH, endpoint=openapi, method="GET")
    return spec


def describe(table: "Sequence[RouteSpec]", *, needs_key: bool) -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    types = {kind for spec in table for kind in (spec.takes, spec.gives) if kind is not None}
    types |= {ErrorEnvelope, MessageErrorEnvelope}
    ordered = sorted(types, key=lambda kind: kind.__name__)
    schemas, components = msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(ordered, schemas, strict=True))
    paths: dict[str, Any] = {}
    for spec in table:
        path = spec.path.replace(":path}", "}")
        operation: dict[str, Any] = {
            "operationId": f"{spec.method.lower()}{re.sub('[^a-z]+', '_', path)}",
            "summary": (inspect.getdoc(spec.endpoint) or "").split("\n")[0],
            "parameters": [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
                for name in re.findall(r"\{(\w+)\}", path)
            ],
            "responses": {
                "200": _response("the answer", None if spec.gives is None else schema_of[spec.gives]),
                "default": _response(
                    "what went wrong", schema_of[MessageErrorEnvelope if path.startswith(MESSAGES) else ErrorEnvelope]
                ),
            },
        }
        if spec.takes is not None:
            content = {"application/json": {"schema": schema_of[spec.takes]}}
            operation["requestBody"] = {"required": True, "content": content}
        if needs_key and path in PUBLIC_ROUTES:
            operation["security"] = []
        paths.setdefault(path, {})[spec.method.lower()] = operation
    keys = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}} if needs_key else {}
    return {
        "openapi": "3.1.0",
        "info": {"title": "headrace", "version": __version__},
        "paths": paths,
        "components": {"schemas": components, **keys},
        **({"security": [{"key": []}]} if needs_key else {}),
    }


def _response(description: str, schema: Any) -> dict[str, Any]:
    if schema is None:
        return {"description": description}
    return {"description": description, "content": {"application/json": {"schema": schema}}}
