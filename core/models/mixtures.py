"""What mixtures of experts share: the spec of experts read from a config, and the layers that have them."""

import dataclasses
from typing import Any

from ..errors import ModelError
from .config import HFConfig, Read, read_all
from .llama_like import read_activation
from .spec import MlpSpec, MoeSpec


def read_experts(config: HFConfig, *, size: str = "moe_intermediate_size", **changes: Any) -> MoeSpec:
    """Experts of a config that says num_experts and num_experts_per_tok. Raises ModelError.

    size: the key of one expert's intermediate size; changes: other fields of MoeSpec, values or functions of the
    config. A shared block has the experts' activation.
    """
    if config.get("num_experts") is None:
        config = config.alias(num_experts="num_local_experts")
    config = config.with_defaults(hidden_act="silu")
    num_experts, per_token = config.size("num_experts"), config.size("num_experts_per_tok")
    if per_token > num_experts:
        raise ModelError(
            f"num_experts_per_tok ({per_token}) in {config.file} is more than the number of experts ({num_experts})"
        )
    moe = MoeSpec(
        num_experts=num_experts,
        num_experts_per_token=per_token,
        intermediate_size=config.size(size),
        activation=read_activation(config, "hidden_act"),
        **read_all(changes, config),
    )
    shared = moe.shared and dataclasses.replace(moe.shared, activation=moe.activation)
    return dataclasses.replace(moe, shared=shared)


def read_deepseek_experts(config: HFConfig, **changes: Any) -> MoeSpec:
    """Experts as DeepSeek-V3 and its descendants have them: sigmoid scores, a correction, groups, shared experts."""
    config = config.alias(num_experts="n_routed_experts").with_defaults(hidden_act="silu")
    size, num_shared = config.size("moe_intermediate_size"), config.integer("n_shared_experts", 0, null=0)
    moe = read_experts(
        config,
        score="sigmoid",
        has_correction=True,
        renormalize=config.boolean("norm_topk_prob", True),
        weight_scale=config.number("routed_scaling_factor", 1.0),
        num_groups=config.integer("n_group", 1, null=1),
        num_groups_per_token=config.integer("topk_group", 1, null=1),
        shared=MlpSpec(intermediate_size=size * num_shared) if num_shared else None,
    )
    moe = dataclasses.replace(moe, **read_all(changes, config))
    groups, kept = moe.num_groups, moe.num_groups_per_token
    if not groups or moe.num_experts % groups or not 0 < kept <= groups:
        raise ModelError(
            f"{config.file} cannot choose from {kept} of {groups} groups (n_group, topk_group) of "
            f"{moe.num_experts} experts"
        )
    return moe


def read_biased_experts(config: HFConfig, **changes: Any) -> MoeSpec:
    """The same, with biases on the shared experts' projections if `mlp_bias`."""
    moe = read_deepseek_experts(config, **changes)
    bias = config.boolean("mlp_bias", False)
    return dataclasses.replace(moe, shared=moe.shared and dataclasses.replace(moe.shared, bias=bias))


def read_shared(config: HFConfig, *, renormalize: Read[bool]) -> MoeSpec:
    """Experts beside a gated shared one, as Qwen has them; one of size 0 is none, though its gate is stored."""
    size = config.integer("shared_expert_intermediate_size")
    shared = MlpSpec(intermediate_size=size) if size else None
    return read_experts(config, renormalize=renormalize, shared_gated=True, shared=shared)


def sparse_after(config: HFConfig, key: str = "first_k_dense_replace", default: int = 0) -> list[bool]:
    """Which layers have experts: all but the first so many as `key` says."""
    first = config.integer(key, default)
    return [i >= first for i in range(config.num_layers())]


def sparse_layers(config: HFConfig, default: int = 0) -> list[bool]:
    """Likewise, or as `mlp_layer_types` lists."""
    num_layers, listed = config.num_layers(), config.texts("mlp_layer_types")
    if listed and len(listed) != num_layers:
        raise ModelError(f"{config.file} has {num_layers} layers, but mlp_layer_types names {len(listed)}")
    return [kind == "sparse" for kind in listed] or sparse_after(config, default=default)


def sparse_steps(config: HFConfig) -> list[bool]:
    """Which layers of a Qwen have experts: each `decoder_sparse_step`-th that `mlp_only_layers` does not hold."""
    step, dense = config.size("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    if not isinstance(dense, list | tuple):
        raise ModelError(f"mlp_only_layers in {config.file} must be a list of layers, got {dense!r}")
    return [i not in dense and (i + 1) % step == 0 for i in range(config.num_layers())]
