"""Beam search: the likeliest texts instead of the likeliest next token, above an engine that gives log probabilities.

Candidates, ends and scores are those of transformers' generate (num_beams, length_penalty, early_stopping,
no_repeat_ngram_size, forced_eos_token_id), so that both find the same texts.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from .errors import ConfigError
from .other_names import known_names

MAX_BEAMS = 10


@known_names
@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """How beams are searched."""

    beam_width: int = 4
    """texts that are kept at each step, and found in the end"""
    max_tokens: int = 128
    length_penalty: float = 1.0
    """a text's score is its log probability divided by its length to this power"""
    early_stopping: bool | Literal["never"] = False
    """True: as soon as beam_width texts have ended; False: when none that is open is likely to win, by its length so
    far; "never": when none can win, by the longest that it may become"""
    no_repeat_ngram_size: int = 0
    """so many tokens in a row never come twice; 0 lets them"""
    forced_eos_token_id: int | None = None
    """the last of max_tokens is this one"""
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Raises ConfigError for an impossible value."""
        for name in ("beam_width", "max_tokens", "no_repeat_ngram_size", "forced_eos_token_id"):
            value = getattr(self, name)
            if type(value) is not int and not (name == "forced_eos_token_id" and value is None):
                raise ConfigError(f"{name} must be a whole number, got {value!r}")
        if isinstance(self.length_penalty, bool) or not isinstance(self.length_penalty, int | float):
            raise ConfigError(f"length_penalty must be a number, got {self.length_penalty!r}")
        if not math.isfinite(self.length_penalty):
            raise ConfigError(f"length_penalty must be finite, got {self.length_penalty}")
        if self.early_stopping not in (True, False, "never"):
            raise ConfigError(f"early_stopping must be True, False or 'never', got {self.early_stopping!r}")
        if not 1 <= self.beam_width <= MAX_BEAMS:
            raise ConfigError(f"beam_width must be 1 to {MAX_BEAMS}, got {self.beam_width}")
        if self.max_tokens < 1 or self.no_repeat_ngram_size < 0:
            raise ConfigError("max_tokens must be at least 1, and no_repeat_ngram_size at least 0")


def read_beam_search(generation: Mapping[str, Any], **changes: Any) -> BeamSearchParams:
    """What a generation_config.json asks for. changes: fields that a caller states."""
    names = {"beam_width": "num_beams", "max_tokens": "max_new_tokens"}
    fields = ("beam_width", "max_tokens", "length_penalty", "early_stopping", "no_repeat_ngram_size")
    stated = {name: generation.get(names.get(name, name)) for name in (*fields, "forced_eos_token_id")}
    if stated["max_tokens"] is None and isinstance(generation.get("max_length"), int):
        stated["max_tokens"] = max(generation["max_length"] - 1, 1)
    return BeamSearchParams(**{name: value for name, value in {**stated, **changes}.items() if value is not None})


@dataclass(frozen=True, slots=True, kw_only=True)
class Beam:
    """One text. score: of an open one its log probability, of an ended one divided by its length."""

    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0
    score: float = 0.0
    has_stopped: bool = False
    """ended by a token, not by its length"""


@dataclass(slots=True)
class BeamSearch:
    """The search behind one prompt: `advance` by what may follow the open beams, until `is_done`.

    prompt: the decoder's tokens so far; num_given: how many of them count as the text's own.
    Invariant: open and ended beams are sorted, the best first, beam_width at most.
    """

    params: BeamSearchParams
    prompt: Sequence[int]
    stop_token_ids: Collection[int]
    bad_word_ids: Sequence[Sequence[int]] = ()
    num_given: int = 0
    open: list[Beam] = field(default_factory=lambda: [Beam()])
    ended: list[Beam] = field(default_factory=list)
    is_done: bool = False

    @property
    def num_logprobs(self) -> int:
        """How many of the likeliest tokens `advance` wants for each open beam."""
        repeated = max((len(self._repeats(beam)) for beam in self.open), default=0)
        return self.num_candidates + len(self.bad_word_ids) + repeated

    def advance(self, followers: Sequence[Mapping[int, float]]) -> None:
        """One step. followers: for each open beam, log probabilities of the likeliest next tokens."""
        width, length = self.params.beam_width, len(self.open[0].token_ids) + 1
        candidates: list[Beam] = []
        for beam, logprobs in zip(self.open, followers, strict=True):
            for token, logprob in self._allowed(beam, logprobs, length).items():
                has_stopped = token in self.stop_token_ids and not self.params.ignore_eos
                total = beam.logprob + logprob
                token_ids = (*beam.token_ids, token)
                candidates.append(Beam(token_ids=token_ids, logprob=total, score=total, has_stopped=has_stopped))
        candidates = sorted(candidates, key=lambda beam: -beam.score)[: self.num_candidates]
        is_last = length == self.params.max_tokens
        is_full = self.params.early_stopping is True and len(self.ended) == width
        if not is_full:
            self.ended += [self._end(beam) for beam in candidates[:width] if is_last or beam.has_stopped]
            self.ended = sorted(self.ended, key=lambda beam: -beam.score)[:width]
        self.open = [beam for beam in candidates if not (is_last or beam.has_stopped)][:width]
        self.is_done = not self.open or not self._may_improve(length)

    @property
    def num_candidates(self) -> int:
        """Likeliest continuations that a step chooses from."""
        num_stops = 0 if self.params.ignore_eos else len(self.stop_token_ids)
        return max(2, 1 + num_stops) * self.params.beam_width

    def _may_improve(self, length: int) -> bool:
        if len(self.ended) < self.params.beam_width:
            return True
        if self.params.early_stopping is True:
            return False
        is_never = self.params.early_stopping == "never" and self.params.length_penalty > 0
        length = self.params.max_tokens if is_never else length
        best: float = self.open[0].logprob / (length + self.num_given) ** self.params.length_penalty
        return best > self.ended[-1].score

    def _end(self, beam: Beam) -> Beam:
        length = len(beam.token_ids) + self.num_given
        score = beam.logprob / length**self.params.length_penalty
        return Beam(token_ids=beam.token_ids, logprob=beam.logprob, score=score, has_stopped=beam.has_stopped)

    def _allowed(self, beam: Beam, logprobs: Mapping[int, float], length: int) -> Mapping[int, float]:
        forced = self.params.forced_eos_token_id
        if forced is not None and length == self.params.max_tokens:
            return {forced: 0.0}
        unwanted = {*self._ends_of_bad_words(beam), *self._repeats(beam)}
        return {token: logprob for token, logprob in logprobs.items() if token not in unwanted}

    def _ends_of_bad_words(self, beam: Beam) -> set[int]:
        """Tokens that would complete a sequence that no text may hold."""
        ids = (*self.prompt, *beam.token_ids)
        return {word[-1] for word in self.bad_word_ids if len(word) == 1 or ids[1 - len(word) :] == tuple(word[:-1])}

    def _repeats(self, beam: Beam) -> set[int]:
        """Tokens that would repeat what came before."""
        size, ids = self.params.no_repeat_ngram_size, [*self.prompt, *beam.token_ids]
        if not size or len(ids) < size:
            return set()
        tail = ids[len(ids) - size + 1 :]
        return {ids[i + size - 1] for i in range(len(ids) - size + 1) if ids[i : i + size - 1] == tail}
