"""How a model is cut over the ranks of tensor parallelism: what one rank's spec declares, and its share of each
parameter. numpy only; see jax_sharding.py for a compiler that cuts a whole model by itself."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import Unsupported
from ..models.declare import declare_params
from ..models.params import Param
from ..models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec
from ..weights.dequantize import to_float32
from ..weights.source import HostTensor, LoadedParam


def rank_spec(spec: ModelSpec, tp_size: int) -> ModelSpec:
    """What each of `tp_size` ranks computes: its share of heads and of feed-forward columns.

    Vocabulary and experts stay as they are, for ids are those of the whole model. Raises Unsupported with the reason.
    """
    reason = _why_whole(spec)
    if reason:
        raise Unsupported(f"this {spec.model_type} model cannot be cut over {tp_size} ranks: {reason}")
    return dataclasses.replace(spec, layers=tuple(_rank_layer(layer, tp_size) for layer in spec.layers))


def rank_params(spec: ModelSpec, tp_size: int) -> dict[str, tuple[Param, Param]]:
    """Each parameter of a model as it is declared, and as one rank holds it. A vocabulary that cannot be cut into
    equal parts is whole on every rank."""
    own = {param.name: param for param in declare_params(rank_spec(spec, tp_size))}
    return {param.name: (param, _rank_param(param, own[param.name], tp_size)) for param in declare_params(spec)}


def take_share(loaded: LoadedParam, own: Param, tp_rank: int, tp_size: int) -> LoadedParam:
    """A rank's share of a parameter. Raises Unsupported if a group of quantized columns would be cut."""
    whole = loaded.param
    tensors = loaded.tensors
    if whole.shape[0] != own.shape[0]:
        tensors = tuple(_rows(tensors, _row_ranges(whole, own, tp_rank, tp_size)))
    if whole.shape[1:] != own.shape[1:]:
        start = tp_rank * own.shape[1]
        tensors = tuple(_columns(tensor, slice(start, start + own.shape[1])) for tensor in tensors)
    return LoadedParam(param=own, tensors=tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The model of one rank. params: as `rank_params` gives them."""

    tp_rank: int
    tp_size: int
    spec: ModelSpec
    params: Mapping[str, tuple[Param, Param]]

    def take(self, loaded: LoadedParam) -> LoadedParam:
        """This rank's share of a parameter."""
        return take_share(loaded, self.params[loaded.param.name][1], self.tp_rank, self.tp_size)

    def is_cut(self, name: str) -> bool:
        """True if each rank holds another part of a parameter."""
        whole, own = self.params[name]
        return whole.shape != own.shape


def make_share(spec: ModelSpec, tp_rank: int, tp_size: int) -> Share:
    """The share of one rank. Raises Unsupported."""
    params = rank_params(spec, tp_size)
    return Share(tp_rank=tp_rank, tp_size=tp_size, spec=rank_spec(spec, tp_size), params=params)


def cut_evenly(size: int, tp_size: int, what: str) -> int:
    """size / tp_size. Raises Unsupported if that leaves a rest."""
    if size % tp_size:
        fitting = [n for n in range(1, tp_size) if not size % n]
        raise Unsupported(
            f"{size} {what} cannot be cut over {tp_size} ranks",
            remedies=[f"--tensor-parallel-size {fitting[-1]}" if fitting else "one device"],
        )
    return size // tp_size


def _why_whole(spec: ModelSpec) -> str:
    if spec.kind != "decoder":
        return "only decoders are cut"
    if spec.num_relative_buckets:
        return "its attention has a learned bias by distance"
    if any(layer.shared is not None for layer in spec.layers):
        return "its layers share a block"
    if any(layer.attn.difference for layer in spec.layers):
        return "its heads are taken from each other"
    if any(layer.attn.qk_norm is not None and layer.attn.qk_norm_over == "all" for layer in spec.layers):
        return "it normalises the values of all heads together"
    return ""


def _rank_layer(layer: LayerSpec, tp_size: int) -> LayerSpec:
    moe = None if layer.moe is None else _rank_moe(layer.moe, tp_size)
    mlp = layer.mlp if moe is not None else _rank_mlp(layer.mlp, tp_size)
    return dataclasses.replace(layer, attn=_rank_attention(layer.attn, tp_size), mlp=mlp, moe=moe)


def _rank_attention(attn: AttentionSpec, tp_size: int) -> AttentionSpec:
    """A KV head that several ranks need is held by each of them; latents are one KV head."""
    num_heads, num_kv_heads = cut_evenly(attn.num_heads, tp_size, "attention heads"), attn.num_kv_heads
    if attn.latent is None and num_kv_heads:
        is_shared = num_kv_heads < tp_size and not tp_size % num_kv_heads
        num_kv_heads = 1 if is_shared else cut_evenly(num_kv_heads, tp_size, "KV heads")
    return dataclasses.replace(attn, num_heads=num_heads, num_kv_heads=num_kv_heads)


def _rank_mlp(mlp: MlpSpec, tp_size: int) -> MlpSpec:
    size = cut_evenly(mlp.intermediate_size, tp_size, "feed-forward columns")
    return dataclasses.replace(mlp, intermediate_size=size)


def _rank_moe(moe: MoeSpec, tp_size: int) -> MoeSpec:
    cut_evenly(moe.num_experts, tp_size, "experts")
    return moe if moe.shared is None else dataclasses.replace(moe, shared=_rank_mlp(moe.shared, tp_size))


def _rank_param(whole: Param, own: Param, tp_size: int) -> Param:
    if whole.shard not in ("vocab", "expert") or whole.shape[0] % tp_size:
        return own
    stacked = whole.num_stacked // tp_size if whole.shard == "expert" else 1
    return dataclasses.replace(
        own, shape=(whole.shape[0] // tp_size, *whole.shape[1:]), num_stacked=stacked, parts=()
    )


def _row_ranges(whole: Param, own: Param, tp_rank: int, tp_size: int) -> Iterator[range]:
    """The rows of a rank, from each part of a fused parameter; rows that several ranks need are in all of theirs."""
    is_fused = len(own.parts) > 1 and own.num_stacked == 1
    sizes = [part.rows for part in whole.parts] if is_fused else [whole.shape[0]]
    own_sizes = [part.rows for part in own.parts] if is_fused else [own.shape[0]]
    first = 0
    for size, own_size in zip(sizes, own_sizes, strict=True):
        num_copies = own_size * tp_size // size
        start = first + tp_rank // num_copies * own_size
        yield range(start, start + own_size)
        first += size


def _rows(tensors: Sequence[HostTensor], ranges: Iterator[range]) -> Iterator[HostTensor]:
    """Rows of tensors that lie one under the other."""
    for wanted in ranges:
        first = 0
        for tensor in tensors:
            start, stop = max(wanted.start - first, 0), min(wanted.stop - first, tensor.shape[0])
            if start < stop:
                yield tensor.rows(slice(start, stop))
            first += tensor.shape[0]


def _columns(tensor: HostTensor, part: slice) -> HostTensor:
    if tensor.is_blocked:  # whose blocks may reach over the cut
        values = to_float32(tensor)
        tensor = dataclasses.replace(tensor, dtype="float32", data=values)
    shape = (tensor.shape[0], part.stop - part.start)
    data = np.ascontiguousarray(tensor.data[:, part])
    if tensor.scales is None or tensor.scales.shape[1] == 1:
        return dataclasses.replace(tensor, shape=shape, data=data)
    group = tensor.group
    if part.start % group or part.stop % group:
        raise Unsupported(
            f"tensor {tensor.name} is quantized by groups of {group} columns, which {shape[1]} columns a rank cut",
            remedies=["--quantize int8-channel", "without --quantize"],
        )
    groups = slice(part.start // group, part.stop // group)
    offsets = None if tensor.offsets is None else tensor.offsets[:, groups]
    return dataclasses.replace(tensor, shape=shape, data=data, scales=tensor.scales[:, groups], offsets=offsets)
