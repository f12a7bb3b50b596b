"""Structured output by llguidance: schemas, patterns and grammars to masks of allowed tokens."""

import json
import re
import threading
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from headrace.core.errors import PluginError, RequestError
from headrace.core.hooks import hookimpl
from headrace.core.structured.compiler import Vocabulary
from headrace.core.structured.params import StructuredOutputParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from headrace.core.stages import IntArray

WHITESPACE = r"[ \t\n\r]{0,20}"
"""Between the tokens of JSON. Bounded, as a model that writes nothing but blanks would never end."""
LEXER_FUEL = 200_000
"""What compiling may cost, in llguidance's measure: one that took 8 s before takes less than one."""
MAX_SOURCE_CHARS = 200_000
MAX_PROPERTIES = 1_000
"""Of one object: llguidance's time grows with the square (measured: 3,000 take 4 s, 10,000 more than a minute)."""
_MAX_ERROR = 400
_SCHEMA_IN_LARK = re.compile(r"%json\s*")
_PATTERN_IN_LARK = re.compile(r"/((?:[^/\\\n]|\\.)+)/")
_MAX_PATTERNS = 50
_COUNT = re.compile(r"\{\d")


@hookimpl
def headrace_structured_output(vocabulary: Vocabulary) -> "Compiler | None":
    return Compiler(vocabulary) if find_spec("llguidance") is not None else None


class Compiler:
    """Compiles for one vocabulary, which llguidance learns when the first grammar comes (a second for 150,000
    tokens)."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()

    def compile(self, params: StructuredOutputParams) -> "CompiledGrammar":
        """Raises RequestError, with what llguidance says of the grammar."""
        from llguidance import LLMatcher, LLParserLimits

        tokenizer = self._load_tokenizer()
        source = _source(params)
        if len(source) > MAX_SOURCE_CHARS:
            raise _wrong(params, f"it has {len(source)} characters, of which {MAX_SOURCE_CHARS} may be")
        # Verbose errors would repeat the whole grammar.
        limits = LLParserLimits(verbose_errors=False, initial_lexer_fuel=LEXER_FUEL)
        matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits)
        if reason := _failure(matcher):
            raise _wrong(params, reason)
        self._check_patterns(params, tokenizer)
        return CompiledGrammar(matcher, frozenset(tokenizer.eos_tokens))

    def _check_patterns(self, params: StructuredOutputParams, tokenizer: "LLTokenizer") -> None:
        """Raise RequestError for a pattern beyond llguidance's limits that comes behind the beginning."""
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False, initial_lexer_fuel=LEXER_FUEL)
        for pattern in _counting_patterns(params):
            matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_regex(pattern), log_level=0, limits=limits)
            # One that is wrong by itself is none, or means something else in its place.
            if not matcher.is_error() and (reason := _failure(matcher)):
                raise _wrong(params, f"the pattern {pattern[:100]!r}: {reason}")

    def _load_tokenizer(self) -> "LLTokenizer":
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = _make_tokenizer(self._vocabulary)
            return self._tokenizer


