"""Types of /v1/audio/transcriptions and /v1/audio/translations: a form with a recording in, text out."""

from typing import Any, Literal

import msgspec

Format = Literal["json", "text", "srt", "verbose_json", "vtt"]


class TranscriptionRequest(msgspec.Struct, kw_only=True):
    """The fields of the form besides `file`, which is the recording."""

    model: str | None = None
    language: str | None = None
    """of the recording, a code such as en; nothing: found by listening"""
    prompt: str = ""
    """text that might have come before"""
    response_format: Format = "json"
    temperature: float = 0.0
    stream: bool = False
    seed: int | None = None
    timestamp_granularities: list[Literal["segment"]] = []
    compression_ratio_threshold: float | None = None
    logprob_threshold: float | None = None
    no_speech_threshold: float | None = None


class DurationUsage(msgspec.Struct, kw_only=True):
    """What is billed."""

    type: Literal["duration"] = "duration"
    seconds: int


class TranscriptionSegment(msgspec.Struct, kw_only=True):
    """A piece of the text with its times in seconds."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class TranscriptionResponse(msgspec.Struct, kw_only=True, omit_defaults=True):
    """response_format json; of verbose_json all fields."""

    text: str
    task: str | None = None
    language: str | None = None
    duration: float | None = None
    segments: list[TranscriptionSegment] | None = None
    usage: DurationUsage | None = None


class TranscriptionEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An event of a stream: a piece of the text, or all of it at the end."""

    type: Literal["transcript.text.delta", "transcript.text.done"]
    delta: str | None = None
    text: str | None = None
    usage: Any = None
