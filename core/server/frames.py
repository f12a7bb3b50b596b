"""What front and engine process say to each other: msgpack frames with a length before each, over one socket.

front --Start, Add, Abort, SetLora, Watch, Stop--> engine process --Ready or Failed, then StepFrame after every step,
LoraDone after each SetLora--> front
"""

import dataclasses
import struct
from collections.abc import Iterator, Mapping
from typing import Any, Self

import msgspec
import numpy as np

from ..errors import RequestError
from ..sampling.params import SamplingParams
from ..stages import FinishReason, ImageInput

HEADER = struct.Struct("<I")
"""Number of bytes that follow."""
MAX_FRAME_BYTES = 2**31
READ_BYTES = 1 << 18


class Start(msgspec.Struct, array_like=True, tag="start", frozen=True):
    """Build the engine from these options (flat names)."""

    options: dict[str, Any]


class ImageFrame(msgspec.Struct, array_like=True, frozen=True):
    """One image of a prompt, as ImageInput has it."""

    patches: bytes
    """float32, num_features for each of grid[0] * grid[1] patches of each tile"""
    grid: tuple[int, int]
    places: bytes
    """int32"""
    num_tiles: int = 1
    rows: bytes | None = None
    """int32"""
    weights: bytes | None = None
    """float32"""

    @classmethod
    def of(cls, image: ImageInput) -> Self:
        """An image on its way."""
        return cls(
            patches=image.patches.tobytes(),
            grid=image.grid,
            places=image.places.tobytes(),
            num_tiles=image.num_tiles,
            rows=None if image.rows is None else image.rows.tobytes(),
            weights=None if image.weights is None else image.weights.tobytes(),
        )

    def image(self) -> ImageInput:
        """The image again."""
        height, width = self.grid
        places = np.frombuffer(self.places, np.int32)
        count, rows, weights = len(places), self.rows, self.weights
        return ImageInput(
            patches=np.frombuffer(self.patches, np.float32).reshape(self.num_tiles * height * width, -1),
            grid=self.grid,
            places=places,
            num_tiles=self.num_tiles,
            rows=None if rows is None else np.frombuffer(rows, np.int32).reshape(count, -1),
            weights=None if weights is None else np.frombuffer(weights, np.float32).reshape(count, -1),
        )


class Add(msgspec.Struct, array_like=True, tag="add", frozen=True):
    """Run one completion. output_token_ids: what an engine that died had generated for it."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: dict[str, Any]
    """those that are not the defaults, by name"""
    priority: int = 0
    cache_salt: str = ""
    output_token_ids: list[int] = []
    pooling: bool = False
    """a vector is asked for, not text"""
    token_types: list[int] = []
    """for a vector: which text of a pair each token belongs to"""
    encoder_token_ids: list[int] = []
    """the other input of an encoder-decoder model, or"""
    encoder_features: bytes = b""
    """float32 frames, of num_features numbers each"""
    num_features: int = 0
    images: list[ImageFrame] = []
    lora: str = ""
    """name of an adapter"""


class Abort(msgspec.Struct, array_like=True, tag="abort", frozen=True):
    """Drop completions; nothing more is said of them."""

    request_ids: list[str]


class SetLora(msgspec.Struct, array_like=True, tag="set_lora", frozen=True):
    """Load an adapter from a folder, or unload it."""

    name: str
    folder: str
    """empty: unload"""


class LoraDone(msgspec.Struct, array_like=True, tag="lora_done", frozen=True):
    """What became of a SetLora."""

    name: str
    error: str = ""
    code: str = ""


class Watch(msgspec.Struct, array_like=True, tag="watch", frozen=True):
    """Describe every step from now on, or no longer."""

    is_on: bool


class Stop(msgspec.Struct, array_like=True, tag="stop", frozen=True):
    """End the process."""


class Ready(msgspec.Struct, array_like=True, tag="ready", frozen=True):
    """The engine is loaded."""

    pid: int
    model: str
    """name of the model"""
    max_model_len: int
    vocab_size: int
    num_blocks: int
    """usable KV blocks of all groups"""
    device: str
    eos_token_ids: list[int]
    logits_processors: list[str]
    sampling_params: dict[str, Any]
    """what the checkpoint says about generation, where a request says nothing"""
    reads_images: bool = False


class Failed(msgspec.Struct, array_like=True, tag="failed", frozen=True):
    """The engine could not be built; the process ends."""

    kind: str
    """name of the class in core/errors.py, or "" for an error that is none of headrace's"""
    reason: str
    remedies: list[str]


