"""Errors as clients see them: an HTTP status and one envelope for all routes."""

import re
from collections.abc import Mapping

import msgspec

from ..errors import HeadraceError, MissingPackage, RequestError
from .protocol.chat import ChatRequest
from .protocol.completions import CompletionRequest
from .protocol.messages import MessageError, MessageErrorEnvelope, MessagesRequest
from .protocol.pooling import ClassifyRequest, EmbeddingRequest, RerankRequest, ScoreRequest
from .protocol.responses import ResponsesRequest
from .protocol.service import DetokenizeRequest, TokenizeRequest

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    501: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}

_MESSAGE_TYPES = _TYPES | {
    413: "request_too_large",
    500: "api_error",
    501: "api_error",
    503: "overloaded_error",
}
"""Where Anthropic's protocol has other names."""
_FIELDS = frozenset(
    name
    for kind in (
        *(ChatRequest, CompletionRequest, MessagesRequest, ResponsesRequest, TokenizeRequest, DetokenizeRequest),
        *(EmbeddingRequest, ScoreRequest, RerankRequest, ClassifyRequest),
    )
    for name in kind.__struct_fields__
)
MESSAGES = "/v1/messages"
"""Paths that begin so have Anthropic's envelope."""


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong."""

    message: str
    type: str
    param: str | None = None
    """the field of the request that is wrong"""
    code: str | None = None


class ErrorEnvelope(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every response that is an error."""

    error: ErrorBody


class ApiError(Exception):
    """An error with the status that it is answered with. headers: besides those of every response."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    def body(self, path: str = "") -> bytes:
        """The envelope as JSON, in the protocol of a path."""
        if path.startswith(MESSAGES):
            kind = _MESSAGE_TYPES.get(self.status, "api_error")
            return msgspec.json.encode(MessageErrorEnvelope(error=MessageError(type=kind, message=self.message)))
        error = ErrorBody(
            message=self.message, type=_TYPES.get(self.status, "server_error"), param=self.param, code=self.code
        )
        return msgspec.json.encode(ErrorEnvelope(error=error))


class ClientGone(Exception):
    """The client closed its connection; there is nobody to answer."""


def to_api_error(error: HeadraceError) -> ApiError:
    """What a client gets for one of headrace's errors: 400 for a wrong request, 501 for what this installation
    lacks, else 500. A reason that begins with the name of a field is about that."""
    status, code = 500, "internal_error"
    if isinstance(error, RequestError):
        status, code = 400, error.code
    elif isinstance(error, MissingPackage):
        status, code = 501, "package_not_installed"
    message = error.reason
    if error.remedies:
        message += f" (try: {'; '.join(error.remedies)})"
    found = re.match(r"[a-z_]+(?=[ .:\[])", message)
    param = found[0] if found and found[0] in _FIELDS else None
    return ApiError(status, message, code=code, param=param)