class CompiledGrammar:
    """A matcher that is only copied, never moved."""

    def __init__(self, matcher: "LLMatcher", end_token_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._end_token_ids = end_token_ids

    def new_matcher(self) -> "OutputMatcher":
        """A copy at the beginning; what it learns of the grammar is shared."""
        return OutputMatcher(self._matcher.deep_copy(), self._end_token_ids)


class OutputMatcher:
    """One output's place in a grammar."""

    def __init__(self, matcher: "LLMatcher", end_token_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._end_token_ids = end_token_ids
        self._num_ends = 0  # accepted when llguidance was at the end already, which it does not count

    def fill_mask(self, row: "IntArray") -> None:
        """row: int32 [ceil(vocab_size / 32)], contiguous. Raises PluginError if llguidance meets its limits."""
        assert row.flags.c_contiguous, "llguidance writes through a pointer"
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self._check()

    def accept(self, token_ids: Sequence[int]) -> int:
        """The first token that the grammar does not allow, and all behind it, are left out. Raises PluginError if
        llguidance meets its limits."""
        count = self._matcher.try_consume_tokens(list(token_ids)) if not self._num_ends else 0
        self._check()
        if count < len(token_ids) and token_ids[count] in self._end_token_ids and self._is_at_end():
            self._num_ends += 1
            count += 1
        return count

    def forced_token(self) -> int | None:
        """The first token of the text that must come, or the end; costs a tenth of a mask."""
        forced = self._matcher.compute_ff_tokens()
        if forced:
            return forced[0]
        return next(iter(self._end_token_ids)) if len(self._end_token_ids) == 1 and self._is_at_end() else None

    def rollback(self, num_tokens: int) -> None:
        """Raises PluginError if fewer tokens were accepted."""
        num_ends = min(num_tokens, self._num_ends)
        self._num_ends -= num_ends
        if num_tokens > num_ends and not self._matcher.rollback(num_tokens - num_ends):
            raise PluginError(f"structured output cannot go back {num_tokens} tokens: {self._matcher.get_error()}")

    def _check(self) -> None:
        if self._matcher.is_error():
            raise PluginError(f"structured output: {_error(self._matcher)[:_MAX_ERROR]}")

    def _is_at_end(self) -> bool:
        return not self._num_ends and self._matcher.is_stopped() and not self._matcher.is_error()


def _failure(matcher: "LLMatcher") -> str:
    """Why a grammar cannot be followed, "" if its first masks can be made.

    The first mask can take a hundred times as long as others, which share what it learned: not in a step. What it
    learned may have met a limit, which only the next one tells.
    """
    for _ in range(2):
        first = matcher.deep_copy()
        if not first.is_error():
            first.compute_bitmask()
            first.try_consume_tokens(first.compute_ff_tokens()[:1])
        if first.is_error():
            return _error(first)
    return ""


def _error(matcher: "LLMatcher") -> str:
    return matcher.get_error().removesuffix("<non-verbose/>").strip()


def _make_tokenizer(vocabulary: Vocabulary) -> "LLTokenizer":
    from llguidance import LLTokenizer
    from llguidance._tokenizer import TokenizerWrapper

    if vocabulary.tokenizer.decoding.kind == "other":
        raise RequestError(
            "structured output: the text of this model's tokens depends on their neighbours, so no grammar can be "
            "followed token by token",
            code="structured_output_unavailable",
        )
    ends = [token for token in vocabulary.end_token_ids if token < vocabulary.vocab_size]
    if not ends:
        raise RequestError(
            "structured output: this model has no end-of-sequence token, so no output could end",
            code="structured_output_unavailable",
        )
    return LLTokenizer(TokenizerWrapper(_Tokens(vocabulary, ends[0])), eos_token=ends)


class _Tokens:
    """The vocabulary as llguidance wants to see it."""

    def __init__(self, vocabulary: Vocabulary, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.bos_token_id = None
        self.tokens = vocabulary.tokens()
        self.special_token_ids = sorted(id for id in vocabulary.special_ids if id < vocabulary.vocab_size)
        for token_id in self.special_token_ids:
            # A special token without a name could not be told from padding.
            self.tokens[token_id] = self.tokens[token_id] or f"<special_{token_id}>".encode()
        self._tokenizer = vocabulary.tokenizer
        self._num_tokens = vocabulary.vocab_size
        self._special = vocabulary.special_ids
        self._ids = {token: id for id, token in enumerate(self.tokens) if token and id not in self._special}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: str) -> list[int]:
        """The tokens of a text that follows another one; where a grammar forces its text, no others are allowed."""
        # What tokenizers do to the start of a text, they do to the line break.
        for before in ("", "\n"):
            ids = self._tokenizer.encode(before + text, add_special_tokens=False)
            start = self._tokenizer.encode(before, add_special_tokens=False)
            ids = ids[len(start) :] if ids[: len(start)] == start else []
            is_known = all(id < self._num_tokens and id not in self._special for id in ids)
            if is_known and b"".join(self.tokens[id] for id in ids) == text.encode():
                return ids
        return self._encode_greedily(text.encode())

    def _encode_greedily(self, text: bytes) -> list[int]:
        ids: list[int] = []
        at = 0
        while at < len(text):
            ends = range(min(len(text), at + self._longest), at, -1)
            end = next((end for end in ends if text[at:end] in self._ids), None)
            if end is None:
                break
            ids.append(self._ids[text[at:end]])
            at = end
        return ids


_ASCII = {"d": "[0-9]", "D": "[^0-9]", "w": "[0-9A-Za-z_]", "W": "[^0-9A-Za-z_]"}
"""What these mean in a pattern, as in JSON Schema's; Rust's have the digits and letters of all scripts."""


def _source(params: StructuredOutputParams) -> str:
    """llguidance's own form of a grammar."""
    from llguidance import LLMatcher

    value = params.value
    if params.kind == "json_object":
        return _json_grammar({"type": "object"}, params)
    if params.kind == "json_schema":
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise _wrong(params, str(error)) from error
        return _json_grammar(value, params)
    if params.kind == "regex":
        return LLMatcher.grammar_from_regex(re.sub(r"\\(.)", lambda found: _ASCII.get(found[1], found[0]), value))
    if params.kind == "choice":
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in value))
    return _lark_grammar(value, params)


