"""How a checkpoint spells the canonical parameters, as data. A family's table is a few lines of this."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

INDEX = re.compile(r"(?<=\.)\d+(?=\.)")
"""An index within a name: of a layer, an expert or a head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Where and how a checkpoint stores one canonical tensor. `{i}` in a name is the layer, `{j}` the expert or head.

    also: other spellings; a checkpoint has one of them.
    copies: names under which a checkpoint may hold the same tensor again, or only there (tied weights).
    zeros: no checkpoint has it, and it is zeros (a bias that a fused linear layer has for its other parts).
    kernel: stored as a convolution of so many taps, [out, in, kernel] or with other axes behind the first; read as
    [out, kernel * in].
    reshape: stored with other axes, such as those of a convolution over an image, and as many numbers.
    transpose: stored [in_features, out_features] (GPT-2's Conv1D).
    stacked: stored with an axis in front for the param's num_stacked matrices or vectors; such matrices may be
    transposed or not, as their shape tells.
    scaled_by: the name of a vector whose numbers multiply the stacked matrices, or rows. is_scalar: one number for
    all values. minus_exp: -exp(x) is stored for each x. gate: the number that is_scalar or scaled_by means is read as
    its tanh, or as 1 less that. joined: columns of several inputs, of which those of all but the first stand one of
    each after another; the param's num_joined says how many.
    share: the tensor holds such parts for all j, one under the other; this is the j-th one.
    first_beyond: rows that the tensor lacks at its end are its first one; further ones are never read.
    skip_rows: rows at the top that are never read (OPT's first two positions); extra_rows: such ones at the bottom.
    interleaved: a fused parameter whose rows are stored group by group, each group a share of every part (q, k
    and v of one KV head after another); groups: how many, 0 for the param's num_groups; order: the parts of a
    group as stored, by their place in the param's parts; empty: in that order.
    tiled: a query, key and value of heads, of which values are more; rows of the first two are stored once, and each
    stands for every so many-th head of values: they are repeated, all of them after another.
    cut_anywhere: parts of a fused parameter may have any number of rows, as long as they make up the whole.
    rope_pairs: for a query or key projection whose output rows were reordered for interleaved rope (GGUF of
    Llama): the number of heads; rows go back to halves, [num_heads, head_dim / 2, 2] -> [num_heads, 2,
    head_dim / 2]. 0 leaves the rows.
    """

    name: str
    also: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()
    zeros: bool = False
    kernel: int = 0
    reshape: bool = False
    transpose: bool = False
    stacked: bool = False
    scaled_by: str = ""
    is_scalar: bool = False
    minus_exp: bool = False
    gate: Literal["", "tanh", "rest"] = ""
    joined: bool = False
    share: bool = False
    first_beyond: bool = False
    skip_rows: int = 0
    extra_rows: int = 0
    interleaved: bool = False
    groups: int = 0
    order: tuple[int, ...] = ()
    tiled: bool = False
    cut_anywhere: bool = False
    rope_pairs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NameTable:
    """Names of one checkpoint format for one family.

    entries: canonical template -> stored name or Stored; a fused parameter may be listed whole, by its parts,
    or both, and the checkpoint decides. base_prefix: checkpoints of the bare backbone lack it. ignore: regular
    expressions of names, renamed if need be, that carry nothing we need (buffers, a copy of a tied head).
    layers_of_one: so many layers are one of the checkpoint's, whose number `{i}` is then; `{k}` is which of them.
    adds_one: the file holds plus_one norms with the one already added (GGUF). renames: (regular expression,
    replacement) pairs that turn the stored names of older files into those of the entries.
    """

    entries: Mapping[str, str | Stored]
    layers_of_one: int = 1
    base_prefix: str = "model."
    ignore: tuple[str, ...] = field(default=(r"rotary_emb\.inv_freq$",))
    adds_one: bool = False
    renames: tuple[tuple[str, str], ...] = ()

    def entry(self, canonical: str) -> Stored | None:
        """The entry for a canonical name, with its indices filled in."""
        indices = INDEX.findall(canonical)
        entry = self.entries.get(canonical)
        if entry is None:
            places = iter("ij")
            entry = self.entries.get(INDEX.sub(lambda _: f"{{{next(places, '')}}}", canonical))
        if entry is None:
            return None
        stored = entry if isinstance(entry, Stored) else Stored(name=entry)
        names = (stored.name, stored.scaled_by, *stored.also)
        if indices and self.layers_of_one > 1:
            layer, which = divmod(int(indices[0]), self.layers_of_one)
            indices[0], names = str(layer), tuple(name.replace("{k}", str(which)) for name in names)
        for place, index in zip("ij", indices, strict=False):
            names = tuple(name.replace(f"{{{place}}}", index) for name in names)
        return replace(
            stored, name=names[0], scaled_by=names[1], also=names[2:]
        )  # copies are of embeddings, which no layer has
