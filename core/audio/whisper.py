"""How Whisper is asked for text: its tokens, windows of 30 s, and the answers put together (Radford et al. 2022).

`transcription` knows no engine: it yields questions and is sent the answers, so that the same code serves the Python
API, which runs them at once, and the server, which waits for them among others.
"""

import math
import zlib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ..errors import ModelError, RequestError
from ..models.config import HFConfig
from ..models.spec import ModelSpec
from ..other_names import known_names
from ..sampling.params import SamplingParams
from ..stages import EncoderInput, FloatArray
from ..suggest import did_you_mean
from ..text.tokenizer import Tokenizer
from .languages import LANGUAGES
from .mel import FRAMES_PER_S, SAMPLE_RATE, WINDOW_FRAMES, log_mel
from .timestamps import NAME as RULES

SECONDS_PER_TIMESTAMP = 0.02
_LEAST_FRAMES = 10
"""By so many a window moves on at least, whatever its timestamps say."""
Task = Literal["transcribe", "translate"]


@known_names
@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptionParams:
    """What is asked of a recording."""

    language: str | None = None
    """code or English name; None: found by listening"""
    task: Task = "transcribe"
    """translate: into English"""
    prompt: str = ""
    """text that might have come before: names and spellings"""
    timestamps: bool | None = None
    """segments with their times; None: if the recording is longer than 30 s, which needs them"""
    temperature: float | Sequence[float] = 0.0
    """several: the next one is tried where one of the thresholds says that the text is bad"""
    compression_ratio_threshold: float | None = None
    """text that packs better than this repeats itself; 2.4 is usual"""
    logprob_threshold: float | None = None
    """mean log probability below which a text is bad; -1.0 is usual"""
    no_speech_threshold: float | None = None
    """probability of silence above which a window with a bad text is left out; 0.6 is usual"""
    condition_on_previous: bool = False
    """each window is told the text before it"""
    seed: int | None = None

    @property
    def temperatures(self) -> tuple[float, ...]:
        """One or several."""
        if isinstance(self.temperature, int | float):
            return (float(self.temperature),)
        return tuple(self.temperature) or (0.0,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A piece of a transcription; times in seconds. The last three are those of the window that it is from."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: Sequence[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcription:
    """The text of a recording."""

    text: str
    language: str
    """its code"""
    duration_s: float
    segments: Sequence[Segment]
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One request to the model."""

    token_ids: list[int]
    encoder: EncoderInput
    params: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of it. logprobs: of each token; prompt_logprob: of the prompt's last token, if that was asked for."""

    token_ids: Sequence[int]
    logprobs: Sequence[float] = ()
    prompt_logprob: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WhisperModel:
    """The tokens of one checkpoint."""

    tokenizer: Tokenizer
    num_mel_bins: int
    max_length: int
    start: int
    end: int
    no_timestamps: int
    no_speech: int
    previous: int
    languages: Mapping[str, int]
    """code -> token; empty: English only"""
    tasks: Mapping[str, int]
    suppress: Sequence[int] = ()
    begin_suppress: Sequence[int] = ()
    max_initial_timestamp: int | None = None
    text_tokens: range = field(default_factory=lambda: range(0))

    def language(self, name: str | None) -> str | None:
        """The code of a language. Raises RequestError for one that the model does not know."""
        if name is None:
            return None
        code = name.lower().strip()
        code = code if code in self.languages else {text: code for code, text in LANGUAGES.items()}.get(code, code)
        if not self.languages and code in ("en", "english"):
            return "en"
        if code not in self.languages:
            known = ", ".join(self.languages) or "en"
            raise RequestError(
                f"no language {name!r}{did_you_mean(code, [*self.languages, *LANGUAGES.values()])}; known: {known}",
                code="invalid_language",
            )
        return code

    def prompt(self, language: str, task: Task, timestamps: bool, before: Sequence[int]) -> list[int]:
        """The decoder's prompt. before: text tokens that came before this window."""
        room = self.max_length // 2 - 1
        context = [self.previous, *before[-room:]] if before else []
        own = [self.languages[language], self.tasks[task]] if self.languages else []
        return [*context, self.start, *own, *([] if timestamps else [self.no_timestamps])]

    def params(
        self, num_prompt_tokens: int, timestamps: bool, temperature: float, seed: int | None
    ) -> SamplingParams:
        """How a window's text is sampled."""
        rules = {
            "timestamp_begin": self.no_timestamps + 1 if timestamps else -1,
            "end": self.end,
            "begin_suppress": list(self.begin_suppress),
            "max_initial_timestamp": self.max_initial_timestamp,
        }
        banned = {token: float("-inf") for token in (*self.suppress, *([self.no_timestamps] if timestamps else []))}
        return SamplingParams(
            max_tokens=self.max_length - num_prompt_tokens,
            temperature=temperature,
            seed=seed,
            logit_bias=banned,
            logits_processors=(RULES,),
            extra_args={RULES: rules},
            logprobs=0,
            detokenize=False,
        )

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, without those that stand for something else."""
        return self.tokenizer.decode([token for token in token_ids if token in self.text_tokens])


def read_whisper(
    spec: ModelSpec, config: HFConfig, generation: Mapping[str, Any], tokenizer: Tokenizer | None
) -> WhisperModel:
    """The tokens as generation_config.json names them, or else the tokenizer.

    Raises RequestError for a model that does not listen, ModelError for one whose tokenizer is another's.
    """
    if spec.encoder is None or not spec.encoder.num_features:
        raise RequestError(f"a {spec.model_type} model does not listen to speech", code="not_supported")
    if tokenizer is None:
        raise RequestError("speech needs a tokenizer, and skip_tokenizer_init is set", code="no_tokenizer")

    def find(*names: str) -> int:
        ids = [tokenizer.token_id(name) for name in names]
        found = next((token for token in ids if token is not None), None)
        if found is None:
            raise ModelError(f"the tokenizer has no token {names[0]}: it does not belong to Whisper")
        return found

    start = find("<|startoftranscript|>")
    end = find("<|endoftext|>")
    stated = generation.get("lang_to_id")
    if isinstance(stated, dict):
        languages = {str(name).strip("<|>"): int(token) for name, token in stated.items()}
    else:
        tokens = {code: tokenizer.token_id(f"<|{code}|>") for code in LANGUAGES}
        languages = {code: token for code, token in tokens.items() if token is not None}
    # English-only models have the tokens, too, but were not trained with them.
    is_multilingual = generation.get("is_multilingual", config.size("vocab_size") >= 51865)
    most = generation.get("max_initial_timestamp_index")
    return WhisperModel(
        tokenizer=tokenizer,
        num_mel_bins=config.size("num_mel_bins", 80),
        max_length=config.size("max_target_positions", 448),
        start=start,
        end=end,
        no_timestamps=int(generation.get("no_timestamps_token_id") or find("<|notimestamps|>")),
        no_speech=find("<|nospeech|>", "<|nocaptions|>"),
        previous=find("<|startofprev|>"),
        languages=languages if is_multilingual else {},
        tasks={task: find(f"<|{task}|>") for task in ("transcribe", "translate")},
        suppress=_ids(generation.get("suppress_tokens") or config.get("suppress_tokens")),
        begin_suppress=_ids(generation.get("begin_suppress_tokens") or config.get("begin_suppress_tokens")),
        max_initial_timestamp=most if isinstance(most, int) else None,
        text_tokens=range(end),
    )


Asking = Generator[list[Question], list[Answer], None]
"""Yields questions, some at a time, and is sent their answers in order."""


class Transcriber:
    """One recording on its way to text. `segments` grows while the questions of `ask` are answered."""

    def __init__(self, model: WhisperModel, samples: FloatArray, params: TranscriptionParams) -> None:
        """samples: float32 [num_samples] at 16 kHz. Raises RequestError."""
        if not len(samples):
            raise RequestError("there is no sound in the recording", code="invalid_audio")
        for temperature in params.temperatures:
            SamplingParams(
                temperature=temperature, seed=params.seed
            )  # what is wrong is told before anything is heard
        frames = log_mel(samples, model.num_mel_bins)
        self.model = model
        self.params = params
        self.duration_s = len(samples) / SAMPLE_RATE
        self.segments: list[Segment] = []
        self.language = model.language(params.language) or ("" if model.languages else "en")
        self.num_prompt_tokens = self.num_output_tokens = 0
        self._frames = frames
        is_long = len(frames) > WINDOW_FRAMES
        self._timestamps = is_long if params.timestamps is None else params.timestamps
        if is_long and not self._timestamps:
            raise RequestError("a recording of more than 30 s needs timestamps, by which windows follow each other")
        if params.task == "translate" and not model.languages:
            raise RequestError("this model knows English only, and translates nothing", code="not_supported")
        self._prompt = model.tokenizer.encode(" " + params.prompt.strip(), False) if params.prompt.strip() else []

    def result(self) -> Transcription:
        """All that there is so far."""
        return Transcription(
            text="".join(segment.text for segment in self.segments).strip(),
            language=self.language,
            duration_s=self.duration_s,
            segments=tuple(self.segments),
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
        )

    def ask(self) -> Asking:
        """The questions, some at a time; to be sent their answers in order."""
        num_frames = min(len(self._frames), math.ceil(self.duration_s * FRAMES_PER_S))
        seek, before = 0, list(self._prompt)
        while seek < num_frames:
            window = EncoderInput(features=self._window(seek))
            if not self.language:
                yield from self._detect(window)
            seek_frames = min(WINDOW_FRAMES, num_frames - seek)
            found, heard = yield from self._listen(window, before)
            if heard is None:
                seek += seek_frames
                continue
            segments, moved = self._cut(found, seek, seek_frames)
            for start_s, end_s, tokens in segments:
                self.segments.append(self._segment(seek, start_s, end_s, tokens, heard))
            if self.params.condition_on_previous:
                before += [token for token in found if token in self.model.text_tokens]
            if not self._timestamps:
                break
            seek += max(moved, _LEAST_FRAMES)

    def _window(self, seek: int) -> FloatArray:
        part = self._frames[seek : seek + WINDOW_FRAMES]
        return np.pad(part, ((0, WINDOW_FRAMES - len(part)), (0, 0)))

    def _detect(self, window: EncoderInput) -> Asking:
        """Find the language: the most likely of their tokens behind the start."""
        tokens = {token: code for code, token in self.model.languages.items()}
        params = SamplingParams(max_tokens=1, temperature=0.0, allowed_token_ids=tuple(tokens), detokenize=False)
        (answer,) = yield [Question(token_ids=[self.model.start], encoder=window, params=params)]
        self.language = tokens[answer.token_ids[0]]

    def _listen(
        self, window: EncoderInput, before: Sequence[int]
    ) -> Generator[list[Question], list[Answer], tuple[list[int], "_Heard | None"]]:
        """The tokens of a window, and how good they are; None if it holds no speech."""
        model, asked = self.model, self.params
        prompt = model.prompt(self.language, asked.task, self._timestamps, before)
        silence = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=0, detokenize=False)
        no_speech_prob = 0.0
        found: list[int] = []
        heard: _Heard | None = None
        for attempt, temperature in enumerate(asked.temperatures):
            params = model.params(len(prompt), self._timestamps, temperature, asked.seed)
            questions = [Question(token_ids=prompt, encoder=window, params=params)]
            wants_silence = attempt == 0 and (asked.no_speech_threshold is not None or self._timestamps)
            if wants_silence:
                tokens = [model.start, model.no_speech]
                questions.append(Question(token_ids=tokens, encoder=window, params=silence))
            answers = yield questions
            if wants_silence:
                no_speech_prob = float(np.exp(answers[1].prompt_logprob))
            self.num_prompt_tokens += len(prompt)
            self.num_output_tokens += len(answers[0].token_ids)
            found = [token for token in answers[0].token_ids if token != model.end]
            heard = _Heard(
                temperature=temperature,
                avg_logprob=sum(answers[0].logprobs) / (len(answers[0].logprobs) or 1),
                compression_ratio=_compression_ratio(model.text(found)),
                no_speech_prob=no_speech_prob,
            )
            is_silent = asked.no_speech_threshold is not None and no_speech_prob > asked.no_speech_threshold
            is_unsure = asked.logprob_threshold is not None and heard.avg_logprob < asked.logprob_threshold
            if is_silent and (is_unsure or asked.logprob_threshold is None):
                return [], None
            limit = asked.compression_ratio_threshold
            if not is_unsure and (limit is None or heard.compression_ratio <= limit):
                break
        return found, heard

    def _cut(self, tokens: list[int], seek: int, seek_frames: int) -> "tuple[list[_Piece], int]":
        """(start and end in seconds, tokens) of each piece, and the frames by which the next window is further on.

        Two timestamps in a row end one piece and begin the next; what comes behind the last pair is heard again in
        the next window, unless the window ends with a single timestamp: then nothing was said behind it.
        """
        begin, offset_s = self.model.no_timestamps + 1, seek / FRAMES_PER_S
        if not self._timestamps:
            return [(0.0, self.duration_s, tokens)], seek_frames

        def seconds(token: int) -> float:
            return offset_s + (token - begin) * SECONDS_PER_TIMESTAMP

        is_time = [token >= begin for token in tokens]
        cuts = [i + 1 for i in range(len(tokens) - 1) if is_time[i] and is_time[i + 1]]
        if not cuts:
            times = [token for token in tokens if token >= begin]
            end_s = offset_s + seek_frames / FRAMES_PER_S
            if times and times[-1] != begin:
                end_s = seconds(times[-1])
            return [(offset_s, min(end_s, max(offset_s, self.duration_s)), tokens)], seek_frames
        ends_once = is_time[-2:] == [False, True]
        pieces = [tokens[start:end] for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True)]
        if not ends_once:
            pieces.pop()
        found = [(seconds(piece[0]), seconds(piece[-1]), piece) for piece in pieces]
        if ends_once:
            return found, seek_frames
        return found, round((tokens[cuts[-1] - 1] - begin) * SECONDS_PER_TIMESTAMP * FRAMES_PER_S)

    def _segment(self, seek: int, start_s: float, end_s: float, tokens: list[int], heard: "_Heard") -> Segment:
        return Segment(
            id=len(self.segments),
            seek=seek,
            start=round(start_s, 2),
            end=round(end_s, 2),
            text=self.model.text(tokens),
            tokens=tokens,
            temperature=heard.temperature,
            avg_logprob=heard.avg_logprob,
            compression_ratio=heard.compression_ratio,
            no_speech_prob=heard.no_speech_prob,
        )


_Piece = tuple[float, float, list[int]]
"""Start and end in seconds, and the tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Heard:
    """How good the text of a window is."""

    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


def _compression_ratio(text: str) -> float:
    data = text.encode()
    return len(data) / len(zlib.compress(data)) if data else 0.0


def _ids(value: Any) -> tuple[int, ...]:
    """Token ids; -1 in old files stands for tokens that the tokenizer's own rules name, which are rarely there."""
    return tuple(token for token in value if isinstance(token, int) and token >= 0) if isinstance(value, list) else ()
