"""The host side of a worker: from a Plan to the arrays of one step, and from its output to a StepResult.

Keeps, per slot, the token ids, block tables and positions that a step's arrays are cut from, so that building a
batch is a few numpy operations whatever the number of requests.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ..errors import CapacityError
from ..kv.groups import KVGroup, cross_group
from ..models.rope import ONE_ROW, RopeRows
from ..models.spec import Pooling
from ..platform import Pending, Runner, RunnerConfig
from ..sampling.state import SamplingState
from ..sampling.validate import ProcessorFactories
from ..stages import (
    EncoderBatch,
    EncoderInput,
    ForwardBatch,
    IntArray,
    KeptImage,
    LogprobArrays,
    NewRequest,
    Plan,
    PoolingBatch,
    PromptLogprobsBatch,
    Row,
    SamplingBatch,
    StepInput,
    StepOutput,
    StepResult,
    TokenLogprobs,
)
from ..structured.compiler import GrammarCache
from .crossed import CrossPlaces, CrossRows, crossed_batch
from .drafts import Drafter, Drafts, Samples
from .encoder import encoder_batch
from .images import ImagePlaces, image_batch

UNKNOWN = -1
"""A token that a step in flight will sample."""
MAX_FORCED_TOKENS = 256
"""Tokens that a grammar may add to a request behind one step; its next step computes them all."""


class ModelRunner:
    """Slots on the host, a Runner on the device.

    Invariant: for a slot in use, token_ids[slot, :num_tokens[slot]] are known or UNKNOWN (sampled by a step in
    flight), and block_tables[g][slot, :num_blocks[g][slot]] are the blocks that the scheduler told.
    """

    def __init__(
        self,
        runner: Runner,
        config: RunnerConfig,
        sampling: SamplingState,
        *,
        rope_rows: RopeRows = ONE_ROW,
        drafter: Drafter | None = None,
    ) -> None:
        """rope_rows: which row of the rope tables a prompt uses. drafter: guesses config.num_draft_tokens at most."""
        self.runner = runner
        self.config = config
        self._sampling = sampling
        self._rope_choice = rope_rows
        slots, length = config.max_num_seqs, config.max_model_len + 1
        blocks = -(-length // config.block_size) + 1
        self._token_ids = np.full((slots, length), UNKNOWN, np.int32)
        self._drafts = Drafts(drafter, config.num_draft_tokens, self._token_ids)
        self._num_computed = np.zeros(slots, np.int64)
        self._epochs = np.full(slots, -1, np.int64)
        self._num_prompt_tokens = np.zeros(slots, np.int64)
        self._prompt_logprobs: dict[int, int] = {}
        self._pooling: dict[int, Pooling] = {}
        has_types = config.spec.num_token_types > 0
        self._token_types = np.zeros((slots, length), np.int32) if has_types else None
        self._rope_rows = np.zeros(slots, np.int32)
        self._num_adapters = 0 if config.spec.adapters is None else config.spec.adapters.num_adapters
        self._adapters = np.full(slots, self._num_adapters, np.int32)
        widths = [-(-group.num_tokens // config.block_size) or blocks for group in config.groups]
        self._block_tables = [np.full((slots, width), -1, np.int32) for width in widths]
        self._encoder_lens = np.zeros(slots, np.int32)
        self._to_encode: dict[int, EncoderInput] = {}
        self._num_blocks = [[0] * slots for _ in config.groups]
        self._images = ImagePlaces(config.spec, max_num_seqs=slots, length=length, block_size=config.block_size)
        self._images_to_encode: list[KeptImage] = []
        self._crossed = CrossPlaces(slots)

    def submit(self, plan: Plan) -> "RunningStep":
        """Begin a step. Raises OutOfMemory or DeviceLost."""
        for new in plan.new:
            self._admit(new)
        batch, samples, prompts, pooled = self._build(plan.rows)
        if batch.sampling is not None and not self.runner.takes_late_masks:
            batch = replace(batch, sampling=batch.sampling.arrived())
        return RunningStep(self, plan, self.runner.step(batch), samples, prompts, pooled)

    def reset(self) -> None:
        """Forget all requests."""
        self._epochs[:] = -1
        self._prompt_logprobs.clear()
        self._pooling.clear()
        self._to_encode.clear()
        self._images_to_encode.clear()

    def close(self) -> None:
        """Free the device; may be called twice."""
        self._sampling.close()
        self.runner.close()

    # ---- building a step ----------------------------------------------------------------------------------
    def _admit(self, new: NewRequest) -> None:
        slot, tokens = new.slot, new.token_ids
        self._token_ids[slot, : len(tokens)] = tokens
        self._token_ids[slot, len(tokens) :] = UNKNOWN
        self._num_computed[slot] = new.num_computed_tokens
        self._epochs[slot] = new.epoch
        self._num_prompt_tokens[slot] = new.num_prompt_tokens
        self._rope_rows[slot] = self._rope_choice.row(new.num_prompt_tokens)
        self._adapters[slot] = new.adapter if new.adapter >= 0 else self._num_adapters
        for counts in self._num_blocks:
            counts[slot] = 0
        wanted = new.sampling_params.prompt_logprobs
        if wanted is None or len(tokens) > new.num_prompt_tokens:
            self._prompt_logprobs.pop(slot, None)
        else:
            self._prompt_logprobs[slot] = wanted
        self._encoder_lens[slot] = new.num_encoder_tokens
        if new.encoder is not None:
            self._to_encode[slot] = new.encoder
        self._images.admit(new)
        self._crossed.admit(slot, new.cross_spans)
        self._images_to_encode += [kept for kept in new.images if kept.must_encode]
        self._pooling.pop(slot, None)
        if new.pooling is not None:
            self._pooling[slot] = new.pooling
        if self._token_types is not None:
            self._token_types[slot] = 0
            self._token_types[slot, : len(new.token_types)] = new.token_types
        self._sampling.add(slot, new)

    def _build(self, rows: Sequence[Row]) -> "tuple[StepInput, Samples, list[PromptRange], list[int]]":
        num_reqs = len(rows)
        slots = np.fromiter((row.slot for row in rows), np.int64, num_reqs)
        counts = np.fromiter((row.num_tokens for row in rows), np.int64, num_reqs)
        for row in rows:
            if row.start is not None:
                self._num_computed[row.slot] = row.start
            for group, new_blocks in enumerate(row.new_blocks):
                if new_blocks:
                    self._append_blocks(group, row.slot, new_blocks)
        starts = self._num_computed[slots]
        ends = starts + counts
        self._num_computed[slots] = ends
        self._drafts.place(rows, ends)
        query_start_loc = np.zeros(num_reqs + 1, np.int32)
        counts.cumsum(out=query_start_loc[1:])
        num_tokens = int(query_start_loc[-1])
        if num_tokens == num_reqs:
            token_slots, positions = slots, starts
        else:
            token_slots = np.repeat(slots, counts)
            positions = np.arange(num_tokens) + np.repeat(starts - query_start_loc[:-1], counts)
        block_index, offset = np.divmod(positions, self.config.block_size)
        max_seq_len = int(ends.max())
        width = -(-max_seq_len // self.config.block_size)
        input_ids = self._token_ids[token_slots, positions]
        samples, logits_indices, sampling = self._sampling_batch(rows, ends, query_start_loc)
        prompts, prompt_logprobs = self._prompt_logprobs_batch(rows, starts, ends, query_start_loc)
        pooled, pooling = self._pooling_batch(rows, ends, query_start_loc)
        encoder_lens = self._encoder_lens[slots] if self.config.spec.encoder is not None else None
        token_types = self._token_types[token_slots, positions] if self._token_types is not None else None
        has_adapters = self._num_adapters > 0 and bool((self._adapters[slots] < self._num_adapters).any())
        crossed = self._crossed.split(slots, starts, ends)
        if crossed is not None:  # the device sees each part of a row as a row
            slots, starts, ends = slots[crossed.row], crossed.starts, crossed.ends
            encoder_lens, token_types = crossed.lens(), crossed.token_kinds()
            query_start_loc = np.concatenate([[0], np.cumsum(ends - starts)]).astype(np.int32)
            counts = ends - starts
        forward = ForwardBatch(
            **self._images.batch(token_slots, positions, input_ids),
            positions=positions.astype(np.int32),
            query_start_loc=query_start_loc,
            seq_lens=ends.astype(np.int32),
            block_tables=[
                self._table_rows(group, table, slots, starts, width, crossed)
                for group, table in zip(self.config.groups, self._block_tables, strict=True)
            ],
            slot_mappings=[
                self._slots(group, table[token_slots, block_index], offset, rows, query_start_loc, positions)
                if group.kind != "cross"
                else np.empty(0, np.int32)  # what encoder_batch says is written there
                for group, table in zip(self.config.groups, self._block_tables, strict=True)
            ],
            logits_indices=logits_indices,
            token_slots=token_slots.astype(np.int32) if (input_ids == UNKNOWN).any() else None,
            token_types=token_types,
            rope_rows=self._rope_rows[token_slots] if self._rope_choice.num_rows > 1 else None,
            encoder_lens=encoder_lens,
            adapters=self._adapters[token_slots] if has_adapters else None,
            max_query_len=int(counts.max()),
            max_seq_len=max_seq_len,
            max_encoder_len=0 if encoder_lens is None else int(encoder_lens.max()),
        )
        batch = StepInput(
            forward=forward,
            sampling=sampling,
            prompt_logprobs=prompt_logprobs,
            pooling=pooling,
            encoder=self._encoder_batch(),
        )
        return batch, samples, prompts, pooled

    def _encoder_batch(self) -> EncoderBatch | None:
        """The inputs that the encoder reads in this step."""
        if self._images_to_encode:
            images, vision = list(self._images_to_encode), self.config.spec.vision
            assert vision is not None, "only models with an encoder of images have images"
            self._images_to_encode.clear()
            return image_batch(vision, images, block_size=self.config.block_size, dtype=self.config.dtype)
        if not self._to_encode:
            return None
        spec, vision = self.config.spec.encoder, self.config.spec.vision
        slots, inputs = zip(*self._to_encode.items(), strict=True)
        table = self._block_tables[cross_group(self.config.groups)][list(slots)]
        self._to_encode.clear()
        if vision is not None:
            return crossed_batch(vision, inputs, table, block_size=self.config.block_size, dtype=self.config.dtype)
        assert spec is not None, "only models with an encoder have another input"
        return encoder_batch(spec, inputs, table, block_size=self.config.block_size, dtype=self.config.dtype)

    def _table_rows(
        self,
        group: KVGroup,
        table: IntArray,
        slots: npt.NDArray[np.int64],
        starts: npt.NDArray[np.int64],
        width: int,
        crossed: CrossRows | None,
    ) -> IntArray:
        """What the batch has for a block table of a group, [num_reqs, n]."""
        if group.kind == "state":
            return self._states_before(group, table, slots, starts)
        if group.kind == "cross" and crossed is not None:
            return crossed.table(table[slots], self.config.block_size)
        if group.kind == "cross":
            width = -(-int(self._encoder_lens[slots].max()) // self.config.block_size)
        return table[slots, :width]

    def _slots(
        self,
        group: KVGroup,
        blocks: IntArray,
        offset: npt.NDArray[np.int64],
        rows: Sequence[Row],
        query_start_loc: IntArray,
        positions: npt.NDArray[np.int64],
    ) -> IntArray:
        """Where each token's KV, or state, goes, [num_tokens]. blocks: of each token's position."""
        if group.kind == "state":
            return self._states_kept(group, blocks, rows, query_start_loc, positions)
        return (blocks * self.config.block_size + offset).astype(np.int32)

    def _states_before(
        self, group: KVGroup, table: IntArray, slots: npt.NDArray[np.int64], starts: npt.NDArray[np.int64]
    ) -> IntArray:
        """The slot of the state before each row, [num_reqs, 1]; -1 where nothing came before."""
        before = starts - 1
        blocks = table[slots, np.maximum(before, 0) // self.config.block_size]
        found = np.where(starts > 0, blocks * group.num_lanes + before % group.num_lanes, -1)
        return found.astype(np.int32)[:, None]

    def _states_kept(
        self,
        group: KVGroup,
        blocks: IntArray,
        rows: Sequence[Row],
        query_start_loc: IntArray,
        positions: npt.NDArray[np.int64],
    ) -> IntArray:
        """The slot for the state after each token: at the end of a row, after drafts and at a block's end if the
        group has a block there; -1 elsewhere. blocks: [num_tokens], of each token's position."""
        kept = (positions + 1) % self.config.block_size == 0
        kept[query_start_loc[1:] - 1] = True
        for row, end in zip(rows, query_start_loc[1:].tolist(), strict=True):
            if row.num_draft_tokens:
                kept[end - 1 - row.num_draft_tokens : end] = True
        lanes = group.num_lanes
        return np.where(kept & (blocks > 0), blocks * lanes + positions % lanes, -1).astype(np.int32)

    def _append_blocks(self, group: int, slot: int, new_blocks: Sequence[int]) -> None:
        start = self._num_blocks[group][slot]
        self._block_tables[group][slot, start : start + len(new_blocks)] = new_blocks
        self._num_blocks[group][slot] = start + len(new_blocks)

    def _sampling_batch(
        self, rows: Sequence[Row], ends: npt.NDArray[np.int64], query_start_loc: IntArray
    ) -> "tuple[Samples, IntArray, SamplingBatch | None]":
        """What is sampled, the tokens of this step whose logits that takes, and what the sampler needs."""
        has_drafts = any(row.num_draft_tokens for row in rows)
        if has_drafts:
            wanted = [
                (i, back) for i, row in enumerate(rows) if row.sample for back in range(row.num_draft_tokens, -1, -1)
            ]
            indices = [i for i, _ in wanted]
            backs = np.array([back for _, back in wanted], np.int64)
        else:
            indices = [i for i, row in enumerate(rows) if row.sample]
            backs = np.zeros(len(indices), np.int64)
        slots = np.array([rows[i].slot for i in indices], np.int64)
        slot_list = slots.tolist()
        samples = Samples(
            rows=indices,
            slots=slots,
            positions=ends[indices] - backs if indices else backs,
            epochs=np.array([rows[i].epoch for i in indices], np.int64),
            num_logprobs=[self._sampling.num_logprobs(slot) for slot in slot_list]
            if self._sampling.wants_logprobs
            else [],
            has_drafts=has_drafts,
        )
        if not indices:
            return samples, np.empty(0, np.int32), None
        last = query_start_loc[1:][indices] - 1
        triples = list(zip(range(len(indices)), slot_list, samples.positions.tolist(), strict=True))
        return samples, (last - backs).astype(np.int32), self._sampling.build(triples)

    def _prompt_logprobs_batch(
        self,
        rows: Sequence[Row],
        starts: npt.NDArray[np.int64],
        ends: npt.NDArray[np.int64],
        query_start_loc: IntArray,
    ) -> "tuple[list[PromptRange], PromptLogprobsBatch | None]":
        if not self._prompt_logprobs:
            return [], None
        ranges: list[PromptRange] = []
        token_rows: list[npt.NDArray[np.int64]] = []
        targets: list[IntArray] = []
        for i, row in enumerate(rows):
            if row.slot not in self._prompt_logprobs:
                continue
            start, last = int(starts[i]), int(self._num_prompt_tokens[row.slot]) - 1
            end = min(int(ends[i]), last)
            if start < end:
                row_targets = self._token_ids[row.slot, start + 1 : end + 1]
                ranges.append((i, start + 1, row_targets.tolist(), self._prompt_logprobs[row.slot]))
                token_rows.append(np.arange(end - start) + query_start_loc[i])
                targets.append(row_targets)
            if int(ends[i]) >= last:
                del self._prompt_logprobs[row.slot]
        if not ranges:
            return [], None
        batch = PromptLogprobsBatch(
            rows=np.concatenate(token_rows).astype(np.int32),
            targets=np.concatenate(targets),
            num_logprobs=max(wanted for _, _, _, wanted in ranges),
        )
        return ranges, batch

    def _pooling_batch(
        self, rows: Sequence[Row], ends: npt.NDArray[np.int64], query_start_loc: IntArray
    ) -> tuple[list[int], PoolingBatch | None]:
        """The rows that end a prompt whose vector was asked for, and which of their tokens make it."""
        if not self._pooling:
            return [], None
        done = [
            i
            for i, row in enumerate(rows)
            if row.slot in self._pooling and ends[i] >= self._num_prompt_tokens[row.slot]
        ]
        if not done:
            return [], None
        first, behind = query_start_loc[:-1][done], query_start_loc[1:][done]
        kinds = [self._pooling[rows[i].slot] for i in done]
        is_first, is_last = (np.array([kind == wanted for kind in kinds]) for wanted in ("cls", "last"))
        return done, PoolingBatch(
            starts=np.where(is_last, behind - 1, first), ends=np.where(is_first, first + 1, behind)
        )

    # ---- reading a step's output --------------------------------------------------------------------------
    def finish(
        self,
        plan: Plan,
        output: StepOutput,
        samples: "Samples",
        prompts: "Sequence[PromptRange]",
        pooled: Sequence[int] = (),
    ) -> StepResult:
        """Remember sampled tokens and sort the output by row."""
        if samples.has_drafts:
            samples, output = self._drafts.accept(samples, output)
        tokens: list[int] = output.token_ids.tolist()
        if len(samples.rows) == len(plan.rows) and not samples.has_drafts:
            token_ids = [[token] for token in tokens]
        else:
            token_ids = [[] for _ in plan.rows]
            for i, token in zip(samples.rows, tokens, strict=True):
                token_ids[i].append(token)
        is_alive = self._epochs[samples.slots] == samples.epochs
        self._remember(samples, output.token_ids, is_alive)
        logprobs: dict[int, list[TokenLogprobs]] = {}
        if output.logprobs is not None:
            for n, (i, token) in enumerate(zip(samples.rows, tokens, strict=True)):
                wanted = samples.num_logprobs[n]
                if wanted >= 0:
                    position = int(samples.positions[n])
                    entry = _token_logprobs(output.logprobs, n, token, wanted, position)
                    logprobs.setdefault(i, []).append(entry)
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        done = 0
        for i, first, targets, wanted in prompts:
            assert output.prompt_logprobs is not None
            prompt_logprobs[i] = [
                _token_logprobs(output.prompt_logprobs, done + k, target, wanted, first + k)
                for k, target in enumerate(targets)
            ]
            done += len(targets)
        has_grammars = self._sampling.has_grammars
        return StepResult(
            step=plan.step,
            token_ids=token_ids,
            forced=self._take_forced(samples) if has_grammars else {},
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            pooled={} if output.pooled is None else dict(zip(pooled, output.pooled, strict=True)),
            failed=self._failed(samples) if has_grammars else {},
            num_drafts=self._drafts.propose(samples, is_alive),
        )

    def _failed(self, samples: "Samples") -> dict[int, str]:
        """By row, why its request cannot go on; a row of a request that has lost its slot is nobody's any more."""
        return {
            i: failure
            for i, slot in zip(samples.rows, samples.slots.tolist(), strict=True)
            if (failure := self._sampling.failure(slot))
        }

    def _take_forced(self, samples: "Samples") -> dict[int, list[int]]:
        """By row, the tokens that grammars force behind the sampled ones; they are computed with the next step."""
        found: dict[int, list[int]] = {}
        for i, slot, position, epoch in zip(
            samples.rows, samples.slots.tolist(), samples.positions.tolist(), samples.epochs.tolist(), strict=True
        ):
            if self._epochs[slot] == epoch:
                forced = self._sampling.take_forced(
                    slot, min(MAX_FORCED_TOKENS, self.config.max_model_len - position - 1)
                )
                if forced:
                    self._token_ids[slot, position + 1 : position + 1 + len(forced)] = forced
                    found[i] = forced
        return found

    def _remember(self, samples: "Samples", token_ids: IntArray, is_alive: npt.NDArray[np.bool_]) -> None:
        """Store tokens of slots that still belong to the request that was sampled."""
        slots, positions = samples.slots, samples.positions
        if not is_alive.all():
            slots, positions, token_ids = slots[is_alive], positions[is_alive], token_ids[is_alive]
        self._token_ids[slots, positions] = token_ids
        self._sampling.append_each(slots.tolist(), token_ids.tolist())


