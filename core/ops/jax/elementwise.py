"""Elementwise and shape ops in JAX."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from ...stages import Array
from ._arrays import DTYPES, compiled, widen

if TYPE_CHECKING:
    from ...models.spec import Activation


@compiled()
def add(x: Array, y: Array) -> Array:
    """x + y."""
    return x + y


@compiled("factor")
def scale(x: Array, factor: float) -> Array:
    """x * factor, the factor rounded to x's dtype."""
    return x * jnp.asarray(factor, x.dtype)


@compiled("cap")
def softcap(x: Array, cap: float) -> Array:
    """cap * tanh(x / cap), in float32."""
    return (cap * jnp.tanh(widen(x) / cap)).astype(x.dtype)


@compiled("activation")
def act(x: Array, *, activation: "Activation") -> Array:
    """An activation function, in float32."""
    return activate(widen(x), activation).astype(x.dtype)


@compiled("activation")
def act_mul(x: Array, *, activation: "Activation") -> Array:
    """act(gate) * up, where x holds gate then up, or is the two."""
    gate, up = x if isinstance(x, tuple) else jnp.split(x, 2, -1)
    return (activate(widen(gate), activation) * widen(up)).astype(gate.dtype)


@compiled()
def gate(x: Array, gates: Array) -> Array:
    """x * sigmoid(gates), in float32."""
    gates = gates[..., None] if gates.ndim < x.ndim else gates
    return (widen(x) * jax.nn.sigmoid(widen(gates))).astype(x.dtype)


@compiled()
def xielu(x: Array, alpha_p: Array, alpha_n: Array) -> Array:
    """xIELU with beta 0.5 and epsilon -1e-6, in float32."""
    wide, beta = widen(x), 0.5
    up = jax.nn.softplus(alpha_p) * jnp.square(wide) + beta * wide
    down = (jnp.expm1(jnp.minimum(wide, -1e-6)) - wide) * (beta + jax.nn.softplus(alpha_n)) + beta * wide
    return jnp.where(wide > 0, up, down).astype(x.dtype)


@compiled()
def mul(x: Array, y: Array) -> Array:
    """x * y in float32, as x's dtype."""
    y = y[..., None] if 1 < y.ndim < x.ndim else y
    return (widen(x) * y).astype(x.dtype)


@compiled("limit")
def clamp(x: Array, *, limit: float) -> Array:
    """x, which may be a fused product in pieces, cut to [-limit, limit]."""
    return jax.tree.map(lambda piece: jnp.clip(piece, -limit, limit), x)


@compiled("factor", "length", "shift")
def log_growth(positions: Array, *, factor: float, length: int, shift: int = 0) -> Array:
    """1 + factor * log(1 + floor((position + shift) / length)), float32 [num_tokens, 1]."""
    steps = (positions + shift) // length
    return (1 + factor * jnp.log1p(steps.astype(jnp.float32)))[:, None]


def concat(arrays: Sequence[Array]) -> Array:
    """Join along the last axis."""
    return jnp.concatenate(list(arrays), -1)


def split(x: Array, sizes: Sequence[int]) -> tuple[Array, ...]:
    """Cut the last axis; a fused product may have come in these pieces already."""
    if isinstance(x, tuple):
        assert [piece.shape[-1] for piece in x] == list(sizes), sizes
        return x
    pieces: tuple[Array, ...] = _split(x, sizes=tuple(sizes))
    return pieces


@compiled("head_dim")
def split_heads(x: Array, *, head_dim: int) -> Array:
    """[num_tokens, num_heads * head_dim] -> [num_tokens, num_heads, head_dim]."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // head_dim, head_dim)


@compiled()
def merge_heads(x: Array) -> Array:
    """[num_tokens, num_heads, head_dim] -> [num_tokens, num_heads * head_dim]."""
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2])


@compiled()
def gather(x: Array, indices: Array) -> Array:
    """Rows of x."""
    return jnp.take(x, indices, axis=0, mode="clip")


@compiled("dtype")
def cast(x: Array, *, dtype: str) -> Array:
    """x in another dtype."""
    return x.astype(DTYPES[dtype])


@compiled("sizes")
def _split(x: Array, *, sizes: tuple[int, ...]) -> tuple[Array, ...]:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
    return tuple(jnp.split(x, ends, -1))


def activate(x: Array, activation: "Activation") -> Array:
    """An activation function in x's own dtype; not an op, but what ops with an activation share."""
    match activation:
        case "silu":
            return jax.nn.silu(x)
        case "gelu":
            return jax.nn.gelu(x, approximate=False)
        case "gelu_tanh":
            return jax.nn.gelu(x, approximate=True)
        case "relu":
            return jax.nn.relu(x)
        case "relu2":
            return jnp.square(jax.nn.relu(x))
        case "relu6":
            return jax.nn.relu6(x)
        case "leaky_relu":
            return jax.nn.leaky_relu(x)
        case "gelu_10":
            return jax.nn.gelu(x, approximate=False).clip(-10, 10)
        case "quick_gelu":
            return x * jax.nn.sigmoid(1.702 * x)
        case "hardswish":
            return jax.nn.hard_swish(x)
        case "mish":
            return jax.nn.mish(x)
        case "laplace":
            return 0.5 * (1 + jax.lax.erf((x - 0.707107) / (0.282095 * 2**0.5)))
        case "linear":
            return x
        case "tanh":
            return jnp.tanh(x)
        case "sigmoid":
            return jax.nn.sigmoid(x)
        case "softplus":
            return jax.nn.softplus(x)
        case "sqrtsoftplus":
            return jnp.sqrt(jax.nn.softplus(x))


FUNCTIONS = (
    add,
    scale,
    softcap,
    act,
    act_mul,
    gate,
    xielu,
    mul,
    clamp,
    log_growth,
    concat,
    split,
    split_heads,
    merge_heads,
    gather,
    cast,
)