class LogprobEntry(msgspec.Struct, array_like=True, frozen=True):
    """One token's log probability."""

    token_id: int
    logprob: float
    rank: int | None
    text: str
    token_bytes: bytes


TokenEntries = list[LogprobEntry]
"""Of one position: the chosen token first, then the most likely ones, most likely first."""


class Output(msgspec.Struct, array_like=True):
    """What is new of one completion. Several in a row can be merged into one."""

    request_id: str
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    logprobs: list[TokenEntries] | None = None
    prompt_logprobs: list[TokenEntries | None] | None = None
    scheduled_s: float | None = None
    error: str = ""
    code: str = ""
    """of the error, if the request itself is wrong"""
    pooled: bytes | None = None
    """the vector that was asked for, float32"""


class Stats(msgspec.Struct, array_like=True, frozen=True):
    """The engine's gauges and counters after a step."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_preemptions: int
    num_hit_tokens: int
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


class TraceRow(msgspec.Struct, array_like=True, frozen=True):
    """One completion's share of a step."""

    request_id: str
    num_tokens: int
    is_prefill: bool


class KVGroupTrace(msgspec.Struct, array_like=True, frozen=True):
    """Who holds the blocks of one KV group. Ids are given as runs: first, count, first, count, ..."""

    num_blocks: int
    held: dict[str, list[int]]
    """by request id; a block of several requests is a shared prefix"""
    cached: list[int]
    """of no request, but a prefix that may be hit"""


class StepTrace(msgspec.Struct, array_like=True, frozen=True):
    """One step as the page draws it."""

    step: int
    """-1: none, only the blocks are new"""
    seconds: float
    rows: list[TraceRow]
    kv: list[KVGroupTrace] | None = None
    """None: as they were"""


class StepFrame(msgspec.Struct, array_like=True, tag="step", frozen=True):
    """All that one step (or a change of the queue) came to. accepted: requests that passed the engine's checks."""

    outputs: list[Output]
    accepted: list[str]
    stats: Stats
    trace: StepTrace | None = None
    """None: nobody watches"""


ToEngine = Start | Add | Abort | SetLora | Watch | Stop
ToFront = Ready | Failed | LoraDone | StepFrame

_encoder = msgspec.msgpack.Encoder()


def pack(message: ToEngine | ToFront) -> bytes:
    """A message as a frame."""
    body = _encoder.encode(message)
    return HEADER.pack(len(body)) + body


class FrameSplitter:
    """Cuts a stream of bytes into the bodies of frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def push(self, data: bytes) -> Iterator[bytes]:
        """The frames that are complete with this data. Raises ValueError for a length that cannot be."""
        buffer = self._buffer
        buffer += data
        start, length = 0, len(buffer)
        while length - start >= HEADER.size:
            (size,) = HEADER.unpack_from(buffer, start)
            if size > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {size} bytes")
            end = start + HEADER.size + size
            if end > length:
                break
            yield bytes(memoryview(buffer)[start + HEADER.size : end])
            start = end
        if start:
            del buffer[:start]


def params_to_wire(params: SamplingParams) -> dict[str, Any]:
    """The fields that are not the defaults. Raises RequestError for numbers that no frame can hold."""
    wire: dict[str, Any] = {}
    for name, default in _DEFAULTS.items():
        value = getattr(params, name)
        if value != default:
            wire[name] = value
    try:
        _encoder.encode(wire)
    except OverflowError:
        raise RequestError("a number has more than 64 bits") from None
    return wire


def params_from_wire(wire: Mapping[str, Any]) -> SamplingParams:
    """The parameters that `params_to_wire` wrote."""
    return SamplingParams(**wire)


def merge(first: Output, second: Output) -> None:
    """Add what came second to the first."""
    first.text += second.text
    first.token_ids += second.token_ids
    if second.finish_reason is not None:
        first.finish_reason, first.stop_reason = second.finish_reason, second.stop_reason
        first.error, first.code = second.error, second.code
    first.num_cached_tokens = max(first.num_cached_tokens, second.num_cached_tokens)
    if second.logprobs is not None:
        first.logprobs = (first.logprobs or []) + second.logprobs
    if first.prompt_logprobs is None:
        first.prompt_logprobs = second.prompt_logprobs
    if first.scheduled_s is None:
        first.scheduled_s = second.scheduled_s


_DEFAULTS = {field.name: getattr(SamplingParams(), field.name) for field in dataclasses.fields(SamplingParams)}
