"""Layers with alternating updates (Gemma 3n) inside a forward function: one residual stream passes, others follow."""

from collections.abc import Sequence

from ..ops.table import OpTable
from ..stages import Array, ForwardBatch
from .attention import attention
from .feed_forward import feed_forward
from .layer_inputs import read_input
from .norms import NO_EPS, Params, normalize
from .spec import AltUpSpec, LayerSpec, ModelSpec

Streams = Sequence[Array]


def make_streams(ops: OpTable, altup: AltUpSpec, params: Params, x: Array) -> Streams:
    """The streams before the first layer: x, [num_tokens, hidden_size], and projections of it, all as large as x."""
    return (x, *_projected(ops, altup, params, "in", [x for _ in range(altup.num_streams)]))


def join_streams(ops: OpTable, altup: AltUpSpec, params: Params, streams: Streams) -> Array:
    """The mean of the first stream and of projections of the others, as large as it: [num_tokens, hidden_size]."""
    return ops.scale(_sum(ops, (streams[0], *_projected(ops, altup, params, "out", streams))), 1 / altup.num_streams)


def altup_layer(
    ops: OpTable,
    spec: ModelSpec,
    altup: AltUpSpec,
    layer: LayerSpec,
    params: Params,
    prefix: str,
    streams: Streams,
    inputs: Array,
    cos: Array | None,
    sin: Array | None,
    cache: Array,
    group: int,
    batch: ForwardBatch,
) -> tuple[Streams, Array]:
    """One layer: the streams behind it, and the cache. inputs: what it reads of the tokens themselves; cos, sin,
    cache, group: as `attention` takes them."""
    num, norm = altup.num_streams, spec.norm
    factors = _factors(ops, spec, altup, params, f"{prefix}altup.", "predict", streams[altup.active])
    predicted = [
        _sum(ops, [streams[i], *(ops.mul(streams[j], factors[i * num + j]) for j in range(num))]) for i in range(num)
    ]
    active = predicted[altup.active]

    x = normalize(ops, norm, params, f"{prefix}attn_norm.", active)
    block, cache = attention(ops, layer.attn, params, f"{prefix}attn.", x, cos, sin, cache, group, batch)
    block = normalize(ops, norm, params, f"{prefix}attn_post_norm.", block)
    laurel = ops.linear(x, params[f"{prefix}laurel.in_proj.weight"])
    laurel = ops.linear(laurel, params[f"{prefix}laurel.out_proj.weight"])
    laurel = ops.add(x, normalize(ops, norm, params, f"{prefix}laurel.norm.", laurel))
    x = ops.scale(_sum(ops, (active, block, laurel)), 0.5**0.5)
    block = feed_forward(ops, layer, params, f"{prefix}mlp.", normalize(ops, norm, params, f"{prefix}mlp_norm.", x))
    x = ops.add(x, normalize(ops, norm, params, f"{prefix}mlp_post_norm.", block))

    factors = _factors(ops, spec, altup, params, f"{prefix}altup.", "correct", x)
    news = ops.add(x, ops.scale(active, -1.0))
    corrected = [_sum(ops, (ops.mul(news, factors[i]), news, predicted[i])) for i in range(num)]
    x = corrected[altup.active]
    if altup.scales_output:
        x = ops.mul(x, params[f"{prefix}altup.scale"])
    read = read_input(ops, spec, layer, params, prefix, inputs, x)
    return (corrected[0], *(ops.add(corrected[i], read) for i in range(1, num))), cache


def _factors(
    ops: OpTable, spec: ModelSpec, altup: AltUpSpec, params: Params, prefix: str, name: str, x: Array
) -> tuple[Array, ...]:
    """Numbers for each token, [num_tokens, 1] each, by which streams are mixed."""
    x = ops.scale(normalize(ops, spec.norm, params, f"{prefix}router_norm.", x), 1 / spec.hidden_size)
    x = ops.act(ops.linear(x, params[f"{prefix}router.weight"]), activation="tanh")
    x = ops.linear(x, params[f"{prefix}{name}.weight"])
    return ops.split(x, (1,) * altup.num_streams ** (2 if name == "predict" else 1))


def _projected(ops: OpTable, altup: AltUpSpec, params: Params, way: str, streams: Streams) -> list[Array]:
    """Projections of all streams but the first, with the magnitude of that one."""
    size = ops.magnitude(streams[0])
    projected: list[Array] = []
    for n in range(1, altup.num_streams):
        x = ops.linear(streams[n], params[f"altup_{way}.{n - 1}.weight"])
        projected.append(ops.mul(ops.rms_norm(x, None, eps=NO_EPS), size))
    return projected


def _sum(ops: OpTable, arrays: Sequence[Array]) -> Array:
    total: Array = None
    for array in arrays:
        total = array if total is None else ops.add(total, array)
    return total
