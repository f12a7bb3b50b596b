"""The device side of sampling: logits and a SamplingBatch to token ids and log probabilities, over ops only."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import PluginError
from ..ops import OpTable
from ..stages import Array, FloatArray, SamplingBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What was sampled, on the device. logprobs: (chosen, ranks, top ids, top values) as ops.logprobs gives."""

    token_ids: Array  # [num_samples] int32
    logprobs: tuple[Array, Array, Array, Array] | None = None


def sample_step(ops: OpTable, logits: Array, batch: SamplingBatch) -> Sampled:
    """Sample one token for each row of the batch.

    logits: [num_logits, vocab_size] float32. Order: allowed tokens, logit bias with min_tokens and bad words,
    penalties, logits processors, temperature, min_p, top_k, top_p, sample. Log probabilities are those of the
    logits before all of that. Raises PluginError if a logits processor fails.
    """
    batch = batch.arrived()
    if batch.rows is not None:
        logits = ops.gather(logits, batch.rows)
    raw = logits
    if batch.allow_mask is not None:
        logits = ops.apply_token_mask(logits, batch.allow_mask)
    if batch.bias_rows is not None:
        logits = ops.add_logit_bias(logits, batch.bias_rows, batch.bias_tokens, batch.bias_values)
    if batch.penalty_rows is not None:
        logits = ops.apply_penalties(
            logits,
            batch.penalty_rows,
            batch.penalty_tokens,
            batch.penalty_counts,
            batch.repetition,
            batch.frequency,
            batch.presence,
        )
    if batch.processors:
        logits = _run_processors(ops, logits, batch)
    token_ids = ops.sample(
        logits, batch.seeds, batch.positions, batch.temperature, batch.top_k, batch.top_p, batch.min_p
    )
    if batch.num_logprobs < 0:
        return Sampled(token_ids=token_ids)
    return Sampled(token_ids=token_ids, logprobs=ops.logprobs(raw, token_ids, num_logprobs=batch.num_logprobs))


def _run_processors(ops: OpTable, logits: Array, batch: SamplingBatch) -> Array:
    """Processors run on the host, so all logits go there and back; only requests that ask for them pay."""
    host = ops.to_host(logits).copy()
    for row, process in batch.processors:
        host[row] = run_processor(process, host[row].copy())
    return ops.to_device(host)


def run_processor(process: Callable[[Any], Any], logits: FloatArray) -> FloatArray:
    """What a logits processor makes of one row, [vocab_size]. Raises PluginError for another shape."""
    edited: FloatArray = process(logits)
    if getattr(edited, "shape", None) != logits.shape:
        raise PluginError(
            f"a logits processor must return an array of shape {logits.shape}, "
            f"got {getattr(edited, 'shape', type(edited).__name__)}"
        )
    return edited
