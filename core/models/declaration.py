"""A part of a model that declares its parameters: what `Scope` is to the forward functions that read them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from .params import Param, Part, Shard
from .rope import num_rope_variants, rope_tables
from .spec import DenseSpec, NormSpec, RopeSpec

Compute = Callable[[], npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Declaration:
    """prefix: what the names of this part's parameters begin with. params: all that were declared, of any part."""

    prefix: str = ""
    params: list[Param] = field(default_factory=list)

    def inside(self, name: str) -> "Declaration":
        """The part of this one that has the name."""
        return Declaration(f"{self.prefix}{name}.", self.params)

    def add(self, name: str, *shape: int, **fields: Any) -> None:
        """A parameter, a vector unless `fields` say otherwise."""
        self.params.append(Param(name=self.prefix + name, shape=shape, **{"kind": "vector", **fields}))

    def parts(self, rows: Mapping[str, int]) -> tuple[Part, ...]:
        """What a parameter may be stored in: rows by name."""
        return tuple(Part(name=self.prefix + name, rows=count) for name, count in rows.items())

    def constant(self, name: str, *shape: int, compute: Compute, **fields: Any) -> None:
        """What no checkpoint has."""
        self.add(name, *shape, kind="constant", compute=compute, **fields)

    def linear(
        self,
        name: str,
        out_features: int,
        in_features: int,
        shard: Shard = "replicated",
        bias: bool = False,
        *,
        quantizable: bool = True,
    ) -> None:
        """Weight, and bias if there is one."""
        self.add(f"{name}.weight", out_features, in_features, kind="linear", shard=shard, quantizable=quantizable)
        if bias:
            # A row-cut product is summed over ranks, so that its bias must stay whole and be added once.
            self.add(f"{name}.bias", out_features, shard="replicated" if shard == "row" else shard)

    def fused(
        self,
        name: str,
        rows: Mapping[str, int],
        in_features: int,
        bias: bool = False,
        *,
        num_groups: int = 1,
        shard: Shard = "column",
        quantizable: bool = True,
        larger_parts: tuple[Part, ...] = (),
    ) -> None:
        """Linear layers over one input as one: rows of each part, by name. num_groups, larger_parts: see Param."""
        # Of a layer's weights, errors in v cost most (4 times what those in q, k and o together cost).
        is_sensitive, out = name == "qkv_proj", sum(rows.values())

        def parts(leaf: str) -> tuple[Part, ...]:
            at, sensitive = self.prefix, ("v_proj",) if is_sensitive else ()
            return tuple(
                Part(name=f"{at}{part}.{leaf}", rows=n, is_sensitive=part in sensitive) for part, n in rows.items()
            )

        both: dict[str, Any] = {"shard": shard, "num_groups": num_groups}
        weight = {"kind": "linear", "larger_parts": larger_parts, "quantizable": quantizable}
        self.add(
            f"{name}.weight", out, in_features, parts=parts("weight"), is_sensitive=is_sensitive, **weight, **both
        )
        if bias:
            self.add(f"{name}.bias", out, parts=parts("bias"), **both)

    def norm(self, norm: NormSpec, name: str, size: int) -> None:
        """Weight and bias, as far as the norm has them."""
        if norm.weight:
            self.add(f"{name}.weight", size, plus_one=norm.plus_one)
        if norm.bias:
            self.add(f"{name}.bias", size)

    def rope(self, rope: RopeSpec) -> None:
        """Tables of frequencies, one row for each variant."""
        rows = num_rope_variants(rope)
        self.constant("inv_freq", rows, rope.rotary_dim // 2, compute=lambda: rope_tables(rope)[0])
        self.constant("attention_factor", rows, compute=lambda: rope_tables(rope)[1])

    def dense(self, dense: DenseSpec) -> None:
        """A linear layer of a head or a projector: these are small, and stay as they are."""
        name, rows, columns = dense.name, dense.out_features, dense.in_features
        if dense.gated:
            halves = {"gate_proj": rows, "up_proj": rows}
            inside = self.inside(name)
            inside.fused("gate_up_proj", halves, columns, dense.bias, shard="replicated", quantizable=False)
        else:
            self.linear(name, rows, columns, bias=dense.bias, quantizable=False)
        if dense.norm is not None:
            self.norm(dense.norm, f"{name}_norm", rows)


def filled(shape: tuple[int, ...], value: float) -> npt.NDArray[np.float32]:
    """An array of one value."""
    return np.full(shape, value, np.float32)
