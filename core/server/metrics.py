"""Figures for Prometheus: the names that dashboards for vLLM read, and our own beside them."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

_TIMES_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
_LONG_TIMES_S = (
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    120.0,
    240.0,
    480.0,
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
_NUMBERS = (1, 2, 5, 10, 20)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Histogram:
    """Counts by bucket. Cheaper than the client library's by a lock; one thread writes."""

    def __init__(self, bounds: Iterable[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0
        self.count = 0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value
        self.count += 1

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts with their upper bounds, as the exposition format has them."""
        total, found = 0, []
        for bound, count in zip((*self.bounds, None), self.counts, strict=True):
            total += count
            found.append(("+Inf" if bound is None else str(float(bound)), float(total)))
        return found


class Metrics:
    """All counters of the server; gauges are read from their owners when they are asked for."""

    def __init__(self) -> None:
        self.ttft_s = Histogram(_TIMES_S)
        self.itl_s = Histogram(_TIMES_S)
        self.tpot_s = Histogram(_TIMES_S)
        self.e2e_s = Histogram(_LONG_TIMES_S)
        self.queue_s = Histogram(_LONG_TIMES_S)
        self.prefill_s = Histogram(_LONG_TIMES_S)
        self.decode_s = Histogram(_LONG_TIMES_S)
        self.inference_s = Histogram(_LONG_TIMES_S)
        self.prompt_len = Histogram(_TOKENS)
        self.output_len = Histogram(_TOKENS)
        self.max_output_len = Histogram(_TOKENS)
        self.max_tokens = Histogram(_TOKENS)
        self.n = Histogram(_NUMBERS)
        self.step_tokens = Histogram(_STEP_TOKENS)
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.started_tokens = 0
        """prompt tokens of requests with a first token, and how many of them were hits"""
        self.hit_tokens = 0
        self.finished: Counter[str] = Counter()
        self.responses: Counter[tuple[str, int]] = Counter()
        self.rejected: Counter[str] = Counter()
        self.restarts = 0
        self.poisoned = 0

    def started(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """Count the prompt of a completion whose first token came."""
        self.started_tokens += num_prompt_tokens
        self.hit_tokens += num_cached_tokens

    def stepped(self, num_tokens: int) -> None:
        """Count a step that gave so many tokens."""
        self.generation_tokens += num_tokens
        self.step_tokens.observe(num_tokens)


def render(
    metrics: Metrics,
    gauges: Callable[[], dict[str, float]],
    counters: Callable[[], dict[str, float]],
    model_name: str,
) -> bytes:
    """The exposition format. gauges, counters: name -> value, kept elsewhere."""
    from prometheus_client import generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    class Source:
        """What generate_latest collects from: made for one request, so that nothing is registered globally."""

        def collect(self) -> Iterable[Any]:
            """All families."""
            labels = ["model_name"]
            for name, value in gauges().items():
                gauge = GaugeMetricFamily(name, _HELP.get(name, name), labels=labels)
                gauge.add_metric([model_name], value)
                yield gauge
            for name, histogram in _histograms(metrics):
                family = HistogramMetricFamily(name, _HELP.get(name, name), labels=labels)
                family.add_metric([model_name], histogram.buckets(), histogram.sum)
                yield family
            for name, value in [*_counters(metrics), *counters().items()]:
                counter = CounterMetricFamily(name, _HELP.get(name, name), labels=labels)
                counter.add_metric([model_name], value)
                yield counter
            done = CounterMetricFamily(
                "vllm:request_success", "finished requests", labels=[*labels, "finished_reason"]
            )
            for reason in ("stop", "length", "abort", "error"):
                done.add_metric([model_name, reason], metrics.finished[reason])
            yield done
            rejected = CounterMetricFamily("headrace_rejected", "requests refused at once", labels=[*labels, "code"])
            for code, count in sorted(metrics.rejected.items()):
                rejected.add_metric([model_name, code], count)
            yield rejected
            responses = CounterMetricFamily(
                "headrace_http_responses", "responses by route and status", labels=["route", "status"]
            )
            for (route, status), count in sorted(metrics.responses.items()):
                responses.add_metric([route, str(status)], count)
            yield responses

    return generate_latest(Source())


def _histograms(metrics: Metrics) -> list[tuple[str, Histogram]]:
    return [
        ("vllm:time_to_first_token_seconds", metrics.ttft_s),
        ("vllm:inter_token_latency_seconds", metrics.itl_s),
        ("vllm:time_per_output_token_seconds", metrics.itl_s),
        ("vllm:request_time_per_output_token_seconds", metrics.tpot_s),
        ("vllm:e2e_request_latency_seconds", metrics.e2e_s),
        ("vllm:request_queue_time_seconds", metrics.queue_s),
        ("vllm:request_prefill_time_seconds", metrics.prefill_s),
        ("vllm:request_decode_time_seconds", metrics.decode_s),
        ("vllm:request_inference_time_seconds", metrics.inference_s),
        ("vllm:request_prompt_tokens", metrics.prompt_len),
        ("vllm:request_generation_tokens", metrics.output_len),
        ("vllm:request_max_num_generation_tokens", metrics.max_output_len),
        ("vllm:request_params_max_tokens", metrics.max_tokens),
        ("vllm:request_params_n", metrics.n),
        ("vllm:iteration_tokens_total", metrics.step_tokens),
    ]


def _counters(metrics: Metrics) -> list[tuple[str, float]]:
    return [
        ("vllm:prompt_tokens", metrics.prompt_tokens),
        ("vllm:generation_tokens", metrics.generation_tokens),
        ("headrace_engine_restarts", metrics.restarts),
        ("headrace_poison_requests", metrics.poisoned),
    ]


_HELP = {
    "vllm:num_requests_running": "completions that have a slot in the engine",
    "vllm:num_requests_waiting": "completions that wait for a slot, in the engine or before it",
    "vllm:kv_cache_usage_perc": "share of the KV blocks that are in use, 0 to 1",
    "vllm:gpu_cache_usage_perc": "the same under its old name",
    "vllm:time_to_first_token_seconds": "from arrival to the first token",
    "vllm:inter_token_latency_seconds": "between two tokens of one completion",
    "vllm:time_per_output_token_seconds": "the same under its old name",
    "vllm:request_time_per_output_token_seconds": "mean over one request's tokens after the first",
    "vllm:e2e_request_latency_seconds": "from arrival to the end",
    "vllm:request_queue_time_seconds": "from arrival to the first step",
    "vllm:request_prefill_time_seconds": "from the first step to the first token",
    "vllm:request_decode_time_seconds": "from the first token to the end",
    "vllm:request_inference_time_seconds": "from the first step to the end",
    "vllm:request_max_num_generation_tokens": "tokens of a request's longest completion",
    "vllm:request_params_n": "completions that a request asks for of each prompt",
    "vllm:prompt_tokens": "prompt tokens of requests that started",
    "vllm:generation_tokens": "tokens generated",
    "headrace_engine_restarts": "engine processes that died and were replaced",
    "headrace_poison_requests": "requests that killed the engine twice",
    "headrace_kv_blocks_free": "KV blocks that are free",
    "headrace_kv_blocks": "usable KV blocks",
    "headrace_unfinished_requests": "HTTP requests that are not done",
}
