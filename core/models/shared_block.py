"""The transformer block that layers of a hybrid share (Zamba 2) inside a forward function."""

from ..ops.table import OpTable
from ..stages import Array, ForwardBatch
from .attention import attention
from .norms import Params, normalize
from .spec import AttentionSpec, NormSpec, SharedSpec


def shared_block(
    ops: OpTable,
    shared: SharedSpec,
    attn: AttentionSpec,
    norm: NormSpec,
    params: Params,
    x: Array,
    embeddings: Array,
    cos: Array | None,
    sin: Array | None,
    cache: Array,
    group: int,
    batch: ForwardBatch,
) -> tuple[Array, Array]:
    """The block's output for x and embeddings: [num_tokens, hidden_size], of that shape, and the layer's cache."""
    prefix, mlp = f"layers.{shared.owner}.shared.", shared.mlp
    x = normalize(ops, norm, params, f"{prefix}attn_norm.", ops.concat((x, embeddings)))
    adapted = None
    if shared.has_attn_adapter:
        names = (f"{prefix}attn.{name}_adapter" for name in "qkv")
        adapted = ops.concat([_adapter(ops, params, name, shared.number, x) for name in names])
    x, cache = attention(ops, attn, params, f"{prefix}attn.", x, cos, sin, cache, group, batch, adapted=adapted)
    x = normalize(ops, norm, params, f"{prefix}mlp_norm.", x)
    bias = params[f"{prefix}mlp.gate_up_proj.bias"] if mlp.bias else None
    up = ops.linear(x, params[f"{prefix}mlp.gate_up_proj.weight"], bias)
    up = ops.add(up, _adapter(ops, params, f"{prefix}mlp.adapter", shared.number, x))
    bias = params[f"{prefix}mlp.down_proj.bias"] if mlp.bias else None
    x = ops.linear(ops.act_mul(up, activation=mlp.activation), params[f"{prefix}mlp.down_proj.weight"], bias)
    return x, cache


def _adapter(ops: OpTable, params: Params, name: str, number: int, x: Array) -> Array:
    inner = ops.linear(x, params[f"{name}_in.{number}.weight"])
    return ops.linear(inner, params[f"{name}_out.{number}.weight"])
