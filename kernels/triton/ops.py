"""The ops that the kernels serve, with the signatures of core/ops, cut by one tuning."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from collections.abc import Callable
from typing import Any

import torch
import triton

from .attention import attention_kernel, join_kernel, write_int8_kv_kernel, write_kv_kernel
from .elementwise import activation_kernel, gather_kernel
from .experts import down_experts_kernel, glu_experts_kernel, most_tiles, sort_by_expert
from .launch import LAUNCHES
from .norm import norm_kernel
from .quantized import QuantizedWeight
from .quantized_ops import QuantizedOps, Routed
from .rope import rope_kernel
from .sampling import best_kernel, winner_kernel
from .state_ops import StateOps

__all__ = ["LAUNCHES", "TritonOps"]

VOCAB_CHUNK = 4096
MOST_VALUES = 256
"""Of a head that a tile holds as one block; wider ones (latents) are cut."""


class TritonOps(QuantizedOps, StateOps):
    """The kernels for one device."""

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
            "causal_conv",
            "selective_scan",
            "gated_delta",
            "wkv",
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
        num_rows = rows.shape[0] * rows.shape[1]
        per_program = self.rows(num_rows, block)
        self.launch(
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
            num_warps=self.warps(block * per_program),
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
        heads, half_block = min(16, triton.next_power_of_2(num_heads)), triton.next_power_of_2(half)
        tokens = self.rows(num_tokens, 2 * heads * half_block)
        self.launch(
            "rope",
            rope_kernel,
            (triton.cdiv(num_tokens, tokens), triton.cdiv(num_heads, heads)),
            x,
            cos.contiguous(),
            sin.contiguous(),
            out,
            num_tokens,
            num_heads,
            x.stride(0),
            x.stride(1),
            HEAD_DIM=head_dim,
            HALF=half,
            HALF_BLOCK=half_block,
            REST_BLOCK=triton.next_power_of_2(rest) if rest else 0,
            TOKENS=tokens,
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
        per_program = self.rows(len(rows), block)
        self.launch(
            op,
            activation_kernel,
            (triton.cdiv(len(rows), per_program), triton.cdiv(n, block)),
            rows,
            out,
            len(rows),
            rows.stride(0),
            n,
            ROWS=per_program,
            BLOCK=block,
            ACTIVATION=activation,
            GATED=gated,
            num_warps=self.warps(per_program * block),
        )
        return out

    def gather(self, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Rows of x: [n, ...] by int32 [m]."""
        return self._gather("gather", x, indices)

    def embedding(self, token_ids: torch.Tensor, weight: torch.Tensor | QuantizedWeight) -> torch.Tensor:
        """Rows of a weight [vocab_size, hidden_size] by int32 [num_tokens]."""
        if isinstance(weight, torch.Tensor):
            return self._gather("embedding", weight, token_ids)
        return self.quantized_rows(token_ids, weight)

    def _gather(self, op: str, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(len(x), -1) if len(x) else x
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        n = rows.shape[-1]
        out = torch.empty((len(indices), *x.shape[1:]), dtype=x.dtype, device=x.device)
        block = min(self.tuning.row_values, triton.next_power_of_2(n))
        per_program = self.rows(len(indices), block)
        self.launch(
            op,
            gather_kernel,
            (triton.cdiv(len(indices), per_program), triton.cdiv(n, block)),
            rows,
            indices,
            out,
            len(indices),
            rows.stride(0),
            n,
            ROWS=per_program,
            BLOCK=block,
            num_warps=self.warps(per_program * block),
        )
        return out

    # ---- attention -----------------------------------------------------------------------------------------
    def write_kv(
        self, kv_cache: tuple[Any, Any], key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor
    ) -> tuple[Any, Any]:
        """Mutates kv_cache, tensors or codes with scales, and returns it; see core/ops/attention.py."""
        keys, values = kv_cache
        num_kv_heads, head_dim = keys.shape[2:]
        flat_key, flat_value = key.flatten(1), value.flatten(1)
        strides = flat_key.stride(0), flat_value.stride(0)
        if not isinstance(keys, torch.Tensor):
            dim_block = triton.next_power_of_2(head_dim)
            self.launch(
                "write_kv",
                write_int8_kv_kernel,
                (len(slot_mapping), num_kv_heads),
                flat_key,
                flat_value,
                keys.codes,
                values.codes,
                keys.scales,
                values.scales,
                slot_mapping,
                *strides,
                NUM_KV_HEADS=num_kv_heads,
                HEAD_DIM=head_dim,
                DIM_BLOCK=dim_block,
                num_warps=self.warps(dim_block),
            )
            return kv_cache
        n, num_tokens = num_kv_heads * head_dim, len(slot_mapping)
        block = min(self.tuning.row_values, triton.next_power_of_2(n))
        per_program = self.rows(num_tokens, block)
        self.launch(
            "write_kv",
            write_kv_kernel,
            (triton.cdiv(num_tokens, per_program), triton.cdiv(n, block)),
            flat_key,
            flat_value,
            keys,
            values,
            slot_mapping,
            num_tokens,
            *strides,
            n,
            ROWS=per_program,
            BLOCK=block,
            num_warps=self.warps(per_program * block),
        )
        return kv_cache

    def paged_attention(
        self,
        query: torch.Tensor,
        kv_cache: tuple[Any, Any],
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        *,
        scale: float,
        window: int = 0,
        chunk: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        reach: torch.Tensor | None = None,
        max_query_len: int = 0,
        max_seq_len: int = 0,
    ) -> torch.Tensor:
        """See core/ops/attention.py. A step of one token a request is split along the keys. The cache: tensors, or
        codes with scales."""
        keys, values = kv_cache
        is_int8 = not isinstance(keys, torch.Tensor)
        query = query if query.stride(-1) == 1 else query.contiguous()
        num_tokens, num_heads, head_dim = query.shape
        num_reqs, block_size, num_kv_heads = len(seq_lens), keys.shape[1], keys.shape[2]
        group = num_heads // num_kv_heads
        decode = max_query_len == 1
        if decode:
            reach = None  # nothing stands behind the last token
        is_wide = head_dim > MOST_VALUES
        tile_heads = min(group, self.tuning.wide_heads) if is_wide else group
        least = max(16, triton.next_power_of_2(tile_heads))
        is_float32 = query.dtype.itemsize > 2
        most = self.tuning.prefill_rows(head_dim, is_wide=is_float32, is_int8=is_int8)
        rows = least if decode or is_wide else max(least, most)
        dim_block, rest_block = _dim_blocks(head_dim)
        longest = max_seq_len or block_table.shape[1] * block_size
        num_splits = triton.cdiv(longest, self.tuning.split_keys) if decode else 1
        tiles = num_reqs if decode else num_tokens // (rows // tile_heads) + num_reqs
        out = self.room(query.shape, query)
        if not num_tokens:
            return out
        parts, stats = self._workspace(num_splits, num_reqs, num_heads, head_dim, query.device)
        warps = self.tuning.decode_warps if decode else self.tuning.attention_warps
        self.launch(
            "paged_attention",
            attention_kernel,
            (tiles, num_kv_heads * triton.cdiv(group, tile_heads), num_splits),
            query,
            keys.codes if is_int8 else keys,
            values.codes if is_int8 else values,
            keys.scales if is_int8 else None,
            values.scales if is_int8 else None,
            out,
            parts,
            stats,
            query_start_loc,
            seq_lens,
            block_table,
            sinks,
            alibi_slopes,
            reach,
            scale,
            softcap,
            num_reqs,
            query.stride(0),
            query.stride(1),
            block_table.stride(0),
            window,
            chunk,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            DIM_BLOCK=dim_block,
            REST_BLOCK=rest_block,
            BLOCK_SIZE=block_size,
            TILE_HEADS=tile_heads,
            ROWS=rows,
            KEYS=self._keys(head_dim, query.dtype, is_dear=is_int8 and (is_wide or not decode)),
            **self.tuning.order(head_dim, is_int8=is_int8),
            SPLIT=self.tuning.split_keys if num_splits > 1 else 0,
            DECODE=decode,
            WINDOW=window > 0,
            CHUNK=chunk > 0,
            SOFTCAP=softcap > 0,
            SINKS=sinks is not None,
            ALIBI=alibi_slopes is not None,
            REACH=reach is not None,
            INT8=is_int8,
            WIDE_DOT=self.wide_dot,
            num_warps=self.tuning.wide_warps if is_wide else warps,
            num_stages=self.tuning.wide_stages if is_wide else self.tuning.stages,
        )
        if num_splits > 1:
            self.launch(
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
                DIM_BLOCK=max(16, triton.next_power_of_2(head_dim)),
                num_warps=2,
            )
        return out

    # ---- mixtures of experts ---------------------------------------------------------------------------------
    def grouped_experts(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        gate_up: torch.Tensor | QuantizedWeight,
        down: torch.Tensor | QuantizedWeight,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
        *,
        activation: str = "silu",
        clamp: float = 0.0,
        alpha: float = 1.702,
        scale_input: bool = False,
        gated: bool = True,
        partial: bool = False,
    ) -> torch.Tensor:
        """x: [num_tokens, hidden_size]; see core/ops/moe.py."""
        num_tokens, (num_experts, size), (_, out_features) = len(x), _stack_of(gate_up), _stack_of(down)
        size //= 2 if gated else 1
        num_rows = num_tokens * experts.shape[1]
        x, weights = x.contiguous(), weights.contiguous()
        rows = 16 if num_rows <= 16 * num_experts else self.tuning.expert_rows
        routed = Routed(
            sorted=sort_by_expert(experts, num_experts, rows),
            weights=weights,
            tile_rows=rows,
            num_tiles=most_tiles(num_rows, num_experts, rows),
        )
        inner = self.room((num_rows, size), x)
        outputs = (torch.zeros if partial else torch.empty)(
            (num_rows, out_features), dtype=torch.float32, device=x.device
        )
        how: dict[str, Any] = {"activation": activation, "alpha": alpha, "gated": gated, "is_scaled": scale_input}
        how["clamp"] = clamp if gated else 0.0
        self._experts("grouped_experts", x, gate_up, gate_up_bias, routed, inner, is_up=True, **how)
        how = {"is_up": False, "is_scaled": not scale_input}
        self._experts("grouped_experts.down", inner, down, down_bias, routed, outputs, **how)
        return outputs.view(num_tokens, experts.shape[1], out_features).sum(1).to(x.dtype)

    def _experts(
        self,
        op: str,
        x: torch.Tensor,
        weight: torch.Tensor | QuantizedWeight,
        bias: torch.Tensor | None,
        routed: Routed,
        out: torch.Tensor,
        *,
        is_up: bool,
        is_scaled: bool,
        activation: str = "silu",
        clamp: float = 0.0,
        alpha: float = 1.702,
        gated: bool = True,
    ) -> torch.Tensor:
        """The inside of each pair's expert in sorted rows (is_up), or what the pair adds, float32."""
        if isinstance(weight, QuantizedWeight):
            how: dict[str, Any] = {"is_up": is_up, "is_scaled": is_scaled, "activation": activation}
            how |= {"clamp": clamp, "alpha": alpha, "gated": gated}
            return self.quantized_experts(op, x, weight, bias, routed, out, **how)
        order, per_token = routed.sorted, routed.weights.shape[1]
        gate = {"PER_TOKEN": per_token, "ACTIVATION": activation, "GATED": gated, "CLAMP": clamp > 0} if is_up else {}
        self.launch(
            op,
            glu_experts_kernel if is_up else down_experts_kernel,
            (routed.num_tiles, triton.cdiv(out.shape[1], self.tuning.expert_cols)),
            x,
            weight,
            bias,
            routed.weights,
            order.order,
            order.first,
            order.counts,
            order.ends,
            out,
            *([clamp, alpha] if is_up else []),
            IN=x.shape[1],
            OUT=out.shape[1],
            BIAS=bias is not None,
            SCALE=is_scaled,
            **gate,
            **self._expert_cut(weight, routed),
        )
        return out

    def _expert_cut(self, weight: torch.Tensor, routed: Routed) -> dict[str, Any]:
        tuning = self.tuning
        return {
            "EXPERTS": len(weight),
            "EXPERT_BLOCK": triton.next_power_of_2(len(weight)),
            "ROWS": routed.tile_rows,
            "COLS": tuning.expert_cols,
            "DEPTH": tuning.expert_depth // (2 if weight.dtype.itemsize > 2 else 1),
            "WIDE_DOT": self.wide_dot,
            "num_warps": tuning.few_warps if routed.tile_rows == 16 else tuning.expert_warps,
            "num_stages": tuning.stages,
        }

    # ---- latent attention ------------------------------------------------------------------------------------
    def absorb_keys(self, query: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
        """query: [num_tokens, num_heads, qk_nope_head_dim]; see core/ops/moe.py."""
        return self.quantized_heads("absorb_keys", query, weight, first=0, size=weight.in_features, absorb=True)

    def expand_values(self, latents: torch.Tensor, weight: QuantizedWeight, *, v_head_dim: int) -> torch.Tensor:
        """latents: [num_tokens, num_heads, kv_lora_rank]; see core/ops/moe.py."""
        first = weight.out_features // weight.num_stacked - v_head_dim
        return self.quantized_heads("expand_values", latents, weight, first=first, size=v_head_dim, absorb=False)

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
        self.launch(
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
        self.launch(
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
    def _keys(self, head_dim: int, dtype: torch.dtype, *, is_dear: bool) -> int:
        """Keys of a step. is_dear: they become numbers in registers, beside a whole tile of queries."""
        if head_dim > MOST_VALUES:
            most = self.tuning.wide_keys
        else:
            most = self.tuning.keys // (2 if head_dim > 128 else 1)
        return max(16, most // (2 if dtype.itemsize > 2 else 1) // (2 if is_dear else 1))

    def _workspace(
        self, num_splits: int, num_reqs: int, num_heads: int, head_dim: int, device: torch.device
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if num_splits == 1:
            return None, None
        shape = (num_reqs, num_splits, num_heads)
        parts = torch.empty((*shape, head_dim), dtype=torch.float32, device=device)
        return parts, torch.empty((*shape, 2), dtype=torch.float32, device=device)


def _dim_blocks(head_dim: int) -> tuple[int, int]:
    """Powers of two that a head's values fill: one, or for wide heads a large one and one for what is behind it."""
    if head_dim <= MOST_VALUES:
        return max(16, triton.next_power_of_2(head_dim)), 0
    large: int = triton.next_power_of_2(head_dim // 2 + 1)
    return large, max(16, triton.next_power_of_2(head_dim - large)) if head_dim > large else 0


def _stack_of(weight: torch.Tensor | QuantizedWeight) -> tuple[int, int]:
    """Matrices of stacked weights, and the rows of each."""
    if isinstance(weight, QuantizedWeight):
        return weight.num_stacked, weight.out_features // weight.num_stacked
    return len(weight), weight.shape[1]
