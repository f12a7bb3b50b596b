"""Tile sizes and warps by GPU, as data. Chosen once, when a device is opened."""

from dataclasses import dataclass, replace
from typing import Literal

INTERPRETED_VALUES = 1 << 16
"""Of a tile under an interpreter: less time goes into numbers than into looking at programs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """How kernels are cut for one kind of GPU.

    query_rows: rows of a prefill tile, each one head of one token. keys: keys of one step of the softmax.
    split_keys: keys that one program of a decode step reads; longer sequences are split, by position alone.
    wide_heads, wide_keys, wide_warps, wide_stages: heads of a tile, keys of a step, warps and loads in flight where
    heads have more than 256 values (latents).
    dear_piece: values of a head that queries and keys are multiplied by at a time, where heads have more than 256 of
    them, or more than 128 in a cache of integers, and registers do not hold the queries; 0: they do.
    row_values: values of one program of a kernel that walks over rows. interpreted_values: how many an interpreter
    takes, which has a price for a program rather than for a value, and nothing to compile: as many rows as there are;
    0: the GPU's. expert_rows, expert_cols: the tile of a
    mixture's product, by steps of expert_depth 16-bit values; few rows an expert take tiles of 16.
    linear_rows, linear_cols, linear_depth: the tile of a product with a quantized weight; 16 rows or fewer take
    tiles of few_cols by few_depth, so that a decode has programs for the whole GPU. rounded_depth: linear_depth where
    activations have 8 bits too. float8: the kind that the matrix units multiply, if any. attention_warps,
    decode_warps, expert_warps (few_warps: of tiles of 16 rows), linear_warps: warps of `lanes` threads. stages: loads
    in flight.
    max_shared_bytes: shared memory that a program may use.
    """

    name: str
    query_rows: int = 64
    keys: int = 64
    split_keys: int = 512
    wide_heads: int = 16
    wide_keys: int = 32
    wide_warps: int = 8
    wide_stages: int = 1
    dear_piece: int = 0
    row_values: int = 2048
    interpreted_values: int = 0
    attention_warps: int = 4
    decode_warps: int = 4
    expert_rows: int = 64
    expert_cols: int = 64
    expert_depth: int = 64
    expert_warps: int = 4
    linear_rows: int = 64
    linear_cols: int = 64
    linear_depth: int = 64
    linear_warps: int = 4
    few_cols: int = 32
    few_warps: int = 4
    few_depth: int = 128
    rounded_depth: int = 64
    float8: Literal["", "e4m3fn", "e4m3fnuz"] = ""
    stages: int = 2
    lanes: int = 32
    max_shared_bytes: int = 99 * 1024

    def prefill_rows(self, head_dim: int, *, is_wide: bool = False, is_int8: bool = False) -> int:
        """Rows of a prefill tile: fewer for wide heads and values of 32 bits (is_wide), whose sums would spill."""
        most = 64 if is_int8 and self.dear_piece else 128
        return max(16, self.query_rows // (2 if head_dim > most else 1) // (2 if is_wide else 1))

    def order(self, head_dim: int, *, is_int8: bool) -> dict[str, int | bool]:
        """How attention multiplies queries with keys: the constants PIECE and EARLY of its kernel."""
        piece = self.dear_piece if head_dim > (128 if is_int8 else 256) else 0
        return {"PIECE": piece, "EARLY": self.dear_piece > 0 and not piece}


_SM_80 = Tuning(
    name="sm_80",
    query_rows=128,
    keys=64,
    attention_warps=8,
    linear_rows=128,
    linear_warps=8,
    stages=2,
    max_shared_bytes=163 * 1024,
)
_SM_90 = replace(
    _SM_80,
    name="sm_90",
    linear_cols=128,
    rounded_depth=128,
    float8="e4m3fn",
    stages=3,
    max_shared_bytes=227 * 1024,
)
_GFX942 = Tuning(
    name="gfx942",
    query_rows=128,
    keys=64,
    wide_warps=4,
    float8="e4m3fnuz",
    stages=1,
    lanes=64,
    max_shared_bytes=64 * 1024,
)

TUNINGS: dict[str, Tuning] = {
    "sm_80": _SM_80,
    "sm_89": replace(_SM_80, name="sm_89", max_shared_bytes=99 * 1024),
    "sm_90": _SM_90,
    "sm_100": replace(_SM_90, name="sm_100", expert_warps=8),
    "gfx90a": Tuning(
        name="gfx90a", query_rows=64, keys=32, wide_warps=4, stages=1, lanes=64, max_shared_bytes=64 * 1024
    ),
    "gfx942": _GFX942,
    "gfx950": replace(_GFX942, name="gfx950", float8="e4m3fn", max_shared_bytes=160 * 1024),
    "gfx1100": Tuning(
        name="gfx1100",
        query_rows=64,
        keys=16,
        wide_keys=16,
        wide_warps=16,
        dear_piece=32,
        attention_warps=8,
        decode_warps=8,
        expert_rows=32,
        linear_rows=32,
        linear_depth=32,
        few_depth=32,
        stages=1,
        max_shared_bytes=64 * 1024,
    ),
    "xe": Tuning(name="xe", query_rows=64, keys=32, attention_warps=8, stages=2, max_shared_bytes=128 * 1024),
}
"""By architecture. An architecture that is not listed takes the one that `tuning_for` says is nearest; of NVIDIA's
those with 99 KiB of shared memory a block (sm_86, sm_89, sm_12x) are the rule, data centres' the exception."""

_NEAREST = (
    ("sm_10", "sm_100"),
    ("sm_9", "sm_90"),
    ("sm_87", "sm_80"),
    ("sm_", "sm_89"),
    ("gfx94", "gfx942"),
    ("gfx95", "gfx950"),
    ("gfx9", "gfx90a"),
    ("gfx", "gfx1100"),
)


def tuning_for(arch: str) -> Tuning:
    """The tuning of an architecture, such as sm_90, gfx942 or xe."""
    plain = arch.split(":")[0]
    if plain in TUNINGS:
        return TUNINGS[plain]
    return TUNINGS[next((name for prefix, name in _NEAREST if plain.startswith(prefix)), "xe")]
