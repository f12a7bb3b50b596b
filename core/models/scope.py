"""A part of a model inside a forward function: ops, and its parameters by the names that they have within it.

A block says of each parameter, where it reads it, what it is; so a pass over `Declared` instead of arrays finds all
parameters of a model.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from ..ops.table import OpTable
from ..stages import Array
from .params import Param, Part, Shard
from .spec import AdaptersSpec, DenseSpec, NormSpec

Params = Mapping[str, Array]
"""Parameters by canonical name, as `declare_params` lists them."""
Rows = Mapping[str, int]
"""Rows of the parts that a parameter may be stored in, by name."""
NO_ROWS: Rows = MappingProxyType({})
Compute = Callable[[], npt.NDArray[np.float32]]

NO_EPS = 1e-20
"""Of a norm without an epsilon: rows of zeros stay zeros."""


@dataclass(frozen=True, slots=True)
class Declared(Mapping[str, Any]):
    """Parameters in the order in which they were first asked for, in the place of their arrays."""

    params: dict[str, Param] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.params[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.params)

    def __len__(self) -> int:
        return len(self.params)

    def add(self, prefix: str, name: str, shape: tuple[int, ...], parts: Rows, **fields: Any) -> None:
        """Note a parameter. parts: names without the prefix."""
        sensitive = "v_proj.weight" if fields.get("is_sensitive") else ""
        pieces = tuple(
            Part(name=prefix + part, rows=rows, is_sensitive=part == sensitive) for part, rows in parts.items()
        )
        param = Param(name=prefix + name, shape=shape, parts=pieces, **fields)
        self.params.setdefault(param.name, param)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """The adapter of each token of a step, as experts of `grouped_experts`: weights of 1, and numbers, of which the
    one behind the last is none. ranks: as AdaptersSpec has them, by name."""

    spec: AdaptersSpec
    ranks: Mapping[str, int]
    weights: Array
    numbers: Array


@dataclass(frozen=True, slots=True)
class Scope:
    """hidden_size: of the residual stream. prefix: what the names of this part's parameters begin with, "" or
    "layers.0.attn.". adapters: None in a step without any."""

    ops: OpTable
    params: Params
    hidden_size: int
    prefix: str = ""
    adapters: Adapters | None = None

    def inside(self, name: str) -> "Scope":
        """The part of this one that has the name."""
        return Scope(self.ops, self.params, self.hidden_size, f"{self.prefix}{name}.", self.adapters)

    @property
    def root(self) -> "Scope":
        """The whole model."""
        return Scope(self.ops, self.params, self.hidden_size, adapters=self.adapters)

    def param(
        self,
        name: str,
        *shape: int,
        parts: Rows | Callable[[], Rows] | None = None,
        kind: str = "vector",
        **fields: Any,
    ) -> Array:
        """One parameter; what it is else, see Param."""
        if type(self.params) is Declared:
            rows = parts() if callable(parts) else parts or {}
            self.params.add(self.prefix, name, shape, rows, kind=kind, **fields)
        return self.params[self.prefix + name]

    def constant(self, name: str, *shape: int, compute: Compute, **fields: Any) -> Array:
        """One that no checkpoint has."""
        return self.param(name, *shape, kind="constant", compute=compute, **fields)

    def table(self, name: str, rows: int, size: int, **fields: Any) -> Array:
        """Rows that are looked up."""
        return self.param(f"{name}.weight", rows, size, kind="embedding", **fields)

    def tokens(self, name: str, rows: int, size: int, **fields: Any) -> Array:
        """A table of tokens: an embedding, or a head over them."""
        kind = "embedding" if name.startswith("embed") else "linear"
        return self.param(f"{name}.weight", rows, size, kind=kind, shard="vocab", quantizable=True, **fields)

    def linear(
        self,
        name: str,
        x: Array,
        out_features: int,
        in_features: int,
        shard: Shard = "replicated",
        bias: bool = False,
        *,
        quantizable: bool = True,
        num_joined: int = 0,
    ) -> Array:
        """[..., in_features] -> [..., out_features], what adapters add among it. num_joined: see Param."""
        if type(self.params) is Declared:
            own: dict[str, Any] = {"shard": shard, "quantizable": quantizable, "num_joined": num_joined}
            self.param(f"{name}.weight", out_features, in_features, kind="linear", **own)
            if bias:
                # A row-cut product is summed over ranks, so that its bias must stay whole and be added once.
                self.param(f"{name}.bias", out_features, shard="replicated" if shard == "row" else shard)
        weight, own_bias = self._weights(name, bias)
        return self._adapted(name, x, self.ops.linear(x, weight, own_bias), out_features, in_features)

    def fused(
        self,
        name: str,
        x: Array,
        rows: Rows,
        in_features: int,
        bias: bool = False,
        *,
        shard: Shard = "column",
        num_groups: int = 1,
        larger: Rows = NO_ROWS,
        quantizable: bool = True,
    ) -> Array:
        """Linear layers over one input as one: rows of each part, by name. larger: of larger parts. As `linear`."""
        if type(self.params) is Declared:
            shape, at = (sum(rows.values()), in_features), self.prefix
            larger_parts = tuple(Part(name=f"{at}{part}.weight", rows=count) for part, count in larger.items())
            both: dict[str, Any] = {"shard": shard, "num_groups": num_groups}
            # Of a layer's weights, errors in v cost most (4 times what those in q, k and o together cost).
            own = {"quantizable": quantizable, "is_sensitive": name == "qkv_proj", "larger_parts": larger_parts}
            self.param(f"{name}.weight", *shape, kind="linear", parts=_leaves(rows, "weight"), **own, **both)
            if bias:
                self.param(f"{name}.bias", shape[0], parts=_leaves(rows, "bias"), **both)
        weight, own_bias = self._weights(name, bias)
        y = self.ops.linear(x, weight, own_bias)
        return self._adapted(name, x, y, sum(rows.values()), in_features, num_parts=len(rows))

    def normalize(self, norm: NormSpec, name: str, x: Array, size: int = 0) -> Array:
        """x: [..., size] over its last axis; x's shape. size 0: hidden_size."""
        weight, bias = self.norm_weights(norm, name, size)
        if norm.kind == "rms":
            return self.ops.rms_norm(x, weight, eps=norm.eps)
        return self.ops.layer_norm(x, weight, bias, eps=norm.eps)

    def norm_weights(self, norm: NormSpec, name: str, size: int = 0) -> tuple[Array | None, Array | None]:
        """Weight and bias, as far as the norm has them."""
        size = size or self.hidden_size
        if not norm.weight:
            return None, self.param(f"{name}.bias", size) if norm.bias else None
        if type(self.params) is Declared:
            self.param(f"{name}.weight", size, plus_one=norm.plus_one)
            if norm.bias:
                self.param(f"{name}.bias", size)
        return self._weights(name, norm.bias)

    def dense(self, spec: DenseSpec, x: Array, num_joined: int = 0) -> Array:
        """A linear layer with its activation and norm, as its spec says: [n, in_features] -> [n, out_features].

        Those of heads and projectors are small, and stay as they are."""
        ops, name, out, columns = self.ops, spec.name, spec.out_features, spec.in_features
        if spec.gated:
            rows, inside = {"gate_proj": out, "up_proj": out}, self.inside(name)
            x = inside.fused("gate_up_proj", x, rows, columns, spec.bias, shard="replicated", quantizable=False)
        else:
            x = self.linear(name, x, out, columns, bias=spec.bias, quantizable=False, num_joined=num_joined)
        if spec.norm is not None and spec.norm_first:
            x = self.normalize(spec.norm, f"{name}_norm", x, out)
        if spec.activation is not None:
            activation = spec.activation
            x = ops.act_mul(x, activation=activation) if spec.gated else ops.act(x, activation=activation)
        if spec.norm is not None and not spec.norm_first:
            x = self.normalize(spec.norm, f"{name}_norm", x, out)
        return x

    def scaled(self, x: Array, factor: float) -> Array:
        """x times a number of the spec, which is 1 in most models."""
        return x if factor == 1.0 else self.ops.scale(x, factor)

    def _adapted(
        self, name: str, x: Array, y: Array, out_features: int, in_features: int, *, num_parts: int = 1
    ) -> Array:
        """y, what a linear layer makes of x, with what the adapters of tokens add."""
        adapters = self.adapters
        if adapters is None:
            return y
        num = adapters.spec.num_adapters
        rank = adapters.ranks.get(self.prefix + name, adapters.spec.rank * num_parts)
        if not rank:
            return y
        a = self.param(f"{name}.lora_a", num * rank, in_features, kind="stacked", num_stacked=num)
        b = self.param(f"{name}.lora_b", num * out_features, rank, kind="stacked", num_stacked=num)
        options: dict[str, Any] = {"activation": "linear", "gated": False, "partial": True}
        return self.ops.add(y, self.ops.grouped_experts(x, adapters.weights, adapters.numbers, a, b, **options))

    def _weights(self, name: str, bias: bool) -> tuple[Array, Array | None]:
        at = self.prefix + name
        return self.params[f"{at}.weight"], self.params[f"{at}.bias"] if bias else None


