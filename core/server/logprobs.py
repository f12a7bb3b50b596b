"""Log probabilities in the two shapes that clients know: chat's and the legacy one with offsets."""

import codecs
from collections.abc import Sequence
from typing import Any

from .frames import LogprobEntry, TokenEntries
from .protocol.chat import ContentLogprob, TopLogprob
from .protocol.completions import CompletionLogprobs

_LOWEST = -9999.0
"""In place of minus infinity, which JSON cannot write."""


def chat_logprobs(positions: Sequence[TokenEntries], num_top: int, *, by_id: bool = False) -> list[ContentLogprob]:
    """One entry a token. num_top: how many most likely ones were asked for; the chosen one stands among them. by_id:
    tokens are named by their ids."""
    found = []
    for entries in positions:
        chosen = entries[0]
        top = _by_likelihood(entries) if num_top else []
        found.append(
            ContentLogprob(
                token=_name(chosen.token_id, chosen.text, by_id),
                logprob=_finite(chosen.logprob),
                bytes=list(chosen.token_bytes),
                top_logprobs=[
                    TopLogprob(
                        token=_name(entry.token_id, entry.text, by_id),
                        logprob=_finite(entry.logprob),
                        bytes=list(entry.token_bytes),
                    )
                    for entry in top
                ],
            )
        )
    return found


def prompt_logprobs(positions: Sequence[TokenEntries | None]) -> list[Any]:
    """vLLM's shape: for each token of the prompt a mapping from token id, null for the first."""
    return [
        None
        if entries is None
        else {
            str(entry.token_id): {
                "logprob": _finite(entry.logprob),
                "rank": entry.rank,
                "decoded_token": entry.text,
            }
            for entry in entries
        }
        for entries in positions
    ]


class LegacyLogprobs:
    """Makes CompletionLogprobs piece by piece; remembers where in the text each token starts.

    A token that ends no character starts where that character does. Tokens that the text leaves out (special ones)
    take no room.
    """

    def __init__(self, offset: int, skipped: frozenset[int], *, by_id: bool = False) -> None:
        """offset: characters before the first token. skipped: ids whose text is left out. by_id: tokens are named by
        their ids."""
        self._by_id = by_id
        self._offset = offset
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(
        self, positions: Sequence[TokenEntries | None], token_ids: Sequence[int], texts: Sequence[str]
    ) -> CompletionLogprobs:
        """The next tokens; token_ids and texts (each decoded alone) are used where a position has no entry."""
        result = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        assert result.top_logprobs is not None
        for entries, token_id, text in zip(positions, token_ids, texts, strict=True):
            token_bytes = text.encode() if entries is None else entries[0].token_bytes
            if token_bytes[:1] and self._utf8.getstate()[0] and not 0x80 <= token_bytes[0] < 0xC0:
                self._offset += len(self._utf8.decode(b"", final=True))  # a character that nothing completes
            result.text_offset.append(self._offset)
            if token_id not in self._skipped:
                self._offset += len(self._utf8.decode(token_bytes))
            if entries is None:
                result.tokens.append(_name(token_id, text, self._by_id))
                result.token_logprobs.append(None)
                result.top_logprobs.append(None)
                continue
            chosen = entries[0]
            result.tokens.append(_name(chosen.token_id, chosen.text, self._by_id))
            result.token_logprobs.append(_finite(chosen.logprob))
            top: dict[str, float] = {}
            for entry in _by_likelihood(entries):
                top.setdefault(_name(entry.token_id, entry.text, self._by_id), _finite(entry.logprob))
            result.top_logprobs.append(top)
        return result


def extend(first: CompletionLogprobs | None, second: CompletionLogprobs) -> CompletionLogprobs:
    """Both, one behind the other."""
    if first is None:
        return second
    first.tokens += second.tokens
    first.token_logprobs += second.token_logprobs
    first.text_offset += second.text_offset
    if first.top_logprobs is not None and second.top_logprobs is not None:
        first.top_logprobs += second.top_logprobs
    return first


def _name(token_id: int, text: str, by_id: bool) -> str:
    return f"token_id:{token_id}" if by_id else text


def _by_likelihood(entries: TokenEntries) -> list[LogprobEntry]:
    return sorted(entries, key=lambda entry: -entry.logprob)


def _finite(value: float) -> float:
    return max(value, _LOWEST) if value == value else _LOWEST
