"""The interface between the engine and a library that compiles grammars, and the cache in front of it."""

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ..errors import PluginError, RequestError
from .params import StructuredOutputParams

if TYPE_CHECKING:
    from ..stages import IntArray
    from ..text.tokenizer import Tokenizer

MAX_GRAMMARS = 256
"""Compiled grammars that are kept; one takes about as much memory as its schema times a hundred."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The tokens that grammars are compiled for.

    vocab_size: rows of the logits, which may be more or fewer than the tokenizer has tokens. end_token_ids: tokens
    that end a generation; a grammar allows them where its text may end, and nowhere else.
    """

    tokenizer: "Tokenizer"
    vocab_size: int
    end_token_ids: Sequence[int]

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that stand for no text, so that no text of a grammar is written with them."""
        return frozenset(self.tokenizer.special_ids) | frozenset(self.end_token_ids)

    def tokens(self) -> list[bytes]:
        """Each token's bytes, b"" for an id without a token; takes a microsecond a token."""
        return [self.tokenizer.token_bytes(token_id) for token_id in range(self.vocab_size)]


class Matcher(Protocol):
    """Where one output stands in its grammar. Tokens are accepted in order; one thread at a time.

    Masks are filled in a thread while the forward pass runs, so that a library which releases the GIL costs nothing.
    """

    def fill_mask(self, row: "IntArray") -> None:
        """Set the bits of the tokens that may come next. row: int32 [ceil(vocab_size / 32)], token t is bit t % 32
        of word t // 32. Raises PluginError if the grammar turns out to be too complex."""
        ...

    def accept(self, token_ids: Sequence[int]) -> int:
        """Go on by these tokens, as far as the grammar allows them; how many that were."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Take back the last accepted tokens."""
        ...


@runtime_checkable
class ForcingMatcher(Matcher, Protocol):
    """A matcher that knows without a mask where the grammar leaves no choice; only these save forward passes."""

    def forced_token(self) -> int | None:
        """The token that must come next; None if there are several, or if only a mask could tell."""
        ...


class Grammar(Protocol):
    """A compiled grammar; any number of outputs may follow it at once."""

    def new_matcher(self) -> Matcher:
        """A matcher at the beginning of an output. Cheap."""
        ...


class GrammarCompiler(Protocol):
    """Compiles grammars for one vocabulary; several threads may call it."""

    def compile(self, params: StructuredOutputParams) -> Grammar:
        """Takes milliseconds, so it is called outside of steps. Raises RequestError if the grammar is wrong or uses
        what the library does not know."""
        ...


class GrammarCache:
    """The grammars that requests have asked for lately, by what they asked. Several threads may call it."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._grammars: OrderedDict[str, Grammar] = OrderedDict()
        self._lock = threading.Lock()

    def has(self, params: StructuredOutputParams) -> bool:
        """True if `compile` would not take long."""
        with self._lock:
            return _key(params) in self._grammars

    def compile(self, params: StructuredOutputParams) -> Grammar:
        """The grammar, compiled unless it is known. Raises RequestError."""
        key = _key(params)
        with self._lock:
            known = self._grammars.get(key)
            if known is not None:
                self._grammars.move_to_end(key)
                return known
        try:
            grammar = self._compiler.compile(params)
        except (RequestError, PluginError):
            raise
        except Exception as error:  # a plugin's code; its failure is this request's alone
            raise RequestError(
                f"structured output: {params.kind} cannot be compiled: {type(error).__name__}: {error}",
                code="invalid_structured_output",
            ) from error
        with self._lock:
            self._grammars[key] = grammar
            if len(self._grammars) > MAX_GRAMMARS:
                self._grammars.popitem(last=False)
        return grammar


def _key(params: StructuredOutputParams) -> str:
    # The order of a schema's properties is the order in which they are written, so it is part of the key.
    try:
        return json.dumps([params.kind, params.value])
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(
            f"structured output: {params.kind} holds what is no JSON, or is nested too deeply: {error}",
            code="invalid_structured_output",
        ) from error
