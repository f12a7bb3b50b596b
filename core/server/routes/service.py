"""Routes about the server itself: health, models, tokens, metrics, version, and what the model cannot do."""

from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from headrace import __version__

from ...errors import RequestError
from ..http import JsonResponse, read_json
from ..metrics import render
from ..protocol.common import NO_TEMPLATE, refuse
from ..protocol.service import (
    DetokenizeRequest,
    DetokenizeResponse,
    Health,
    ModelCard,
    ModelList,
    TokenizeRequest,
    TokenizeResponse,
    Version,
)

if TYPE_CHECKING:
    from ..server import Server


async def livez(request: Request) -> Response:
    """200 while the process works or loads; 503 if it should be replaced."""
    return _health(_server(request).why_not_alive())


async def readyz(request: Request) -> Response:
    """200 if requests can be answered now; else 503 with the reason."""
    return _health(_server(request).why_not_ready())


async def version(request: Request) -> Response:
    """headrace's version."""
    return JsonResponse(Version(version=__version__))


async def metrics(request: Request) -> Response:
    """Figures in Prometheus' exposition format."""
    server = _server(request)
    body = render(server.metrics, server.gauges, server.counters, server.model_name)
    return Response(body, media_type="text/plain; version=1.0.0; charset=utf-8")


async def models(request: Request) -> Response:
    """The names that requests may use."""
    server = _server(request)
    server.check_model(None)
    return JsonResponse(ModelList(data=cards(server)))


async def model(request: Request) -> Response:
    """One of them."""
    server, name = _server(request), request.path_params["name"]
    if not name:
        return await models(request)
    server.check_model(name)
    return JsonResponse(_card(server, name))


async def tokenize(request: Request) -> Response:
    """Token ids of a text or a conversation."""
    server = _server(request)
    body = await read_json(request, TokenizeRequest, server.config.server.max_body_bytes)
    server.check_model(body.model)
    refuse(body, {"chat_template": NO_TEMPLATE})
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages", code="invalid_request")
    text, special = body.prompt, True
    if body.messages is not None:
        options = dict(body.chat_template_kwargs or {})
        options.update(
            continue_final_message=bool(body.continue_final_message),
            add_generation_prompt=body.add_generation_prompt,
        )
        if body.tools:
            options["tools"] = body.tools
        text, special = await server.prompts.render(body.messages, **options), False
    if body.add_special_tokens is not None:
        special = body.add_special_tokens
    assert text is not None
    token_ids = await server.prompts.encode(text, add_special_tokens=special)
    strings = None
    if body.return_token_strs:
        strings = [server.prompts.tokenizer.token_text(token) for token in token_ids]
    return JsonResponse(
        TokenizeResponse(
            count=len(token_ids),
            max_model_len=server.limits.max_model_len,
            tokens=token_ids,
            token_strs=strings,
        )
    )


async def detokenize(request: Request) -> Response:
    """Text of token ids, special tokens included unless the request leaves them out."""
    server = _server(request)
    body = await read_json(request, DetokenizeRequest, server.config.server.max_body_bytes)
    server.check_model(body.model)
    tokenizer = server.prompts.tokenizer
    skips = bool(body.skip_special_tokens)
    text = await server.prompts.run(
        lambda: tokenizer.decode(body.tokens, skip_special_tokens=skips), is_short=len(body.tokens) < 1000
    )
    return JsonResponse(DetokenizeResponse(prompt=text))


def cards(server: "Server") -> list[ModelCard]:
    """What is told of each name that requests may use."""
    return [_card(server, name) for name in (*server.names, *server.loras)]


def _health(reason: str) -> Response:
    if reason:
        return JsonResponse(Health(status="unavailable", reason=reason), 503, {"Retry-After": "5"})
    return JsonResponse(Health(status="ok"))


def _card(server: "Server", name: str) -> ModelCard:
    root = server.engine.info.model if server.engine.info is not None else ""
    return ModelCard(
        id=name,
        created=int(server.started_s),
        root=server.loras.get(name, root),
        parent=server.model_name if name in server.loras else None,
        max_model_len=server.limits.max_model_len,
    )


def _server(request: Request) -> "Server":
    server: Server = request.app.state.server
    return server
