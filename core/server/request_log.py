"""One log line and the metrics of every request that is done."""

import logging
from collections.abc import Mapping
from typing import Any

from .api_errors import ClientGone
from .generation import Generation
from .metrics import Metrics
from .protocol.common import Timings

logger = logging.getLogger("headrace.requests")


def timings(generation: Generation) -> Timings:
    """Where the request's time went so far."""
    arrival_s, first_s, done_s = generation.arrival_s, generation.first_token_s, generation.done_s
    result = Timings()
    if generation.scheduled_s is not None:
        result.queue_s = max(0.0, generation.scheduled_s - arrival_s)
    if first_s is not None:
        result.ttft_s = first_s - arrival_s
    if done_s is not None:
        result.e2e_s = done_s - arrival_s
    if first_s is not None and done_s is not None:
        count = generation.num_output_tokens - len(generation.completions)
        decode_s = done_s - first_s
        if count > 0 and decode_s > 0:
            result.itl_s = decode_s * len(generation.completions) / count
            result.tokens_per_s = count / decode_s
    return result


def log_finished(generation: Generation, metrics: Metrics) -> Mapping[int, str]:
    """Count and log a request that is done; why each of its completions ended."""
    reasons = _reasons(generation)
    for reason in reasons.values():
        metrics.finished[reason] += 1
    times = timings(generation)
    done_s = generation.done_s or 0.0
    metrics.e2e_s.observe(done_s - generation.arrival_s)
    metrics.output_len.observe(generation.num_output_tokens)
    metrics.max_output_len.observe(max((len(c.output_token_ids) for c in generation.completions), default=0))
    if generation.scheduled_s is not None:
        metrics.queue_s.observe(times.queue_s or 0.0)
        metrics.inference_s.observe(done_s - generation.scheduled_s)
        metrics.prompt_tokens += generation.num_prompt_tokens
        metrics.prompt_len.observe(generation.num_prompt_tokens)
    if generation.first_token_s is not None:
        metrics.decode_s.observe(done_s - generation.first_token_s)
        if generation.scheduled_s is not None:
            metrics.prefill_s.observe(max(0.0, generation.first_token_s - generation.scheduled_s))
        if times.itl_s is not None:
            metrics.tpot_s.observe(times.itl_s)
    fields: dict[str, Any] = {
        "request_id": generation.id,
        "reason": _reason(generation, reasons),
        "prompt_tokens": generation.num_prompt_tokens,
        "cached_tokens": generation.num_cached_tokens,
        "output_tokens": generation.num_output_tokens,
    }
    if generation.key:
        fields["user"] = generation.key
    for name in ("queue_s", "ttft_s", "itl_s", "e2e_s"):
        value = getattr(times, name)
        if value is not None:
            fields[name] = round(value, 6)
    logger.info("finished", extra={"fields": fields})
    return reasons


def _reasons(generation: Generation) -> Mapping[int, str]:
    cut = "abort" if isinstance(generation.failure, ClientGone) else "error"
    return {c.index: generation.finish_reasons.get(c.index, cut) for c in generation.completions}


def _reason(generation: Generation, reasons: Mapping[int, str]) -> str:
    if isinstance(generation.failure, ClientGone):
        return "aborted by client"
    if generation.failure is not None:
        return f"error: {generation.failure.message}"
    return ",".join(dict.fromkeys(reasons.values()))
