"""A part of a model inside a forward function: ops, and its parameters by the names that they have within it."""

from collections.abc import Mapping
from dataclasses import dataclass

from ..ops.table import OpTable
from ..stages import Array
from .spec import DenseSpec, NormSpec

Params = Mapping[str, Array]
"""Parameters by canonical name, as `declare_params` lists them."""

NO_EPS = 1e-20
"""Of a norm without an epsilon: rows of zeros stay zeros."""


@dataclass(frozen=True, slots=True)
class Scope:
    """prefix: what the names of this part's parameters begin with, "" or "layers.0.attn."."""

    ops: OpTable
    params: Params
    prefix: str = ""

    def inside(self, name: str) -> "Scope":
        """The part of this one that has the name."""
        return Scope(self.ops, self.params, f"{self.prefix}{name}.")

    def param(self, name: str) -> Array:
        """One parameter."""
        return self.params[f"{self.prefix}{name}"]

    def linear(self, name: str, x: Array, bias: bool = False) -> Array:
        """[..., in_features] -> [..., out_features]."""
        return self.ops.linear(x, self.param(f"{name}.weight"), self.param(f"{name}.bias") if bias else None)

    def normalize(self, norm: NormSpec, name: str, x: Array) -> Array:
        """x: [..., n] over its last axis; x's shape."""
        weight = self.param(f"{name}.weight") if norm.weight else None
        if norm.kind == "rms":
            return self.ops.rms_norm(x, weight, eps=norm.eps)
        return self.ops.layer_norm(x, weight, self.param(f"{name}.bias") if norm.bias else None, eps=norm.eps)

    def dense(self, spec: DenseSpec, x: Array) -> Array:
        """A linear layer with its activation and norm, as its spec says: [n, in_features] -> [n, out_features]."""
        x = self.linear(f"{spec.name}.gate_up_proj" if spec.gated else spec.name, x, spec.bias)
        if spec.norm is not None and spec.norm_first:
            x = self.normalize(spec.norm, f"{spec.name}_norm", x)
        if spec.activation is not None:
            ops, activation = self.ops, spec.activation
            x = ops.act_mul(x, activation=activation) if spec.gated else ops.act(x, activation=activation)
        if spec.norm is not None and not spec.norm_first:
            x = self.normalize(spec.norm, f"{spec.name}_norm", x)
        return x

    def scaled(self, x: Array, factor: float) -> Array:
        """x times a number of the spec, which is 1 in most models."""
        return x if factor == 1.0 else self.ops.scale(x, factor)


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
            weight = at.param(f"{name}.weight") if self.norm.weight else None
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
