"""What runners with static shapes share: a step as a few programs, one for each bucket, whoever compiles or records
them."""

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt

from ..kv.groups import cross_group, group_of_layer, state_group
from ..models.decoder import compute_logits, decoder
from ..models.encoder import encoder
from ..models.encoder_decoder import encode
from ..models.pooler import pool
from ..models.vision import encode_images
from ..ops import OpTable
from ..platform import Pending, Runner, RunnerConfig
from ..stages import (
    Array,
    ForwardBatch,
    IntArray,
    KVCaches,
    LogprobArrays,
    PoolingBatch,
    SamplingBatch,
    StepInput,
    StepOutput,
)
from .buckets import (
    Bucket,
    Buckets,
    ForwardBucket,
    PromptBucket,
    SampleBucket,
    forward_values,
    pack,
    size_of,
)
from .caches import CacheArrays
from .encode_buckets import EncodeBucket, Layout, encoder_batch_of
from .step import prompt_logprobs, prompt_pieces, sample_and_remember

HostArray = npt.NDArray[Any]


class Programs:
    """The functions of a step by bucket, over arrays of the bucket's shape; their input comes as one int32 array.

    forward: (params, kv, last_tokens, packed) -> (hidden_states, picked, kv), kv being CacheArrays; encode: (params,
    kv, packed) -> kv; sample: (params, picked, last_tokens, packed) -> (token_ids, logprobs or (), last_tokens);
    prompt: (params, hidden_states, packed) -> logprobs; pool: (params, hidden_states, packed) -> vectors.
    """

    def __init__(
        self,
        config: RunnerConfig,
        ops: OpTable,
        buckets: Buckets,
        as_float: Callable[[Array], Array],
    ) -> None:
        """as_float: the float32 values whose bits an int32 array holds."""
        self._spec = config.spec
        self._ops = ops
        self._buckets = buckets
        self._dtype = config.dtype
        self._caches = KVCaches(
            layers=(),
            group_of_layer=group_of_layer(config.groups, config.spec.num_layers),
            state_group=state_group(config.groups),
            cross_group=cross_group(config.groups),
        )
        self._as_float = as_float

    def function(self, bucket: Bucket) -> Callable[..., Any]:
        """The function of a bucket, to be compiled or recorded."""
        layout = self._buckets.layout(bucket)
        if isinstance(bucket, ForwardBucket):
            return self._forward(bucket, layout)
        if isinstance(bucket, EncodeBucket):
            return self._encode(layout)
        if isinstance(bucket, SampleBucket):
            return self._sample(bucket, layout)
        if isinstance(bucket, PromptBucket):
            return self._prompt(bucket, layout)
        return self._pool(layout)

    def _forward(self, bucket: ForwardBucket, layout: Layout) -> Callable[..., Any]:
        ops, spec = self._ops, self._spec

        def forward(params: Any, kv: Any, last_tokens: Array, packed: Array) -> tuple[Array, Array, Any]:
            arrays = self._unpack(layout, packed)
            groups = range(sum(name.startswith("block_tables.") for name in layout))
            batch = ForwardBatch(
                input_ids=ops.recall_tokens(arrays["input_ids"], last_tokens, arrays["token_slots"]),
                positions=arrays["positions"],
                query_start_loc=arrays["query_start_loc"],
                seq_lens=arrays["seq_lens"],
                block_tables=[arrays[f"block_tables.{group}"] for group in groups],
                slot_mappings=[arrays[f"slot_mappings.{group}"] for group in groups],
                logits_indices=arrays["logits_indices"],
                token_types=arrays.get("token_types"),
                rope_rows=arrays.get("rope_rows"),
                rope_positions=arrays.get("rope_positions"),
                encoder_lens=arrays.get("encoder_lens"),
                image_rows=arrays.get("image_rows"),
                reach=arrays.get("reach"),
                adapters=arrays.get("adapters"),
                max_query_len=1 if bucket.decode else 0,
            )
            if spec.kind == "encoder":
                hidden_states = encoder(ops, spec, params, batch)
            else:
                hidden_states, caches = decoder(ops, spec, params, kv.put_in(self._caches), batch)
                kv = CacheArrays.of(caches)
            return hidden_states, ops.gather(hidden_states, batch.logits_indices), kv

        return forward

    def _encode(self, layout: Layout) -> Callable[..., Any]:
        ops, spec, run = self._ops, self._spec, encode if self._spec.vision is None else encode_images

        def store(params: Any, kv: CacheArrays, packed: Array) -> CacheArrays:
            batch = encoder_batch_of(self._unpack(layout, packed), self._dtype)
            return CacheArrays.of(run(ops, spec, params, kv.put_in(self._caches), batch))

        return store

    def _sample(self, bucket: SampleBucket, layout: Layout) -> Callable[..., Any]:
        ops = self._ops

        def sample(params: Any, picked: Array, last_tokens: Array, packed: Array) -> tuple[Array, Any, Array]:
            batch = SamplingBatch(rows=None, num_logprobs=bucket.num_logprobs, **self._unpack(layout, packed))
            logits = compute_logits(ops, self._spec, params, picked)
            sampled, last_tokens = sample_and_remember(ops, logits, last_tokens, batch)
            return sampled.token_ids, sampled.logprobs or (), last_tokens

        return sample

    def _prompt(self, bucket: PromptBucket, layout: Layout) -> Callable[..., Any]:
        def prompt(params: Any, hidden_states: Array, packed: Array) -> Any:
            arrays = self._unpack(layout, packed)
            rows, targets = arrays["rows"], arrays["targets"]
            return prompt_logprobs(self._ops, self._spec, params, hidden_states, rows, targets, bucket.num_logprobs)

        return prompt

    def _pool(self, layout: Layout) -> Callable[..., Any]:
        def make_vectors(params: Any, hidden_states: Array, packed: Array) -> Array:
            batch = PoolingBatch(**self._unpack(layout, packed))
            return pool(self._ops, self._spec, params, hidden_states, batch)

        return make_vectors

    def _unpack(self, layout: Layout, packed: Array) -> dict[str, Array]:
        arrays, start = {}, 0
        for name, (shape, dtype, _) in layout.items():
            end = start + size_of({name: (shape, dtype, 0)})
            words = packed[start:end]
            arrays[name] = (words if dtype == np.int32 else self._as_float(words)).reshape(shape)
            start = end
        return arrays


