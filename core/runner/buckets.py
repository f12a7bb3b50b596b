"""The shapes that a compiled step may have, and the padding of a step's arrays to the next of them.

numpy only. A step's arrays travel to the device as one int32 array; `Layout` says where each of them lies in it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..models.rope import NUM_AXES, has_axes, rope_rows
from ..platform import RunnerConfig
from ..sampling.validate import MAX_LOGPROBS
from ..stages import ForwardBatch, IntArray, PoolingBatch, PromptLogprobsBatch, SamplingBatch
from .encode_buckets import EncodeBucket, EncodeBuckets, Layout
from .step import PROMPT_ROWS

_TOKENS_MULTIPLE = 8
_SMALLEST_CHUNK = 32
_SMALLEST_EDITS = 1024

Kind = Literal["greedy", "random", "full"]
"""Ways to sample: greedy; with temperature and filters; with masks, edits and log probabilities besides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """How far apart sizes are: each is so many times the one before. smallest_width: blocks of the narrowest table.
    smallest_reqs: requests of the smallest step, of which other sizes are multiples.

    The defaults suit compiled loops, to which a wide table costs nothing.
    """

    num_reqs: int = 8
    num_tokens: int = 4
    width: int = 8
    smallest_width: int = 64
    smallest_reqs: int = 8
    few_reqs: bool = False
    """steps of many tokens have a size of their own for few requests: their attention computes what is padding"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBucket:
    """The shape of a forward pass. decode: every request has one token. width: blocks in a row of a block table.
    has_images: rows of images stand in it, or tokens that see ahead. crosses: it reads what an encoder made. adapted:
    some token has an adapter."""

    num_tokens: int
    num_reqs: int
    width: int
    decode: bool
    has_images: bool = False
    crosses: bool = False
    adapted: bool = False

    @property
    def num_picked(self) -> int:
        """Tokens whose hidden states go on to the sampler: there is room for as many as for requests."""
        return self.num_reqs


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleBucket:
    """The shape of sampling. num_edits: of biases and of penalties, each. num_logprobs: -1 for none."""

    num_samples: int
    kind: Kind
    num_edits: int = 0
    num_logprobs: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBucket:
    """The shape of prompt log probabilities. num_tokens: of the forward pass."""

    num_tokens: int
    num_rows: int
    num_logprobs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolBucket:
    """The shape of making vectors. num_tokens: of the forward pass. num_pooled: requests that get one."""

    num_tokens: int
    num_pooled: int


Bucket = ForwardBucket | SampleBucket | PromptBucket | PoolBucket | EncodeBucket


class Buckets:
    """All buckets of a model. A step takes the smallest one that it fits."""

    def __init__(self, config: RunnerConfig, grid: Grid) -> None:
        spec = config.spec
        self._vocab_size = spec.vocab_size
        self._groups = config.groups
        self._cross_width = max((-(-group.num_tokens // config.block_size) for group in config.groups), default=0)
        self._vision = spec.vision
        self._reads_encoder = spec.encoder is not None
        self.encode = EncodeBuckets(config)
        self._has_rope_rows = rope_rows(spec).num_rows > 1
        self._has_types = spec.num_token_types > 0
        self._has_axes = has_axes(spec)
        self._is_encoder = spec.kind == "encoder"
        self._makes_vectors = spec.pooler is not None
        self._num_adapters = 0 if spec.adapters is None else spec.adapters.num_adapters
        self.num_reqs = _steps(
            grid.smallest_reqs, config.max_num_samples, factor=grid.num_reqs, multiple=grid.smallest_reqs
        )
        self.chunk_reqs = tuple(dict.fromkeys((self.num_reqs[0 if grid.few_reqs else -1], self.num_reqs[-1])))
        self.num_tokens = _steps(
            _SMALLEST_CHUNK, config.max_num_batched_tokens, factor=grid.num_tokens, multiple=_TOKENS_MULTIPLE
        )
        blocks = -(-config.max_model_len // config.block_size)
        # An encoder has no tables.
        self.widths = _steps(grid.smallest_width, blocks, factor=grid.width, multiple=1) if config.groups else (0,)
        most_edits = config.max_num_seqs * min(config.max_model_len, config.spec.vocab_size)
        self.num_edits = _steps(_SMALLEST_EDITS, most_edits, factor=32, multiple=1)
        self.num_logprobs = min(MAX_LOGPROBS, config.spec.vocab_size)

    def all(self) -> list[Bucket]:
        """Every bucket that warmup compiles."""
        forward: list[Bucket] = [*self.encode.all(), *self.all_forward()]
        if self._makes_vectors or self._is_encoder:
            return [*forward, *self.all_pool()]
        return [*forward, *self.all_sample(), *self.all_prompt()]

    def all_forward(self) -> list[ForwardBucket]:
        """Every forward pass that warmup compiles."""
        decodes = [] if self._is_encoder else [(n, n, True) for n in self.num_reqs]
        chunks = [(n, reqs, False) for n in self.num_tokens for reqs in self.chunk_reqs]
        sees = [self._reads_encoder, *([True] if self._vision is not None and self._vision.is_crossed else [])]
        places = [False, *([True] if self._vision is not None and not self._vision.is_crossed else [])]
        return [
            ForwardBucket(
                num_tokens=tokens,
                num_reqs=reqs,
                width=width,
                decode=decode,
                has_images=has_images,
                crosses=crosses,
                adapted=adapted,
            )
            for adapted in ((False, True) if self._num_adapters else (False,))
            for tokens, reqs, decode in (*decodes, *chunks)
            for width in self.widths
            for has_images in (places[:1] if decode else places)
            for crosses in sees
        ]

    def all_sample(self) -> list[SampleBucket]:
        """Every way to sample that warmup compiles."""
        kinds: tuple[Kind, ...] = ("greedy", "random")
        plain = [SampleBucket(num_samples=n, kind=kind) for n in self.num_reqs for kind in kinds]
        return plain + [
            SampleBucket(num_samples=n, kind="full", num_edits=edits, num_logprobs=self.num_logprobs)
            for n in self.num_reqs
            for edits in self.num_edits
        ]

    def all_prompt(self) -> list[PromptBucket]:
        """Every shape of prompt log probabilities that warmup compiles."""
        return [self._prompt(n, self.num_logprobs) for n in (*self.num_reqs, *self.num_tokens)]

    def all_pool(self) -> list[PoolBucket]:
        """Every shape of making vectors that warmup compiles."""
        tokens = self.num_tokens if self._is_encoder else (*self.num_reqs, *self.num_tokens)
        return [self.pool(n) for n in dict.fromkeys(tokens)]

    def forward(self, batch: ForwardBatch, num_samples: int) -> ForwardBucket:
        """The bucket of a forward pass, of whose tokens `num_samples` are sampled from."""
        num_reqs, num_tokens = len(batch.seq_lens), len(batch.input_ids)
        tables = zip(self._groups, batch.block_tables, strict=True)
        width = _next(
            self.widths, max((table.shape[1] for group, table in tables if group.kind != "cross"), default=0)
        )
        has_images = batch.image_rows is not None or batch.reach is not None
        decode = batch.max_query_len == 1 and not self._is_encoder and not has_images
        # Only steps that verify drafts sample more often than they have requests.
        reqs = _next(self.num_reqs if decode else self.chunk_reqs, max(num_reqs, num_samples))
        tokens = reqs if decode else _next(self.num_tokens, num_tokens)
        return ForwardBucket(
            num_tokens=tokens,
            num_reqs=reqs,
            width=width,
            decode=decode,
            has_images=has_images,
            crosses=batch.encoder_lens is not None,
            adapted=batch.adapters is not None,
        )

    def sample(self, batch: SamplingBatch, num_picked: int) -> SampleBucket:
        """The bucket of a sampling batch out of `num_picked` hidden states."""
        edits = max((len(rows) for rows in (batch.bias_rows, batch.penalty_rows) if rows is not None), default=0)
        if not edits and batch.allow_mask is None and batch.num_logprobs < 0:
            return SampleBucket(num_samples=num_picked, kind="greedy" if batch.temperature is None else "random")
        return SampleBucket(
            num_samples=num_picked,
            kind="full",
            num_edits=_next(self.num_edits, edits),
            num_logprobs=self._more_logprobs(batch.num_logprobs),
        )

    def prompt(self, batch: PromptLogprobsBatch, num_tokens: int) -> PromptBucket:
        """The bucket of prompt log probabilities after a forward pass of `num_tokens`."""
        return self._prompt(num_tokens, self._more_logprobs(batch.num_logprobs))

    def pool(self, num_tokens: int, batch: PoolingBatch | None = None) -> PoolBucket:
        """The bucket of making vectors after a forward pass of `num_tokens`: of all requests, if they are not more
        than usual."""
        return PoolBucket(
            num_tokens=num_tokens, num_pooled=max(self.num_reqs[-1], 0 if batch is None else len(batch.starts))
        )

    def layout(self, bucket: Bucket) -> Layout:
        """Where the arrays of a bucket's input lie."""
        if isinstance(bucket, ForwardBucket):
            return self._forward_layout(bucket)
        if isinstance(bucket, EncodeBucket):
            return self.encode.layout(bucket)
        if isinstance(bucket, SampleBucket):
            return self._sample_layout(bucket)
        if isinstance(bucket, PromptBucket):
            return {"rows": ((bucket.num_rows,), np.int32, 0), "targets": ((bucket.num_rows,), np.int32, 0)}
        # Padding is the mean of the first row, which is a number.
        return {"starts": ((bucket.num_pooled,), np.int32, 0), "ends": ((bucket.num_pooled,), np.int32, 1)}

    def _forward_layout(self, bucket: ForwardBucket) -> Layout:
        tokens, reqs = bucket.num_tokens, bucket.num_reqs
        layout: dict[str, tuple[tuple[int, ...], Any, float]] = {
            "input_ids": ((tokens,), np.int32, 0),
            "positions": ((tokens,), np.int32, 0),
            "token_slots": ((tokens,), np.int32, 0),
            "query_start_loc": ((reqs + 1,), np.int32, 0),
            "seq_lens": ((reqs,), np.int32, 0),
            "logits_indices": ((bucket.num_picked,), np.int32, 0),
        }
        for n, group in enumerate(self._groups):
            is_cross = group.kind == "cross"
            layout[f"block_tables.{n}"] = ((reqs, self._cross_width if is_cross else bucket.width), np.int32, -1)
            layout[f"slot_mappings.{n}"] = ((0 if is_cross else tokens,), np.int32, -1)
        sees_images = bucket.crosses and self._vision is not None
        for name, is_there in (
            ("rope_rows", self._has_rope_rows),
            ("token_types", self._has_types or sees_images),
            ("reach", bucket.has_images and self._vision is not None and self._vision.sight != "past"),
        ):
            if is_there:
                layout[name] = ((tokens,), np.int32, 0)
        if bucket.has_images:
            layout["image_rows"] = ((tokens,), np.int32, -1)
        if bucket.crosses:
            layout["encoder_lens"] = ((reqs,), np.int32, 0)
        if bucket.adapted:
            layout["adapters"] = ((tokens,), np.int32, self._num_adapters)
        if self._has_axes:
            layout["rope_positions"] = ((tokens, NUM_AXES), np.int32, 0)
        return layout

    def _sample_layout(self, bucket: SampleBucket) -> Layout:
        """Padding of a row or slot is -1; every other value is neutral."""
        rows, edits, words = bucket.num_samples, bucket.num_edits, -(-self._vocab_size // 32)
        layout: dict[str, tuple[tuple[int, ...], Any, float]] = {
            "slots": ((rows,), np.int32, -1),
            "positions": ((rows,), np.int32, 0),
            "seeds": ((rows,), np.int32, 0),
        }
        if bucket.kind != "greedy":
            layout |= {
                "temperature": ((rows,), np.float32, 0),
                "top_k": ((rows,), np.int32, 0),
                "top_p": ((rows,), np.float32, 1),
                "min_p": ((rows,), np.float32, 0),
            }
        if bucket.kind == "full":
            layout |= {
                "allow_mask": ((rows, words), np.int32, -1),
                "bias_rows": ((edits,), np.int32, -1),
                "bias_tokens": ((edits,), np.int32, 0),
                "bias_values": ((edits,), np.float32, 0),
                "penalty_rows": ((edits,), np.int32, -1),
                "penalty_tokens": ((edits,), np.int32, 0),
                "penalty_counts": ((edits,), np.int32, 0),
                "repetition": ((rows,), np.float32, 1),
                "frequency": ((rows,), np.float32, 0),
                "presence": ((rows,), np.float32, 0),
            }
        return layout

    def _prompt(self, num_tokens: int, num_logprobs: int) -> PromptBucket:
        return PromptBucket(num_tokens=num_tokens, num_rows=min(PROMPT_ROWS, num_tokens), num_logprobs=num_logprobs)

    def _more_logprobs(self, wanted: int) -> int:
        """What requests may ask for is compiled once; a library's caller that wants more pays for it."""
        return self.num_logprobs if wanted <= self.num_logprobs else min(_power_of_two(wanted), self._vocab_size)


def size_of(layout: Layout) -> int:
    """The words that the arrays take."""
    return sum(math.prod(shape) for shape, _, _ in layout.values())


def pack(layout: Layout, values: Mapping[str, npt.NDArray[Any] | None]) -> IntArray:
    """The arrays, padded, in one. A missing or None array is all padding."""
    packed = np.empty(size_of(layout), np.int32)
    start = 0
    for name, (shape, dtype, padding) in layout.items():
        end = start + math.prod(shape)
        target = packed[start:end].view(dtype).reshape(shape)
        value = values.get(name)
        if value is None:
            target[...] = padding
        else:
            target[tuple(slice(0, size) for size in value.shape)] = value
            target[len(value) :] = padding
            if value.ndim == 2:
                target[: len(value), value.shape[1] :] = padding
        start = end
    return packed


def forward_values(batch: ForwardBatch, picked: IntArray, num_reqs: int) -> dict[str, npt.NDArray[Any] | None]:
    """The arrays of a forward pass by the names of its layout. picked: the tokens that are sampled from.

    Padded requests have no tokens, so query_start_loc goes on with its last value.
    """
    starts = batch.query_start_loc
    ends = np.full(num_reqs + 1 - len(starts), starts[-1], np.int32)
    values: dict[str, npt.NDArray[Any] | None] = {
        "input_ids": batch.input_ids,
        "positions": batch.positions,
        "token_slots": batch.token_slots,
        "query_start_loc": np.concatenate([starts, ends]),
        "seq_lens": batch.seq_lens,
        "logits_indices": picked,
        "rope_rows": batch.rope_rows,
        "token_types": batch.token_types,
        "rope_positions": batch.rope_positions,
        "encoder_lens": batch.encoder_lens,
        "image_rows": batch.image_rows,
        "reach": batch.reach,
        "adapters": batch.adapters,
    }
    for group, (table, slots) in enumerate(zip(batch.block_tables, batch.slot_mappings, strict=True)):
        values[f"block_tables.{group}"] = table
        values[f"slot_mappings.{group}"] = slots
    return values


def _steps(smallest: int, largest: int, *, factor: int, multiple: int) -> tuple[int, ...]:
    """Sizes from `smallest` up, each `factor` times the one before, the last one `largest` rounded up."""
    last = -(-largest // multiple) * multiple
    sizes = []
    while smallest < last:
        sizes.append(smallest)
        smallest *= factor
    return (*sizes, last)


def _next(sizes: tuple[int, ...], wanted: int) -> int:
    """The smallest size that holds `wanted`; above all of them a power of two."""
    return next((size for size in sizes if size >= wanted), _power_of_two(wanted))


def _power_of_two(wanted: int) -> int:
    return 1 << max(wanted - 1, 0).bit_length()
