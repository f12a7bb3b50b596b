"""Adapters that come and go while the server runs, by vLLM's routes."""

from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from ..api_errors import ApiError
from ..http import JsonResponse, read_json
from ..protocol.service import LoadLoraRequest, ModelList, UnloadLoraRequest
from .service import cards

if TYPE_CHECKING:
    from ..server import Server


async def load(request: Request) -> Response:
    """Load an adapter from a folder of this machine; answers with all names."""
    server = _server(request)
    body = await read_json(request, LoadLoraRequest, server.config.server.max_body_bytes)
    if body.lora_name in server.names:
        raise ApiError(400, f"the model is called {body.lora_name}", code="lora_exists", param="lora_name")
    await server.engine.set_lora(body.lora_name, body.lora_path)
    return JsonResponse(ModelList(data=cards(server)))


async def unload(request: Request) -> Response:
    """Take no further requests for an adapter; answers with the names that are left."""
    server = _server(request)
    body = await read_json(request, UnloadLoraRequest, server.config.server.max_body_bytes)
    await server.engine.set_lora(body.lora_name, "")
    return JsonResponse(ModelList(data=cards(server)))


def _server(request: Request) -> "Server":
    """Raises ApiError 403 unless this is allowed, as it reads files that whoever asks names."""
    server: Server = request.app.state.server
    server.check_model(None)
    if not server.config.server.load_loras:
        reason = "this server takes no adapters from requests; HEADRACE_LOAD_LORAS=true would allow it"
        raise ApiError(403, reason, code="not_allowed")
    return server