class BucketedRunner(Runner):
    """The steps of a runner whose shapes are those of buckets. Mixed into a runner that owns the arrays.

    Invariant: whatever a step needs is a bucket's program or, for logits processors alone, ops one by one.
    """

    takes_late_masks = True

    config: RunnerConfig
    ops: OpTable
    buckets: Buckets
    _params: dict[str, Array]
    _last_tokens: Array

    # ---- what a runner of this kind brings ----------------------------------------------------------------
    @abstractmethod
    def program(self, bucket: Bucket) -> Callable[..., Any]:
        """The program of a bucket, made when it is first asked for; takes `packed` from the host."""

    @abstractmethod
    def forward(self, bucket: ForwardBucket, packed: IntArray) -> tuple[Array, Array]:
        """Run a forward pass over the KV caches; (hidden_states, those that logits are computed from)."""

    @abstractmethod
    @abstractmethod
    def encode(self, bucket: EncodeBucket, packed: IntArray) -> None:
        """Run the encoder of other inputs, whose outputs go into the caches."""

    @abstractmethod
    def fetch(self, arrays: Sequence[Array], finish: Callable[[list[HostArray]], StepOutput]) -> Pending:
        """Have the arrays brought to the host; `finish` makes of them what the step gives."""

    @abstractmethod
    def errors(self, what: str) -> AbstractContextManager[None]:
        """Turns the library's errors into OutOfMemory and DeviceLost. what: what memory would be taken for."""

    def keep(self, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        """Arrays that the next run of the same program leaves alone."""
        return arrays

    # ---- what they share ----------------------------------------------------------------------------------
    def warmup(self) -> None:
        """Compile or record every bucket."""
        with self.errors("compiled steps"):
            for bucket in self.buckets.all():
                self.program(bucket)

    def step(self, batch: StepInput) -> Pending:
        """Start a step; it runs on while the caller prepares the next one."""
        results = _Results()
        with self.errors("a step's activations"):
            if batch.encoder is not None:
                read = self.buckets.encode.of(batch.encoder)
                self.encode(read, self._pack(read, self.buckets.encode.values(batch.encoder, read)))
            forward, sampling = batch.forward, batch.sampling
            picked = forward.logits_indices
            if sampling is not None and sampling.rows is not None:
                picked = picked[sampling.rows]
            num_samples = len(picked) if sampling is not None else 0
            bucket = self.buckets.forward(forward, num_samples)
            values = forward_values(forward, picked[:num_samples], bucket.num_reqs)
            hidden_states, hidden = self.forward(bucket, self._pack(bucket, values))
            if sampling is not None:
                sample = self._sample_eagerly if sampling.processors else self._sample
                token_ids, logprobs = sample(sampling.arrived(), hidden)
                results.add_samples(num_samples, token_ids, logprobs, sampling.num_logprobs)
            if batch.prompt_logprobs is not None:
                prompt = self.buckets.prompt(batch.prompt_logprobs, bucket.num_tokens)
                for rows, targets in prompt_pieces(batch.prompt_logprobs, prompt.num_rows):
                    packed = self._pack(prompt, {"rows": rows, "targets": targets})
                    arrays = self.keep(self.program(prompt)(self._params, hidden_states, packed))
                    results.add_prompt(len(rows), arrays, batch.prompt_logprobs.num_logprobs)
            if batch.pooling is not None:
                wanted = self.buckets.pool(bucket.num_tokens, batch.pooling)
                packed = self._pack(wanted, {"starts": batch.pooling.starts, "ends": batch.pooling.ends})
                vectors = self.program(wanted)(self._params, hidden_states, packed)
                results.add_vectors(len(batch.pooling.starts), vectors)
            return self.fetch(results.arrays, results.finish)

    def _pack(self, bucket: Bucket, values: Mapping[str, HostArray | None]) -> IntArray:
        return pack(self.buckets.layout(bucket), values)

    def _sample(self, sampling: SamplingBatch, hidden: Array) -> tuple[Array, tuple[Array, ...]]:
        bucket = self.buckets.sample(sampling, hidden.shape[0])
        packed = self._pack(bucket, {name: getattr(sampling, name) for name in self.buckets.layout(bucket)})
        token_ids, logprobs, self._last_tokens = self.program(bucket)(self._params, hidden, self._last_tokens, packed)
        return token_ids, logprobs

    def _sample_eagerly(self, sampling: SamplingBatch, hidden: Array) -> tuple[Array, tuple[Array, ...]]:
        """Op by op, because logits processors run on the host; only requests that name one pay for it."""
        columns = {
            name: self.ops.to_device(value)
            for name in SamplingBatch.__dataclass_fields__
            if isinstance(value := getattr(sampling, name), np.ndarray) and name != "rows"
        }
        batch = SamplingBatch(
            rows=None, processors=sampling.processors, num_logprobs=sampling.num_logprobs, **columns
        )
        logits = compute_logits(self.ops, self.config.spec, self._params, hidden[: len(sampling.slots)])
        sampled, self._last_tokens = sample_and_remember(self.ops, logits, self._last_tokens, batch)
        return sampled.token_ids, sampled.logprobs or ()


class _Results:
    """What a step leaves on the device, padded, and how its output is made of it on the host."""

    def __init__(self) -> None:
        self.arrays: list[Array] = []
        self._start_s = time.perf_counter()
        self._parts: list[tuple[str, int, int]] = []  # what, rows that count, log probabilities

    def add_samples(self, rows: int, token_ids: Array, logprobs: Sequence[Array], num_logprobs: int) -> None:
        """Sampled tokens; their log probabilities only if they were asked for."""
        self._add("token_ids", rows, -1, [token_ids])
        if num_logprobs >= 0:
            self._add("logprobs", rows, num_logprobs, logprobs)

    def add_prompt(self, rows: int, arrays: Sequence[Array], num_logprobs: int) -> None:
        """A piece of a prompt's log probabilities."""
        self._add("prompt_logprobs", rows, num_logprobs, arrays)

    def add_vectors(self, rows: int, vectors: Array) -> None:
        """Vectors of requests."""
        self._add("pooled", rows, -1, [vectors])

    def finish(self, arrays: list[HostArray]) -> StepOutput:
        """The step's output, without padding."""
        found: dict[str, Any] = {"token_ids": np.empty(0, np.int32)}
        prompts: list[LogprobArrays] = []
        rest = iter(arrays)
        for what, rows, num_logprobs in self._parts:
            if num_logprobs < 0:
                found[what] = next(rest)[:rows]
                continue
            chosen, ranks, top_ids, top_values = (next(rest)[:rows] for _ in range(4))
            piece = LogprobArrays(
                chosen=chosen,
                ranks=ranks,
                top_ids=top_ids[:, :num_logprobs],
                top_values=top_values[:, :num_logprobs],
            )
            if what == "logprobs":
                found[what] = piece
            else:
                prompts.append(piece)
        if prompts:
            found["prompt_logprobs"] = LogprobArrays.joined(prompts)
        return StepOutput(**found, timings={"step_s": time.perf_counter() - self._start_s})

    def _add(self, what: str, rows: int, num_logprobs: int, arrays: Sequence[Array]) -> None:
        self._parts.append((what, rows, num_logprobs))
        self.arrays += arrays
