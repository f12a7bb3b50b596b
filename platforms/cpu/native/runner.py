"""The runner of the cpu platform: packed weights, native program, native sampling. Needs no torch."""

import logging
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from headrace.core.config import DTYPES
from headrace.core.errors import OutOfMemory
from headrace.core.kv.groups import KVGroup
from headrace.core.models.rope import NUM_AXES
from headrace.core.ops import Selection
from headrace.core.platform import KVPlan, Memory, PreparedOp, Runner, RunnerConfig
from headrace.core.runner.done import Done
from headrace.core.runner.images import image_step_bytes
from headrace.core.runner.step import prompt_pieces
from headrace.core.sampling.sampler import sample_step
from headrace.core.stages import (
    EncoderBatch,
    ForwardBatch,
    LogprobArrays,
    PoolingBatch,
    PromptLogprobsBatch,
    SamplingBatch,
    StepInput,
    StepOutput,
)
from headrace.core.units import format_bytes
from headrace.core.weights.source import HostTensor, LoadedParam, ParamSource
from headrace.kernels.cpu import _ops

from ..memory import HUGE_PAGE_BYTES, host_memory, huge_page_bytes
from .arena import max_rows_of, plan_arena
from .kv_pages import KVPages
from .ops import native_ops, native_selections, prepare_native_op
from .own_rows import own_bytes
from .parts import is_separable, part_name, separate
from .program import NativeProgram
from .sampling import Floats, Ints, recall_tokens, remember_tokens, sampling_ops
from .stacks import pack_stacks, readers_of, stacked_rows
from .trace import trace_cross, trace_encoder, trace_step
from .values import CacheRef, ParamRef, Rows, StateRef, Trace, UntraceableOp
from .weights import STORED_DTYPES, Layout, is_kept, layout_of, pack, vector, write

if TYPE_CHECKING:
    from .images import ImageEncoder

logger = logging.getLogger(__name__)


