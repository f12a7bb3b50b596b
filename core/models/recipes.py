"""Families as data: a recipe says how a family's config is read, and what sets it apart from those read alike."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..weights.names import NameTable, Stored
from .config import NOTHING, HFConfig, read_all
from .llama_like import llama_like
from .name_tables import llama_names
from .spec import ModelSpec

_SPELLED_BOTH = frozenset({"num_attention_heads", "num_experts_per_tok", "sliding_window"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A family as an entry of a table."""

    to_spec: Callable[[HFConfig], ModelSpec]
    names: Callable[[], NameTable]


def recipe(
    reader: Callable[..., ModelSpec] = llama_like,
    *,
    keys: Mapping[str, str] = NOTHING,
    defaults: Mapping[str, Any] = NOTHING,
    fixed: Mapping[str, Any] = NOTHING,
    names: Mapping[str, str | Stored] | Callable[[], NameTable] = NOTHING,
    tensors: Mapping[str, str | Stored] = NOTHING,
    ignore: tuple[str, ...] = (),
    renames: tuple[tuple[str, str], ...] = (),
    **options: Any,
) -> Recipe:
    """The family that `reader` makes of its configs with these options.

    keys: Llama's keys of config.json -> those that this family's files have, which count where a file has both, but
    for some that transformers spells in both ways. defaults: what its config class assumes where a file leaves a key
    out, fixed: what holds whatever a file says, values or functions of the config. names, tensors, ignore, renames:
    what differs from Llama's names, as `llama_names` takes it; or a function that makes the table.
    """

    def to_spec(config: HFConfig) -> ModelSpec:
        config = config.alias(**{k: v for k, v in keys.items() if k not in _SPELLED_BOTH or config.get(k) is None})
        if "num_local_experts" in config and config.get("num_experts") is None:
            config = config.alias(num_experts="num_local_experts")
        config = config.with_defaults(**read_all(defaults, config))
        return reader(config.replace(**read_all(fixed, config)), **options)

    table = names if callable(names) else partial(llama_names, names, tensors=tensors, ignore=ignore, renames=renames)
    return Recipe(to_spec=to_spec, names=table)
