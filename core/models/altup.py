"""Layers with alternating updates (Gemma 3n) inside a forward function: one residual stream passes, others follow."""

from collections.abc import Sequence

from ..stages import Array
from .attention import attention
from .feed_forward import feed_forward
from .layer_inputs import read_input
from .memory import Sight
from .scope import NO_EPS, Scope
from .spec import AltUpSpec, LayerSpec, ModelSpec

Streams = Sequence[Array]


def make_streams(scope: Scope, altup: AltUpSpec, x: Array) -> Streams:
    """The streams before the first layer: x, [num_tokens, hidden_size], and projections of it, all as large as x."""
    return (x, *_projected(scope, altup, "in", [x for _ in range(altup.num_streams)]))


def join_streams(scope: Scope, altup: AltUpSpec, streams: Streams) -> Array:
    """The mean of the first stream and of projections of the others, as large as it: [num_tokens, hidden_size]."""
    others = _projected(scope, altup, "out", streams)
    return scope.ops.scale(_sum(scope, (streams[0], *others)), 1 / altup.num_streams)


def altup_layer(
    at: Scope,
    spec: ModelSpec,
    altup: AltUpSpec,
    layer: LayerSpec,
    streams: Streams,
    own_input: Array,
    sight: Sight,
) -> Streams:
    """One layer: the streams behind it. own_input: what it reads of the tokens themselves."""
    ops, num, norm, hidden = at.ops, altup.num_streams, spec.norm, spec.hidden_size
    factors = _factors(at.inside("altup"), spec, altup, "predict", streams[altup.active])
    predicted = [
        _sum(at, [streams[i], *(ops.mul(streams[j], factors[i * num + j]) for j in range(num))]) for i in range(num)
    ]
    active = predicted[altup.active]

    x = at.normalize(norm, "attn_norm", active)
    block = at.normalize(norm, "attn_post_norm", attention(at.inside("attn"), layer.attn, x, sight))
    laurel = at.linear("laurel.in_proj", x, layer.laurel_rank, hidden)
    laurel = at.linear("laurel.out_proj", laurel, hidden, layer.laurel_rank)
    laurel = ops.add(x, at.normalize(norm, "laurel.norm", laurel))
    x = ops.scale(_sum(at, (active, block, laurel)), 0.5**0.5)
    block = feed_forward(at.inside("mlp"), layer, at.normalize(norm, "mlp_norm", x))
    x = ops.add(x, at.normalize(norm, "mlp_post_norm", block))

    factors = _factors(at.inside("altup"), spec, altup, "correct", x)
    news = ops.add(x, ops.scale(active, -1.0))
    corrected = [_sum(at, (ops.mul(news, factors[i]), news, predicted[i])) for i in range(num)]
    x, scale = corrected[altup.active], at.param("altup.scale", hidden)
    if altup.scales_output:
        x = ops.mul(x, scale)
    read = read_input(at, spec, layer, own_input, x)
    return (corrected[0], *(ops.add(corrected[i], read) for i in range(1, num)))


def _factors(at: Scope, spec: ModelSpec, altup: AltUpSpec, name: str, x: Array) -> tuple[Array, ...]:
    """Numbers for each token, [num_tokens, 1] each, by which streams are mixed."""
    # What mixes the streams is small, and all else depends on it.
    ops, num, hidden = at.ops, altup.num_streams, spec.hidden_size
    size = num * num if name == "predict" else num
    x = ops.scale(at.normalize(spec.norm, "router_norm", x), 1 / hidden)
    x = ops.act(at.linear("router", x, num, hidden, quantizable=False), activation="tanh")
    return ops.split(at.linear(name, x, size, num, quantizable=False), (1,) * size)


def _projected(scope: Scope, altup: AltUpSpec, way: str, streams: Streams) -> list[Array]:
    """Projections of all streams but the first, with the magnitude of that one."""
    ops = scope.ops
    size = ops.magnitude(streams[0])
    projected: list[Array] = []
    for n in range(1, altup.num_streams):
        x = scope.linear(f"altup_{way}.{n - 1}", streams[n], scope.hidden_size, scope.hidden_size)
        projected.append(ops.mul(ops.rms_norm(x, None, eps=NO_EPS), size))
    return projected


def _sum(at: Scope, arrays: Sequence[Array]) -> Array:
    total: Array = None
    for array in arrays:
        total = array if total is None else at.ops.add(total, array)
    return total
