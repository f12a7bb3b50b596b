"""One step on a device, written once over ops: forward pass, logits, log probabilities, sampled tokens.

A runner calls this eagerly, captures it as a graph, traces it with a compiler or records it as a program.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..models.decoder import compute_logits, decoder
from ..models.encoder import encoder
from ..models.encoder_decoder import encode
from ..models.pooler import pool
from ..models.spec import ModelSpec
from ..models.vision import encode_images
from ..ops import OpTable
from ..sampling.sampler import Sampled, sample_step
from ..stages import Array, EncoderBatch, ForwardBatch, KVCaches, PoolingBatch, PromptLogprobsBatch, SamplingBatch

PROMPT_ROWS = 256
"""Rows of logits held at a time for prompt log probabilities: [rows, vocab_size] float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepArrays:
    """What a step leaves on the device. A device without mutation gives new caches and last tokens."""

    hidden_states: Array  # [num_tokens, hidden_size]
    sampled: Sampled | None
    pooled: Array | None  # float32 [num_pooled, n]
    kv: KVCaches
    last_tokens: Array  # [max_num_seqs] int32


def run_step(
    ops: OpTable,
    spec: ModelSpec,
    params: Mapping[str, Array],
    kv: KVCaches,
    last_tokens: Array,
    batch: ForwardBatch,
    sampling: SamplingBatch | None,
    pooling: PoolingBatch | None = None,
    encoder_inputs: EncoderBatch | None = None,
) -> StepArrays:
    """Run the model over `batch`; sample where `sampling` asks, make vectors where `pooling` does.

    encoder_inputs: what the encoder of an encoder-decoder model, or that of images, reads before the batch.

    All arrays are on the device.
    """
    if encoder_inputs is not None:
        kv = (encode if spec.vision is None else encode_images)(ops, spec, params, kv, encoder_inputs)
    if spec.kind == "encoder":
        hidden_states = encoder(ops, spec, params, batch)
    else:
        hidden_states, kv = decoder(ops, spec, params, kv, batch)
    sampled = None
    if sampling is not None:
        logits = compute_logits(ops, spec, params, ops.gather(hidden_states, batch.logits_indices))
        sampled, last_tokens = sample_and_remember(ops, logits, last_tokens, sampling)
    pooled = None if pooling is None else pool(ops, spec, params, hidden_states, pooling)
    return StepArrays(hidden_states=hidden_states, sampled=sampled, pooled=pooled, kv=kv, last_tokens=last_tokens)


def sample_and_remember(
    ops: OpTable, logits: Array, last_tokens: Array, sampling: SamplingBatch
) -> tuple[Sampled, Array]:
    """The second half of a step: sample, and keep what each slot sampled for steps that are already on their way.

    logits: float32 [num_logits, vocab_size]. Returns what was sampled and last_tokens [max_num_seqs] int32.
    """
    sampled = sample_step(ops, logits, sampling)
    return sampled, ops.remember_tokens(last_tokens, sampling.slots, sampled.token_ids)


def prompt_pieces(batch: PromptLogprobsBatch, num_rows: int = PROMPT_ROWS) -> Iterator[tuple[Array, Array]]:
    """(rows, targets) of a batch, on the host or on the device, at most `num_rows` at a time."""
    for start in range(0, len(batch.rows), num_rows):
        yield batch.rows[start : start + num_rows], batch.targets[start : start + num_rows]


def prompt_logprobs(
    ops: OpTable,
    spec: ModelSpec,
    params: Mapping[str, Array],
    hidden_states: Array,
    rows: Array,
    targets: Array,
    num_logprobs: int,
) -> tuple[Array, Array, Array, Array]:
    """Log probabilities of `targets` [n] given the hidden states of tokens `rows` [n]; see ops.logprobs."""
    logits = compute_logits(ops, spec, params, ops.gather(hidden_states, rows))
    return ops.logprobs(logits, targets, num_logprobs=num_logprobs)
