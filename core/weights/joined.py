"""Several checkpoints as one: a model, and modules that have files of their own."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from .source import HostTensor, TensorInfo, WeightSource


class JoinedSource:
    """A WeightSource over others, each with what is put before its names. Owns them: `close` closes all."""

    def __init__(self, sources: Mapping[str, WeightSource]) -> None:
        self._sources = dict(sources)
        self._places = {
            prefix + name: (source, name) for prefix, source in self._sources.items() for name in source.names()
        }

    def names(self) -> Sequence[str]:
        """Names of all tensors with their prefixes."""
        return tuple(self._places)

    def info(self, name: str) -> TensorInfo:
        """Index entry of one tensor. KeyError if there is none."""
        source, own = self._places[name]
        return replace(source.info(own), name=name)

    def read(self, name: str) -> HostTensor:
        """One tensor. Raises WeightError that names file and tensor."""
        source, own = self._places[name]
        return replace(source.read(own), name=name)

    def close(self) -> None:
        """Close all of them."""
        for source in self._sources.values():
            source.close()
