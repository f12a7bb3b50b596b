"""Parameters of the smallest parts of a model: linear layers, fused or not, tables of tokens, norms, ropes."""

from collections.abc import Iterator
from typing import Literal

import numpy as np
import numpy.typing as npt

from .params import Param, Part, Shard
from .rope import num_rope_variants, rope_tables
from .spec import NormSpec, RopeSpec


def fused(
    name: str, prefix: str, rows: dict[str, int], in_features: int, bias: bool, num_groups: int
) -> Iterator[Param]:
    """Linear layers over one input as one: rows of each part, by name. num_groups: see Param."""

    def parts(leaf: str) -> tuple[Part, ...]:
        return tuple(
            Part(name=f"{prefix}.{part}.{leaf}", rows=count, is_sensitive=splits and part == "v_proj")
            for part, count in rows.items()
        )

    # Of a layer's weights, errors in v cost most (4 times what those in q, k and o together cost).
    is_sensitive = name.endswith("qkv_proj")
    splits = is_sensitive and not name.startswith("encoder.")
    out = sum(rows.values())
    yield Param(
        name=f"{name}.weight",
        shape=(out, in_features),
        kind="linear",
        shard="column",
        parts=parts("weight"),
        num_groups=num_groups,
        quantizable=True,
        is_sensitive=is_sensitive,
    )
    if bias:
        yield Param(
            name=f"{name}.bias",
            shape=(out,),
            kind="vector",
            shard="column",
            parts=parts("bias"),
            num_groups=num_groups,
        )


def token_table(name: str, vocab_size: int, size: int) -> Param:
    """An embedding of tokens, or a head over them."""
    kind: Literal["embedding", "linear"] = "embedding" if name.startswith("embed") else "linear"
    return Param(name=name, shape=(vocab_size, size), kind=kind, shard="vocab", quantizable=True)


def linear(
    name: str, out_features: int, in_features: int, shard: Shard, bias: bool, *, quantizable: bool = True
) -> Iterator[Param]:
    """Weight, and bias if there is one."""
    shape = (out_features, in_features)
    yield Param(name=f"{name}.weight", shape=shape, kind="linear", shard=shard, quantizable=quantizable)
    if bias:
        # A row-cut product is summed over ranks, so that its bias must stay whole and be added once.
        bias_shard: Shard = "replicated" if shard == "row" else shard
        yield Param(name=f"{name}.bias", shape=(out_features,), kind="vector", shard=bias_shard)


def norm(norm: NormSpec, name: str, size: int) -> Iterator[Param]:
    """Weight and bias, as far as the norm has them."""
    if norm.weight:
        yield Param(name=f"{name}.weight", shape=(size,), kind="vector", plus_one=norm.plus_one)
    if norm.bias:
        yield Param(name=f"{name}.bias", shape=(size,), kind="vector")


def rope(rope: RopeSpec, prefix: str) -> Iterator[Param]:
    """Tables of frequencies, one row for each variant."""
    variants = num_rope_variants(rope)
    yield Param(
        name=f"{prefix}.inv_freq",
        shape=(variants, rope.rotary_dim // 2),
        kind="constant",
        compute=lambda: rope_tables(rope)[0],
    )
    yield Param(
        name=f"{prefix}.attention_factor",
        shape=(variants,),
        kind="constant",
        compute=lambda: rope_tables(rope)[1],
    )


def filled(shape: tuple[int, ...], value: float) -> npt.NDArray[np.float32]:
    """An array of one value."""
    return np.full(shape, value, np.float32)
