"""The table of ops that a forward function calls, and the choice of a provider for each op."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, PluginError, Unsupported
from ..platform import OpContext, OpProvider
from ..suggest import did_you_mean
from . import attention, elementwise, moe, norm, packed, ragged, rope, sampling, state, transfer
from .drift import adapt

DEFINITION = "definition"
"""The provider that stands behind all others: core/ops itself."""

FAMILIES: dict[str, tuple[str, ...]] = {
    "packed weights": ("pack_linear", "linear", "embedding"),
    "stacked weights": ("pack_stacked", "grouped_experts", "absorb_keys", "expand_values"),
    "kv cache": ("new_kv_cache", "write_kv", "paged_attention"),
    "states": ("new_state", "causal_conv", "selective_scan", "gated_delta", "wkv"),
}
"""Ops that share a memory layout: one provider serves all of a family or none of it."""


class OpTable:
    """The op set, closed: one line an op. An instance holds the implementations chosen for one model.

    The class attributes are the definitions, so that their signatures are this table's types.
    """

    # packed weights
    pack_linear = staticmethod(packed.pack_linear)
    linear = staticmethod(packed.linear)
    embedding = staticmethod(packed.embedding)
    # stacked weights: experts and heads
    pack_stacked = staticmethod(moe.pack_stacked)
    route_experts = staticmethod(moe.route_experts)
    part_identities = staticmethod(moe.part_identities)
    grouped_experts = staticmethod(moe.grouped_experts)
    absorb_keys = staticmethod(moe.absorb_keys)
    expand_values = staticmethod(moe.expand_values)
    # norms
    rms_norm = staticmethod(norm.rms_norm)
    add_rms_norm = staticmethod(norm.add_rms_norm)
    layer_norm = staticmethod(norm.layer_norm)
    magnitude = staticmethod(norm.magnitude)
    # rope
    rotary_angles = staticmethod(rope.rotary_angles)
    rope = staticmethod(rope.rope)
    # kv cache
    new_kv_cache = staticmethod(attention.new_kv_cache)
    write_kv = staticmethod(attention.write_kv)
    paged_attention = staticmethod(attention.paged_attention)
    # states
    new_state = staticmethod(state.new_state)
    causal_conv = staticmethod(state.causal_conv)
    selective_scan = staticmethod(state.selective_scan)
    gated_delta = staticmethod(state.gated_delta)
    wkv = staticmethod(state.wkv)
    lru_inputs = staticmethod(state.lru_inputs)
    # whole requests
    encoder_attention = staticmethod(ragged.encoder_attention)
    mean_rows = staticmethod(ragged.mean_rows)
    stack_rows = staticmethod(ragged.stack_rows)
    store_rows = staticmethod(ragged.store_rows)
    place_rows = staticmethod(ragged.place_rows)
    # elementwise and shapes
    add = staticmethod(elementwise.add)
    scale = staticmethod(elementwise.scale)
    softcap = staticmethod(elementwise.softcap)
    act = staticmethod(elementwise.act)
    act_mul = staticmethod(elementwise.act_mul)
    gate = staticmethod(elementwise.gate)
    xielu = staticmethod(elementwise.xielu)
    mul = staticmethod(elementwise.mul)
    clamp = staticmethod(elementwise.clamp)
    log_growth = staticmethod(elementwise.log_growth)
    concat = staticmethod(elementwise.concat)
    split = staticmethod(elementwise.split)
    split_heads = staticmethod(elementwise.split_heads)
    merge_heads = staticmethod(elementwise.merge_heads)
    gather = staticmethod(elementwise.gather)
    cast = staticmethod(elementwise.cast)
    # sampling
    apply_token_mask = staticmethod(sampling.apply_token_mask)
    add_logit_bias = staticmethod(sampling.add_logit_bias)
    apply_penalties = staticmethod(sampling.apply_penalties)
    logprobs = staticmethod(sampling.logprobs)
    sample = staticmethod(sampling.sample)
    # transfer
    upload = staticmethod(transfer.upload)
    to_device = staticmethod(transfer.to_device)
    to_host = staticmethod(transfer.to_host)
    remember_tokens = staticmethod(transfer.remember_tokens)
    recall_tokens = staticmethod(transfer.recall_tokens)

    def __init__(self, overrides: dict[str, Callable[..., Any]] | None = None) -> None:
        for name, implementation in (overrides or {}).items():
            assert name in op_names(), name
            setattr(self, name, implementation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Who serves one op, and why each better candidate declined."""

    op: str
    provider: str
    declined: tuple[tuple[str, str], ...] = ()