@dataclass(slots=True)
class Stream:
    """The residual stream, [num_tokens, hidden_size], and what a block gave that is yet to be added to it: the sum
    waits for the next norm, because one op does both. ahead: what a layer's experts gave that the next layer adds."""

    norm: NormSpec
    residual: Array
    block: Array = None
    ahead: Array = None

    def read(self, at: Scope, name: str, has_norm: bool = True) -> Array:
        """What the next block reads: the sum, normalised if has_norm. Nothing waits then."""
        if self.block is not None and has_norm and self.norm.kind == "rms":
            weight, _ = at.norm_weights(self.norm, name)
            x, self.residual = at.ops.add_rms_norm(self.block, self.residual, weight, eps=self.norm.eps)
            self.block = None
            return x
        self.settle(at)
        return at.normalize(self.norm, name, self.residual) if has_norm else self.residual

    def settle(self, at: Scope) -> None:
        """Add what waits."""
        if self.block is not None:
            self.residual, self.block = at.ops.add(self.block, self.residual), None

    def renormalize(self, at: Scope, name: str) -> None:
        """Add what waits, and normalise the stream itself."""
        self.settle(at)
        self.residual = at.normalize(self.norm, name, self.residual)


def _leaves(rows: Rows, leaf: str) -> Rows:
    return {f"{name}.{leaf}": count for name, count in rows.items()}
