"""Long prompts through the fused attention of torch, the rest of a step through paged kernels.

A request whose tokens of a step are all that it has needs no pages: its keys and values are gathered once and flash
attention runs over them. Chunks that continue a prompt, decodes and short prompts are left to others. Which prompts a
step holds is read from the device once, for all layers.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from .beside import Asked, Attend, Batch, Beside

FEWEST_TOKENS = 512
"""Of a prompt that is worth a call of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prompt:
    """A request whose tokens [begin, end) of the step are all that it has."""

    request: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rest:
    """The other requests as a batch of their own. tokens: its rows among the step's. requests: among the step's."""

    tokens: torch.Tensor
    requests: torch.Tensor
    starts: torch.Tensor
    lens: torch.Tensor
    max_query_len: int
    max_seq_len: int


class Prompts(Beside):
    """Long whole prompts, one after another. Owns the division of the last step that it saw."""

    def __init__(self, others: Attend, *, fewest_tokens: int = FEWEST_TOKENS) -> None:
        super().__init__(others)
        self._fewest = fewest_tokens
        self._seen: tuple[torch.Tensor, torch.Tensor] | None = None
        self._division: tuple[list[_Prompt], _Rest | None] = [], None

    def attend(self, query: torch.Tensor, kv_cache: Any, batch: Batch, asked: Asked) -> torch.Tensor | None:
        """The prompts by flash attention, which knows no softcap and no window, the rest by `others`."""
        starts, lens, block_table = batch
        hides = 0 < asked.window < asked.max_query_len
        if asked.max_query_len < self._fewest or asked.softcap or not asked.causal or hides:
            return None
        prompts, rest = self._divide(starts, lens)
        if not prompts:
            return None
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        for prompt in prompts:
            rows = slice(prompt.begin, prompt.end)
            q, k, v = (
                part.transpose(0, 1)[None]
                for part in (query[rows], *_gather(kv_cache, block_table[prompt.request], prompt.end - prompt.begin))
            )
            attended = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=asked.scale, enable_gqa=True
            )
            out[rows] = attended[0].transpose(0, 1)
        if rest is not None:
            out[rest.tokens] = self._others(
                query[rest.tokens],
                kv_cache,
                rest.starts,
                rest.lens,
                block_table[rest.requests],
                scale=asked.scale,
                window=asked.window,
                max_query_len=rest.max_query_len,
                max_seq_len=rest.max_seq_len,
            )
        return out

    def _divide(self, starts: torch.Tensor, lens: torch.Tensor) -> tuple[list[_Prompt], _Rest | None]:
        """(long prompts, the rest) of a step, whose arrays are the same for all layers. Waits for the device once."""
        if self._seen is None or self._seen[0] is not starts or self._seen[1] is not lens:
            self._division, self._seen = self._read(starts, lens), (starts, lens)
        return self._division

    def _read(self, query_start_loc: torch.Tensor, seq_lens: torch.Tensor) -> tuple[list[_Prompt], _Rest | None]:
        words = torch.cat([query_start_loc, seq_lens]).tolist()
        starts, lens = words[: len(seq_lens) + 1], words[len(seq_lens) + 1 :]
        counts = [end - begin for begin, end in zip(starts, starts[1:], strict=False)]
        is_long = [count == size >= self._fewest for count, size in zip(counts, lens, strict=True)]
        prompts = [
            _Prompt(request=r, begin=starts[r], end=starts[r + 1]) for r, is_whole in enumerate(is_long) if is_whole
        ]
        others = [r for r, count in enumerate(counts) if count and not is_long[r]]
        if not prompts or not others:
            return prompts, None

        def vector(values: Iterable[int]) -> torch.Tensor:
            return torch.tensor(list(values), dtype=torch.int32, device=seq_lens.device)

        requests = vector(others)
        rest = _Rest(
            tokens=vector(token for r in others for token in range(starts[r], starts[r + 1])),
            requests=requests,
            starts=vector(accumulate((counts[r] for r in others), initial=0)),
            lens=seq_lens[requests],
            max_query_len=max(counts[r] for r in others),
            max_seq_len=max(lens[r] for r in others),
        )
        return prompts, rest


def _gather(
    kv_cache: tuple[torch.Tensor, torch.Tensor], blocks: torch.Tensor, num_keys: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the first positions of a request, each [num_keys, num_kv_heads, head_dim]."""
    block_size = kv_cache[0].shape[1]
    used = blocks[: -(-num_keys // block_size)]
    keys, values = (part[used].flatten(0, 1)[:num_keys] for part in kv_cache)
    return keys, values
