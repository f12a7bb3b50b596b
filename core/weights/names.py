"""How a checkpoint spells the canonical parameters, as data. A family's table is a few lines of this."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Where and how a checkpoint stores one canonical tensor. `{i}` in a name is the layer index.

    transpose: stored [in_features, out_features] (GPT-2's Conv1D).
    rope_pairs: for a query or key projection whose output rows were reordered for interleaved rope (GGUF of
    Llama): the number of heads; rows go back to halves, [num_heads, head_dim / 2, 2] -> [num_heads, 2,
    head_dim / 2]. 0 leaves the rows.
    """

    name: str
    transpose: bool = False
    rope_pairs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NameTable:
    """Names of one checkpoint format for one family.

    entries: canonical template -> stored name or Stored; a fused parameter may be listed whole, by its parts,
    or both, and the checkpoint decides. base_prefix: checkpoints of the bare backbone lack it. ignore: regular
    expressions of stored names that carry nothing we need (buffers, a copy of a tied head).
    adds_one: the file holds plus_one norms with the one already added (GGUF).
    """

    entries: Mapping[str, str | Stored]
    base_prefix: str = "model."
    ignore: tuple[str, ...] = field(default=(r"rotary_emb\.inv_freq$",))
    adds_one: bool = False
