"""The transformer block that layers of a hybrid share (Zamba 2) inside a forward function."""

from ..stages import Array
from .attention import attention
from .memory import Sight
from .scope import Scope
from .spec import AttentionSpec, NormSpec, SharedSpec


def shared_block(
    layer: Scope, shared: SharedSpec, attn: AttentionSpec, norm: NormSpec, x: Array, embeddings: Array, sight: Sight
) -> Array:
    """What a layer adds to its mixer's input, for x and embeddings: [num_tokens, hidden_size]; returns that shape."""
    ops, block = layer.ops, Scope(layer.ops, layer.params, f"layers.{shared.owner}.shared.")
    at, mlp = block.inside("attn"), block.inside("mlp")
    x = block.normalize(norm, "attn_norm", ops.concat((x, embeddings)))
    adapted = None
    if shared.has_attn_adapter:
        adapted = ops.concat([_adapter(at, f"{name}_adapter", shared.number, x) for name in "qkv"])
    x = block.normalize(norm, "mlp_norm", attention(at, attn, x, sight, adapted))
    up = mlp.linear("gate_up_proj", x, shared.mlp.bias)
    up = ops.add(up, _adapter(mlp, "adapter", shared.number, x))
    x = mlp.linear("down_proj", ops.act_mul(up, activation=shared.mlp.activation), shared.mlp.bias)
    return layer.linear("shared.out_proj", x)


def _adapter(at: Scope, name: str, number: int, x: Array) -> Array:
    return at.linear(f"{name}_out.{number}", at.linear(f"{name}_in.{number}", x))
