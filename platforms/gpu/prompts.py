"""Torch's fused attention for long prompts, where a GPU computes them faster so than by a kernel over pages."""

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from headrace.core.models.spec import AttentionSpec
from headrace.core.ops._torch import torch_dtype
from headrace.core.platform import OpContext, OpProvider
from headrace.kernels.torch.beside import Attend
from headrace.kernels.torch.prompts import FEWEST_TOKENS, Prompts

NAME = "torch-sdpa"
PRIORITY = 52
DTYPES = ("float16", "bfloat16")
MOST_VALUES = 256
"""Of a head that flash attention takes."""
NOT_FUSED = ("ERROR", "MATH", "CUDNN_ATTENTION")
"""Torch's ways to compute attention that do not count; see settle_torch in device.py of the last."""
RACE_TOKENS = 2048
ROUNDS = 5
MARGIN = 0.95
"""The library must take less than this part of the kernel's time."""


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
            with sdpa_kernel([kind for kind in SDPBackend.__members__.values() if kind.name not in NOT_FUSED]):
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
