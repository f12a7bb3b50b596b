"""The table of routes, and what stands between the socket and each of them: keys, errors, counts."""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import HeadraceError
from ..extras import missing_package
from ..suggest import did_you_mean
from .api_errors import ApiError, ClientGone, to_api_error
from .auth import PAGE_ROUTE, PUBLIC_ROUTES
from .http import Body, ErrorResponse
from .protocol.audio import TranscriptionResponse
from .protocol.chat import ChatRequest, ChatResponse
from .protocol.completions import CompletionRequest, CompletionResponse
from .protocol.messages import CountTokensRequest, Message, MessagesRequest, TokenCount
from .protocol.pooling import (
    ClassifyRequest,
    ClassifyResponse,
    EmbeddingRequest,
    EmbeddingResponse,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
)
from .protocol.responses import (
    DeletedResponse,
    InputTokens,
    InputTokensRequest,
    ItemList,
    ResponseObject,
    ResponsesRequest,
)
from .protocol.service import (
    DetokenizeRequest,
    DetokenizeResponse,
    Health,
    LoadLoraRequest,
    ModelCard,
    ModelList,
    TokenizeRequest,
    TokenizeResponse,
    UnloadLoraRequest,
    Version,
)
from .routes import audio, lora, messages, page, pooling, responses, service
from .routes.chat import chat_completions
from .routes.completions import completions
from .server import Server
from .unknown_fields import HEADER as IGNORED_FIELDS

logger = logging.getLogger(__name__)

STEPS_ROUTE = "/debug/steps"
Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteSpec:
    """One route: what it takes (None: no body) and gives (None: no JSON). also: other paths that clients know."""

    path: str
    endpoint: Endpoint
    method: str = "POST"
    takes: Any = None
    gives: Any = None
    also: tuple[str, ...] = ()


def route_table() -> list[RouteSpec]:
    """All routes, in the order of the documentation."""
    return [
        RouteSpec(path="/v1/chat/completions", endpoint=chat_completions, takes=ChatRequest, gives=ChatResponse),
        RouteSpec(path="/v1/completions", endpoint=completions, takes=CompletionRequest, gives=CompletionResponse),
        RouteSpec(path="/v1/responses", endpoint=responses.create, takes=ResponsesRequest, gives=ResponseObject),
        RouteSpec(
            path="/v1/responses/input_tokens",
            endpoint=responses.input_tokens,
            takes=InputTokensRequest,
            gives=InputTokens,
        ),
        RouteSpec(
            path="/v1/responses/{response_id}", endpoint=responses.retrieve, method="GET", gives=ResponseObject
        ),
        RouteSpec(
            path="/v1/responses/{response_id}", endpoint=responses.delete, method="DELETE", gives=DeletedResponse
        ),
        RouteSpec(path="/v1/responses/{response_id}/cancel", endpoint=responses.cancel, gives=ResponseObject),
        RouteSpec(
            path="/v1/responses/{response_id}/input_items",
            endpoint=responses.input_items,
            method="GET",
            gives=ItemList,
        ),
        RouteSpec(path="/v1/messages", endpoint=messages.create, takes=MessagesRequest, gives=Message),
        RouteSpec(
            path="/v1/messages/count_tokens",
            endpoint=messages.count_tokens,
            takes=CountTokensRequest,
            gives=TokenCount,
        ),
        RouteSpec(path="/v1/models", endpoint=service.models, method="GET", gives=ModelList),
        RouteSpec(path="/v1/models/{name:path}", endpoint=service.model, method="GET", gives=ModelCard),
        RouteSpec(path="/v1/load_lora_adapter", endpoint=lora.load, takes=LoadLoraRequest, gives=ModelList),
        RouteSpec(path="/v1/unload_lora_adapter", endpoint=lora.unload, takes=UnloadLoraRequest, gives=ModelList),
        RouteSpec(
            path="/v1/embeddings", endpoint=pooling.embeddings, takes=EmbeddingRequest, gives=EmbeddingResponse
        ),
        RouteSpec(
            path="/v1/score", endpoint=pooling.score, takes=ScoreRequest, gives=ScoreResponse, also=("/score",)
        ),
        RouteSpec(
            path="/v1/rerank",
            endpoint=pooling.rerank,
            takes=RerankRequest,
            gives=RerankResponse,
            also=("/rerank", "/v2/rerank"),
        ),
        RouteSpec(
            path="/v1/classify",
            endpoint=pooling.classify,
            takes=ClassifyRequest,
            gives=ClassifyResponse,
            also=("/classify",),
        ),
        RouteSpec(path="/v1/audio/transcriptions", endpoint=audio.transcriptions, gives=TranscriptionResponse),
        RouteSpec(path="/v1/audio/translations", endpoint=audio.translations, gives=TranscriptionResponse),
        RouteSpec(path="/tokenize", endpoint=service.tokenize, takes=TokenizeRequest, gives=TokenizeResponse),
        RouteSpec(path="/detokenize", endpoint=service.detokenize, takes=DetokenizeRequest, gives=DetokenizeResponse),
        RouteSpec(path="/livez", endpoint=service.livez, method="GET", gives=Health),
        RouteSpec(path="/readyz", endpoint=service.readyz, method="GET", gives=Health),
        RouteSpec(path="/health", endpoint=service.readyz, method="GET", gives=Health),
        RouteSpec(path="/metrics", endpoint=service.metrics, method="GET"),
        RouteSpec(path=STEPS_ROUTE, endpoint=page.steps, method="GET"),
        RouteSpec(path=PAGE_ROUTE, endpoint=page.page, method="GET"),
        RouteSpec(path="/version", endpoint=service.version, method="GET", gives=Version),
    ]


