"""Spans of requests: by the in-memory exporter, and over the wire to a collector."""

import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from headrace.core.errors import ConfigError
from headrace.core.server.api_errors import ApiError, ClientGone
from headrace.core.server.generation import Completion, Generation
from headrace.core.server.tracing import Tracing, make_tracing
from live_server import LiveServer

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


def make_generation(**headers: str) -> Generation:
    """A request of 3 and 5 tokens that waited 0.5 s, took 1 s to its first token, and 2.5 s in all."""
    generation = Generation(
        "chatcmpl-1", key="key-0", on_done=lambda g: None, route="/v1/chat/completions", trace_headers=headers
    )
    wire = {"temperature": 0.5, "max_tokens": 9, "stop": ["x"]}
    completion = Completion(generation=generation, index=0, prompt_token_ids=[1, 2, 3], sampling_params=wire)
    generation.num_output_tokens = 5
    generation.completions.append(completion)
    start_s = generation.arrival_s = generation.arrival_s - 10
    generation.scheduled_s, generation.first_token_s = start_s + 0.5, start_s + 1
    generation.done_s = start_s + 2.5
    return generation


def record(generation: Generation) -> dict[str, Any]:
    """Its spans by name."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing = Tracing(provider)
    tracing.record(generation, "tiny", {0: "stop"})
    tracing.close()
    return {span.name: span for span in exporter.get_finished_spans()}


def test_spans_and_their_times() -> None:
    spans = record(make_generation(traceparent=TRACEPARENT))
    root = spans["chat tiny"]
    assert root.kind == SpanKind.SERVER and root.status.status_code == StatusCode.UNSET
    assert f"{root.context.trace_id:032x}" == TRACE and f"{root.parent.span_id:016x}" == PARENT
    assert set(spans) == {"chat tiny", "queue", "prefill", "decode"}
    for name, start_s, end_s in (("queue", 0, 0.5), ("prefill", 0.5, 1), ("decode", 1, 2.5), ("chat tiny", 0, 2.5)):
        span = spans[name]
        assert span.context.trace_id == root.context.trace_id
        assert name == "chat tiny" or span.parent.span_id == root.context.span_id
        assert (span.start_time - root.start_time) / 1e9 == pytest.approx(start_s, abs=1e-4)
        assert (span.end_time - root.start_time) / 1e9 == pytest.approx(end_s, abs=1e-4)
    wanted = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.id": "chatcmpl-1",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.stop_sequences": ("x",),
        "headrace.key": "key-0",
    }
    assert {name: root.attributes[name] for name in wanted} == wanted
    assert root.attributes["gen_ai.response.time_to_first_chunk"] == pytest.approx(1)


def test_requests_that_fail() -> None:
    generation = make_generation(traceparent="nonsense")
    generation.failure = ApiError(500, "the engine failed", code="engine_error")
    generation.scheduled_s = generation.first_token_s = None
    spans = record(generation)
    assert set(spans) == {"chat tiny", "queue"} and spans["chat tiny"].parent is None
    assert spans["chat tiny"].status.status_code == StatusCode.ERROR
    assert spans["chat tiny"].attributes["error.type"] == "engine_error"
    generation.failure = ClientGone()
    root = record(generation)["chat tiny"]
    assert (root.status.status_code, root.attributes["error.type"]) == (StatusCode.UNSET, "aborted_by_client")


def test_the_extra_is_named_when_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_tracing("") is None
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match="not installed") as missing:
        make_tracing("http://127.0.0.1:4318")
    assert "pip install 'headrace[otel]'" in missing.value.remedies


def test_a_collector_gets_the_spans(model_folder: Path) -> None:
    received: list[Any] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                import gzip

                data = gzip.decompress(data)
            received.append((self.path, ExportTraceServiceRequest.FromString(data)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        env = {"HEADRACE_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.server_port}"}
        with LiveServer(model_folder, "--kv-memory", "8MiB", env=env) as server:
            body = {"prompt": "x", "max_tokens": 3, "ignore_eos": True}
            answer = server.post("/v1/completions", body, headers={"traceparent": TRACEPARENT}).json()
            assert server.terminate() == 0
        collector.shutdown()
        thread.join()
    ((path, request),) = received
    assert path == "/v1/traces"
    (resource,) = request.resource_spans
    names = {item.key: item.value.string_value for item in resource.resource.attributes}
    assert names["service.name"] == "headrace"
    spans = {span.name: span for span in resource.scope_spans[0].spans}
    root = spans["text_completion tiny"]
    assert root.trace_id.hex() == TRACE and root.parent_span_id.hex() == PARENT
    attributes = {item.key: item.value for item in root.attributes}
    assert attributes["gen_ai.response.id"].string_value == answer["id"]
    assert attributes["gen_ai.usage.output_tokens"].int_value == 3


@pytest.mark.parametrize("route", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_routes_by_other_paths(route: str) -> None:
    generation = make_generation()
    generation.route = route
    assert record(generation)["rerank tiny"].attributes["gen_ai.operation.name"] == "rerank"
