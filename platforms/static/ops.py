"""Ops of static shapes in plain torch, which a compiler can fuse: what the definitions compute value by value."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.core.config import KV_DTYPES
from headrace.core.ops import OpTable
from headrace.core.ops.attention import distance_buckets
from headrace.core.ops.elementwise import activate
from headrace.core.ops.moe import glu
from headrace.core.ops.sampling import draw
from headrace.core.platform import OpProvider
from headrace.core.stages import Array
from headrace.kernels.torch import moe, ragged, state
from headrace.kernels.torch.attention import paged_attention
from headrace.kernels.torch.sampling import gumbel_noise

if TYPE_CHECKING:
    from headrace.core.models.spec import Activation


def static_provider() -> OpProvider:
    """Every op whose definition looks at a value or counts in 64 bits."""
    return OpProvider(
        name="torch-static",
        kv_dtypes=KV_DTYPES,
        ops={
            "new_kv_cache": OpTable.new_kv_cache,
            "write_kv": OpTable.write_kv,
            "paged_attention": partial(paged_attention, buckets=distance_buckets),
            "pack_stacked": OpTable.pack_stacked,
            "grouped_experts": _grouped_experts,
            "absorb_keys": OpTable.absorb_keys,
            "expand_values": OpTable.expand_values,
            "encoder_attention": ragged.encoder_attention,
            "mean_rows": ragged.mean_rows,
            "store_rows": ragged.store_rows,
            **state_ops(),
            "sample": _sample,
        },
    )


def state_ops() -> dict[str, Callable[..., Any]]:
    """Recurrences over the tokens of a step in few rounds."""
    return {
        "new_state": OpTable.new_state,
        "causal_conv": _causal_conv,
        "selective_scan": state.selective_scan,
        "gated_delta": state.gated_delta,
        "wkv": state.wkv,
    }


def _grouped_experts(
    x: Array,
    weights: Array,
    experts: Array,
    gate_up: Array,
    down: Array,
    gate_up_bias: Array | None = None,
    down_bias: Array | None = None,
    *,
    activation: "Activation" = "silu",
    clamp: float = 0.0,
    alpha: float = 1.702,
    scale_input: bool = False,
    gated: bool = True,
    partial: bool = False,
) -> Array:
    return moe.grouped_experts(
        x,
        weights,
        experts,
        gate_up,
        down,
        gate_up_bias,
        down_bias,
        glu=lambda inner: glu(inner, activation, clamp, alpha, gated),
        scale_input=scale_input,
        partial=partial,
    )


def _causal_conv(*arrays: Array, activation: "Activation | None" = None) -> tuple[Array, Array]:
    return state.causal_conv(*arrays, activate=lambda x: x if activation is None else activate(x, activation))


def _sample(
    logits: Array,
    seeds: Array,
    positions: Array,
    temperature: Array | None,
    top_k: Array | None,
    top_p: Array | None,
    min_p: Array | None,
) -> Array:
    return draw(
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        noise=lambda: gumbel_noise(seeds, positions, vocab_size=logits.shape[-1]),
    )
