"""Experts out of the tensors in which llama.cpp stacks those of a layer: one tensor an expert, as views."""

import re
from collections.abc import Sequence
from dataclasses import replace

from .source import HostTensor, TensorInfo, WeightSource

_STACKED = re.compile(r"(.*_exps)(\.(?:weight|bias))")
_ROW = re.compile(r".*\.ffn_gate_inp_shexp\.weight")
"""A matrix of one row that is stored as a vector."""


class UnstackedSource:
    """A WeightSource over a GGUF file: blk.0.ffn_up_exps.weight becomes blk.0.ffn_up_exps.0.weight, and so on."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._places: dict[str, tuple[str, int]] = {}
        for name in source.names():
            if found := _STACKED.fullmatch(name):
                count = source.info(name).shape[0]
                self._places |= {f"{found[1]}.{expert}{found[2]}": (name, expert) for expert in range(count)}
            else:
                self._places[name] = (name, -1)

    def names(self) -> Sequence[str]:
        """Names of all tensors, the experts of a layer one by one."""
        return tuple(self._places)

    def info(self, name: str) -> TensorInfo:
        """Index entry of one tensor. KeyError if there is none."""
        stored, expert = self._places[name]
        info = self._source.info(stored)
        if expert < 0:
            return replace(info, shape=(1, *info.shape)) if _ROW.fullmatch(name) else info
        return replace(info, name=name, shape=info.shape[1:], num_bytes=info.num_bytes // info.shape[0])

    def read(self, name: str) -> HostTensor:
        """One tensor. Raises WeightError that names file and tensor."""
        stored, expert = self._places[name]
        tensor = self._source.read(stored)
        if expert < 0:
            shape = (1, *tensor.shape)
            return replace(tensor, shape=shape, data=tensor.data.reshape(shape)) if _ROW.fullmatch(name) else tensor
        parts = tensor.data.reshape(tensor.shape[0], -1, *tensor.data.shape[1 if tensor.is_blocked else 2 :])
        data = parts[expert].reshape(tensor.shape[1:]) if not tensor.is_blocked else parts[expert]
        return replace(tensor, name=name, shape=tensor.shape[1:], data=data)

    def close(self) -> None:
        """Close the file."""
        self._source.close()
