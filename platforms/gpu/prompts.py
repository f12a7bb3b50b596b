"""Long prompts by torch's fused attention, where a GPU computes them faster so than by Triton's kernel over pages.

A request whose tokens of a step are all that it has needs no pages: its keys and values are gathered once and the
library's flash attention runs over them. Chunks that continue a prompt, decodes and short prompts stay with the
kernels. Which prompts a step holds is read from the device once, for all layers.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from headrace.core.models.spec import AttentionSpec
from headrace.core.ops._torch import torch_dtype
from headrace.core.platform import OpContext, OpProvider

NAME = "torch-sdpa"
PRIORITY = 52
FEWEST_TOKENS = 512
"""Of a prompt that is worth a call of its own."""
DTYPES = ("float16", "bfloat16")
MOST_VALUES = 256
"""Of a head that flash attention takes."""
RACE_TOKENS = 2048
ROUNDS = 5
MARGIN = 0.95
"""The library must take less than this part of the kernel's time."""

Attend = Callable[..., Any]


def prompts_provider(triton: OpProvider, torch_device: str) -> OpProvider:
    """The provider beside Triton's, whose cache it reads."""
    others = triton.ops["paged_attention"]
    race = Race(others, triton.ops["new_kv_cache"], torch_device)

    def declines(op: str, context: OpContext) -> str:
        return _lacks(context) or next(
            (reason for attn in _kinds(context) if (reason := race.lost(attn, context))), ""
        )

    ops: Mapping[str, Attend] = {
        "new_kv_cache": triton.ops["new_kv_cache"],
        "write_kv": triton.ops["write_kv"],
        "paged_attention": Prompts(others),
    }
    return OpProvider(name=NAME, priority=PRIORITY, ops=ops, declines=declines)


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


class Prompts:
    """`paged_attention`: long whole prompts, one after another; the rest, and all that flash attention has no
    argument for, `others` computes. Owns the division of the last step that it saw."""

    def __init__(self, others: Attend, *, fewest_tokens: int = FEWEST_TOKENS) -> None:
        self._others = others
        self._fewest = fewest_tokens
        self._seen: tuple[torch.Tensor, torch.Tensor] | None = None
        self._division: tuple[list[_Prompt], _Rest | None] = [], None

    def __call__(
        self,
        query: Any,
        kv_cache: Any,
        query_start_loc: Any,
        seq_lens: Any,
        block_table: Any,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        causal: bool = True,
        max_query_len: int = 0,
        max_seq_len: int = 0,
        **terms: Any,
    ) -> Any:
        batch = (query_start_loc, seq_lens, block_table)
        options = {"scale": scale, "window": window}
        is_plain = causal and not softcap and all(value is None for value in terms.values())
        hides = 0 < window < max_query_len
        prompts, rest = (
            ([], None) if max_query_len < self._fewest or not is_plain or hides else self._divide(*batch[:2])
        )
        if not prompts:
            lengths = {"max_query_len": max_query_len, "max_seq_len": max_seq_len}
            return self._others(
                query, kv_cache, *batch, **options, softcap=softcap, causal=causal, **lengths, **terms
            )
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        for prompt in prompts:
            rows = slice(prompt.begin, prompt.end)
            q, k, v = (
                part.transpose(0, 1)[None]
                for part in (query[rows], *_gather(kv_cache, block_table[prompt.request], prompt.end - prompt.begin))
            )
            attended = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=True
            )
            out[rows] = attended[0].transpose(0, 1)
        if rest is not None:
            lengths = {"max_query_len": rest.max_query_len, "max_seq_len": rest.max_seq_len}
            batch = (rest.starts, rest.lens, block_table[rest.requests])
            out[rest.tokens] = self._others(query[rest.tokens], kv_cache, *batch, **options, **lengths)
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


class Race:
    """What a prompt takes by the library and by the kernel, timed when a model is opened, once for each shape."""

    def __init__(self, others: Attend, new_kv_cache: Attend, torch_device: str) -> None:
        self._others = others
        self._new_kv_cache = new_kv_cache
        self._device = torch_device
        self._results: dict[tuple[Any, ...], str] = {}

    def lost(self, attn: AttentionSpec, context: OpContext) -> str:
        """Why the library does not serve such heads; "" if it does."""
        shape = (attn.num_heads, attn.num_kv_heads, attn.head_dim, context.block_size, context.dtype)
        if shape not in self._results:
            self._results[shape] = self._run(*shape)
        return self._results[shape]

    def _run(self, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: str) -> str:
        try:
            theirs, ours = self.seconds(num_heads, num_kv_heads, head_dim, block_size, dtype)
        except (RuntimeError, NotImplementedError) as error:
            return f"torch has no fused kernel for it here: {str(error).splitlines()[0]}"
        if theirs < MARGIN * ours:
            return ""
        return f"not faster here: {theirs * 1e6:.0f} us a prompt of {RACE_TOKENS} tokens, Triton's {ours * 1e6:.0f}"

    def seconds(
        self, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: str
    ) -> tuple[float, float]:
        """(the library's, the kernel's) for one prompt. Raises RuntimeError if torch would compute all scores."""
        width = -(-RACE_TOKENS // block_size)
        cache = self._new_kv_cache(
            num_blocks=width + 1,
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            device=self._device,
        )
        query = torch.randn(RACE_TOKENS, num_heads, head_dim, device=self._device).to(torch_dtype(dtype))

        def vector(*values: int) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self._device)

        batch = (vector(0, RACE_TOKENS), vector(RACE_TOKENS), vector(*range(1, width + 1))[None])
        how = {"scale": head_dim**-0.5, "max_query_len": RACE_TOKENS, "max_seq_len": RACE_TOKENS}
        synchronize = getattr(torch, torch.device(self._device).type).synchronize

        def best(attend: Attend) -> float:
            took = []
            for _ in range(ROUNDS):
                synchronize()
                start_s = time.perf_counter()
                attend(query, cache, *batch, **how)
                synchronize()
                took.append(time.perf_counter() - start_s)
            return min(took)

        own = Prompts(self._others, fewest_tokens=1)
        with torch.inference_mode():
            with sdpa_kernel(
                [kind for kind in SDPBackend.__members__.values() if kind.name not in ("ERROR", "MATH")]
            ):
                own(query, cache, *batch, **how)
            return best(own), best(self._others)


def _kinds(context: OpContext) -> list[AttentionSpec]:
    return [layer.attn for layer in context.spec.layers if layer.has_attention]


def _lacks(context: OpContext) -> str:
    """What a model asks of attention that flash attention has no argument for; "" if nothing."""
    kinds = _kinds(context)
    if context.dtype not in DTYPES:
        return f"its kernels are for {' and '.join(DTYPES)}, not {context.dtype}"
    if context.spec.kind != "decoder":
        return "not used for models that are no decoders"
    if context.spec.num_relative_buckets:
        return "flash attention has no bias by distance"
    for attn in kinds:
        for name, asked in (("softcap", attn.softcap), ("sinks", attn.sinks), ("alibi", attn.alibi_max_bias)):
            if asked:
                return f"flash attention has no {name}"
        if attn.head_dim > MOST_VALUES:
            return f"flash attention takes heads of up to {MOST_VALUES} values, not {attn.head_dim}"
    if kinds and all(0 < attn.window < FEWEST_TOKENS for attn in kinds):
        return f"all windows are shorter than the {FEWEST_TOKENS} tokens from which on a prompt is computed so"
    return ""
