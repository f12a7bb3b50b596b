"""Token ids to text while they come: whole characters only, and an end at the first stop string."""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from ..sampling.params import SamplingParams
from .tokenizer import Tokenizer

_CONTEXT_TOKENS = 6
"""Prompt tokens that a decoder may look back at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DetokenizedDelta:
    """Text that became final, and the stop string that ended the completion."""

    text: str
    stop_reason: str | None = None


class Detokenizer:
    """The text of one completion.

    The deltas together are what decoding prompt and output at once would put after the prompt's text. Text that
    a later token may change is withheld: part of a character, and the longest end that could begin a stop
    string. Where the chunks are cut changes nothing. Of several stop strings the one completed first wins (of
    two completed together the longer); tokens up to the min_tokens-th cannot complete one.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        skipped = tokenizer.special_ids if params.skip_special_tokens else frozenset()
        context = _last_tokens(prompt_token_ids, skipped)
        self._decode: _ByteDecoder | _WindowDecoder
        if tokenizer.decoding.kind == "other":
            self._decode = _WindowDecoder(tokenizer, skipped, context)
        else:
            self._decode = _ByteDecoder(tokenizer, skipped, context)
        self._stops = tuple(params.stop)
        self._include_stop = params.include_stop_str_in_output
        self._unstoppable = params.min_tokens  # tokens to come that cannot complete a stop string
        self._withheld = ""
        self._ended = False

    def push(self, token_ids: Sequence[int]) -> DetokenizedDelta:
        """Take the next tokens. After a stop string was met, more tokens give no text."""
        if self._ended:
            return DetokenizedDelta(text="")
        if not self._stops:
            return DetokenizedDelta(text=self._decode.push(token_ids))
        emitted = ""
        if self._unstoppable:
            emitted = self._take(self._decode.push(token_ids[: self._unstoppable]), stoppable=False).text
            token_ids, self._unstoppable = (
                token_ids[self._unstoppable :],
                max(0, self._unstoppable - len(token_ids)),
            )
        delta = self._take(self._decode.push(token_ids), stoppable=True)
        return DetokenizedDelta(text=emitted + delta.text, stop_reason=delta.stop_reason)

    def finish(self) -> str:
        """The completion has ended for another reason: the text that was withheld; half a character is U+FFFD."""
        if self._ended:
            return ""
        text = self._withheld + self._decode.finish()
        self._withheld, self._ended = "", True
        return text

    def _take(self, new: str, *, stoppable: bool) -> DetokenizedDelta:
        if not new:
            return DetokenizedDelta(text="")
        text, start = self._withheld + new, len(self._withheld)
        match = _first_match(text, start, self._stops) if stoppable else None
        if match is not None:
            self._withheld, self._ended = "", True
            end = match[0] + len(match[1]) if self._include_stop else match[0]
            return DetokenizedDelta(text=text[:end], stop_reason=match[1])
        cut = len(text) - _stop_prefix_len(text, self._stops)
        self._withheld = text[cut:]
        return DetokenizedDelta(text=text[:cut])


class _ByteDecoder:
    """For vocabularies whose text is the concatenation of their tokens' bytes."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int], context: Sequence[int]) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._utf8.decode(b"".join(map(self._token_bytes, context)))  # leaves half a character, if any
        self._piece = tokenizer.backend.id_to_token
        self._space_mark = tokenizer.decoding.space_mark
        self._strip = 0 if context else tokenizer.decoding.strip

    def push(self, token_ids: Sequence[int]) -> str:
        if self._strip:
            return self._push_first(token_ids)
        skipped = self._skipped
        return self._utf8.decode(b"".join([self._token_bytes(id) for id in token_ids if id not in skipped]))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)

    def _push_first(self, token_ids: Sequence[int]) -> str:
        ids = [id for id in token_ids if id not in self._skipped]
        if not ids:
            return ""
        if self._strip < 0:
            self._strip = 0
            first = (self._piece(ids[0]) or "").replace(self._space_mark, "")
            return self._utf8.decode(first.encode() + b"".join(map(self._token_bytes, ids[1:])))
        text = self._utf8.decode(b"".join(map(self._token_bytes, ids)))
        head = text[: self._strip].lstrip(" ")
        rest = text[self._strip :]
        self._strip = 0 if head or rest else self._strip - len(text)
        return head + rest


class _WindowDecoder:
    """For any decoder: what a window of tokens gives more than the window without its newest tokens."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int], context: Sequence[int]) -> None:
        self._backend = tokenizer.backend
        self._skipped = skipped
        self._ids = list(context)
        self._read = len(self._ids)  # tokens of the window whose text is out
        self._text = self._text_of(self._ids)

    def push(self, token_ids: Sequence[int]) -> str:
        # One by one, so that the cutting of chunks cannot matter.
        return "".join([self._push_one(id) for id in token_ids if id not in self._skipped and id >= 0])

    def finish(self) -> str:
        return self._text_of(self._ids)[len(self._text) :]

    def _push_one(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._text_of(self._ids)
        if len(text) <= len(self._text) or text.endswith("\ufffd"):
            return ""
        new = text[len(self._text) :]
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        self._text = self._text_of(self._ids)
        return new

    def _text_of(self, ids: Sequence[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)


def _last_tokens(prompt_token_ids: Sequence[int], skipped: frozenset[int]) -> list[int]:
    found: list[int] = []
    for id in reversed(prompt_token_ids):
        if id not in skipped:
            found.append(id)
            if len(found) == _CONTEXT_TOKENS:
                break
    return found[::-1]


def _first_match(text: str, start: int, stops: Sequence[str]) -> tuple[int, str] | None:
    """Where, and which stop string is completed first by a character from `start` on."""
    best: tuple[int, int, str] | None = None
    for stop in stops:
        found = text.find(stop, max(0, start - len(stop) + 1))
        if found >= 0 and (best is None or (found + len(stop), found) < best[:2]):
            best = (found + len(stop), found, stop)
    return None if best is None else (best[1], best[2])


def _stop_prefix_len(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that is the beginning, but not the whole, of a stop string."""
    longest = 0
    for stop in stops:
        at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while at >= 0 and not stop.startswith(text[at:]):
            at = text.find(stop[0], at + 1)
        if at >= 0:
            longest = max(longest, len(text) - at)
    return longest