class NativeRunner(Runner):
    """One model in host memory. Owns packed weights, caches and the program over them."""

    takes_late_masks = True

    def __init__(self, config: RunnerConfig) -> None:
        """Traces the model. Raises UntraceableOp if it needs what has no native form."""
        self.config = config
        self._keep_blocks = config.engine.model.dtype == "auto"
        self.ops = native_ops(config.dtype, keep_blocks=self._keep_blocks)
        self._step_traces = [trace_step(config.spec, config.dtype, config.groups)]  # the second one with adapters
        if config.spec.adapters is not None:
            self._step_traces.append(trace_step(config.spec, config.dtype, config.groups, adapted=True))
        self._encoder_trace = _trace_other_input(config)
        most_tokens = max(config.max_num_batched_tokens, config.max_num_samples)
        self._max_rows = max_rows_of(most_tokens, config.max_num_samples)
        self._step_bytes = self._plan_step()
        self._stack_readers = readers_of(self._step_traces[-1])
        self._tensors: dict[str, Any] = {}
        self._segments = [
            segment for trace in (*self._step_traces, self._encoder_trace) if trace for segment in trace.segments
        ]
        self._in_torch = {
            operand.name for segment in self._segments for operand in segment.inputs if isinstance(operand, ParamRef)
        }
        if self._segments:
            count = Counter(segment.attrs["definition"] for segment in self._segments)
            names = ",".join(f"{op}:{n}" for op, n in sorted(count.items()))
            logger.warning("ops without a native form run in torch, where bits depend on the batch ops=%s", names)
        self._weights: dict[str, _ops.PackedWeight] = {}
        self._vectors: dict[str, npt.NDArray[np.float32]] = {}
        self._rounds_x: set[str] = set()
        self._parts: dict[str, Sequence[int]] = {}
        self._programs: list[NativeProgram] = []
        self._encoder: NativeProgram | None = None
        self._images: ImageEncoder | None = None
        self._pages: KVPages | None = None
        if config.spec.vision is not None:
            self._images = _image_encoder(config)
        self._sampling_ops = sampling_ops()
        self._last_tokens = np.zeros(config.max_num_seqs, np.int32)

    @property
    def op_selections(self) -> Sequence[Selection]:
        """Which ops have a native form."""
        return native_selections(with_images=self._images is not None)

    def prepare_op(self, op: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> PreparedOp:
        """Its record in a program of its own, built beforehand."""
        prepared = prepare_native_op(self.config.dtype, op, arguments, options)
        return prepared or super().prepare_op(op, arguments, options)

    def load(self, params: ParamSource) -> None:
        """Pack each parameter as it comes; GGUF blocks are kept if no dtype was asked for."""
        dequantized: set[str] = set()
        for loaded in params:
            name = loaded.param.name
            if self._images is not None and self._images.owns(name):
                self._images.load(loaded)
                continue
            if name in self._in_torch:
                from .segments import load_param

                self._tensors[name] = load_param(loaded, self.config.dtype)
            if loaded.param.kind == "stacked":
                dequantized |= self._load_stack(loaded)
                continue
            if loaded.param.kind not in ("linear", "embedding"):
                self._vectors[name] = vector(loaded)
                continue
            for part, tensors in self._parts_of(loaded):
                try:
                    weight, layout = pack(tensors, self.config.dtype, keep_blocks=self._keep_blocks)
                except MemoryError as error:
                    raise OutOfMemory(f"this machine has no memory left for {name}") from error
                dequantized |= self._keep(part, weight, layout, tensors)
        if dequantized and self._keep_blocks:
            types = ",".join(sorted(dequantized))
            logger.warning("dequantized, which is slow: no kernels types=%s dtype=%s", types, self.config.dtype)

        self._check_pages()

    def load_adapter(self, number: int, params: ParamSource) -> None:
        """Write each matrix into its stack; no step is under way."""
        layout = layout_of(self.config.dtype)
        for loaded in params:
            [tensor] = loaded.tensors
            write(self._weights[loaded.param.name], layout, number * stacked_rows(tensor.shape[0]), tensor)

    def _load_stack(self, loaded: LoadedParam) -> set[str]:
        """Pack the forms that are read; block types that were dequantized."""
        param, found = loaded.param, set()
        ref = ParamRef(name=param.name, shape=param.shape, num_stacked=param.num_stacked)
        try:
            stacks = pack_stacks(
                ref,
                loaded.tensors,
                self._stack_readers.get(param.name, {}),
                self.config.dtype,
                keep_blocks=self._keep_blocks,
            )
        except MemoryError as error:
            raise OutOfMemory(f"this machine has no memory left for {param.name}") from error
        for name, (weight, layout) in stacks.items():
            found |= self._keep(name, weight, layout, loaded.tensors)
        return found

    def _keep(self, name: str, weight: _ops.PackedWeight, layout: Layout, tensors: Sequence[HostTensor]) -> set[str]:
        """Keep a packed weight; the block types that were dequantized for it."""
        self._weights[name] = weight
        if layout.rounds_x:
            self._rounds_x.add(name)
        return {tensor.dtype for tensor in tensors if tensor.is_blocked} if layout.format in DTYPES else set()

    def _check_pages(self) -> None:
        """Say which pages the weights lie in: small ones cost up to half of the memory's bandwidth."""
        total = sum(weight.num_bytes for weight in self._weights.values())
        given = huge_page_bytes()
        if given is None or total < 2 * HUGE_PAGE_BYTES:
            return
        text = f"given={format_bytes(given)} weights={format_bytes(total)}"
        if given < total // 2:
            logger.warning("weights lie in small pages, which is slow: the system gave few huge ones %s", text)
            logger.warning("to allow them: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled")
        else:
            logger.info("huge pages %s", text)

    def _parts_of(self, loaded: LoadedParam) -> list[tuple[str, Sequence[HostTensor]]]:
        """What is packed together, by name: all of a parameter, or each run of tensors of one dtype."""
        name = loaded.param.name
        runs = [list(run) for _, run in groupby(loaded.tensors, key=lambda tensor: tensor.dtype)]
        rows = [sum(tensor.shape[0] for tensor in run) for run in runs]
        has_blocks = self._keep_blocks and all(is_kept(tensor.dtype, self.config.dtype) for tensor in loaded.tensors)
        has_codes = all(tensor.scales is not None for tensor in loaded.tensors)
        if len(runs) == 1 or not ((has_blocks or has_codes) and self._is_separable(name, rows)):
            return [(name, loaded.tensors)]
        self._parts[name] = rows
        return [(part_name(name, index), run) for index, run in enumerate(runs)]

    def _is_separable(self, name: str, rows: Sequence[int]) -> bool:
        """True if the parts of a parameter can be products of their own; an encoder's are not separated."""
        if self._encoder_trace is not None and any(
            isinstance(operand, ParamRef) and operand.name == name
            for instruction in self._encoder_trace.instructions
            for operand in instruction.inputs
        ):
            return False
        return all(is_separable(trace, name, rows) for trace in self._step_traces)

    def kv_plan(self) -> KVPlan:
        """Bytes of one block, as the kernels lay it out."""
        size = self.config.block_size

        def block_bytes(group: KVGroup) -> int:
            if group.states:
                return group.block_bytes(size, self.config.dtype)
            return sum(_ops.kv_bytes(1, size, heads, dim, self._kv_dtype) for heads, dim in group.heads)

        return KVPlan(
            block_size=size,
            block_bytes=tuple(block_bytes(group) for group in self.config.groups),
            step_bytes=self._step_bytes,
        )

    def _plan_step(self) -> int:
        """Bytes of the arenas, and of the caches of a step's own rows."""
        max_requests, max_rows = self.config.max_num_seqs, self._max_rows
        total = image_step_bytes(self.config)
        for trace in self._step_traces:
            total += plan_arena(trace, max_rows).num_bytes + own_bytes(trace, max_rows["tokens"], max_requests)
        if self._encoder_trace is None:
            return total
        max_rows = self._max_encoder_rows()
        total += plan_arena(self._encoder_trace, max_rows).num_bytes
        return total + own_bytes(self._encoder_trace, max_rows["tokens"], max_requests)

    def _max_encoder_rows(self) -> Mapping[Rows, int]:
        """The encoder reads no more tokens than a step may have, or one input, and the frames of those."""
        spec = self.config.spec.encoder
        if spec is None:  # rows of images come in pieces
            return max_rows_of(self._max_rows["tokens"], self._max_rows["tokens"])
        max_tokens = max(self._max_rows["tokens"], spec.max_position_embeddings)
        return max_rows_of(
            max_tokens, max_tokens * math.prod(convolution.stride for convolution in spec.convolutions)
        )

    def kv_init(self, num_blocks: Sequence[int]) -> None:
        """Allocate the caches and build the program over them."""
        self._programs, self._encoder, self._pages = [], None, None
        total = sum(n * size for n, size in zip(num_blocks, self.kv_plan().block_bytes, strict=True))
        try:
            caches: dict[CacheRef, _ops.KVCache] = {}
            states: dict[StateRef, npt.NDArray[Any]] = {}
            growing: dict[int, _ops.KVCache] = {}
            for number, (count, group) in enumerate(zip(num_blocks, self.config.groups, strict=True)):
                num_slots = group.num_slots(count, self.config.block_size)
                for layer, shapes in group.state_layers():
                    for index, shape in enumerate(shapes):
                        dtype = "float32" if shape.is_float32 else STORED_DTYPES[self.config.dtype]
                        ref = StateRef(layer=layer, index=index)
                        states[ref] = np.zeros((num_slots, *shape.shape), dtype)
                if group.heads:
                    made = _ops.kv_caches(count, self.config.block_size, group.heads, self._kv_dtype)
                    if group.kind != "cross":
                        growing[number] = made[0]
                    for layer, cache in zip(group.layer_indices, made, strict=True):
                        caches[CacheRef(layer=layer, is_cross=group.kind == "cross")] = cache
            if self._images is not None:
                self._images.make_room(self.config.num_image_rows)
            for step_trace in self._step_traces:
                trace, biases = separate(step_trace, self._parts)
                self._programs.append(
                    NativeProgram(
                        trace,
                        self._weights,
                        self._vectors | {name: self._vectors[s.name][s.start : s.end] for name, s in biases.items()},
                        caches,
                        states,
                        max_tokens=self._max_rows["tokens"],
                        max_logits=self._max_rows["logits"],
                        quantize_x=frozenset(self._rounds_x),
                        tensors=self._tensors,
                        images=None if self._images is None else self._images.rows,
                    )
                )
            if self._encoder_trace is not None:
                max_rows = self._max_encoder_rows()
                self._encoder = NativeProgram(
                    self._encoder_trace,
                    self._weights,
                    self._vectors,
                    caches,
                    max_tokens=max_rows["tokens"],
                    max_logits=max_rows["logits"],
                    max_requests=self.config.max_num_seqs,
                    quantize_x=frozenset(self._rounds_x),
                    tensors=self._tensors,
                )
        except MemoryError as error:
            raise OutOfMemory(f"this machine has no memory left for a KV cache of {format_bytes(total)}") from error
        if growing:
            self._pages = KVPages(growing, self.config.block_size, self.config.max_model_len)

    def warmup(self) -> None:
        """Run one token through the program, with a slot that is padding."""
        one = np.zeros(1, np.int32)
        groups, is_pooling = len(self.config.groups), self.config.spec.pooler is not None
        self.step(
            StepInput(
                forward=ForwardBatch(
                    input_ids=one,
                    positions=one,
                    query_start_loc=np.array([0, 1], np.int32),
                    seq_lens=one + np.int32(1),
                    block_tables=[np.zeros((1, 1), np.int32)] * groups,
                    slot_mappings=[np.zeros(1, np.int32)] * groups,
                    logits_indices=one,
                    token_types=one,
                    rope_rows=one,
                    rope_positions=np.zeros((1, NUM_AXES), np.int32),
                    encoder_lens=one + np.int32(1),
                ),
                sampling=None if is_pooling else SamplingBatch(rows=None, slots=one, positions=one, seeds=one),
                pooling=PoolingBatch(starts=one, ends=one + np.int32(1)) if is_pooling else None,
            )
        )

    def step(self, batch: StepInput) -> Done:
        """Run one step; the result is there when this returns."""
        assert self._programs, "kv_init comes before step"
        start_s = time.perf_counter()
        if self._pages is not None:
            self._pages.hold()
        forward, sampling, pooling = batch.forward, batch.sampling, batch.pooling
        if batch.encoder is not None:
            self._read_other_input(batch.encoder)
        input_ids = forward.input_ids
        if forward.token_slots is not None:
            input_ids = recall_tokens(input_ids, self._last_tokens, forward.token_slots)
        logits_indices = forward.logits_indices if sampling is not None else np.empty(0, np.int32)
        program = self._programs[0 if forward.adapters is None else 1]
        program.run(
            input_ids,
            forward.positions,
            forward.query_start_loc,
            forward.seq_lens,
            forward.block_tables,
            forward.slot_mappings,
            logits_indices,
            forward.rope_rows,
            forward.token_types if forward.adapters is None else forward.adapters,
            forward.encoder_lens,
            _ranges(pooling) if self.config.spec.pooler is not None else None,
            reach=forward.reach,
            image_rows=forward.image_rows,
            rope_positions=forward.rope_positions,
        )
        if self._pages is not None:
            self._pages.used(forward.slot_mappings)
        token_ids, logprobs = np.empty(0, np.int32), None
        if sampling is not None:
            logits = program.logits(len(logits_indices))
            sampled = sample_step(self._sampling_ops, logits, sampling)
            token_ids = sampled.token_ids
            remember_tokens(self._last_tokens, sampling.slots, token_ids)
            if sampled.logprobs is not None:
                logprobs = _logprob_arrays(sampled.logprobs)
        return Done(
            StepOutput(
                token_ids=token_ids,
                logprobs=logprobs,
                prompt_logprobs=self._prompt_logprobs(program, batch.prompt_logprobs, len(input_ids)),
                pooled=None if pooling is None else program.logits(len(pooling.starts)).copy(),
                timings={"step_s": time.perf_counter() - start_s},
            )
        )

    def _read_other_input(self, batch: EncoderBatch) -> None:
        if self._images is None:
            self._encode(batch)
        elif self._encoder is None:
            self._images.encode(batch)
        else:
            self._keep_rows(self._images.rows_of(batch), batch.slot_mapping)

    def _keep_rows(self, rows: npt.NDArray[np.float32], slot_mapping: Ints) -> None:
        """Leave keys and values of rows of images in the caches of cross attention."""
        most = self._max_rows["tokens"]
        for start in range(0, len(rows), most):
            piece = rows[start : start + most]
            self._encode(
                EncoderBatch(
                    positions=np.zeros(len(piece), np.int32),
                    query_start_loc=np.array([0, len(piece)], np.int32),
                    slot_mapping=slot_mapping[start : start + most],
                    features=piece,
                    windows=[np.arange(len(piece), dtype=np.int32)[:, None]],
                )
            )

    def _encode(self, batch: EncoderBatch) -> None:
        """Run the encoder, and leave keys and values of its outputs in the caches of cross attention."""
        assert self._encoder is not None, "only models with an encoder have another input"
        none = np.empty(0, np.int32)
        lens = np.diff(batch.query_start_loc)
        self._encoder.run(
            np.zeros(len(batch.positions), np.int32) if batch.input_ids is None else batch.input_ids,
            batch.positions,
            batch.query_start_loc,
            lens,
            [lens[:, None]],
            [batch.slot_mapping],
            none,
            features=batch.features,
            windows=batch.windows,
        )

    def memory(self) -> Memory:
        """The machine's memory within the cgroup's limit."""
        return host_memory()

    def close(self) -> None:
        """Free weights, caches and program."""
        self._programs, self._encoder, self._images, self._pages = [], None, None, None
        self._weights.clear()
        self._tensors.clear()
        self._vectors.clear()

    @property
    def _kv_dtype(self) -> "_ops.KVDtypeName":
        return self.config.kv_dtype or self.config.dtype  # type: ignore[return-value]

    def _prompt_logprobs(
        self, program: NativeProgram, batch: PromptLogprobsBatch | None, num_tokens: int
    ) -> LogprobArrays | None:
        if batch is None:
            return None
        hidden_states = program.hidden_states(num_tokens)
        pieces = []
        for rows, targets in prompt_pieces(batch):
            logits = self._compute_logits(hidden_states[rows])
            pieces.append(
                _logprob_arrays(self._sampling_ops.logprobs(logits, targets, num_logprobs=batch.num_logprobs))
            )
        return LogprobArrays.joined(pieces)

    def _compute_logits(self, hidden_states: npt.NDArray[Any]) -> Floats:
        """As models.decoder.compute_logits, for rows beside the program's own."""
        spec = self.config.spec
        name = "embed_tokens.weight" if spec.tie_word_embeddings else "lm_head.weight"
        out = np.empty((len(hidden_states), spec.vocab_size), hidden_states.dtype)
        bias = self._vectors["lm_head.bias"] if spec.lm_head_bias else None
        _ops.linear(out, hidden_states, self._weights[name], bias, name in self._rounds_x)
        logits = _as_float32(out)
        if spec.logit_scale != 1.0:
            logits = logits * np.float32(spec.logit_scale)
        if spec.logit_softcap:
            cap = np.float32(spec.logit_softcap)
            logits = cap * np.tanh(logits / cap)
        return logits


def _trace_other_input(config: RunnerConfig) -> Trace | None:
    """What makes keys and values for cross attention. Raises UntraceableOp."""
    vision = config.spec.vision
    if config.spec.encoder is not None:
        return trace_encoder(config.spec, config.dtype)
    return trace_cross(config.spec, config.dtype) if vision is not None and vision.is_crossed else None


def _image_encoder(config: RunnerConfig) -> "ImageEncoder":
    """Raises UntraceableOp without torch, in which it runs."""
    if find_spec("torch") is None:
        raise UntraceableOp("the encoder of images runs in torch, which is not installed")
    from .images import ImageEncoder

    return ImageEncoder(config.spec, config.dtype)


def _ranges(pooling: PoolingBatch | None) -> tuple[Ints, Ints]:
    """Starts and ends; none in a step that makes no vector."""
    none = np.empty(0, np.int32)
    return (none, none) if pooling is None else (pooling.starts, pooling.ends)


def _logprob_arrays(arrays: tuple[Floats, Ints, Ints, Floats]) -> LogprobArrays:
    chosen, ranks, top_ids, top_values = arrays
    return LogprobArrays(chosen=chosen, ranks=ranks, top_ids=top_ids, top_values=top_values)


def _as_float32(array: npt.NDArray[Any]) -> Floats:
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32, copy=False)
