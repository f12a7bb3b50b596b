"""The ops that the kernels serve, with the signatures of core/ops, cut by one tuning."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton

from .attention import attention_kernel, join_kernel, write_kv_kernel
from .elementwise import activation_kernel, gather_kernel
from .experts import down_experts_kernel, glu_experts_kernel, most_tiles, sort_by_expert
from .norm import norm_kernel
from .quantized import QuantizedWeight, quantized_linear_kernel, quantized_rows_kernel
from .rope import rope_kernel
from .rounded import round_rows_kernel, rounded_linear_kernel
from .sampling import best_kernel, winner_kernel
from .tuning import Tuning

VOCAB_CHUNK = 4096
LAUNCHES: Counter[str] = Counter()
"""Kernel launches of this process by op: the proof that a device runs these kernels."""


class TritonOps:
    """The kernels for one device.

    wide_dot: products take float32, for an interpreter that multiplies the bits of bfloat16.
    """

    def __init__(self, tuning: Tuning, *, wide_dot: bool = False) -> None:
        self.tuning = tuning
        self.wide_dot = wide_dot

    def table(self) -> dict[str, Callable[..., Any]]:
        """The ops by name."""
        names = (
            "rms_norm",
            "add_rms_norm",
            "layer_norm",
            "rope",
            "act",
            "act_mul",
            "gather",
            "embedding",
            "write_kv",
            "paged_attention",
            "grouped_experts",
        )
        return {name: getattr(self, name) for name in names}

    # ---- norms --------------------------------------------------------------------------------------------
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor | None, *, eps: float) -> torch.Tensor:
        """x: [..., n]; see core/ops/norm.py."""
        return self._norm("rms_norm", x, None, weight, None, eps, layer=False)[0]

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, *, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual: [num_tokens, n]; see core/ops/norm.py."""
        return self._norm("add_rms_norm", x, residual.contiguous(), weight, None, eps, layer=False)

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, *, eps: float
    ) -> torch.Tensor:
        """x: [..., n]; see core/ops/norm.py."""
        return self._norm("layer_norm", x, None, weight, bias, eps, layer=True)[0]

    def _norm(
        self,
        op: str,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        *,
        layer: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        n = x.shape[-1]
        rows = x if x.dim() == 3 and x.stride(-1) == 1 else x.reshape(-1, 1, n)
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        total = torch.empty_like(out) if residual is not None else out
        block = triton.next_power_of_2(n)
        per_program = max(1, min(16, self.tuning.row_values // block))
        num_rows = rows.shape[0] * rows.shape[1]
        self._launch(
            op,
            norm_kernel,
            (triton.cdiv(num_rows, per_program),),
            rows,
            residual,
            weight,
            bias,
            out,
            total,
            num_rows,
            rows.shape[1],
            rows.stride(0),
            rows.stride(1),
            eps,
            N=n,
            BLOCK=block,
            ROWS=per_program,
            LAYER=layer,
            ADD=residual is not None,
            WEIGHT=weight is not None,
            BIAS=bias is not None,
            num_warps=self._warps(block * per_program),
        )
        return out, total

    # ---- rope and elementwise ------------------------------------------------------------------------------
    def rope(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False
    ) -> torch.Tensor:
        """x: [num_tokens, num_heads, head_dim]; see core/ops/rope.py."""
        x = x if x.stride(-1) == 1 else x.contiguous()
        num_tokens, num_heads, head_dim = x.shape
        half = cos.shape[-1]
        rest = head_dim - 2 * half
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        heads = min(16, triton.next_power_of_2(num_heads))
        self._launch(
            "rope",
            rope_kernel,
            (num_tokens, triton.cdiv(num_heads, heads)),
            x,
            cos.contiguous(),
            sin.contiguous(),
            out,
            num_heads,
            x.stride(0),
            x.stride(1),
            HEAD_DIM=head_dim,
            HALF=half,
            HALF_BLOCK=triton.next_power_of_2(half),
            REST_BLOCK=triton.next_power_of_2(rest) if rest else 0,
            HEADS=heads,
            INTERLEAVED=interleaved,
            num_warps=2,
        )
        return out

    def act(self, x: torch.Tensor, *, activation: str) -> torch.Tensor:
        """x: [..., n]; see core/ops/elementwise.py."""
        return self._activation("act", x, x.shape[-1], activation, gated=False)

    def act_mul(self, x: torch.Tensor, *, activation: str) -> torch.Tensor:
        """x: [..., 2 * n]; see core/ops/elementwise.py."""
        return self._activation("act_mul", x, x.shape[-1] // 2, activation, gated=True)

    def _activation(self, op: str, x: torch.Tensor, n: int, activation: str, *, gated: bool) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        out = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
        block = min(self.tuning.row_values, triton.next_power_of_2(n))
        self._launch(
            op,
            activation_kernel,
            (len(rows), triton.cdiv(n, block)),
            rows,
            out,
            rows.stride(0),
            n,
            BLOCK=block,
            ACTIVATION=activation,
            GATED=gated,
            num_warps=self._warps(block),
        )
        return out

    def gather(self, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Rows of x: [n, ...] by int32 [m]."""
        return self._gather("gather", x, indices)

    def embedding(self, token_ids: torch.Tensor, weight: torch.Tensor | QuantizedWeight) -> torch.Tensor:
        """Rows of a weight [vocab_size, hidden_size] by int32 [num_tokens]."""
        if isinstance(weight, torch.Tensor):
            return self._gather("embedding", weight, token_ids)
        n = weight.in_features
        out = torch.empty((len(token_ids), n), dtype=weight.dtype, device=token_ids.device)
        block = min(self.tuning.row_values, triton.next_power_of_2(n))
        self._launch(
            "embedding",
            quantized_rows_kernel,
            (len(token_ids), triton.cdiv(n, block)),
            weight.codes,
            weight.scales,
            weight.offsets,
            token_ids,
            out,
            **weight.constants(),
            BLOCK=block,
            num_warps=self._warps(block),
        )
        return out

    def _gather(self, op: str, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(len(x), -1) if len(x) else x
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        n = rows.shape[-1]
        out = torch.empty((len(indices), *x.shape[1:]), dtype=x.dtype, device=x.device)
        block = min(self.tuning.row_values, triton.next_power_of_2(n))
        self._launch(
            op,
            gather_kernel,
            (len(indices), triton.cdiv(n, block)),
            rows,
            indices,
            out,
            rows.stride(0),
            n,
            BLOCK=block,
            num_warps=self._warps(block),
        )
        return out

    # ---- quantized weights ---------------------------------------------------------------------------------
    def quantized_linear(
        self, x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x: [num_tokens, in_features]; see core/ops/packed.py. A weight with one scale an output meets activations
        that are rounded to 8 bits too, where matrix units multiply those."""
        x = x if x.stride(-1) == 1 else x.contiguous()
        if self.rounds(weight):
            return self._rounded_linear(x, weight, bias)
        num_rows, tuning = len(x), self.tuning
        is_few = num_rows <= 16
        rows = 16 if is_few else min(tuning.linear_rows, triton.next_power_of_2(num_rows))
        cols = tuning.few_cols if is_few else tuning.linear_cols
        depth = (tuning.few_depth if is_few else tuning.linear_depth) // (2 if x.dtype.itemsize > 2 else 1)
        out = torch.empty((num_rows, weight.out_features), dtype=x.dtype, device=x.device)
        self._launch(
            "linear",
            quantized_linear_kernel,
            (triton.cdiv(num_rows, rows), triton.cdiv(weight.out_features, cols)),
            x,
            weight.codes,
            weight.scales,
            weight.offsets,
            bias,
            out,
            num_rows,
            x.stride(0),
            **weight.constants(),
            BIAS=bias is not None,
            ROWS=rows,
            COLS=cols,
            DEPTH=depth,
            WIDE_DOT=self.wide_dot,
            num_warps=tuning.linear_warps,
            num_stages=tuning.stages,
        )
        return out

    def rounds(self, weight: QuantizedWeight) -> bool:
        """True if products with this weight round the activations."""
        if weight.group or weight.bits != 8:
            return False
        return self.tuning.float8 == ("e4m3fnuz" if weight.is_fnuz else "e4m3fn") if weight.is_float else True

    def _rounded_linear(self, x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        num_rows, tuning, n = len(x), self.tuning, weight.in_features
        float8 = {"FLOAT8": weight.is_float, "FNUZ": weight.is_fnuz}
        codes = torch.empty((num_rows, n), dtype=weight.codes.dtype, device=x.device)
        scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
        block = triton.next_power_of_2(n)
        self._launch(
            "linear.round",
            round_rows_kernel,
            (num_rows,),
            x,
            codes,
            scales,
            x.stride(0),
            IN=n,
            BLOCK=block,
            **float8,
            num_warps=self._warps(block),
        )
        is_few = num_rows <= 16
        rows = 16 if is_few else min(tuning.linear_rows, triton.next_power_of_2(num_rows))
        cols = tuning.few_cols if is_few else tuning.linear_cols
        out = torch.empty((num_rows, weight.out_features), dtype=x.dtype, device=x.device)
        self._launch(
            "linear",
            rounded_linear_kernel,
            (triton.cdiv(num_rows, rows), triton.cdiv(weight.out_features, cols)),
            codes,
            scales,
            weight.codes,
            weight.scales,
            bias,
            out,
            num_rows,
            IN=n,
            OUT=weight.out_features,
            **float8,
            BIAS=bias is not None,
            ROWS=rows,
            COLS=cols,
            DEPTH=tuning.few_depth if is_few else tuning.rounded_depth,
            WIDE_DOT=self.wide_dot,
            num_warps=tuning.linear_warps,
            num_stages=tuning.stages,
        )
        return out

    # ---- attention -----------------------------------------------------------------------------------------
    def write_kv(
        self,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        key: torch.Tensor,
        value: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mutates kv_cache and returns it; see core/ops/attention.py."""
        keys, values = kv_cache
        flat_key, flat_value = key.flatten(1), value.flatten(1)
        n = keys.shape[2] * keys.shape[3]
        block = min(self.tuning.row_values, triton.next_power_of_2(n))
        self._launch(
            "write_kv",
            write_kv_kernel,
            (len(slot_mapping), triton.cdiv(n, block)),
            flat_key,
            flat_value,
            keys,
            values,
            slot_mapping,
            flat_key.stride(0),
            flat_value.stride(0),
            n,
            BLOCK=block,
            num_warps=self._warps(block),
        )
        return kv_cache

    def paged_attention(
        self,
        query: torch.Tensor,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        max_query_len: int = 0,
        max_seq_len: int = 0,
    ) -> torch.Tensor:
        """See core/ops/attention.py. A step of one token a request is split along the keys."""
        keys, values = kv_cache
        query = query if query.stride(-1) == 1 else query.contiguous()
        num_tokens, num_heads, head_dim = query.shape
        num_reqs, block_size, num_kv_heads = len(seq_lens), keys.shape[1], keys.shape[2]
        group = num_heads // num_kv_heads
        decode = max_query_len == 1
        least = max(16, triton.next_power_of_2(group))
        rows = least if decode else max(least, self._query_rows(head_dim, query.dtype))
        longest = max_seq_len or block_table.shape[1] * block_size
        num_splits = triton.cdiv(longest, self.tuning.split_keys) if decode else 1
        tiles = num_reqs if decode else num_tokens // (rows // group) + num_reqs
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if not num_tokens:
            return out
        parts, stats = self._workspace(num_splits, num_reqs, num_heads, head_dim, query.device)
        dim_block = max(16, triton.next_power_of_2(head_dim))
        self._launch(
            "paged_attention",
            attention_kernel,
            (tiles, num_kv_heads, num_splits),
            query,
            keys,
            values,
            out,
            parts,
            stats,
            query_start_loc,
            seq_lens,
            block_table,
            sinks,
            alibi_slopes,
            scale,
            softcap,
            num_reqs,
            query.stride(0),
            query.stride(1),
            block_table.stride(0),
            window,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            DIM_BLOCK=dim_block,
            BLOCK_SIZE=block_size,
            ROWS=rows,
            KEYS=self._keys(head_dim, query.dtype),
            SPLIT=self.tuning.split_keys if num_splits > 1 else 0,
            DECODE=decode,
            WINDOW=window > 0,
            SOFTCAP=softcap > 0,
            SINKS=sinks is not None,
            ALIBI=alibi_slopes is not None,
            WIDE_DOT=self.wide_dot,
            num_warps=self.tuning.decode_warps if decode else self.tuning.attention_warps,
            num_stages=self.tuning.stages,
        )
        if num_splits > 1:
            self._launch(
                "paged_attention.join",
                join_kernel,
                (num_reqs, num_heads),
                parts,
                stats,
                query_start_loc,
                out,
                num_splits,
                NUM_HEADS=num_heads,
                HEAD_DIM=head_dim,
                DIM_BLOCK=dim_block,
                num_warps=2,
            )
        return out

    # ---- mixtures of experts ---------------------------------------------------------------------------------
    def grouped_experts(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
        *,
        activation: str = "silu",
        clamp: float = 0.0,
        scale_input: bool = False,
        gated: bool = True,
        partial: bool = False,
    ) -> torch.Tensor:
        """x: [num_tokens, hidden_size]; see core/ops/moe.py. Experts are gated."""
        assert gated, "the kernel has no experts without a gate"
        num_tokens, hidden_size = x.shape
        num_experts, size = gate_up.shape[0], gate_up.shape[1] // 2
        per_token = experts.shape[1]
        num_rows = num_tokens * per_token
        x, weights = x.contiguous(), weights.contiguous()
        rows = 16 if num_rows <= 16 * num_experts else self.tuning.expert_rows
        depth = self.tuning.expert_depth // (2 if x.dtype.itemsize > 2 else 1)
        routed = sort_by_expert(experts, num_experts, rows)
        tiles = most_tiles(num_rows, num_experts, rows)
        inner_dtype = torch.float32 if self.wide_dot else x.dtype  # the interpreter cuts bfloat16 off
        inner = torch.empty((num_rows, size), dtype=inner_dtype, device=x.device)
        outputs = (torch.zeros if partial else torch.empty)(
            (num_rows, hidden_size), dtype=torch.float32, device=x.device
        )
        cut = {
            "EXPERTS": num_experts,
            "EXPERT_BLOCK": triton.next_power_of_2(num_experts),
            "ROWS": rows,
            "COLS": self.tuning.expert_cols,
            "DEPTH": depth,
            "WIDE_DOT": self.wide_dot,
            "num_warps": self.tuning.expert_warps,
            "num_stages": self.tuning.stages,
        }
        self._launch(
            "grouped_experts",
            glu_experts_kernel,
            (tiles, triton.cdiv(size, self.tuning.expert_cols)),
            x,
            gate_up,
            gate_up_bias,
            weights,
            routed.order,
            routed.first,
            routed.counts,
            routed.ends,
            inner,
            clamp,
            PER_TOKEN=per_token,
            IN=hidden_size,
            OUT=size,
            ACTIVATION=activation,
            CLAMP=clamp > 0,
            BIAS=gate_up_bias is not None,
            SCALE=scale_input,
            **cut,
        )
        self._launch(
            "grouped_experts.down",
            down_experts_kernel,
            (tiles, triton.cdiv(hidden_size, self.tuning.expert_cols)),
            inner,
            down,
            down_bias,
            weights,
            routed.order,
            routed.first,
            routed.counts,
            routed.ends,
            outputs,
            IN=size,
            OUT=hidden_size,
            BIAS=down_bias is not None,
            SCALE=not scale_input,
            **cut,
        )
        return outputs.view(num_tokens, per_token, hidden_size).sum(1).to(x.dtype)

    # ---- sampling ------------------------------------------------------------------------------------------
    def pick_tokens(
        self,
        logits: torch.Tensor,
        seeds: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        temperature: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Tokens of float32 logits [num_rows, vocab_size]: greedy, or the Gumbel maximum at each temperature."""
        num_rows, vocab_size = logits.shape
        logits = logits if logits.stride(-1) == 1 else logits.contiguous()
        chunks = triton.cdiv(vocab_size, VOCAB_CHUNK)
        values = torch.empty((num_rows, chunks), dtype=torch.float32, device=logits.device)
        tokens = torch.empty((num_rows, chunks), dtype=torch.int32, device=logits.device)
        out = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
        self._launch(
            "sample",
            winner_kernel,
            (num_rows, chunks),
            logits,
            seeds,
            positions,
            temperature,
            values,
            tokens,
            logits.stride(0),
            vocab_size,
            BLOCK=VOCAB_CHUNK,
            NOISE=temperature is not None,
            num_warps=8,
        )
        self._launch(
            "sample.best",
            best_kernel,
            (num_rows,),
            values,
            tokens,
            out,
            chunks,
            vocab_size,
            BLOCK=max(16, triton.next_power_of_2(chunks)),
            num_warps=1,
        )
        return out

    # ---- how the kernels are cut ---------------------------------------------------------------------------
    def _query_rows(self, head_dim: int, dtype: torch.dtype) -> int:
        """Rows of a prefill tile: fewer for wide heads and wide values, whose sums would spill."""
        return max(16, self.tuning.query_rows // (2 if head_dim > 128 else 1) // (2 if dtype.itemsize > 2 else 1))

    def _keys(self, head_dim: int, dtype: torch.dtype) -> int:
        return max(16, self.tuning.keys // (2 if head_dim > 128 else 1) // (2 if dtype.itemsize > 2 else 1))

    def _warps(self, values: int) -> int:
        """Warps for a program that holds this many values."""
        return max(1, min(16, values // 512))

    def _workspace(
        self, num_splits: int, num_reqs: int, num_heads: int, head_dim: int, device: torch.device
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if num_splits == 1:
            return None, None
        shape = (num_reqs, num_splits, num_heads)
        parts = torch.empty((*shape, head_dim), dtype=torch.float32, device=device)
        return parts, torch.empty((*shape, 2), dtype=torch.float32, device=device)

    def _launch(self, op: str, kernel: Any, grid: Sequence[int], *args: Any, **options: Any) -> None:
        if 0 in grid:
            return
        LAUNCHES[op] += 1
        kernel[tuple(grid)](*args, **options)