PromptRange = tuple[int, int, list[int], int]
"""(row, position of the first target, the targets, most likely tokens wanted)"""


class RunningStep:
    """A step on the device and what is needed to read its output."""

    def __init__(
        self,
        owner: ModelRunner,
        plan: Plan,
        pending: Pending,
        samples: Samples,
        prompts: Sequence[PromptRange],
        pooled: Sequence[int],
    ) -> None:
        self._owner = owner
        self._plan = plan
        self._pending = pending
        self._samples = samples
        self._prompts = prompts
        self._pooled = pooled

    def ready(self) -> bool:
        """True if `result` would not wait."""
        return self._pending.ready()

    def result(self) -> StepResult:
        """Wait for the step; call once, in the order of submission."""
        output = self._pending.result()
        return self._owner.finish(self._plan, output, self._samples, self._prompts, self._pooled)


def build_model_runner(
    runner: Runner,
    config: RunnerConfig,
    processors: ProcessorFactories,
    *,
    grammars: GrammarCache | None = None,
    end_token_ids: Sequence[int] = (),
    rope_rows: RopeRows = ONE_ROW,
    drafter: Drafter | None = None,
) -> ModelRunner:
    """A ModelRunner with its sampling state. end_token_ids: tokens with which structured output ends.

    Raises CapacityError if the host has no room for the tables of so many requests.
    """
    try:
        sampling = SamplingState(
            vocab_size=config.spec.vocab_size,
            max_num_seqs=config.max_num_seqs,
            processors=processors,
            grammars=grammars,
            end_token_ids=end_token_ids,
        )
        return ModelRunner(runner, config, sampling, rope_rows=rope_rows, drafter=drafter)
    except MemoryError as error:
        raise CapacityError(
            f"the host has no memory for tables of {config.max_num_seqs} requests of {config.max_model_len} tokens",
            remedies=["a smaller --max-num-seqs", "a smaller --max-model-len"],
        ) from error


def _token_logprobs(arrays: LogprobArrays, row: int, token: int, wanted: int, position: int) -> TokenLogprobs:
    return TokenLogprobs(
        token_ids=[token, *arrays.top_ids[row, :wanted].tolist()],
        logprobs=[float(arrays.chosen[row]), *arrays.top_values[row, :wanted].tolist()],
        ranks=[int(arrays.ranks[row]), *range(1, wanted + 1)],
        position=position,
    )
