"""llama.cpp's tensors as ours: experts one by one out of the tensors that stack those of a layer, as views, and the
latent's projection of keys and values out of its two halves."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .dequantize import to_float32
from .source import HostTensor, TensorInfo, WeightSource

_STACKED = re.compile(r"(.*\.ffn_)(gate_up|gate|up|down)(_exps)(\.(?:weight|bias|scale))")
_STREAMS = re.compile(r"(altup_(?:unembd_)?proj)()()(\.weight)")
_ROW = ".ffn_gate_inp_shexp.weight"
_KEYS, _VALUES, _BOTH = (f".attn_{name}.weight" for name in ("k_b", "v_b", "kv_b"))


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor is stored. expert: which one it is, -1 for all. half: of a gate and up in one, 0 or 1."""

    name: str
    expert: int = -1
    half: int = -1


class UnstackedSource:
    """A WeightSource over a GGUF file: blk.0.ffn_up_exps.weight becomes blk.0.ffn_up_exps.0.weight, and so on;
    attn_k_b, transposed, and attn_v_b of each head become attn_kv_b."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._places: dict[str, _Place] = {}
        for name in source.names():
            if found := _STACKED.fullmatch(name) or _STREAMS.fullmatch(name):
                count, pieces = source.info(name).shape[0], found[2].split("_")
                self._places |= {
                    f"{found[1]}{piece}{found[3]}.{expert}{found[4]}": _Place(
                        name, expert, half if len(pieces) > 1 else -1
                    )
                    for expert in range(count)
                    for half, piece in enumerate(pieces)
                }
            elif name.endswith(_KEYS):
                self._places[name.removesuffix(_KEYS) + _BOTH] = _Place(name)
            elif not name.endswith(_VALUES):
                self._places[name] = _Place(name)

    def names(self) -> Sequence[str]:
        """Names of all tensors, the experts of a layer one by one."""
        return tuple(self._places)

    def info(self, name: str) -> TensorInfo:
        """Index entry of one tensor. KeyError if there is none."""
        place = self._places[name]
        info = self._source.info(place.name)
        if place.name.endswith(_KEYS):
            values = self._source.info(place.name.removesuffix(_KEYS) + _VALUES)
            rows = info.shape[0] * (info.shape[2] + values.shape[1])
            num_bytes = info.num_bytes + values.num_bytes
            return replace(info, name=name, dtype="float32", shape=(rows, info.shape[1]), num_bytes=num_bytes)
        if place.expert < 0:
            return replace(info, shape=(1, *info.shape)) if _is_row(info) else info
        parts = 2 if place.half >= 0 else 1
        shape = (info.shape[1] // parts, *info.shape[2:]) if len(info.shape) > 1 else (1,)
        return replace(info, name=name, shape=shape, num_bytes=info.num_bytes // info.shape[0] // parts)

    def read(self, name: str) -> HostTensor:
        """One tensor. Raises WeightError that names file and tensor."""
        place = self._places[name]
        tensor = self._source.read(place.name)
        if place.name.endswith(_KEYS):
            return self._both(name, tensor)
        if place.expert < 0:
            shape = (1, *tensor.shape)
            return replace(tensor, shape=shape, data=tensor.data.reshape(shape)) if _is_row(tensor) else tensor
        parts = tensor.data.reshape(tensor.shape[0], -1, *tensor.data.shape[1 if tensor.is_blocked else 2 :])
        shape = tensor.shape[1:] or (1,)
        data = parts[place.expert] if tensor.is_blocked else parts[place.expert].reshape(shape)
        tensor = replace(tensor, name=name, shape=shape, data=data)
        num_rows = tensor.shape[0] // 2
        return tensor if place.half < 0 else tensor.rows(slice(place.half * num_rows, (place.half + 1) * num_rows))

    def _both(self, name: str, keys: HostTensor) -> HostTensor:
        values = self._source.read(keys.name.removesuffix(_KEYS) + _VALUES)
        halves = (np.swapaxes(to_float32(keys), 1, 2), to_float32(values))
        data = np.concatenate(halves, axis=1).reshape(-1, keys.shape[1])
        return replace(keys, name=name, dtype="float32", shape=data.shape, data=data)

    def close(self) -> None:
        """Close the file."""
        self._source.close()


def _is_row(tensor: TensorInfo | HostTensor) -> bool:
    """True for a matrix of one row that is stored as a vector."""
    return tensor.name.endswith(_ROW) and len(tensor.shape) == 1