def op_names() -> tuple[str, ...]:
    """All ops, in the order of the table."""
    return tuple(name for name, value in vars(OpTable).items() if isinstance(value, staticmethod))


def select_ops(
    providers: Iterable[OpProvider], context: OpContext, *, last_resort: str = DEFINITION, wishes: str = ""
) -> tuple[OpTable, tuple[Selection, ...]]:
    """Choose a provider for each op: the highest priority that does not decline; families go together.

    last_resort names the definitions in the report. wishes: the option op_providers; names of those that come first
    and may not decline, and with - before them of those that are left out. Raises PluginError if a provider names an
    unknown op, ConfigError for a wish that names none, Unsupported if a wished one declines.
    """
    found = list(providers)
    insisted, left_out = read_wishes(wishes, [provider.name for provider in found])
    ranked = sorted(
        (provider for provider in found if provider.name not in left_out),
        key=lambda provider: (provider.name not in insisted, -provider.priority),
    )
    for provider in ranked:
        for name in provider.ops:
            if name not in op_names():
                raise PluginError(
                    f"op provider {provider.name!r} brings an unknown op {name!r}{did_you_mean(name, op_names())}"
                )
    overrides: dict[str, Callable[..., Any]] = {}
    report: dict[str, Selection] = {}
    for unit in _units():
        chosen, declined = _choose(unit, ranked, context)
        for name, reason in declined:
            if name in insisted:
                raise Unsupported(
                    f"op provider {name} cannot serve {', '.join(unit)}: {reason}",
                    remedies=[f"op_providers without {name}", "headrace doctor --ops"],
                )
        for op in unit:
            if chosen is not None:
                overrides[op] = adapt(op, chosen.name, chosen.ops[op], getattr(OpTable, op))
            report[op] = Selection(op=op, provider=chosen.name if chosen else last_resort, declined=declined)
    return OpTable(overrides), tuple(report[op] for op in op_names())


def read_wishes(wishes: str, known: Sequence[str]) -> tuple[frozenset[str], frozenset[str]]:
    """Of the option op_providers: the names that are insisted on, and those that are left out.

    known: what is offered. Raises ConfigError for a name that is not, or that is both.
    """
    names = [wish.strip() for wish in wishes.split(",") if wish.strip()]
    for wish in names:
        if wish.removeprefix("-") not in known:
            raise ConfigError(
                f"op_providers names {wish.removeprefix('-')!r}, which is not offered for this device"
                f"{did_you_mean(wish.removeprefix('-'), known)}; offered are {', '.join(known) or 'none'}",
                remedies=["headrace doctor --ops"],
            )
    insisted = frozenset(wish for wish in names if not wish.startswith("-"))
    left_out = frozenset(wish.removeprefix("-") for wish in names if wish.startswith("-"))
    if both := insisted & left_out:
        raise ConfigError(f"op_providers insists on {', '.join(sorted(both))}, and leaves it out")
    return insisted, left_out


def _units() -> list[tuple[str, ...]]:
    grouped = {op for family in FAMILIES.values() for op in family}
    return [*FAMILIES.values(), *((op,) for op in op_names() if op not in grouped)]


def _choose(
    unit: tuple[str, ...], ranked: Sequence[OpProvider], context: OpContext
) -> tuple[OpProvider | None, tuple[tuple[str, str], ...]]:
    declined: list[tuple[str, str]] = []
    for provider in ranked:
        offered = [op for op in unit if op in provider.ops]
        if not offered:
            continue
        missing = [op for op in unit if op not in provider.ops]
        reason = f"brings no {', '.join(missing)}, which share a layout with it" if missing else ""
        if not reason and "new_kv_cache" in unit and context.kv_dtype and context.kv_dtype not in provider.kv_dtypes:
            reason = f"has no KV cache of {context.kv_dtype}"
        reason = reason or next((text for op in unit if (text := provider.declines(op, context))), "")
        if not reason:
            return provider, tuple(declined)
        declined.append((provider.name, reason))
    return None, tuple(declined)