def make_app(server: Server) -> ASGIApp:
    """The ASGI application."""
    from .openapi import openapi_route

    table = route_table()
    if not server.config.server.ui:
        table = [spec for spec in table if spec.path not in (PAGE_ROUTE, STEPS_ROUTE)]
    table.append(openapi_route(table, needs_key=len(server.keys) > 0))
    by_path: dict[str, dict[str, Endpoint]] = {}
    for spec in table:
        for path in (spec.path, *spec.also):
            by_path.setdefault(path, {})[spec.method] = _guarded(spec.endpoint, server)
    app = Starlette(
        routes=[Route(path, _by_method(found), methods=list(found)) for path, found in by_path.items()],
        exception_handlers={HTTPException: _no_route},
    )
    app.state.server = server
    guarded: ASGIApp = KeyGate(app, server)
    origins = [origin.strip() for origin in server.config.server.cors_origins.split(",") if origin.strip()]
    if origins:
        from starlette.middleware.cors import CORSMiddleware

        guarded = CORSMiddleware(guarded, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    return guarded


class KeyGate:
    """Lets through what needs no key or has a good one: everything that is not in PUBLIC_ROUTES needs one, unknown
    paths too. Counts responses."""

    def __init__(self, app: ASGIApp, server: Server) -> None:
        self.app = app
        self._server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path, receive = scope["path"], Body(scope, receive)
        if path not in PUBLIC_ROUTES:
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            try:
                scope.setdefault("state", {})["user"] = self._server.keys.user(headers)
            except ApiError as error:
                self._server.metrics.rejected[error.code or ""] += 1
                await ErrorResponse(error, path)(scope, receive, send)
                return
        await self.app(scope, receive, send)


def _by_method(endpoints: Mapping[str, Endpoint]) -> Endpoint:
    """One endpoint for all methods of a path, so that a wrong one is told all that there are."""

    async def answer(request: Request) -> Response:
        return await endpoints["GET" if request.method == "HEAD" else request.method](request)

    return answer


def _guarded(endpoint: Endpoint, server: Server) -> Endpoint:
    """The endpoint with its errors in the envelope."""

    async def answer(request: Request) -> Response:
        started_s = time.monotonic()
        try:
            response = await endpoint(request)
        except ApiError as error:
            response = _refused(error, server, request)
        except HeadraceError as error:
            response = _refused(to_api_error(error), server, request)
        except ClientGone:
            response = Response(status_code=499)  # nobody reads it
        except RecursionError:  # of whoever walks through schemas, arguments, messages
            deep = ApiError(400, "the body is nested too deeply", code="nested_too_deeply")
            response = _refused(deep, server, request)
        except Exception as error:
            failed = ApiError(500, "internal error; the log says more", code="internal_error")
            if (missing := missing_package(error)) is not None:
                failed = to_api_error(missing)
            logger.exception("a route failed", extra={"fields": {"path": request.url.path}})
            response = _refused(failed, server, request)
        if ignored := getattr(request.state, "ignored", ""):
            response.headers[IGNORED_FIELDS] = ignored
        route = request.scope["route"].path if "route" in request.scope else request.url.path
        server.metrics.responses[(route, response.status_code)] += 1
        logger.debug(
            "answered",
            extra={
                "fields": {
                    "path": request.url.path,
                    "status": response.status_code,
                    "seconds": time.monotonic() - started_s,
                }
            },
        )
        return response

    return answer


def _refused(error: ApiError, server: Server, request: Request) -> Response:
    server.metrics.rejected[error.code or ""] += 1
    return ErrorResponse(error, request.url.path)


async def _no_route(request: Request, error: Exception) -> Response:
    """Unknown paths and methods, in the envelope too."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 405:
        headers = dict(error.headers or {})
        reason = f"{request.method} is not what {path} takes"
        return ErrorResponse(ApiError(405, reason, code="method_not_allowed", headers=headers), path)
    near = did_you_mean(path, [route.path for route in request.app.routes], limit=1)
    return ErrorResponse(ApiError(error.status_code, f"no route {path!r:.200}{near}", code="not_found"), path)