def _json_grammar(schema: Any, params: StructuredOutputParams) -> str:
    from llguidance import LLMatcher

    if not isinstance(schema, (bool, Mapping)):
        raise _wrong(params, f"a schema must be an object, got {type(schema).__name__}")
    _check_properties(schema, params)
    # `lenient` off: a keyword that cannot be enforced is an error, not a wish.
    options: Any = {"whitespace_pattern": WHITESPACE, "lenient": False}
    try:
        if isinstance(schema, Mapping):
            return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
        return LLMatcher.grammar_from_json_schema(json.dumps({} if schema else {"enum": []}), overrides=options)
    except (TypeError, ValueError, RecursionError) as error:
        raise _wrong(params, str(error)) from error


def _counting_patterns(params: StructuredOutputParams) -> list[str]:
    """The patterns that repeat something so many times, of a schema that is known to be right, and of Lark; the
    first of very many."""
    texts: list[Any] = []
    if params.kind == "grammar":
        texts = _PATTERN_IN_LARK.findall(params.value)
    elif params.kind == "json_schema":
        left = [json.loads(params.value) if isinstance(params.value, str) else params.value]
        while left:
            value = left.pop()
            if isinstance(value, Mapping):
                texts += [value.get("pattern"), *(value.get("patternProperties") or ())]
                left += value.values()
            elif isinstance(value, list):
                left += value
    found = dict.fromkeys(text for text in texts if isinstance(text, str) and _COUNT.search(text))
    return list(found)[:_MAX_PATTERNS]


def _check_properties(schema: Any, params: StructuredOutputParams) -> None:
    """Raise RequestError if an object in a schema is too large."""
    most, left = 0, [schema]
    while left:
        value = left.pop()
        if isinstance(value, Mapping):
            most = max(most, len(value))
            left += value.values()
        elif isinstance(value, list):
            left += value
    if most > MAX_PROPERTIES:
        raise _wrong(params, f"an object in it has {most} properties; at most {MAX_PROPERTIES} may be")


def _lark_grammar(text: str, params: StructuredOutputParams) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    for found in _SCHEMA_IN_LARK.finditer(text):
        try:
            _check_properties(json.JSONDecoder().raw_decode(text, found.end())[0], params)
        except (ValueError, RecursionError):  # llguidance says more of what is no JSON
            continue
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(text) if "::=" in text else text)
    except Exception as error:  # the converter raises bare errors of its own for whatever it cannot read
        raise _wrong(params, str(error)) from error


def _wrong(params: StructuredOutputParams, reason: str) -> RequestError:
    # Of a grammar that somebody else wrote, the lines in question tell nobody anything.
    reason = reason.strip().split("\n")[0] if params.label else reason.strip()
    return RequestError(
        f"structured output: {params.label or params.kind} cannot be used: {reason[:_MAX_ERROR]}",
        code="invalid_structured_output",
    )
