"""Traces for OpenTelemetry: one span a request, with the time in the queue, the prefill and the decoding as children.

Spans are made when a request is done, out of the times that it kept: a running request costs nothing more.
"""

import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headrace import __version__

from ..errors import ConfigError
from .api_errors import ClientGone
from .generation import Generation

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/score": "score",
    "/v1/rerank": "rerank",
    "/v1/classify": "classify",
}
"""gen_ai.operation.name by route; all others chat."""
_REQUEST = {
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "seed": "gen_ai.request.seed",
    "stop": "gen_ai.request.stop_sequences",
}
"""Sampling parameters by the names of the semantic conventions; those that are the defaults are left out."""


class Tracing:
    """Owns a tracer provider. A request that came with a traceparent is a child of that span."""

    def __init__(self, provider: "TracerProvider") -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("headrace", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def record(self, generation: Generation, model: str, finish_reasons: Mapping[int, str]) -> None:
        """The spans of a request that is done."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        done_s = time.monotonic() if generation.done_s is None else generation.done_s
        now_ns, now_s = time.time_ns(), time.monotonic()

        def at(moment_s: float) -> int:
            return now_ns - round((now_s - moment_s) * 1e9)

        operation = _OPERATIONS.get("/v1" + re.sub(r"^/v\d", "", generation.route), "chat")
        parent = self._propagator.extract(generation.trace_headers)
        span = self._tracer.start_span(
            f"{operation} {model}",
            context=parent,
            kind=SpanKind.SERVER,
            start_time=at(generation.arrival_s),
            attributes=_attributes(generation, operation, model, finish_reasons),
        )
        inside = set_span_in_context(span)
        marks = [generation.arrival_s, generation.scheduled_s, generation.first_token_s, done_s]
        for name, start_s, end_s in zip(("queue", "prefill", "decode"), marks, marks[1:], strict=False):
            if start_s is None:
                break
            child = self._tracer.start_span(name, context=inside, start_time=at(start_s))
            child.end(at(done_s if end_s is None else max(start_s, end_s)))
        if isinstance(generation.failure, ClientGone):
            span.set_attribute("error.type", "aborted_by_client")
        elif generation.failure is not None:
            span.set_attribute("error.type", generation.failure.code or "error")
            span.set_status(Status(StatusCode.ERROR, generation.failure.message))
        span.end(at(done_s))

    def close(self) -> None:
        """Send what is left; may take seconds."""
        self._provider.shutdown()


def make_tracing(endpoint: str) -> Tracing | None:
    """Tracing to a collector (OTLP over HTTP); None for no endpoint. Raises ConfigError without the extra."""
    if not endpoint:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"otlp_endpoint needs OpenTelemetry, which is not installed: {error}",
            remedies=["pip install 'headrace[otel]'", "no otlp_endpoint"],
        ) from None
    url = endpoint.rstrip("/")
    if not url.endswith("/v1/traces"):
        url += "/v1/traces"
    # OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER and the exporter's variables are honoured.
    resource = Resource.create()
    if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "headrace", "service.version": __version__}))
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
    return Tracing(provider)


def _attributes(
    generation: Generation, operation: str, model: str, finish_reasons: Mapping[int, str]
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "headrace",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": generation.id,
        "gen_ai.request.choice.count": len(generation.completions),
        "gen_ai.response.finish_reasons": [finish_reasons[index] for index in sorted(finish_reasons)],
        "gen_ai.usage.input_tokens": generation.num_prompt_tokens,
        "gen_ai.usage.output_tokens": generation.num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": generation.num_cached_tokens,
        "http.route": generation.route,
    }
    if generation.key:
        found["headrace.key"] = generation.key
    if generation.first_token_s is not None:
        found["gen_ai.response.time_to_first_chunk"] = generation.first_token_s - generation.arrival_s
    params = generation.completions[0].sampling_params if generation.completions else {}
    found.update({attribute: params[name] for name, attribute in _REQUEST.items() if params.get(name) is not None})
    return found
