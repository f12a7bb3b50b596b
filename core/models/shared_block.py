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
    ops, block, hidden = layer.ops, layer.root.inside(f"layers.{shared.owner}.shared"), layer.hidden_size
    at, mlp, size = block.inside("attn"), block.inside("mlp"), shared.mlp.intermediate_size
    x = block.normalize(norm, "attn_norm", ops.concat((x, embeddings)), 2 * hidden)
    adapted = None
    if shared.has_attn_adapter:
        outs = {name: attn.head_dim * (attn.num_heads if name == "q" else attn.num_kv_heads) for name in "qkv"}
        adapters = [_adapter(at, f"{name}_adapter", shared, x, out, 2 * hidden) for name, out in outs.items()]
        adapted = ops.concat(adapters)
    x = block.normalize(norm, "mlp_norm", attention(at, attn, x, sight, in_size=2 * hidden, adapted=adapted))
    rows = {"gate_proj": size, "up_proj": size}
    up = mlp.fused("gate_up_proj", x, rows, hidden, shared.mlp.bias, num_groups=size)
    if shared.adapter_rank:
        up = ops.add(up, _adapter(mlp, "adapter", shared, x, 2 * size, hidden))
    up = ops.act_mul(up, activation=shared.mlp.activation)
    x = mlp.linear("down_proj", up, hidden, size, "row", shared.mlp.bias)
    return layer.linear("shared.out_proj", x, hidden, hidden)


def _adapter(at: Scope, name: str, shared: SharedSpec, x: Array, out_features: int, in_features: int) -> Array:
    inner = at.linear(f"{name}_in.{shared.number}", x, shared.adapter_rank, in_features)
    return at.linear(f"{name}_out.{shared.number}", inner, out_features, shared.adapter_rank)
