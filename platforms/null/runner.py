"""A runner whose only arithmetic is a checksum of the tokens behind each position, kept in the KV slots.

A sampled token depends on every token before it through the block tables: a wrong block, a wrong slot or a
stale prefix changes the output, so the null platform proves the scheduler's bookkeeping while it measures it.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headrace.core.errors import OutOfMemory
from headrace.core.kv.groups import KVGroup, cross_group
from headrace.core.models.heads import vector_size
from headrace.core.platform import Device, KVPlan, Memory, Runner, RunnerConfig
from headrace.core.runner.done import Done
from headrace.core.sampling.params import GREEDY_EPSILON
from headrace.core.stages import (
    EncoderBatch,
    ForwardBatch,
    IntArray,
    LogprobArrays,
    SamplingBatch,
    StepInput,
    StepOutput,
)
from headrace.core.units import format_bytes
from headrace.core.weights.source import ParamSource

Hashes = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.int64]
_MULTIPLIERS = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFT = np.uint64(29)


class NullRunner(Runner):
    """Tokens without a model. Invariant: checksums[g][slot] sums the hashes of all tokens up to that slot's.

    A row with a temperature above 0 depends on its seed too; masks and penalties are taken and ignored.
    """

    def __init__(self, config: RunnerConfig, device: Device) -> None:
        self.config = config
        self._device = device
        self._checksums: list[Hashes] = []
        self._last_tokens: IntArray = np.zeros(config.max_num_seqs, np.int32)

    def load(self, params: ParamSource) -> None:
        """Read nothing."""

    def load_adapter(self, number: int, params: ParamSource) -> None:
        """Read nothing."""

    def kv_plan(self) -> KVPlan:
        """What the model's KV blocks would cost, so that pools come out as on a real device."""
        return KVPlan(block_size=self.config.block_size, block_bytes=self.config.block_bytes())

    def kv_init(self, num_blocks: Sequence[int]) -> None:
        """Allocate one checksum for each slot. Raises OutOfMemory."""
        size = self.config.block_size
        slots = [group.num_slots(n, size) for group, n in zip(self.config.groups, num_blocks, strict=True)]
        try:
            self._checksums = [np.zeros(count, np.uint64) for count in slots]
        except (MemoryError, ValueError) as error:
            raise OutOfMemory(f"no memory for {format_bytes(8 * sum(slots))} of checksums") from error

    def warmup(self) -> None:
        """Nothing to compile."""

    def step(self, batch: StepInput) -> "Done":
        """Compute the checksums of the step's positions and a token for each row that samples."""
        if batch.encoder is not None:
            self._encode(batch.encoder)
        state = self._forward(batch.forward)
        output = StepOutput(token_ids=np.empty(0, np.int32))
        if batch.sampling is not None:
            output = self._sample(state[batch.forward.logits_indices], batch.sampling)
        if batch.prompt_logprobs is not None:
            asked = batch.prompt_logprobs
            prompt = self._uniform(np.asarray(asked.targets, np.int32), asked.num_logprobs)
            output = StepOutput(token_ids=output.token_ids, logprobs=output.logprobs, prompt_logprobs=prompt)
        if batch.pooling is not None:
            size = vector_size(self.config.spec)
            pooled = np.zeros((len(batch.pooling.starts), size), np.float32)
            output = StepOutput(token_ids=output.token_ids, pooled=pooled)
        return Done(output)

    def memory(self) -> Memory:
        """The machine's memory."""
        return self._device.memory()

    def close(self) -> None:
        """Drop the checksums."""
        self._checksums = []

    def _forward(self, batch: ForwardBatch) -> Hashes:
        """The state after each token, uint64 [num_tokens]: the same in every KV group if all blocks are right."""
        token_ids = batch.input_ids
        if batch.token_slots is not None:
            recalled = self._last_tokens[batch.token_slots]
            token_ids = np.where(token_ids < 0, recalled, token_ids)
        positions = np.asarray(batch.positions, np.int64)
        starts = np.asarray(batch.query_start_loc, np.int64)
        counts = np.diff(starts)
        running = np.cumsum(_mix(_mix(token_ids.astype(np.uint64)) + positions.astype(np.uint64)))
        before = np.concatenate([np.zeros(1, np.uint64), running])[starts[:-1]]
        used = np.flatnonzero(counts)
        first = positions[starts[:-1][used]]
        behind = np.zeros(len(counts), np.uint64)
        states: list[Hashes] = []
        for group, checksums, table, slots in zip(
            self.config.groups, self._checksums, batch.block_tables, batch.slot_mappings, strict=True
        ):
            if group.kind == "cross":
                assert batch.encoder_lens is not None
                last = np.asarray(batch.encoder_lens, np.int64) - 1
                block_ids = np.asarray(table)[np.arange(len(last)), last // self.config.block_size].astype(np.int64)
                found = checksums[block_ids * self.config.block_size + last % self.config.block_size]
                states[0] = states[0] + np.repeat(found, counts)
                continue
            if len(checksums):
                behind[used] = self._behind(group, checksums, np.asarray(table)[used], first)
            state = running + np.repeat(behind - before, counts)
            kept = slots >= 0
            checksums[slots[kept]] = state[kept]
            states.append(state)
        if not states:  # an encoder keeps nothing
            return running
        result = states[0]
        for state in states[1:]:
            result = result + (state - states[0]) * _MULTIPLIERS[0]
        return result

    def _encode(self, batch: EncoderBatch) -> None:
        """Leave the checksum of each input in the slots of the Cross group: all of it behind its last token."""
        group = cross_group(self.config.groups)
        if batch.features is None:
            values = _mix(np.asarray(batch.input_ids).astype(np.uint64))
        else:
            words = batch.features.view(np.uint32).sum(1, dtype=np.uint64)
            num_tokens = len(batch.positions)
            values = np.add.reduceat(words, np.arange(num_tokens) * len(words) // num_tokens)
        running = np.cumsum(_mix(values + np.asarray(batch.positions).astype(np.uint64)))
        starts = np.asarray(batch.query_start_loc, np.int64)
        before = np.concatenate([np.zeros(1, np.uint64), running])[starts[:-1]]
        self._checksums[group][batch.slot_mapping] = running - np.repeat(before, np.diff(starts))

    def _behind(self, group: KVGroup, checksums: Hashes, table: IntArray, first: Indices) -> Hashes:
        """The checksum that stands in the slot before each row's first position; 0 at the beginning."""
        previous = np.maximum(first - 1, 0)
        blocks, offsets = np.divmod(previous, self.config.block_size)
        if group.kind == "state":
            slots = np.maximum(table[:, 0], 0).astype(np.int64)
        else:
            block_ids = np.maximum(table[np.arange(len(table)), blocks], 0)
            slots = block_ids.astype(np.int64) * self.config.block_size + offsets
        return np.where(first > 0, checksums[slots], np.uint64(0))

    def _sample(self, logits: Hashes, batch: SamplingBatch) -> StepOutput:
        hashes = logits if batch.rows is None else logits[batch.rows]
        if batch.temperature is not None:
            seeds = _mix(np.asarray(batch.seeds).astype(np.uint64))
            hashes = hashes + np.where(batch.temperature >= GREEDY_EPSILON, seeds, np.uint64(0))
        hashes = _mix(hashes)
        token_ids = (hashes % np.uint64(self.config.spec.vocab_size)).astype(np.int32)
        self._last_tokens[batch.slots] = token_ids
        logprobs = self._uniform(token_ids, batch.num_logprobs) if batch.num_logprobs >= 0 else None
        return StepOutput(token_ids=token_ids, logprobs=logprobs)

    def _uniform(self, token_ids: IntArray, num_logprobs: int) -> LogprobArrays:
        """The log probabilities of a uniform distribution: every token has rank 1."""
        rows, vocab_size = len(token_ids), self.config.spec.vocab_size
        value = np.float32(-np.log(vocab_size))
        top = (token_ids[:, None] + np.arange(num_logprobs, dtype=np.int32)) % vocab_size
        return LogprobArrays(
            chosen=np.full(rows, value, np.float32),
            ranks=np.ones(rows, np.int32),
            top_ids=top.astype(np.int32),
            top_values=np.full((rows, num_logprobs), value, np.float32),
        )


def _mix(values: Hashes) -> Hashes:
    """A bijection of 64-bit numbers in which every bit of the input reaches most bits of the output."""
    values = (values ^ (values >> _SHIFT)) * _MULTIPLIERS[1]
    values = (values ^ (values >> _SHIFT)) * _MULTIPLIERS[2]
    return values ^ (values >> _SHIFT)
