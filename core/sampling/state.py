"""The host side of sampling: what each slot's request asks for, and the SamplingBatch of a step made from it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import PluginError
from ..stages import FloatArray, IntArray, LateArray, NewRequest, SamplingBatch
from ..structured.compiler import GrammarCache
from ..structured.constraint import Constraint
from ..structured.filler import MaskFiller, MaskRow
from .validate import MAX_LOGPROBS, ProcessorFactories, validate_params

__all__ = ["MAX_LOGPROBS", "ProcessorFactories", "SamplingState", "validate_params"]

_MASK_64 = 2**64 - 1
_NO_INTS: IntArray = np.empty(0, np.int32)
_NO_FLOATS: FloatArray = np.empty(0, np.float32)


@dataclass(slots=True, kw_only=True)
class _Edits:
    """What one request changes in its logits beyond temperature and filters; kept up to date by `append`."""

    bias_tokens: IntArray = field(default_factory=lambda: _NO_INTS)
    bias_values: FloatArray = field(default_factory=lambda: _NO_FLOATS)
    min_tokens: int = 0
    stop_tokens: IntArray = field(default_factory=lambda: _NO_INTS)
    bad_words: tuple[tuple[int, ...], ...] = ()  # of two tokens or more; single ones are in the bias
    allow_mask: IntArray | None = None
    constraint: Constraint | None = None
    penalties: "_TokenCounts | None" = None
    processors: tuple[Callable[..., Any], ...] = ()
    outputs: list[int] = field(default_factory=list)


class SamplingState:
    """Per slot, the sampling parameters of the request that has it. Knows no tokenizer and no device.

    Invariant: a slot is in `_edits`, `_random` or `_logprobs` only if its request needs that, so that a step of
    greedy requests costs a few array reads.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        max_num_seqs: int,
        processors: ProcessorFactories | None = None,
        grammars: GrammarCache | None = None,
        end_token_ids: Sequence[int] = (),
    ) -> None:
        """end_token_ids: tokens with which structured output ends. Requests that need a processor or a grammar may
        only come if there are some here."""
        self._vocab_size = vocab_size
        self._grammars = grammars
        self._filler = MaskFiller()
        self._end_token_ids = tuple(end_token_ids)
        self._processors: Mapping[str, Callable[..., Any]] = processors or {}
        self._seeds = np.zeros(max_num_seqs, np.int32)
        self._num_tokens = [0] * max_num_seqs
        self._num_prompt_tokens = [0] * max_num_seqs
        self._temperature = np.zeros(max_num_seqs, np.float32)
        self._top_k = np.zeros(max_num_seqs, np.int32)
        self._top_p = np.ones(max_num_seqs, np.float32)
        self._min_p = np.zeros(max_num_seqs, np.float32)
        self._repetition = np.ones(max_num_seqs, np.float32)
        self._frequency = np.zeros(max_num_seqs, np.float32)
        self._presence = np.zeros(max_num_seqs, np.float32)
        self._random: set[int] = set()
        self._edits: dict[int, _Edits] = {}
        self._logprobs: dict[int, int] = {}

    def add(self, slot: int, new: NewRequest) -> None:
        """A request takes a slot, whoever had it before. Its parameters passed `validate_params`."""
        params = new.sampling_params
        self.remove(slot)
        self._seeds[slot] = mix_seed(new.seed)
        self._num_tokens[slot] = len(new.token_ids)
        self._num_prompt_tokens[slot] = new.num_prompt_tokens
        if not params.is_greedy:
            self._random.add(slot)
            self._temperature[slot] = params.temperature
            self._top_k[slot] = min(max(params.top_k, 0), self._vocab_size)
            self._top_p[slot] = params.top_p
            self._min_p[slot] = params.min_p
        if params.logprobs is not None:
            self._logprobs[slot] = params.logprobs
        edits = self._read_edits(new)
        if edits is not None:
            self._edits[slot] = edits
            self._repetition[slot] = params.repetition_penalty
            self._frequency[slot] = params.frequency_penalty
            self._presence[slot] = params.presence_penalty

    def remove(self, slot: int) -> None:
        """Forget a slot's request; `add` does so too."""
        self._random.discard(slot)
        self._edits.pop(slot, None)
        self._logprobs.pop(slot, None)
        self._temperature[slot] = self._top_k[slot] = self._min_p[slot] = 0
        self._frequency[slot] = self._presence[slot] = 0
        self._top_p[slot] = self._repetition[slot] = 1

    def append(self, slot: int, token_ids: Sequence[int]) -> None:
        """Tokens that the slot's request has got."""
        self._num_tokens[slot] += len(token_ids)
        self._edit_token(slot, token_ids)

    def append_each(self, slots: Sequence[int], token_ids: Sequence[int]) -> None:
        """One token for each of these slots, which may repeat."""
        num_tokens = self._num_tokens
        for slot in slots:
            num_tokens[slot] += 1
        if self._edits:
            for slot, token in zip(slots, token_ids, strict=True):
                self._edit_token(slot, (token,))

    def take_forced(self, slot: int, limit: int) -> list[int]:
        """Append the tokens that the grammar of the slot's request leaves no choice about, at most `limit`, and give
        them; none if their logits are wanted, or something else has a say in them."""
        edits = self._edits.get(slot)
        if edits is None or edits.constraint is None or slot in self._logprobs:
            return []
        if len(edits.bias_tokens) or edits.bad_words or edits.processors:
            return []
        forced = edits.constraint.take_forced(limit)
        edits.outputs.extend(forced)
        if edits.penalties is not None:
            edits.penalties.count(forced)
        self._num_tokens[slot] += len(forced)
        return forced

    @property
    def has_grammars(self) -> bool:
        """True if the request in any slot keeps to a grammar."""
        return any(edits.constraint is not None for edits in self._edits.values())

    def failure(self, slot: int) -> str:
        """Why the slot's request cannot go on, "" if it can."""
        edits = self._edits.get(slot)
        return edits.constraint.failure if edits is not None and edits.constraint is not None else ""

    def num_tokens(self, slot: int) -> int:
        """Tokens of prompt and output that are known."""
        return self._num_tokens[slot]

    def num_logprobs(self, slot: int) -> int:
        """Most likely tokens whose log probabilities the request wants beside the chosen one's; -1: none at all."""
        return self._logprobs.get(slot, -1)

    def build(self, rows: Sequence[tuple[int, int, int]]) -> SamplingBatch:
        """What the sampler needs for these samples: (row of the logits, slot, position of the token to sample).

        A slot may have several rows, at different positions. Rows 0, 1, 2, ... become None: the logits given to
        `sample_step` must then have these rows and no others. What grammars allow is still being filled in.
        """
        table = np.array(rows, np.int32).reshape(len(rows), 3)
        slots = table[:, 1].copy()
        slot_list = slots.tolist()
        in_order = bool((table[:, 0] == np.arange(len(rows))).all())
        columns: dict[str, Any] = {}
        if not self._random.isdisjoint(slot_list):
            columns["temperature"] = self._temperature[slots]
            for name, values, neutral in (
                ("top_k", self._top_k, 0),
                ("top_p", self._top_p, 1),
                ("min_p", self._min_p, 0),
            ):
                column = values[slots]
                if (column != neutral).any():
                    columns[name] = column
        if self._edits:
            edited = [(n, edits) for n, slot in enumerate(slot_list) if (edits := self._edits.get(slot)) is not None]
            if edited:
                self._build_edits(edited, slots, table[:, 2], columns)
        num_logprobs = -1
        if self._logprobs:
            num_logprobs = max((self._logprobs.get(slot, -1) for slot in slot_list), default=-1)
        return SamplingBatch(
            rows=None if in_order else table[:, 0].copy(),
            slots=slots,
            positions=table[:, 2].copy(),
            seeds=self._seeds[slots],
            num_logprobs=min(num_logprobs, self._vocab_size),
            **columns,
        )

    def _edit_token(self, slot: int, token_ids: Sequence[int]) -> None:
        edits = self._edits.get(slot)
        if edits is not None:
            edits.outputs.extend(token_ids)
            if edits.penalties is not None:
                edits.penalties.count(token_ids)
            if edits.constraint is not None:
                edits.constraint.accept(token_ids)

    def close(self) -> None:
        """End the thread that fills masks."""
        self._filler.close()

    @property
    def wants_logprobs(self) -> bool:
        """True if a request in any slot wants log probabilities."""
        return bool(self._logprobs)

    def _build_edits(
        self,
        edited: Sequence[tuple[int, _Edits]],
        slots: IntArray,
        positions: IntArray,
        columns: dict[str, Any],
    ) -> None:
        bias: list[tuple[int, IntArray, FloatArray]] = []
        penalties: list[tuple[int, IntArray, IntArray]] = []
        processors: list[tuple[int, Callable[..., Any]]] = []
        mask: IntArray | None = None
        to_fill: list[MaskRow] = []
        for n, edits in edited:
            num_outputs = int(positions[n]) - self._num_prompt_tokens[int(slots[n])]
            if len(edits.bias_tokens):
                bias.append((n, edits.bias_tokens, edits.bias_values))
            banned = _banned_now(edits, num_outputs)
            if len(banned):
                bias.append((n, banned, np.full(len(banned), -np.inf, np.float32)))
            if edits.penalties is not None and edits.penalties.size:
                penalties.append((n, *edits.penalties.arrays()))
            if mask is None and (edits.allow_mask is not None or edits.constraint is not None):
                mask = np.full((len(slots), -(-self._vocab_size // 32)), -1, np.int32)
            if edits.constraint is not None:
                to_fill.append((n, edits.constraint, num_outputs))
            elif mask is not None and edits.allow_mask is not None:
                mask[n] = edits.allow_mask
            processors += [(n, _bind_processor(process, edits.outputs)) for process in edits.processors]
        if bias:
            columns["bias_rows"] = _repeat_rows([(n, len(tokens)) for n, tokens, _ in bias])
            columns["bias_tokens"] = np.concatenate([tokens for _, tokens, _ in bias])
            columns["bias_values"] = np.concatenate([values for _, _, values in bias])
        if penalties:
            columns["penalty_rows"] = _repeat_rows([(n, len(tokens)) for n, tokens, _ in penalties])
            columns["penalty_tokens"] = np.concatenate([tokens for _, tokens, _ in penalties])
            columns["penalty_counts"] = np.concatenate([counts for _, _, counts in penalties])
            columns["repetition"] = self._repetition[slots]
            columns["frequency"] = self._frequency[slots]
            columns["presence"] = self._presence[slots]
        columns["allow_mask"] = mask
        if mask is not None and to_fill:
            columns["allow_mask"] = LateArray(filled=self._filler.start(mask, to_fill))
        columns["processors"] = tuple(processors)

    def _read_edits(self, new: NewRequest) -> _Edits | None:
        """None if the request changes no logits."""
        params = new.sampling_params
        prompt = new.token_ids[: new.num_prompt_tokens]
        outputs = list(new.token_ids[new.num_prompt_tokens :])
        edits = _Edits(outputs=outputs)
        single = {words[0] for words in new.bad_word_ids if len(words) == 1 and words[0] < self._vocab_size}
        edits.bad_words = tuple(tuple(words) for words in new.bad_word_ids if len(words) > 1)
        if params.logit_bias or single:
            edits.bias_tokens = np.array([*params.logit_bias, *single], np.int32)
            edits.bias_values = np.array([*params.logit_bias.values(), *[-np.inf] * len(single)], np.float32)
        if params.structured_output is not None:
            edits.constraint = self._constrain(new, outputs)
        elif params.min_tokens and new.stop_token_ids:
            edits.min_tokens = params.min_tokens
            edits.stop_tokens = np.array(new.stop_token_ids, np.int32)
        if params.allowed_token_ids is not None:
            edits.allow_mask = allow_bits(params.allowed_token_ids, self._vocab_size)
        if params.repetition_penalty != 1 or params.frequency_penalty or params.presence_penalty:
            # Only repetition looks at the prompt.
            known = [token for token in prompt if token < self._vocab_size]  # that of images may lie beyond
            edits.penalties = _TokenCounts(known if params.repetition_penalty != 1 else ())
            edits.penalties.count(outputs)
        if params.logits_processors:
            edits.processors = tuple(
                _name_errors(name, self._processors[name](params, prompt)) for name in params.logits_processors
            )
        needed = (
            len(edits.bias_tokens)
            or len(edits.stop_tokens)
            or edits.bad_words
            or edits.allow_mask is not None
            or edits.constraint is not None
            or edits.penalties is not None
            or edits.processors
        )
        return edits if needed else None

    def _constrain(self, new: NewRequest, outputs: Sequence[int]) -> Constraint:
        params = new.sampling_params
        assert self._grammars is not None and params.structured_output is not None, "validate_params lets none pass"
        size = self._vocab_size
        ends = [token for token in self._end_token_ids if token < size]
        stops = [token for token in new.stop_token_ids if token < size]
        constraint = Constraint(
            self._grammars.compile(params.structured_output).new_matcher(),
            ends=allow_bits(ends, size),
            stops=allow_bits([*ends, *stops], size),
            allowed=None if params.allowed_token_ids is None else allow_bits(params.allowed_token_ids, size),
            ignore_eos=params.ignore_eos,
            min_tokens=params.min_tokens,
        )
        constraint.accept(outputs)
        return constraint


class _TokenCounts:
    """The distinct tokens of a request, each with its number of occurrences in the output."""

    def __init__(self, prompt: Sequence[int]) -> None:
        distinct = list(dict.fromkeys(prompt))
        self._index = {token: i for i, token in enumerate(distinct)}
        self._tokens = np.array(distinct, np.int32)
        self._counts = np.zeros(len(distinct), np.int32)
        self.size = len(distinct)

    def count(self, token_ids: Sequence[int]) -> None:
        """Tokens of the output."""
        for token in token_ids:
            index = self._index.setdefault(token, self.size)
            if index == self.size:
                self._add(token)
            self._counts[index] += 1

    def arrays(self) -> tuple[IntArray, IntArray]:
        """Tokens and counts; views that the next `count` may change."""
        return self._tokens[: self.size], self._counts[: self.size]

    def _add(self, token: int) -> None:
        if self.size == len(self._tokens):
            room = np.zeros(max(64, self.size), np.int32)
            self._tokens = np.concatenate([self._tokens, room])
            self._counts = np.concatenate([self._counts, room])
        self._tokens[self.size] = token
        self.size += 1


def mix_seed(seed: int) -> int:
    """The 32 bits, as an int32, that key a request's noise: all 64 bits of its seed count (splitmix64's end)."""
    x = seed & _MASK_64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK_64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK_64
    x = (x ^ (x >> 31)) & 0xFFFFFFFF
    return x - 2**32 if x >= 2**31 else x


def allow_bits(token_ids: Sequence[int], vocab_size: int) -> IntArray:
    """Bits of the allowed tokens, int32 [ceil(vocab_size / 32)]; token t is bit t % 32 of word t // 32."""
    flags = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    flags[np.asarray(token_ids, np.int64)] = 1
    return np.packbits(flags, bitorder="little").view("<i4").astype(np.int32)


def _banned_now(edits: _Edits, num_outputs: int) -> IntArray:
    """Tokens banned at this position only: ends before min_tokens, and what would complete a bad word."""
    stops = edits.stop_tokens if num_outputs < edits.min_tokens else _NO_INTS
    if not edits.bad_words:
        return stops
    done = edits.outputs
    last = [
        words[-1]
        for words in edits.bad_words
        if len(done) >= len(words) - 1 and done[len(done) - len(words) + 1 :] == list(words[:-1])
    ]
    return np.concatenate([stops, np.array(last, np.int32)])


def _repeat_rows(counts: Sequence[tuple[int, int]]) -> IntArray:
    rows = np.array([n for n, _ in counts], np.int32)
    return np.repeat(rows, [count for _, count in counts])


def _bind_processor(process: Callable[..., Any], outputs: Sequence[int]) -> Callable[..., Any]:
    return lambda logits: process(outputs, logits)


def _name_errors(name: str, process: Callable[..., Any]) -> Callable[..., Any]:
    def run(output_token_ids: Sequence[int], logits: npt.NDArray[np.float32]) -> Any:
        try:
            return process(output_token_ids, logits)
        except Exception as error:  # a plugin's code may fail in any way; say whose it was
            raise PluginError(
                f"logits processor {name!r} failed: {type(error).__name__}: {error}",
                remedies=(f"leave {name!r} out of logits_processors",),
            ) from error

    return run
