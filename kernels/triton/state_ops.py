"""The ops over states, with the signatures of core/ops/state.py."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import torch
import triton

from .launch import Launcher
from .states import conv_kernel, delta_kernel, history_kernel, scan_kernel, wkv_kernel

VALUES_PER_LANE = 32
"""Numbers of a state that a thread holds. A program is one warp: sums over a state then wait for no other warp."""
CHANNELS = 256
"""Of one program of a kernel that needs no sum over them."""

Arrays = tuple[torch.Tensor, torch.Tensor]


class StateOps(Launcher):
    """Convolutions and recurrences; all change `state` where it lies and return it."""

    def causal_conv(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        state: torch.Tensor,
        query_start_loc: torch.Tensor,
        from_slots: torch.Tensor,
        to_slots: torch.Tensor,
        *,
        activation: str | None = None,
    ) -> Arrays:
        """x: [num_tokens, n]. Two launches: what stood before the step is copied before any of it is overwritten."""
        num_tokens, n = x.shape
        num_reqs, width = len(query_start_loc) - 1, weight.shape[-1]
        out = self.room((num_tokens, n), x)
        if not num_tokens:
            return out, state
        history = torch.empty((num_reqs, width - 1, n), dtype=state.dtype, device=x.device)
        size = (width - 1) * n
        block = min(self.tuning.row_values, triton.next_power_of_2(size))
        if size:
            self.launch(
                "causal_conv.history",
                history_kernel,
                (num_reqs, triton.cdiv(size, block)),
                state,
                from_slots,
                history,
                from_slots.stride(0),
                size,
                BLOCK=block,
                num_warps=self.warps(block),
            )
        rows, block = _rows(x), min(CHANNELS, triton.next_power_of_2(n))
        self.launch(
            "causal_conv",
            conv_kernel,
            (num_tokens, triton.cdiv(n, block)),
            rows,
            weight,
            bias,
            history,
            state,
            query_start_loc,
            to_slots,
            out,
            num_reqs,
            rows.stride(0),
            n,
            WIDTH=width,
            BLOCK=block,
            ACTIVATION=activation or "",
            BIAS=bias is not None,
            num_warps=1,
        )
        return out, state

    def selective_scan(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        a_log: torch.Tensor,
        d: torch.Tensor,
        dt_bias: torch.Tensor,
        state: torch.Tensor,
        query_start_loc: torch.Tensor,
        from_slots: torch.Tensor,
        to_slots: torch.Tensor,
        *,
        dt_min: float = 0.0,
        dt_max: float = float("inf"),
        max_query_len: int = 0,
    ) -> Arrays:
        """x: [num_tokens, num_heads, head_dim]."""
        out = self.room(x.shape, x)
        if not len(x):
            return out, state
        num_values, (num_groups, size) = x.shape[1] * x.shape[2], b.shape[1:]
        block = triton.next_power_of_2(size)
        values = self._state_values(block, num_values // num_groups)
        arrays = [_rows(array) for array in (x, dt, b, c)]
        self.launch(
            "selective_scan",
            scan_kernel,
            (len(query_start_loc) - 1, num_groups * triton.cdiv(num_values // num_groups, values)),
            *arrays,
            a_log,
            d,
            dt_bias,
            state,
            query_start_loc,
            from_slots,
            to_slots,
            out,
            from_slots.stride(0),
            *(array.stride(0) for array in arrays),
            dt_min,
            dt_max,
            NUM_VALUES=num_values,
            GROUP_VALUES=num_values // num_groups,
            HEAD_DIM=x.shape[2],
            STATE=size,
            STATE_BLOCK=block,
            VALUES=values,
            MATRIX=a_log.dim() == 2,
            num_warps=1,
        )
        return out, state

    def gated_delta(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dt: torch.Tensor,
        beta: torch.Tensor,
        a_log: torch.Tensor,
        dt_bias: torch.Tensor,
        state: torch.Tensor,
        query_start_loc: torch.Tensor,
        from_slots: torch.Tensor,
        to_slots: torch.Tensor,
        *,
        beta_scale: float = 1.0,
        max_query_len: int = 0,
    ) -> Arrays:
        """query, key: [num_tokens, num_key_heads, key_dim]; value: [num_tokens, num_heads, head_dim]."""
        out = self.room(value.shape, value)
        if not len(value):
            return out, state
        num_heads, head_dim, key_dim = value.shape[1], value.shape[2], key.shape[2]
        block = triton.next_power_of_2(key_dim)
        values = self._state_values(block, head_dim)
        arrays = [_rows(array) for array in (query, key, value, dt, beta)]
        self.launch(
            "gated_delta",
            delta_kernel,
            (len(query_start_loc) - 1, num_heads, triton.cdiv(head_dim, values)),
            *arrays,
            a_log,
            dt_bias,
            state,
            query_start_loc,
            from_slots,
            to_slots,
            out,
            from_slots.stride(0),
            *(array.stride(0) for array in arrays),
            beta_scale,
            key_dim**-0.5,
            NUM_HEADS=num_heads,
            GROUP=num_heads // key.shape[1],
            KEY_DIM=key_dim,
            KEY_BLOCK=block,
            HEAD_DIM=head_dim,
            VALUES=values,
            BY_KEY=dt.dim() == 3,
            num_warps=1,
        )
        return out, state

    def wkv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        a_log: torch.Tensor,
        bonus: torch.Tensor,
        state: torch.Tensor,
        query_start_loc: torch.Tensor,
        from_slots: torch.Tensor,
        to_slots: torch.Tensor,
        *,
        max_query_len: int = 0,
    ) -> Arrays:
        """key, value: [num_tokens, n]."""
        out = self.room(value.shape, value)
        if not len(value):
            return out, state
        n = value.shape[1]
        block, (keys, values) = min(CHANNELS, triton.next_power_of_2(n)), (_rows(key), _rows(value))
        self.launch(
            "wkv",
            wkv_kernel,
            (len(query_start_loc) - 1, triton.cdiv(n, block)),
            keys,
            values,
            a_log,
            bonus,
            state,
            query_start_loc,
            from_slots,
            to_slots,
            out,
            from_slots.stride(0),
            keys.stride(0),
            values.stride(0),
            n,
            BLOCK=block,
            num_warps=1,
        )
        return out, state

    def _state_values(self, block: int, most: int) -> int:
        """Values of a program, each with `block` numbers of its own; a power of two."""
        held = VALUES_PER_LANE * self.tuning.lanes // block
        filled: int = triton.next_power_of_2(most)
        return max(4, min(held, filled, CHANNELS))


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[num_tokens, n], the values of a token side by side."""
    rows = x.reshape(len(x), -1)
    return rows if rows.stride(-1) == 1 else rows.contiguous()
