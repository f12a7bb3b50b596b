"""What the stages of the engine exchange. Frozen; each field's comment names the stage that writes it.

llm / server --EngineRequest--> engine --> scheduler --Plan--> executor --> runner --ForwardBatch-->
device --StepOutput--> runner --StepResult--> scheduler.commit --Delta--> engine --RequestOutput--> user
"""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash

from .models.spec import ModelSpec, Pooling
from .sampling.params import SamplingParams

Array = Any
"""A device array. Opaque: outside core/ops and the platforms nothing but ops may touch it."""
IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
FinishReason = Literal["stop", "length", "abort", "error"]


# ---- llm / server -> engine -------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderInput:
    """What cross attention reads of a request: another prompt, frames of numbers, or images."""

    token_ids: Sequence[int] = ()  # llm / server (tokenizer)
    features: FloatArray | None = None  # [num_frames, num_features] llm / server (front end of audio)
    images: "Sequence[ImageInput]" = ()  # engine; of a model whose layers attend to images

    def num_tokens(self, encoder: ModelSpec) -> int:
        """Positions that the encoder gives: tokens, or what its convolutions leave of the frames."""
        if self.features is None:
            return len(self.token_ids)
        return len(self.features) // math.prod(convolution.stride for convolution in encoder.convolutions)

    def digest(self) -> bytes:
        """16 bytes that name the content."""
        if self.images:
            parts = (image.digest() + image.places.tobytes() for image in self.images)
            return xxhash.xxh3_128_digest(b"".join(parts))
        data = np.asarray(self.token_ids, np.int32) if self.features is None else np.ascontiguousarray(self.features)
        return xxhash.xxh3_128_digest(data.dtype.char.encode() + data.tobytes())


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInput:
    """One image, or one tile of it that the encoder reads for itself, and where its rows stand in the prompt.

    Patches come square by square, each square of VisionSpec.merge patches a side that make one row, squares and the
    patches of each by row and column. An image that is put together from tiles is one input: it says which row of
    its tiles stands at each place, -1 for the learned row behind a line; or how much it takes of each of four.
    """

    patches: FloatArray  # [num_patches, num_features] llm / server (image processor)
    grid: tuple[int, int]  # llm / server (image processor); patches along height and width
    places: IntArray  # [num_rows] llm / server (tokenizer); positions in the prompt, ascending
    num_tiles: int = 1  # llm / server (image processor); of this grid each
    shape: int = 0  # llm / server (image processor); of its tiles, counted from 1 in VisionSpec.tile_shapes
    rows: IntArray | None = None  # [num_rows, 1 or 4] llm / server (image processor); None: the tiles' rows in order
    weights: FloatArray | None = None  # [num_rows, 4] llm / server (image processor); None: 1 each

    def digest(self) -> bytes:
        """16 bytes that name the content."""
        arrays = [array for array in (self.patches, self.rows, self.weights) if array is not None]
        shape = np.asarray((*self.grid, self.num_tiles, self.shape), np.int32)
        return xxhash.xxh3_128_digest(b"".join(np.ascontiguousarray(array).tobytes() for array in (shape, *arrays)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossSpan:
    """What tokens of a request see by cross attention, from a position on up to where the next span begins: the keys
    from first_key on, which begins a block."""

    start: int  # engine
    first_key: int  # engine
    num_keys: int  # engine
    is_before: bool = False  # engine; no image came yet


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSlot:
    """An adapter that is loaded. digest: names its content, which keys and values depend on."""

    number: int  # engine; among the adapters of the model
    digest: bytes  # engine


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One request for one completion (a request with n > 1 becomes n of these)."""

    request_id: str  # llm / server
    prompt_token_ids: Sequence[int]  # llm / server (tokenizer)
    sampling_params: SamplingParams  # llm / server
    arrival_s: float  # llm / server; the engine's clock
    priority: int = 0  # llm / server; smaller runs first
    cache_salt: str = ""  # llm / server; requests share prefix blocks only within one salt
    bad_word_ids: Sequence[Sequence[int]] = ()  # llm / server (tokenizer); sequences not to be completed
    output_token_ids: Sequence[int] = ()  # server; generated before a restart, to be gone on from
    pooling: Pooling | None = None  # engine; ask for a vector (sampling_params then has max_tokens 0)
    token_types: Sequence[int] = ()  # llm / server (tokenizer); by token, empty: all 0
    in_one_step: bool = False  # engine; all of the prompt must be computed in the same step
    encoder: EncoderInput | None = None  # llm / server; the other input, of an encoder-decoder model
    num_encoder_tokens: int = 0  # engine; positions that the encoder makes of it
    cross_spans: Sequence[CrossSpan] = ()  # engine; of images that cross attention reads
    images: Sequence[ImageInput] = ()  # llm / server; by their places
    lora: LoraSlot | None = None  # engine; the adapter that it runs through
    whole_images: bool = False  # engine; the rows of an image must be computed in the same step


# ---- scheduler -> executor -> runner ----------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class KeptImage:
    """An image of a request, and where the rows that the encoder makes of it are kept."""

    image: ImageInput  # llm / server; copied by the scheduler
    blocks: Sequence[int]  # scheduler; empty: no token that is yet to be computed needs it
    must_encode: bool  # scheduler; the encoder reads it in this step


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequest:
    """All that the runner must know of a request that got a slot in this step."""

    request_id: str  # scheduler
    epoch: int  # scheduler
    slot: int  # scheduler
    token_ids: Sequence[int]  # scheduler; prompt and, after a preemption, the outputs so far
    num_prompt_tokens: int  # scheduler
    num_computed_tokens: int  # scheduler; prefix-cache hit
    sampling_params: SamplingParams  # llm / server
    seed: int  # scheduler; assigned at admission
    stop_token_ids: Sequence[int] = ()  # scheduler; ids that end the request, banned until min_tokens
    bad_word_ids: Sequence[Sequence[int]] = ()  # llm / server (tokenizer); copied by the scheduler
    pooling: Pooling | None = None  # engine; copied by the scheduler
    token_types: Sequence[int] = ()  # llm / server (tokenizer); copied by the scheduler
    encoder: EncoderInput | None = None  # scheduler; what the encoder must read in this step
    num_encoder_tokens: int = 0  # engine; copied by the scheduler
    cross_spans: Sequence[CrossSpan] = ()  # engine; copied by the scheduler
    images: Sequence[KeptImage] = ()  # scheduler
    adapter: int = -1  # engine; copied by the scheduler; -1: none


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One request's share of one step: positions [start, start + num_tokens)."""

    request_id: str  # scheduler
    epoch: int  # scheduler; a result of an older epoch is dropped
    slot: int  # scheduler
    num_tokens: int  # scheduler
    num_draft_tokens: int  # scheduler; of num_tokens, how many verify drafts
    sample: bool  # scheduler; the last position(s) give a token
    start: int | None  # scheduler; None: the device knows (a step in flight decides)
    new_blocks: Sequence[Sequence[int]]  # scheduler; per KV group, block ids appended to the block table


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One step. Plain data, so that it can cross a process border."""

    step: int  # scheduler
    rows: Sequence[Row]  # scheduler
    new: Sequence[NewRequest]  # scheduler; tell the runner before its rows

    @property
    def num_tokens(self) -> int:
        """Positions that this step computes."""
        return sum(row.num_tokens for row in self.rows)


# ---- runner -> device -------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """What a forward function reads. On the host its arrays are numpy int32, on a device the platform's own.

    Request r owns tokens query_start_loc[r] : query_start_loc[r + 1]; prefill chunks, decodes and draft
    verification are the same thing. Padding is -1 in every table and slot.

    Of a state group, column 0 of the block table is the slot of the state before each row, -1 at the start of a
    request, and the slot mapping says where the state after a token is kept, -1: nowhere.
    """

    input_ids: Array  # [num_tokens] runner; -1: the token that slot token_slots[i] sampled last (run-ahead)
    positions: Array  # [num_tokens] runner
    query_start_loc: Array  # [num_reqs + 1] runner
    seq_lens: Array  # [num_reqs] runner; tokens in the cache after this step
    block_tables: Sequence[Array]  # per KV group [num_reqs, max_num_blocks] runner
    slot_mappings: Sequence[Array]  # per KV group [num_tokens] runner; block_id * block_size + offset
    logits_indices: Array  # [num_logits] runner; the tokens whose logits are needed
    token_slots: Array | None = None  # [num_tokens] runner; None if no input_id is -1
    token_types: Array | None = None  # [num_tokens] runner; which text of a pair, of models that tell them apart
    rope_rows: Array | None = None  # [num_tokens] runner; which row of a rope table with variants (LongRoPE)
    encoder_lens: Array | None = None  # [num_reqs] runner; tokens of each request in the Cross group
    image_rows: Array | None = None  # [num_tokens] runner; the kept row of an image that stands here; -1: a token
    rope_positions: Array | None = None  # [num_tokens, num_axes] runner; of ropes with several positions a token
    reach: Array | None = None  # [num_tokens] runner; a token sees positions before this, besides those before it
    adapters: Array | None = None  # [num_tokens] runner; which adapter a token runs through, num_adapters: none
    window_start_loc: Array | None = None  # no decoder, nor an encoder that stands alone, has windows
    is_patch: Array | None = None  # nor tiles
    padding: Array | None = None  # nor tiles
    max_query_len: int = 0  # runner; an upper bound, 0 if unknown
    max_seq_len: int = 0  # runner; an upper bound, 0 if unknown
    max_encoder_len: int = 0  # runner; an upper bound, 0 if unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderBatch:
    """What the encoder of an encoder-decoder model reads in this step: whole inputs, each of one request.

    Input i owns tokens query_start_loc[i] : query_start_loc[i + 1]. Tokens are text, or what convolutions make of
    frames; or patches of images, an input being one tile.
    """

    positions: Array  # [num_tokens] runner
    query_start_loc: Array  # [num_inputs + 1] runner
    slot_mapping: Array  # [num_tokens] runner; in the blocks of the Cross group; of images: [num_rows], where kept
    input_ids: Array | None = None  # [num_tokens] runner; of text
    features: Array | None = None  # [num_frames, num_features] float32 runner
    windows: Sequence[Array] = ()  # by convolution [rows, kernel] runner; rows that make one, -1 is zeros
    token_types: Array | None = None  # no encoder of this kind has them
    rope_rows: Array | None = None  # nor ropes with variants
    encoder_lens: Array | None = None  # nor another input
    squares: Array | None = (
        None  # of images: the patches that make one row [num_rows, merge^2] runner; of means, one a
    )
    # row: [num_rows * merge^2, 1]
    row_starts: Array | None = None  # [num_rows] runner; of means: where the patches of a row start in `squares`
    row_ends: Array | None = None  # [num_rows] runner
    newline_rows: Array | None = None  # [num_rows] runner; 0 where the learned row of a line's end stands, else -1
    mixed_rows: Sequence[Array] = ()  # four [num_rows, 1] runner; rows that one is between, -1 is zeros
    mix_weights: Sequence[Array] = ()  # four float32 [num_rows, 1] runner
    class_rows: Array | None = None  # [num_tokens] runner; 0 where a tile's learned row stands, else -1
    rope_positions: Array | None = None  # [num_tokens, 2] runner; row and column of a patch
    window_start_loc: Array | None = None  # [num_windows + 1] runner; as query_start_loc, of windows
    is_patch: Array | None = None  # float32 [num_tokens, 1] runner; 0 of rows behind the patches of a tile
    padding: Array | None = None  # [num_tokens] runner; 1 of such rows, and of all of a tile that is not there
    corner_ids: Sequence[Array] = ()  # 4 or 16 [num_tokens] runner; rows of the position embedding that a patch mixes
    corner_weights: Sequence[Array] = ()  # as many float32 [num_tokens, 1] runner
    dtype: str = "float32"  # runner; of activations
    max_query_len: int = 0  # runner; an upper bound, 0 if unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCaches:
    """The caches of all layers, as a forward function takes and returns them.

    layers: keys and values; None for a layer without attention. states: those of a recurrence; none for others.
    cross: keys and values of what an encoder made of the other input, None for a layer that does not read it.
    """

    layers: Sequence[Array]  # device; one opaque cache per layer, made by ops.new_kv_cache
    group_of_layer: Sequence[int]  # device; which block table and slot mapping of the batch a layer uses
    states: Sequence[Sequence[Array]] = ()  # device; per layer, made by ops.new_state; empty if no layer has any
    state_group: int = 0  # device; which block table and slot mapping states use
    cross: Sequence[Array] = ()  # device; per layer, made by ops.new_kv_cache
    cross_group: int = 0  # device; which block table cross attention reads
    images: Array | None = None  # device; [num_rows, num_row_parts * hidden_size], what the encoder made of images


@dataclass(frozen=True, slots=True, kw_only=True)
class LateArray:
    """An array that another thread fills while the forward pass runs."""

    filled: "Future[IntArray]"  # runner
    send: Callable[[IntArray], Array] = lambda array: array  # device; brings it from the host to where it is read

    def result(self) -> Array:
        """Wait for it."""
        return self.send(self.filled.result())


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """What the sampler reads, one row per sampled position. An array that no row needs is None.

    Sparse edits are lists of (row, token) pairs: `bias_*` and `penalty_*` arrays of equal length. A LateArray comes
    only to a runner that says `takes_late_masks`.
    """

    rows: Array | None  # [num_samples] runner; index into the logits rows (logits_indices); None: row i is sample i
    slots: Array  # [num_samples] runner; where the sampled token is remembered for run-ahead
    positions: Array  # [num_samples] runner; position of the token to be sampled, keys the noise
    seeds: Array  # [num_samples] runner; low 32 bits of the mixed seed, as int32 bit pattern
    temperature: Array | None = None  # [num_samples] float32; 0 is greedy; None: all rows are greedy
    top_k: Array | None = None  # [num_samples] int32; 0 keeps all
    top_p: Array | None = None  # [num_samples] float32
    min_p: Array | None = None  # [num_samples] float32
    allow_mask: Array | LateArray | None = None  # [num_samples, ceil(vocab_size / 32)] int32 bits; 1 allows
    bias_rows: Array | None = None  # [num_bias] int32
    bias_tokens: Array | None = None  # [num_bias] int32
    bias_values: Array | None = None  # [num_bias] float32; -inf bans
    penalty_rows: Array | None = None  # [num_penalties] int32
    penalty_tokens: Array | None = None  # [num_penalties] int32
    penalty_counts: Array | None = None  # [num_penalties] int32; occurrences in the output
    repetition: Array | None = None  # [num_samples] float32
    frequency: Array | None = None  # [num_samples] float32
    presence: Array | None = None  # [num_samples] float32
    processors: Sequence[tuple[int, Any]] = ()  # (row, f(logits [vocab_size]) -> logits) on the host
    num_logprobs: int = -1  # -1: none; else how many most likely tokens besides the chosen one

    def arrived(self) -> "SamplingBatch":
        """The same with all arrays there."""
        mask = self.allow_mask
        return replace(self, allow_mask=mask.result()) if isinstance(mask, LateArray) else self


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobsBatch:
    """Positions of prompts whose log probabilities were asked for."""

    rows: Array  # [num_positions] runner; index into the tokens of this step
    targets: Array  # [num_positions] runner; the token that follows
    num_logprobs: int  # runner


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingBatch:
    """Requests that get a vector out of this step: the mean of their hidden states, through the model's head."""

    starts: Array  # [num_pooled] runner; the first token of the mean, by its place in the tokens of this step
    ends: Array  # [num_pooled] runner; one behind the last


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """One step for the device."""

    forward: ForwardBatch  # runner
    sampling: SamplingBatch | None = None  # runner
    prompt_logprobs: PromptLogprobsBatch | None = None  # runner
    pooling: PoolingBatch | None = None  # runner
    encoder: EncoderBatch | None = None  # runner; runs before the forward batch, which may read what it stores


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobArrays:
    """Log probabilities on the host, of the distribution before penalties, temperature and masks."""

    chosen: FloatArray  # [num_rows] device; of the chosen (or target) token
    ranks: IntArray  # [num_rows] device; 1 is the most likely
    top_ids: IntArray  # [num_rows, num_logprobs] device; most likely first
    top_values: FloatArray  # [num_rows, num_logprobs] device

    def of_rows(self, rows: Sequence[int] | slice) -> "LogprobArrays":
        """Those of some rows, in this order."""
        return LogprobArrays(
            chosen=self.chosen[rows],
            ranks=self.ranks[rows],
            top_ids=self.top_ids[rows],
            top_values=self.top_values[rows],
        )

    @staticmethod
    def joined(parts: Sequence["LogprobArrays"]) -> "LogprobArrays":
        """The rows of at least one, one after the other."""
        return LogprobArrays(
            chosen=np.concatenate([part.chosen for part in parts]),
            ranks=np.concatenate([part.ranks for part in parts]),
            top_ids=np.concatenate([part.top_ids for part in parts]),
            top_values=np.concatenate([part.top_values for part in parts]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What a device gives back for one StepInput; numpy."""

    token_ids: IntArray  # [num_samples] device
    logprobs: LogprobArrays | None = None  # device
    prompt_logprobs: LogprobArrays | None = None  # device
    pooled: FloatArray | None = None  # [num_pooled, n] device
    timings: Mapping[str, float] = field(default_factory=dict)  # device; seconds


# ---- runner -> scheduler -> engine ------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log probabilities for one token of one request: the chosen token first, then the most likely ones."""

    token_ids: Sequence[int]  # runner
    logprobs: Sequence[float]  # runner
    ranks: Sequence[int]  # runner
    position: int  # runner; of the token in the request, so that a recomputed prompt reports nothing twice


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step gave, row by row of its plan."""

    step: int  # runner
    token_ids: Sequence[Sequence[int]]  # runner; per row, empty if it did not sample
    forced: Mapping[int, Sequence[int]] = field(default_factory=dict)  # runner; by row: tokens behind the sampled
    # one that a grammar leaves no choice about; their KV is yet to be computed
    logprobs: Mapping[int, Sequence[TokenLogprobs]] = field(default_factory=dict)  # runner; by row
    prompt_logprobs: Mapping[int, Sequence[TokenLogprobs]] = field(default_factory=dict)  # runner; by row
    pooled: Mapping[int, FloatArray] = field(default_factory=dict)  # runner; by row: the request's vector [n]
    failed: Mapping[int, str] = field(default_factory=dict)  # runner; by row: why this request cannot go on
    num_drafts: Mapping[int, int] | None = None  # runner; by row: tokens guessed for its next step; None: all that a
    # scheduler counts on
    error: str = ""  # executor; the step failed and nothing of it counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one step changed for one request."""

    request_id: str  # scheduler
    token_ids: Sequence[int]  # scheduler
    finish_reason: FinishReason | None = None  # scheduler
    stop_reason: int | str | None = None  # scheduler: the stop token's id; engine: the stop string
    num_cached_tokens: int = 0  # scheduler; prefix-cache hits of the request
    logprobs: Sequence[TokenLogprobs] = ()  # runner
    prompt_logprobs: Sequence[TokenLogprobs] = ()  # runner
    pooled: FloatArray | None = None  # runner; the vector that the request asked for
    error: str = ""  # scheduler; why finish_reason is "error"
    is_own_error: bool = False  # scheduler; True if what the request asked for cannot be done


# ---- engine -> user ---------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """One token's log probability, as users see it."""

    logprob: float  # runner
    rank: int | None  # runner; 1 is the most likely
    decoded_token: str  # engine (detokenizer)
    bytes: Sequence[int] = ()  # engine (detokenizer); the token's own bytes, which may be part of a character


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One completion. In a stream, each output holds all that was generated so far."""

    index: int  # llm
    text: str  # engine (detokenizer)
    token_ids: list[int]  # scheduler
    cumulative_logprob: float | None = None  # engine
    logprobs: list[dict[int, Logprob]] | None = None  # engine
    finish_reason: FinishReason | None = None  # scheduler or engine
    stop_reason: int | str | None = None  # scheduler or engine

    @property
    def finished(self) -> bool:
        """True once the completion has ended."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimings:
    """When things happened to a request; seconds of the engine's clock."""

    arrival_s: float  # llm / server
    scheduled_s: float | None = None  # engine; first time in a plan
    first_token_s: float | None = None  # engine
    finished_s: float | None = None  # engine


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """A request's state as its user sees it: in a stream so far, in the end whole."""

    request_id: str  # llm
    prompt: str | None  # llm
    prompt_token_ids: list[int]  # llm
    outputs: list[CompletionOutput]  # llm; by index
    finished: bool  # llm
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # engine; None for the first token
    num_cached_tokens: int = 0  # scheduler
    timings: RequestTimings | None = None  # engine
    pooled: FloatArray | None = None  # runner; [n], of a request for a vector, which has no text
    error: str = ""  # scheduler; why a finish_reason is "error"
    encoder_prompt: str | None = None  # llm; the text that the encoder read
    encoder_prompt_token_ids: list[int] | None = None  # llm
    is_own_error: bool = False  # scheduler; True if the error is what the request asked for, not the engine's
